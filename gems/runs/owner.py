"""The owner of a run folder.

The one process or job that may write there, on file systems that nodes share too.
`owners/0001.json`, `0002.json` and so on say who owned the folder, one after another; the last one
does until it is released or gone. To take the folder is to create the next file, which succeeds for
one process only. No file is ever removed: of several that find the same owner gone, one follows it.
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

# states that are recorded once no rank is left
ENDED = ("finished", "failed", "cancelled", "stopped")
SUBMITTING = "submitting"
# states of a run that has not recorded its end
UNFINISHED = (SUBMITTING, "submitted", "requeued", "running")
FRESH_S = 60.0  # NFS shows other nodes what changed in a mapped file after half a minute
CLOCKS_S = 5.0  # by which clocks of nodes may differ
TRIES = 5
CLUSTER_VARIABLE = "GEMS_JOB_CLUSTER"  # of a job of SLURM's that is on a chosen cluster
FLUX_VARIABLE = "FLUX_ENCLOSING_ID"  # the job that has the Flux instance of a batch script
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class Owner:
    """A row of a run folder's owners: a job if `job_id` is known, else the process.

    `number` is the file's.
    `token` names one submission: it is known to the batch system too, which finds the job by it.
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
        """Whether its process is alive; None on another host."""
        return is_alive_here(asdict(self))

    @property
    def is_mine(self) -> bool:
        """Whether this process is the owner, or in the job that is, in which no other process here has the folder."""
        is_own = self.is_alive_here and self.pid == os.getpid()
        if self.job_id is None or self.job_id != own_job_id():
            return self.job_id is None and bool(is_own)
        return bool(is_own) or not self.is_alive_here

    def update(self, folder: RunFolder, **changes: Any) -> Owner:
        """Rewrite the owner's file, which only the owner may."""
        changed = replace(self, **changes)
        write_json(_file(folder, self.number), _document(changed))
        return changed

    def release(self, folder: RunFolder) -> None:
        """Give the folder back: whoever wants it next may take it."""
        self.update(folder, is_released=True)


Verify = Callable[[RunFolder, Owner], None]


def own_job_id() -> str | None:
    """Return the ID of the job that this process is in, as 41_7@serial in a job array of SLURM's.

    None outside of one.
    The cluster is named if the submission has chosen it. A Flux instance may run in a job of
    another system, and not the other way round.
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
    """Return an ID of Flux's in the form of plain letters.

    Its own begins with the sign of the florin.
    """
    return re.sub(r"^[^\x00-\x7f]+", "f", text)


def is_alive_here(record: Mapping[str, Any]) -> bool | None:
    """Return whether the process that a record names by pid, start and host is alive.

    None on another host.
    """
    if record.get("host") != os.uname().nodename:
        return None
    pid = record.get("pid")
    started = record.get("pid_started")
    if not isinstance(pid, int) or pid <= 0:
        return False
    return is_alive(pid, str(started or start_time(pid)))


def verify_gone(folder: RunFolder, owner: Owner) -> None:
    """Raise TryLaterError unless the owner's process has ended.

    Of jobs `jobs.status.job_record` knows more.
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
    """Return the last owner of a folder, released or not; None if it had none.

    A folder of an earlier version has its owner in status.json alone. Of a file that is not
    readable nothing is known.
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
        TryLaterError: its owner is not proven gone, or its ranks show signs of life, whatever is
        said of their job.
    """
    owner = read_owner(folder)
    if owner is None or not owner.is_mine:
        if owner is not None:
            verify(folder, owner)
        if (beat := _sign_of_life(folder)) is not None:
            age_s = max(0.0, time.time() - _seen_ns(beat) / 1e9)
            why = (
                f"process {beat.pid} on {beat.node} was at work there {age_s:.0f} s ago, whatever"
                " is known of its job"
            )
            raise in_use(
                folder,
                why,
                f"wait for its end; it counts as gone after {FRESH_S:.0f} s without a sign",
            )
    return owner


def take(
    folder: RunFolder, verify: Verify = verify_gone, *, token: str = "", job_id: str | None = None
) -> Owner:
    """Make this process, or the job `job_id`, the owner of a folder, which is made if it is missing.

    A run whose owner has gone without recording its end is marked as failed.

    Raises:
        TryLaterError: as `check_free`, or others take it at this moment.
        ConfigError: one cannot write there.
    """
    pid = os.getpid()
    made = Owner(
        0, token or new_token(), os.uname().nodename, pid, start_time(pid), job_id, now_utc()
    )
    for _ in range(TRIES):
        before = check_free(folder, verify)
        made = replace(made, number=1 if before is None else before.number + 1)
        try:
            is_ours = _create(_file(folder, made.number), made)
        except OSError as error:
            text = f"cannot write there ({error.strerror}: {error.filename})"
            raise ConfigError(
                "runs_dir", folder.path.parent, text, "give runs_dir= a folder of yours"
            ) from error
        if is_ours:
            if before is not None and not before.is_released and not before.is_mine:
                _record_loss(folder, before)
            return made
    raise in_use(folder, "several processes take it at this moment", "try again")


def hold(folder: RunFolder) -> None:
    """Make this process, with the job that it is in, the owner unless it is; raises as `take`."""
    owner = read_owner(folder)
    if owner is None or not owner.token or owner.is_released or not owner.is_mine:
        take(folder, job_id=own_job_id())


def release(folder: RunFolder) -> None:
    """Give back a folder if this process owns it."""
    owner = read_owner(folder)
    if owner is not None and owner.token and not owner.is_released and owner.is_mine:
        owner.release(folder)


def new_token() -> str:
    """Return a name that nothing else has."""
    return secrets.token_hex(8)


def _file(folder: RunFolder, number: int) -> Path:
    return folder.path / "owners" / f"{number:04d}.json"


def _document(owner: Owner) -> dict[str, Any]:
    return {name: value for name, value in asdict(owner).items() if name != "number"}


def _create(path: Path, owner: Owner) -> bool:
    """Create a file that appears complete, and return whether this call did.

    NFS has link for that, and no locks.
    """
    text = json.dumps(_document(owner), indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{owner.token}")
    partial.write_text(text)
    try:
        os.link(partial, path)
    except FileExistsError:
        return partial.stat().st_nlink == 2  # NFS repeats a call whose answer was lost
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
    """Return the owner by status.json, which is all that earlier versions wrote."""
    try:
        status = folder.read_status()
    except (ConfigError, OSError):
        return None  # the preparation of the folder reports what is wrong with it
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
    """Return the mark of a rank that may be alive.

    Fresh, later than the recorded end, and of no process that ended.
    """
    status: dict[str, Any] = {}
    # the preparation of the folder reports what is wrong with it
    with contextlib.suppress(OSError):
        status = folder.read_status()
    ended_s = 0.0
    if status.get("state") in ENDED:
        ended_s = datetime.fromisoformat(str(status["updated_utc"])).timestamp() + CLOCKS_S
    for beat in read_beats(folder.path).values():
        seen_s = _seen_ns(beat) / 1e9
        is_dead = beat.node == os.uname().nodename and not is_alive(beat.pid, start_time(beat.pid))
        is_own = beat.pid == os.getpid() and beat.node == os.uname().nodename
        if (
            beat.action != FINISHED
            and seen_s > max(time.time() - FRESH_S, ended_s)
            and not is_dead
            and not is_own
        ):
            return beat
    return None


def _seen_ns(beat: Beat) -> int:
    return max(beat.time_ns, beat.alive_ns)
