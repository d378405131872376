"""SLURM's record of a job, and the job's environment, written to the run's `provenance/` by the job itself.

Later, `scontrol` has forgotten the job, and not every site has accounting.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.provenance import ENVIRONMENT_JSON, check_code, environment
from gems.utils.atomic_io import read_json, write_json
from jobs.launch.requeue import num_restarts, own_job_id
from jobs.slurm.command import run_slurm
from jobs.slurm.jobs import scontrol_fields

STEP_FIELDS = ("JobID", "JobName", "State", "ExitCode", "Elapsed", "NTasks", "NodeList", "MaxRSS", "ConsumedEnergyRaw")
PERSONAL = ("UserId", "GroupId", "MailUser")


def record_start(folder: RunFolder, code_is_snapshot: bool) -> None:
    """Record the job's environment and SLURM's record of it, and check that the code is what was prepared.

    Outside of SLURM it does nothing. A job that SLURM started again keeps the records of its earlier starts. A record
    that cannot be written ends no run.

    Raises:
        ConfigError: the code archive was changed or is damaged.
    """
    job_id = own_job_id()
    if job_id is None:
        return
    with _recording():
        kept = read_json(folder.provenance / ENVIRONMENT_JSON)
        write_json(folder.provenance / ENVIRONMENT_JSON, {**kept, "job": environment()})
        starts = [*read_json(folder.slurm_json).get("starts", [])]
        if starts and folder.affinity_json.exists():  # of an earlier start, perhaps on other nodes
            folder.affinity_json.rename(folder.affinity_json.with_name(f"affinity.start{len(starts)}.json"))
        starts.append({"restart_count": num_restarts(), "utc": _now(), "job": query_fields(job_id)})
        write_json(folder.slurm_json, {"job_id": job_id, "starts": starts})
    wrong = check_code(folder.provenance, read_json(folder.provenance_json)) if code_is_snapshot else None
    if wrong is not None:
        raise ConfigError("run folder", folder.path, wrong, "submit it again")


def record_end(folder: RunFolder) -> None:
    """Record SLURM's record of the job once its ranks have ended, with the steps if the site has accounting."""
    job_id = own_job_id()
    if job_id is None:
        return
    with _recording():
        record = read_json(folder.slurm_json)
        if record.get("starts"):
            record["starts"][-1]["end"] = {"utc": _now(), "job": query_fields(job_id), "steps": query_steps(job_id)}
            write_json(folder.slurm_json, record)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        print(f"jobs: SLURM's record of the job cannot be written ({error})", file=sys.stderr, flush=True)


def query_fields(job_id: str) -> dict[str, str] | None:
    """Return the fields of `scontrol show job` except personal ones; None if SLURM does not answer."""
    result = run_slurm(["scontrol", "--oneliner", "show", "job", job_id])
    if result.error is not None:
        return None
    return {name: value for name, value in scontrol_fields(result.lines).items() if name not in PERSONAL}


def query_steps(job_id: str) -> list[dict[str, str]] | None:
    """Return sacct's rows of the job and its steps so far; None if there is no accounting."""
    result = run_slurm(["sacct", "--noheader", "--parsable2", f"--format={','.join(STEP_FIELDS)}", f"--jobs={job_id}"])
    if result.error is not None or not result.lines:
        return None
    return [dict(zip(STEP_FIELDS, line.split("|"), strict=False)) for line in result.lines]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
