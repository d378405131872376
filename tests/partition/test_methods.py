"""The cut of a run by each method, what it predicts, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

import gems.plan.draft
from gems.config.recipe import OptimizerConfig
from gems.config.resolve import resolve
from gems.config.schema import (
    MachineConfig,
    ModelConfig,
    ParallelConfig,
    PartitionConfig,
    RunSpec,
    ScheduleConfig,
)
from gems.errors import ConfigError, DoesNotFitError
from gems.models import layers_of
from gems.partition.compare import PLAIN, at_most, compare, evaluate, plain_pipeline
from gems.partition.methods import METHODS, PartitionCase, check_fits, partition_by
from gems.partition.problem import Partition
from gems.plan.draft import Draft
from gems.profile import LayerProfile, ModelProfile
from gems.schedule import generate
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.schedule.strips import with_strips
from tests.helpers.profiles import profile, random_profile

ALL = tuple(METHODS)


def lowered(name: str, ranks: int = 4, micro_batches: int = 8) -> Schedule:
    return lower(generate(name, ranks, micro_batches))


def decaying(num_layers: int = 18, seed: int = 0) -> ModelProfile:
    return random_profile(num_layers, seed, decay=0.8)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> ModelProfile:
    """Make the profile of ResNet-20 one of made-up figures."""
    made = decaying(11)
    monkeypatch.setattr(gems.plan.draft, "profile_of", lambda spec: made)
    return made


def spec_of(schedule: str = "1f1b", partitions: int = 4, **sections: object) -> RunSpec:
    made = {
        "schedule": ScheduleConfig(schedule),
        "parallel": ParallelConfig(partitions=partitions, micro_batches=8),
        "partition": PartitionConfig(),
        **sections,
    }
    return resolve(RunSpec(**made))  # type: ignore[arg-type]


class TestMethods:
    @pytest.mark.parametrize("method", ALL)
    @pytest.mark.parametrize("schedule", ["1f1b", "gems_master", "zb_v"])
    def test_every_method_cuts_every_placement(self, method: str, schedule: str) -> None:
        case = PartitionCase(decaying(), lowered(schedule))
        found = partition_by(method, case)
        assert found.method == method
        assert (found.boundaries[0], found.boundaries[-1]) == (0, 18)
        assert sorted(set(found.boundaries)) == list(found.boundaries)
        assert len(found.boundaries) == case.num_stages + 1
        assert found.cost == pytest.approx(max(case.peak_bytes(found.boundaries)), rel=1e-3)

    @pytest.mark.parametrize(
        "schedule", ["1f1b", "gpipe", "gems_master", "chimera", "zb_v", "interleaved_1f1b"]
    )
    @pytest.mark.parametrize("objective", ["peak_bytes", "rank_time", "time"])
    def test_exact_is_never_above_another(self, schedule: str, objective: str) -> None:
        is_slow = objective == "time" or schedule == "interleaved_1f1b"
        for seed in range(1 if is_slow else 3):
            case = PartitionCase(decaying(seed=seed), lowered(schedule))
            ours = partition_by("exact", case, objective)
            for method in METHODS:
                assert ours.cost <= partition_by(method, case, objective).cost * (1 + 1e-12), (
                    method,
                    seed,
                )
            assert ours.bound <= ours.cost

    @pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "gems_master", "zb_h1"])
    def test_the_step_is_nearly_as_short_as_that_of_any_cut(self, schedule: str) -> None:
        """The most even ranks are slower by up to a fifth, where micro-batches are few."""
        ratios = []
        even_ratios = []
        for seed in range(6):
            case = PartitionCase(random_profile(9, seed, decay=0.9), lowered(schedule, 4, 4))
            every = [case.cost("time", (0, *inner, 9)) for inner in combinations(range(1, 9), 3)]
            ours, even = (
                partition_by("exact", case, objective) for objective in ("time", "rank_time")
            )
            assert ours.cost == case.cost("time", ours.boundaries) >= ours.bound == even.bound
            ratios.append(ours.cost / min(every))
            even_ratios.append(case.cost("time", even.boundaries) / min(every))
        assert max(ratios) <= 1.02 and max(ratios) <= max(even_ratios)
        if schedule in ("gems_master", "zb_h1"):
            assert max(even_ratios) > 1.05

    def test_time_under_a_limit(self) -> None:
        case = PartitionCase(decaying(), lowered("1f1b"))
        least = max(case.peak_bytes(partition_by("exact", case).boundaries))
        free = partition_by("exact", case, "time")
        limit = (least + max(case.peak_bytes(free.boundaries))) // 2
        limited = partition_by("exact", replace(case, limit_bytes=limit), "time")
        assert least <= max(case.peak_bytes(limited.boundaries)) <= limit
        assert limited.cost > free.cost, "the fastest cut does not fit"

    def test_mcap_measures_what_a_schedule_holds(self) -> None:
        """It profiles the runs that it will recommend for: more in flight, more to balance."""
        made = decaying(12, seed=2)
        few = partition_by("mcap", PartitionCase(made, lowered("gpipe", 4, 1))).boundaries
        many = partition_by("mcap", PartitionCase(made, lowered("1f1b", 4, 16))).boundaries
        assert few != many


class TestRuns:
    def test_boundaries_as_given(self, given: ModelProfile) -> None:
        spec = spec_of(
            parallel=ParallelConfig(partitions=2, micro_batches=4, boundaries=[0, 1, 11])
        )
        assert Draft(spec).partition(lowered("1f1b", 2, 4)).boundaries == (0, 1, 11)

    def test_the_method_of_the_run(self, given: ModelProfile) -> None:
        schedule = lowered("1f1b")
        for method in ALL:
            spec = spec_of(partition=PartitionConfig(method))
            assert (
                Draft(spec).partition(schedule).boundaries
                == partition_by(method, Draft(spec).partitioner.case(schedule), "time").boundaries
            )

    def test_a_run_wants_time_unless_it_says_peak(self, given: ModelProfile) -> None:
        schedule = lowered("1f1b")
        case = Draft(spec_of()).partitioner.case(schedule)
        for objective, made in (("auto", "time"), ("time", "time"), ("peak_bytes", "peak_bytes")):
            spec = spec_of(partition=PartitionConfig(objective=objective))
            assert (
                Draft(spec).partition(schedule).boundaries
                == partition_by("exact", case, made).boundaries
            )
        assert (
            partition_by("exact", case, "time").boundaries
            != partition_by("exact", case, "peak_bytes").boundaries
        )

    def test_one_rank_and_even_cuts_need_no_profile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(spec: RunSpec) -> ModelProfile:
            raise AssertionError("nobody needs it")

        monkeypatch.setattr(gems.plan.draft, "profile_of", refuse)
        assert Draft(spec_of(partitions=1)).partition(lowered("1f1b", 1)).boundaries == (0, 11)
        assert (
            len(
                Draft(spec_of(partition=PartitionConfig("even")))
                .partition(lowered("1f1b"))
                .boundaries
            )
            == 5
        )

    def test_more_stages_than_layers(self, given: ModelProfile) -> None:
        num_layers = len(layers_of(ModelConfig(), spec_of().data))
        with pytest.raises(
            ConfigError, match=rf"parallel\.partitions=8: makes 16 stages .* at most {num_layers}"
        ):
            Draft(spec_of("zb_v", 8)).partition(lowered("zb_v", 8))

    def test_a_cut_is_kept(self, given: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = spec_of()
        schedule = lowered("1f1b")
        first = Draft(spec).partition(schedule)
        monkeypatch.setattr(gems.partition.methods, "partition_by", None)
        assert Draft(spec).partition(schedule) == first

    def test_the_optimizer_is_the_runs(self, given: ModelProfile) -> None:
        schedule = lowered("1f1b")
        optimizers = [
            Draft(spec_of(optimizer=optimizer)).partitioner.case(schedule).optimizer
            for optimizer in (
                OptimizerConfig(),
                OptimizerConfig(momentum=0.0),
                OptimizerConfig(name="adam"),
            )
        ]
        assert optimizers == ["sgd", "sgd_plain", "adam"]


class TestWhatDoesNotFit:
    def test_a_rank_above_the_limit(self, given: ModelProfile) -> None:
        schedule = lowered("1f1b")
        case = Draft(spec_of()).partitioner.case(schedule)
        found = partition_by("exact", case)
        most = max(case.peak_bytes(found.boundaries))
        check_fits(replace(case, limit_bytes=most), found)
        with pytest.raises(
            DoesNotFitError,
            match=rf"rank \d of 4 with the exact partition needs {most} bytes .*"
            rf"machine\.device_bytes={most - 1} .*; use more partitions",
        ) as refused:
            check_fits(replace(case, limit_bytes=most - 1), found)
        assert refused.value.exit_code == 3

    def test_the_run_is_refused(self, given: ModelProfile) -> None:
        for objective in ("peak_bytes", "time"):
            spec = spec_of(
                machine=MachineConfig(device_bytes=1000),
                partition=PartitionConfig(objective=objective),
            )
            with pytest.raises(DoesNotFitError):
                Draft(spec).partition(lowered("1f1b"))

    @pytest.mark.parametrize("objective", ["peak_bytes", "time"])
    def test_a_layer_larger_than_a_device_is_named(self, objective: str) -> None:
        layers = [LayerProfile(f"small{i}", "x", 1.0, stash_bytes=10) for i in range(5)]
        layers[2] = LayerProfile("giant", "x", 1.0, stash_bytes=10, forward_peak_bytes=10**6)
        case = PartitionCase(profile(layers, 0), lowered("1f1b", 2, 2), limit_bytes=10_000)
        with pytest.raises(
            DoesNotFitError,
            match=r"layer giant alone on a rank needs 1000\d\d\d bytes .*recompute or offload",
        ):
            check_fits(case, partition_by("exact", case, objective))


class TestComparison:
    def test_ours_first_and_least(self) -> None:
        evaluated = compare(PartitionCase(decaying(), lowered("1f1b")), "peak_bytes", 5.0)
        assert [each.partition.method for each in evaluated] == list(ALL)
        assert all(max(evaluated[0].peak_bytes) <= max(each.peak_bytes) for each in evaluated)
        assert all(sum(each.layers_per_stage) == 18 for each in evaluated)
        assert all(each.step_s > 0 for each in evaluated)

    def test_pairs_stand_beside_the_plain_cut(self) -> None:
        case = PartitionCase(decaying(), lowered("gems_master"))
        evaluated = {each.partition.method: each for each in compare(case, "peak_bytes", 5.0)}
        assert set(evaluated) == {*ALL, PLAIN}
        chain = PartitionCase(case.profile, lowered("gpipe", 4, 1))
        assert plain_pipeline(case, 5.0).boundaries == partition_by("exact", chain).boundaries

    def test_step_time_is_that_of_the_schedule(self) -> None:
        layers = [LayerProfile(f"l{i}", "x", 1.0, 1.0, 1.0, output_bytes=4) for i in range(4)]
        case = PartitionCase(profile(layers), lowered("1f1b", 2, 4))
        assert evaluate(case, Partition("x", (0, 2, 4), 0.0, 0.0, False)).step_s == (4 + 1) * 6.0
        assert evaluate(case, Partition("x", (0, 1, 4), 0.0, 0.0, False)).step_s > 30.0

    def test_another_methods_better_cut_is_taken(self) -> None:
        ours = Partition("exact", (0, 1, 4), 5.0, 3.0, False)
        better = Partition("mcap", (0, 2, 4), 4.0, 0.0, False)
        taken = at_most(ours, [better])
        assert (taken.method, taken.boundaries, taken.cost, taken.bound) == (
            "exact",
            (0, 2, 4),
            4.0,
            3.0,
        )
        assert taken.facts["from"] == "mcap"
        assert at_most(ours, [replace(better, cost=5.0)]) is ours


def test_strips_are_cut_by_the_list_that_runs() -> None:
    """One image through two ranks takes as long with any cut.

    Its strips overlap, so that even ranks are faster.
    """
    whole = generate("layer_parallel", 2, 1)
    gains = []
    for seed in range(6):
        case = PartitionCase(random_profile(8, seed, decay=0.8), lower(whole))
        in_strips = replace(case, in_strips=lower(with_strips(whole, 8)))
        one, strips = (partition_by("exact", each, "time").boundaries for each in (case, in_strips))
        assert case.cost("time", one) == pytest.approx(case.cost("time", strips))
        gains.append(in_strips.cost("time", one) / in_strips.cost("time", strips))
    assert min(gains) >= 1 and max(gains) > 1.1
