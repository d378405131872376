"""scripts.calibrate and scripts.bench.fidelity.

From a probe on two ranks to a machine's file, and errors summed up.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from analysis.metrics.events import of_kinds
from gems.config.compose import compose
from gems.config.schema import CostConfig, RunSpec, ScheduleConfig
from gems.errors import ConfigError
from gems.plan.draft import Draft
from gems.profile.pace import RunPace
from gems.profile.store import known_pace
from gems.profile.subject import Subject
from gems.runs.simulated_run import simulated_trace
from gems.schedule.memory import memory_over_time
from gems.simulation.costs import RunCosts
from gems.trace import write_trace
from scripts import calibrate
from scripts.bench.fidelity import (
    HELD_OUT_EMULATED,
    HELD_OUT_REAL,
    Step,
    compared,
    predicted,
    step_peaks,
    summary,
)
from scripts.bench.pace import CALIBRATING, Pair, pace_of
from scripts.calibrate import compute_seconds, main
from tests.helpers import attributed


@pytest.mark.timeout(200)
def test_a_probe_becomes_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "machine" / "here.yaml"
    answer = tmp_path / "fidelity.json"
    answer.write_text(json.dumps({"median_error": 0.02}))
    monkeypatch.setattr(
        calibrate, "take_pace", lambda links, steps, overrides: RunPace(1.0 + steps / 10, 1e-4)
    )
    monkeypatch.setenv("GEMS_CACHE_DIR", str(tmp_path / "cache"))
    words = f"--out {out} --device cpu --base cpu --held-out {answer} --steps 5"
    assert main(words.split()) == 0
    assert capsys.readouterr().out == f"{out}\n"
    found = yaml.safe_load(out.read_text())
    assert found["link_bytes_per_s"] > 0 and 0 <= found["noise"] <= 0.5
    assert (found["name"], found["held_out_error"]) == ("here", 0.02)
    assert (found["pace_factor"], found["pace_pass_s"]) == (1.5, 1e-4)
    for machine in ("cpu", "auto"):
        assert known_pace(
            Subject.of(compose(["profile=measured", f"machine={machine}"]))
        ) == RunPace(1.5, 1e-4), "kept for this node"


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "x.yaml"), "--probe", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def spec_of(noise: float = 0.0, steps: int = 3) -> RunSpec:
    machine: dict[str, object] = {"kind": "emulated", "noise": noise}
    spec = attributed.spec_of(machine=machine, unit_s=0.01, activation_bytes=1000)
    return replace(spec, train=replace(spec.train, steps=steps))


def test_the_compute_of_a_run_by_step_and_rank(tmp_path: Path) -> None:
    spec = spec_of(noise=0.1, steps=60)
    write_trace(tmp_path / "trace.h5", simulated_trace(spec, Draft(spec).lowered))
    found = compute_seconds(tmp_path)
    assert found.shape == (59, 4)
    assert found.mean() == pytest.approx(8 * 0.03, rel=0.05) and np.std(found) == pytest.approx(
        0.024, rel=0.2
    )


def test_a_prediction_with_calibrated_links_has_no_noise() -> None:
    from gems.simulation.calibration import Calibration, LinkFit

    fast, slow = (
        Calibration({"link": LinkFit(latency, 1e12, 0.0)}, 0.1) for latency in (0.0, 0.001)
    )
    spec = spec_of()
    assert predicted(spec, fast).step_s == pytest.approx(0.33)
    assert predicted(spec, slow).step_s > 0.335
    assert predicted(spec, fast).peak_bytes == 4000


def test_a_searched_list_is_that_of_the_run_whatever_the_links() -> None:
    """At these links the search would settle on stages that hand on less often."""
    from gems.simulation.calibration import Calibration, LinkFit

    spec = replace(
        spec_of(),
        schedule=ScheduleConfig("capped", activation_cap=2.0, budget_s=1.0),
        cost=CostConfig(unit_s=0.01, activation_bytes=1000, boundary_bytes=10**6),
    )
    free, slow = (
        Calibration({"link": LinkFit(latency, 1e12, 0.0)}, 0.0) for latency in (0.0, 0.05)
    )
    other = replace(spec, machine=replace(spec.machine, link_latency_s=0.05))
    assert Draft(spec).lowered != Draft(other).lowered
    assert (
        predicted(spec, slow).step_s > predicted(other, slow).step_s > predicted(spec, free).step_s
    )


def test_the_peak_of_a_step_follows_from_the_times_in_the_trace() -> None:
    """A send that left late in one step holds its buffer in that step alone, among the counted ones."""
    spec = spec_of(steps=4)
    spec = replace(spec, cost=replace(spec.cost, boundary_bytes=300))
    made = Draft(spec).lowered
    trace = simulated_trace(spec, made)
    run_costs = RunCosts.of(spec)
    costs = run_costs.stages(made.placement)

    def peaks() -> list[float]:
        return step_peaks(trace, made, costs, spec.cost.activation_bytes).tolist()

    held = memory_over_time(
        made, costs, run_costs.kept(made).simulation, spec.cost.activation_bytes
    )
    assert peaks() == [max(rank.peak for rank in held)] * 3
    sends = (
        (trace.events["step"] == 2) & of_kinds(trace.events, "SEND_F") & (trace.events["rank"] == 0)
    )
    trace.events["end_ns"][sends] = trace.events["end_ns"][trace.events["step"] == 2].max()
    first, late, last = peaks()
    assert first == last < late <= first + 8 * 300
    with pytest.raises(ConfigError, match="lacks"):
        step_peaks(replace(trace, events=trace.events[~sends]), made, costs, 1.0)


def test_the_pace_of_runs_is_a_factor_and_host_time() -> None:
    alone = [(Step(step_s, 1.0), passes) for step_s, passes in ((1.0, 300), (2.0, 100), (4.0, 200))]
    pace = pace_of(
        [
            Pair(step, passes, Step(1.1 * step.step_s + 0.001 * passes, 1.0))
            for step, passes in alone
        ]
    )
    assert (pace.factor, pace.pass_s) == (pytest.approx(1.1), pytest.approx(0.001))
    assert pace.time_s(1.0, 300) == pytest.approx(1.4)


def test_errors_are_those_of_the_prediction() -> None:
    rows = [
        compared("real", "x", Step(1.0 + error, 100.0), Step(1.0, 102.0))
        for error in (-0.01, 0.03, 0.02)
    ]
    found = summary(rows)
    assert (found["median_error"], found["worst_error"]) == (
        pytest.approx(0.02),
        pytest.approx(0.03),
    )
    assert found["worst_peak_error"] == pytest.approx(2 / 102) and found["is_within_limits"]
    assert not summary([compared("real", "x", Step(1.1, 1.0), Step(1.0, 1.0))])["is_within_limits"]


def test_the_bench_has_the_runs_that_it_claims() -> None:
    assert len(HELD_OUT_EMULATED) >= 12 and len(HELD_OUT_REAL) == 4
    assert len({words for _, words in (*HELD_OUT_EMULATED, *HELD_OUT_REAL, *CALIBRATING)}) == 22
