"""Remedies: what to change before a run that failed for some cause is submitted again, as keys and commands."""

from __future__ import annotations

from gems.config.schema import RunSpec
from gems.runs.failure_cause import FailureCause
from jobs.diagnosis.evidence import Evidence

# Faults of a node itself; a full quota is the user's, and a full disk that of all nodes.
NODE_FILE_ERRORS = ("Stale", "Input/output error", "Transport endpoint", "Remote I/O", "Read-only file system")
KEEP = "keep"
FIXED = {
    FailureCause.WRONG_MPI: (
        "cluster.mpi: pmi2 for MPICH, pmix for Open MPI, cray_shasta for Cray MPICH (`srun --mpi=list`)",
        "cluster.modules and cluster.setup: the MPI that mpi4py was built with must be loaded in the job",
    ),
    FailureCause.CONFIGURATION: ("change the key that is named, and submit again",),
}
SETUP = "cluster.python, cluster.modules and cluster.setup"
# What a death by a signal means.
SIGNALS = (
    (("SIGBUS",), "a full /dev/shm or a file that has vanished ends a process so: look at that node"),
    (("SIGKILL",), "if the node ran out of memory: +cluster.sbatch.mem, or fewer cluster.ranks_per_node; "
                   "else somebody killed it"),
    (("SIGSEGV", "SIGABRT", "SIGILL"),
     "native code failed: see the Python stack in logs/ranks.log, and the versions of torch and MPI"),
)  # fmt: skip


def blames_node(cause: FailureCause, text: str) -> bool:
    """Return whether a failure is a node's own, so that another node would not have it."""
    if cause is FailureCause.FILE_SYSTEM:
        return any(words in text for words in NODE_FILE_ERRORS)
    return cause in (FailureCause.NODE, FailureCause.DEVICE)


def remedies(cause: FailureCause, text: str, node: str | None, evidence: Evidence) -> tuple[str, ...]:
    """Return what to change, most promising first; nothing for a run that has not failed."""
    run, step, spec = evidence.folder.path.name, evidence.resume_step, evidence.spec
    command, resumes = f"python -m jobs resubmit {run}", "" if step is None else f" resumes at step {step}"
    again = command + resumes
    # a run without a checkpoint to resume from should write some
    checkpoints = () if step is not None else ("train.checkpoint_s: so that less is lost the next time",)
    match cause:
        case FailureCause.DEVICE_MEMORY | FailureCause.DOES_NOT_FIT:
            return _device_memory(spec)
        case FailureCause.HOST_MEMORY:
            return _host_memory(spec)
        case FailureCause.NODE | FailureCause.DEVICE:
            return (f"exclude node {node}: {again}" if node else again,)
        case FailureCause.TIME_LIMIT:
            minutes = f"={2 * spec.cluster.minutes}" if spec is not None else ""
            return (f"{command} cluster.minutes{minutes}{resumes}", *checkpoints)
        case FailureCause.PREEMPTED | FailureCause.CANCELLED | FailureCause.STOPPED:
            return (again, *checkpoints)
        case FailureCause.STALLED:
            has_stacks = evidence.folder.stacks(0).parent.is_dir()
            return (
                "read the stacks in stacks/" if has_stacks else "look at that rank's node",
                f"if that node is slow or its file system hangs: {command} cluster.exclude=[{node or 'NODE'}]",
                "if the action may take that long: train.hang_timeout_s",
            )
        case FailureCause.FILE_SYSTEM:
            if "quota" in text or "No space" in text:
                where = "of your quota" if "quota" in text else "there"
                return (f"free space {where}, or runs_dir= on another file system", again)
            return (f"runs_dir= on a file system that all nodes can write to; else {again}",)
        case FailureCause.LAUNCHER:
            if "hared memory" in text or "POSIX" in text or "mpich_shm" in text:
                return ("remove what killed ranks left on those nodes: python -m gems.launch.mpich_cleanup", again)
            return (f"{SETUP} must name what the nodes have",)
        case FailureCause.EXCEPTION:
            if "ImportError" in text or "ModuleNotFoundError" in text:
                return (f"{SETUP}: the nodes' environment lacks a package",)
            return ("the traceback is in logs/ranks.log; fix what it names, and submit again",)
        case FailureCause.KILLED:
            return (*(hint for names, hint in SIGNALS if any(name in text for name in names)), again)
        case FailureCause.UNKNOWN:
            return (f"read the log: python -m jobs logs {run} --lines all",)
    return FIXED.get(cause, ())


def _device_memory(spec: RunSpec | None) -> tuple[str, ...]:
    advice = ["memory=plan with machine.device_bytes, which recomputes or offloads what does not fit"]
    if spec is not None and spec.memory.name != KEEP:
        advice = [f"a smaller memory.limit_bytes, now under memory={spec.memory.name}"]
    if spec is None or spec.parallel.micro_batch_size > 1:
        advice.append("parallel.micro_batch_size: fewer images at once")
    partitions = "" if spec is None else f", now {spec.parallel.partitions}"
    more = f"parallel.partitions: more ranks hold less each{partitions}"
    return (*advice, more, "schedule.activation_cap_bytes: fewer micro-batches in flight")


def _host_memory(spec: RunSpec | None) -> tuple[str, ...]:
    advice = ["+cluster.sbatch.mem: ask for more of the node's memory"]
    if spec is not None and not spec.cluster.supports_mem_option:
        advice = ["cluster.ranks_per_node: fewer ranks share a node's memory"]
    if spec is None or spec.memory.name != KEEP:
        advice.append("machine.host_bytes: the host memory that offloaded activations of a node may take")
    return (*advice, "data.prefetch_steps: fewer batches read ahead")
