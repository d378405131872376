"""The projections of Pal et al.

(2019) recomputed from their inputs, each input with how well it is known.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from gems.planner.hybrid.device_allocation import NUM_DRAWS, device_counts
from gems.planner.hybrid.end_to_end_time import BreakEven
from gems.planner.hybrid.epochs import fit_noise_scale
from gems.planner.hybrid.inputs import published_series
from gems.planner.hybrid.pal import (
    DEGREE,
    GROWN_FROM,
    MEASURED,
    NETWORKS,
    Network,
    Published,
    Verdict,
)
from gems.planner.hybrid.quantity import Quantity, band, drawn
from gems.utils.tables import RIGHT
from gems.utils.tables import table as render
from gems.utils.units import UNKNOWN

SCHEMA = "gems.hybrid_projections/1"
PAPER = "Pal et al., IEEE Micro 39(5), 2019, arXiv 1907.13257"

HEAD = f"""\
Hybrid over data parallelism alone: the projections of {PAPER}, recomputed.
N workers of M = 2 devices gain SU^2 / 2 x E_2N / E_N over 2 N workers of one, where the scaling efficiency is 1, as \
the paper is
recalled to assume: what workers lose to each other is on hybrid's side, so that its gains are "at least". Bands are the
rounding of the inputs' last digits. Three gains stand in the abstract and are confirmed; the inputs are not."""

CAUTION = """\
What this shows. Inception-V3's gains come out of a speed-up and of epochs that do not contain them: what is recalled \
of the
inputs agrees with the confirmed abstract to three digits, and is still unchecked. Of GNMT and BigLSTM the paper's \
epochs are not
known here: their growth was derived from the published gain, so that their gains come out whatever the truth is, and \
their
crossing points are no better. GNMT's epochs as others have measured them do not confirm its gain. A crossing "by the \
noise scale"
stands on E(B) = E_min (1 + B / B_crit), fitted to Inception-V3's epochs on 32 devices and more or solved from a derived
ratio, which is not the paper's."""


@dataclass(frozen=True, slots=True)
class Gain:
    """A recomputed gain, as a part of data parallelism's time, beside the paper's figure (None: unpublished)."""

    devices: int
    gain: float
    low: float
    high: float
    published: Published | None


@dataclass(frozen=True, slots=True)
class Projection:
    """A network with its gains at all numbers of devices, and where hybrid begins to win.

    `noise_devices` is that by the noise scale that the epochs imply, or None.
    """

    network: Network
    gains: tuple[Gain, ...]
    crossing: BreakEven
    noise_devices: float | None


def projections(networks: tuple[Network, ...] = NETWORKS, seed: int = 0) -> list[Projection]:
    """Recompute the projections; bands by draws within the rounding of the inputs."""
    return [_projection(network, seed) for network in networks]


def _projection(network: Network, seed: int) -> Projection:
    rng = np.random.default_rng(seed)
    case = network.case
    draws = [drawn(case, rng) for _ in range(NUM_DRAWS)]
    published = {each.devices: each for each in network.published}
    gains = []
    for devices in network.devices:
        workers = devices // DEGREE
        found = band(case.gain(workers, DEGREE), [draw.gain(workers, DEGREE) for draw in draws])
        value, low, high = (end - 1.0 for end in (found.value, found.low, found.high))
        gains.append(Gain(devices, value, low, high, published.get(devices)))
    return Projection(network, tuple(gains), network.break_even(draws), network.noise_break_even)


@dataclass(frozen=True, slots=True)
class MeasuredGain:
    """A gain by epochs that others have measured, where their noise scale says what the batches between take.

    `published` is the paper's figure for the network and the devices, recalled for other epochs;
    None if it has none.
    """

    name: str
    network: str
    series: str
    devices: int
    global_batch: float
    gain: float
    low: float
    high: float
    is_extrapolated: bool
    published: Published | None


def measured_gains(seed: int = 0) -> list[MeasuredGain]:
    """Recompute projections with published epochs in place of those derived or recalled."""
    networks = {network.title: network for network in NETWORKS}
    series = published_series()
    found = []
    for title, name, shown, counts in MEASURED:
        network = networks[title]
        law = fit_noise_scale(series[name]).law
        case = replace(network.case, epochs=law)
        rng = np.random.default_rng(seed)
        draws = [replace(drawn(case, rng), epochs=law.drawn(rng)) for _ in range(NUM_DRAWS)]
        published = {each.devices: each for each in network.published} if shown == title else {}
        for devices in counts:
            workers = devices // DEGREE
            batch = devices * case.worker_batch
            bounds = band(
                case.gain(workers, DEGREE), [draw.gain(workers, DEGREE) for draw in draws]
            )
            value, low, high = (end - 1.0 for end in (bounds.value, bounds.low, bounds.high))
            outside = batch > max(known for known, _ in series[name])
            found.append(
                MeasuredGain(
                    shown,
                    title,
                    name,
                    devices,
                    batch,
                    value,
                    low,
                    high,
                    outside,
                    published.get(devices),
                )
            )
    return found


def table(found: list[Projection]) -> str:
    """Return the projections as text: gains, crossing points, and every input with its mark."""
    columns = {
        "network": "",
        "devices": "d",
        "N x M": RIGHT,
        "gain": RIGHT,
        "95 %": RIGHT,
        "published": "",
        "which is": "",
        "shows": "",
    }
    gains = [
        (
            one.network.title,
            each.devices,
            f"{each.devices // DEGREE} x {DEGREE}",
            f"{100 * each.gain:+.1f} %",
            f"{100 * each.low:+.1f} to {100 * each.high:+.1f}",
            f"{100 * each.published.gain:+.1f} %",
            f"{each.published.mark} (its devices: {each.published.devices_mark})",
            str(one.network.verdict),
        )
        for one in found
        for each in one.gains
        if each.published is not None
    ]
    inputs = [
        (
            " " if each.mark.is_confirmed else "!",
            one.network.title,
            each.name,
            UNKNOWN if each.unit == "1" else each.unit,
            each.value,
            str(each.mark),
        )
        for one in found
        for each in one.network.inputs
    ]
    lines = [
        HEAD,
        "",
        render(columns, gains),
        "",
        "Where two-way workers begin to win:",
        *map(_describe_crossing, found),
    ]
    measured_columns = {
        "epochs of": "",
        "workers of": "",
        "devices": "d",
        "batch": "d",
        "gain": RIGHT,
        "95 %": RIGHT,
        "published (recalled)": RIGHT,
    }
    measured = [
        (
            each.series,
            each.network,
            each.devices,
            int(each.global_batch),
            f"{100 * each.gain:+.1f} %",
            (
                f"{100 * each.low:+.1f} to"
                f" {100 * each.high:+.1f}{' (extrapolated)' if each.is_extrapolated else ''}"
            ),
            UNKNOWN if each.published is None else f"{100 * each.published.gain:+.1f} %",
        )
        for each in measured_gains()
    ]
    lines += [
        "",
        (
            "By epochs that others have measured (not verified by MLCommons), and a noise scale"
            " fitted to them:"
        ),
        render(measured_columns, measured),
    ]
    input_columns = {"": "", "network": "", "input": "", "unit": "", "value": "g", "is": ""}
    return "\n".join(
        [*lines, "", "Inputs (! is not confirmed):", render(input_columns, inputs), "", CAUTION]
    )


def answer(found: list[Projection]) -> dict[str, Any]:
    """Return the same as one object.

    Gains are parts of 1, and every input is marked as confirmed or not.
    """
    return {
        "schema": SCHEMA,
        "source": "predicted",
        "paper": PAPER,
        "method": " ".join(HEAD.split()),
        "caution": " ".join(CAUTION.split()),
        "networks": [_network(one) for one in found],
        "measured_epochs": [_measured(each) for each in measured_gains()],
        "unconfirmed": [
            f"{one.network.title}: {each.name} ({each.mark})"
            for one in found
            for each in one.network.inputs
            if not each.mark.is_confirmed
        ],
    }


def _network(one: Projection) -> dict[str, Any]:
    network = one.network
    law = one.network.noise_scale
    crossing = one.crossing
    is_inside = crossing.below is not None
    return {
        "network": network.title,
        "method": network.method,
        "verdict": str(network.verdict),
        "is_independent": network.verdict is Verdict.REPRODUCED,
        "inputs": [
            {**asdict(each), "mark": str(each.mark), "is_confirmed": each.mark.is_confirmed}
            for each in network.inputs
        ],
        "gains": [_gain(each) for each in one.gains],
        "needed_epochs_ratio": network.needed_ratio,
        "crossing": {
            **{
                name: getattr(crossing, name) if is_inside else None
                for name in ("devices", "low", "high")
            },
            "above": crossing.below,
            "at_most": crossing.listed,
            "by_noise_scale": one.noise_devices,
            "is_modelled": True,
        },
        "noise_scale": (
            None
            if law is None
            else {"e_min": law.least_epochs.value, "b_crit": law.critical_batch.value}
        ),
    }


def _measured(each: MeasuredGain) -> dict[str, Any]:
    return {
        **asdict(each),
        "source": "published epochs, not verified by MLCommons",
        "published": _stated(each.published),
    }


def _stated(published: Published | None) -> dict[str, Any] | None:
    if published is None:
        return None
    return {
        "gain": published.gain,
        "mark": str(published.mark),
        "is_confirmed": published.mark.is_confirmed,
        "devices_mark": str(published.devices_mark),
        "source": published.source,
    }


def _gain(each: Gain) -> dict[str, Any]:
    return {
        **asdict(each),
        "workers": each.devices // DEGREE,
        "ways": DEGREE,
        "published": _stated(each.published),
    }


def _describe_crossing(one: Projection) -> str:
    network = one.network
    found = one.crossing
    ratio = (
        f"where a doubling of the workers takes more than {network.needed_ratio:.3f} times the"
        " epochs"
    )
    if found.below is None:
        where = f"at {found.listed} devices or fewer, below which the inputs do not reach"
    else:
        ends = (
            ""
            if found.low is None or found.high is None
            else f", {found.low:.0f} to {found.high:.0f}"
        )
        where = (
            f"between {found.below} and {found.listed} devices (at {found.devices} by interpolated"
            f" epochs{ends})"
        )
    if one.noise_devices is None:
        law = "no noise scale: the epochs double with the batch"
    else:
        law = f"at {one.noise_devices:.0f} by the noise scale of the epochs"
    circular = "" if network.verdict is Verdict.REPRODUCED else "; all of it from a derived input"
    return f"  {network.title}: {where}; {law}; {ratio}{circular}"


def speedups(network: Network, seed: int = 0) -> dict[int, list[tuple[int, Quantity]]]:
    """Return what the picture shows, by ways.

    Devices, and the speed-up over the fewest data-parallel workers known.
    """
    rng = np.random.default_rng(seed)
    case = network.case
    base = min(network.epochs)
    draws = [drawn(case, rng) for _ in range(NUM_DRAWS)]
    every = sorted({*network.devices, base, *network.epochs})
    lines: dict[int, list[tuple[int, Quantity]]] = {}
    for ways in (1, DEGREE):
        known = [count for count in every if count % ways == 0 and count // ways >= base]
        lines[ways] = [
            (
                count,
                band(
                    case.cost(base, 1) / case.cost(count // ways, ways),
                    [draw.cost(base, 1) / draw.cost(count // ways, ways) for draw in draws],
                ),
            )
            for count in known
        ]
    return lines


def law_speedups(network: Network) -> dict[int, list[tuple[int, float]]]:
    """Return the same by the noise scale that the epochs imply, empty if they imply none.

    Given epochs are drawn in the range of the fit; a derived ratio from an eighth of its devices to
    twice.
    """
    law = network.noise_scale
    if law is None:
        return {}
    case = network.case
    known = sorted(network.epochs)
    by_law = replace(case, epochs=law)
    first, last = (known[0] // 8, 2 * known[-1]) if network.is_ratio else (GROWN_FROM, known[-1])
    base = case.cost(known[0], 1)
    counts = [count for count in device_counts((), last) if count >= first]
    return {
        ways: [(count, base / by_law.cost(count // ways, ways)) for count in counts]
        for ways in (1, DEGREE)
    }
