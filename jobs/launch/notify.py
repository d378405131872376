"""Notify a program or a person that a run has ended, has stalled, or was requeued.

The launching process sends the notifications after status.json has the state, within 10 s each. A
notification that cannot be sent is one line in the log and changes nothing for the run. Mail is
left to the batch system.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from gems.errors import ConfigError, StalledError
from gems.runs.folder import RunFolder
from jobs.batch.command import run_command
from jobs.batch.output import report
from jobs.status.job_record import read_or_empty

LIMIT_S = 10.0
COMMAND = "command:"
MAIL = "mail"
ENDED = "ended"
STALLED = "stalled"
REQUEUED = "requeued"


def notify(folder: RunFolder) -> None:
    """Send the run's status to all targets in `cluster.notify`; never raise."""
    try:
        targets = folder.read_spec().cluster.notify
        document = describe(folder) if targets else {}
    except (ConfigError, OSError, TypeError):
        return  # a fault of the folder has been reported
    for target in targets:
        if target.partition(":")[0] == MAIL:
            continue
        if (error_text := send(target, document)) is not None:
            report(f"cluster.notify: {_shown(target)} was not told ({error_text})")


def describe(folder: RunFolder) -> dict[str, Any]:
    """Return the document that is sent about a run.

    It has the event, the state with its cause, the step, and the run folder.
    """
    status = folder.read_status()
    steps = status.get("stopped_step"), read_or_empty(folder.progress_json).get("step")
    event = STALLED if status.get("exit_code") == StalledError.exit_code else ENDED
    names = ("state", "cause", "exit_code", "job_id", "requeue_count")
    return {
        "event": REQUEUED if status.get("state") == REQUEUED else event,
        "run": folder.path.name,
        "run_folder": str(folder.path),
        **{name: status.get(name) for name in names},
        "step": next((step for step in steps if step is not None), None),
    }


def send(target: str, document: dict[str, Any]) -> str | None:
    """POST JSON to a web address, or pipe it to a command; return the error, or None."""
    text = json.dumps(document)
    if target.startswith(COMMAND):
        return _run(target.removeprefix(COMMAND), text)
    outcome = [f"no answer within {LIMIT_S:g} s"]

    def post() -> None:
        try:
            request = urllib.request.Request(
                target, text.encode(), {"Content-Type": "application/json"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=LIMIT_S):
                outcome.clear()
        except Exception as error:  # of any library that a proxy or a certificate brings in
            outcome[:] = [" ".join(str(error).split()) or type(error).__name__]

    # a name server or a slow answer may take longer than the socket's timeout
    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return outcome[0] if outcome else None


def _run(command: str, text: str) -> str | None:
    try:
        argv = shlex.split(command)
    except ValueError as error:
        return str(error)
    return run_command(argv, text, LIMIT_S, os.environ).failure


def _shown(target: str) -> str:
    """Return a target without the parts of an address that may be secret: its path and query."""
    return target if target.startswith(COMMAND) else str(urlsplit(target).hostname)
