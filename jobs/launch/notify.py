"""Notify a program or a person that a run has ended, has stalled, or was requeued.

The launching process sends the notifications after status.json has the state, within 10 s each. A
notification that cannot be sent is one line in the log and changes nothing for the run. Mail is
left to the batch system.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from gems.errors import ConfigError, StalledError
from gems.runs.folder import RunFolder
from gems.utils.stdio import report
from jobs.status.run_status import read_or_empty, whole

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
        return  # what is wrong with the folder has been reported
    for target in targets:
        if target.partition(":")[0] == MAIL:
            continue
        if (error_text := send(target, document)) is not None:
            report("jobs", f"cluster.notify: {_shown(target)} was not told ({error_text})")


def describe(folder: RunFolder) -> dict[str, Any]:
    """Return the document that is sent about a run.

    It has the event, the state with its cause, the step, and the run folder.
    """
    status = folder.read_status()
    progress = read_or_empty(folder.progress_json)
    state = status.get("state")
    code = status.get("exit_code")
    event = (
        REQUEUED if state == "requeued" else STALLED if code == StalledError.exit_code else ENDED
    )
    step = next(
        (
            each
            for each in (status.get("stopped_step"), progress.get("step"))
            if whole(each) is not None
        ),
        None,
    )
    fields = {
        name: status.get(name)
        for name in ("state", "cause", "exit_code", "job_id", "requeue_count")
    }
    return {
        "event": event,
        "run": folder.path.name,
        "run_folder": str(folder.path),
        **fields,
        "step": step,
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
        ended = subprocess.run(
            shlex.split(command),
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {LIMIT_S:g} s"
    except (OSError, ValueError) as error:
        return str(error)
    if ended.returncode == 0:
        return None
    last = (ended.stderr or ended.stdout).strip().splitlines()[-1:]
    return ": ".join([f"exit code {ended.returncode}", *last])


def _shown(target: str) -> str:
    """Return a target without the parts of an address that may be secret: its path and query."""
    return target if target.startswith(COMMAND) else str(urlsplit(target).hostname)
