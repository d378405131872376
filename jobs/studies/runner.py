"""The rounds of a study's command: it starts the points that are due, and with --wait looks again until all have ended."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence

from gems.cli.framework import Options
from gems.errors import ConfigError, GemsError, RankFailedError
from jobs.cli.submit import start
from jobs.diagnosis.root_cause import SIGNAL_BASE
from jobs.preflight.cost import YES
from jobs.slurm.jobs import num_queued
from jobs.slurm.resources import job_spec
from jobs.status.run_status import Condition, conditions
from jobs.status.study_record import StudyRecord
from jobs.studies.packing import packed, packs_of, submit_pack
from jobs.studies.points import Point
from jobs.studies.queue_limit import Throttle, is_passing

WAITING = "waiting"
FIRST_LOOK_S, LONGEST_LOOK_S, SLOWER = 1.0, 30.0, 1.5


class Rounds:
    """The points of a study that are due, and `waiting`: those of them that the queue does not take yet."""

    def __init__(self, points: Sequence[Point], record: StudyRecord, is_due: Sequence[bool]) -> None:
        self._points = points
        self._numbers = {point.folder.path: number for number, point in enumerate(points, 1)}
        self._record = record
        self._submitted: list[Point] = []
        self._is_stopped = False
        self.waiting = [point for point, due in zip(points, is_due, strict=True) if due]

    def run(self) -> int:
        """Start what is due, as far as the queue takes it, and gives the worst exit code of what could not start or failed.

        Points of this machine run here, one after another. Without an end of the whole, which a signal to a point's run
        and a cancelled study are, only points without room in the queue are left in `waiting`.
        """
        due, self.waiting = packs_of(self.waiting), []
        throttle, code = Throttle(), 0
        for pack in due:
            if self._record.is_cancelled:
                say(f"study {self._record.name} was cancelled; the other points are left")
                break
            if not job_spec(pack[0].spec).is_batch:
                ended = self._run_here(pack[0])
                code = max(code, ended)
                state = pack[0].folder.read_status().get("state")
                if state == "stopped" or (ended > SIGNAL_BASE and state != "cancelled"):
                    self._is_stopped = True  # someone wants an end of it all, and not of this point alone
                    break
                continue
            code = max(code, self._submit(pack, throttle))
        return code

    def wait(self) -> int:
        """Stay until every job of the study has ended, and submits what waits as room comes; gives the worst exit code.

        One squeue asks for all points; looks grow rarer while nothing changes.
        """
        pause, look_s, code = threading.Event(), FIRST_LOOK_S, 0
        before: Counter[str] = Counter()
        while not self._is_stopped:
            found = conditions([point.folder for point in self._points])
            counts = Counter(run.state for run in found.runs)
            if self._record.is_cancelled or not (self.waiting or any(run.is_active for run in found.runs)):
                break
            if counts != before:
                words = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
                more = f", {len(self.waiting)} of them wait for room in the queue" if self.waiting else ""
                say(f"study {self._record.name}: {words}{more}")
                before, look_s = counts, FIRST_LOOK_S
            if self.waiting:
                code = max(code, self.run())
            pause.wait(look_s)
            look_s = min(LONGEST_LOOK_S, look_s * SLOWER)
        ours = [point.folder for point in self._submitted]
        return max([code, *map(_code_of, conditions(ours).runs)])

    def _run_here(self, point: Point) -> int:
        """Run one point and gives its exit code; what cannot start is said in one line."""
        self._say_start(point)
        try:
            code = start(point.spec)
        except GemsError as error:
            return self._cannot_start(point, error)
        if code:
            say(f"{self._named(point)} has failed: {point.folder.path}")
        return code

    def _submit(self, pack: Sequence[Point], throttle: Throttle) -> int:
        """Submit the points of one job; those without room wait."""
        spec = pack[0].spec
        try:
            job = packed(pack) if len(pack) > 1 else job_spec(spec)
            if not throttle.has_room(spec, job):
                self.waiting += pack
                return 0
            if len(pack) > 1:
                submit_pack(pack)
            else:
                start(spec, Options(flags=frozenset({YES})))  # asked for all points together
        except GemsError as error:
            if isinstance(error, ConfigError) and is_passing(error) and num_queued() != 0:
                throttle.refused(spec)
                self.waiting += pack
                return 0
            return max(self._cannot_start(point, error) for point in pack)
        throttle.took(spec, job)
        self._submitted += pack
        for point in pack:
            self._say_start(point, f", job {point.folder.read_status().get('job_id')}")
        return 0

    def _cannot_start(self, point: Point, error: GemsError) -> int:
        say(f"{self._named(point)} cannot start: {error}")
        return error.exit_code

    def _say_start(self, point: Point, more: str = "") -> None:
        number = self._numbers[point.folder.path]
        say(f"point {number} of {len(self._points)}: {point.label}, {point.spec.world_size} ranks{more}")

    def _named(self, point: Point) -> str:
        return f"point {self._numbers[point.folder.path]} of {len(self._points)} ({point.label})"


def _code_of(found: Condition) -> int:
    """Return the exit code of a point whose job has ended."""
    if found.state in ("finished", "stopped"):
        return 0
    code = found.facts.status.get("exit_code")
    return code if isinstance(code, int) and code else RankFailedError.exit_code


def say(text: str) -> None:
    """Report how the study goes on, on stderr."""
    print(f"jobs: {text}", file=sys.stderr, flush=True)
