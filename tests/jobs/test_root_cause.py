"""Which rank is named, from every combination of what ranks, launchers and heartbeats left."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gems.launch.local_launcher import Ended
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from jobs.diagnosis.launcher_output import LauncherOutput
from jobs.diagnosis.root_cause import Failure, RankEvidence

WriteFailed = Callable[..., None]

KILLED_3 = "srun: error: n2: task 3: Killed"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def beat(folder: RunFolder, rank: int, pid: int, node: str, step: int, action: str) -> None:
    heartbeat = Heartbeat(folder.heartbeat(rank))
    heartbeat._head = f"{pid} {node}"
    heartbeat.beat(step, action)


def heard(*lines: str) -> LauncherOutput:
    words = LauncherOutput()
    for line in lines:
        words.feed_line(line)
    return words


def ended(returncode: int = 1, *tail: str, stopped_by: str | None = None) -> Ended:
    return Ended(returncode, tail, stopped_by=stopped_by)


def find_failure(folder: RunFolder, output: LauncherOutput, ended: Ended) -> Failure:
    return RankEvidence(folder, output, ended).failure


def test_earliest_cause_goes_first(folder: RunFolder, write_failed: WriteFailed) -> None:
    write_failed(folder, 0, "2026-01-01T00:00:01", "StalledError", 5)
    write_failed(folder, 1, "2026-01-01T00:00:02", "Exception: Other MPI error, error stack: ...")
    write_failed(folder, 2, "2026-01-01T00:00:04", "KeyError: 'late'")
    write_failed(
        folder, 3, "2026-01-01T00:00:03", "ValueError: bad\nthing", step=12, action="1F3", node="n2"
    )
    failure = find_failure(
        folder, heard("srun: error: n1: task 0: Exited with exit code 5"), ended()
    )
    assert failure.exit_code == 4
    assert (
        failure.describe()
        == "rank 3 on node n2 failed in step 12, action 1F3: ValueError: bad thing"
    )
    assert failure.to_dict() == {
        "exit_code": 4,
        "cause": "ValueError: bad\nthing",
        "rank": 3,
        "node": "n2",
        "rank_pid": 103,
        "step": 12,
        "action": "1F3",
        "cause_class": "exception",
    }


@pytest.mark.parametrize(("code", "kept"), [(2, 2), (3, 3), (4, 4), (5, 5), (1, 4), (None, 4)])
def test_a_ranks_exit_code_is_kept_when_it_means_something(
    folder: RunFolder, write_failed: WriteFailed, code: int | None, kept: int
) -> None:
    write_failed(folder, 0, "2026", "why", code)
    assert find_failure(folder, heard(), ended()).exit_code == kept


def test_killed_rank_goes_before_those_that_missed_it(
    folder: RunFolder, write_failed: WriteFailed
) -> None:
    write_failed(folder, 0, "2026", "nothing came from rank 3", 5)
    beat(folder, 3, 333, "n2", 7, "0B2")
    failure = find_failure(
        folder, heard(KILLED_3, "srun: error: n1: tasks 0-1: Terminated"), ended(137)
    )
    assert (
        failure.describe()
        == "rank 3 on node n2 was killed by signal 9 (SIGKILL) in step 7, action 0B2"
    )
    assert failure.to_dict()["cause"] == "was killed by signal 9 (SIGKILL)"
    assert (failure.signal, failure.rank_pid, failure.exit_code) == (9, 333, 4)


LOST = (
    "0: Abort(69922959) on node 0 (rank 0 in comm 448): Fatal error in internal_Test: Other MPI"
    " error, error stack:"
)


def test_killed_rank_goes_before_one_whose_mpi_lost_it(folder: RunFolder) -> None:
    """MPI may end a rank whose peer is gone before SLURM tells of that peer.

    Alone, it is all that is known.
    """
    beat(folder, 0, 111, "n1", 7, "0REDUCE_GRAD")
    beat(folder, 3, 333, "n2", 7, "0B2")
    after = (
        "srun: error: n1: task 0: Exited with exit code 143",
        "srun: error: n1: task 1: Terminated",
    )
    failure = find_failure(folder, heard(LOST, KILLED_3, *after), ended(137))
    assert (
        failure.describe()
        == "rank 3 on node n2 was killed by signal 9 (SIGKILL) in step 7, action 0B2"
    )
    assert find_failure(folder, heard(LOST, *after), ended(137)).rank == 0


# What rank 0 meets when the kernel or a user has killed rank 1: the network's errno reads like a
# file system's.
NETWORK_ERROR = (
    "Exception: Other MPI error, error stack: internal_Start(82): MPI_Start(request=0x7f0a6b3b7c10)"
    " failed MPIDI_OFI_send(417): OFI call tinjectdata failed (default nic=eth0: Input/output"
    " error)"
)
KILLED_1 = "srun: error: n2: task 1: Killed"
AFTER_IT = (
    "srun: launch/slurm: _step_signal: Terminating StepId=7.0",
    "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-25T20:17:31 ***",
    (
        "0: Abort(4) on node 0 (rank 0 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 4)"
        " - process 0"
    ),
    "srun: error: n1: task 0: Exited with exit code 4",
)
EVENT_22 = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been"
    " OOM Killed."
)
EVENT_20 = (
    "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0 cgroup. Some of your processes"
    " may have been killed by the cgroup out-of-memory handler."
)
KERNEL = (
    "[86401.1] Memory cgroup out of memory: Killed process 111 (python) total-vm:92031244kB,"
    " anon-rss:67108864kB, file-rss:1024kB, shmem-rss:0kB, UID:1000 pgtables:131072kB"
    " oom_score_adj:0"
)
KERNEL_TASK = (
    "[86401.0] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=step_0,mems_allowed=0-1,"
    "oom_memcg=/system.slice/slurmstepd.scope/job_7/step_0,task_memcg=/x/job_7/step_0/user/task_1,task=python,pid=111,"
    "uid=1000"
)
KERNEL_OF_NODE = (
    "[86401.1] Out of memory: Killed process 111 (python) total-vm:9203124kB, anon-rss:6710886kB,"
    " file-rss:0kB"
)
KERNEL_OF_OTHERS = (
    "[86401.1] Out of memory: Killed process 4 (firefox) total-vm:9203124kB, anon-rss:6710886kB"
)


@pytest.mark.parametrize(
    ("lines", "what", "cause_class"),
    [
        ((KILLED_1, *AFTER_IT), "was killed by signal 9 (SIGKILL)", "killed"),
        ((*AFTER_IT[:2], KILLED_1, *AFTER_IT[2:]), "was killed by signal 9 (SIGKILL)", "killed"),
        ((KERNEL_OF_OTHERS, KILLED_1, *AFTER_IT), "was killed by signal 9 (SIGKILL)", "killed"),
        (
            ("srun: error: n2: task 1: Bus error (core dumped)", *AFTER_IT),
            "was killed by signal 7 (SIGBUS)",
            "killed",
        ),
        (
            ("srun: error: n2: task 1: Aborted (core dumped)", *AFTER_IT),
            "was killed by signal 6 (SIGABRT)",
            "killed",
        ),
        (
            ("srun: error: n2: task 1: Exited with exit code 137", *AFTER_IT),
            "was killed by signal 9 (SIGKILL)",
            "killed",
        ),
        (
            (EVENT_22, KILLED_1, *AFTER_IT),
            f"was killed by signal 9 (SIGKILL): {EVENT_22}",
            "out of memory on host",
        ),
        (
            (KILLED_1, *AFTER_IT, EVENT_20),
            f"was killed by signal 9 (SIGKILL): {EVENT_20}",
            "out of memory on host",
        ),
        (
            ("srun: error: n2: task 1: Out Of Memory", *AFTER_IT),
            "ended: Out Of Memory",
            "out of memory on host",
        ),
        (
            (*AFTER_IT, "srun: error: n2: task 1: Out Of Memory"),
            "ended: Out Of Memory",
            "out of memory on host",
        ),
        *(
            (
                (*AFTER_IT, line),
                "was killed by signal 9 (SIGKILL): Out Of Memory",
                "out of memory on host",
            )
            for line in (KERNEL, KERNEL_TASK, KERNEL_OF_NODE)
        ),
    ],
)
def test_a_killed_rank_goes_before_the_network_error_of_another(
    folder: RunFolder,
    write_failed: WriteFailed,
    lines: tuple[str, ...],
    what: str,
    cause_class: str,
) -> None:
    beat(folder, 0, 110, "n1", 7, "0SEND_F2")
    beat(folder, 1, 111, "n2", 7, "1B1")
    write_failed(folder, 0, "2026", NETWORK_ERROR, kind="Exception")
    failure = find_failure(folder, heard(*lines), ended(137))
    position, _, why = what.partition(": ")
    where = f"{position} in step 7, action 1B1" + (f": {why}" if why else "")
    assert failure.describe() == f"rank 1 on node n2 {where}"
    assert failure.cause_class == cause_class


@pytest.mark.parametrize(
    "lines",
    [
        (*AFTER_IT, KILLED_1),
        ("gems: the launcher ends the ranks: a rank has failed, and others go on", KILLED_1),
    ],
)
def test_a_kill_by_the_launcher_is_nobodys_fault(
    folder: RunFolder, write_failed: WriteFailed, lines: tuple[str, ...]
) -> None:
    beat(folder, 1, 111, "n2", 7, "1B1")
    write_failed(folder, 0, "2026", NETWORK_ERROR, kind="Exception")
    failure = find_failure(folder, heard(*lines), ended(137))
    assert (failure.rank, failure.cause_class) == (0, "exception"), (
        "a network's error is none of a file system"
    )


def test_a_stall_that_the_launcher_found_goes_before_its_own_kills(folder: RunFolder) -> None:
    for rank in range(2):
        beat(folder, rank, 110 + rank, f"n{rank}", 7, f"{rank}F3")
    witness(folder, rank0000=1)
    root = {"rank": 1, "node": "n1", "pid": 111, "step": 7, "action": "1F3", "state": "works"}
    cause = "no rank has sent a heartbeat for 28 s"
    (folder.path / "STALLED.json").write_text(
        json.dumps({"by": "launcher", "roots": [root], "cause": cause})
    )
    failure = find_failure(folder, heard("srun: error: n2: task 0: Killed"), ended(137))
    assert failure.exit_code == 5
    assert failure.describe() == f"rank 1 on node n1 stopped moving in step 7, action 1F3: {cause}"


@pytest.mark.parametrize(("step", "cause_class"), [(-1, "wrong MPI"), (0, "killed")])
def test_a_launcher_that_is_lost_after_the_start_is_no_configuration_fault(
    folder: RunFolder, step: int, cause_class: str
) -> None:
    beat(folder, 0, 110, "n1", step, "begin")
    line = "[n1:4242] OPAL ERROR: Unreachable in file pmix3x_client.c at line 111"
    assert find_failure(folder, heard(line), ended(1, line)).cause_class == cause_class


def test_stalled_rank_is_named_when_the_others_were_cleaned_up(
    folder: RunFolder, write_failed: WriteFailed
) -> None:
    write_failed(folder, 0, "2026", "nothing came for 600 s", 5)
    words = heard(
        "srun: error: n1: task 0: Exited with exit code 5", "srun: error: n1: task 1: Killed"
    )
    failure = find_failure(folder, words, ended(137))
    assert (failure.rank, failure.exit_code) == (0, 5)


def test_hydras_process_is_found_by_its_heartbeat(folder: RunFolder) -> None:
    beat(folder, 0, 50, "n1.cluster", -1, "start")
    beat(folder, 1, 51, "n1.cluster", -1, "start")
    beat(folder, 2, 51, "n2", 4, "0F1")
    words = heard(
        "=   PID 51 RUNNING AT n1", "=   EXIT CODE: 11", "YOUR APPLICATION ... fault (signal 11)"
    )
    failure = find_failure(folder, words, ended(11))
    assert (
        failure.describe()
        == "rank 1 on node n1 was killed by signal 11 (SIGSEGV) before the first step"
    )


def test_unknown_process_is_still_described(folder: RunFolder) -> None:
    words = heard(
        "=   PID 51 RUNNING AT n1", "=   EXIT CODE: 9", "YOUR APPLICATION ... Killed (signal 9)"
    )
    assert (
        find_failure(folder, words, ended(9)).describe()
        == "a rank on node n1 was killed by signal 9 (SIGKILL)"
    )


def test_exit_codes_and_reasons(folder: RunFolder) -> None:
    beat(folder, 2, 50, "n1", -1, "evaluate")
    failure = find_failure(folder, heard("[mpiexec@n1] Exit codes: [n1] 0,0,768"), ended(3))
    assert (
        failure.describe()
        == "rank 2 on node n1 ended with exit code 3 outside of the steps, in evaluate"
    )
    failure = find_failure(folder, heard("srun: error: n2: task 2: Out Of Memory"), ended(3))
    assert (
        failure.describe()
        == "rank 2 on node n2 ended outside of the steps, in evaluate: Out Of Memory"
    )
    assert failure.to_dict()["cause"] == "Out Of Memory"


def test_last_words_when_nobody_is_named(folder: RunFolder) -> None:
    tail = ("Traceback", "ModuleNotFoundError: No module named 'gems'", "goodbye")
    assert (
        find_failure(folder, heard(), ended(1, *tail)).describe()
        == "the run ended with exit code 1: ModuleNotFoundError: No module named 'gems'"
    )
    assert (
        find_failure(folder, heard(), ended(137)).describe()
        == "the run ended with exit code 137: no rank and no launcher gave a reason"
    )


def test_killed_launcher_is_no_ranks_fault(folder: RunFolder, write_failed: WriteFailed) -> None:
    beat(folder, 0, 50, "n1", 3, "0F1")
    write_failed(folder, 1, "2026", NETWORK_ERROR, kind="Exception")
    folder.path.joinpath("witness").mkdir()
    folder.path.joinpath("witness", "rank0000").write_text("1")
    failure = find_failure(folder, heard(), ended(-9))
    assert failure.describe() == "the run ended: its launcher was killed by signal 9 (SIGKILL)"
    assert failure.rank is None


def witness(folder: RunFolder, **times_ns: int) -> None:
    folder.path.joinpath("witness").mkdir(exist_ok=True)
    for rank, time_ns in times_ns.items():
        folder.path.joinpath("witness", rank).write_text(str(time_ns))


HYDRA_CLEANED_UP = (
    "=   PID 50 RUNNING AT n1",
    "=   EXIT CODE: 9",
    "[mpiexec@n1] Exit codes: [n1] 9,9,9",
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
)


def test_first_witnessed_rank_goes_before_hydras_lowest(folder: RunFolder) -> None:
    for rank in range(3):
        beat(folder, rank, 50 + rank, "n1", 4, f"0F{rank}")
    beat(folder, 1, 51, "n1", -1, "finished")
    witness(folder, rank0000=3, rank0001=1, rank0002=2)
    failure = find_failure(folder, heard(*HYDRA_CLEANED_UP), ended(9))
    assert (
        failure.describe()
        == "rank 2 on node n1 was killed by signal 9 (SIGKILL) in step 4, action 0F2"
    )


@pytest.mark.parametrize(("second", "rank"), [(59, 0), (1, 2)])
def test_witnesses_and_records_are_put_in_order(
    folder: RunFolder, write_failed: WriteFailed, second: int, rank: int
) -> None:
    """Whoever failed after another rank was gone has failed because of that."""
    write_failed(folder, 2, f"2026-01-01T00:00:{second:02d}+00:00", "RuntimeError: what is this?")
    died = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    witness(folder, rank0000=int(died.timestamp() * 1e9))
    assert find_failure(folder, heard(*HYDRA_CLEANED_UP), ended(9)).rank == rank


def test_stopped_from_outside(folder: RunFolder, write_failed: WriteFailed) -> None:
    write_failed(folder, 0, "2026", "KeyboardInterrupt")
    line = (
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE TO TIME"
        " LIMIT ***"
    )
    failure = find_failure(folder, heard(line), ended(143, stopped_by="SIGTERM"))
    assert (failure.exit_code, failure.describe()) == (
        143,
        "the run was stopped by SIGTERM: time limit",
    )
    failure = find_failure(folder, heard(), ended(143, stopped_by="SIGHUP"))
    assert (failure.exit_code, failure.describe()) == (
        129,
        "the run was stopped by SIGHUP: its terminal was closed",
    )


def test_broken_records_are_passed_over(folder: RunFolder, write_failed: WriteFailed) -> None:
    folder.failed_json(0).write_text('{"rank": 0')
    folder.heartbeat(1).parent.mkdir()
    folder.heartbeat(1).write_bytes(b"x y z 1 2")
    write_failed(folder, 1, "2026", "true cause")
    assert find_failure(folder, heard(), ended()).rank == 1


def old_beat(folder: RunFolder, rank: int, action: str, time_ns: int, step: int = 7) -> None:
    beat(folder, rank, 100 + rank, f"n{rank}", step, action)
    words = folder.heartbeat(rank).read_bytes().split()[:4]
    folder.heartbeat(rank).write_bytes(b" ".join([*words, str(time_ns).encode()]).ljust(256))


def test_a_stall_is_the_silent_ranks(folder: RunFolder, write_failed: WriteFailed) -> None:
    for rank, (action, time_ns) in enumerate(
        [("0RECV_B1", 1), ("1F3", 5), ("2F2", 9), ("finished", 0)]
    ):
        old_beat(folder, rank, action, time_ns)
    write_failed(folder, 0, "2026", "waited 60 s for 0RECV_B1", 5, action="0RECV_B1", waited_s=60)
    failure = find_failure(folder, heard(), ended(5))
    assert (failure.rank, failure.node, failure.action, failure.exit_code) == (1, "n1", "1F3", 5)
    assert (
        failure.describe()
        == "rank 1 on node n1 stopped moving in step 7, action 1F3: rank 0 waited 60 s in step 3,"
        " action 0RECV_B1"
    )


def test_who_could_not_record_its_end_is_the_silent_one(
    folder: RunFolder, write_failed: WriteFailed
) -> None:
    for rank, time_ns in enumerate([3, 2, 9, 1]):
        old_beat(folder, rank, f"{rank}F1", time_ns)
    for rank in (0, 1, 3):
        write_failed(folder, rank, "2026", "ranks have stalled", 5)
    assert (
        find_failure(
            folder, heard("srun: error: n0: task 0: Exited with exit code 5"), ended(5)
        ).rank
        == 2
    )


def test_who_found_the_stall_may_have_told(folder: RunFolder, write_failed: WriteFailed) -> None:
    old_beat(folder, 0, "0F1", 1)
    write_failed(folder, 0, "2026", "been in 0F1 for 9 s", 5)
    root = {"rank": 3, "node": "n3", "pid": 33, "step": 7, "action": "3B1", "state": "is silent"}
    document = {
        "rank": 0,
        "node": "n0",
        "step": 7,
        "action": "0F1",
        "waited_s": 9.0,
        "roots": [root],
    }
    (folder.path / "STALLED.json").write_text(json.dumps(document))
    failure = find_failure(folder, heard(), ended(5))
    assert (failure.rank, failure.node, failure.rank_pid, failure.action) == (3, "n3", 33, "3B1")
    (folder.path / "STALLED.json").write_text(json.dumps({**document, "roots": []}))
    assert find_failure(folder, heard(), ended(5)).rank == 0
