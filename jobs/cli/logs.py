"""`gems-jobs logs`: print the output of a run's ranks, so far or until the run ends."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from gems.cli.framework import Options
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.owner import SUBMITTING, UNFINISHED
from gems.utils.tables import printable
from jobs.batch.output import report
from jobs.diagnosis.evidence import log_paths
from jobs.status.lookup import find_one_run
from jobs.status.run_status import WAITING, read_status, run_statuses

FOLLOW = "-f"
LINES = 100
ALL = "all"
POLL_S = 0.2
QUERY_EVERY_S = 15.0  # of SLURM, while nothing changes in the run folder
CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 2 << 20  # a longer line is cut at its start
# a carriage return at the end may be followed by a line feed
LINE_END = re.compile(rb"(\r?\n|\r(?!\Z))")
NUMBER = re.compile(r"[0-9]{1,9}")
LABELLING = ("srun", "flux")  # launchers that write the rank before each line
RANK_LABEL = re.compile(rb"^ *(\d+): ?(.*)", re.DOTALL)


def logs(words: Sequence[str], options: Options) -> int:
    """Run `gems-jobs logs RUN [-f] [--rank K] [--lines N]`.

    -f follows the output until the run has ended, and reports its state on stderr.

    Raises:
        ConfigError: The words do not name one run, or the rank or number of lines is invalid.
    """
    folder = find_one_run(words, "logs")
    text = options.chosen.get("--lines", str(LINES))
    if text != ALL and not NUMBER.fullmatch(text):
        raise ConfigError("--lines", text, f"must be a number of lines, or {ALL}")
    printer = _Printer(_rank(folder, options.chosen.get("--rank")))
    is_followed = FOLLOW in options.flags
    with Tail(find_log(folder)) as tail:
        try:
            printer.last(tail, None if text == ALL else int(text))
            watch = _Watch(folder) if is_followed or not tail.was_there else None
            if is_followed and watch is not None:
                follow(folder, tail, printer, watch)
            elif watch is not None:
                report(f"no log yet: {watch.line()}")
        except KeyboardInterrupt:
            if not is_followed:
                raise  # an interrupt is the normal end of -f
        printer.flush()
    return 0


def follow(folder: RunFolder, tail: Tail, printer: _Printer, watch: _Watch) -> None:
    """Print additions to a log until the run has ended; a restarted run has a new log."""
    pause = threading.Event()
    while True:
        # before the log is read, so that nothing is added after the last read
        has_ended = watch.has_ended()
        if has_ended and not tail.was_there:
            tail.path = find_log(folder)
        chunk = tail.read()
        printer.write(chunk)
        if has_ended and not chunk:
            break
        if not chunk:
            pause.wait(POLL_S)
    printer.flush()
    report(watch.line())


def find_log(folder: RunFolder) -> Path:
    """Return the log of the ranks, or the newest one of the batch script if they never started."""
    log = folder.logs / "ranks.log"
    if read_status(folder).get("state") in ("prepared", *UNFINISHED):
        return log
    return next(iter(log_paths(folder)), log)


class Tail:
    """A reader of the additions to a file, which may not exist yet or be replaced by a new one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.was_there = False
        self._file: IO[bytes] = io.BytesIO()

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def skip_to_last(self, count: Callable[[bytes], int], num_lines: int) -> None:
        """Skip to the last chunks with so many lines; `count` counts the lines of a chunk."""
        with contextlib.suppress(OSError):
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                at = size
                num_read = 0
                line_end = size
                while at > 0 and num_read <= num_lines and line_end - at < MAX_LINE_BYTES:
                    at = max(0, at - CHUNK_BYTES)
                    file.seek(at)
                    chunk = file.read(CHUNK_BYTES)[: size - at]
                    num_read += count(chunk)
                    line_end = at if LINE_END.search(chunk) else line_end
                    size = at
            if at > 0:
                self._file = self.path.open("rb")
                self.was_there = True
                self._file.seek(at)

    def read(self) -> bytes:
        """Return the next chunk of additions, empty at the end."""
        chunk = self._file.read(CHUNK_BYTES)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not chunk and not (
                self.was_there and os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
            ):
                file = self.path.open("rb")
                self._file.close()
                self._file = file
                self.was_there = True
                chunk = file.read(CHUNK_BYTES)
        return chunk


class _Printer:
    """A printer of the lines of a log, or of one rank's lines."""

    def __init__(self, rank: int | None) -> None:
        self._rank = rank
        self._rest = b""

    def last(self, tail: Tail, num_lines: int | None) -> None:
        """Print the last lines that exist already."""
        if num_lines is not None:
            tail.skip_to_last(self._count, num_lines)
        chunks = iter(tail.read, b"")
        if num_lines is None:
            for chunk in chunks:
                self.write(chunk)
            return
        lines = deque((line for chunk in chunks for line in self._lines(chunk)), maxlen=num_lines)
        rest = b""
        if self._rank is None:  # what follows is printed without waiting for the line's end
            rest = self._rest
            self._rest = b""
        _show(b"".join(lines) + rest)

    def write(self, chunk: bytes) -> None:
        """Print a chunk, or its complete lines of one rank."""
        _show(chunk if self._rank is None else b"".join(self._lines(chunk)))

    def flush(self) -> None:
        """Print the incomplete last line."""
        rest = self._rest
        self._rest = b""
        if rest and self._is_wanted(rest):
            _show(rest)

    def _lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that a chunk completes; they end in a line feed, carriage return or both."""
        *lines, self._rest = LINE_END.split(self._rest + chunk)
        pairs = zip(lines[::2], lines[1::2], strict=True)
        return [line + end for line, end in pairs if self._is_wanted(line)]

    def _count(self, chunk: bytes) -> int:
        """Count the lines of a chunk that would be printed, including a cut first one."""
        return sum(map(self._is_wanted, LINE_END.split(chunk)[:-1:2]))

    def _is_wanted(self, line: bytes) -> bool:
        label = RANK_LABEL.match(line)
        return self._rank is None or (label is not None and int(label[1]) == self._rank)


class _Watch:
    """A watch for a run's end: its folder at each call, SLURM or its process now and then."""

    def __init__(self, folder: RunFolder) -> None:
        self._reported = ""
        self._query(folder)

    def has_ended(self) -> bool:
        """Return whether the run has ended; report on stderr if it waits, and why."""
        folder = self._seen.folder
        if (
            read_status(folder) != self._seen.status
            or time.monotonic() - self._queried_s > QUERY_EVERY_S
        ):
            self._query(folder)
        state = self._seen.state
        # not the note of a stalled run, which contains seconds
        news = f"{state} {self._seen.note}" if state == "pending" else state
        if state in ("pending", "stalled", SUBMITTING, *WAITING) and news != self._reported:
            report(self.line())
        self._reported = news
        return not self._seen.is_active and state != "prepared"

    def line(self) -> str:
        """Describe the state of the run."""
        words = f"{self._seen.folder.path.name} is {self._seen.state}: {self._seen.reason}"
        return printable(words).rstrip(": ")

    def _query(self, folder: RunFolder) -> None:
        self._queried_s = time.monotonic()
        (self._seen,) = run_statuses([folder]).runs


def _show(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def _rank(folder: RunFolder, text: str | None) -> int | None:
    if text is None:
        return None
    spec = folder.read_spec()
    size = spec.world_size
    launcher = spec.cluster.launcher
    if not NUMBER.fullmatch(text) or int(text) >= size:
        raise ConfigError("--rank", text, f"must be a rank of the run: 0 to {size - 1}")
    if size > 1 and launcher not in LABELLING:
        raise ConfigError(
            "--rank", text, f"is not available: {launcher} does not label lines", "leave it out"
        )
    return int(text) if size > 1 else None
