"""Calibration: from timed messages, sums and computes to a machine's constants, with the error of each fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gems.errors import ConfigError
from gems.schedule.costs import Network
from gems.simulation.all_reduce import all_reduce

SCHEMA = "gems.calibration/1"
NORMAL_IQR = 1.349  # the middle half of a normal distribution, in standard deviations
LEVELS = ("link", "node")
MAX_NOISE = 0.5  # that machine.noise takes
MAX_BYTES_PER_S = 1e15


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link as `latency_s` + bytes / `bytes_per_s`; `error` is the median relative error over its timings, of 1."""

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
        links: the fit of each level: link (between nodes, or anywhere where nodes are not told apart), node.
        noise: relative standard deviation of a rank's compute.
        all_reduce_error: median relative error of all-reduces that the links predict, of 1; None where none were timed.
        d2h_bytes_per_s, h2d_bytes_per_s: rates of the copy engines; None without a GPU.
        ranks_per_node: where ranks of several nodes took part.
    """

    links: Mapping[str, LinkFit]
    noise: float
    all_reduce_error: float | None = None
    d2h_bytes_per_s: float | None = None
    h2d_bytes_per_s: float | None = None
    ranks_per_node: int | None = None

    def machine(self) -> dict[str, float | int]:
        """Return the keys of `machine` that this calibration settles."""
        found: dict[str, float | int] = {}
        for level, fit in self.links.items():
            found |= {f"{level}_latency_s": fit.latency_s, f"{level}_bytes_per_s": fit.bytes_per_s}
        optional = {
            "ranks_per_node": self.ranks_per_node, "d2h_bytes_per_s": self.d2h_bytes_per_s,
            "h2d_bytes_per_s": self.h2d_bytes_per_s,
        }  # fmt: skip
        return found | {"noise": self.noise} | {key: value for key, value in optional.items() if value is not None}

    @property
    def network(self) -> Network:
        """The links, in seconds."""
        values = self.machine()
        node = self.links.get("node")
        return Network(
            latency=values["link_latency_s"], per_byte=1 / values["link_bytes_per_s"],
            ranks_per_node=self.ranks_per_node,
            node_latency=0.0 if node is None else node.latency_s,
            node_per_byte=0.0 if node is None else 1 / node.bytes_per_s,
        )  # fmt: skip


def fit_link(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> LinkFit:
    """Fit latency and bandwidth by least squares of relative errors, so that small messages count as large ones do.

    Where the best line would have a negative latency or rate, that one is 0 (or as good as free) and the other alone is
    fitted.

    Raises:
        ConfigError: fewer than two different sizes, or times that are not above 0.
    """
    sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_s, float)
    if len(set(sizes.tolist())) < 2 or len(sizes) != len(times) or not (times > 0).all():
        raise ConfigError(
            "calibration", f"{len(sizes)} timings", "must be messages of two sizes or more, with times above 0"
        )
    columns = np.stack([1 / times, sizes / times], axis=1)
    best, *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    latency_s, per_byte = (float(value) for value in best)
    if latency_s < 0:
        latency_s, per_byte = 0.0, _alone(columns[:, 1])
    elif per_byte < 1 / MAX_BYTES_PER_S:
        latency_s, per_byte = _alone(columns[:, 0]), 1 / MAX_BYTES_PER_S
    predicted = latency_s + per_byte * sizes
    return LinkFit(latency_s, 1 / per_byte, float(np.median(np.abs(predicted / times - 1))))


def _alone(column: np.ndarray) -> float:
    return float(column.sum() / (column @ column))


def noise_of(times_s: np.ndarray) -> float:
    """Return the relative standard deviation of computes that should take equally long.

    An array of repetitions x ranks.

    By the middle half of each rank's times, so that a few interruptions do not count as noise; the median over ranks.

    Raises:
        ConfigError: fewer than four repetitions.
    """
    if len(times_s) < 4:
        raise ConfigError("calibration", f"{len(times_s)} repetitions", "must be four or more to tell noise")
    low, middle, high = np.quantile(times_s, [0.25, 0.5, 0.75], axis=0)
    return float(np.median((high - low) / NORMAL_IQR / middle))


def calibration_of(probe: Mapping[str, Any]) -> Calibration:
    """Return the calibration of what `gems.engine.transport.speed_probe` wrote.

    Of one node alone its links stand for all links. Emulated compute is a timed wait, which has no noise.

    Raises:
        ConfigError: another schema, or too few timings.
    """
    if probe.get("schema") != SCHEMA:
        raise ConfigError("calibration", probe.get("schema"), f"must be {SCHEMA}", "probe again, with this version")
    messages: Mapping[str, Any] = probe["messages"]
    links = {level: fit_link(messages[level]["bytes"], messages[level]["s"]) for level in LEVELS if level in messages}
    if "link" not in links:
        links = {"link": links["node"]}
    copies: Mapping[str, float] = probe.get("copies") or {}
    is_timed_wait = probe.get("kind") == "emulated"
    found = Calibration(
        links, 0.0 if is_timed_wait else noise_of(np.asarray(probe["computes_s"], float)), None,
        copies.get("d2h_bytes_per_s"), copies.get("h2d_bytes_per_s"),
        probe.get("ranks_per_node") if "node" in links else None,
    )  # fmt: skip
    return _checked(found, probe.get("sums") or {})


def merged(found: Calibration, noises: Sequence[float]) -> Calibration:
    """Return the calibration with the noise that runs showed, where they are given: the median of them."""
    if not noises:
        return found
    return replace(found, noise=float(np.median(noises)))


def _checked(found: Calibration, sums: Mapping[str, Any]) -> Calibration:
    """Add how far the links are off for all-reduces."""
    if not sums:
        return found
    group = range(int(sums["ranks"]))
    errors = [
        abs(all_reduce(found.network, group, float(size)).time / time_s - 1)
        for size, time_s in zip(sums["bytes"], sums["s"], strict=True)
    ]
    return replace(found, all_reduce_error=float(np.median(errors)))


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

    `origin` says what it was measured on; `comments` are lines more that head it. With `base` the rest is that
    machine's. A noise above what predictions take, on a machine that others use too, is cut to that.
    """  # fmt: skip
    fits = [
        f"{level}: {fit.latency_s:.3g} s and {fit.bytes_per_s:.3g} bytes/s, median error of the fit {fit.error:.1%}"
        for level, fit in found.links.items()
    ]
    sums = [] if found.all_reduce_error is None else [
        f"all-reduces that these links predict are off by {found.all_reduce_error:.0%} (median)"
    ]  # fmt: skip
    if found.noise > MAX_NOISE:
        sums.append(
            f"compute varied by {found.noise:.0%}, of which {MAX_NOISE:.0%} is kept: calibrate on a quiet machine"
        )
    lines = [f"# {line}" for line in (f"Calibrated: {origin}", *comments, *fits, *sums)]
    lines += [] if base is None else ["defaults:", f"  - {base}", "  - _self_"]
    lines += [f"name: {name}", f"kind: {kind}", f"device: {device}"]
    values = found.machine() | {"noise": min(found.noise, MAX_NOISE)}
    lines += [f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}" for key, value in values.items()]
    lines.append(f'calibrated_from: "{origin}"')
    if held_out_error is not None:
        lines.append(f"held_out_error: {held_out_error:.4g}")
    return "\n".join(lines) + "\n"
