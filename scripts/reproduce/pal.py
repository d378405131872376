"""The projections of Pal et al. (IEEE Micro 39(5), 2019, arXiv 1907.13257), recomputed.

`--out FILE` draws them. N workers of two devices gain SU^2 / 2 x E_2N / E_N over 2 N workers of one, where the scaling
efficiency is 1, as the paper is recalled to assume. Bands are the rounding of the inputs' last
digits. The gains at the most devices stand in the abstract and are confirmed; speed-ups, batches
and Inception-V3's epochs are recalled and unchecked. Of GNMT and BigLSTM the growth of the epochs
is not known: it is derived from the published gain, so that their gains come out whatever the truth
is. Below, projections by epochs that others have measured (not verified by MLCommons), and a noise
scale fitted to these, do not confirm GNMT's gain.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gems.search.hybrid.device_allocation import NUM_DRAWS, device_counts
from gems.search.hybrid.end_to_end_time import HybridCase, break_even
from gems.search.hybrid.epochs import EpochTable, fit_noise_scale
from gems.search.hybrid.quantity import Quantity, band, drawn
from gems.utils.tables import RIGHT, table
from scripts.bench.rig import options

WAYS = 2
EPOCHS = Path(__file__).parents[1] / "data/epochs_to_target.csv"


@dataclass(frozen=True, slots=True)
class Network:
    """A network's inputs, and its published gains by devices.

    Epochs are by devices under data parallelism.
    """

    title: str
    speedup: Quantity
    worker_batch: int
    epochs: dict[int, Quantity]
    published: dict[int, float]
    shows: str = "only consistent: its epochs are derived from the gain"

    @property
    def case(self) -> HybridCase:
        """The planner's case."""
        epochs = {self.worker_batch * devices: count for devices, count in self.epochs.items()}
        return HybridCase(self.worker_batch, EpochTable.of(epochs), {WAYS: self.speedup})

    @property
    def devices(self) -> list[int]:
        """The numbers of devices at which both ways of spending them are known."""
        least = min(self.epochs)
        most = max(self.epochs)
        return [count for count in device_counts((), most) if count // WAYS >= least]


def rounded(value: float, half: float) -> Quantity:
    """Return a figure whose last digit was rounded by up to `half`."""
    return Quantity(value, value - half, value + half)


def derived(title: str, speedup: float, worker_batch: int, devices: int, gain: float) -> Network:
    """Return a network whose epochs grow from half the devices on, as its gain implies."""
    low, value, high = (WAYS * (1.0 + gain + off) / speedup for off in (-0.005, 0.0, 0.005))
    epochs = {devices // 2: Quantity.exact(1.0), devices: Quantity(round(value, 3), low, high)}
    return Network(title, rounded(speedup, 0.005), worker_batch, epochs, {devices: gain})


INCEPTION = Network(
    "Inception-V3",
    rounded(1.32, 0.005),
    64,
    {
        devices: rounded(epochs, 0.5)
        for devices, epochs in ((1, 4), (32, 4), (64, 7), (128, 12), (256, 23))
    },
    {64: 0.155, 256: 0.265},
    "reproduced from recalled inputs that do not contain it",
)
GNMT = derived("GNMT", 1.15, 128, 256, 0.08)
NETWORKS = (INCEPTION, GNMT, derived("BigLSTM", 1.22, 64, 32, 0.22))
# Workers of a network with epochs that were measured for the series, and the devices asked for.
MEASURED = ((GNMT, "gnmt_v0.6_v0.7", (128, 256)), (INCEPTION, "resnet50_v1.1", (512, 1024)))


def draws_of(case: HybridCase) -> list[HybridCase]:
    """Return cases with all figures drawn within their intervals."""
    rng = np.random.default_rng(0)
    return [drawn(case, rng) for _ in range(NUM_DRAWS)]


def gain_of(case: HybridCase, devices: int) -> Quantity:
    """Return by how much two-way workers are as fast as data parallelism, 1 being alike."""
    workers = devices // WAYS
    return band(case.gain(workers, WAYS), [draw.gain(workers, WAYS) for draw in draws_of(case)])


def percent(gain: Quantity) -> tuple[str, str]:
    """Return a gain and its band as texts."""
    low, value, high = (100 * (each - 1.0) for each in (gain.low, gain.value, gain.high))
    return f"{value:+.1f} %", f"{low:+.1f} to {high:+.1f}"


def measured_gains() -> Iterator[tuple[str, str, int, Quantity]]:
    """Yield series, network, devices, and the gain by the noise scale fitted to its epochs."""
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    lines = [line for line in EPOCHS.read_text().splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        series[row["series"]].append((float(row["global_batch"]), float(row["epochs"])))
    for network, name, counts in MEASURED:
        case = replace(network.case, epochs=fit_noise_scale(series[name]).law)
        for devices in counts:
            yield name, network.title, devices, gain_of(case, devices)


def crossing(network: Network) -> str:
    """Return the number of devices at which two-way workers begin to win."""
    crossing_point = break_even(network.case, WAYS, network.devices, draws_of(network.case))
    if crossing_point.below is None:
        return (
            f"{network.title}: at {crossing_point.listed} devices or fewer, below which the inputs do not"
            " reach"
        )
    at = f"at {crossing_point.devices}, {crossing_point.low:.0f} to {crossing_point.high:.0f}"
    return f"{network.title}: between {crossing_point.below} and {crossing_point.listed} devices ({at})"


def draw(path: Path) -> None:
    """Draw the speed-ups of both ways over the fewest devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, network in zip(figure.subplots(1, len(NETWORKS)), NETWORKS, strict=True):
        case = network.case
        base = min(network.epochs)
        for ways, label in ((1, "data parallelism"), (WAYS, f"workers of {WAYS} devices")):
            known = [
                count
                for count in sorted({*network.devices, *network.epochs})
                if count // ways >= base
            ]
            axes.plot(
                known,
                [case.cost(base, 1) / case.cost(n // ways, ways) for n in known],
                "o-",
                label=label,
            )
        axes.set(
            title=network.title,
            xlabel="devices",
            ylabel=f"speed-up over {base}",
            xscale="log",
            ylim=(0, None),
        )
        axes.set_xticks(known, known)
        axes.minorticks_off()
    axes.legend()
    figure.savefig(path)


def main(argv: list[str]) -> None:
    """Print the tables."""
    out = options(__doc__, argv, out={"type": Path}).out
    columns = {
        "network": "",
        "devices": "d",
        "gain": RIGHT,
        "95 %": RIGHT,
        "published": RIGHT,
        "which is": "",
    }
    cells = [
        (
            network.title,
            devices,
            *percent(gain_of(network.case, devices)),
            f"{100 * gain:+.1f} %",
            network.shows,
        )
        for network in NETWORKS
        for devices, gain in network.published.items()
    ]
    print(table(columns, cells, title="hybrid over data parallelism alone, PREDICTED"))
    print("Two-way workers begin to win", *map(crossing, NETWORKS), sep="\n  ")
    columns = {"epochs of": "", "workers of": "", "devices": "d", "gain": RIGHT, "95 %": RIGHT}
    cells = [(*names, devices, *percent(gain)) for *names, devices, gain in measured_gains()]
    print(table(columns, cells, title="by epochs that others have measured"))
    if out is not None:
        draw(out)


if __name__ == "__main__":
    main(sys.argv[1:])
