"""Jobs of a second cluster, what sites print around their answers, and variables of the user's shell."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gems.config.cluster import QueueLimit
from gems.config.schema import RunSpec
from gems.errors import TryLaterError
from gems.runs.folder import RunFolder
from gems.runs.owner import CLUSTER_VARIABLE, own_job_id
from jobs.batch.command import SchedulerUnavailableError
from jobs.batch.job import JobId
from jobs.batch.resources import job_spec
from jobs.launch.batch import BatchJob, wait_for_submission
from jobs.launch.submission import start_run
from jobs.preflight.checks import site_checks
from jobs.schedulers.scheduler import SCHEDULERS, find_submitted
from jobs.schedulers.slurm_client import environment
from jobs.schedulers.slurm_client.jobs import SACCT, SQUEUE, list_jobs, query_jobs
from jobs.schedulers.slurm_client.site import query_accounts
from jobs.status.cancellation import cancel_all
from jobs.status.lookup import Catalogue
from jobs.status.run_status import run_statuses
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import (
    Capture,
    MonkeyPatch,
    Prepared,
    Resolved,
    refused,
    script_of,
    status_of,
)

pytestmark = pytest.mark.cases
# Before a command of the second cluster: without the option it knows no job.
ELSEWHERE = """
case "$*" in *--clusters=serial*) ;; *) echo "JOBID|STATE|COMMAND"; exit 0 ;; esac
echo "CLUSTER: serial"
"""


@pytest.fixture
def make(resolved: Resolved, tmp_path: Path) -> Resolved:
    def make(**sbatch: str) -> RunSpec:
        spec = resolved("cluster=mini")
        cluster = replace(spec.cluster, sbatch=sbatch)
        return replace(spec, name="one", runs_dir=str(tmp_path / "runs"), cluster=cluster)

    return make


@pytest.fixture
def queue(slurm: FakeSlurm) -> FakeSlurm:
    slurm.has_queue()
    for name in ("scontrol", "sinfo", "sacctmgr", "sacct"):
        slurm.says(name, error="Unable to contact slurm controller (connect failure)\n", code=1)
    return slurm


def edit(slurm: FakeSlurm, name: str, change: Callable[[str], str]) -> None:
    path = slurm.here / name
    path.write_text(change(path.read_text()))


def test_the_checks_of_a_second_cluster_ask_it(slurm: FakeSlurm, make: Resolved) -> None:
    """The default cluster has no partition of this name, and as many jobs as it takes."""
    row = "PartitionName=serial Default=NO MaxNodes=4 MaxTime=02:00:00 State=UP TotalNodes=4"
    for name, line in (
        ("scontrol", row),
        ("sinfo", "serial|4|64|512000|(null)|idle"),
        ("squeue", ""),
    ):
        answer = f"printf 'CLUSTER: serial\\n{line}'"
        slurm.does(name, f'case "$*" in *--clusters=serial*) {answer} ;; *) echo 7 ;; esac')
    spec = make(clusters="serial")
    cluster = replace(spec.cluster, partition="serial", limits=[QueueLimit(queued_jobs=1)])
    spec = replace(spec, cluster=cluster)
    checks = {check.name: check for check in site_checks(job_spec(spec), "", None)}
    assert checks["limits"].ok and checks["partition"].ok, checks
    assert "serial: 4 of 4 nodes up" in checks["partition"].said
    elsewhere = replace(spec, cluster=replace(cluster, sbatch={}))
    checks = {check.name: check for check in site_checks(job_spec(elsewhere), "", None)}
    assert "1 jobs are queued" in checks["limits"].said


def test_a_job_of_a_second_cluster_is_known_by_it(queue: FakeSlurm, make: Resolved) -> None:
    edit(queue, "sbatch", lambda text: text.replace("job $number", "job $number on cluster serial"))
    edit(queue, "squeue", lambda text: text.replace("header=yes", f"{ELSEWHERE}\nheader=yes"))
    edit(
        queue,
        "scancel",
        lambda text: text.replace("for number", "[ $1 = --clusters=serial ] || exit 1\nfor number"),
    )
    spec = make(clusters="serial")
    folder = RunFolder.of(spec)
    start_run(spec, assume_yes=True)
    assert folder.read_status()["job_id"] == "41@serial"
    assert "41_submission.sh" in {path.name for path in folder.logs.iterdir()}
    assert f"export {CLUSTER_VARIABLE}=serial" in folder.job_sh.read_text()
    run = status_of(folder)
    assert (run.state, run.job_id, run.is_guess) == ("pending", "41@serial", False)
    with refused("belongs to job 41@serial, which has not ended", TryLaterError):
        start_run(spec, assume_yes=True)
    assert queue.jobs() == ["41"]
    assert cancel_all(Catalogue((folder,), ()), as_json=False) == 0
    assert queue.jobs("CANCELLED") == ["41"]
    with refused("is a job of the default cluster, and this one is of cluster serial"):
        SCHEDULERS["slurm"].script(replace(job_spec(spec), after="40"), folder)
    script = SCHEDULERS["slurm"].script(replace(job_spec(spec), after="41@serial"), folder)
    assert "#SBATCH --dependency=afterany:41\n" in script


def test_an_interrupted_submission_is_looked_for_on_its_cluster(slurm: FakeSlurm) -> None:
    slurm.says(
        "squeue",
        "CLUSTER: a",
        "JOBID|STATE|COMMAND",
        "CLUSTER: b",
        "JOBID|STATE|COMMAND",
        "41_0|PENDING|/x/.submission_file_t0.sh",
    )
    assert find_submitted({"t0": "slurm@a,b"})["t0"].job_id == "41_0@b"
    assert "--clusters=a,b" in slurm.asked()[0]


def test_queries_and_ids_of_two_clusters(slurm: FakeSlurm) -> None:
    slurm.does(
        "squeue",
        'case "$*" in *=serial*) echo "41_7|RUNNING|N/A|None|b";; *) echo "41|PENDING|N/A|None|a";;'
        " esac",
    )
    assert {
        key: job.state for key, job in query_jobs(["41", "41_7@serial"], SQUEUE).jobs.items()
    } == {"41": "PENDING", "41_7@serial": "RUNNING"}
    assert (
        JobId.parse("41_7@serial") == ("41", "7", "serial")
        and str(JobId("41", "7", "serial")) == "41_7@serial"
    )
    assert JobId.parse("7.my_host").number == "7.my_host"


def test_a_job_takes_the_cluster_that_its_submission_recorded(
    recorded: Prepared, monkeypatch: MonkeyPatch
) -> None:
    folder = recorded("submitted", job_id="41@serial")
    monkeypatch.setenv(CLUSTER_VARIABLE, "")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    wait_for_submission(folder)
    assert own_job_id() == "41@serial"


@pytest.mark.parametrize(
    ("chosen", "said", "job_id"),
    [
        ("", "This is job 12 of at most 100\nSubmitted batch job 41\n", "41"),
        ("", "Submitted batch job 41\nYou have 3 jobs; job 12 is old\n", "41"),
        ("", "sbatch: Submitted batch job 41\n", "41"),
        ("", "41\n", "41"),
        ("", "41;serial\n", "41@serial"),
        ("serial", "Submitted batch job 41\n", "41@serial"),
        ("a,b", "Submitted batch job 41\n", None),
        ("a,b", "Submitted batch job 41 on cluster b\n", "41@b"),
        ("", "Submitted batch job 12\nSubmitted batch job 41\n", None),
        ("", "job 12 of 100\n", None),
    ],
)
def test_the_number_in_what_sbatch_prints(chosen: str, said: str, job_id: str | None) -> None:
    assert SCHEDULERS["slurm"].read_id(said, chosen) == job_id


def test_of_two_numbers_squeue_knows_the_jobs(queue: FakeSlurm, make: Resolved) -> None:
    edit(
        queue,
        "sbatch",
        lambda text: text.replace(
            'echo "Submitted', 'echo "Submitted batch job 12"; echo "Submitted'
        ),
    )
    spec = make()
    start_run(spec, assume_yes=True)
    assert RunFolder.of(spec).read_status()["job_id"] == "41"


def test_lines_that_are_no_job_are_skipped(slurm: FakeSlurm) -> None:
    slurm.says(
        "squeue",
        "JOBID|STATE|COMMAND",
        "7|RUNNING|/x --text one",
        "two|three",
        "",
        "41|POWERING_UP|/y",
    )
    assert [(job.job_id, job.is_active) for job in list_jobs("--user=0")] == [
        ("7", True),
        ("41", True),
    ]
    slurm.says("squeue", "41|RUNNING|N/A|None|one", "line|of a name", "|||||")
    assert [*query_jobs(["41"], SQUEUE).jobs] == ["41"]
    slurm.says("sacct", "41|COMPLETED|None|Unknown|0:0", "half a row", "|||", "42||")
    assert [*query_jobs(["41", "42"], SACCT).jobs] == ["41"]


@pytest.mark.parametrize("recorded", ["submitted", "running"])
def test_a_state_that_is_not_known_is_alive_and_shown(
    recorded: str, prepared: Prepared, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", "41|POWERING_UP|N/A|None|one")
    folder = prepared()
    folder.write_status(recorded, job_id="41")
    run = status_of(folder)
    assert run.is_active and run.note == "POWERING_UP"


def test_a_suspended_job_and_a_held_one(prepared: Prepared, slurm: FakeSlurm) -> None:
    slurm.says("squeue", "41|SUSPENDED|N/A|None|one", "42|PENDING|N/A|JobHeldUser|two")
    folders = prepared("one"), prepared("two")
    folders[0].write_status("running", job_id="41")
    folders[1].write_status("submitted", job_id="42")
    one, two = run_statuses(folders).runs
    assert (one.state, one.is_active) == ("suspended", True)
    assert two.note == "JobHeldUser: `scontrol release 42` lets it go"


def test_a_finished_run_is_left_as_it_is(
    recorded: Prepared, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    folder = recorded("finished", job_id="41", exit_code=0)
    folder.result_json.write_text("{}")

    def contents() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}

    before = contents()
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    BatchJob((str(folder.path),))()
    assert contents() == before
    assert "has finished: nothing is left to do" in capsys.readouterr().err


def test_variables_of_the_shell_are_kept_or_named(make: Resolved, monkeypatch: MonkeyPatch) -> None:
    for name in [name for name in os.environ if re.match("SLURM_|SBATCH_", name)]:
        monkeypatch.delenv(name)
    own = {"SBATCH_RESERVATION": "r", "SBATCH_QOS": "q", "SLURM_CLUSTERS": "serial"}
    others = {
        "SBATCH_PARTITION": "x",
        "SBATCH_WAIT": "1",
        "SLURM_MPI_TYPE": "none",
        "SBATCH_TIMELIMIT": "5",
    }
    for name, value in (own | others).items():
        monkeypatch.setenv(name, value)
    spec = make()
    assert SCHEDULERS["slurm"].clusters(spec.cluster) == "serial"
    script = script_of(spec)
    passed = environment.submission_environment(script)
    assert {name: passed[name] for name in passed if name.startswith(("SLURM_", "SBATCH_"))} == own
    (line,) = SCHEDULERS["slurm"].notes(script)
    assert "SBATCH_QOS=q is kept" in line and "SLURM_CLUSTERS=serial is kept" in line
    assert (
        "SBATCH_PARTITION=x is ignored: cluster.partition is decisive (--partition=debug)" in line
    )
    assert "SBATCH_WAIT=1 is ignored: set +cluster.sbatch.wait" in line
    assert "SLURM_MPI_TYPE=none is ignored: set +cluster.environment.SLURM_MPI_TYPE" in line
    assert "SBATCH_TIMELIMIT=5 is ignored: cluster.minutes is decisive" in line
    chosen = make(qos="debug")
    script = script_of(chosen)
    assert "SBATCH_QOS" not in environment.submission_environment(script)


def test_a_user_without_a_name(monkeypatch: MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(
        SchedulerUnavailableError, match=r"sacctmgr needs a name, and user [0-9]+ has none here"
    ):
        query_accounts()
