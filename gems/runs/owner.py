"""The owner of a run folder: the only process or job that may write there.

`owners/0001.json`, `0002.json` and so on list the successive owners; the last one owns the folder
until it releases it or ends. A process takes the folder by creating the next file, which succeeds
for only one process, on shared file systems too. No file is ever removed, so if several processes
find that the owner has gone, exactly one becomes the next.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from gems.errors import ConfigError, TryLaterError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import FINISHED, Beat, read_beats
from gems.utils.atomic_io import read_json, write_json
from gems.utils.process_tree import is_alive, start_time
from gems.utils.units import now_utc

# states that are recorded after all ranks have ended
ENDED = ("finished", "failed", "cancelled", "stopped")
SUBMITTING = "submitting"
# states of a run that has not recorded its end
UNFINISHED = (SUBMITTING, "submitted", "requeued", "running")
FRESH_S = 60.0  # NFS takes half a minute to show changes of a mapped file on other nodes
CLOCKS_S = 5.0  # the largest difference between the clocks of nodes
TRIES = 5
CLUSTER_VARIABLE = "GEMS_JOB_CLUSTER"  # the cluster that a SLURM job was submitted to explicitly
FLUX_VARIABLE = "FLUX_ENCLOSING_ID"  # the job that runs the Flux instance of a batch script
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class Owner:
    """An owner of a run folder: the job `job_id`, or if that is None, the process.

    `number` is that of its file. `token` identifies one submission: the batch system can find the
    job by it.
    """

    number: int
    token: str = ""
    host: str = ""
    pid: int = 0
    pid_started: str = ""
    job_id: str | None = None
    utc: str = ""
    is_released: bool = False

    @property
    def is_alive_here(self) -> bool | None:
        """Whether its process is alive, or None if that is on another host."""
        return is_alive_here(asdict(self))

    @property
    def is_mine(self) -> bool:
        """Whether this process is the owner, or belongs to the job that is.

        In a job, no other process of this node may have the folder.
        """
        if self.is_alive_here and self.pid == os.getpid():
            return self.job_id in (None, own_job_id())
        return self.job_id is not None and self.job_id == own_job_id() and not self.is_alive_here

    def update(self, folder: RunFolder, **changes: Any) -> Owner:
        """Rewrite the owner's file; only the owner may do this."""
        owner = replace(self, **changes)
        write_json(_file(folder, self.number), _document(owner))
        return owner

    def release(self, folder: RunFolder) -> None:
        """Release the folder, so that others may take it."""
        self.update(folder, is_released=True)


Verify = Callable[[RunFolder, Owner], None]


def own_job_id() -> str | None:
    """Return the ID of this process's job, or None outside a job.

    The ID of a task of a SLURM job array, submitted to the cluster `serial`, is 41_7@serial. Flux
    comes first because a Flux instance may run in a job of another system.
    """
    if flux_id := os.environ.get(FLUX_VARIABLE):
        return ascii_flux_id(flux_id)
    if pbs_id := os.environ.get("PBS_JOBID"):
        return pbs_id
    task = [os.environ.get(name) for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")]
    number = "_".join(map(str, task)) if all(task) else os.environ.get("SLURM_JOB_ID")
    cluster = os.environ.get(CLUSTER_VARIABLE)
    return f"{number}@{cluster}" if number and cluster else number


def ascii_flux_id(text: str) -> str:
    """Return a Flux job ID in ASCII, with `f` in place of the florin sign."""
    return re.sub(r"^[^\x00-\x7f]+", "f", text)


def is_alive_here(record: Mapping[str, Any]) -> bool | None:
    """Return whether the process in a record (pid, start and host) is alive.

    Return None if it is on another host.
    """
    if record.get("host") != os.uname().nodename:
        return None
    pid = record.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    return is_alive(pid, str(record.get("pid_started") or start_time(pid)))


def verify_gone(folder: RunFolder, owner: Owner) -> None:
    """Raise TryLaterError unless the owner has released the folder, or its process has ended.

    A job counts as running; `jobs.status.job_record` can ask the batch system.
    """
    if owner.is_released or (owner.job_id is None and owner.is_alive_here is False):
        return
    if owner.job_id is not None:
        raise in_use(
            folder,
            f"is that of job {owner.job_id}, which may not have ended",
            "cancel it, or change name=",
        )
    where = (
        f"process {owner.pid} on {owner.host}"
        if owner.host
        else f"owners/{owner.number:04d}.json is damaged"
    )
    raise in_use(folder, f"a run goes on there ({where})", "wait for it, or change name=")


def in_use(folder: RunFolder, why: str, advice: str) -> TryLaterError:
    """Return the error for a folder that somebody else owns."""
    return TryLaterError("run folder", folder.path, why, advice)


def read_owner(folder: RunFolder) -> Owner | None:
    """Return the last owner of a folder, released or not, or None if it never had one.

    Earlier versions recorded the owner only in status.json. Of an unreadable file only the number
    is known.
    """
    number = max(
        (int(path.stem) for path in (folder.path / "owners").glob("[0-9]*.json")), default=0
    )
    owner = None
    if number:
        try:
            fields = read_json(_file(folder, number))
            owner = Owner(number, **fields)
        except (OSError, ValueError, TypeError):
            return Owner(number)
    return _recorded_owner(folder, number) or owner if owner is None or owner.is_released else owner


def check_free(folder: RunFolder, verify: Verify = verify_gone) -> Owner | None:
    """Return the last owner of a folder that this process may take.

    Raises:
        TryLaterError: The owner may not have ended, or ranks show signs of life, even if their job
            is said to have ended.
    """
    owner = read_owner(folder)
    if owner is not None and owner.is_mine:
        return owner
    if owner is not None:
        verify(folder, owner)
    if (beat := _sign_of_life(folder)) is not None:
        age_s = max(0.0, time.time() - beat.seen_s)
        raise in_use(
            folder,
            f"process {beat.pid} on {beat.node} was at work there {age_s:.0f} s ago, whatever"
            " is known of its job",
            f"wait for its end; it counts as gone after {FRESH_S:.0f} s without a sign",
        )
    return owner


def take(
    folder: RunFolder, verify: Verify = verify_gone, *, token: str = "", job_id: str | None = None
) -> Owner:
    """Make this process, or the job `job_id`, the owner of a folder; create it if it is missing.

    Mark the run as failed if its owner ended without recording the end.

    Raises:
        TryLaterError: As in `check_free`, or other processes take the folder at this moment.
        ConfigError: The folder cannot be written.
    """
    pid = os.getpid()
    owner = Owner(
        0, token or new_token(), os.uname().nodename, pid, start_time(pid), job_id, now_utc()
    )
    for _ in range(TRIES):
        before = check_free(folder, verify)
        owner = replace(owner, number=1 if before is None else before.number + 1)
        try:
            is_ours = _create(_file(folder, owner.number), owner)
        except OSError as error:
            raise not_writable(folder.path.parent, error) from error
        if is_ours:
            if before is not None and not before.is_released and not before.is_mine:
                _record_loss(folder, before)
            return owner
    raise in_use(folder, "several processes take it at this moment", "try again")


def hold(folder: RunFolder) -> None:
    """Make this process, with its job, the owner unless it already is; raise as `take` does."""
    if _own_row(folder) is None:
        take(folder, job_id=own_job_id())


def release(folder: RunFolder) -> None:
    """Release a folder if this process owns it."""
    owner = _own_row(folder)
    if owner is not None:
        owner.release(folder)


def _own_row(folder: RunFolder) -> Owner | None:
    owner = read_owner(folder)
    is_held = owner is not None and owner.token and not owner.is_released and owner.is_mine
    return owner if is_held else None


def not_writable(runs_dir: Path | str, error: OSError) -> ConfigError:
    """Return the error for a folder of runs that this user cannot write to."""
    return ConfigError(
        "runs_dir",
        runs_dir,
        f"cannot write there ({error.strerror}: {error.filename})",
        "give runs_dir= a folder of yours",
    )


def new_token() -> str:
    """Return a random name for a submission."""
    return secrets.token_hex(8)


def _file(folder: RunFolder, number: int) -> Path:
    return folder.path / "owners" / f"{number:04d}.json"


def _document(owner: Owner) -> dict[str, Any]:
    return {name: value for name, value in asdict(owner).items() if name != "number"}


def _create(path: Path, owner: Owner) -> bool:
    """Create a complete file atomically, and return whether this call did.

    A hard link does this on NFS too, which may have no locks.
    """
    text = json.dumps(_document(owner), indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{owner.token}")
    partial.write_text(text)
    try:
        os.link(partial, path)
    except FileExistsError:
        return partial.stat().st_nlink == 2  # NFS repeats a call if its reply was lost
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            with path.open("x") as file:
                file.write(text)
        except FileExistsError:
            return False
    finally:
        partial.unlink(missing_ok=True)
    return True


def _recorded_owner(folder: RunFolder, number: int) -> Owner | None:
    """Return the owner in status.json, where earlier versions recorded it."""
    try:
        status = folder.read_status()
    except (ConfigError, OSError):
        return None  # the preparation of the folder reports the fault
    state = status.get("state")
    job_id = status.get("job_id")
    pid = status.get("pid")
    is_active = state in UNFINISHED
    if state in (None, "prepared", "finished") or (job_id is None and not is_active):
        return None
    return Owner(
        number,
        "",
        str(status.get("host", "")),
        pid if isinstance(pid, int) else 0,
        str(status.get("pid_started", "")),
        None if job_id is None else str(job_id),
        str(status.get("updated_utc", "")),
        not is_active,
    )


def _record_loss(folder: RunFolder, owner: Owner) -> None:
    status = folder.read_status()
    if status.get("state") in UNFINISHED:
        cause = "the job left the queue: cancelled, lost or out of time"
        if owner.job_id is None:
            cause = f"process {owner.pid} on {owner.host} ended without recording it"
        folder.change_status(status, "failed", cause=cause)


def _sign_of_life(folder: RunFolder) -> Beat | None:
    """Return the mark of a rank that may be alive, except of this process.

    The mark is fresh and later than the recorded end, and its process is not known to have ended.
    """
    status: dict[str, Any] = {}
    # the preparation of the folder reports the fault
    with contextlib.suppress(OSError):
        status = folder.read_status()
    oldest_s = time.time() - FRESH_S
    if status.get("state") in ENDED:
        ended_s = datetime.fromisoformat(str(status["updated_utc"])).timestamp() + CLOCKS_S
        oldest_s = max(oldest_s, ended_s)
    for beat in read_beats(folder.path).values():
        is_here = beat.node == os.uname().nodename
        is_gone = is_here and (
            beat.pid == os.getpid() or not is_alive(beat.pid, start_time(beat.pid))
        )
        if beat.action != FINISHED and beat.seen_s > oldest_s and not is_gone:
            return beat
    return None
