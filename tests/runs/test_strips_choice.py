"""gems.plan.strips_choice: the number of strips of runs that leave it open."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import gems.plan.strips_choice
from gems.__main__ import VERBS
from gems.cli.framework import main
from gems.config.compose import compose
from gems.config.constraints import check_constraints
from gems.config.resolve import run_id
from gems.config.schema import RunSpec, ScheduleConfig
from gems.errors import ConfigError, DoesNotFitError
from gems.models import stride_of
from gems.plan.evaluate import evaluate, simulate, with_strips_chosen
from gems.plan.strips_choice import GAIN, Division, blocks, thin_parts, with_fastest_strips
from gems.profile.store import take_in_this_process
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from tests.helpers import toys

Outcome = float | ConfigError | DoesNotFitError


def simulated(tmp_path: Path, *words: str) -> RunSpec:
    return compose(
        ["machine=simulated", f"cache_dir={tmp_path}/cache", f"runs_dir={tmp_path}/runs", *words]
    )


def tried(spec: RunSpec, outcomes: Mapping[int, Outcome]) -> tuple[int, list[int]]:
    """Return the strips that are chosen when numbers of strips have these outcomes, and which were tried."""
    asked: list[int] = []

    def step_s(one: RunSpec) -> float:
        asked.append(one.parallel.strips)
        outcome = outcomes[one.parallel.strips]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return with_fastest_strips(spec, step_s).parallel.strips, asked


REFUSED = ConfigError("parallel.strips", 2, "must be 1")


def too_large(needed_bytes: int) -> DoesNotFitError:
    return DoesNotFitError("rank 0", needed_bytes, 10, "")


@pytest.mark.parametrize(
    ("outcomes", "chosen"),
    [
        ({1: 8.0, 2: 4.0, 4: 4.0}, (2, [1, 2, 4, 8])),
        ({1: 8.0, 2: 4.0, 4: 3.99}, (2, [1, 2, 4])),
        ({1: 8.0, 2: 9.0, 4: 4.0, 8: 4.1}, (4, [1, 2, 4, 8, 16])),
        ({1: 8.0, 2: 9.0, 4: 7.95}, (1, [1, 2, 4])),
        ({1: 8.0, 2: REFUSED}, (1, [1, 2])),
        ({1: REFUSED, 2: 8.0, 4: 4.0, 8: 3.99}, (4, [1, 2, 4, 8])),
        (
            {1: too_large(9), 2: too_large(30), 4: too_large(20), 8: 4.0, 16: 3.99},
            (8, [1, 2, 4, 8, 16]),
        ),
        ({1: 8.0, 2: too_large(30)}, (1, [1, 2])),
    ],
)
def test_a_doubling_must_gain_and_what_cannot_be_is_left_out(
    tmp_path: Path, outcomes: dict[int, Outcome], chosen: tuple[int, list[int]]
) -> None:
    slow: dict[int, Outcome] = {2**power: 9.5 for power in range(8)}
    assert tried(simulated(tmp_path), slow | outcomes) == chosen


def test_where_none_can_be_the_error_is_that_of_the_number_that_needs_least(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match="20 bytes"):
        tried(simulated(tmp_path), {1: too_large(40), 2: too_large(20), 4: too_large(20)})
    with pytest.raises(ConfigError, match="must be 1"):
        tried(simulated(tmp_path), {1: REFUSED, 2: ConfigError("x", 1, "is another")})


def gaining(step: Callable[[int], float]) -> int:
    strips = 1
    while step(2 * strips) <= step(strips) * (1 - GAIN):
        strips *= 2
    return strips


@pytest.mark.parametrize("partitions", [2, 4])
def test_of_a_published_schedule_it_is_where_the_closed_form_gains_no_more(
    tmp_path: Path, partitions: int
) -> None:
    words = [
        f"parallel.partitions={partitions}",
        "parallel.micro_batches=4",
        "schedule=layer_parallel",
    ]
    plan = evaluate(simulated(tmp_path, *words, "parallel.strips=0"), runs=False)
    expected = gaining(lambda strips: (strips + partitions - 1) / strips)
    assert plan.schedule.num_strips == plan.spec.parallel.strips == expected
    assert plan.predict().step.efficiency == pytest.approx(expected / (expected + partitions - 1))


def test_a_search_under_a_cap_is_as_fast_as_with_the_number_given(tmp_path: Path) -> None:
    words = [
        "parallel.partitions=2",
        "parallel.micro_batches=4",
        "schedule=capped",
        "schedule.activation_cap=1",
        "schedule.budget_s=0.5",
    ]
    found = simulate(simulated(tmp_path, *words, "parallel.strips=0"))
    given = {
        k: simulate(simulated(tmp_path, *words, f"parallel.strips={k}")).step_s for k in (1, 2, 4)
    }
    best = min(given.values())
    assert found.schedule.num_strips > 1 and found.step_s <= best / (1 - GAIN)


def test_messages_that_take_time_make_strips_fewer(tmp_path: Path) -> None:
    words = [
        "parallel.partitions=4",
        "parallel.micro_batches=2",
        "schedule=gpipe",
        "parallel.strips=0",
    ]
    free, slow = (
        evaluate(simulated(tmp_path, *words, f"machine.link_latency_s={latency}"), runs=False)
        for latency in (0.0, 1.0)
    )
    assert 1 <= slow.schedule.num_strips < free.schedule.num_strips


def test_one_rank_and_a_graph_of_operators_stay_whole(tmp_path: Path) -> None:
    one = simulated(tmp_path, "schedule=gpipe", "parallel.partitions=1", "parallel.strips=0")
    assert with_strips_chosen(one).parallel.strips == 1
    placed = replace(
        one, schedule=ScheduleConfig("placed"), parallel=replace(one.parallel, partitions=2)
    )
    assert tried(placed, {1: 8.0, 2: 4.0}) == (1, [1])
    with pytest.raises(ConfigError, match=r"parallel\.strips=2: is for schedules of stages"):
        check_constraints(replace(placed, parallel=replace(placed.parallel, strips=2)))


def test_the_folder_of_a_run_has_the_number_and_the_id_of_the_run_with_it_given(
    tmp_path: Path,
) -> None:
    words = [
        "machine=emulated",
        "schedule=gpipe",
        "parallel.partitions=2",
        "parallel.micro_batches=2",
    ]
    folder = prepare(simulated(tmp_path, *words, "parallel.strips=0"))
    chosen = folder.read_spec()
    assert chosen.parallel.strips == folder.read_schedule().num_strips > 1
    given = simulated(tmp_path, *words, f"parallel.strips={chosen.parallel.strips}")
    assert run_id(given) == run_id(chosen) and RunFolder.of(given).path == folder.path


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """A square image on one GPU whose kernels take time to launch, each part run again."""
    take_in_this_process()
    words = "model=resnet20_v1 model.norm=none model.depth=8 data=synthetic data.height_px=64"
    words += " data.width_px=64 machine=h200 schedule=layer_parallel parallel.partitions=1"
    words += " memory=recompute memory.recompute=strip parallel.strips=0"
    return compose([*words.split(), f"cache_dir={tmp_path_factory.mktemp('cache')}"])


def divided(spec: RunSpec, division: Division) -> RunSpec:
    return replace(spec, parallel=replace(spec.parallel, strips=division))


def with_limit(spec: RunSpec, limit_bytes: int) -> RunSpec:
    return replace(spec, machine=replace(spec.machine, device_bytes=limit_bytes))


@pytest.mark.parametrize("seed", range(30))
def test_of_all_divisions_the_fastest_that_fits_is_chosen(on_gpu: RunSpec, seed: int) -> None:
    """Launches make more parts slower; on several ranks, parts overlap; blocks hold less or more."""
    draw = random.Random(seed)
    ranks = draw.choice((1, 1, 4))
    launch_s = draw.choice((0.02, 0.1, 0.5))
    of_strips, of_columns = draw.uniform(0.5, 4), draw.uniform(0.2, 4)
    limit = draw.randint(10, 900)

    def judge(run: RunSpec) -> tuple[float, int]:
        rows, columns = (*run.parallel.grid, 1)[:2]
        parts = rows * columns
        step_s = (1 + (ranks - 1) / parts) * (1 + launch_s * parts * (1 + 0.05 * (columns > 1)))
        return step_s, round(1000 / parts + of_strips * (rows - 1) + of_columns * (columns - 1))

    def step_s(run: RunSpec) -> float:
        seconds, num_bytes = judge(run)
        if num_bytes > limit:
            raise DoesNotFitError("rank 0", num_bytes, limit, "use less")
        return seconds

    numbers = [2**power for power in range(7)]
    judged = [
        judge(divided(on_gpu, division))
        for number in numbers
        for division in (number, *blocks(number, on_gpu.data, on_gpu.model))
    ]
    fitting = [seconds for seconds, num_bytes in judged if num_bytes <= limit]
    if not fitting:
        with pytest.raises(DoesNotFitError, match="no division needs less than"):
            with_fastest_strips(on_gpu, step_s)
    else:
        assert judge(with_fastest_strips(on_gpu, step_s))[0] == min(fitting)


def test_blocks_are_square_and_not_thinner_than_what_streams(on_gpu: RunSpec) -> None:
    data, model = on_gpu.data, on_gpu.model
    grids = [blocks(2**power, data, model) for power in range(5)]
    assert grids == [[], [], [[2, 2]], [[4, 2]], [[4, 4]]]
    most = 64 // stride_of(model)
    assert blocks(most**2, data, model) == [[most] * 2]
    assert blocks(4 * most**2, data, model) == []
    assert blocks(16, replace(data, width_px=1024), model) == [[2, 8]]


def test_a_division_into_blocks_is_chosen_by_profile(
    on_gpu: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gems.plan.strips_choice, "PATIENCE", 1)
    asked: list[Division] = [2, 4, [2, 2], 8, [4, 2]]
    plans = {str(one): evaluate(divided(on_gpu, one)) for one in asked}
    peaks = {name: plan.peak.device_bytes for name, plan in plans.items() if plan.peak}
    limit = min(peaks[str(one)] for one in asked if isinstance(one, list))
    fitting = {name for name, peak in peaks.items() if peak <= limit}
    fastest = min(fitting, key=lambda name: plans[name].step_s)
    chosen = evaluate(with_limit(on_gpu, limit))
    assert chosen.step_s == pytest.approx(plans[fastest].step_s, rel=GAIN)
    assert str(chosen.spec.parallel.strips) in fitting


def test_where_more_parts_save_little_the_error_says_so(on_gpu: RunSpec) -> None:
    needed = {1: 900, 2: 500, 4: 300, 8: 290}

    def step_s(run: RunSpec) -> float:
        parts = run.parallel.num_strips
        more = 10 * isinstance(run.parallel.strips, list)
        raise DoesNotFitError("rank 0", needed[parts] - more, 280, "use less")

    with pytest.raises(DoesNotFitError) as raised:
        with_fastest_strips(on_gpu, step_s)
    assert raised.value.needed_bytes == 280
    assert raised.value.advice == (
        "no division needs less than parallel.strips=[4,2], and twice as many parts save less than"
        " 5 %; use less"
    )


def test_parts_that_are_thin_for_their_gpu_are_warned_of(
    on_gpu: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    many = divided(on_gpu, [4, 4])
    profile = evaluate(many).profile
    assert profile is not None
    warning = thin_parts(many.parallel, many.data, many.machine.launch_s, profile)
    assert warning is not None and warning.startswith(
        "parallel.strips=[4,4]: parts of 16 x 16 px take 9"
    )
    assert thin_parts(many.parallel, many.data, None, profile) is None
    whole = evaluate(divided(on_gpu, 1))
    assert whole.profile is not None
    launch_s = whole.spec.machine.launch_s
    assert thin_parts(whole.spec.parallel, whole.spec.data, launch_s, whole.profile) is None
    words = f"cache_dir={on_gpu.cache_dir} model=resnet20_v1 model.norm=none model.depth=8"
    words += " data=synthetic data.height_px=64 data.width_px=64 machine=h200 memory=recompute"
    words += " schedule=layer_parallel parallel.partitions=1 memory.recompute=strip"
    assert main("gems", VERBS, ["memory", *words.split(), "parallel.strips=[4,4]"]) == 0
    shown = capsys.readouterr().out
    assert "of 4 x 4 blocks" in shown and f"warning: {warning}" in shown


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """One image a step through a ResNet without norms on two ranks."""
    take_in_this_process()
    model = replace(toys.make_spec("1f1b", 2).model, norm="none", depth=8)
    data = replace(toys.make_spec("1f1b", 2).data, height_px=64, width_px=8)
    made = toys.make_spec(
        "1f1b", 2, model=model, data=data, cache_dir=str(tmp_path_factory.mktemp("cache"))
    )
    return replace(
        made, parallel=replace(made.parallel, micro_batches=1, parts=1, replications=1, strips=0)
    )


def test_layers_take_the_times_of_their_profile_so_strips_do_not_become_thin(
    opened: RunSpec,
) -> None:
    chosen = evaluate(opened)
    assert 1 < chosen.spec.parallel.strips == chosen.schedule.num_strips < opened.data.height_px
    assert chosen.spec == replace(opened, parallel=chosen.spec.parallel)


def test_what_needs_the_whole_image_stays_whole(opened: RunSpec) -> None:
    assert (
        evaluate(replace(opened, model=replace(opened.model, norm="batch"))).spec.parallel.strips
        == 1
    )


def test_a_cap_in_bytes_is_kept_with_the_rows_that_strips_share(opened: RunSpec) -> None:
    low = replace(opened, data=replace(opened.data, height_px=32))
    asked = replace(low, schedule=ScheduleConfig("capped", activation_cap=1.0, budget_s=0.2))
    many = evaluate(replace(asked, parallel=replace(asked.parallel, strips=8)))
    held = max(rank.peak_activation_bytes for rank in many.memory.ranks)
    unit_bytes = many.costs.activation_bytes
    assert held > unit_bytes, "the search counts equal shares of the image"
    capped = replace(
        asked, schedule=ScheduleConfig("capped", activation_cap_bytes=unit_bytes, budget_s=0.2)
    )
    with pytest.raises(ConfigError, match=f"leaves no schedule in 8 strips, which .* hold {held}"):
        evaluate(replace(capped, parallel=replace(capped.parallel, strips=8)))
    assert max(rank.peak_activation_bytes for rank in evaluate(capped).memory.ranks) <= unit_bytes
    roomy = replace(capped, schedule=replace(capped.schedule, activation_cap_bytes=2 * held))
    assert evaluate(roomy).schedule.num_strips > 1


def test_simulate_prints_both_bounds_and_plan_refuses_one_pipelines_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "machine=simulated",
        f"cache_dir={tmp_path}",
        "parallel.partitions=2",
        "parallel.micro_batches=2",
        "schedule=capped",
        "schedule.activation_cap=1",
        "schedule.budget_s=0.2",
        "parallel.strips=0",
    ]
    assert main("gems", VERBS, ["simulate", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (
        answer["efficiency"] <= answer["bound"] <= answer["bound_any_strips"] <= 1
        and answer["strips"] > 1
    )
    assert main("gems", VERBS, ["simulate", *words]) == 0
    text = capsys.readouterr().out
    assert (
        f"under the cap in {answer['strips']} strips [%]" in text
        and "in any number of strips [%]" in text
    )
    assert main("gems", VERBS, ["plan", *words]) == 2
    assert "gems plan --strips" in capsys.readouterr().err
