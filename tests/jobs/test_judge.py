"""Which of several findings tells the cause: the earlier, the more specific, and never what only follows."""

from __future__ import annotations

import pytest

from jobs.diagnosis.judge import NOT_FAILED, SPECIFIC, Cause, Finding, judge


def found(cause: Cause, time_ns: int | None = None, *, follows: bool = False) -> Finding:
    return Finding(cause, "source", "text", time_ns, may_follow=follows)


KILLED = found(Cause.KILLED, follows=True)


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([KILLED, found(Cause.HOST_MEMORY)], Cause.HOST_MEMORY),
        ([found(Cause.EXCEPTION, 5), found(Cause.HOST_MEMORY)], Cause.HOST_MEMORY),
        ([found(Cause.EXCEPTION, 5), found(Cause.TIME_LIMIT, 9)], Cause.EXCEPTION),
        ([found(Cause.EXCEPTION, 9), found(Cause.TIME_LIMIT, 5)], Cause.TIME_LIMIT),
        ([found(Cause.EXCEPTION, 9), found(Cause.TIME_LIMIT)], Cause.EXCEPTION),
        ([found(Cause.EXCEPTION, 9, follows=True), found(Cause.TIME_LIMIT)], Cause.TIME_LIMIT),
        ([found(Cause.STALLED, 5), found(Cause.NODE, 9)], Cause.NODE),
        ([found(Cause.STALLED, 5), found(Cause.TIME_LIMIT, 9)], Cause.STALLED),
        ([found(Cause.STALLED, 5), found(Cause.EXCEPTION, 6)], Cause.STALLED),
        ([KILLED, found(Cause.STALLED, follows=True)], Cause.KILLED),
        ([KILLED, found(Cause.EXCEPTION, follows=True)], Cause.EXCEPTION),
        ([found(Cause.FILE_SYSTEM, 4), found(Cause.EXCEPTION, 4)], Cause.FILE_SYSTEM),
        ([found(Cause.DEVICE_MEMORY, 8), found(Cause.DEVICE)], Cause.DEVICE),
        ([KILLED], Cause.KILLED),
    ],
)  # fmt: skip
def test_the_earlier_and_the_more_specific_goes_first(findings: list[Finding], expected: Cause) -> None:
    for rows in (findings, findings[::-1]):
        told = judge(rows)
        assert told is not None and told.cause is expected


def test_nothing_tells_nothing() -> None:
    assert judge([]) is None


def test_every_cause_of_a_failure_has_its_place() -> None:
    assert set(Cause) == {*SPECIFIC, *NOT_FAILED}
