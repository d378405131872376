"""The loop over a rank's row: the one place where the list of actions is run, on whatever device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gems.errors import ScheduleError
from gems.runs.heartbeat import Heartbeat
from gems.schedule.action import Action, Kind

Handler = Callable[[Action], None]


class Loop:
    """Runs the actions of one row in their order, each by the handler of its kind, and lets messages move between.

    What is the same at each step, handlers and names for the heartbeat, is looked up once.
    """

    def __init__(
        self,
        rank: int,
        row: Sequence[Action],
        handlers: Mapping[Kind, Handler],
        poll: Callable[[], None],
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """Prepare the row.

        Raises:
            ScheduleError: an action of a kind that this device cannot run.
        """
        for action in row:
            if action.kind not in handlers:
                raise ScheduleError(rank, action, f"is of kind {action.kind}, which cannot run here")
        self._items = [(handlers[action.kind], action, str(action)) for action in row]
        self._poll = poll
        self._heartbeat = heartbeat

    def run(self, step: int) -> None:
        """Run the row once; the heartbeat marks each action of `step` when it begins."""
        beat = None if self._heartbeat is None else self._heartbeat.beat
        poll = self._poll
        for handler, action, text in self._items:
            if beat is not None:
                beat(step, text)
            handler(action)
            poll()
