"""`gems-jobs probe`: run the MPI probe alone, here by mpiexec or as a small job of two ranks."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.cli.framework import Options, print_json
from gems.config.compose import compose
from gems.errors import ConfigError, StalledError
from gems.launch.local_launcher import Ended, rank_environment
from gems.runs.folder import RunFolder
from gems.runs.owner import new_token, not_writable
from gems.utils.tables import name_values
from gems.utils.units import MIB, format_rates
from jobs.batch.job import script_path
from jobs.batch.output import report
from jobs.batch.resources import job_spec
from jobs.launch.transaction import SignalsWait
from jobs.probes.mpi import RANKS, MpiProbe, probe_json
from jobs.schedulers.scheduler import Scheduler, scheduler_for

LIMIT = "--limit"
# a run of two ranks; its model is not used
TWO_RANKS = ("parallel.partitions=2", "parallel.replicas=1")
QUEUE_LIMIT_MIN = 15  # for the wait in the queue and the job itself
JOB_MINUTES = 5
POLL_S = 1.0
VISIBLE_LIMIT_S = 20.0  # until the job's file is visible through a shared file system


def probe(words: Sequence[str], options: Options) -> int:
    """Run `gems-jobs probe [cluster=NAME key=value ...]`.

    Probe MPI and device memory, print the result, and cache it for 30 days. A job may take
    --limit minutes, including the wait in the queue.

    Raises:
        ConfigError: No launcher, no permission, a refused job, or an MPI that does not start as
            configured or does not accept device memory.
        RankFailedError: The ranks ended with another error.
        StalledError: They did not start or end in time.
    """
    spec = compose([*TWO_RANKS, *words])
    # its folder has no code archive, and there is nothing to save
    spec = replace(spec, cluster=replace(spec.cluster, archive_code=False, signal_before_end_s=0))
    if not spec.machine.takes_steps:
        raise ConfigError(
            "machine.kind", spec.machine.kind, "has no ranks to probe", "use machine=auto"
        )
    mpi_probe = MpiProbe(job_spec(spec), spec.machine, spec.cache_dir)
    before = mpi_probe.known()
    if mpi_probe.job.is_batch:
        result = _in_job(mpi_probe, _minutes(options))
    else:
        folder = _folder(mpi_probe)
        environment = rank_environment(spec.machine.threads_per_rank)
        environment |= {key: str(value) for key, value in spec.cluster.environment.items()}
        result = mpi_probe.read(mpi_probe.run(folder, environment), folder) | {"nodes": 1}
        shutil.rmtree(folder.path, ignore_errors=True)
    result["cluster"] = spec.cluster.name
    mpi_probe.keep(result)
    if options.json:
        print_json(result)
        return 0
    print(probe_table(result))
    if before is not None and before.get("mpi") != result["mpi"]:
        report(f"the MPI was {before.get('mpi')} on {before.get('utc')}")
    return 0


def probe_table(result: Mapping[str, Any]) -> str:
    """Return the results of a probe, one per line."""
    ranks = result["ranks"]
    gpus = (
        (
            "none"
            if (gpu := rank["gpu"]) is None
            else f"{gpu['name']}, number {gpu['index']} of {gpu['visible']}"
        )
        for rank in ranks
    )
    rows = [
        ("cluster", result["cluster"]),
        ("MPI", " ".join(result["mpi"].split())),
        ("threads", result["threads"]),
        ("world size", result["world_size"]),
        ("nodes", ", ".join(rank["node"] for rank in ranks)),
        ("GPUs", "; ".join(gpus)),
        (
            "device memory",
            (
                f"{result['device_message']} (MPI claims"
                f" {'yes' if result['takes_device_memory'] else 'no'})"
            ),
        ),
        ("host to host", _rates(result["host"])),
        *([("GPU to GPU", _rates(result["device"]))] if result["device"] else []),
    ]
    return name_values(rows, indent=0)


def _rates(link: Mapping[str, float]) -> str:
    return (
        f"{format_rates(link['latency_s'], link['bytes_per_s'])} (messages of 8 bytes and "
        f"{link['message_bytes'] / MIB:g} MiB; machine.link_latency_s={link['latency_s']:.3g} "
        f"machine.link_bytes_per_s={link['bytes_per_s']:.3g})"
    )


def _minutes(options: Options) -> float:
    text = options.chosen.get(LIMIT, str(QUEUE_LIMIT_MIN))
    if not text.isdecimal() or not int(text):
        raise ConfigError(LIMIT, text, "must be a whole number of minutes, 1 or more")
    return float(text)


def _folder(mpi_probe: MpiProbe) -> RunFolder:
    """Create the folder of a probe beside the runs, where all nodes can see it."""
    job = mpi_probe.job
    name = f"probe-{job.cluster.name}-{mpi_probe.digest}"
    folder = RunFolder(Path(job.runs_dir).resolve() / name)
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
        for path in folder.logs.iterdir():
            path.unlink()
    except OSError as error:
        raise not_writable(job.runs_dir, error) from error
    return folder


def _in_job(mpi_probe: MpiProbe, limit_min: float) -> dict[str, Any]:
    """Submit a job of two ranks, wait for its end, and return the result with the number of nodes.

    The script differs from a run's only in the last line. The job is cancelled if it takes too
    long.
    """
    job = mpi_probe.job
    cluster = job.cluster
    scheduler = scheduler_for(cluster)
    if not scheduler.has_probe_jobs:
        text = "is probed by the first job of a run, not by this command"
        raise ConfigError("cluster.scheduler", cluster.scheduler, text, "submit a run")
    scheduler.check_submission(cluster)
    scheduler.check_here()
    pair = mpi_probe.pair(scheduler.max_nodes(cluster.partition) or RANKS)
    folder = _folder(mpi_probe)
    small = replace(pair, name="probe", minutes=min(job.minutes, JOB_MINUTES))
    result = probe_json(folder)
    log = folder.logs / "probe.log"
    token = new_token()
    script = script_path(folder.logs, token)
    argv = replace(mpi_probe, job=small).argv(folder)
    line = f"{shlex.join(argv)} > {shlex.quote(str(log))} 2>&1"
    script.write_text(scheduler.script(small, folder, command=line))
    job_id = None
    try:
        with SignalsWait():
            job_id = scheduler.call(small, script, token)
    except BaseException:
        if job_id is not None:  # interrupted meanwhile
            scheduler.cancel([job_id])
        raise
    report(f"job {job_id} probes {cluster.name} on {small.nodes} nodes")
    _wait(scheduler, job_id, limit_min)
    deadline_s = time.monotonic() + VISIBLE_LIMIT_S
    while not result.exists() and time.monotonic() < deadline_s:
        time.sleep(POLL_S / 5)
        os.listdir(folder.logs)  # NFS caches a folder's content until it is listed
    outputs = [log] if log.exists() else folder.logs.glob("*.out")
    tail = tuple(line for path in outputs for line in path.read_text(errors="replace").splitlines())
    ended = Ended(0 if result.exists() else 1, tail)
    return mpi_probe.read(ended, folder) | {"nodes": small.nodes}


def _wait(scheduler: Scheduler, job_id: str, limit_min: float) -> None:
    """Wait for a job's end; cancel it after the time limit or an interrupt."""
    deadline_s = time.monotonic() + 60 * limit_min
    state = "unknown"
    has_ended = False
    try:
        while time.monotonic() < deadline_s:
            query = scheduler.query_queue([job_id])
            job = query.jobs.get(job_id)
            has_ended = query.error is None and (job is None or not job.is_active)
            if has_ended:
                return
            state = state if job is None else f"{job.state} {job.reason}".strip()
            time.sleep(POLL_S)
    finally:
        if not has_ended:
            scheduler.cancel([job_id])
    raise StalledError(
        f"the probe's job {job_id} has not ended within {limit_min:g} min ({state}), and is"
        f" cancelled; wait longer with {LIMIT} MINUTES, or submit a run: its job probes first"
    )
