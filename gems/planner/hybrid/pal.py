"""The projections of Pal et al. (IEEE Micro 39(5), 2019, arXiv 1907.13257).

Their inputs, each with how well it is known.

The abstract gives three gains of hybrid over data parallelism alone, "at least", and is confirmed from its text. What
they were reckoned from is recalled from the paper and has not been checked against it, and for two networks the growth
of the epochs is not known at all: it is derived here from the gain itself, so that recomputing that gain proves
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gems.planner.hybrid.break_even import Crossing, crossing
from gems.planner.hybrid.device_allocation import device_counts
from gems.planner.hybrid.end_to_end_time import HybridCase
from gems.planner.hybrid.epochs import EpochTable, NoiseScale
from gems.planner.hybrid.noise_scale_fit import EpochRun, fit_noise_scale
from gems.planner.hybrid.quantity import Quantity

WAYS = 2
# The epochs of the network whose numbers are recalled are flat below so many devices.
GROWN_FROM = 32
ABSTRACT = (
    "the paper's abstract (arXiv 1907.13257; research.nvidia.com/publication/"
    "2019-07_optimizing-multi-gpu-parallelization-strategies-deep-learning-training)"
)
BODY = "the paper's body, from memory"


class Mark(StrEnum):
    """How well a figure of the paper is known here."""

    CONFIRMED = "confirmed"
    RECALLED = "recalled, not confirmed"
    DOUBTFUL = "recalled with doubt, not confirmed"
    DERIVED = "derived from the published gain"
    ASSUMED = "assumed, as the paper is recalled to do"
    UNIT = "a unit, chosen here"

    @property
    def is_confirmed(self) -> bool:
        """Whether the figure was read in the source."""
        return self is Mark.CONFIRMED


class Verdict(StrEnum):
    """What it shows that a gain comes out."""

    REPRODUCED = "reproduced from inputs that do not contain it"
    CONSISTENT = "only consistent: an input was derived from it"


@dataclass(frozen=True, slots=True)
class Input:
    """One stated figure: its name and unit, its value, within which its last digit was rounded, and its mark."""

    name: str
    unit: str
    value: float
    low: float
    high: float
    mark: Mark
    source: str = BODY

    @property
    def quantity(self) -> Quantity:
        """The figure, its rounding as its interval."""
        return Quantity(self.value, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Published:
    """A gain in the paper: the part by which hybrid is faster, at so many devices, with the marks of both."""

    devices: int
    gain: float
    mark: Mark
    devices_mark: Mark
    source: str


@dataclass(frozen=True, slots=True)
class Network:
    """A network of the paper: its inputs, and its published gains.

    `epochs` is by devices under data parallelism: numbers, or with `is_ratio` multiples of that of its first row.
    """

    title: str
    method: str
    speedup: Input
    worker_batch: Input
    epochs: Mapping[int, Input]
    is_ratio: bool
    published: tuple[Published, ...]

    @property
    def inputs(self) -> tuple[Input, ...]:
        """All inputs, in order; a unit is none."""
        epochs = (each for each in self.epochs.values() if each.mark is not Mark.UNIT)
        return (self.speedup, self.worker_batch, *epochs, EFFICIENCY)

    @property
    def case(self) -> HybridCase:
        """The planner's case: SE is 1, and epochs between two numbers of devices are interpolated."""
        batch = self.worker_batch.value
        table = EpochTable.of({batch * devices: each.quantity for devices, each in self.epochs.items()})
        return HybridCase(batch, table, {WAYS: self.speedup.quantity})

    @property
    def devices(self) -> tuple[int, ...]:
        """Number of devices at which both ways of spending them are known."""
        known = sorted(self.epochs)
        return tuple(count for count in device_counts((), known[-1]) if count // WAYS >= known[0])

    @property
    def needed_ratio(self) -> float:
        """How much a doubling of the workers must multiply the epochs by for two-way workers to win, where SE is 1."""
        return WAYS / self.speedup.value

    def verdict(self) -> Verdict:
        """Return whether the gain is reckoned from inputs that were not derived from it."""
        is_derived = any(each.mark is Mark.DERIVED for each in self.inputs)
        return Verdict.CONSISTENT if is_derived else Verdict.REPRODUCED


def _rounded(name: str, unit: str, value: float, half: float, mark: Mark) -> Input:
    return Input(name, unit, value, value - half, value + half, mark)


def _exact(name: str, unit: str, value: float, mark: Mark) -> Input:
    return Input(name, unit, value, value, value, mark)


def _speedup(value: float) -> Input:
    return _rounded("SU^2", "1", value, 0.005, Mark.RECALLED)


def _batch(value: float) -> Input:
    return _exact("batch of a worker", "samples", value, Mark.DOUBTFUL)


def _derived(workers: int, gain: float, half: float, speedup: Input, digits: int) -> dict[int, Input]:
    """Return what the epochs must grow by from `workers` to twice as many for a published gain.

    Circular, and marked so.
    """
    low, value, high = (WAYS * (1.0 + each) / speedup.value for each in (gain - half, gain, gain + half))
    name = f"epochs on {WAYS * workers} devices over those on {workers}"
    return {
        workers: _exact(f"epochs on {workers} devices", "1", 1.0, Mark.UNIT),
        WAYS * workers: Input(name, "1", round(value, digits), low, high, Mark.DERIVED, "SU^2 and the published gain"),
    }


EFFICIENCY = _exact("scaling efficiency", "1", 1.0, Mark.ASSUMED)
_INCEPTION, _GNMT, _BIGLSTM = _speedup(1.32), _speedup(1.15), _speedup(1.22)


def _inception_epochs(devices: int, epochs: int) -> Input:
    name = f"epochs on {devices} device" + ("" if devices == 1 else "s")
    return _rounded(name, "epochs", epochs, 0.5, Mark.RECALLED)


NETWORKS: tuple[Network, ...] = (
    Network(
        "Inception-V3", "DLPlacer", _INCEPTION, _batch(64.0),
        {devices: _inception_epochs(devices, epochs)
         for devices, epochs in ((1, 4), (32, 4), (64, 7), (128, 12), (256, 23))},
        is_ratio=False,
        published=(
            Published(256, 0.265, Mark.CONFIRMED, Mark.RECALLED, ABSTRACT),
            Published(64, 0.155, Mark.RECALLED, Mark.RECALLED, BODY),
        ),
    ),
    Network(
        "GNMT", "pipeline", _GNMT, _batch(128.0), _derived(128, 0.08, 0.005, _GNMT, 3), is_ratio=True,
        published=(Published(256, 0.08, Mark.CONFIRMED, Mark.RECALLED, ABSTRACT),),
    ),
    Network(
        "BigLSTM", "pipeline", _BIGLSTM, _batch(64.0), _derived(16, 0.22, 0.005, _BIGLSTM, 3), is_ratio=True,
        published=(Published(32, 0.22, Mark.CONFIRMED, Mark.RECALLED, ABSTRACT),),
    ),
)  # fmt: skip


def crossing_of(network: Network, draws: Sequence[HybridCase] = ()) -> Crossing:
    """Find where two-way workers become faster on a network's own epochs."""
    return crossing(network.case, WAYS, network.devices, draws)


def noise_scale_of(network: Network) -> NoiseScale | None:
    """Return the noise scale that a network's epochs imply, or None where they have none.

    Of numbers it is fitted to those that grow, of a ratio r from N to 2 N workers solved: B_crit = N b (2 - r) / (r -
    1). A ratio of 2 or more is beyond the law: its steps are saturated.
    """
    batch = network.worker_batch.value
    if not network.is_ratio:
        grown = [(devices, each.value) for devices, each in network.epochs.items() if devices >= GROWN_FROM]
        return fit_noise_scale([EpochRun(devices * batch, epochs) for devices, epochs in grown]).law
    workers, doubled = sorted(network.epochs)
    ratio = network.epochs[doubled].value
    critical = workers * batch * (2.0 - ratio) / (ratio - 1.0)
    if critical <= 1e-9:
        return None
    least = 1.0 / (1.0 + workers * batch / critical)
    return NoiseScale(Quantity.exact(least), Quantity.exact(critical))


def noise_crossing(network: Network) -> float | None:
    """Return where two-way workers win by the noise scale, in devices; None where there is none.

    With SE = 1 the criterion SU (1 + x) > M + x, x = devices b / B_crit, turns at x = (M - SU) / (SU - 1).
    """
    law, speedup = noise_scale_of(network), network.speedup.value
    if law is None or speedup <= 1.0:
        return None
    return (WAYS - speedup) / (speedup - 1.0) * law.critical_batch.value / network.worker_batch.value
