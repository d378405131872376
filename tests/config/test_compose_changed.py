"""Keys of a resolved run changed by overrides: typed, checked, and nothing else touched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.config.compose import changed, compose
from gems.config.resolve import run_id
from gems.config.schema import RunSpec
from gems.errors import ConfigError


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    made = compose(
        [
            "experiment=gems_master",
            "data=synthetic",
            "cluster=frontier",
            "+cluster.sbatch.qos=debug",
        ]
    )
    return RunSpec.from_dict(made.to_dict())


def test_only_what_is_named_changes(spec: RunSpec) -> None:
    made = changed(spec, ["cluster.minutes=77", "cluster.exclude=[n1,n2]", "cluster.account=other"])
    assert made == replace(
        spec, cluster=replace(spec.cluster, minutes=77, exclude=["n1", "n2"], account="other")
    )
    assert changed(spec, []) == spec
    assert run_id(made) == run_id(spec)
    assert run_id(changed(spec, ["cluster.partition=extended"])) != run_id(spec)


def test_maps_of_the_users_own_take_new_keys(spec: RunSpec) -> None:
    assert changed(spec, ["cluster.sbatch.qos=long", "+cluster.sbatch.mem=64G"]).cluster.sbatch == {
        **spec.cluster.sbatch,
        "qos": "long",
        "mem": "64G",
    }


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("cluster.minutes=x", "must be a whole number, or on the command line with units: 90min"),
        ("cluster.minuets=3", "unknown key"),
        ("cluster=slurm", "is not one value of one key"),
        ("cluster.minutes=1,2", "is not one value of one key"),
        ("name=other", "is not one value of one key"),
        ("cluster.exclude=['n 1']", "must be names of nodes"),
        ("train.steps=0", "train.steps"),
    ],
)
def test_what_cannot_be_is_refused(spec: RunSpec, word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        changed(spec, [word])
