"""Watch the ranks of a run from outside, and detect that all have stopped."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Beat, read_beats
from gems.runs.wait_graph import WaitingChain, parse_action, waiting_chain
from gems.utils.units import now_utc
from jobs.batch.resources import JobSpec
from jobs.diagnosis.launcher_output import OUR_LINE, LauncherOutput
from jobs.diagnosis.root_cause import BY_LAUNCHER, has_failed_rank

POLL_S = 1.0
ABORT_LIMIT_S = 10.0
# srun reports dead ranks at once; ranks that ignore one SIGTERM live for another KillWait
DEATH_LIMIT_S = 2.0
MARGIN_S = 8.0  # let a live rank report a hang first: it knows what it waited for
MAX_LOOK_S = 10.0
# as in the ranks' own watchdog: start-up or a checkpoint may block the interpreter
PHASE_FACTOR = 3.0
NUM_LOOKS = 2  # before a folder counts as gone


class Reason(Enum):
    """Why the launcher ends the ranks."""

    FAILED_RANK = "a rank has failed, and others go on"
    STALLED = "no rank has sent a heartbeat"
    GONE = "the run folder is gone"


class RankWatch:
    """The watch that decides when the launcher ends the ranks; `reason` is why, once decided.

    It ends them in three cases. First, ABORT_LIMIT_S after a rank's failure (DEATH_LIMIT_S with
    srun), since a rank that ends before MPI starts ends no other rank. Second, if no heartbeat has
    changed for `hang_timeout_s` and MARGIN_S, by this machine's monotonic clock, as nodes' clocks
    may differ by any amount. Third, if the run folder is gone. `on_poll` is called at every look.
    """

    def __init__(
        self,
        folder: RunFolder,
        job: JobSpec,
        hang_timeout_s: float,
        output: LauncherOutput,
        on_poll: Callable[[], Any],
    ) -> None:
        self._folder = folder
        self._output = output
        self._on_poll = on_poll
        self._is_srun = job.launcher == "srun"
        self._limit_s = hang_timeout_s
        self._look_every_s = min(MAX_LOOK_S, max(POLL_S, hang_timeout_s / 20))
        self._polled_s = self._looked_s = time.monotonic()
        self._deadline_s = float("inf")
        self._beats: Mapping[int, Beat] = {}
        self._still_s = 0.0
        self._times_gone = 0
        self.reason: Reason | None = None

    def is_over(self) -> bool:
        """Return whether the ranks must be ended now; this is polled all the time."""
        self._on_poll()
        now_s = time.monotonic()
        if self.reason is None and now_s - self._polled_s > POLL_S:
            self._polled_s = now_s
            with contextlib.suppress(OSError):  # the file system may be back at the next look
                self._look(now_s)
        if self.reason is None and now_s > self._deadline_s:
            self._end(Reason.FAILED_RANK)
        return self.reason is not None

    def _look(self, now_s: float) -> None:
        self._times_gone = self._times_gone + 1 if is_gone(self._folder) else 0
        if self._times_gone >= NUM_LOOKS:
            self.reason = Reason.GONE
        if self._deadline_s < float("inf"):
            return
        is_dead = self._is_srun and bool(self._output.deaths)
        if is_dead or has_failed_rank(self._folder):
            self._deadline_s = now_s + (DEATH_LIMIT_S if is_dead else ABORT_LIMIT_S)
        elif now_s - self._looked_s > self._look_every_s:
            self._look_for_life(now_s)

    def _look_for_life(self, now_s: float) -> None:
        # time in which this process was stopped does not count: SLURM suspends whole jobs
        passed_s = min(now_s - self._looked_s, 2 * self._look_every_s)
        self._looked_s = now_s
        beats = read_beats(self._folder.path)
        self._still_s = self._still_s + passed_s if beats and beats == self._beats else 0.0
        self._beats = beats
        in_step = any(parse_action(beat.action) for beat in beats.values())
        limit_s = self._limit_s if in_step else PHASE_FACTOR * self._limit_s
        if self._still_s > limit_s + MARGIN_S:
            self._record_stall()
            self._end(Reason.STALLED)

    def _record_stall(self) -> None:
        chain = self._chain()
        roots = chain.root_records() if chain else []
        if not roots:
            rank = min(
                self._beats,
                key=lambda rank: self._beats[rank].alive_ns or self._beats[rank].time_ns,
            )
            beat = self._beats[rank]
            roots = [
                {key: getattr(beat, key) for key in ("node", "pid", "step", "action")}
                | {"rank": rank}
            ]
        cause = f"no rank has sent a heartbeat for {self._still_s:.0f} s"
        document = {
            "by": BY_LAUNCHER,
            "utc": now_utc("milliseconds"),
            "waited_s": round(self._still_s, 1),
            "cause": cause,
            "roots": roots,
            **(
                {"waits_for": chain.text()} if chain and len(chain.roots) < len(self._beats) else {}
            ),
        }
        with contextlib.suppress(OSError), self._folder.stalled_json.open("x") as file:
            json.dump(document, file)

    def _chain(self) -> WaitingChain | None:
        """Return the ranks that wait for each other by their last marks; None without a schedule."""
        try:
            return waiting_chain(self._folder.read_schedule(), self._beats)
        except (ConfigError, OSError, ValueError, LookupError, TypeError):
            return None

    def _end(self, reason: Reason) -> None:
        """Record in the ranks' log that the launcher ends the ranks."""
        self.reason = reason
        line = f"{OUR_LINE}: {reason.value}"
        self._output.feed_line(line)
        with contextlib.suppress(OSError), (self._folder.logs / "ranks.log").open("a") as log:
            log.write(f"{line}\n")


def is_gone(folder: RunFolder) -> bool:
    """Return whether a run folder was deleted or moved.

    A folder whose file system does not answer does not count as gone.
    """
    try:
        folder.run_yaml.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
