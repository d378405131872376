"""`gems-jobs diagnose`: the cause, the rank and what to change, from run folders as each fault leaves them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.utils.atomic_io import write_json
from jobs.diagnosis.node_blocklist import NodeBlocklist
from jobs.diagnosis.report import Diagnosis, diagnose_run
from jobs.status.lookup import StudyRecord
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Called, MonkeyPatch, Prepared

WriteFailed = Callable[..., None]
START = datetime(2026, 11, 21, 12, tzinfo=UTC)
STEPD = "slurmstepd: error: *** JOB 41 ON n1 CANCELLED AT {at}{why} ***"
STOPPED = {
    "exit_code": 143,
    "signal": 15,
    "cause": "was stopped by SIGTERM: cancelled, preempted or out of time",
}


def utc(after_s: float) -> str:
    return (START + timedelta(seconds=after_s)).isoformat(timespec="milliseconds")


def local(after_s: float) -> str:
    return f"{(START + timedelta(seconds=after_s)).astimezone():%Y-%m-%dT%H:%M:%S}"


def failed(
    folder: RunFolder, *log: str, batch: str = "", state: str = "failed", **more: Any
) -> RunFolder:
    """Leave what a job leaves that has failed: its state, its ranks' log and SLURM's own."""
    facts = {
        "job_id": "41",
        "started_utc": utc(0),
        "exit_code": 4,
        "cause": "the run ended with exit code 1",
    }
    folder.write_status(state, **{**facts, **more})
    folder.logs.joinpath("ranks.log").write_text("".join(f"{line}\n" for line in log))
    folder.logs.joinpath("41_log.out").write_text(batch)
    return folder


def beat(
    folder: RunFolder, rank: int, step: int, action: str, after_s: float = 0.0, node: str = "n1"
) -> None:
    heartbeat = Heartbeat(folder.heartbeat(rank))
    heartbeat._head = f"{100 + rank} {node}"
    heartbeat.beat(step, action)
    path = folder.heartbeat(rank)
    words = path.read_bytes().split()
    words[4] = str(int((START.timestamp() + after_s) * 1e9)).encode()
    path.write_bytes(b" ".join(words[:5]).ljust(256))


def of(folder: RunFolder) -> Diagnosis:
    return diagnose_run(folder, with_trace=False)


@pytest.fixture
def prepared(prepared: Prepared) -> Prepared:
    """Prepare runs that need no profile."""
    return lambda name="one": prepared(name, "partition=even")


@pytest.fixture(autouse=True)
def no_slurm(slurm: FakeSlurm) -> FakeSlurm:
    """No command of SLURM's, unless a test gives one."""
    return slurm


@pytest.fixture
def diagnose(call: Called) -> Called:
    return partial(call, "diagnose")


def test_device_memory_names_rank_stage_and_bytes(
    prepared: Prepared, write_failed: WriteFailed
) -> None:
    folder = failed(
        prepared(), "1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    write_failed(folder, 0, utc(2), "Exception: Other MPI error, error stack: ...")
    cause = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    write_failed(
        folder,
        1,
        utc(3),
        cause,
        step=12,
        action="1F3",
        node="n2",
        device_bytes=3 * 2**33,
        rss_bytes=2**30,
        kind="OutOfMemoryError",
    )
    told = of(folder)
    assert (told.cause, told.rank, told.node, told.stages, told.step) == (
        FailureCause.DEVICE_MEMORY,
        1,
        "n2",
        (1,),
        12,
    )
    assert told.paragraph().startswith(
        f"{folder.path.name}: out of memory on device. Rank 1 on node n2 (stage 1) in step 12,"
        f" action 1F3: {cause} [FAILED.rank0001.json]. It held 1.00 GiB of host memory and 24.00"
        " GiB on the device."
    )
    assert "memory=plan" in told.paragraph() and "parallel.partitions" in told.paragraph()


def test_a_rank_out_of_memory_is_shown_with_its_views_and_its_advice(
    prepared: Prepared, write_failed: WriteFailed
) -> None:
    folder = failed(prepared())
    memory = {
        "text": "2.000 GiB were asked for; the rank counts 9.000 GiB",
        "advice": ["less of it", "more ranks"],
    }
    write_failed(
        folder,
        1,
        utc(3),
        "OutOfMemoryError: CUDA out of memory.",
        memory=memory,
        device_bytes=2**33,
        cause_class="out of memory on device",
    )
    told = of(folder)
    assert told.cause is FailureCause.DEVICE_MEMORY and told.to_dict()["memory"] == memory["text"]
    assert "]. 2.000 GiB were asked for; the rank counts 9.000 GiB. " in told.paragraph()
    assert (
        told.paragraph().endswith(" To change: less of it; more ranks.")
        and "It held" not in told.paragraph()
    )
    for damaged in (None, {"advice": []}):
        write_failed(
            folder,
            1,
            utc(3),
            "OutOfMemoryError: CUDA out of memory.",
            memory=damaged,
            device_bytes=2**33,
        )
        assert (
            "It held 8.00 GiB on the device." in of(folder).paragraph()
            and "memory=plan" in of(folder).advice[0]
        )


def test_the_kernels_words_go_before_the_signal_that_it_sent(
    prepared: Prepared, write_failed: WriteFailed
) -> None:
    folder = failed(
        prepared(),
        "srun: error: n2: task 1: Killed",
        "srun: error: n1: task 0: Terminated",
        batch=(
            "slurmstepd: error: Detected 1 oom_kill event in StepId=41.0. "
            "Some of the step tasks have been OOM Killed.\n"
        ),
    )
    beat(folder, 0, 7, "0F1")
    beat(folder, 1, 7, "1B0", node="n2")
    write_failed(folder, 0, utc(9), "nothing came from rank 1", 5)
    told = of(folder)
    assert (told.cause, told.rank, told.node, told.step, told.action) == (
        FailureCause.HOST_MEMORY,
        1,
        "n2",
        7,
        "1B0",
    )
    assert told.source == "logs/41_log.out" and "+cluster.sbatch.mem" in told.advice[0]
    assert {each.cause for each in told.evidence} >= {FailureCause.HOST_MEMORY, FailureCause.KILLED}


@pytest.mark.parametrize(
    ("cause", "more", "expected"),
    [
        ("ValueError: no such thing", {"kind": "ValueError"}, FailureCause.EXCEPTION),
        ("MemoryError: ", {"kind": "MemoryError"}, FailureCause.HOST_MEMORY),
        ("OSError: [Errno 122] Disk quota exceeded", {"kind": "OSError"}, FailureCause.FILE_SYSTEM),
        ("OSError: it is gone", {"cause_class": "file system"}, FailureCause.FILE_SYSTEM),
        ("data.path=/x: does not exist", {"exit_code": 2}, FailureCause.CONFIGURATION),
        (
            "cluster.mpi=none: MPI sees a world of 1 and SLURM started 2 tasks",
            {"exit_code": 2},
            FailureCause.WRONG_MPI,
        ),
        (
            "rank 1 needs 5 bytes, above machine.device_bytes=4",
            {"exit_code": 3},
            FailureCause.DOES_NOT_FIT,
        ),
        (
            "AcceleratorError: CUDA error: uncorrectable ECC error encountered",
            {},
            FailureCause.DEVICE,
        ),
        ("ModuleNotFoundError: No module named 'gems'", {}, FailureCause.EXCEPTION),
    ],
)
def test_what_a_rank_recorded(
    prepared: Prepared,
    write_failed: WriteFailed,
    cause: str,
    more: dict[str, Any],
    expected: FailureCause,
) -> None:
    folder = failed(prepared())
    write_failed(folder, 1, utc(3), cause, more.pop("exit_code", 4), **more)
    told = of(folder)
    assert (told.cause, told.rank, told.text) == (expected, 1, " ".join(cause.split()))
    assert told.advice


def test_a_rank_that_was_killed(prepared: Prepared) -> None:
    folder = failed(
        prepared(), "srun: error: n2: task 1: Killed", "srun: error: n1: task 0: Terminated"
    )
    beat(folder, 1, 7, "1F3", node="n2")
    told = of(folder)
    assert (told.cause, told.rank, told.node, told.stages) == (FailureCause.KILLED, 1, "n2", (1,))
    assert told.line() == "killed, rank 1 on node n2 (stage 1): was killed by signal 9 (SIGKILL)"


def test_a_stall_blames_the_silent_rank(prepared: Prepared, write_failed: WriteFailed) -> None:
    folder = failed(
        prepared(),
        "srun: error: n1: task 0: Exited with exit code 5",
        "srun: error: n2: task 1: Killed",
        exit_code=5,
    )
    beat(folder, 0, 7, "0B0", 40)
    beat(folder, 1, 7, "1F3", 1, node="n2")
    write_json(
        folder.path / "STALLED.json",
        {
            "rank": 0,
            "node": "n1",
            "step": 7,
            "action": "0B0",
            "waited_s": 60,
            "utc": utc(70),
            "waits_for": "rank 0 waits for 1SEND_B0 of rank 1, which is silent",
        },
    )
    write_failed(folder, 0, utc(71), "waited 60 s for 1SEND_B0", 5)
    told = of(folder)
    assert (told.cause, told.rank, told.node, told.action, told.source) == (
        FailureCause.STALLED,
        1,
        "n2",
        "1F3",
        "STALLED.json",
    )
    assert "rank 0 waited 60 s in step 7, action 0B0" in told.text
    assert "rank 0 waits for 1SEND_B0 of rank 1, which is silent." in told.paragraph()
    assert "cluster.exclude=[n2]" in told.paragraph()


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        (" DUE TO TIME LIMIT", FailureCause.TIME_LIMIT),
        (" DUE TO PREEMPTION", FailureCause.PREEMPTED),
        ("", FailureCause.CANCELLED),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", FailureCause.NODE),
    ],
)
def test_an_order_of_the_scheduler(
    prepared: Prepared, write_failed: WriteFailed, why: str, cause: FailureCause
) -> None:
    folder = failed(prepared(), batch=STEPD.format(at=local(60), why=why) + "\n", **STOPPED)
    write_failed(folder, 0, utc(61), "RuntimeError: interrupted")
    assert of(folder).cause is cause
    write_failed(folder, 1, utc(1), "ValueError: a minute before")
    told = of(folder)
    assert (told.cause, told.rank) == (FailureCause.EXCEPTION, 1)


def test_without_a_word_of_slurms_the_minutes_tell(prepared: Prepared) -> None:
    folder = failed(prepared(), **STOPPED)
    status = folder.read_status()
    for ran_s, cause in ((9.5 * 60, FailureCause.TIME_LIMIT), (4 * 60, FailureCause.KILLED)):
        write_json(folder.status_json, {**status, "updated_utc": utc(ran_s)})
        told = of(folder)
        assert told.cause is cause
    write_json(folder.cancelled_json, {"uid": 7, "host": "login1", "utc": utc(4 * 60)})
    told = of(folder)
    assert (told.cause, told.text) == (FailureCause.CANCELLED, "cancelled by user 7 on login1")


def test_a_failed_node_is_named_and_left_out(
    prepared: Prepared, slurm: FakeSlurm, diagnose: Called
) -> None:
    slurm.says("sacct", f"41|NODE_FAIL|None|{local(0)}|0:0|n[1-2]|{local(600)}|00:10:00|00:10:00|")
    folder = prepared()
    failed(
        folder, "srun: error: Node failure on n2", state="running"
    )  # nobody was left to note its end
    write_json(
        folder.path / "STALLED.json",
        {"rank": 0, "node": "n1", "step": 7, "action": "0B0", "utc": utc(20)},
    )
    out, err = diagnose("one")
    assert f"{folder.path.name}: node failed. Node n2:" in out and "exclude node n2" in out
    assert "node n2 of mini has failed once" in err and "excludes it after 2 failures" in err
    diagnose("one")
    (entry,) = NodeBlocklist(folder.path.parent).entries()
    assert (entry.node, entry.cluster, len(entry.runs), entry.run) == (
        "n2",
        "mini",
        1,
        f"{folder.path.name} attempt 1",
    )
    failed(prepared("two"), "srun: error: Node failure on n2", state="running")
    _, err = diagnose("two")
    assert "node n2 of mini has failed 2 times" in err and "excludes it for 14 days" in err
    out, err = diagnose("--unblock", "n2")
    assert "unblocked: node n2" in out and NodeBlocklist(folder.path.parent).entries() == ()
    _, err = diagnose("--unblock", "n2", code=2)
    assert "no node is blocked" in err


def test_no_node_is_blamed_for_a_full_quota(prepared: Prepared, write_failed: WriteFailed) -> None:
    folder = failed(prepared())
    write_failed(folder, 0, utc(1), "OSError: [Errno 122] Disk quota exceeded")
    assert of(folder).blamed_node is None
    write_failed(folder, 0, utc(1), "OSError: [Errno 116] Stale file handle")
    assert of(folder).blamed_node == "n1"
    write_failed(folder, 1, utc(1), "OSError: [Errno 116] Stale file handle", node="n2")
    assert of(folder).blamed_node is None, "what two nodes met is the file system's fault"


@pytest.mark.parametrize(
    ("state", "more", "cause"),
    [
        ("prepared", {}, FailureCause.WAITING),
        ("finished", {"exit_code": 0}, FailureCause.FINISHED),
        ("stopped", {"exit_code": 0}, FailureCause.STOPPED),
        (
            "failed",
            {"exit_code": 2, "cause": "machine.device=cuda: there is no GPU"},
            FailureCause.CONFIGURATION,
        ),
        (
            "failed",
            {"exit_code": 1, "cause": "OSError: [Errno 28] No space left on device"},
            FailureCause.FILE_SYSTEM,
        ),
        ("cancelled", {"exit_code": 143}, FailureCause.CANCELLED),
        ("running", {"pid": 2**22 + 1, "host": os.uname().nodename}, FailureCause.KILLED),
        ("running", {"pid": os.getpid(), "host": os.uname().nodename}, FailureCause.RUNNING),
    ],
)
def test_from_the_status_alone(
    recorded: Prepared, state: str, more: dict[str, Any], cause: FailureCause
) -> None:
    folder = recorded(state, **more)
    told = of(folder)
    assert told.cause is cause
    assert told.paragraph().startswith(f"{folder.path.name}: {cause}.")


def test_an_exception_before_the_ranks_began(prepared: Prepared) -> None:
    folder = failed(
        prepared(),
        "0: Traceback (most recent call last):",
        "0: ModuleNotFoundError: No module named 'torch'",
        "srun: error: n1: task 0: Exited with exit code 1",
    )
    told = of(folder)
    assert (told.cause, told.rank) == (FailureCause.EXCEPTION, 0)
    assert "cluster.modules" in told.advice[0]


def test_a_job_that_never_started(recorded: Prepared, slurm: FakeSlurm) -> None:
    folder = recorded("submitted", job_id="41")
    slurm.says("squeue", "41|FAILED|N/A|JobLaunchFailure|one")
    slurm.says("sacct", error="Slurm accounting storage is disabled", code=1)
    slurm.says(
        "scontrol",
        f"JobId=41 JobState=FAILED Reason=JobLaunchFailure ExitCode=0:53 EndTime={local(1)}",
    )
    told = of(folder)
    assert (told.cause, told.source) == (FailureCause.LAUNCHER, "scontrol")


def test_everything_damaged_is_still_told(prepared: Prepared) -> None:
    folder = failed(prepared(), cause="", exit_code=None)
    for name in (
        "FAILED.rank0000.json",
        "STALLED.json",
        "stop.json",
        "schedule.json",
        "run.yaml",
        "cancelled.json",
    ):
        folder.path.joinpath(name).write_text("\x00{")
    folder.heartbeat(0).write_bytes(b"\xff\xfe a b c d")
    told = of(folder)
    assert told.cause is FailureCause.UNKNOWN and told.rank is None
    assert json.loads(json.dumps(told.to_dict()))["schema"] == "gems.diagnosis/1"


def test_strange_words_stay_on_their_line(prepared: Prepared, write_failed: WriteFailed) -> None:
    folder = failed(prepared("a 'b' \"c\" $(touch owned)"))
    write_failed(
        folder, 0, utc(1), "ValueError: \x1b[31m`ls`\nnew $(touch owned)", node="n1\x1b[2J;ls"
    )
    paragraph = of(folder).paragraph()
    assert paragraph.isprintable() and "$(touch owned)" in paragraph
    assert of(folder).blamed_node is None and not Path("owned").exists()


def test_json_and_the_file_hold_the_same(
    prepared: Prepared, write_failed: WriteFailed, diagnose: Called
) -> None:
    folder = failed(prepared())
    write_failed(folder, 1, utc(3), "ValueError: bad")
    checkpoint = folder.path / "checkpoints" / "step00000010"
    checkpoint.mkdir(parents=True)
    (folder.path / "checkpoints" / "step00000020").mkdir()  # without a manifest it is none
    (checkpoint / "manifest.json").write_text("{}")
    printed = json.loads(diagnose("one", "--json")[0])
    kept = json.loads((folder.path / "diagnosis.json").read_text())
    assert kept.pop("utc") and kept == printed
    assert (printed["cause"], printed["rank"], printed["resume_step"]) == ("exception", 1, 10)
    assert printed["evidence"][0] == {
        "source": "FAILED.rank0001.json",
        "cause": "exception",
        "text": "ValueError: bad",
        "is_consequence": False,
    }
    assert {"sacct is not on PATH", "scontrol is not on PATH"} <= set(printed["query_errors"])


def test_a_prepared_folder_is_left_as_it_is(prepared: Prepared, diagnose: Called) -> None:
    folder = prepared()
    before = sorted(path.name for path in folder.path.iterdir())
    diagnose("one")
    assert sorted(path.name for path in folder.path.iterdir()) == before


def test_a_folder_that_cannot_be_written_is_told_all_the_same(
    prepared: Prepared, diagnose: Called, monkeypatch: MonkeyPatch
) -> None:
    folder = failed(
        prepared(),
        "NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus",
        "srun: error: n2: task 1: Killed",
    )

    def refuse(*words: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("jobs.diagnosis.report.write_json", refuse)
    monkeypatch.setattr("jobs.diagnosis.node_blocklist.write_json", refuse)
    out, err = diagnose("one")
    assert "device failed" in out
    assert (
        f"diagnosis.json is not written: {folder.path} cannot be written (Permission denied)" in err
    )


def test_the_trace_is_read_as_far_as_it_goes(prepared: Prepared, monkeypatch: MonkeyPatch) -> None:
    folder = failed(prepared())
    assert diagnose_run(folder).trace_steps is None
    folder.trace_h5.write_text("no trace")
    assert diagnose_run(folder).trace_steps is None


def test_a_study_is_told_point_by_point(
    tmp_path: Path,
    prepared: Prepared,
    recorded: Prepared,
    write_failed: WriteFailed,
    diagnose: Called,
) -> None:
    folders = [failed(prepared(name)) for name in ("a", "b", "c")]
    write_failed(folders[0], 1, utc(3), "ValueError: bad")
    write_failed(folders[1], 0, utc(3), "OSError: [Errno 122] Disk quota exceeded")
    write_failed(folders[2], 0, utc(3), "KeyError: 'x'")
    good = recorded("finished", name="d", exit_code=0)
    points = [(f"point={each.path.name[0]}", each.path) for each in (*folders, good)]
    StudyRecord(tmp_path / "runs" / "grid").begin(points)
    lines = diagnose("grid")[0].splitlines()
    assert lines[0] == "study grid: 3 points have failed" and lines[1] == "exception (2)"
    assert [line.split(",")[0].strip() for line in lines if line.startswith("  point")] == [
        "point=a",
        "point=c",
        "point=b",
    ]
    (study,) = json.loads(diagnose("grid", "--json")[0])["studies"]
    assert [row["cause"] for row in study["failed"]] == ["exception", "exception", "file system"]


def test_a_node_without_a_word_is_named_where_the_others_lost_their_messages(
    prepared: Prepared, write_failed: WriteFailed
) -> None:
    folder = failed(prepared())
    for rank, node in enumerate(("n1", "n1", "n2", "n2")):
        beat(folder, rank, 7, f"{rank}F3", node=node)
    write_failed(
        folder, 1, utc(3), "Exception: Other MPI error, error stack: ...", step=7, action="1F3"
    )
    told = of(folder)
    assert (told.cause, told.rank, told.node) == (FailureCause.KILLED, 2, "n2")
    assert "no rank of this node left a record" in told.text
    write_failed(folder, 2, utc(2), "ValueError: out of bounds", step=7, action="2F3", node="n2")
    assert (of(folder).cause, of(folder).rank) == (FailureCause.EXCEPTION, 2)


def test_a_killed_rank_goes_before_those_whose_messages_failed(
    prepared: Prepared, write_failed: WriteFailed
) -> None:
    folder = failed(
        prepared(),
        "srun: error: n2: tasks 2-3: Killed",
        "srun: error: n1: task 1: Exited with exit code 4",
    )
    for rank, node in enumerate(("n1", "n1", "n2", "n2")):
        beat(folder, rank, 7, f"{rank}F3", node=node)
    write_failed(
        folder, 1, utc(3), "Exception: Other MPI error, error stack: ...", step=7, action="1F3"
    )
    told = of(folder)
    assert (told.cause, told.rank, told.node) == (FailureCause.KILLED, 2, "n2")


OFI = (
    "Exception: Other MPI error, error stack: internal_Start(82): MPI_Start(request=0x7f0a6b3b7c10)"
    " failed MPIDI_OFI_send(417): OFI call tinjectdata failed (default nic=eth0: Input/output"
    " error)"
)


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        ("", FailureCause.KILLED),
        (
            (
                "slurmstepd: error: Detected 1 oom_kill event in StepId=41.0. Some of the step"
                " tasks have been OOM Killed.\n"
            ),
            FailureCause.HOST_MEMORY,
        ),
    ],
)
def test_what_others_met_when_a_rank_was_killed_is_named_as_its_consequence(
    prepared: Prepared, write_failed: WriteFailed, event: str, cause: FailureCause
) -> None:
    folder = failed(
        prepared(),
        f"0: mpi4py.MPI.{OFI}",
        "0: MPIDI_OFI_send(417): OFI call tinjectdata failed (Input/output error)",
        "0: OSError: [Errno 5] Input/output error",
        "srun: error: PMIX ERROR: UNREACHABLE in file ptl_tcp.c",
        "0: Abort(4) on node 0 (rank 0 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 4)"
        " - process 0",
        "srun: error: n1: task 0: Exited with exit code 4",
        "srun: error: n2: task 1: Out Of Memory" if event else "srun: error: n2: task 1: Bus error",
        batch=event,
        exit_code=4,
        cause=OFI,
        rank=0,
        node="n1",
    )
    for rank in range(2):
        beat(folder, rank, 7, f"{rank}F3", node=f"n{rank + 1}")
    write_failed(folder, 0, utc(3), OFI, kind="Exception", cause_class="exception")
    told = of(folder)
    assert (told.cause, told.rank, told.node, told.blamed_node) == (cause, 1, "n2", None)
    assert (
        "A consequence only: rank 0 on node n1 failed with Exception: Other MPI error"
        in told.paragraph()
    )
    assert any(each["is_consequence"] for each in told.to_dict()["evidence"])


def test_a_network_error_alone_is_no_file_systems_fault(
    prepared: Prepared, write_failed: WriteFailed
) -> None:
    folder = failed(
        prepared(), "0: MPIDI_OFI_send(417): OFI call tinjectdata failed (Input/output error)"
    )
    write_failed(folder, 0, utc(3), OFI, kind="Exception", cause_class="exception")
    told = of(folder)
    assert (told.cause, told.rank, told.blamed_node) == (FailureCause.EXCEPTION, 0, None)


def test_a_launcher_lost_in_training_needs_no_other_configuration(prepared: Prepared) -> None:
    line = "[n1:4242] OPAL ERROR: Unreachable in file pmix3x_client.c at line 111"
    folder = failed(prepared(), line, cause=line)
    assert of(folder).cause is FailureCause.WRONG_MPI
    beat(folder, 0, 3, "0F1")
    told = of(folder)
    assert told.cause is FailureCause.KILLED and "resubmit" in told.advice[-1]


@pytest.mark.cases
@pytest.mark.parametrize("what", ["moved", "interpreter"])
def test_what_the_script_of_a_job_names_is_gone(
    what: str, recorded: Prepared, slurm: FakeSlurm
) -> None:
    code, reason = ("0:53", "JobLaunchFailure") if what == "moved" else ("127:0", "NonZeroExitCode")
    slurm.says("squeue", f"41|FAILED|N/A|{reason}|one")
    slurm.says("sacct", f"41|FAILED|{reason}|Unknown|{code}||Unknown|00:00:01||")
    folder = recorded("submitted", job_id="41")
    logs = "/was/here/one/logs" if what == "moved" else folder.logs
    program = "/no/such/python" if what == "interpreter" else "/bin/sh"
    script = f"#SBATCH --output={logs}/%j_0_log.out\nexec {program} -u -m x\n"
    (folder.logs / "41_submission.sh").write_text(script)
    found = diagnose_run(folder)
    assert found.cause is FailureCause.LAUNCHER
    words = {
        "moved": "moved while its job waited, from /was/here/one:",
        "interpreter": "/no/such/python is gone",
    }
    assert words[what] in found.text and "jobs resubmit" in found.advice[0]
