"""gems.simulation.calibration.

Fits of timings, what they say of a machine, and the file that holds it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from gems.config.compose import compose
from gems.config.schema import MachineConfig
from gems.engine.transport.speed_probe import rank_pairs
from gems.errors import ConfigError
from gems.profile.pace import RunPace
from gems.profile.subject import Subject
from gems.schedule.costs import Network
from gems.schedule.replicas import all_reduce
from gems.simulation.calibration import (
    MAX_NOISE,
    SCHEMA,
    UNCALIBRATED,
    Calibration,
    LinkFit,
    calibration_of,
    confidence_of,
    fit_link,
    fit_pace,
    machine_yaml,
    merged,
    noise_of,
)

SIZES = [1e3, 1e5, 1e6, 4e6]


def probe(**changes: object) -> dict[str, object]:
    """A machine of two nodes: 2 us and 10 GB/s between them, 1 us and 40 GB/s inside, sums as the rings predict."""
    network = Network(2e-6, 1e-10, 2, 1e-6, 2.5e-11)
    sums = [all_reduce(network, range(4), size).time for size in SIZES]
    levels = {"link": (2e-6, 1e10), "node": (1e-6, 4e10)}
    return {
        "schema": SCHEMA,
        "kind": "real",
        "nodes": ["a", "b"],
        "mpi": "MPI 1",
        "ranks_per_node": 2,
        "messages": {
            level: {"bytes": SIZES, "s": [latency + size / rate for size in SIZES]}
            for level, (latency, rate) in levels.items()
        },
        "sums": {"ranks": 4, "bytes": SIZES, "s": sums},
        "computes_s": np.random.default_rng(0).normal(1.0, 0.02, (400, 4)).tolist(),
        **changes,
    }


class TestLinks:
    def test_a_straight_line_is_found_again(self) -> None:
        fit = fit_link(SIZES, [5e-6 + size / 2e9 for size in SIZES])
        assert (fit.latency_s, fit.bytes_per_s) == (pytest.approx(5e-6), pytest.approx(2e9))
        assert fit.error == pytest.approx(0.0, abs=1e-9) and fit.time_s(2e9) == pytest.approx(
            1 + 5e-6
        )

    def test_errors_are_relative(self) -> None:
        """A large message that is 10 % off moves the latency by less than the small ones' own size."""
        times = [5e-6 + size / 2e9 for size in SIZES]
        times[-1] *= 1.1
        fit = fit_link(SIZES, times)
        assert fit.latency_s == pytest.approx(5e-6, rel=0.1) and 0 < fit.error < 0.06

    def test_neither_latency_nor_rate_is_negative(self) -> None:
        fit = fit_link([1e3, 1e6], [1e-9, 1e-3])
        assert fit.latency_s == 0 and fit.bytes_per_s > 0
        falling = fit_link([1e3, 1e6], [2e-6, 1e-6])
        assert falling.latency_s > 0 and falling.bytes_per_s == pytest.approx(1e15)

    @pytest.mark.parametrize(
        ("sizes", "times"), [([1e3], [1.0]), ([1e3, 1e3], [1.0, 1.0]), ([1.0, 2.0], [0.0, 1.0])]
    )
    def test_too_little_to_fit(self, sizes: list[float], times: list[float]) -> None:
        with pytest.raises(ConfigError, match="two sizes or more"):
            fit_link(sizes, times)


class TestNoise:
    def test_the_spread_of_what_should_be_equal(self) -> None:
        times = np.random.default_rng(0).normal(2.0, 0.06, (4000, 3))
        assert noise_of(times) == pytest.approx(0.03, rel=0.1)
        times[:200] *= 10  # interruptions, and no noise
        assert noise_of(times) == pytest.approx(0.033, rel=0.15)

    def test_too_few_repetitions(self) -> None:
        with pytest.raises(ConfigError, match="four or more"):
            noise_of(np.ones((3, 2)))


class TestMachine:
    def test_both_levels_and_sums_that_they_predict(self) -> None:
        found = calibration_of(probe())
        assert found.links["link"].latency_s == pytest.approx(2e-6)
        assert found.links["node"].bytes_per_s == pytest.approx(4e10)
        assert found.noise == pytest.approx(0.02, rel=0.2)
        assert found.all_reduce_error == pytest.approx(0.0, abs=1e-6)
        assert found.ranks_per_node == 2

    def test_one_node_has_one_level(self) -> None:
        both = probe()["messages"]
        assert isinstance(both, dict)
        found = calibration_of(probe(messages={"node": both["node"]}))
        assert set(found.links) == {"link"} and "ranks_per_node" not in found.machine()
        assert found.machine()["link_latency_s"] == pytest.approx(1e-6)

    def test_emulated_compute_has_no_noise(self) -> None:
        assert calibration_of(probe(kind="emulated")).noise == 0.0

    def test_runs_know_noise_better(self) -> None:
        found = calibration_of(probe())
        assert merged(found, []) == found and merged(found, [0.1, 0.3, 0.2]).noise == 0.2

    def test_another_schema_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"must be gems\.calibration/1"):
            calibration_of(probe(schema="gems.probe/1"))

    def test_ranks_are_paired_inside_and_between_nodes(self) -> None:
        assert rank_pairs(["a", "a", "b", "b"]) == {"node": (0, 1), "link": (0, 2)}
        assert rank_pairs(["a", "b"]) == {"link": (0, 1)}
        assert rank_pairs(["a", "a"]) == {"node": (0, 1)}


class TestPace:
    def test_a_factor_and_host_time_are_found_again(self) -> None:
        alone = [1.0, 2.0, 4.0]
        passes = [300.0, 100.0, 200.0]
        steps = [1.1 * one + 0.001 * count for one, count in zip(alone, passes, strict=True)]
        pace = fit_pace(alone, passes, steps)
        assert (pace.factor, pace.pass_s) == (pytest.approx(1.1), pytest.approx(0.001))
        assert pace.time_s(1.0, 300) == pytest.approx(steps[0])

    def test_neither_is_below_0(self) -> None:
        """Steps that take less per pass the more passes they have; and steps of passes alone."""
        assert fit_pace([1.0, 1.0], [100.0, 200.0], [2.0, 1.5]).pass_s == 0.0
        pace = fit_pace([2.0, 1.0], [100.0, 200.0], [0.1, 0.25])
        assert 0 < pace.factor < 1e-3 and pace.pass_s > 0

    def test_no_runs_tell_nothing(self) -> None:
        with pytest.raises(ConfigError, match="one or more"):
            fit_pace([], [], [])

    def test_how_far_a_prediction_can_be_trusted(self, tmp_path: Path) -> None:
        words = ["profile=measured", f"cache_dir={tmp_path}", "data=synthetic", "machine=cpu"]
        alone = confidence_of(Subject.of(compose(words)))
        rates = confidence_of(Subject.of(compose([*words, "profile=fake"])))
        assert not alone.is_calibrated and alone.range_s(2.0) == (2.0, 2 * UNCALIBRATED[1])
        assert "not calibrated for this machine" in alone.words and "make calibrate" in alone.words
        assert (rates.is_calibrated, rates.band) == (
            False,
            None,
        ) and "rates of machine=cpu" in rates.words
        known = confidence_of(Subject.of(compose([*words, "machine.pace_factor=1.2"])))
        assert (known.is_calibrated, known.range_s(2.0)) == (True, None)


class TestFile:
    def test_it_is_a_machine_of_the_configuration(self, tmp_path: Path) -> None:
        found = calibration_of(probe(copies={"d2h_bytes_per_s": 1e10, "h2d_bytes_per_s": 2e10}))
        text = machine_yaml(
            found, "ours", "real", "cuda", "2 nodes, today", ["by hand"], "h200", 0.0213
        )
        (tmp_path / "machine").mkdir()
        (tmp_path / "machine" / "ours.yaml").write_text(text)
        machine = compose([f"hydra.searchpath=['file://{tmp_path}']", "machine=ours"]).machine
        assert (machine.name, machine.device_bytes) == ("ours", 141000000000)
        assert machine.link_bytes_per_s == pytest.approx(1e10) and machine.ranks_per_node == 2
        assert (machine.d2h_bytes_per_s, machine.h2d_bytes_per_s) == (1e10, 2e10)
        assert (machine.calibrated_from, machine.held_out_error) == ("2 nodes, today", 0.0213)
        assert machine.pace_factor is None, "of a probe alone"
        paced = merged(found, [], RunPace(1.25, 5e-5)).machine()
        assert (paced["pace_factor"], paced["pace_pass_s"]) == (1.25, 5e-5)
        assert (
            "# by hand" in text and "median error of the fit 0.0%" in text and "all-reduces" in text
        )

    def test_noise_that_no_prediction_takes_is_cut_and_told(self) -> None:
        text = machine_yaml(
            Calibration({"link": LinkFit(1e-6, 1e9, 0.1)}, 1.5),
            "x",
            "real",
            "cpu",
            "a busy machine",
        )
        assert yaml.safe_load(text)["noise"] == MAX_NOISE and "quiet machine" in text
        assert set(yaml.safe_load(text)) <= set(MachineConfig.__dataclass_fields__)
