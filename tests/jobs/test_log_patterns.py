"""Words of kernels, SLURM, MPI and libraries as they are really written, and the class that each tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from gems.runs.failure_cause import FailureCause
from jobs.diagnosis.causes import (
    HEAD_BYTES,
    TAIL_BYTES,
    classify_text,
    read_lines,
    scan_line,
    scan_lines,
)

LIMIT = (
    "slurmstepd: error: *** JOB 123 ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE TO TIME LIMIT ***"
)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (LIMIT, FailureCause.TIME_LIMIT),
        (
            (
                "slurmstepd: error: *** STEP 7.0 ON n2 CANCELLED AT 2026-11-20T12:00:00 DUE TO"
                " PREEMPTION ***"
            ),
            FailureCause.PREEMPTED,
        ),
        (
            (
                "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE TO NODE"
                " FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
            ),
            FailureCause.NODE,
        ),
        ("srun: error: Node failure on n2", FailureCause.NODE),
        (
            "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-20T12:00:00 ***",
            FailureCause.CANCELLED,
        ),
        (
            (
                "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. "
                "Some of your processes may have been killed by the cgroup out-of-memory handler."
            ),
            FailureCause.HOST_MEMORY,
        ),
        (
            (
                "slurmstepd: error: Detected 2 oom_kill events in StepId=7.0. Some of the step"
                " tasks have been OOM Killed."
            ),
            FailureCause.HOST_MEMORY,
        ),
        (
            (
                "slurmstepd: error: StepId=7.0 exceeded memory limit (412345678 > 209715200), being"
                " killed"
            ),
            FailureCause.HOST_MEMORY,
        ),
        ("srun: error: n2: task 3: Out Of Memory", FailureCause.HOST_MEMORY),
        ("=>> PBS: job killed: mem 17825792kb exceeded limit 16777216kb", FailureCause.HOST_MEMORY),
        ("=>> PBS: job killed: vmem 9kb exceeded limit 8kb", FailureCause.HOST_MEMORY),
        (
            "Out of memory: Killed process 4242 (python) total-vm:92031244kB",
            FailureCause.HOST_MEMORY,
        ),
        (
            (
                "RuntimeError: [enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't"
                " allocate memory"
            ),
            FailureCause.HOST_MEMORY,
        ),
        (
            "3: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            FailureCause.DEVICE_MEMORY,
        ),
        (
            "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 64.00 GiB",
            FailureCause.DEVICE_MEMORY,
        ),
        ("RuntimeError: CUDA error: out of memory", FailureCause.DEVICE_MEMORY),
        (
            "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
            FailureCause.DEVICE,
        ),
        (
            (
                "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen"
                " off the bus."
            ),
            FailureCause.DEVICE,
        ),
        (
            "NVRM: Xid (PCI:0000:c1:00): 48, pid=77, name=python, DBE (double bit error)",
            FailureCause.DEVICE,
        ),
        (
            "OSError: [Errno 28] No space left on device: '/scratch/x/trace/rank0003.h5'",
            FailureCause.FILE_SYSTEM,
        ),
        ("OSError: [Errno 122] Disk quota exceeded", FailureCause.FILE_SYSTEM),
        ("OSError: [Errno 116] Stale file handle", FailureCause.FILE_SYSTEM),
        (
            (
                "[rank 0] ERROR failed on node n1 before the first step (start): cluster.mpi=none: "
                "MPI sees a world of 1 and SLURM started 4 tasks; give the type that fits this MPI"
            ),
            FailureCause.WRONG_MPI,
        ),
        (
            "ImportError: libmpi.so.12: cannot open shared object file: No such file or directory",
            FailureCause.WRONG_MPI,
        ),
        ("RuntimeError: cannot load MPI library", FailureCause.WRONG_MPI),
        (
            (
                'The application appears to have been direct launched using "srun", but OMPI was'
                " not built with SLURM's PMI support"
            ),
            FailureCause.WRONG_MPI,
        ),
        ("PMI2_Job_GetId failed failed", FailureCause.WRONG_MPI),
        ("slurmstepd: error: unsupported PMI version PMIx", FailureCause.WRONG_MPI),
        (
            "MPIDI_POSIX_comm_bootstrap(288): Out of memory (unable to allocate)",
            FailureCause.LAUNCHER,
        ),
        ("MPIR_Init: unable to open shared memory", FailureCause.LAUNCHER),
        (
            "slurmstepd: error: execve(): /home/x/venv/bin/python: No such file or directory",
            FailureCause.LAUNCHER,
        ),
        (
            (
                "srun: error: Unable to create step for job 7: More processors requested than"
                " permitted"
            ),
            FailureCause.LAUNCHER,
        ),
        (
            "/var/spool/slurmd/job00007/slurm_script: line 9: module: command not found",
            FailureCause.LAUNCHER,
        ),
        ("KeyError: 'label'", FailureCause.EXCEPTION),
        ("mpi4py.MPI.Exception: Other MPI error, error stack:", FailureCause.EXCEPTION),
        (
            (
                "0: MPIDI_OFI_send(417): OFI call tinjectdata failed (default nic=eth0:"
                " Input/output error)"
            ),
            FailureCause.EXCEPTION,
        ),
        (
            (
                "0: MPIDI_OFI_handle_cq_error(788): OFI poll failed (default nic=eth0: Input/output"
                " error)"
            ),
            FailureCause.EXCEPTION,
        ),
        (
            "[1732.1] UCX  ERROR ibv_create_qp failed: Cannot allocate memory",
            FailureCause.EXCEPTION,
        ),
        (
            (
                "OSError: [Errno 28] Can't write data (file write failed: errno = 28, error message"
                " = 'No space left on device')"
            ),
            FailureCause.FILE_SYSTEM,
        ),
    ],
)
def test_words_of_each_class(line: str, cause: FailureCause) -> None:
    found = scan_line(line, "log")
    assert found is not None and found.cause is cause


@pytest.mark.parametrize(
    "line",
    [
        "hello from 3",
        "step 12 loss 0.61",
        "1: UserWarning: Error bars are not drawn",
        "[rank 0] ERROR failed on node n1 in step 3, action 0F1: StalledError",
        "StalledError: nothing came",
        "slurmstepd: error: task 3 ended",
        "cat: write error: No space left on device",
        "NVRM: Xid (PCI:0000:c1:00): 13, Graphics Exception",
    ],
)
def test_other_words_tell_nothing(line: str) -> None:
    assert scan_line(line, "log") is None


def test_a_line_gives_its_rank_node_and_time() -> None:
    labelled = scan_line(" 12: OSError: [Errno 122] Disk quota exceeded", "log")
    assert labelled is not None and (labelled.rank, labelled.text) == (
        12,
        "OSError: [Errno 122] Disk quota exceeded",
    )
    failure = scan_line("srun: error: Node failure on nid-001.site", "log")
    assert failure is not None and failure.node == "nid-001.site"
    limit = scan_line(LIMIT, "log")
    assert limit is not None and limit.time_ns is not None and limit.time_ns % 10**9 == 0


def test_what_may_follow_from_a_rank_that_is_gone_is_marked() -> None:
    for line in (
        "mpi4py.MPI.Exception: Other MPI error",
        (
            "gems.errors.LostPeerError: a message of a process group failed: NCCL communicator was"
            " aborted."
        ),
        "ConnectionResetError: [Errno 104]",
        "MPICH ERROR [Rank 1]",
        "OFI call tsend failed (nic=hsn0: Input/output error)",
    ):
        found = scan_line(line, "log")
        assert found is not None and found.may_follow, line
    own = scan_line("ValueError: bad", "log")
    assert own is not None and not own.may_follow


def test_a_thousand_ranks_that_say_the_same_are_a_few_findings() -> None:
    lines = [f"{rank}: torch.OutOfMemoryError: CUDA out of memory." for rank in range(1024)] + [
        LIMIT
    ]
    found = scan_lines(lines, "log")
    assert [each.rank for each in found] == [0, 1, 2, None]


def test_exceptions_without_words_of_a_class_have_none() -> None:
    assert classify_text("ValueError: bad") is None
    assert classify_text("OSError: [Errno 5] Input/output error") is FailureCause.FILE_SYSTEM


def test_of_a_long_log_the_first_and_the_last_lines_are_read(tmp_path: Path) -> None:
    log = tmp_path / "ranks.log"
    middle = b"x" * 1023 + b"\n"
    log.write_bytes(
        b"first\n" + middle * ((HEAD_BYTES + TAIL_BYTES) // 1024 + 64) + b"last\xff\rend\n"
    )
    lines = list(read_lines(log))
    assert lines[0] == "first" and lines[-3:] == ["last\ufffd", "end", ""]
    assert sum(map(len, lines)) < HEAD_BYTES + TAIL_BYTES
    assert list(read_lines(tmp_path / "none")) == []
