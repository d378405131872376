"""SLURM's record of a job, and the job's environment, kept in the run's `provenance/` by the job itself.

By the time that somebody asks, `scontrol` has forgotten the job, and not every site has accounting.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.provenance import ENVIRONMENT_JSON, check_code, environment
from gems.utils.atomic_io import read_json, write_json
from jobs.slurm.command import hear
from jobs.slurm.job_record import fields_of

STEP_FIELDS = ("JobID", "JobName", "State", "ExitCode", "Elapsed", "NTasks", "NodeList", "MaxRSS", "ConsumedEnergyRaw")
OF_PEOPLE = ("UserId", "GroupId", "MailUser")


def record_start(folder: RunFolder, code_is_snapshot: bool) -> None:
    """Record the job's environment and SLURM's record of it, and checks that the code is what was prepared.

    Outside of SLURM it does nothing. A job that SLURM started again keeps the notes of its earlier starts. Notes that
    cannot be taken end no run.

    Raises:
        ConfigError: the snapshot was changed or is damaged.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        return
    with _noting():
        kept = read_json(folder.provenance / ENVIRONMENT_JSON)
        write_json(folder.provenance / ENVIRONMENT_JSON, {**kept, "job": environment()})
        starts = [*read_json(folder.slurm_json).get("starts", [])]
        if starts and folder.affinity_json.exists():  # of an earlier start, perhaps on other nodes
            folder.affinity_json.rename(folder.affinity_json.with_name(f"affinity.start{len(starts)}.json"))
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        starts.append({"restart_count": restarts, "utc": _now(), "job": ask_job(job_id)})
        write_json(folder.slurm_json, {"job_id": job_id, "starts": starts})
    wrong = check_code(folder.provenance, read_json(folder.provenance_json)) if code_is_snapshot else None
    if wrong is not None:
        raise ConfigError("run folder", folder.path, wrong, "submit it again")


def record_end(folder: RunFolder) -> None:
    """Record SLURM's record of the job once its ranks have ended, with the steps where the site has accounting."""
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        return
    with _noting():
        record = read_json(folder.slurm_json)
        if record.get("starts"):
            record["starts"][-1]["end"] = {"utc": _now(), "job": ask_job(job_id), "steps": ask_steps(job_id)}
            write_json(folder.slurm_json, record)


@contextlib.contextmanager
def _noting() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        print(f"jobs: the job's record cannot be kept ({error})", file=sys.stderr, flush=True)


def ask_job(job_id: str) -> dict[str, str] | None:
    """Return the fields of `scontrol show job` but those of people; None where SLURM does not answer."""
    said = hear(["scontrol", "--oneliner", "show", "job", job_id])
    if said.trouble is not None:
        return None
    fields = fields_of(" ".join(said.lines))
    return {name: value for name, value in fields.items() if name not in OF_PEOPLE}


def ask_steps(job_id: str) -> list[dict[str, str]] | None:
    """Return sacct's rows of the job and its steps so far; None where there is no accounting."""
    said = hear(["sacct", "--noheader", "--parsable2", f"--format={','.join(STEP_FIELDS)}", f"--jobs={job_id}"])
    if said.trouble is not None or not said.lines:
        return None
    return [dict(zip(STEP_FIELDS, line.split("|"), strict=False)) for line in said.lines]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
