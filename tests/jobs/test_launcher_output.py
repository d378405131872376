"""What launchers say when a rank dies.

Seen: MPICH 5.0.2, Open MPI 4.1.8 and 5.0.11, SLURM 22.05. Intel MPI's words are recalled.
"""

from __future__ import annotations

import pytest

from jobs.diagnosis.launcher_output import OUR_LINE, Death, LauncherOutput

HYDRA_KILLED = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 13420 RUNNING AT n1
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
[mpiexec@n1] Exit codes: [n1] 0,9,0
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
HYDRA_EXITED = "[mpiexec@n1] Exit codes: [n1] 0,768,0"
HYDRA_EXITED_AND_CLEANED = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 77 RUNNING AT n1
=   EXIT CODE: 9
[mpiexec@n1] Exit codes: [n1] 9,768,0
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
INTEL_KILLED = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 3 PID 13420 RUNNING AT n1
=   KILLED BY SIGNAL: 11 (Segmentation fault)
"""
SRUN_KILLED = """
srun: error: n2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-20T12:00:00 ***
srun: error: n1: tasks 0-1: Terminated
"""
SRUN_EXITED = "srun: error: n2: tasks 2,4-5: Exited with exit code 3"
SRUN_SEGFAULT = "srun: error: node-1.site: task 0: Segmentation fault (core dumped)"
SRUN_MEMORY = "srun: error: n2: task 2: Out Of Memory"
OPEN_MPI_4_KILLED = (
    "mpirun noticed that process rank 1 with PID 0 on node n1 exited on signal 9 (Killed)."
)
OPEN_MPI_5_KILLED = """
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 7081 on node n1 exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
OPEN_MPI_5_ABORTED = """
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[46141,1],1]
  Errorcode: 4
"""
OPEN_MPI_4_ABORTED = """
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
with errorcode 4.
"""
OPEN_MPI_4_EXITED = """
  Process name: [[46613,1],1]
  Exit code:    3
"""
OPEN_MPI_5_EXITED = """
   Process name: [prterun-n1-28641@1,2]
   Exit code:    3
"""
ABORTED = (
    "2: Abort(4) on node 2 (rank 2 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 4) -"
    " process 2"
)
FATAL = "Abort(15) on node 1 (rank 1 in comm 0): Fatal error in internal_Recv: Message truncated"


@pytest.mark.parametrize(
    ("said", "deaths"),
    [
        (HYDRA_KILLED, [Death(None, 13420, "n1", 9)]),
        (HYDRA_EXITED, [Death(1, exit_code=3)]),
        (HYDRA_EXITED_AND_CLEANED, [Death(1, exit_code=3), Death(None, 77, "n1", 9)]),
        (INTEL_KILLED, [Death(3, 13420, "n1", 11)]),
        (
            SRUN_KILLED,
            [Death(3, None, "n2", 9), Death(0, None, "n1", 15), Death(1, None, "n1", 15)],
        ),
        (SRUN_EXITED, [Death(rank, None, "n2", None, 3) for rank in (2, 4, 5)]),
        (SRUN_SEGFAULT, [Death(0, None, "node-1.site", 11)]),
        (SRUN_MEMORY, [Death(2, None, "n2", reason="Out Of Memory")]),
        (OPEN_MPI_4_KILLED, [Death(1, None, "n1", 9)]),
        (OPEN_MPI_5_KILLED, [Death(1, 7081, "n1", 9)]),
        (OPEN_MPI_5_ABORTED, [Death(1, exit_code=4)]),
        (OPEN_MPI_4_ABORTED, [Death(1, exit_code=4)]),
        (OPEN_MPI_4_EXITED, [Death(1, exit_code=3)]),
        (OPEN_MPI_5_EXITED, [Death(2, exit_code=3)]),
        (ABORTED, [Death(2, exit_code=4)]),
        (FATAL, [Death(1, exit_code=15, reason="Fatal error in internal_Recv: Message truncated")]),
        ("[mpiexec@n1] Exit codes: [n1] 0,0 [n2] 0,0", []),
        ("all is well\nEXIT CODE: 3\nprocess rank", []),
    ],
)
def test_deaths(said: str, deaths: list[Death]) -> None:
    words = LauncherOutput()
    for line in said.splitlines():
        words.feed_line(line)
    assert words.deaths == deaths


@pytest.mark.parametrize(
    ("said", "is_cleanup"),
    [
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-20T12:00:00 ***", False),
        (
            (
                "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE TO TIME"
                " LIMIT ***"
            ),
            True,
        ),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-20T12:00:00 ***", True),
        (ABORTED, True),
        ("srun: error: n1: task 0: Exited with exit code 5", True),
        ("srun: error: n1: task 0: Exited with exit code 1", False),
        (
            (
                "0: Abort(69922959) on node 0 (rank 0 in comm 448): Fatal error in internal_Test:"
                " Other MPI error"
            ),
            False,
        ),
        (f"{OUR_LINE}: a rank has failed, and others go on", True),
    ],
)
def test_after_what_a_kill_shows_no_cause(said: str, is_cleanup: bool) -> None:
    words = LauncherOutput()
    for line in (
        said,
        "srun: error: n2: task 3: Killed",
        "srun: error: n2: task 4: Segmentation fault",
    ):
        words.feed_line(line)
    assert [death.is_cleanup for death in words.deaths[-2:]] == [is_cleanup, False]


def test_why_slurm_cancelled() -> None:
    words = LauncherOutput()
    assert words.cancel_reason is None
    words.feed_line("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-20T12:00:00 ***")
    assert words.cancel_reason is None
    words.feed_line(
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE TO TIME"
        " LIMIT ***"
    )
    assert words.cancel_reason == "time limit"
    words.feed_line("*** STEP 7.0 ON n1 CANCELLED AT noon DUE TO BAD LUCK ***")
    assert words.cancel_reason == "bad luck"
