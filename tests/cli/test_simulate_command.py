"""gems.cli.simulate: the prediction of a configured run, as an object and as text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gems.cli.framework import Options
from gems.cli.simulate import assumed, show_simulation
from gems.config.compose import compose
from gems.config.resolve import resolve
from gems.config.schema import CostConfig, MachineConfig, ParallelConfig, RunSpec, ScheduleConfig
from gems.errors import ScheduleError
from gems.plan.evaluate import simulate
from gems.profile.profilers.layers import take
from gems.profile.subject import Subject


def spec_of(
    name: str = "1f1b",
    partitions: int = 4,
    micro_batches: int = 8,
    replicas: int = 1,
    cap: float | None = None,
    machine: MachineConfig | None = None,
    **cost: object,
) -> RunSpec:
    return resolve(
        RunSpec(
            schedule=ScheduleConfig(name=name, activation_cap=cap),
            parallel=ParallelConfig(
                partitions=partitions, micro_batches=micro_batches, replicas=replicas
            ),
            cost=CostConfig(**cost),  # type: ignore[arg-type]
            machine=machine or MachineConfig(kind="simulated"),
        )
    )


def shown(capsys: pytest.CaptureFixture[str], spec: RunSpec) -> dict[str, object]:
    assert show_simulation(spec, Options(json=True)) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    found: dict[str, object] = json.loads(out)
    return found


def test_the_figures_of_1f1b(capsys: pytest.CaptureFixture[str]) -> None:
    """P = 4, N = 8, f = 1, b = 2 in units of 10 ms.

    (N + P - 1)(f + b) = 33, P - r micro-batches on rank r.
    """
    found = shown(capsys, spec_of(unit_s=0.01, activation_bytes=1000))
    assert found["schedule"] == "1f1b" and found["source"] == "simulated"
    assert (found["partitions"], found["replicas"], found["micro_batches"], found["stages"]) == (
        4,
        1,
        8,
        4,
    )
    assert (found["step_units"], found["step_s"]) == pytest.approx((33, 0.33))
    assert found["efficiency"] == pytest.approx(24 / 33)
    assert found["bubble"] == pytest.approx(9 / 33)
    assert found["images_per_s"] == pytest.approx(8 / 0.33)
    assert found["peak_units"] == [4, 3, 2, 1]
    assert found["peak_activation_bytes"] == found["peak_bytes"] == [4000, 3000, 2000, 1000]
    assert (found["cap"], found["bound"], found["gap"]) == (None, 1.0, pytest.approx(9 / 33))
    assert found["useful_s"] == pytest.approx([0.24] * 4)
    assert found["link_wait_s"] == [0] * 4


def test_the_figures_of_gems_at_a_cap_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    """P = 8, N = 32: 551 units; whatever the order, bidirectional whole backwards reach 6 / (3 P + 3) at most."""
    found = shown(capsys, spec_of("gems_master", 8, 32, cap=1))
    assert found["step_units"] == 551
    assert found["bound"] == pytest.approx(6 / 27)
    assert found["gap"] == pytest.approx(1 - 96 / 551 / (6 / 27))
    assert (found["cap"], found["peak_units"]) == (1, [1] * 8)
    assert found["peak_bytes"] == [None] * 8, "without the bytes of a unit none are made up"


def test_buffers_and_parameters_are_in_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    """One micro-batch in layer_parallel: activations 1000, a buffer each way of 10, parameters 100."""
    found = shown(
        capsys,
        spec_of("layer_parallel", 2, 1, activation_bytes=1000, boundary_bytes=10, param_bytes=100),
    )
    assert found["peak_activation_bytes"] == [1000, 1000]
    assert found["peak_bytes"] == [1000 + 100 + 10, 1000 + 100 + 10]


def test_a_link_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, spec_of("layer_parallel", 2, 1, link=3.0))
    assert (found["step_units"], found["link_wait_s"]) == (12, [3, 3])
    assert found["idle_s"] == [6, 6]


def test_recompute_is_no_bubble_and_not_useful(
    capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    path = f"{tmp_path}/s.json"
    with open(path, "w") as file:
        json.dump(
            {
                "schema": "gems.schedule/1",
                "name": "r",
                "ranks": 1,
                "stages": 1,
                "micro_batches": 2,
                "directions": 1,
                "placement": [[0]],
                "actions": [
                    [
                        ["F", 0, 0, 0],
                        ["F", 0, 0, 1],
                        ["R", 0, 0, 0],
                        ["B", 0, 0, 0],
                        ["R", 0, 0, 1],
                        ["B", 0, 0, 1],
                    ]
                ],
            },
            file,
        )
    spec = resolve(
        RunSpec(
            schedule=ScheduleConfig(name="file", path=path, activation_cap=1),
            parallel=ParallelConfig(partitions=1, micro_batches=2),
        )
    )
    found = shown(capsys, spec)
    assert (found["step_units"], found["bubble"], found["efficiency"]) == (8, 0.0, 0.75)
    assert found["recompute_s"] == [2]
    assert found["efficiency"] <= found["bound"]  # type: ignore[operator]


def test_replicas_multiply_images_and_not_time(capsys: pytest.CaptureFixture[str]) -> None:
    one, many = (shown(capsys, spec_of(replicas=replicas, unit_s=0.01)) for replicas in (1, 128))
    assert many["step_s"] == one["step_s"]
    assert many["images_per_s"] == pytest.approx(128 * float(one["images_per_s"]))  # type: ignore[arg-type]
    assert many["world_size"] == 512 and len(many["peak_units"]) == 4  # type: ignore[arg-type]


def test_1024_ranks_are_one_pipeline() -> None:
    """8 x 128 with N = 32: what is built and played is a pipeline of 8, and its reduction has 128 members."""
    alone, many = (
        simulate(spec_of("1f1b", 8, 32, replicas=n, link=0.5, param_bytes=1 << 20))
        for n in (1, 128)
    )
    assert sum(map(len, many.step.start)) == sum(map(len, alone.step.start))
    assert (
        many.times[0].reduce == pytest.approx(2 * 7 * 0.5) and alone.times[0].reduce == 0
    )  # up and down 7 levels


def test_the_slowest_replica_counts() -> None:
    """3 ranks a pipeline on nodes of 4.

    The first replica has no hop between nodes, the second has one.
    """
    machine = MachineConfig(kind="simulated", ranks_per_node=4, link_latency_s=2.0)
    alone, two = (
        simulate(spec_of("layer_parallel", 3, 1, replicas=replicas, machine=machine)).step.span
        for replicas in (1, 2)
    )
    assert (alone, two) == (9.0, 9.0 + 2 * 2.0)


def test_the_grid_and_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_simulation(spec_of(activation_bytes=1 << 20), Options()) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[0].startswith("rank    0 | F0 F1 F2 F3 ")
    assert (
        lines[4] == "1f1b: 4 ranks x 1 replicas, 4 stages, 8 micro-batches: simulated, a prediction"
    )
    assert any(line.split() == ["step", "[units]", "33"] for line in lines)
    assert "any order on this placement with a full backward; activations kept; free links" in out
    assert any(line.split()[:1] == ["efficiency"] and line.endswith("72.7") for line in lines)
    assert lines[-4].split() == ["0", "72.7", "0.0", "0.0", "0.0", "0.0", "0.0", "27.3", "4", "4.0"]


def test_a_broken_schedule_is_drawn_before_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ScheduleError, match="above the cap of 2"):
        show_simulation(spec_of("gpipe", 2, 3, cap=2), Options(json=True))
    out, err = capsys.readouterr()
    assert out == "" and "!0F2!" in err


def test_noise_gives_the_median_step_and_where_most_steps_lie(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machines = [MachineConfig(kind="simulated", noise=noise) for noise in (0.0, 0.02)]
    quiet, noisy = (
        {key: float(str(found[key])) for key in ("step_low_s", "step_s", "step_high_s")}
        for found in (
            shown(capsys, spec_of("gems_master", replicas=16, machine=machine))
            for machine in machines
        )
    )
    assert quiet["step_low_s"] == quiet["step_s"] == quiet["step_high_s"] < noisy["step_s"]
    assert noisy["step_low_s"] < noisy["step_s"] < noisy["step_high_s"]


def test_the_bound_says_what_it_holds_for() -> None:
    schedule = ScheduleConfig(
        name="capped",
        activation_cap=1,
        budget_s=0.05,
        placements=["v", "linear"],
        memory_actions=["recompute", "offload"],
    )
    parallel = ParallelConfig(partitions=2, micro_batches=4)
    cost = CostConfig(link=0.5)
    machine = MachineConfig(kind="simulated", noise=0.01)
    assert (
        assumed(
            simulate(
                resolve(RunSpec(schedule=schedule, parallel=parallel, cost=cost, machine=machine))
            )
        )
        == "any schedule with a split backward on v, linear; activations kept or recomputed or"
        " copied to host; links without contention; compute without noise"
    )


@pytest.fixture(params=["measured", "fake"])
def real(request: pytest.FixtureRequest, tmp_path: Path) -> RunSpec:
    """A real run on two ranks with the costs of its profile, in a file that says where its times come from."""
    spec = compose(
        [
            "machine=cpu",
            "data=synthetic",
            "model=resnet20_v1",
            "data.height_px=32",
            "data.width_px=32",
            "cost=profile",
            "parallel.partitions=2",
            "parallel.micro_batches=4",
            f"cache_dir={tmp_path}",
        ]
    )
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(replace(take(Subject.of(spec)), source=request.param).to_json()))
    return replace(spec, profile=replace(spec.profile, path=str(path)))


def test_a_step_that_no_run_calibrated_is_a_range(
    capsys: pytest.CaptureFixture[str], real: RunSpec, request: pytest.FixtureRequest
) -> None:
    found = shown(capsys, real)
    is_measured = "measured" in request.node.name
    assert found["is_calibrated"] is False
    assert found["step_range_s"] == (
        [found["step_s"], pytest.approx(2.4 * found["step_s"])] if is_measured else None
    )
    assert show_simulation(real, Options()) == 0
    text = capsys.readouterr().out
    if is_measured:
        assert (
            re.search(r"step \[s\] +[\d.]+ to [\d.]+\n", text)
            and "not calibrated for this machine" in text
        )
        assert re.search(r"images/s +[\d.]+ to [\d.]+\n", text)
    else:
        assert "by a profile on fake tensors on " in text and ", not compared with any run" in text
    paced = replace(real, machine=replace(real.machine, pace_factor=1.5))
    again = shown(capsys, paced)
    assert (again["is_calibrated"], again["step_range_s"]) == (is_measured, None)
    assert again["step_s"] == pytest.approx((1.5 if is_measured else 1.0) * found["step_s"])  # type: ignore[operator]


def test_costs_that_are_given_need_no_calibration(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, spec_of())
    assert found["is_calibrated"] is None and found["step_range_s"] is None


def test_the_grid_of_profiled_costs_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], real: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every action is there, and where there is no room for them one line says how to see them."""
    for columns, is_drawn in ((100, True), (30, False)):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert show_simulation(real, Options()) == 0
        grid, _, _ = capsys.readouterr().out.partition("gems_master: ")
        lines = [line for line in grid.splitlines() if line.startswith("rank")]
        if not is_drawn:
            assert not lines and "level=lowered" in grid and grid.count("\n") == 1
            continue
        assert len(lines) == 2 and max(map(len, lines)) <= 100 and "a column is" in grid
        assert [len(set(re.findall(r"[FBfb]\d", line))) for line in lines] == [8, 8]


@pytest.mark.cases
def test_units_are_no_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_simulation(spec_of(), Options()) == 0
    text = capsys.readouterr().out
    assert re.search(r"step \[units\] +33\n", text) and "[s]" not in text and "images/s" not in text
    found = shown(capsys, spec_of())
    assert (found["time_unit"], found["images_per_s"]) == ("unit", None)
    assert show_simulation(spec_of(unit_s=0.01), Options()) == 0
    text = capsys.readouterr().out
    assert re.search(r"step \[s\] +0\.33 \(33 units\)\n", text) and "images/s" in text
