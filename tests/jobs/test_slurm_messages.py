"""Messages of slurmstepd and srun: what ended, when and why."""

from __future__ import annotations

from datetime import datetime

import pytest

from gems.runs.failure_cause import FailureCause
from jobs.schedulers.slurm_client.jobs import REQUEUED, failed_node, parse_cancellation

AT = "2026-11-20T12:00:00"


@pytest.mark.parametrize(
    ("line", "is_job", "job_id", "cause"),
    [
        (
            f"slurmstepd: error: *** JOB 41 ON n1 CANCELLED AT {AT} ***",
            True,
            "41",
            FailureCause.CANCELLED,
        ),
        (
            f"slurmstepd: error: *** STEP 41.0 ON n1 CANCELLED AT {AT} ***",
            False,
            "41",
            FailureCause.CANCELLED,
        ),
        (
            f"*** STEP 41.0 ON n1 CANCELLED AT {AT} DUE TO TIME LIMIT ***",
            False,
            "41",
            FailureCause.TIME_LIMIT,
        ),
        (
            f"*** JOB 41 ON n1 CANCELLED AT {AT} DUE TO PREEMPTION ***",
            True,
            "41",
            FailureCause.PREEMPTED,
        ),
        (
            f"*** JOB 41 ON n1 CANCELLED AT {AT} DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***",
            True,
            "41",
            FailureCause.NODE,
        ),
        (f"*** JOB 41 ON n1 CANCELLED AT {AT} DUE TO JOB REQUEUE ***", True, "41", REQUEUED),
        (f"*** JOB 41 ON n1 CANCELLED AT {AT} DUE TO BAD LUCK ***", True, "41", "bad luck"),
    ],
)
def test_cancellations(line: str, is_job: bool, job_id: str, cause: str) -> None:
    found = parse_cancellation(line)
    assert found is not None
    assert (found.is_job, found.job_id, found.cause) == (is_job, job_id, cause)
    assert found.time_ns == int(datetime.fromisoformat(AT).timestamp() * 1e9)


def test_a_time_that_is_none_leaves_the_rest() -> None:
    found = parse_cancellation("*** JOB 41 ON n1 CANCELLED AT noon DUE TO TIME LIMIT ***")
    assert found is not None and (found.time_ns, found.cause) == (None, FailureCause.TIME_LIMIT)


@pytest.mark.parametrize(
    "line", ["", "*** JOB 41 ***", "step 3 was CANCELLED AT 5", "srun: error: n2: task 3: Killed"]
)
def test_other_lines(line: str) -> None:
    assert parse_cancellation(line) is None and failed_node([line]) is None


def test_the_first_failed_node() -> None:
    assert (
        failed_node(["x", "srun: error: Node failure on n2", "srun: error: Node failure on n3"])
        == "n2"
    )
