"""gems.config.resolve: derived values, and every value that cannot run refused with its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gems.config.compose import compose
from gems.config.resolve import check_batch, resolve
from gems.config.schema import DataConfig, RunSpec
from gems.errors import ConfigError
from gems.models import layers_of
from gems.plan.evaluate import evaluate
from gems.schedule import FAMILIES

Values = dict[str, Any]


def spec_of(**values: Any) -> RunSpec:
    """Return synthetic data and the keys given, with `__` for the dot: parallel__partitions=2."""
    spec = RunSpec()
    for key, value in values.items():
        section, _, name = key.rpartition("__")
        setattr(getattr(spec, section) if section else spec, name, value)
    return spec


def counts(**values: Any) -> tuple[int | None, int | None, int | None]:
    parallel = resolve(spec_of(**values)).parallel
    return parallel.replications, parallel.parts, parallel.micro_batches


class TestMicroBatches:
    """replications x parts = micro_batches.

    Any two give the third, and each schedule has its own defaults.
    """

    @pytest.mark.parametrize(
        ("name", "given", "expected"),
        [
            ("gems_master", {}, (2, 1, 2)),
            ("gems_master", {"micro_batches": 8}, (8, 1, 8)),
            ("gems_master", {"micro_batches": 8, "parts": 2}, (4, 2, 8)),
            ("gems_master", {"micro_batches": 8, "replications": 2}, (2, 4, 8)),
            ("gems_master", {"replications": 6}, (6, 1, 6)),
            ("gems_master", {"parts": 3}, (2, 3, 6)),
            ("gems_master", {"parts": 3, "replications": 4}, (4, 3, 12)),
            ("gems_master", {"parts": 3, "replications": 4, "micro_batches": 12}, (4, 3, 12)),
            ("gems_mast", {}, (2, 1, 2)),
            ("gems_mast", {"micro_batches": 8}, (2, 4, 8)),
            ("gems_mast", {"parts": 5}, (2, 5, 10)),
            ("gems_mast", {"replications": 2, "parts": 3}, (2, 3, 6)),
            ("1f1b", {}, (1, 8, 8)),
            ("1f1b", {"micro_batches": 7}, (7, 1, 7)),
            ("gpipe", {"parts": 3}, (1, 3, 3)),
            ("layer_parallel", {"micro_batches": 6, "parts": 3}, (2, 3, 6)),
        ],
    )
    def test_derived(self, name: str, given: Values, expected: tuple[int, int, int]) -> None:
        values = {f"parallel__{key}": value for key, value in given.items()}
        assert counts(schedule__name=name, parallel__partitions=4, **values) == expected

    @pytest.mark.parametrize(
        ("name", "given", "key", "words"),
        [
            (
                "gems_master",
                {"micro_batches": 7},
                "micro_batches",
                "even for gems_master: half run in each direction; use 6 or 8",
            ),
            ("gems_mast", {"micro_batches": 1}, "micro_batches", "; use 2"),
            (
                "gems_master",
                {"micro_batches": 6, "parts": 2},
                "replications",
                "must be even for gems_master",
            ),
            ("gems_master", {"replications": 3}, "replications", "use 4"),
            (
                "gems_master",
                {"micro_batches": 8, "parts": 3},
                "micro_batches",
                "must be replications x parts = 2 x 3",
            ),
            (
                "gems_master",
                {"micro_batches": 8, "replications": 2, "parts": 3},
                "micro_batches",
                "2 x 3",
            ),
            ("gems_master", {"micro_batches": 2, "replications": 4}, "micro_batches", "4 x 0"),
            ("gems_mast", {"replications": 4}, "replications", "must be 2 for gems_mast"),
            ("gems_mast", {"micro_batches": 8, "parts": 2}, "micro_batches", "2 x 2"),
            ("1f1b", {"micro_batches": 8, "parts": 3}, "micro_batches", "2 x 3"),
        ],
    )
    def test_refused(self, name: str, given: Values, key: str, words: str) -> None:
        values = {f"parallel__{key}": value for key, value in given.items()}
        with pytest.raises(ConfigError) as error:
            resolve(spec_of(schedule__name=name, **values))
        assert error.value.key == f"parallel.{key}"
        assert words in str(error.value)


class TestPartition:
    def test_given_boundaries_are_kept(self) -> None:
        num_layers = len(layers_of(RunSpec().model, RunSpec().data))
        resolved = resolve(spec_of(parallel__partitions=2, parallel__boundaries=[0, 1, num_layers]))
        assert resolved.parallel.boundaries == [0, 1, num_layers]

    def test_as_many_partitions_as_layers_and_no_more(self) -> None:
        num_layers = len(layers_of(RunSpec().model, RunSpec().data))
        deepest = resolve(spec_of(parallel__partitions=num_layers))
        assert evaluate(deepest).boundaries == tuple(range(num_layers + 1))
        too_deep = resolve(spec_of(parallel__partitions=num_layers + 1))
        with pytest.raises(
            ConfigError, match=f"must make at most {num_layers}, the layers of resnet; use fewer"
        ):
            evaluate(too_deep)

    @pytest.mark.parametrize("boundaries", [[], [0, 4], [0, 4, 4], [0, 4, 10_000]])
    def test_boundaries_that_do_not_fit(self, boundaries: list[int]) -> None:
        with pytest.raises(ConfigError, match=r"parallel\.boundaries=.*must be 3 rising numbers"):
            resolve(spec_of(parallel__partitions=2, parallel__boundaries=boundaries))


class TestNodes:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, (1, 6)),
            ({"nodes": 2}, (2, 3)),
            ({"ranks_per_node": 2}, (3, 2)),
            ({"nodes": 3, "ranks_per_node": 2}, (3, 2)),
            ({"gpus_per_node": 8}, (1, 6)),
            ({"gpus_per_node": 4}, (2, 3)),
            ({"gpus_per_node": 4, "ranks_per_node": 2}, (3, 2)),
            ({"gpus_per_node": 2, "nodes": 6}, (6, 1)),
        ],
        ids=str,
    )
    def test_derived(self, given: Values, expected: tuple[int, int]) -> None:
        values = {f"cluster__{key}": value for key, value in given.items()}
        cluster = resolve(spec_of(parallel__partitions=3, parallel__replicas=2, **values)).cluster
        assert (cluster.nodes, cluster.ranks_per_node) == expected

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"nodes": 4}, "partitions x replicas = 6"),
            ({"ranks_per_node": 4}, "partitions x replicas = 6"),
            ({"nodes": 2, "ranks_per_node": 2}, "partitions x replicas = 6"),
            ({"nodes": 1, "gpus_per_node": 4}, "partitions x replicas = 6"),
            ({"ranks_per_node": 3, "gpus_per_node": 2}, "one GPU a rank"),
        ],
        ids=str,
    )
    def test_ranks_that_do_not_divide(self, given: Values, words: str) -> None:
        values = {f"cluster__{key}": value for key, value in given.items()}
        with pytest.raises(ConfigError, match=words):
            resolve(spec_of(parallel__partitions=3, parallel__replicas=2, **values))


@pytest.mark.parametrize(
    ("key", "value", "proposed"),
    [
        ("schedule.name", "gpip", "gpipe"),
        ("train.precision", "float31", "float32"),
        ("optimizer.name", "adamx", "adam"),
        ("machine.device", "gpu", ""),
        ("machine.transport", "hosts", "host"),
        ("cluster.launcher", "slrun", "srun"),
        ("model.name", "resne", "resnet"),
        ("data.name", "tisue", "tissue"),
    ],
)
def test_unknown_choices(key: str, value: str, proposed: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(spec_of(**{key.replace(".", "__"): value}))
    assert str(error.value).startswith(
        (f"{key}={value}: allowed: ", f"{key.removesuffix('.name')}={value}: allowed: ")
    )
    assert proposed in error.value.advice


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.partitions", 0),
        ("parallel.replicas", 0),
        ("parallel.micro_batches", 0),
        ("parallel.micro_batch_size", 0),
        ("data.num_classes", 1),
        ("data.height_px", 0),
        ("train.steps", 0),
        ("optimizer.lr", 0.0),
        ("train.hang_timeout_s", 0.0),
        ("cost.forward", 0.0),
        ("cost.input_grad", 0.0),
        ("cluster.minutes", 0),
        ("machine.threads_per_rank", 0),
        ("model.width", 0),
        ("seed", -1),
    ],
)
def test_numbers_below_the_least(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=r"must be \d or more|must be above 0") as error:
        resolve(spec_of(**{key.replace(".", "__"): value}))
    assert error.value.key == key


def test_noise_is_a_share_of_a_compute() -> None:
    with pytest.raises(ConfigError, match=r"machine\.noise=0\.6: must be at most 0\.5"):
        resolve(spec_of(machine__noise=0.6))


@pytest.mark.parametrize("name", ["", "a/b", "/", "..", ".hidden", "a\nb", "a\0"])
def test_names_that_are_no_folder(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"must be a folder's name|must not hold the character 0"
    ) as error:
        resolve(spec_of(name=name))
    assert "\n" not in str(error.value)


@pytest.mark.cases
def test_a_run_may_be_shorter_than_what_figures_skip() -> None:
    assert resolve(spec_of(train__steps=1)).benchmark.skip_steps == 2


def test_global_batch_counts_replicas_micro_batches_and_samples() -> None:
    spec = spec_of(parallel__replicas=3, parallel__micro_batches=4, parallel__micro_batch_size=5)
    assert resolve(spec).parallel.global_batch == 60


def test_a_step_needs_its_images() -> None:
    check_batch(DataConfig(train_samples=32), 32)
    with pytest.raises(ConfigError, match="must be 32 or more, the samples of one step"):
        check_batch(DataConfig(train_samples=31), 32)


def test_images_smaller_than_the_networks_stride() -> None:
    with pytest.raises(ConfigError, match=r"data\.width_px=3: resnet shrinks an image 4 times"):
        resolve(spec_of(data__width_px=3))


def test_missing_data_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(spec_of(data__name="folder", data__path=str(tmp_path / "none")))
    assert error.value.key == "data.path"


@pytest.mark.parametrize("name", FAMILIES)
def test_resolving_again_changes_nothing(name: str) -> None:
    """What a rank reads from run.yaml is what the login node resolved."""
    once = resolve(
        spec_of(
            schedule__name=name,
            schedule__activation_cap=1.0,
            parallel__partitions=3,
            parallel__replicas=2,
        )
    )
    assert resolve(once) == once
    assert RunSpec.from_dict(once.to_dict()) == once


def test_the_given_spec_stays_as_it_is() -> None:
    spec = spec_of(parallel__partitions=2)
    before = spec.to_dict()
    resolve(spec)
    assert spec.to_dict() == before


def test_epochs_are_whole_steps_of_the_global_batch(caplog):
    words = [
        "data=synthetic",
        "data.train_samples=100",
        "parallel.micro_batches=4",
        "parallel.micro_batch_size=2",
    ]
    spec = compose([*words, "train.epochs=3"])
    assert (spec.train.steps, resolve(spec)) == (37, spec)
    assert compose([*words, "train.epochs=0.5"]).train.steps == 6
    assert not caplog.messages
    assert compose([*words, "train.epochs=3", "train.steps=50"]).train.steps == 37
    assert caplog.messages == [
        "train.epochs=3 is 37 steps of 8 of 100 samples; train.steps=50 is not used"
    ]
    with pytest.raises(
        ConfigError,
        match=r"train.epochs=0.01: has 100 samples an epoch, fewer than the 8 of one step",
    ):
        compose([*words, "train.epochs=0.01"])
