"""The loop over a rank's schedule: the one place that runs actions, real and emulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gems.errors import ScheduleError
from gems.runs.heartbeat import Heartbeat
from gems.schedule.action import Action, Kind

Handler = Callable[[Action], None]


class ActionLoop:
    """Runs actions in order with the handler of their kind, and polls for messages after each."""

    def __init__(
        self,
        rank: int,
        actions: Sequence[Action],
        handlers: Mapping[Kind, Handler],
        poll: Callable[[], None],
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """Look up the handlers and names of actions, once for all steps.

        Raises:
            ScheduleError: An action has a kind that this device cannot run.
        """
        for action in actions:
            if action.kind not in handlers:
                raise ScheduleError(
                    rank, action, f"is of kind {action.kind}, which cannot run here"
                )
        self._items = [(handlers[action.kind], action, str(action)) for action in actions]
        self._poll = poll
        self._heartbeat = heartbeat

    def run(self, step: int) -> None:
        """Run all actions once; the heartbeat records each before it begins."""
        beat = None if self._heartbeat is None else self._heartbeat.beat
        poll = self._poll
        for handler, action, text in self._items:
            if beat is not None:
                beat(step, text)
            handler(action)
            poll()
