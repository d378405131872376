"""Calibration: from timed messages, sums and computes to a machine's constants, with the error of each fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.profile.pace import FACT, RunPace
from gems.profile.store import is_fake, known_pace, read_document
from gems.schedule.costs import Network
from gems.schedule.replicas import all_reduce

SCHEMA = "gems.calibration/1"
NORMAL_IQR = 1.349  # the middle half of a normal distribution, in standard deviations
LEVELS = ("link", "node")
COPIES = ("d2h_bytes_per_s", "h2d_bytes_per_s")
MAX_NOISE = 0.5  # that machine.noise takes
MAX_BYTES_PER_S = 1e15
MIN_FACTOR = 1e-6  # of a pace, which is above 0
# how many times the simulation of layers measured alone real steps of two ranks took
# (docs/benchmarks/fidelity.md)
UNCALIBRATED = (1.0, 2.4)


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link as `latency_s` + bytes / `bytes_per_s`.

    `error` is the median relative error over its timings, of 1.
    """

    latency_s: float
    bytes_per_s: float
    error: float

    def time_s(self, num_bytes: float) -> float:
        """Return the time of a message."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """What probes of a machine say.

    Attributes:
        links: the fit of each level: link (between nodes, or anywhere where nodes are not told
            apart), node.
        noise: relative standard deviation of a rank's compute.
        all_reduce_error: median relative error of all-reduces that the links predict, of 1; None
            where none were timed.
        d2h_bytes_per_s, h2d_bytes_per_s: rates of the copy engines; None without a GPU.
        ranks_per_node: where ranks of several nodes took part.
        pace: how much longer layers take in a run than alone; None where no run told.
    """

    links: Mapping[str, LinkFit]
    noise: float
    all_reduce_error: float | None = None
    d2h_bytes_per_s: float | None = None
    h2d_bytes_per_s: float | None = None
    ranks_per_node: int | None = None
    pace: RunPace | None = None

    def machine(self) -> dict[str, float | int]:
        """Return the keys of `machine` that this calibration settles."""
        values: dict[str, float | int | None] = {}
        for level, fit in self.links.items():
            values |= {f"{level}_latency_s": fit.latency_s, f"{level}_bytes_per_s": fit.bytes_per_s}
        values |= {name: getattr(self, name) for name in ("noise", "ranks_per_node", *COPIES)}
        if self.pace is not None:
            values |= {"pace_factor": self.pace.factor, "pace_pass_s": self.pace.pass_s}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def network(self) -> Network:
        """The links, in seconds."""
        link = self.links["link"]
        node = self.links.get("node")
        inside = (0.0, 0.0) if node is None else (node.latency_s, 1 / node.bytes_per_s)
        return Network(link.latency_s, 1 / link.bytes_per_s, self.ranks_per_node, *inside)


def fit_link(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> LinkFit:
    """Fit latency and bandwidth by least squares of relative errors, so that small messages count as large ones do.

    Where the best line would have a negative latency or rate, that one is 0 (or as good as free)
    and the other alone is fitted.

    Raises:
        ConfigError: fewer than two different sizes, or times that are not above 0.
    """
    sizes = np.asarray(sizes_bytes, float)
    times = np.asarray(times_s, float)
    if len(set(sizes.tolist())) < 2 or len(sizes) != len(times) or not (times > 0).all():
        raise ConfigError(
            "calibration",
            f"{len(sizes)} timings",
            "must be messages of two sizes or more, with times above 0",
        )
    columns = np.stack([1 / times, sizes / times], axis=1)
    best, *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    latency_s, per_byte = (float(value) for value in best)
    alone = [float(value) for value in columns.sum(axis=0) / (columns**2).sum(axis=0)]
    if latency_s < 0:
        latency_s = 0.0
        per_byte = alone[1]
    elif per_byte < 1 / MAX_BYTES_PER_S:
        latency_s = alone[0]
        per_byte = 1 / MAX_BYTES_PER_S
    predicted = latency_s + per_byte * sizes
    return LinkFit(latency_s, 1 / per_byte, float(np.median(np.abs(predicted / times - 1))))


def fit_pace(
    alone_s: Sequence[float], passes: Sequence[float], steps_s: Sequence[float]
) -> RunPace:
    """Fit the pace to steps that took `steps_s`, by what their layers take alone and the passes of layers in them.

    By least squares of relative errors. The host's time is not below 0, nor the factor below 0.

    Raises:
        ConfigError: no steps, or times that are not above 0.
    """
    alone, count, steps = (np.asarray(values, float) for values in (alone_s, passes, steps_s))
    if not len(steps) or not (alone > 0).all() or not (steps > 0).all():
        raise ConfigError(
            "calibration", f"{len(steps)} runs", "must be one or more, with times above 0"
        )
    columns = np.stack([alone / steps, count / steps], axis=1)
    factor, pass_s = (
        float(value) for value in np.linalg.lstsq(columns, np.ones(len(steps)), rcond=None)[0]
    )
    only = [
        float(value) for value in columns.sum(axis=0) / np.maximum((columns**2).sum(axis=0), 1e-300)
    ]
    if pass_s < 0:
        return RunPace(only[0], 0.0)
    return RunPace(factor, pass_s) if factor > 0 else RunPace(MIN_FACTOR, only[1])


@dataclass(frozen=True, slots=True)
class Confidence:
    """What is known of a real step beside its simulation.

    `band` are factors of its time, None if not known.
    """

    is_calibrated: bool
    band: tuple[float, float] | None
    words: str

    def range_s(self, step_s: float) -> tuple[float, float] | None:
        """Return the shortest and the longest time that a step of this simulated time is likely to take."""
        return None if self.band is None else (self.band[0] * step_s, self.band[1] * step_s)


def confidence_of(spec: RunSpec) -> Confidence:
    """Return how far a prediction of a resolved run's step by its layers can be trusted.

    With a known pace it is calibrated. Layers that were measured alone give a band. Of those on
    fake tensors only the rates of the machine are known, and no run has shown how far they are off.
    """
    path = spec.profile.path
    pace = known_pace(spec)
    profile = None if path is None else read_document(Path(path))
    is_measured = not is_fake(spec.profile) if profile is None else profile.source == "measured"
    device = "" if profile is None else f" on {profile.device}"
    if not is_measured:
        rates = (
            f"the rates of machine={spec.machine.name}"
            if path is None
            else f"a profile on fake tensors{device}"
        )
        return Confidence(
            False,
            None,
            f"by {rates}, not compared with any run (profile=measured would time layers)",
        )
    if pace is not None or (profile is not None and FACT in profile.facts):
        return Confidence(True, None, "calibrated by runs on this machine")
    low, high = UNCALIBRATED
    alone = f"{low:g} to {high:g} times what its layers take alone{device}"
    words = f"not calibrated for this machine: {alone} (make calibrate)"
    return Confidence(False, UNCALIBRATED, words)


def noise_of(times_s: np.ndarray) -> float:
    """Return the relative standard deviation of computes that should take equally long, repetitions x ranks.

    It is by the middle half of each rank's times, so that a few interruptions do not count; the
    median over ranks.

    Raises:
        ConfigError: fewer than four repetitions.
    """
    if len(times_s) < 4:
        raise ConfigError(
            "calibration", f"{len(times_s)} repetitions", "must be four or more to tell noise"
        )
    low, middle, high = np.quantile(times_s, [0.25, 0.5, 0.75], axis=0)
    return float(np.median((high - low) / NORMAL_IQR / middle))


def calibration_of(probe: Mapping[str, Any]) -> Calibration:
    """Return the calibration of what `gems.engine.transport.speed_probe` wrote.

    Of one node alone its links stand for all links. Emulated compute is a timed wait, which has no
    noise.

    Raises:
        ConfigError: another schema, or too few timings.
    """
    if probe.get("schema") != SCHEMA:
        raise ConfigError(
            "calibration",
            probe.get("schema"),
            f"must be {SCHEMA}",
            "probe again, with this version",
        )
    messages: Mapping[str, Any] = probe["messages"]
    links = {
        level: fit_link(messages[level]["bytes"], messages[level]["s"])
        for level in LEVELS
        if level in messages
    }
    if "link" not in links:
        links = {"link": links["node"]}
    copies: Mapping[str, float] = probe.get("copies") or {}
    noise = (
        0.0 if probe.get("kind") == "emulated" else noise_of(np.asarray(probe["computes_s"], float))
    )
    ranks_per_node = probe.get("ranks_per_node") if "node" in links else None
    out, back = (copies.get(name) for name in COPIES)
    found = Calibration(
        links, noise, d2h_bytes_per_s=out, h2d_bytes_per_s=back, ranks_per_node=ranks_per_node
    )
    sums: Mapping[str, Any] = probe.get("sums") or {}
    if not sums:
        return found
    group = range(int(sums["ranks"]))
    errors = [
        abs(all_reduce(found.network, group, float(size)).time / time_s - 1)
        for size, time_s in zip(sums["bytes"], sums["s"], strict=True)
    ]
    return replace(found, all_reduce_error=float(np.median(errors)))


def merged(found: Calibration, noises: Sequence[float], pace: RunPace | None = None) -> Calibration:
    """Return the calibration with the noise that runs showed, where they are given (the median of them), and a pace."""
    return replace(found, noise=float(np.median(noises)) if noises else found.noise, pace=pace)


def machine_yaml(
    found: Calibration,
    name: str,
    kind: str,
    device: str,
    origin: str,
    comments: Sequence[str] = (),
    base: str | None = None,
    held_out_error: float | None = None,
) -> str:
    """Return the text of a machine's file, for conf/machine/ or the folder machine/ of one that --config-dir names.

    `origin` says what it was measured on; `comments` are lines more that head it. With `base` the
    rest is that machine's. A noise above what predictions take, on a machine that others use too,
    is cut to that.
    """
    notes = [f"Calibrated: {origin}", *comments]
    notes += [
        f"{level}: {fit.latency_s:.3g} s and {fit.bytes_per_s:.3g} bytes/s, median error of the fit"
        f" {fit.error:.1%}"
        for level, fit in found.links.items()
    ]
    if found.all_reduce_error is not None:
        notes.append(
            f"all-reduces that these links predict are off by {found.all_reduce_error:.0%} (median)"
        )
    if found.pace is not None:
        notes.append("pace: how much longer layers take in a run of two ranks than alone")
    if found.noise > MAX_NOISE:
        notes.append(
            f"compute varied by {found.noise:.0%}, of which {MAX_NOISE:.0%} is kept: calibrate on a"
            " quiet machine"
        )
    lines = [f"# {note}" for note in notes]
    lines += [] if base is None else ["defaults:", f"  - {base}", "  - _self_"]
    lines += [f"name: {name}", f"kind: {kind}", f"device: {device}"]
    values = found.machine() | {"noise": min(found.noise, MAX_NOISE)}
    lines += [
        f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}"
        for key, value in values.items()
    ]
    lines.append(f'calibrated_from: "{origin}"')
    lines += [] if held_out_error is None else [f"held_out_error: {held_out_error:.4g}"]
    return "\n".join(lines) + "\n"
