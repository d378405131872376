"""Schedules under a cap: every family and the synthesised schedule by efficiency, the targets, and random settings.

Prints three parts: efficiency by cap for each family beside `capped` and its bound; the targets (target, found, bound);
and random settings in which `capped` is compared with every published schedule that keeps the cap. The figures are
simulated, and printed with the time that each part took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from gems.errors import GemsError
from gems.schedule import FAMILIES
from gems.schedule.costs import DepthCosts, Network
from gems.schedule.ledger import TOLERANCE, peaks
from gems.schedule.registry import Request
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from gems.schedule.synthesis import Found, capped
from gems.schedule.validate import validate
from scripts.bench.rig import machine, parser

CAPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
NUM_SETTINGS, QUICK_SETTINGS = 300, 30
SETTING_BUDGET_S, QUICK_BUDGET_S = 0.25, 1.0
ROUNDING = 0.0005


@dataclass(frozen=True)
class Target:
    """An efficiency to be reached."""

    name: str
    request: Request
    efficiency: float


def _request(num_ranks: int, num_micro_batches: int, cap: float, link: float = 0.0, **costs: object) -> Request:
    return Request(
        num_ranks, num_micro_batches, cap=cap,
        costs=DepthCosts(num_ranks, **costs),  # type: ignore[arg-type]
        network=Network(latency=link),
    )  # fmt: skip


def targets() -> Iterator[Target]:
    """Yield the settings of the figures in README.md.

    Times are equal and links free unless the name tells otherwise.
    """
    for ranks, num, link, asked in (
        (8, 32, 0.0, {1: 0.325, 1.5: 0.44, 2: 0.62, 3: 0.82, 4: 0.91, 6: 0.945, 8: 0.965}),
        (4, 24, 0.0, {1: 0.58, 1.5: 0.81, 2: 0.94}),
        (8, 32, 0.25, {1: 0.25, 2: 0.42, 3: 0.59, 4: 0.74}),
        (16, 64, 0.0, {1: 0.17, 2: 0.32, 4: 0.60}),
    ):
        for cap, efficiency in asked.items():
            name = f"P={ranks} N={num} K={cap:g}" + (f" link {link:g}" if link else "")
            yield Target(name, _request(ranks, num, cap, link), efficiency)
    for allow, copy, efficiency in ((("recompute",), 0.0, 0.70), (("offload",), 2.0, 0.84)):
        request = Request(8, 32, cap=1.0, costs=DepthCosts(8, copy=copy), allow=allow)
        yield Target(f"P=8 N=32 K=1 {allow[0]}", request, efficiency)
    weights = (1.0, 0.5, 0.25, 0.125)
    yield Target("P=8 N=32 K=2 activations 1:1/2:1/4:1/8", _request(8, 32, 2.0, activations=weights), 0.81)


def published_schedules(request: Request) -> dict[str, Schedule]:
    """Build every published family that can serve a request, with its number of micro-batches."""
    found = {}
    for name, family in FAMILIES.items():
        if name == "capped":
            continue
        try:
            schedule = family.build(request)
        except GemsError:
            continue
        if schedule.num_micro_batches == request.num_micro_batches:
            found[name] = schedule
    return found


def table_of_families(budget_s: float) -> None:
    """Print efficiency by cap, P=8 N=32, for every family beside capped."""
    print(f"{'P=8 N=32':18}" + "".join(f"{f'K={cap:g}':>8}" for cap in CAPS) + "   (peak above the cap: -)")
    rows: dict[str, list[str]] = {name: [] for name in FAMILIES if name != "capped"}
    found: list[Found] = []
    for cap in CAPS:
        request = Request(8, 32, cap=cap, costs=DepthCosts(8), budget_s=budget_s)
        named = published_schedules(request)
        for name, row in rows.items():
            row.append(_efficiency(named[name], request) if name in named else "-")
        found.append(capped(request, named.values()))
    for name, row in rows.items():
        print(f"{name:18}" + "".join(f"{cell:>8}" for cell in row))
    print(f"{'capped':18}" + "".join(f"{one.efficiency:8.3f}" for one in found))
    print(f"{'bound':18}" + "".join(f"{one.bound:8.3f}" for one in found))
    print(f"{'placement':18}" + "".join(f"{one.placement[:7]:>8}" for one in found))


def _efficiency(schedule: Schedule, request: Request) -> str:
    costs = request.costs.stages(schedule.num_stages)
    if request.cap is not None and max(peaks(schedule, costs)) > request.cap + TOLERANCE:
        return "-"
    return f"{simulate(schedule, costs, request.network).efficiency:.3f}"


def table_of_targets(budget_s: float) -> int:
    """Print target, found and bound, and return how many targets were missed."""
    missed = 0
    print(f"{'setting':40}{'target':>8}{'found':>8}{'bound':>8}{'peak':>7}{'time':>8}  placement, method")
    for target in targets():
        begin = time.perf_counter()
        found = capped(replace(target.request, budget_s=budget_s))
        taken_s = time.perf_counter() - begin
        is_met = found.efficiency >= target.efficiency - ROUNDING
        missed += not is_met
        print(
            f"{target.name:40}{target.efficiency:8.3f}{found.efficiency:8.4f}{found.bound:8.3f}{max(found.peak):7.3f}"
            f"{taken_s:7.1f}s  {found.placement}, {found.method}{'' if is_met else '  MISSED'}",
            flush=True,
        )
    return missed


def random_setting(random: Random) -> Request:
    """Draw a setting: ranks, micro-batches, unequal times, activations over the depth, link, cap."""
    num_ranks = random.randint(2, 12)
    num_micro_batches = random.randint(2, 3 * num_ranks)
    times = tuple(round(random.uniform(0.5, 1.5), 2) for _ in range(random.choice((1, 2, 4))))
    activations = tuple(round(random.uniform(0.1, 1.0), 2) for _ in range(random.choice((1, 2, 4))))
    forward, input_grad, weight_grad = (round(random.uniform(low, 1.5), 2) for low in (0.5, 0.5, 0.2))
    costs = DepthCosts(
        num_ranks, forward=forward, input_grad=input_grad, weight_grad=weight_grad, times=times, activations=activations
    )
    link = random.choice((0.0, 0.0, 0.05, 0.25))
    cap = random.choice((1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0))
    return Request(
        num_ranks, num_micro_batches, cap=cap, costs=costs, network=Network(latency=link),
        seed=random.randrange(1000), budget_s=SETTING_BUDGET_S,
    )  # fmt: skip


def settings(number: int) -> int:
    """Compare capped with every published schedule that keeps the cap, and return the number of exceptions."""
    random, exceptions, beaten, compared = Random(0), 0, 0, 0
    for turn in range(number):
        request = random_setting(random)
        named = published_schedules(request)
        found = capped(request, named.values())
        validate(found.schedule, request.costs.stages(found.schedule.num_stages), request.cap)
        for name, schedule in named.items():
            costs = request.costs.stages(schedule.num_stages)
            if request.cap is not None and max(peaks(schedule, costs)) > request.cap + TOLERANCE:
                continue
            compared += 1
            span = simulate(schedule, costs, request.network).span
            beaten += found.span < span * (1 - 1e-9)
            if found.span > span * (1 + 1e-9):
                exceptions += 1
                print(f"setting {turn}: {name} takes {span:g}, capped {found.span:g}: {request}")
        if request.cap is not None and max(found.peak) > request.cap + TOLERANCE:
            exceptions += 1
            print(f"setting {turn}: peak {max(found.peak):g} above the cap: {request}")
    print(
        f"{number} random settings, never worse than each named schedule with a peak at or below the cap: "
        f"{exceptions} exceptions ({compared} comparisons, faster in {beaten})"
    )
    return exceptions


def large(budget_s: float) -> None:
    """Print how long a large schedule takes to build and validate."""
    for num_ranks, num_micro_batches, cap in ((64, 256, 8.0), (256, 64, 4.0), (1024, 32, 2.0)):
        request = replace(_request(num_ranks, num_micro_batches, cap), budget_s=budget_s)
        begin = time.perf_counter()
        found = capped(request)
        taken_s = time.perf_counter() - begin
        print(
            f"P={num_ranks} N={num_micro_batches} K={cap:g}: efficiency {found.efficiency:.3f}, "
            f"bound {found.bound:.3f}, {found.placement}, built and validated in {taken_s:.1f} s"
        )


def main(arguments: list[str]) -> int:
    """Run all parts and return 1 if a target was missed or a setting is an exception."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="smaller budgets and fewer settings")
    is_quick = options.parse_args(arguments).quick
    machine()
    budget_s = QUICK_BUDGET_S if is_quick else 5.0
    begin = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal begin
        now = time.perf_counter()
        print(f"[{name}: {now - begin:.1f} s]\n", flush=True)
        begin = now

    table_of_families(budget_s)
    lap("families")
    missed = table_of_targets(budget_s)
    lap("targets")
    large(budget_s)
    lap("large")
    exceptions = settings(QUICK_SETTINGS if is_quick else NUM_SETTINGS)
    lap("settings")
    return int(bool(exceptions) or (bool(missed) and not is_quick))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
