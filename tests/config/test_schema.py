"""gems.config.schema: the schema as plain data, to a dictionary and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import yaml

from gems.config.schema import ClusterConfig, ParallelConfig, RunSpec
from gems.errors import ConfigError


def test_world_size() -> None:
    assert RunSpec(parallel=ParallelConfig(partitions=4, replicas=3)).world_size == 12


def test_round_trip_through_yaml_and_json() -> None:
    spec = RunSpec(
        name="x",
        seed=7,
        parallel=ParallelConfig(partitions=2, boundaries=[0, 3, 5]),
        cluster=ClusterConfig(
            environment={"A": "1"},
            sbatch={"mem": "10G", "exclusive": True},
            setup=["module load x"],
        ),
    )
    assert RunSpec.from_dict(yaml.safe_load(yaml.safe_dump(spec.to_dict()))) == spec
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_what_is_not_given_has_its_default() -> None:
    assert RunSpec.from_dict({}) == RunSpec()
    assert RunSpec.from_dict({"model": {"depth": 56}}).model.depth == 56
    assert RunSpec.from_dict({"model": {"depth": 56}}).model.version == RunSpec().model.version


def test_specs_do_not_share_their_mutable_parts() -> None:
    one = RunSpec()
    other = RunSpec()
    one.cluster.setup.append("module load mpi")
    one.cluster.environment["A"] = "1"
    assert other.cluster.setup == [] and other.cluster.environment == {}
    copy = one.to_dict()
    copy["cluster"]["setup"].clear()
    assert one.cluster.setup == ["module load mpi"]


@pytest.mark.parametrize(
    ("values", "key", "proposed"),
    [
        ({"modle": {}}, "modle", "model"),
        ({"model": {"dept": 20}}, "model.dept", "depth"),
        ({"parallel": {"partition": 2}}, "parallel.partition", "partitions"),
        ({1: 2}, "1", ""),
        ({"model": {3: 4}}, "model.3", ""),
    ],
)
def test_unknown_keys_are_named_with_the_nearest(
    values: dict[Any, Any], key: str, proposed: str
) -> None:
    with pytest.raises(ConfigError, match="allowed: ") as error:
        RunSpec.from_dict(values)
    assert str(error.value.key) == key
    assert proposed in error.value.allowed


@pytest.mark.parametrize("section", [3, None, "resnet", ["depth"]])
def test_a_section_that_is_no_mapping(section: object) -> None:
    with pytest.raises(ConfigError, match=r"model=.*must be a mapping"):
        RunSpec.from_dict({"model": section})


def test_sections_cannot_take_unknown_fields() -> None:
    for field in dataclasses.fields(RunSpec):
        value = getattr(RunSpec(), field.name)
        if dataclasses.is_dataclass(value):
            with pytest.raises(AttributeError):
                value.no_such_field = 1  # type: ignore[attr-defined]
