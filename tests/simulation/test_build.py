"""From a configuration to its one list, its costs in units, and its cut."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import gems.simulation.build
from gems.config.resolve import resolve
from gems.config.schema import CostConfig, MachineConfig, ParallelConfig, RunSpec, ScheduleConfig
from gems.errors import ConfigError, ScheduleError
from gems.partition.links import STAGED_PIECE_BYTES
from gems.plan.draft import Draft
from gems.plan.evaluate import evaluate
from gems.schedule import generate
from gems.schedule.action import Kind
from gems.schedule.formats.schedule_json import to_json
from gems.schedule.placement import bidirectional, linear
from gems.simulation.costs import RunCosts


def spec_of(
    schedule: str | ScheduleConfig = "1f1b",
    partitions: int = 2,
    micro_batches: int = 4,
    **sections: object,
) -> RunSpec:
    made_of = ScheduleConfig(schedule) if isinstance(schedule, str) else schedule
    parallel = ParallelConfig(partitions=partitions, micro_batches=micro_batches)
    made = {"schedule": made_of, "parallel": parallel, **sections}
    return resolve(RunSpec(**made))  # type: ignore[arg-type]


def test_a_cap_that_a_named_schedule_does_not_keep_is_refused() -> None:
    assert Draft(spec_of(ScheduleConfig("gpipe", activation_cap=4))).lowered
    with pytest.raises(ScheduleError, match="above the cap of 3"):
        _ = Draft(spec_of(ScheduleConfig("gpipe", activation_cap=3))).lowered


def test_a_cap_in_bytes_is_one_in_units() -> None:
    cost = CostConfig(activation_bytes=1000)
    assert (
        RunCosts.of(
            spec_of(schedule=ScheduleConfig("1f1b", activation_cap_bytes=2500), cost=cost)
        ).cap
        == 2.5
    )
    assert (
        RunCosts.of(spec_of(schedule=ScheduleConfig("1f1b", activation_cap=2), cost=cost)).cap == 2
    )
    assert RunCosts.of(spec_of()).cap is None
    unknown = replace(spec_of(), schedule=ScheduleConfig("capped", activation_cap_bytes=2500))
    with pytest.raises(
        ConfigError, match=r"activation_cap_bytes=2500: needs cost.activation_bytes"
    ):
        assert RunCosts.of(unknown).cap


class TestFromAFile:
    def write(self, path: Path, name: str = "gems_mast", **changes: object) -> ScheduleConfig:
        path.write_text(json.dumps({**to_json(generate(name, 2, 2)), **changes}))
        return ScheduleConfig("file", path=str(path))

    def test_it_is_read(self, tmp_path: Path) -> None:
        spec = spec_of(micro_batches=2, schedule=self.write(tmp_path / "made.json"))
        assert Draft(spec).compute == generate("gems_mast", 2, 2)

    @pytest.mark.parametrize(
        ("partitions", "micro_batches", "key"), [(3, 2, "partitions"), (2, 4, "micro_batches")]
    )
    def test_of_another_size(
        self, tmp_path: Path, partitions: int, micro_batches: int, key: str
    ) -> None:
        spec = spec_of(self.write(tmp_path / "made.json"), partitions, micro_batches)
        with pytest.raises(ConfigError, match=rf"parallel\.{key}=.*must be 2"):
            _ = Draft(spec).lowered

    def test_one_that_would_not_run(self, tmp_path: Path) -> None:
        rows = to_json(generate("gems_mast", 2, 2))["actions"]
        schedule = self.write(tmp_path / "made.json", actions=[rows[0][::-1], rows[1]])
        with pytest.raises(ScheduleError):
            _ = Draft(spec_of(micro_batches=2, schedule=schedule)).lowered

    @pytest.mark.parametrize("text", ["", "[]", "{}"])
    def test_none_at_all(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "made.json").write_text(text)
        with pytest.raises(ConfigError):
            _ = Draft(
                spec_of(schedule=ScheduleConfig("file", path=str(tmp_path / "made.json")))
            ).lowered
        with pytest.raises(ConfigError, match=r"schedule\.path=.*holds no schedule"):
            _ = Draft(
                spec_of(schedule=ScheduleConfig("file", path=str(tmp_path / "missing.json")))
            ).lowered


class TestCosts:
    def test_links_in_units_of_time(self) -> None:
        machine = MachineConfig(
            link_latency_s=0.002,
            link_bytes_per_s=1e6,
            ranks_per_node=4,
            node_latency_s=0.001,
            node_bytes_per_s=4e6,
        )
        network = RunCosts.of(
            spec_of(machine=machine, cost=CostConfig(unit_s=0.01, link=0.5))
        ).network.in_units(0.01)
        assert network.delay(0, 4, 1e4) == pytest.approx(0.5 + 0.2 + 1.0)
        assert network.delay(0, 3, 1e4) == pytest.approx(0.5 + 0.1 + 0.25)

    def test_messages_through_host_memory_are_copied_there_and_back_besides(self) -> None:
        rates = {"link_bytes_per_s": 1e6, "d2h_bytes_per_s": 2e6, "h2d_bytes_per_s": 4e6}
        networks = [
            RunCosts.of(
                spec_of(machine=MachineConfig(device=device, transport=transport, **rates))
            ).network
            for device, transport in (("cuda", "host"), ("cuda", "auto"), ("cpu", "host"))
        ]
        staged, direct, of_processors = (network.delay(0, 1, 1e6) for network in networks)
        assert direct == of_processors and staged == pytest.approx(direct * (1 + 0.5 + 0.25))
        pieces = networks[0].delay(0, 1, 10 * STAGED_PIECE_BYTES)
        assert pieces == pytest.approx((1.75 + 9 * 1) * STAGED_PIECE_BYTES / 1e6), (
            "the link is the slowest of three"
        )

    def test_gradients_of_copies_and_replicas_are_summed_in_a_ring(self) -> None:
        cost = CostConfig(unit_s=0.001, param_bytes=3000)
        machine = MachineConfig(link_latency_s=0.001, link_bytes_per_s=1e6)
        alone = spec_of(machine=machine, cost=cost)
        assert RunCosts.of(alone).stages(linear(2)).reduce == (0.0, 0.0)
        abstract = spec_of(machine=machine, cost=CostConfig(link=0.5))
        assert RunCosts.of(abstract).stages(bidirectional(2)).reduce == (0.0, 0.0)
        pair = 2 * 1 * 1.0 + 2 * 1 / 2 * 2 * 3.0  # each of the two holds both stages
        assert RunCosts.of(alone).stages(bidirectional(2)).reduce[0] == pytest.approx(0.001 * pair)
        replicas = spec_of(
            machine=machine, cost=cost, parallel=ParallelConfig(2, replicas=3, micro_batches=4)
        )
        assert RunCosts.of(replicas).stages(linear(2)).reduce == pytest.approx(
            (0.001 * (4 * 1.0 + 2 * 2 / 3 * 3.0),) * 2
        )


class TestCut:
    def test_a_placement_with_more_stages_than_layers(self) -> None:
        deepest = spec_of("1f1b", 11)
        spec = spec_of("zb_v", 8)
        assert evaluate(deepest).boundaries == tuple(range(12))
        with pytest.raises(
            ConfigError, match=r"partitions=8: makes 16 stages .*2 stages on a rank"
        ):
            evaluate(spec)

    def test_a_machine_on_paper_cuts_no_model(self) -> None:
        spec = spec_of("1f1b", 64, 64, machine=MachineConfig(kind="emulated"))
        assert evaluate(spec).schedule.num_ranks == 64


class TestSearch:
    def test_a_search_is_kept_to_the_layers_of_the_model(self) -> None:
        """ReNet-20 has 11 layers, so of 4 ranks none holds three stages.

        On paper it may hold any number.
        """
        spec = spec_of(ScheduleConfig("capped", activation_cap=1.5, budget_s=0.5), 4, 8)
        assert evaluate(spec).schedule.num_stages <= 11
        assert Draft(spec).lowered.num_stages > 11
        few = spec_of(
            ScheduleConfig("capped", activation_cap=1.5, budget_s=0.5, max_stages=4), 4, 8
        )
        assert Draft(few).lowered.num_stages == 4

    def test_the_search_is_done_once(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        spec = spec_of(
            ScheduleConfig("capped", activation_cap=1, budget_s=0.2), 2, 4, cache_dir=str(tmp_path)
        )
        found = Draft(spec).search_result
        assert 0 < found["bound"] <= 1 and found["candidates"] > 0
        monkeypatch.setattr(gems.simulation.build, "find_schedule", None)
        assert Draft(spec).search_result == found

    def test_a_search_may_recompute_in_a_run(self) -> None:
        schedule = ScheduleConfig(
            "capped", activation_cap=0.75, budget_s=0.5, memory_actions=["recompute"]
        )
        assert Draft(spec_of(schedule, 2, 4)).lowered.has_any(Kind.R)
        assert evaluate(spec_of(schedule, 2, 4)).schedule.has_any(Kind.R)
        assert (
            evaluate(spec_of(schedule, 2, 4, machine=MachineConfig(kind="emulated"))).boundaries
            == ()
        )
