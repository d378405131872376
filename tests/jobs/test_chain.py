"""Jobs that continue one run after each other, and jobs that wait for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gems.cli.framework import main
from gems.errors import ConfigError, GemsError, NodeFailedError, StalledError, TryLaterError
from gems.runs.folder import RunFolder
from gems.runs.owner import check_free, take
from gems.utils.atomic_io import read_json, write_json
from jobs.__main__ import VERBS
from jobs.batch.resources import JobSpec, Work, job_spec
from jobs.launch.batch import claim, run_prepared
from jobs.launch.launch import StopRequest
from jobs.launch.own_job import hand_over, requeue_refusal
from jobs.launch.submission import submit_chain
from jobs.schedulers.scheduler import SCHEDULERS
from jobs.status.job_record import CHAIN_JSON, gone_verifier, read_chain
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import (
    Capture,
    MonkeyPatch,
    Prepared,
    Resolved,
    owner_of,
    refused,
    status_of,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> RunFolder:
    """A run of the chain 41, 42, 43, seen from job 41."""
    write_json(tmp_path / CHAIN_JSON, {"jobs": ["41", "42", "43"]})
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    return RunFolder(tmp_path)


@pytest.mark.parametrize(
    ("state", "code", "job_id"),
    [
        ("stopped", 0, "42"),
        ("failed", 4, "42"),
        ("failed", 143, "42"),
        ("finished", 0, "41"),
        ("cancelled", 143, "41"),
        ("failed", 2, "41"),
        ("failed", 3, "41"),
        ("requeued", 0, "41"),
    ],
)
def test_the_next_job_takes_over_what_is_not_over(
    state: str, code: int, job_id: str, folder: RunFolder
) -> None:
    folder.write_status(state, job_id="41", exit_code=code, cause="why", stopped_step=7)
    hand_over(folder)
    status = folder.read_status()
    assert (status["job_id"], status["cause"]) == (job_id, "why")
    assert status["state"] == ("requeued" if job_id == "42" else state)
    rows = read_json(folder.path / "requeues.json").get("requeues", [])
    assert [(row["by"], row["step"]) for row in rows] == ([("chain", 7)] if job_id == "42" else [])


def test_a_chain_takes_the_place_of_requeues(
    folder: RunFolder, resolved: Resolved, monkeypatch: MonkeyPatch
) -> None:
    cluster = resolved("cluster=mini").cluster
    assert requeue_refusal(folder, cluster, "time limit") == "job 42 of its chain continues"
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    assert requeue_refusal(folder, cluster, "time limit") is None


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("cancelled", 143), ("failed", 3)])
def test_a_job_with_nothing_left_to_do_ends_at_once(
    state: str, code: int, folder: RunFolder, monkeypatch: MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    folder.write_status(state, job_id="42", exit_code=code)
    before = folder.status_json.read_text()
    assert run_prepared(folder, StopRequest(), "token") == 0
    assert f"the run is {state}; this job of its chain has nothing to do" in capfd.readouterr().err
    assert folder.status_json.read_text() == before


@pytest.mark.parametrize(
    ("error", "state", "job_id"),
    [
        (NodeFailedError("too few nodes"), "requeued", "42"),
        (StalledError("the probe"), "requeued", "42"),
        (ConfigError("run folder", "x", "is wrong"), "failed", "41"),
    ],
)
def test_the_next_job_takes_over_from_a_launch_that_raises(
    error: GemsError, state: str, job_id: str, prepared: Prepared, monkeypatch: MonkeyPatch
) -> None:
    run = prepared()
    write_json(run.path / CHAIN_JSON, {"jobs": ["41", "42"]})
    run.write_status("submitted", job_id="41")
    monkeypatch.setenv("SLURM_JOB_ID", "41")

    def launch(*words: object, **more: object) -> int:
        raise error

    monkeypatch.setattr("jobs.launch.batch.launch", launch)
    assert run_prepared(run, StopRequest(), "") == error.exit_code
    status = run.read_status()
    assert (status["state"], status["job_id"], status["exit_code"]) == (
        state,
        job_id,
        error.exit_code,
    )


def test_a_refused_job_makes_the_chain_shorter(
    tmp_path: Path, resolved: Resolved, monkeypatch: MonkeyPatch, capfd: Capture
) -> None:
    spec = resolved("cluster=mini")
    after = []

    def submit(
        self: object, job: JobSpec, folder: RunFolder, works: Sequence[Work], token: str
    ) -> str:
        after.append(job.after)
        if len(after) == 3:
            raise ConfigError("cluster", "mini", "sbatch refuses the job")
        return str(41 + len(after))

    monkeypatch.setattr("jobs.schedulers.slurm.Slurm.submit", submit)
    assert submit_chain(job_spec(spec), RunFolder(tmp_path), "41", 5) == ["41", "42", "43"]
    assert read_chain(RunFolder(tmp_path)) == ["41", "42", "43"] and after == ["41", "42", "43"]
    assert (
        "the chain has 3 of 5 jobs: cluster=mini: sbatch refuses the job" in capfd.readouterr().err
    )


def test_the_status_is_that_of_the_job_that_continues(folder: RunFolder, slurm: FakeSlurm) -> None:
    slurm.says(
        "squeue",
        "41|NODE_FAIL|N/A|None|run",
        "42|PENDING|N/A|Dependency|run",
        "43|PENDING|N/A|Dependency|run",
    )
    take(folder, job_id="41")
    slurm.says("sacct")
    folder.write_status("running", job_id="41")
    run = status_of(folder)
    assert (run.state, run.job_id, run.note) == ("pending", "42", "Dependency (to start again)")


@pytest.mark.parametrize("state", ["running", "failed", "finished"])
def test_a_job_of_the_chain_keeps_the_folder(
    state: str, folder: RunFolder, slurm: FakeSlurm, monkeypatch: MonkeyPatch
) -> None:
    owner = take(folder, job_id="41")
    folder.write_status(state, job_id="41", exit_code=0)
    owner.update(folder, pid=0, is_released=state != "running")
    slurm.says("squeue", "JOBID|STATE|COMMAND", "41|TIMEOUT|/x", "42|PENDING|/x", "43|PENDING|/x")
    monkeypatch.delenv("SLURM_JOB_ID")
    with refused("belongs to job 42, which has not ended", TryLaterError):
        check_free(folder, gone_verifier())
    slurm.says("squeue", "JOBID|STATE|COMMAND")
    check_free(folder, gone_verifier())


def test_a_later_job_takes_the_folder_of_an_earlier_one_and_no_earlier_one_takes_it_back(
    folder: RunFolder, monkeypatch: MonkeyPatch
) -> None:
    take(folder, job_id="41")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert claim(folder, "of 42") is None
    owner = owner_of(folder)
    assert (owner.number, owner.job_id, owner.is_mine) == (1, "42", True)
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    assert claim(folder, "of 41") == owner


def test_a_dependency_joins_that_of_the_user(resolved: Resolved, tmp_path: Path) -> None:
    for words, expected in (
        ((), "afterany:41"),
        (("+cluster.sbatch.dependency=singleton",), "singleton,afterany:41"),
    ):
        spec = resolved("cluster=mini", *words)
        script = SCHEDULERS["slurm"].script(
            replace(job_spec(spec), after="41"), RunFolder(tmp_path)
        )
        assert f"#SBATCH --dependency={expected}\n" in script


def test_a_job_that_never_starts_is_named_with_what_to_do(
    recorded: Prepared, slurm: FakeSlurm, capfd: Capture
) -> None:
    run = recorded("submitted", job_id="41")
    slurm.says("squeue", "41|PENDING|N/A|DependencyNeverSatisfied|one")
    seen = status_of(run)
    assert seen.state == "pending" and seen.note.startswith(
        "DependencyNeverSatisfied: it never starts, as a job that"
    )
    main("jobs", VERBS, ["diagnose", str(run.path)])
    told = capfd.readouterr().out
    assert (
        f"gems-jobs cancel {run.path.name}, then gems-jobs resubmit {run.path.name} +cluster"
        in told
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--chain", "0"], "jobs: --chain=0: must be a whole number from 1 to 100"),
        (["--chain=two"], "jobs: --chain=two: must be a whole number from 1 to 100"),
        (
            ["--chain=2", "cluster=local"],
            "jobs: --chain=2: needs jobs of a batch system, and this run starts here",
        ),
        (["--after", "nothing"], "jobs: run=nothing: is no run and no study of"),
        (["--after"], "jobs: --after=none: must have a value"),
    ],
)
def test_bad_words_are_one_line(words: list[str], says: str, capfd: Capture) -> None:
    assert main("jobs", VERBS, ["submit", "experiment=quickstart", "cluster=mini", *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(says)
