"""gems.config.fields: each value has its type, and each number is one that can be computed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gems.config.cluster import MachineConfig
from gems.config.compose import compose
from gems.config.resolve import run_id
from gems.config.schema import RunSpec
from gems.config.training import TrainConfig, captures_graphs
from gems.errors import ConfigError, of_the_system
from gems.utils import gpus


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(["data=synthetic", *words])
    return str(error.value)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (
            "seed=9223372036854775808",
            "seed=9223372036854775808: must be at most 9223372036854775807",
        ),
        (
            "model.depth=9223372036854775807",
            "model.depth=9223372036854775807: must be at most 100000",
        ),
        (f"seed={'1' * 400}", "must be at most 9223372036854775807"),
        ("model.vocabulary=-1", "model.vocabulary=-1: must be 0 or more"),
        ("cost.unit_s=1e-300", "cost.unit_s=1e-300: must be 0 or from 1e-30 to 1e+30"),
        ("cost.times=[[1]]", "cost.times[0]=[1]: must be a number"),
        ("cluster.setup=[[a]]", "cluster.setup[0]=['a']: must be text"),
        ("train.initial_checkpoint=/", "train.initial_checkpoint=/: holds no checkpoint"),
        (
            "train.initial_checkpoint=/no/such",
            "train.initial_checkpoint=/no/such: no such file or folder; give a fin",
        ),
        (
            "train.resume=/",
            "train.resume=/: is neither auto nor never, nor a folder with a checkpoint",
        ),
        ("train.resume=''", "train.resume='': must be auto, force, never, or the folder"),
        ("parallel.replicas=1048577", "parallel.replicas=1048577: must be at most 1048576"),
        ("schedule=[]", "schedule=[]: allowed: "),
        ("train.cuda_graphs=yes", "train.cuda_graphs='yes': must be auto, true or false; capture"),
        ("train.cuda_graphs=1", "train.cuda_graphs=1: must be auto, true or false"),
        ("train.cuda_graphs=null", "train.cuda_graphs=null: must be auto, true or false"),
        ("hydra.searchpath=[pkg://no.such]", "hydra.searchpath=pkg://no.such: is no package"),
        (
            f"name={'a' * 201}",
            "(203 characters): must be a folder's name: printable, at most 200 bytes",
        ),
        (f"runs_dir={'a/' * 2000}", "must be a folder, whose path is not longer"),
        ("name=\udcff", "override='name=\\udcff': is no text in UTF-8"),
    ],
)
def test_one_line(word: str, says: str) -> None:
    assert says in refusal(word)


def test_ranks_and_forwards_are_bounded_together() -> None:
    assert "must be at most 1048576 ranks" in refusal(
        "parallel.partitions=2048", "parallel.replicas=1024"
    )
    said = refusal("parallel.partitions=1024", "parallel.micro_batches=1024")
    assert said.startswith(
        "parallel.micro_batches=1024: times 1024 stages is 1048576 forwards in a step"
    )
    assert compose(["machine=simulated", "parallel.partitions=1024", "parallel.micro_batches=512"])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"seed": "x"}, "seed=x: must be a whole number"),
        ({"seed": True}, "seed=True: must be a whole number"),
        ({"name": None}, "name=None: must be text"),
        ({"train": {"hang_timeout_s": "x"}}, "train.hang_timeout_s=x: must be a number"),
        ({"train": {"evaluate": 1}}, "train.evaluate=1: must be true or false"),
        ({"train": {"cuda_graphs": 1}}, "train.cuda_graphs=1: must be auto, true or false"),
        (
            {"parallel": {"boundaries": [0, "x"]}},
            "parallel.boundaries[1]=x: must be a whole number",
        ),
        ({"parallel": {"boundaries": {}}}, "parallel.boundaries={}: must be a list"),
        ({"cluster": {"environment": {"A": 1}}}, "cluster.environment.A=1: must be text"),
        ({"model": {"kwargs": {1: 2}}}, "model.kwargs.1=1: must be text"),
    ],
)
def test_a_file_is_held_to_the_schema(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunSpec.from_dict(values)
    assert str(error.value) == says


def test_what_was_resolved_is_of_its_types() -> None:
    for words in (["experiment=quickstart"], ["cluster=perlmutter", "parallel.partitions=4"]):
        spec = compose(words)
        assert run_id(RunSpec.from_dict(spec.to_dict())) == run_id(spec)


def test_a_switch_is_the_same_in_quotes_and_keeps_the_ids_of_runs() -> None:
    for words, value, known in (
        ((), False, "7e5d9631"),
        (("train.cuda_graphs=false",), False, "7e5d9631"),
        (("train.cuda_graphs=true",), True, "e4423e42"),
        (("train.cuda_graphs='true'",), True, "e4423e42"),
    ):
        spec = compose(words)
        assert spec.train.cuda_graphs is value
        assert run_id(spec) == known
    assert RunSpec.from_dict({"train": {"cuda_graphs": "False"}}).train.cuda_graphs is False


@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
def test_graphs_are_captured_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for has_driver in (False, True):
        monkeypatch.setattr(gpus, "DRIVER_FILES", (Path("/"),) if has_driver else ())
        has_gpu = MachineConfig(device=device).has_gpu
        assert has_gpu is (device == "cuda" or (device == "auto" and has_driver))
        for value, expected in ((True, has_gpu), ("auto", has_gpu), (False, False)):
            assert captures_graphs(TrainConfig(cuda_graphs=value), has_gpu) is expected
    assert not captures_graphs(TrainConfig(cuda_graphs="auto", compile=True), has_gpu=True)


def test_an_integer_is_a_number() -> None:
    assert RunSpec.from_dict({"train": {"learning_rate": 1}}).optimizer.lr == 1


def test_the_line_of_a_system_error_names_the_file() -> None:
    with pytest.raises(OSError) as error:
        Path("/no/such/file").read_bytes()
    said = str(of_the_system(error.value))
    assert said == "file=/no/such/file: cannot be read or written (No such file or directory)"


def test_a_line_has_no_codes_for_the_terminal() -> None:
    assert str(ConfigError("name", "a\x1b[2J\nb", "no")) == "name=a\\x1b[2J b: no"
