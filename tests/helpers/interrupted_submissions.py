"""Submissions that signals end at random moments, on the SLURM of PATH.

What is left, and what the next command finds.
By hand, on the mini cluster: python -m tests.helpers.interrupted_submissions 200
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.errors import TryLaterError
from gems.runs.folder import RunFolder
from jobs.batch.job import Job
from jobs.launch.submission import start_run
from jobs.schedulers.slurm_client.jobs import cancel_jobs, list_jobs
from jobs.status.cancellation import cancel_all
from jobs.status.lookup import Catalogue
from jobs.status.run_status import run_statuses

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
NEXT = ("status", "submit", "cancel")
# A file of the folder, and the share of a whole submission's time in which the signal comes after
# it.
MOMENTS = (("", 1.0), ("owners", 0.6), *[("provenance.json", 0.15)] * 3)
WORDS = ["experiment=gems_master", "cluster=mini", "data=synthetic", "+cluster.sbatch.hold=true"]
CTRL_C = (signal.SIGINT, signal.SIGHUP)  # which a terminal sends to the whole group


def interrupted(spec: RunSpec, number: int, after: str, delay_s: float) -> int:
    """Submit in a process of its own that gets a signal some time after the folder has a file.

    Return how it ended.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = start_run(spec, assume_yes=True)
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)
    while after and not (RunFolder.of(spec).path / after).exists():
        time.sleep(0.001)
    time.sleep(delay_s)
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if number in CTRL_C else os.kill)(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def active_jobs(folder: RunFolder) -> list[Job]:
    """Return the jobs of a run that wait or run, by the path of their script."""
    return [
        job
        for job in list_jobs(f"--user={os.getuid()}")
        if job.is_active and str(folder.path) in job.script
    ]


def faults(spec: RunSpec, command: str) -> Iterator[str]:
    """Run the next command on a run, and yield what is wrong after it."""
    folder = RunFolder.of(spec)
    is_refused = False
    if command == "submit":
        try:
            start_run(spec, assume_yes=True)
        except TryLaterError as error:
            is_refused = True
            if "belongs to job" not in str(error):
                yield f"refused by {error}"
    elif folder.run_yaml.exists() and command == "cancel":
        with contextlib.redirect_stdout(sys.stderr):
            cancel_all(Catalogue((folder,), ()), as_json=False)
    elif folder.run_yaml.exists():
        run_statuses([folder])
    jobs = active_jobs(folder)
    status = folder.read_status()
    if len(jobs) > 1:
        yield f"double: {jobs}"
    if jobs and (status.get("job_id") != jobs[0].job_id or command == "cancel"):
        yield f"orphan: {jobs} and {status}"
    if command == "submit" and len(jobs) != 1:
        yield f"no job: {status}, refused {is_refused}"


def measure(num: int, runs_dir: Path, seed: int = 0) -> dict[str, object]:
    """Interrupt so many submissions and return what became of them.

    `faults` is empty if each was accounted for.
    """
    chance = random.Random(seed)
    base = compose(WORDS)
    for name in ("first", "second"):  # the first takes the profile, which is kept
        begin_s = time.monotonic()
        start_run(replace(base, name=name, runs_dir=str(runs_dir)), assume_yes=True)
        whole_s = time.monotonic() - begin_s
    ends: Counter[str] = Counter()
    wrong = []
    for index in range(num):
        spec = replace(base, name=f"r{index}", runs_dir=str(runs_dir))
        number, command, (after, share) = SIGNALS[index % 4], NEXT[index % 3], MOMENTS[index % 5]
        code = interrupted(spec, number, after, chance.uniform(0, share * whole_s))
        state = RunFolder.of(spec).read_status().get("state", "no folder")
        ends[f"{number.name} left {state}, exit code {code}"] += 1
        wrong += [f"{index} {number.name} {command}: {fault}" for fault in faults(spec, command)]
        cancel_jobs([job.job_id for job in active_jobs(RunFolder.of(spec))])
    return {
        "trials": num,
        "whole_s": round(whole_s, 2),
        "ends": dict(sorted(ends.items())),
        "faults": wrong,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(int(sys.argv[1]), Path(folder)), indent=1))
