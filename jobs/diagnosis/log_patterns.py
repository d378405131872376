"""Find patterns in a run's logs that show why it ended.

They are messages of kernels, SLURM, MPI and libraries.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gems.runs.failure_cause import FailureCause
from jobs.diagnosis.causes import CONSEQUENCE, LOG_PATTERNS
from jobs.schedulers.slurm_client.jobs import parse_cancellation

MAX_PER_CAUSE = 3
# of a longer log the middle is left out
HEAD_BYTES = 1 << 20
TAIL_BYTES = 4 << 20
LINE_CHARS = 400
LABEL = re.compile(r"^ *(?P<rank>\d{1,6}): ?")
COMPILED = [
    (FailureCause(cause), re.compile(pattern), bool(flags))
    for cause, pattern, *flags in LOG_PATTERNS
]


@dataclass(frozen=True, slots=True)
class Finding:
    """A source's report of a run's end, in its own words.

    `time_ns` is None if the source has no clock. `may_follow` marks a possible consequence of
    something else: a rank that waits for a dead one stalls, and a launcher kills the ranks that are
    left. `is_consequence` marks a consequence of the known cause.
    """

    cause: FailureCause
    source: str
    text: str
    time_ns: int | None = None
    rank: int | None = None
    node: str | None = None
    may_follow: bool = False
    is_consequence: bool = False


def scan_lines(lines: Iterable[str], source: str) -> list[Finding]:
    """Return the findings in a log's lines, at most MAX_PER_CAUSE of each cause, in their order."""
    found: list[Finding] = []
    counts: Counter[tuple[FailureCause, bool]] = Counter()
    for finding in filter(None, (scan_line(line, source) for line in lines)):
        key = finding.cause, finding.may_follow
        counts[key] += 1
        if counts[key] <= MAX_PER_CAUSE:
            found.append(finding)
    return found


def scan_line(line: str, source: str) -> Finding | None:
    """Return the finding in one line of a log, or None."""
    label = LABEL.match(line)
    text = line[label.end() :].strip() if label else line.strip()
    rank = int(label["rank"]) if label else None
    cancellation = parse_cancellation(text)
    if cancellation is not None:
        # srun --kill-on-bad-exit ends the step of a rank that has failed by the same message as a
        # user's scancel
        is_kill = not cancellation.reason and not cancellation.is_job
        ended_by = FailureCause.KILLED if is_kill else cancellation.cause
        if isinstance(ended_by, FailureCause):
            return Finding(
                ended_by, source, text[:LINE_CHARS], cancellation.time_ns, rank, may_follow=is_kill
            )
    for cause, pattern, may_follow in COMPILED:
        if match := pattern.search(text):
            follows = may_follow or (
                cause is FailureCause.EXCEPTION and CONSEQUENCE.search(text) is not None
            )
            node = match.groupdict().get("node")
            return Finding(
                cause, source, text[:LINE_CHARS], rank=rank, node=node, may_follow=follows
            )
    return None


def classify_text(text: str) -> FailureCause | None:
    """Return the cause that an exception's text shows, or None if it shows none in particular."""
    finding = scan_line(text, "")
    is_vague = finding is None or finding.may_follow or finding.cause is FailureCause.EXCEPTION
    return None if finding is None or is_vague else finding.cause


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a log, of a long one the first and the last; none if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = path.stat().st_size
        is_long = size > HEAD_BYTES + TAIL_BYTES
        yield from re.split(
            r"[\n\r]+", file.read(HEAD_BYTES if is_long else -1).decode(errors="replace")
        )
        if is_long:
            file.seek(size - TAIL_BYTES)
            yield from re.split(r"[\n\r]+", file.read().decode(errors="replace"))
