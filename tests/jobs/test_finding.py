"""Which of several findings tells the cause.

The earlier, the more specific, and never what only follows.
"""

from __future__ import annotations

import pytest

from gems.runs.failure_cause import FailureCause
from jobs.diagnosis.causes import ADVICE, BY_SPECIFICITY, Finding
from jobs.diagnosis.report import judge


def found(cause: FailureCause, time_ns: int | None = None, *, follows: bool = False) -> Finding:
    return Finding(cause, "source", "text", time_ns, may_follow=follows)


KILLED = found(FailureCause.KILLED, follows=True)


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([KILLED, found(FailureCause.HOST_MEMORY)], FailureCause.HOST_MEMORY),
        (
            [found(FailureCause.EXCEPTION, 5), found(FailureCause.HOST_MEMORY)],
            FailureCause.HOST_MEMORY,
        ),
        (
            [found(FailureCause.EXCEPTION, 5), found(FailureCause.TIME_LIMIT, 9)],
            FailureCause.EXCEPTION,
        ),
        (
            [found(FailureCause.EXCEPTION, 9), found(FailureCause.TIME_LIMIT, 5)],
            FailureCause.TIME_LIMIT,
        ),
        (
            [found(FailureCause.EXCEPTION, 9), found(FailureCause.TIME_LIMIT)],
            FailureCause.EXCEPTION,
        ),
        (
            [found(FailureCause.EXCEPTION, 9, follows=True), found(FailureCause.TIME_LIMIT)],
            FailureCause.TIME_LIMIT,
        ),
        ([found(FailureCause.STALLED, 5), found(FailureCause.NODE, 9)], FailureCause.NODE),
        ([found(FailureCause.STALLED, 5), found(FailureCause.TIME_LIMIT, 9)], FailureCause.STALLED),
        ([found(FailureCause.STALLED, 5), found(FailureCause.EXCEPTION, 6)], FailureCause.STALLED),
        ([KILLED, found(FailureCause.STALLED, follows=True)], FailureCause.KILLED),
        ([KILLED, found(FailureCause.EXCEPTION, follows=True)], FailureCause.EXCEPTION),
        (
            [found(FailureCause.FILE_SYSTEM, 4), found(FailureCause.EXCEPTION, 4)],
            FailureCause.FILE_SYSTEM,
        ),
        ([found(FailureCause.DEVICE_MEMORY, 8), found(FailureCause.DEVICE)], FailureCause.DEVICE),
        ([KILLED], FailureCause.KILLED),
    ],
)
def test_the_earlier_and_the_more_specific_goes_first(
    findings: list[Finding], expected: FailureCause
) -> None:
    for rows in (findings, findings[::-1]):
        told = judge(rows)
        assert told is not None and told.cause is expected


def test_nothing_tells_nothing() -> None:
    assert judge([]) is None


def test_every_cause_of_a_failure_has_its_place() -> None:
    assert set(FailureCause) == {
        *BY_SPECIFICITY,
        *(cause for cause in FailureCause if not cause.is_failure),
    }


def test_advice_is_for_causes_by_their_names_and_ends_with_what_fits_all() -> None:
    last = {cause: pattern for cause, pattern, *_ in ADVICE}
    assert set(last) <= {str(cause) for cause in FailureCause}
    assert {cause for cause in BY_SPECIFICITY if last[cause]} == set()
