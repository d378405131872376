"""`gems profile`: takes or reads the profile of the configured model and prints its layers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gems.cli.framework import Options, print_json
from gems.config.schema import DataConfig, RunSpec
from gems.errors import ConfigError
from gems.profile import ModelProfile
from gems.profile.spans import Spans
from gems.profile.store import profile_alone, read_document
from gems.profile.subject import Subject
from gems.utils.tables import Cell, table
from gems.utils.units import format_bytes, format_size

COLUMNS = {
    "layer": "",
    "kind": "",
    "F [ms]": ".3f",
    "I [ms]": ".3f",
    "W [ms]": ".3f",
    "params [MB]": ".2f",
    "stash [MB]": ".2f",
    "output [MB]": ".2f",
    "workspace [MB]": ".2f",
}


def show_profile(spec: RunSpec, options: Options) -> int:
    """Print the profile: a table, or with --json the document that `profile.path` reads.

    With --from FILE,FILE,... it is extrapolated to the run's shape from profiles at others; with
    --hdf5 FILE it is written there too.
    """
    if "--from" in options.chosen:
        points = [read_document(Path(path)) for path in options.chosen["--from"].split(",")]
        profile = extrapolated(spec.data, spec.parallel.micro_batch_size, points)
    else:
        profile = profile_alone(
            Subject.of(replace(spec, profile=replace(spec.profile, whole_model_peak=True)))
        )
    if "--hdf5" in options.chosen:
        _write_hdf5(profile, Path(options.chosen["--hdf5"]))
    if options.json:
        composed = whole_peak_bytes(profile)
        peaks = {
            "peak_bytes": profile.facts.get("peak_bytes", composed),
            "composed_peak_bytes": composed,
        }
        print_json({**profile.to_json(), **peaks, **_totals(profile)})
        return 0
    print(_table(profile))
    return 0


def extrapolated(data: DataConfig, size: int, points: Sequence[ModelProfile]) -> ModelProfile:
    """Return the profile at a run's resolution and micro-batch, from profiles of its model at others.

    Raises:
        ConfigError: Fewer than two sizes, or points of different models.
    """
    from gems.profile.scaling import extrapolate

    profile = extrapolate(points, data.sides, size)
    error = profile.facts["error"]
    said = (
        "not known: it takes three sizes"
        if error is None
        else (
            f"at most {100 * error['time_s']:.1f} % of time and {100 * error['stash_bytes']:.1f} %"
            " of bytes at the points themselves"
        )
    )
    print(f"gems: extrapolated from {len(points)} profiles; error {said}", file=sys.stderr)
    return profile


def _write_hdf5(profile: ModelProfile, path: Path) -> None:
    import h5py

    from gems.profile.hdf5 import write_profile

    try:
        with h5py.File(path, "w") as file:
            write_profile(file.create_group("profile"), profile)
    except OSError as error:
        raise ConfigError(
            "--hdf5", path, f"cannot be written ({error.strerror or error})"
        ) from error


def whole_peak_bytes(profile: ModelProfile) -> int:
    """Return the peak bytes of the unsplit model on one device for one micro-batch.

    The sum over its layers has parameters, their gradients, buffers, images, activations and
    transient tensors, but no optimizer state.
    """
    spans = Spans(profile)
    end = profile.num_layers
    moving = max(spans.forward_peak[0, end], spans.backward_peak[0, end])
    return int(2 * spans.params[0, end] + spans.buffers[0, end] + profile.input_bytes + moving)


def _table(profile: ModelProfile) -> str:
    head = (
        f"{profile.model}: {profile.micro_batch_size} x {format_size(profile.sides, ' x ')}"
        f" px, {profile.dtype}, {profile.source} on {profile.device}"
    )
    rows = [
        _row(
            layer.name[:23],
            layer.kind[:11],
            (layer.forward_s, layer.input_grad_s, layer.weight_grad_s),
            (
                layer.param_bytes,
                layer.stash_bytes + sum(num_bytes for _, num_bytes in layer.saved_later),
                layer.output_bytes,
                layer.workspace_bytes,
            ),
        )
        for layer in profile.layers
    ]
    totals = _totals(profile)
    times_s = (totals["forward_s"], totals["input_grad_s"], totals["weight_grad_s"])
    rows.append((*_row("all", "", times_s, (totals["param_bytes"], totals["stash_bytes"])), "", ""))
    peak = "peak of the whole on one device:"
    lines = [
        table(COLUMNS, rows, title=head),
        f"{peak} {format_bytes(whole_peak_bytes(profile))}, summed up from the layers",
    ]
    if "peak_bytes" in profile.facts:
        lines.append(
            f"{peak} {format_bytes(profile.facts['peak_bytes'])}, of the unsplit model under"
            " torch's tracker"
        )
    return "\n".join(lines)


def _row(
    name: str, kind: str, times_s: Iterable[float], sizes_bytes: Iterable[float]
) -> tuple[Cell, ...]:
    return name, kind, *(1e3 * time_s for time_s in times_s), *(size / 1e6 for size in sizes_bytes)


def _totals(profile: ModelProfile) -> dict[str, float]:
    """Return the sums over all layers; the stash is that of the whole, each storage once."""
    names = ("forward_s", "input_grad_s", "weight_grad_s", "recompute_s", "param_bytes")
    sums = {name: sum(getattr(layer, name) for layer in profile.layers) for name in names}
    return {**sums, "stash_bytes": int(Spans(profile).stash[0, profile.num_layers])}
