"""`python -m jobs probe`: the probe by itself, here by mpiexec or on a cluster as a small job of two ranks."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.cli.framework import Options, print_json
from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.errors import ConfigError, StalledError
from gems.launch.local_launcher import Ended, rank_environment, run_ranks
from gems.runs.folder import RunFolder
from gems.utils.cache import keep_cached
from jobs.launch.mpi_probe import (
    KIND,
    LIMIT_S,
    OF_MPI,
    RANKS,
    digest_of,
    judge,
    key_of,
    known_probe,
    probe_argv,
    probe_json,
)
from jobs.slurm.command import RefusedError, UnansweredError, ask
from jobs.slurm.jobs import ask_queue, cancel_jobs
from jobs.slurm.resources import JobSpec, job_spec
from jobs.slurm.site import most_nodes

LIMIT = "--limit"
OF_TWO = ("parallel.partitions=2", "parallel.replicas=1")  # a run that suits the two ranks; its model is not looked at
QUEUE_LIMIT_MIN = 15  # to wait for, in the queue and in the job
JOB_MINUTES = 5
POLL_S = 1.0
SEEN_LIMIT_S = 20.0  # for what the job wrote to come through a shared file system


def probe(words: Sequence[str], options: Options) -> int:
    """Probe MPI and device memory of `python -m jobs probe [cluster=NAME key=value ...]`, and prints what was found.

    The answer is kept for 30 days. One that is kept already is not used: the probe runs again. On SLURM it waits in the queue, for --limit minutes at most.

    Raises:
        ConfigError: no launcher, no permission, a refused job, MPI that does not start as configured, or device memory
            that is not to be given to it.
        RankFailedError: the ranks ended otherwise.
        StalledError: they did not end, or did not start in time.
    """
    spec = compose([*OF_TWO, *words])
    spec = replace(spec, cluster=replace(spec.cluster, archive_code=False))  # its folder is not a run's
    if spec.machine.kind not in OF_MPI:
        raise ConfigError("machine.kind", spec.machine.kind, "has no ranks to probe", "use machine=auto")
    job = job_spec(spec)
    before = known_probe(spec, job)
    found, nodes = _by_slurm(spec, job, _minutes(options)) if job.is_batch else (_here(spec, job), 1)
    found |= {"nodes": nodes, "cluster": spec.cluster.name}
    keep_cached(spec.cache_dir, KIND, key_of(spec, job), found)
    if options.json:
        print_json(found)
        return 0
    print("\n".join(table(found)))
    if before is not None and before.get("mpi") != found["mpi"]:
        print(f"jobs: the MPI was {before.get('mpi')} on {before.get('utc')}", file=sys.stderr)
    return 0


def table(found: Mapping[str, Any]) -> list[str]:
    """Return what a probe found, a line each."""
    rows = [
        ("cluster", found["cluster"]), ("MPI", " ".join(found["mpi"].split())), ("threads", found["threads"]),
        ("world size", found["world_size"]), ("nodes", ", ".join(rank["node"] for rank in found["ranks"])),
        ("GPUs", "; ".join(_gpu(rank["gpu"]) for rank in found["ranks"])),
        ("device memory", f"{found['device_message']} (MPI says {'yes' if found['takes_device_memory'] else 'no'})"),
        ("host to host", _rates(found["host"])),
    ]  # fmt: skip
    if found["device"]:
        rows.append(("GPU to GPU", _rates(found["device"])))
    return [f"{name:<14} {value}" for name, value in rows]


def _gpu(gpu: Mapping[str, Any] | None) -> str:
    return "none" if gpu is None else f"{gpu['name']}, number {gpu['index']} of {gpu['visible']}"


def _rates(link: Mapping[str, float]) -> str:
    return (
        f"{1e6 * link['latency_s']:.1f} us, {link['bytes_per_s'] / 1e9:.2f} GB/s (messages of 8 bytes and "
        f"{link['message_bytes'] / (1 << 20):g} MiB; machine.link_latency_s={link['latency_s']:.3g} "
        f"machine.link_bytes_per_s={link['bytes_per_s']:.3g})"
    )


def _minutes(options: Options) -> float:
    text = options.chosen.get(LIMIT, str(QUEUE_LIMIT_MIN))
    if not text.isdecimal() or not int(text):
        raise ConfigError(LIMIT, text, "must be a whole number of minutes, 1 or more")
    return float(text)


def _folder(spec: RunSpec, job: JobSpec) -> RunFolder:
    """Make the folder of a probe, beside the runs, where all nodes look for theirs."""
    folder = RunFolder(Path(spec.runs_dir).resolve() / f"probe-{spec.cluster.name}-{digest_of(spec, job)}")
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
        for path in folder.logs.iterdir():
            path.unlink()
    except OSError as error:
        raise ConfigError(
            "runs_dir", spec.runs_dir, f"cannot write there ({error.strerror}: {error.filename})",
            "give runs_dir= a folder of yours",
        ) from error  # fmt: skip
    return folder


def _here(spec: RunSpec, job: JobSpec) -> dict[str, Any]:
    folder = _folder(spec, job)
    environment = rank_environment(spec.machine.threads_per_rank)
    environment |= {key: str(value) for key, value in spec.cluster.environment.items()}
    argv = probe_argv(spec, job, folder)
    ended = run_ranks(argv, environment, folder.logs / "probe.log", timeout_s=LIMIT_S, echo=False)
    found = judge(spec, ended, probe_json(folder))
    shutil.rmtree(folder.path, ignore_errors=True)
    return found


def _by_slurm(spec: RunSpec, job: JobSpec, limit_min: float) -> tuple[dict[str, Any], int]:
    """Submit a job of two ranks and waits for its end; gives what was found, and on how many nodes.

    Its script is that of a run but for its last line, and its job is cancelled when the wait is over.
    """
    from jobs.slurm.executor import executor, need_sbatch, without_enclosing_job

    need_sbatch(job)
    nodes = min(RANKS, most_nodes(spec.cluster.partition) or RANKS)
    folder = _folder(spec, job)
    small = replace(
        job, name="probe", nodes=nodes, tasks=RANKS, tasks_per_node=RANKS // nodes,
        minutes=min(job.minutes, JOB_MINUTES),
    )  # fmt: skip
    result, log = probe_json(folder), folder.logs / "probe.log"
    line = f"{shlex.join(probe_argv(spec, small, folder))} > {shlex.quote(str(log))} 2>&1"
    with without_enclosing_job():
        script = executor(replace(spec, name="probe"), small, folder).script(line)
    path = folder.path / "job.sh"
    path.write_text(script)
    job_id = _submit(spec, path)
    print(f"jobs: job {job_id} probes {spec.cluster.name} on {nodes} nodes", file=sys.stderr, flush=True)
    _wait(job_id, limit_min)
    deadline_s = time.monotonic() + SEEN_LIMIT_S
    while not result.exists() and time.monotonic() < deadline_s:
        time.sleep(POLL_S / 5)
        os.listdir(folder.logs)  # NFS keeps what a folder held until somebody looks
    tail = tuple(log.read_text(errors="replace").splitlines()) if log.exists() else _batch_log(folder)
    code = 0 if result.exists() else 1
    return judge(spec, Ended(code, tail), result), nodes


def _batch_log(folder: RunFolder) -> tuple[str, ...]:
    lines = [line for path in folder.logs.glob("*.out") for line in path.read_text(errors="replace").splitlines()]
    return tuple(lines)


def _submit(spec: RunSpec, script: Path) -> str:
    try:
        said = ask(["sbatch", "--parsable", str(script)])
    except (RefusedError, UnansweredError) as error:
        raise ConfigError(
            "cluster", spec.cluster.name, f"sbatch refuses the probe: {error}",
            "see cluster.partition, cluster.account and cluster.sbatch",
        ) from error  # fmt: skip
    return said.split()[0].partition(";")[0]


def _wait(job_id: str, limit_min: float) -> None:
    """Wait for a job's end; cancels it when the time is over, or when the user wants no more."""
    deadline_s = time.monotonic() + 60 * limit_min
    state = "unknown"
    try:
        while time.monotonic() < deadline_s:
            answer = ask_queue([job_id])
            known = answer.jobs.get(job_id)
            if answer.trouble is None and (known is None or not known.is_active):
                return
            state = state if known is None else f"{known.state} {known.reason}".strip()
            time.sleep(POLL_S)
    except BaseException:
        cancel_jobs([job_id])
        raise
    cancel_jobs([job_id])
    raise StalledError(
        f"the probe's job {job_id} has not ended within {limit_min:g} min ({state}), and is cancelled; "
        f"wait longer with {LIMIT} MINUTES, or submit a run: its job probes first"
    )
