"""Four MPI ranks that stay alive between tests; `python -m tests.mpi.world SOCKET` is one of them.

The pytest process that collects and reports the tests sends the ID of each to all ranks, which run
it together.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path

import pytest

from gems.engine.transport import links, polling
from gems.launch.local_launcher import Output, mpiexec_argv, rank_environment, run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent
IN_RANK = "GEMS_TEST_RANK" in os.environ
NUM_RANKS = 4
START_S = 120.0
TEST_S = 240.0
ALONE_S = 20.0  # once a rank has failed, for the others: they may wait for it forever
END_S = 20.0
OPTIONS = ("-q", "-o", "addopts=", "-p", "no:cacheprovider")


@dataclass
class Rank:
    """A rank, and how the current test went there.

    Outcome and text of its setup, call and teardown.
    """

    link: Connection
    pid: int
    reports: list[tuple[str, str]] = field(default_factory=list)
    is_done: bool = False

    @property
    def outcome(self) -> str:
        outcomes = {outcome for outcome, _ in self.reports}
        return next((each for each in ("failed", "skipped") if each in outcomes), "passed")

    def start(self, test: str) -> None:
        self.reports = []
        self.is_done = False
        self.link.send(test)

    def receive(self) -> None:
        try:
            report = self.link.recv()
        except (EOFError, ConnectionError):
            self.link.close()
            report = ("failed", "the rank died")
        if report is not None:
            self.reports.append(report)
        self.is_done = report is None or self.link.closed


class World:
    """Ranks that start at the first test, and again after a test that fails on some of them only."""

    def __init__(
        self, folder: Path, python: str, test_s: float = TEST_S, alone_s: float = ALONE_S
    ) -> None:
        self._folder = folder
        self._python = python
        self._test_s = test_s
        self._alone_s = alone_s
        self.ranks: list[Rank] = []

    def run(self, test: str) -> tuple[str, str]:
        """Run a test on all ranks; return failed, skipped or passed, and why."""
        if not self.ranks:
            self._start()
        ranks = self.ranks
        try:
            for rank in ranks:
                rank.start(test)
            self._wait()
        except BaseException:  # pytest's own time limit too
            self._end()
            raise
        outcomes = [rank.outcome for rank in ranks]
        outcome = next((each for each in ("failed", "skipped") if each in outcomes), "passed")
        text = _joined(ranks, outcome)
        can_go_on = all(rank.is_done and not rank.link.closed for rank in ranks)
        if outcome == "failed" and not (can_go_on and set(outcomes) == {"failed"}):
            self._end(0.0 if can_go_on else END_S)  # messages of this test may still be under way
            text = "\n".join(
                [
                    text,
                    "last output of the ranks, which start again for the next test:",
                    *self._output,
                ]
            )
        return outcome, text

    def close(self) -> None:
        """Let the ranks end by themselves."""
        if self.ranks:
            for rank in self.ranks:
                rank.link.send("")
            self._launcher.join(END_S)
            self._end()

    def _start(self) -> None:
        self._output: deque[str] = deque(maxlen=100)
        self._is_over = threading.Event()
        address = str(self._folder / "socket")
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        variables = rank_environment(1) | {
            "GEMS_TEST_RANK": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take seconds to load
            "PYTHONPATH": os.pathsep.join(paths),
        }
        variables.pop("PYTEST_ADDOPTS", None)
        argv = mpiexec_argv(NUM_RANKS, [self._python, "-m", "tests.mpi.world", address])
        target = partial(
            run_ranks,
            argv,
            variables,
            Output(None, False, self._output.append),
            give_up=self._is_over.is_set,
        )
        self._launcher = threading.Thread(target=target, daemon=True)
        ranks = {}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(NUM_RANKS)
            server.settimeout(START_S)
            self._launcher.start()
            try:
                while len(ranks) < NUM_RANKS:
                    link = Connection(server.accept()[0].detach())
                    number, pid = link.recv()
                    ranks[number] = Rank(link, pid)
            except TimeoutError:
                self._end()
                pytest.fail("\n".join(["the ranks did not start:", *self._output]), pytrace=False)
            finally:
                os.unlink(address)
        self.ranks = [ranks[number] for number in range(NUM_RANKS)]

    def _wait(self) -> None:
        """Take reports until the test is over on all ranks or one of them hangs."""
        deadline_s = time.monotonic() + self._test_s
        while waiting := [rank for rank in self.ranks if not rank.is_done]:
            ready = wait([rank.link for rank in waiting], max(0.0, deadline_s - time.monotonic()))
            for rank in (rank for rank in waiting if rank.link in ready):
                rank.receive()
            if not ready:
                for rank in waiting:
                    if rank.outcome != "failed":
                        rank.reports.append(
                            ("failed", "the rank did not come to the end of the test")
                        )
                    os.kill(rank.pid, signal.SIGABRT)  # faulthandler shows where it is
                return
            if any(rank.outcome == "failed" for rank in self.ranks):
                deadline_s = min(deadline_s, time.monotonic() + self._alone_s)

    def _end(self, wait_s: float = 0.0) -> None:
        """End the ranks, of which the launcher tells how they died if it is given the time."""
        self._launcher.join(wait_s)
        self._is_over.set()
        self._launcher.join(END_S)
        for rank in self.ranks:
            rank.link.close()
        self.ranks = []


def _joined(ranks: list[Rank], outcome: str) -> str:
    """Return the texts of the ranks with this outcome, each once and with its ranks."""
    numbers: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        for text in (text for each, text in rank.reports if each == outcome):
            numbers.setdefault(text, []).append(number)
    return "\n".join(f"rank {', '.join(map(str, each))}: {text}" for text, each in numbers.items())


class FileOfTests:
    """A plugin of a rank's pytest: runs the tests of one file as they are asked for."""

    def __init__(self, link: Connection, test: str) -> None:
        self._link = link
        self._file = _file_of(test)
        self.test = test

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        while _file_of(self.test) == self._file:
            if (item := items.get(self.test)) is None:
                self._link.send(("failed", f"{self.test} was not collected"))
            else:
                # keep the module's fixtures: the next test is not known yet
                other = next((each for each in session.items if each is not item), None)
                item.ihook.pytest_runtest_protocol(item=item, nextitem=other)
            self._link.send(None)
            self.test = self._link.recv()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sections = [f"{title}\n{content}" for title, content in report.sections]
            self._link.send(
                ("failed", "\n".join([f"{report.when} failed", report.longreprtext, *sections]))
            )
        elif report.skipped:
            self._link.send(("skipped", report.longreprtext))


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def main(address: str) -> None:
    """Run tests until there are no more."""
    # ranks share cores with each other and with other tests: let those that wait poll less often
    polling.SPIN_S = polling.OWN_CORE_SPIN_S = 0.0
    links.SLEEP_S = 0.0005
    from gems.engine.transport.mpi import world

    link = Client(address, family="AF_UNIX")
    link.send((world().rank, os.getpid()))
    test = link.recv()
    folder = Path(address).parent
    number = 0
    while file := _file_of(test):
        plugin = FileOfTests(link, test)
        number += 1
        base = f"--basetemp={folder / f'rank{world().rank}-{os.getpid()}-{number}'}"
        pytest.main([*OPTIONS, base, str(ROOT / file)], plugins=[plugin])
        test = plugin.test
        if _file_of(test) == file:
            sys.exit("pytest ended before the tests of the file were over")


if __name__ == "__main__":
    main(sys.argv[1])
