"""Words of kernels, SLURM, MPI and libraries as they are really written, and the class that each tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.diagnosis.judge import Cause
from jobs.diagnosis.log_patterns import HEAD_BYTES, TAIL_BYTES, cause_of_words, findings_in, lines_of, of_line

LIMIT = "slurmstepd: error: *** JOB 123 ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE TO TIME LIMIT ***"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (LIMIT, Cause.TIME_LIMIT),
        ("slurmstepd: error: *** STEP 7.0 ON n2 CANCELLED AT 2026-11-20T12:00:00 DUE TO PREEMPTION ***", Cause.PREEMPTED),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG "
         "FOR DETAILS ***", Cause.NODE),
        ("srun: error: Node failure on n2", Cause.NODE),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-20T12:00:00 ***", Cause.CANCELLED),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have been killed by "
         "the cgroup out-of-memory handler.", Cause.HOST_MEMORY),
        ("slurmstepd: error: Detected 2 oom_kill events in StepId=7.0. Some of the step tasks have been OOM Killed.",
         Cause.HOST_MEMORY),
        ("slurmstepd: error: StepId=7.0 exceeded memory limit (412345678 > 209715200), being killed", Cause.HOST_MEMORY),
        ("srun: error: n2: task 3: Out Of Memory", Cause.HOST_MEMORY),
        ("Out of memory: Killed process 4242 (python) total-vm:92031244kB", Cause.HOST_MEMORY),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory", Cause.HOST_MEMORY),
        ("3: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", Cause.DEVICE_MEMORY),
        ("torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 64.00 GiB", Cause.DEVICE_MEMORY),
        ("RuntimeError: CUDA error: out of memory", Cause.DEVICE_MEMORY),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", Cause.DEVICE),
        ("NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", Cause.DEVICE),
        ("NVRM: Xid (PCI:0000:c1:00): 48, pid=77, name=python, DBE (double bit error)", Cause.DEVICE),
        ("OSError: [Errno 28] No space left on device: '/scratch/x/trace/rank0003.h5'", Cause.FILE_SYSTEM),
        ("OSError: [Errno 122] Disk quota exceeded", Cause.FILE_SYSTEM),
        ("OSError: [Errno 116] Stale file handle", Cause.FILE_SYSTEM),
        ("gems: rank 0 on node n1 failed before the first step (start): cluster.mpi=none: MPI sees a world of 1 and SLURM "
         "started 4 tasks; give the type that fits this MPI", Cause.WRONG_MPI),
        ("ImportError: libmpi.so.12: cannot open shared object file: No such file or directory", Cause.WRONG_MPI),
        ("RuntimeError: cannot load MPI library", Cause.WRONG_MPI),
        ("The application appears to have been direct launched using \"srun\", but OMPI was not built with SLURM's PMI "
         "support", Cause.WRONG_MPI),
        ("PMI2_Job_GetId failed failed", Cause.WRONG_MPI),
        ("slurmstepd: error: unsupported PMI version PMIx", Cause.WRONG_MPI),
        ("MPIDI_POSIX_comm_bootstrap(288): Out of memory (unable to allocate)", Cause.LAUNCHER),
        ("MPIR_Init: unable to open shared memory", Cause.LAUNCHER),
        ("slurmstepd: error: execve(): /home/x/venv/bin/python: No such file or directory", Cause.LAUNCHER),
        ("srun: error: Unable to create step for job 7: More processors requested than permitted", Cause.LAUNCHER),
        ("/var/spool/slurmd/job00007/slurm_script: line 9: module: command not found", Cause.LAUNCHER),
        ("KeyError: 'label'", Cause.EXCEPTION),
        ("mpi4py.MPI.Exception: Other MPI error, error stack:", Cause.EXCEPTION),
    ],
)  # fmt: skip
def test_words_of_each_class(line: str, cause: Cause) -> None:
    found = of_line(line, "log")
    assert found is not None and found.cause is cause


@pytest.mark.parametrize(
    "line",
    [
        "hello from 3", "step 12 loss 0.61", "1: UserWarning: Error bars are not drawn",
        "gems: rank 0 on node n1 failed in step 3, action 0F1: StalledError", "StalledError: nothing came",
        "slurmstepd: error: task 3 ended", "NVRM: Xid (PCI:0000:c1:00): 13, Graphics Exception",
    ],
)  # fmt: skip
def test_other_words_tell_nothing(line: str) -> None:
    assert of_line(line, "log") is None


def test_a_line_gives_its_rank_node_and_time() -> None:
    labelled = of_line(" 12: OSError: [Errno 122] Disk quota exceeded", "log")
    assert labelled is not None and (labelled.rank, labelled.text) == (12, "OSError: [Errno 122] Disk quota exceeded")
    failure = of_line("srun: error: Node failure on nid-001.site", "log")
    assert failure is not None and failure.node == "nid-001.site"
    limit = of_line(LIMIT, "log")
    assert limit is not None and limit.time_ns is not None and limit.time_ns % 10**9 == 0


def test_what_may_follow_from_a_rank_that_is_gone_is_marked() -> None:
    for line in ("mpi4py.MPI.Exception: Other MPI error", "ConnectionResetError: [Errno 104]", "MPICH ERROR [Rank 1]"):
        found = of_line(line, "log")
        assert found is not None and found.may_follow, line
    own = of_line("ValueError: bad", "log")
    assert own is not None and not own.may_follow


def test_a_thousand_ranks_that_say_the_same_are_a_few_findings() -> None:
    lines = [f"{rank}: torch.OutOfMemoryError: CUDA out of memory." for rank in range(1024)] + [LIMIT]
    found = findings_in(lines, "log")
    assert [each.rank for each in found] == [0, 1, 2, None]


def test_exceptions_without_words_of_a_class_have_none() -> None:
    assert cause_of_words("ValueError: bad") is None
    assert cause_of_words("OSError: [Errno 5] Input/output error") is Cause.FILE_SYSTEM


def test_of_a_long_log_the_first_and_the_last_lines_are_read(tmp_path: Path) -> None:
    log = tmp_path / "ranks.log"
    middle = b"x" * 1023 + b"\n"
    log.write_bytes(b"first\n" + middle * ((HEAD_BYTES + TAIL_BYTES) // 1024 + 64) + b"last\xff\rend\n")
    lines = list(lines_of(log))
    assert lines[0] == "first" and lines[-3:] == ["last\ufffd", "end", ""]
    assert sum(map(len, lines)) < HEAD_BYTES + TAIL_BYTES
    assert list(lines_of(tmp_path / "none")) == []
