"""Calibration: fit a machine's constants to timed messages, sums and computes.

Each fit comes with its error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gems.errors import ConfigError
from gems.profile.pace import FACT, RunPace
from gems.profile.store import is_fake, known_pace, read_document
from gems.profile.subject import Subject
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
    """The fit of a link: a message takes `latency_s` + bytes / `bytes_per_s`.

    `error` is the median relative error over its timings, as a fraction of 1.
    """

    latency_s: float
    bytes_per_s: float
    error: float

    def time_s(self, num_bytes: float) -> float:
        """Return the time of a message."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """The constants that probes of a machine have found.

    Attributes:
        links: the fit of each level: link (between nodes, or everywhere if nodes are not
        distinguished), node.
        noise: relative standard deviation of a rank's compute.
        all_reduce_error: median relative error of all-reduces predicted from the links, as a
        fraction of 1; None if none were timed. d2h_bytes_per_s, h2d_bytes_per_s: rates of the copy
        engines; None without a GPU.
        ranks_per_node: the number of ranks per node, if ranks of several nodes took part.
        pace: how much longer layers take in a run than alone; None if no run has been measured.
    """

    links: Mapping[str, LinkFit]
    noise: float
    all_reduce_error: float | None = None
    d2h_bytes_per_s: float | None = None
    h2d_bytes_per_s: float | None = None
    ranks_per_node: int | None = None
    pace: RunPace | None = None

    def machine(self) -> dict[str, float | int]:
        """Return the keys of `machine` that this calibration determines."""
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
    """Fit latency and bandwidth by least squares of relative errors.

    Small messages therefore count as much as large ones. If the best line has a negative latency or
    rate, that value is set to 0 (or to practically free), and only the other is fitted.

    Raises:
        ConfigError: there are fewer than two different sizes, or times that are not above 0.
    """
    sizes = np.asarray(sizes_bytes, float)
    times = np.asarray(times_s, float)
    if len(set(sizes.tolist())) < 2 or len(sizes) != len(times) or not (times > 0).all():
        raise ConfigError(
            "calibration",
            f"{len(sizes)} timings",
            "must be messages of two sizes or more, with times above 0",
        )
    (latency_s, per_byte), alone = _fit_relative(np.ones(len(times)), sizes, times)
    if latency_s < 0:
        latency_s, per_byte = 0.0, alone[1]
    elif per_byte < 1 / MAX_BYTES_PER_S:
        latency_s, per_byte = alone[0], 1 / MAX_BYTES_PER_S
    predicted = latency_s + per_byte * sizes
    return LinkFit(latency_s, 1 / per_byte, float(np.median(np.abs(predicted / times - 1))))


def _fit_relative(
    first: np.ndarray, second: np.ndarray, times: np.ndarray
) -> tuple[list[float], list[float]]:
    """Fit times as a first x + b second; return a and b, and each of them if the other is 0.

    The sum of squares of relative errors is least, so that short times count as much as long ones.
    """
    columns = np.stack([first / times, second / times], axis=1)
    both = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0]
    alone = columns.sum(axis=0) / np.maximum((columns**2).sum(axis=0), 1e-300)
    return both.tolist(), alone.tolist()


def fit_pace(
    alone_s: Sequence[float], passes: Sequence[float], steps_s: Sequence[float]
) -> RunPace:
    """Fit the pace to the times of steps, by the times of their layers alone and their passes.

    `passes` counts the passes of layers in each step. The fit is by least squares of relative
    errors. Neither the host's time nor the factor is below 0.

    Raises:
        ConfigError: there are no steps, or times that are not above 0.
    """
    alone, count, steps = (np.asarray(values, float) for values in (alone_s, passes, steps_s))
    if not len(steps) or not (alone > 0).all() or not (steps > 0).all():
        raise ConfigError(
            "calibration", f"{len(steps)} runs", "must be one or more, with times above 0"
        )
    (factor, pass_s), only = _fit_relative(alone, count, steps)
    if pass_s < 0:
        return RunPace(only[0], 0.0)
    return RunPace(factor, pass_s) if factor > 0 else RunPace(MIN_FACTOR, only[1])


@dataclass(frozen=True, slots=True)
class Confidence:
    """The confidence in the simulated time of a step.

    `band` has the factors between which the time of a real step lies, None if unknown.
    """

    is_calibrated: bool
    band: tuple[float, float] | None
    words: str

    def range_s(self, step_s: float) -> tuple[float, float] | None:
        """Return the shortest and the longest likely time of a step of this simulated time."""
        return None if self.band is None else (self.band[0] * step_s, self.band[1] * step_s)


def confidence_of(subject: Subject) -> Confidence:
    """Return the confidence in a prediction of a step by its layers.

    With a known pace, it is calibrated. Layers that were measured alone give a band. For layers on
    fake tensors only the rates of the machine are known, and no run has shown the error.
    """
    path = subject.profile.path
    pace = known_pace(subject)
    profile = None if path is None else read_document(Path(path))
    is_measured = not is_fake(subject.profile) if profile is None else profile.source == "measured"
    device = "" if profile is None else f" on {profile.device}"
    if not is_measured:
        has_launches = path is None and subject.machine.launch_s is not None
        rates = (
            f"the rates{' and launch costs' if has_launches else ''} of machine={subject.machine.name}"
            if path is None
            else f"a profile on fake tensors{device}"
        )
        return Confidence(
            False,
            None,
            f"by {rates}, not compared with {'whole runs' if has_launches else 'any run'}"
            " (profile=measured would time layers)",
        )
    if pace is not None or (profile is not None and FACT in profile.facts):
        return Confidence(True, None, "calibrated by runs on this machine")
    low, high = UNCALIBRATED
    alone = f"{low:g} to {high:g} times what its layers take alone{device}"
    words = f"not calibrated for this machine: {alone} (make calibrate)"
    return Confidence(False, UNCALIBRATED, words)


def launch_words(subject: Subject) -> str | None:
    """Return in words the launch costs that predict a step, and their source.

    None if they are unknown, or if the profile is no roofline of this machine.
    """
    machine = subject.machine
    launch_s, channels = machine.launch_costs(
        subject.train.compute_dtype in ("bfloat16", "float16")
    )
    if launch_s is None or subject.profile.path is not None or not is_fake(subject.profile):
        return None
    host = (
        "none of the host (CUDA graphs)"
        if subject.replays_graphs
        else f"{launch_s * 1e6:.3g} us of the host"
    )
    return (
        f"an operator takes {host} and at least {machine.operator_s * 1e6:.3g} us of the device, at"
        f" {machine.operator_efficiency or machine.efficiency:.0%} of its rates, half of that of"
        f" memory with {channels:.3g} channels; {machine.launches_from or 'no source is given'}"
    )


def noise_of(times_s: np.ndarray) -> float:
    """Return the relative standard deviation of computes that should take equally long.

    `times_s` is an array of repetitions x ranks. The deviation is computed from the middle half of
    each rank's times, so that a few interruptions do not count; the result is the median over
    ranks.

    Raises:
        ConfigError: there are fewer than four repetitions.
    """
    if len(times_s) < 4:
        raise ConfigError(
            "calibration", f"{len(times_s)} repetitions", "must be four or more to tell noise"
        )
    low, middle, high = np.quantile(times_s, [0.25, 0.5, 0.75], axis=0)
    return float(np.median((high - low) / NORMAL_IQR / middle))


def calibration_of(probe: Mapping[str, Any]) -> Calibration:
    """Return the calibration for a result of `gems.engine.transport.speed_probe`.

    If only one node was probed, its links stand for all links. Emulated compute is a timed wait,
    which has no noise.

    Raises:
        ConfigError: the schema is another one, or there are too few timings.
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
    calibration = Calibration(
        links, noise, d2h_bytes_per_s=out, h2d_bytes_per_s=back, ranks_per_node=ranks_per_node
    )
    sums: Mapping[str, Any] = probe.get("sums") or {}
    if not sums:
        return calibration
    group = range(int(sums["ranks"]))
    errors = [
        abs(all_reduce(calibration.network, group, float(size)).time / time_s - 1)
        for size, time_s in zip(sums["bytes"], sums["s"], strict=True)
    ]
    return replace(calibration, all_reduce_error=float(np.median(errors)))


def merged(
    calibration: Calibration, noises: Sequence[float], pace: RunPace | None = None
) -> Calibration:
    """Return the calibration with the given pace and with the median noise of runs, if given."""
    return replace(
        calibration, noise=float(np.median(noises)) if noises else calibration.noise, pace=pace
    )


def machine_yaml(
    calibration: Calibration,
    name: str,
    kind: str,
    device: str,
    origin: str,
    comments: Sequence[str] = (),
    base: str | None = None,
    held_out_error: float | None = None,
) -> str:
    """Return the text of a machine's file.

    It belongs in conf/machine/, or in the folder machine/ of a folder given by --config-dir.
    `origin` names the source of the measurement; `comments` are additional lines at the top. With
    `base`, all other keys are those of that machine. Noise above the limit of predictions, as on a
    machine that others use too, is cut to that limit.
    """
    notes = [f"Calibrated: {origin}", *comments]
    notes += [
        f"{level}: {fit.latency_s:.3g} s and {fit.bytes_per_s:.3g} bytes/s, median error of the fit"
        f" {fit.error:.1%}"
        for level, fit in calibration.links.items()
    ]
    if calibration.all_reduce_error is not None:
        notes.append(
            f"all-reduces that these links predict are off by {calibration.all_reduce_error:.0%} (median)"
        )
    if calibration.pace is not None:
        notes.append("pace: how much longer layers take in a run of two ranks than alone")
    if calibration.noise > MAX_NOISE:
        notes.append(
            f"compute varied by {calibration.noise:.0%}, of which {MAX_NOISE:.0%} is kept: calibrate on a"
            " quiet machine"
        )
    lines = [f"# {note}" for note in notes]
    lines += [] if base is None else ["defaults:", f"  - {base}", "  - _self_"]
    lines += [f"name: {name}", f"kind: {kind}", f"device: {device}"]
    values = calibration.machine() | {"noise": min(calibration.noise, MAX_NOISE)}
    lines += [
        f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}"
        for key, value in values.items()
    ]
    lines.append(f'calibrated_from: "{origin}"')
    lines += [] if held_out_error is None else [f"held_out_error: {held_out_error:.4g}"]
    return "\n".join(lines) + "\n"
