"""The projections of Pal et al.

(IEEE Micro 39(5), 2019, arXiv 1907.13257): inputs, each with how well it is known.
The abstract gives three gains of hybrid over data parallelism alone, "at least", and is confirmed
from its text. What they were reckoned from is recalled from the paper and has not been checked
against it, and for two networks the growth of the epochs is not known at all: it is derived here
from the gain itself, so that recomputing that gain proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gems.planner.hybrid.device_allocation import device_counts
from gems.planner.hybrid.end_to_end_time import BreakEven, HybridCase, break_even
from gems.planner.hybrid.epochs import EpochTable, NoiseScale, fit_noise_scale
from gems.planner.hybrid.quantity import Quantity
from gems.utils.units import counted

DEGREE = 2
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
    source: str
    devices_mark: Mark = Mark.RECALLED


@dataclass(frozen=True, slots=True)
class Network:
    """A network of the paper: its inputs, and its published gains.

    `epochs` is by devices under data parallelism: numbers, or with `is_ratio` multiples of that of
    its first row.
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
        table = EpochTable.of(
            {batch * devices: each.quantity for devices, each in self.epochs.items()}
        )
        return HybridCase(batch, table, {DEGREE: self.speedup.quantity})

    @property
    def devices(self) -> tuple[int, ...]:
        """Number of devices at which both ways of spending them are known."""
        known = sorted(self.epochs)
        return tuple(count for count in device_counts((), known[-1]) if count // DEGREE >= known[0])

    @property
    def needed_ratio(self) -> float:
        """How much a doubling of the workers must multiply the epochs by for two-way workers to win, where SE is 1."""
        return DEGREE / self.speedup.value

    @property
    def verdict(self) -> Verdict:
        """Whether the gain is reckoned from inputs that were not derived from it."""
        is_derived = any(each.mark is Mark.DERIVED for each in self.inputs)
        return Verdict.CONSISTENT if is_derived else Verdict.REPRODUCED

    def break_even(self, draws: Sequence[HybridCase] = ()) -> BreakEven:
        """Find where two-way workers become faster on the network's own epochs."""
        return break_even(self.case, DEGREE, self.devices, draws)

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The noise scale that the epochs imply, or None where they have none.

        Of numbers it is fitted to those that grow, of a ratio r from N to 2 N workers solved:
        B_crit = N b (2 - r) / (r - 1). A ratio of 2 or more is beyond the law: its steps are
        saturated.
        """
        batch = self.worker_batch.value
        if not self.is_ratio:
            grown = [
                (devices * batch, each.value)
                for devices, each in self.epochs.items()
                if devices >= GROWN_FROM
            ]
            return fit_noise_scale(grown).law
        workers, doubled = sorted(self.epochs)
        ratio = self.epochs[doubled].value
        critical = workers * batch * (2.0 - ratio) / (ratio - 1.0)
        if critical <= 1e-9:
            return None
        least = 1.0 / (1.0 + workers * batch / critical)
        return NoiseScale(Quantity.exact(least), Quantity.exact(critical))

    @property
    def noise_break_even(self) -> float | None:
        """Where two-way workers win by the noise scale, in devices; None where there is none.

        With SE = 1 the criterion SU (1 + x) > M + x, x = devices b / B_crit, turns at x = (M - SU)
        / (SU - 1).
        """
        law = self.noise_scale
        speedup = self.speedup.value
        if law is None or speedup <= 1.0:
            return None
        return (
            (DEGREE - speedup)
            / (speedup - 1.0)
            * law.critical_batch.value
            / self.worker_batch.value
        )


def _input(name: str, unit: str, value: float, mark: Mark, half: float = 0.0) -> Input:
    return Input(name, unit, value, value - half, value + half, mark)


def _speedup(value: float) -> Input:
    return _input("SU^2", "1", value, Mark.RECALLED, 0.005)


def _batch(value: float) -> Input:
    return _input("batch of a worker", "samples", value, Mark.DOUBTFUL)


def _derived(workers: int, gain: float, speedup: float) -> dict[int, Input]:
    """Return what the epochs must grow by from `workers` to twice as many for a published gain: circular."""
    low, value, high = (
        DEGREE * (1.0 + each) / speedup for each in (gain - 0.005, gain, gain + 0.005)
    )
    name = f"epochs on {DEGREE * workers} devices over those on {workers}"
    return {
        workers: _input(f"epochs on {workers} devices", "1", 1.0, Mark.UNIT),
        DEGREE * workers: Input(
            name, "1", round(value, 3), low, high, Mark.DERIVED, "SU^2 and the published gain"
        ),
    }


EFFICIENCY = _input("scaling efficiency", "1", 1.0, Mark.ASSUMED)
# Series of published epochs (published_epochs.csv) that a projection is recomputed with: the
# network whose speed-up and batch of a worker count, the name of the projection, and the devices at
# which it is asked for.
MEASURED = (
    ("GNMT", "gnmt_v0.6_v0.7", "GNMT", (128, 256)),
    ("Inception-V3", "resnet50_v1.1", "ResNet-50-like", (512, 1024)),
)
NETWORKS: tuple[Network, ...] = (
    Network(
        "Inception-V3",
        "DLPlacer",
        _speedup(1.32),
        _batch(64.0),
        {
            devices: _input(
                f"epochs on {counted(devices, 'device')}", "epochs", epochs, Mark.RECALLED, 0.5
            )
            for devices, epochs in ((1, 4), (32, 4), (64, 7), (128, 12), (256, 23))
        },
        is_ratio=False,
        published=(
            Published(256, 0.265, Mark.CONFIRMED, ABSTRACT),
            Published(64, 0.155, Mark.RECALLED, BODY),
        ),
    ),
    Network(
        "GNMT",
        "pipeline",
        _speedup(1.15),
        _batch(128.0),
        _derived(128, 0.08, 1.15),
        is_ratio=True,
        published=(Published(256, 0.08, Mark.CONFIRMED, ABSTRACT),),
    ),
    Network(
        "BigLSTM",
        "pipeline",
        _speedup(1.22),
        _batch(64.0),
        _derived(16, 0.22, 1.22),
        is_ratio=True,
        published=(Published(32, 0.22, Mark.CONFIRMED, ABSTRACT),),
    ),
)
