"""`gems-jobs resubmit`: what is sent again, from where, without which nodes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from jobs.diagnosis.node_blocklist import NodeBlocklist
from jobs.status.lookup import StudyRecord
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Called, MonkeyPatch, Prepared

Sent = list[RunSpec]


@pytest.fixture
def prepared(prepared: Prepared, slurm: FakeSlurm) -> Prepared:
    """Prepare runs that need no profile, where there is no SLURM.

    Then they fail, unless another state is given.
    """

    def make(name: str = "one", state: str = "failed", **more: Any) -> RunFolder:
        folder = prepared(name, "partition=even")
        folder.write_status(
            state, **{"job_id": "41", "cause": "ValueError: bad", "exit_code": 4, **more}
        )
        return folder

    return make


@pytest.fixture
def sent(monkeypatch: MonkeyPatch) -> Sent:
    """Put a note in the place of SLURM.

    The run is prepared as it would be, and gets a job's number.
    """
    seen: Sent = []

    def note(spec: RunSpec, *, assume_yes: bool, force: bool) -> int:
        seen.append(spec)
        folder = prepare(spec)
        folder.write_status("submitted", job_id=str(41 + len(seen)))
        return 0

    monkeypatch.setattr("jobs.cli.resubmit.start_run", note)
    return seen


@pytest.fixture
def resubmit(call: Called, sent: Sent) -> Called:
    return partial(call, "resubmit")


def checkpoint(folder: RunFolder, step: int) -> None:
    path = folder.path / "checkpoints" / f"step{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")


def test_it_goes_on_in_its_folder_with_more_time(
    prepared: Prepared, resubmit: Called, sent: Sent, tmp_path: Path
) -> None:
    folder = prepared()
    checkpoint(folder, 120)
    out, _ = resubmit("one", "cluster.minutes=30")
    assert out == f"{folder.path.name}: submitted, job 42, from step 120\n"
    (spec,) = sent
    assert (spec.cluster.minutes, RunFolder.of(spec), spec.name) == (30, folder, "one")
    assert folder.read_spec().cluster.minutes == 30


def test_bad_nodes_of_its_cluster_are_left_out(
    prepared: Prepared, resubmit: Called, sent: Sent
) -> None:
    folder = prepared()
    nodes = NodeBlocklist(folder.path.parent)
    now = folder.read_status()["updated_utc"]
    for cluster, node, run in (
        ("mini", "n2", "x"),
        ("mini", "n2", "y"),
        ("mini", "n3", "x"),
        ("frontier", "n7", "x"),
        ("frontier", "n7", "y"),
    ):
        nodes.add(cluster, node, "device failed", run, now)
    out, _ = resubmit("one", "cluster.exclude=[n5]")
    assert out.endswith("without nodes n5, n2, from its start\n")
    assert sent[0].cluster.exclude == ["n5", "n2"] and RunFolder.of(sent[0]) == folder


def test_a_node_that_has_just_failed_is_noted_on_the_way(
    prepared: Prepared, resubmit: Called, sent: Sent
) -> None:
    folder = prepared()
    NodeBlocklist(folder.path.parent).add(
        "mini", "n1", "device failed", "x", folder.read_status()["updated_utc"]
    )
    folder.logs.joinpath("ranks.log").write_text("srun: error: Node failure on n1\n")
    out, err = resubmit("one")
    assert (
        "without node n1" in out
        and sent[0].cluster.exclude == ["n1"]
        and "has failed 2 times" in err
    )


def test_too_few_nodes_left_are_told(
    prepared: Prepared, resubmit: Called, sent: Sent, slurm: FakeSlurm
) -> None:
    folder = prepared()
    for run in "xy":
        NodeBlocklist(folder.path.parent).add(
            "mini", "n2", "device failed", run, folder.read_status()["updated_utc"]
        )
    slurm.says("scontrol", "n2")
    slurm.says("sinfo", "n1", "n2", "n3")
    assert "without node n2" in resubmit("one")[0]
    slurm.says("sinfo", "n1", "n2")
    folder.write_status("failed", cause="ValueError: bad", exit_code=4)
    out, _ = resubmit("one", code=2)
    assert out.endswith(
        "refused, cluster.exclude=n2: leaves 1 of the 2 nodes of partition debug, and the run needs"
        " 2; a node that is sound: jobs diagnose --unblock n2\n"
    )
    assert len(sent) == 1 and slurm.asked()[-2:] == [
        "sinfo --all --noheader --Node --partition=debug --format=%N",
        "scontrol show hostnames n2",
    ]


def test_keys_that_are_part_of_the_run_give_it_a_new_folder(
    prepared: Prepared, resubmit: Called, sent: Sent
) -> None:
    folder = prepared()
    out, _ = resubmit("one", "train.steps=7")
    assert sent[0].train.steps == 7 and RunFolder.of(sent[0]) != folder
    assert f"in {RunFolder.of(sent[0]).path}, for these keys are part of the run" in out


def test_a_new_folder_resumes_from_the_old_one(
    prepared: Prepared, resubmit: Called, sent: Sent
) -> None:
    folder = prepared()
    checkpoint(folder, 3)
    resubmit("one", "train.steps=7")
    assert sent[0].to_dict()["train"]["resume"] == str(folder.path)


@pytest.mark.parametrize(
    ("state", "more", "says"),
    [
        ("finished", {"exit_code": 0}, "it has finished; --force runs it again"),
        ("submitted", {}, "it is submitted"),
        (
            "failed",
            {"cause": "data.path=/x: does not exist", "exit_code": 2},
            "it would fail again, first: change the key",
        ),
        ("failed", {"cause": "rank 0 needs 5 bytes", "exit_code": 3}, "memory=plan"),
        ("failed", {"cause": "OutOfMemoryError: CUDA out of memory"}, "memory=plan"),
        ("failed", {"cause": "cluster.mpi=x: MPI sees a world of 1"}, "wrong MPI"),
    ],
)
def test_what_is_refused(
    prepared: Prepared, resubmit: Called, sent: Sent, state: str, more: dict[str, Any], says: str
) -> None:
    prepared("one", state, **more)
    out, _ = resubmit("one", code=1)
    assert says in out and ": refused, " in out and len(out.splitlines()) == 1
    assert sent == []


def test_it_is_sent_all_the_same_when_one_insists(
    prepared: Prepared, resubmit: Called, sent: Sent
) -> None:
    prepared("a", "failed", cause="data.path=/x: does not exist", exit_code=2)
    prepared("b", "finished", exit_code=0)
    prepared("c", "failed", cause="cluster.mpi=x: MPI sees a world of 1", exit_code=2)
    resubmit("a", "--yes")
    resubmit("b", "--force")
    resubmit("c", "cluster.mpi=pmi2")
    assert [spec.name for spec in sent] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("one", "parallel.partitions=2"), "would make another run"),
        (("one", "name=two"), "would make another run"),
        (("one", "cluster.minuets=2"), "cluster.minutes"),
        ((), "name runs or studies"),
        (("none",), "is no run and no study"),
    ],
)
def test_wrong_words_are_one_line(
    prepared: Prepared, resubmit: Called, words: tuple[str, ...], says: str
) -> None:
    prepared()
    out, err = resubmit(*words, code=2)
    assert says in out + err and len((out + err).splitlines()) == 1


@pytest.mark.parametrize(
    "word", ["cluster.exclude=['$(touch owned)']", "cluster.exclude=['-n1']", "cluster.minutes=x"]
)
def test_a_value_that_cannot_be_is_refused(
    prepared: Prepared, resubmit: Called, sent: Sent, word: str
) -> None:
    prepared()
    out, _ = resubmit("one", word, code=2)
    assert ": refused, cluster." in out and sent == [] and not Path("owned").exists()


def test_of_a_study_the_failed_points_are_sent_and_with_force_one_by_one(
    tmp_path: Path, prepared: Prepared, resubmit: Called, sent: Sent
) -> None:
    folders = [
        prepared("a"),
        prepared("b", "finished", exit_code=0),
        prepared("c"),
        prepared("d", "submitted"),
    ]
    record = StudyRecord(tmp_path / "runs" / "grid")
    record.begin(
        [
            *((each.path.name, each.path) for each in folders),
            ("e", tmp_path / "runs" / "e-12345678"),
        ]
    )
    rows = json.loads(resubmit("grid", "--json", code=2)[0])["runs"]
    assert [(row["run"], row["outcome"]) for row in rows] == [
        (folders[0].path.name, "refused"),
        (folders[2].path.name, "refused"),
    ]
    assert all("needs sbatch, which is not on PATH" in row["why"] for row in rows) and sent == []
    assert {folder.path.name for _, folder in record.points()} == {
        *(each.path.name for each in folders),
        "e-12345678",
    }
    rows = json.loads(resubmit("grid", "--json", "--force")[0])["runs"]
    assert [spec.name for spec in sent] == ["a", "c"]
    assert [(row["outcome"], row["job_id"]) for row in rows] == [
        ("submitted", "42"),
        ("submitted", "43"),
    ]


def test_a_refused_submission_is_told_and_the_others_go_on(
    prepared: Prepared, resubmit: Called, monkeypatch: MonkeyPatch, sent: Sent
) -> None:
    prepared("a")
    prepared("b")

    def refuse(spec: RunSpec, **more: bool) -> int:
        sent.append(spec)
        raise ConfigError("cluster", "mini", "sbatch refuses the job")

    monkeypatch.setattr("jobs.cli.resubmit.start_run", refuse)
    out, _ = resubmit("a", "b", code=2)
    assert [line.partition(": ")[2] for line in out.splitlines()] == [
        "refused, cluster=mini: sbatch refuses the job"
    ] * 2
    assert len(sent) == 2


COSTLY = ("cluster.confirm_above_gpu_hours=0", "cluster.gpus_per_node=2")


def test_a_run_whose_cost_is_not_confirmed_is_refused(
    prepared: Prepared, resubmit: Called, monkeypatch: MonkeyPatch
) -> None:
    prepared()
    asked = []

    def decline(spec: RunSpec, *, assume_yes: bool, force: bool) -> int:
        asked.append(assume_yes)
        return 1

    monkeypatch.setattr("jobs.cli.resubmit.start_run", decline)
    for more in ((), ("--yes",)):
        assert resubmit("one", *more, code=1)[0].endswith(": refused, its cost was not confirmed\n")
    assert asked == [False, True]


def test_the_cost_of_a_studys_points_is_confirmed_together(
    tmp_path: Path, prepared: Prepared, resubmit: Called, monkeypatch: MonkeyPatch
) -> None:
    StudyRecord(tmp_path / "runs" / "grid").begin([(name, prepared(name).path) for name in "ab"])
    out, _ = resubmit("grid", *COSTLY, code=2)
    assert [line.partition("; add ")[2] for line in out.splitlines()] == [
        "--yes"
    ] * 2 and "2 jobs" in out
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("jobs.preflight.cost.ask_yes", lambda question: False)
    assert (
        resubmit("grid", *COSTLY, code=1)[0].count(": refused, its cost was not confirmed\n") == 2
    )
    assert (
        resubmit("grid", *COSTLY, "--yes", code=2)[0].count("needs sbatch, which is not on PATH")
        == 2
    )


def test_a_run_that_was_moved_goes_on_where_it_is(
    tmp_path: Path, prepared: Prepared, resubmit: Called, sent: Sent
) -> None:
    folder = prepared('a "b" $(touch owned)')
    spec = folder.read_spec()
    assert RunFolder.of(replace(spec, runs_dir="elsewhere")) != folder
    moved = tmp_path / "other" / folder.path.name
    moved.parent.mkdir()
    folder.path.rename(moved)
    resubmit(str(moved))
    assert RunFolder.of(sent[0]).path == moved and not Path("owned").exists()
