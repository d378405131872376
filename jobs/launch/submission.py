"""The job of a run folder: whether SLURM has it still, and letting go of a folder whose job has ended."""

from __future__ import annotations

from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from jobs.slurm.jobs import ask_queue


def is_queued(job_id: str) -> bool | None:
    """Return whether SLURM has the job waiting or running; None where it cannot be asked."""
    answer = ask_queue([job_id])
    if answer.trouble is not None:
        return None
    return job_id in answer.jobs and answer.jobs[job_id].is_active


def release(folder: RunFolder) -> None:
    """Let go of a run folder whose job has ended without a word, and refuses one whose job is still there.

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
            f"wait for it, `python -m jobs cancel {folder.path.name}`, or change name=",
        )  # fmt: skip
    if queued is False and status["state"] not in ("failed", "cancelled", "stopped"):
        more = {key: value for key, value in status.items() if key not in ("state", "updated_utc")}
        folder.write_status("failed", **{**more, "cause": "the job left the queue: cancelled, lost or out of time"})
