"""From a study's file to the configuration of each point."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from gems.config import compose, overrides
from gems.config.overrides import CONF
from gems.config.schema import StudyConfig
from jobs.studies.points import compose_points, read_study, study_name
from tests.helpers.job_helpers import refused

BASE = ["data=synthetic", "schedule=1f1b", "parallel.partitions=2", "parallel.micro_batches=4"]


def write(folder: Path, study: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(study if isinstance(study, str) else yaml.safe_dump(study))
    return str(path)


def test_products_of_axes_and_points_in_the_files_order() -> None:
    axes: dict[str, list[Any]] = {
        "train.evaluate": [True, False],
        "schedule": ["gpipe", ["schedule=1f1b", "train.steps=7"]],
    }
    points = compose_points(
        StudyConfig(BASE, axes, [["parallel.replicas=1"], ["parallel.replicas=2"]]), "mine"
    )
    assert [point.label for point in points[:5]] == [
        "train.evaluate=true schedule=gpipe parallel.replicas=1",
        "train.evaluate=true schedule=gpipe parallel.replicas=2",
        "train.evaluate=true schedule=1f1b train.steps=7 parallel.replicas=1",
        "train.evaluate=true schedule=1f1b train.steps=7 parallel.replicas=2",
        "train.evaluate=false schedule=gpipe parallel.replicas=1",
    ]
    found = [
        (p.spec.train.evaluate, p.spec.schedule.name, p.spec.train.steps, p.spec.world_size)
        for p in points
    ]
    assert (
        len(points) == 8
        and found[3] == (True, "1f1b", 7, 4)
        and found[4] == (False, "gpipe", 100, 2)
    )
    assert {point.spec.name for point in points} == {"mine"}
    assert len({point.folder.path for point in points}) == 8
    assert all(point.folder.path.name.startswith("mine-") for point in points)


def test_options_are_composed_once_and_each_word_is_parsed_once() -> None:
    axes: dict[str, list[Any]] = {
        "train.steps": list(range(9000, 9006)),
        "seed": list(range(9000, 9006)),
    }
    caches = compose._kept_options, overrides._parsed
    before = [cache.cache_info().misses for cache in caches]
    assert len(compose_points(StudyConfig(BASE, axes), "mine")) == 36
    composed, parsed = (
        cache.cache_info().misses - earlier for cache, earlier in zip(caches, before, strict=True)
    )
    assert composed <= 1 and parsed <= 1 + len(BASE) + 12  # of 36 points with 7 words each


def test_without_axes_and_points_there_is_one_point() -> None:
    (point,) = compose_points(StudyConfig(BASE), "mine")
    assert (point.label, point.spec.schedule.name) == ("the only point", "1f1b")


def test_null_takes_a_value_away() -> None:
    with_none = StudyConfig([*BASE, "cluster.partition=a"], {"cluster.partition": [None, "b"]})
    assert [point.spec.cluster.partition for point in compose_points(with_none, "mine")] == [
        None,
        "b",
    ]


def test_the_users_overrides_come_last_and_compose_points_one_folder_count_once() -> None:
    study = StudyConfig(BASE, {"train.steps": [5, 6]})
    assert [point.spec.train.steps for point in compose_points(study, "mine")] == [5, 6]
    (point,) = compose_points(study, "mine", ["train.steps=9", "name=other"])
    assert (point.spec.train.steps, point.spec.name) == (9, "other")


def test_a_study_is_no_part_of_a_runs_id() -> None:
    (alone,) = compose_points(StudyConfig(BASE), "mine")
    of_two, _ = compose_points(StudyConfig(BASE, {}, [[], ["train.steps=9"]]), "mine")
    assert alone.folder.path == of_two.folder.path


@pytest.mark.parametrize(
    ("points", "overrides", "says"),
    [
        (
            [[], ["schedule=gpip"]],
            [],
            r"^point 2 of study mine \(schedule=gpip\): schedule=gpip: .*nearest: gpipe",
        ),
        (
            [["train.stepz=3"]],
            [],
            r"^point 1 of study mine \(train.stepz=3\): train.stepz=3: .*train\.steps",
        ),
        (
            [["parallel.micro_batches=0"]],
            [],
            r"^point 1 of .*: parallel\.micro_batches=0: must be 1 or more",
        ),
        (
            [[], ["train.patience=3"]],
            ["train.validate_steps=3"],
            r"^point 2 of .*: train\.patience=3: needs a metric to judge by",
        ),
        (
            [["schedule"]],
            [],
            r"^point 1 of study mine \(schedule\): override=schedule: not of the form key=value",
        ),
    ],
)
def test_a_point_that_does_not_compose_is_named(
    points: list[list[str]], overrides: list[str], says: str
) -> None:
    with refused(says) as caught:
        compose_points(StudyConfig(BASE, {}, points), "mine", overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("study", "says"),
    [
        ("[1, 2]", "must be a mapping of keys to values"),
        ("base: [a", "cannot be read"),
        ({"axis": {}}, r"study\.axis=\{\}: allowed: axes"),
        ({"base": "schedule=1f1b"}, r"study\.base=schedule=1f1b: must be a list"),
        ({"base": [1]}, r"study\.base\[0\]=1: must be text"),
        ({"points": ["train.steps=3"]}, r"study\.points\[0\]=train.steps=3: must be a list"),
        ({"axes": ["schedule"]}, r"study\.axes=.*must be a mapping"),
        ({"axes": {"schedule": "gpipe"}}, r"study\.axes\.schedule=gpipe: must be a list"),
        ({"axes": {"schedule": []}}, r"study\.axes\.schedule=\[\]: must be a list"),
    ],
)
def test_a_file_of_another_form_is_one_line(study: Any, says: str, tmp_path: Path) -> None:
    with refused(says) as caught:
        read_study(write(tmp_path, study))
    assert "\n" not in str(caught.value)


def test_a_users_own_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"base": BASE, "points": None})
    assert read_study(path) == StudyConfig(BASE)
    assert (study_name(path), study_name("emulated_scaling")) == ("mine", "emulated_scaling")


def test_an_unknown_study_names_the_nearest(tmp_path: Path) -> None:
    with refused(r"study=emulated_scalin: allowed: .*; nearest: emulated_scaling, or give"):
        read_study("emulated_scalin")
    with refused(r"study=.*none\.yaml: cannot be read"):
        read_study(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    "path", sorted((CONF / "study").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_studies_that_come_along_compose(path: Path) -> None:
    study = read_study(path.stem)
    study.axes = {key: choices[:1] for key, choices in study.axes.items()}
    study.base = [
        word for word in study.base if word != "cost=profile"
    ]  # which takes a while to be taken
    points = compose_points(study, path.stem)
    assert len(points) == len(study.points) * study.repetitions


def test_emulated_scaling_goes_from_4_to_1024_ranks_and_checks_its_prediction() -> None:
    study = read_study("emulated_scaling")
    assert study.axes["schedule"] == [
        "gems_master",
        "1f1b",
        ["schedule=capped", "schedule.activation_cap=1"],
    ]
    study.axes = {"schedule": ["1f1b"]}
    points = compose_points(study, "emulated_scaling")
    ranks: dict[str, list[int]] = {}
    for point in points:
        ranks.setdefault(point.spec.machine.kind, []).append(point.spec.world_size)
    assert ranks == {"emulated": [4, 8, 16, 32], "simulated": [4, 8, 32, 64, 128, 256, 512, 1024]}
    costs = [(p.spec.cost, p.spec.parallel) for p in points]
    assert {parallel.partitions * cost.unit_s for cost, parallel in costs} == {
        0.08
    }  # one model throughout
    assert {parallel.partitions * cost.param_bytes for cost, parallel in costs} == {8 << 20}
    assert {(parallel.micro_batches or 0) // parallel.partitions for _, parallel in costs} == {2}


def test_gems_1024_goes_from_4_to_1024_gpus_of_a_modelled_machine() -> None:
    study = read_study("gems_1024")
    study.base = [word for word in study.base if word != "cost=profile"]
    points = [point.spec for point in compose_points(study, "gems_1024")]
    ranks = {
        depth: [spec.world_size for spec in points if spec.model.depth == depth]
        for depth in (110, 1001)
    }
    assert ranks == {110: [2**k for k in range(2, 11)], 1001: [2**k for k in range(3, 11)]}
    assert {(spec.data.height_px, spec.data.width_px, spec.schedule.name) for spec in points} == {
        (1024, 1024, "gems_master")
    }
    assert {(spec.machine.kind, spec.machine.name) for spec in points} == {
        ("simulated", "v100_cluster")
    }
    assert all(spec.machine.calibrated_from and spec.machine.contention for spec in points)


def test_repetitions_are_rounds_with_a_seed_of_their_own_and_no_point_follows_itself() -> None:
    study = StudyConfig([*BASE, "seed=5"], {"train.steps": [5, 6, 7, 8]}, repetitions=3)
    points = compose_points(study, "mine")
    steps = [point.spec.train.steps for point in points]
    assert steps[:4] == [5, 6, 7, 8]
    assert all(sorted(steps[first : first + 4]) == [5, 6, 7, 8] for first in (4, 8))
    assert all(before != after for before, after in itertools.pairwise(steps))
    assert len({tuple(steps[first : first + 4]) for first in (0, 4, 8)}) > 1
    assert [point.spec.seed for point in points] == [5] * 4 + [6] * 4 + [7] * 4
    assert (
        points[-1].label.endswith(" seed=7") and len({point.folder.path for point in points}) == 12
    )
    assert [point.folder for point in compose_points(study, "mine")] == [
        point.folder for point in points
    ]


def test_two_points_never_follow_themselves() -> None:
    for number in (2, 3):
        study = StudyConfig(BASE, {"train.steps": list(range(5, 5 + number))}, repetitions=8)
        steps = [point.spec.train.steps for point in compose_points(study, "mine")]
        assert all(before != after for before, after in itertools.pairwise(steps))


@pytest.mark.parametrize("repetitions", [0, "two", True])
def test_repetitions_are_a_whole_number(repetitions: object, tmp_path: Path) -> None:
    with refused(r"^study\.repetitions="):
        read_study(write(tmp_path, {"base": BASE, "repetitions": repetitions}))
