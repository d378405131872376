"""What SLURM's queue knows about the job of a run folder."""

from __future__ import annotations

import subprocess

from gems.errors import ConfigError
from gems.runfolder import RunFolder

ASK_LIMIT_S = 30.0


def is_queued(job_id: str) -> bool | None:
    """Tells whether SLURM has the job waiting or running; None where it cannot be asked."""
    try:
        asked = subprocess.run(
            ["squeue", "--noheader", "--format=%T", f"--jobs={job_id}"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_LIMIT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode:
        return False if "Invalid job id" in asked.stderr else None
    return bool(asked.stdout.strip())


def release(folder: RunFolder) -> None:
    """Lets go of a run folder whose job has ended without a word, and refuses one whose job is still there.

    A job whose run has failed may be there too: SLURM can start it again.

    Raises:
        ConfigError: the folder's job waits or runs.
    """
    try:
        status = folder.read_status()
    except OSError:
        return  # the preparation of the folder says what is wrong with it
    job_id = status.get("job_id")
    if status.get("state") in (None, "prepared", "finished") or job_id is None:
        return
    queued = is_queued(str(job_id))
    if queued:
        raise ConfigError(
            "run folder", folder.path, f"is that of job {job_id}, which has not ended",
            f"wait for it, `scancel {job_id}`, or change name=",
        )  # fmt: skip
    if queued is False and status["state"] != "failed":
        more = {key: value for key, value in status.items() if key not in ("state", "updated_utc")}
        folder.write_status(
            "failed", **{**more, "cause": "the job left the queue: cancelled, lost or out of time"}
        )
