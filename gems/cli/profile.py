"""`gems profile`: takes or reads the profile of the configured model and prints its layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gems.cli.framework import Options, print_json
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.profile import LayerProfile, ModelProfile
from gems.profile.spans import Spans
from gems.profile.store import profile_of, read_document
from gems.utils.units import format_bytes

_HEAD = (
    f"{'layer':<24}{'kind':<12}{'F ms':>10}{'I ms':>10}{'W ms':>10}{'params MB':>11}{'stash MB':>11}"
    f"{'output MB':>11}{'workspace MB':>14}"
)
_MEGA = 1e6


def show_profile(spec: RunSpec, options: Options) -> int:
    """Print the profile: a table, or with --json the document that `profile.path` reads.

    With --from FILE,FILE,... it is extrapolated to the run's shape from profiles at others; with --hdf5 FILE it is
    written there too.
    """
    if "--from" in options.chosen:
        points = [read_document(Path(path)) for path in options.chosen["--from"].split(",")]
        profile = extrapolated(spec, points)
    else:
        profile = profile_of(replace(spec, profile=replace(spec.profile, whole_model_peak=True)))
    if "--hdf5" in options.chosen:
        _write_hdf5(profile, Path(options.chosen["--hdf5"]))
    if options.json:
        composed = whole_peak_bytes(profile)
        peaks = {"peak_bytes": profile.facts.get("peak_bytes", composed), "composed_peak_bytes": composed}
        print_json({**profile.to_json(), **peaks, **_totals(profile)})
        return 0
    print("\n".join(table(profile)))
    return 0


def extrapolated(spec: RunSpec, points: Sequence[ModelProfile]) -> ModelProfile:
    """Return the profile at a run's resolution and micro-batch, from profiles of its model at others.

    Raises:
        ConfigError: fewer than two sizes, or points of different models.
    """
    from gems.profile.scaling import extrapolate

    data = spec.data
    found = extrapolate(points, data.height_px, data.width_px, spec.parallel.micro_batch_size)
    error = found.facts["error"]
    said = "not known: it takes three sizes" if error is None else (
        f"at most {100 * error['time_s']:.1f} % of time and {100 * error['stash_bytes']:.1f} % of bytes "
        "at the points themselves"
    )  # fmt: skip
    print(f"gems: extrapolated from {len(points)} profiles; error {said}", file=sys.stderr)
    return found


def _write_hdf5(profile: ModelProfile, path: Path) -> None:
    import h5py

    from gems.profile.hdf5 import write_profile

    try:
        with h5py.File(path, "w") as file:
            write_profile(file.create_group("profile"), profile)
    except OSError as error:
        raise ConfigError("--hdf5", path, f"cannot be written ({error.strerror or error})") from error


def whole_peak_bytes(profile: ModelProfile) -> int:
    """Return what the unsplit model holds at most on one device for one micro-batch, by the sum over its layers.

    Parameters and their gradients, buffers, images, activations, transient tensors; the optimizer's state is not in it.
    """
    spans, end = Spans(profile), profile.num_layers
    moving = max(spans.forward_peak[0, end], spans.backward_peak[0, end])
    return int(2 * spans.params[0, end] + spans.buffers[0, end] + profile.input_bytes + moving)


def table(profile: ModelProfile) -> Iterator[str]:
    """Yield the lines of the table: a row a layer, their sums, the peaks of the whole."""
    yield (
        f"{profile.model}: {profile.micro_batch_size} x {profile.height_px} x {profile.width_px} px, {profile.dtype}, "
        f"{profile.source} on {profile.device}"
    )
    yield _HEAD
    for layer in profile.layers:
        yield _row(layer)
    totals = _totals(profile)
    yield (
        f"{'all':<36}{1e3 * totals['forward_s']:>10.3f}{1e3 * totals['input_grad_s']:>10.3f}"
        f"{1e3 * totals['weight_grad_s']:>10.3f}{totals['param_bytes'] / _MEGA:>11.2f}"
        f"{totals['stash_bytes'] / _MEGA:>11.2f}"
    )
    yield f"peak of the whole on one device: {format_bytes(whole_peak_bytes(profile))}, summed up from the layers"
    if "peak_bytes" in profile.facts:
        yield (
            f"peak of the whole on one device: {format_bytes(profile.facts['peak_bytes'])}, "
            "of the unsplit model under torch's tracker"
        )


def _row(layer: LayerProfile) -> str:
    made = layer.stash_bytes + sum(num_bytes for _, num_bytes in layer.saved_later)
    return (
        f"{layer.name[:23]:<24}{layer.kind[:11]:<12}{1e3 * layer.forward_s:>10.3f}{1e3 * layer.input_grad_s:>10.3f}"
        f"{1e3 * layer.weight_grad_s:>10.3f}{layer.param_bytes / _MEGA:>11.2f}{made / _MEGA:>11.2f}"
        f"{layer.output_bytes / _MEGA:>11.2f}{layer.workspace_bytes / _MEGA:>14.2f}"
    )


def _totals(profile: ModelProfile) -> dict[str, float]:
    """Return the sums over all layers; the stash is that of the whole, each storage once."""
    names = ("forward_s", "input_grad_s", "weight_grad_s", "recompute_s", "param_bytes")
    sums = {name: sum(getattr(layer, name) for layer in profile.layers) for name in names}
    return {**sums, "stash_bytes": int(Spans(profile).stash[0, profile.num_layers])}
