"""Messages between ranks, over MPI. The only module that imports MPI, which starts it; it needs no torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import mpi4py
import numpy as np

from gems.engine.transport import mpich
from gems.engine.transport.polling import SPIN_S, WAITING
from gems.errors import ConfigError

mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
from mpi4py import MPI

if not MPI.Is_initialized():
    os.environ.update(mpich.settings(MPI.Get_library_version(), os.environ))
    # One call at a time, from whichever thread: on a GPU autograd's polls while ours waits for it.
    MPI.Init_thread(MPI.THREAD_SERIALIZED)

SLEEP_S = 0.00005

Comm = MPI.Intracomm
Request = MPI.Request
Channel = MPI.Prequest
TYPES = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}


class Data(Protocol):
    """What a tensor tells of its memory, on the host or on a device that MPI knows."""

    def data_ptr(self) -> int:
        """Return the address of the first byte."""

    def numel(self) -> int:
        """Return the number of elements."""

    def element_size(self) -> int:
        """Return the bytes of one element."""

    def is_contiguous(self) -> bool:
        """Return whether the elements lie in their own order without gaps."""

    def stride(self) -> Sequence[int]:
        """Return the steps between elements."""

    @property
    def dtype(self) -> Any:
        """The type of the elements."""


Sendable = Data | np.ndarray
T = TypeVar("T")


def world() -> Comm:
    """Return the communicator of all ranks.

    Raises:
        ConfigError: SLURM started another number of tasks than MPI sees (a wrong `srun --mpi=` makes every rank a
            world of its own, without a word).
    """
    comm = MPI.COMM_WORLD
    # MPI_LOCALNRANKS is hydra's: under it the task is hydra's proxy, not this rank
    is_task = "SLURM_PROCID" in os.environ and "MPI_LOCALNRANKS" not in os.environ
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") if is_task else None
    if tasks is not None and int(tasks) != comm.size:
        raise ConfigError(
            "cluster.mpi", os.environ.get("SLURM_MPI_TYPE", "default"),
            f"MPI sees a world of {comm.size} and SLURM started {tasks} tasks",
            "give the type that fits this MPI: MPICH pmi2, Open MPI pmix, Cray MPICH cray_shasta (srun --mpi=list)",
        )  # fmt: skip
    return comm


def library() -> str:
    """Return the first line of the MPI library's own description."""
    return MPI.Get_library_version().split("\n")[0].strip()


def thread_level() -> str:
    """Return which threads may call this MPI: single, funneled, serialized or multiple."""
    levels = ("single", "funneled", "serialized", "multiple")
    known = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    return levels[known.index(MPI.Query_thread())]


class Transport:
    """Sends and receives the bytes of contiguous tensors or arrays on one duplicated communicator.

    A duplicate keeps its messages apart from everybody else's, so tags need only be unique among its own. Posting
    returns at once; large messages move only while someone is inside MPI, so long work calls `poll`. Whoever waits
    spins for `spin_s` and then sleeps `sleep_s` between looks.
    """

    def __init__(
        self, comm: Comm, hang_timeout_s: float = 600.0, spin_s: float = SPIN_S, sleep_s: float = SLEEP_S
    ) -> None:
        self.comm = comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        self.max_tag = cast(int, self.comm.Get_attr(MPI.TAG_UB))
        self._stall_limit_s, self._spin_s, self._sleep_s = hang_timeout_s, spin_s, sleep_s
        self._outgoing: list[tuple[MPI.Request, Sendable, Callable[[], None] | None]] = []
        self._incoming: list[tuple[MPI.Request, Sendable]] = []

    def send(self, tensor: Sendable, rank: int, tag: int, done: Callable[[], None] | None = None) -> None:
        """Post a send; the tensor is held until it has left, and `done` is called then.

        Raises:
            ValueError: the tensor is not contiguous; MPI would send its storage in another order.
        """
        request = self.comm.Isend(_buffer(tensor), rank, tag)
        self._outgoing.append((request, tensor, done))

    def receive(self, tensor: Sendable, rank: int, tag: int) -> MPI.Request:
        """Post a receive into a contiguous tensor, held until it is full.

        Give the request to `wait` before the data is read.
        """
        request = self.comm.Irecv(_buffer(tensor), rank, tag)
        self._incoming.append((request, tensor))
        return request

    def send_channel(self, data: Sendable, rank: int, tag: int) -> Channel:
        """Make a persistent send of `data`: Start() posts it, Test() tells whether it has left, Free() ends it."""
        return self.comm.Send_init(_buffer(data), rank, tag)

    def receive_channel(self, data: Sendable, rank: int, tag: int) -> Channel:
        """Make a persistent receive into `data`, used like a `send_channel`."""
        return self.comm.Recv_init(_buffer(data), rank, tag)

    def poll(self) -> None:
        """Let MPI move data, and frees what has been sent. Cheap when nothing is under way."""
        if self._outgoing:
            kept = []
            for entry in self._outgoing:
                if entry[0].Test():
                    if entry[2] is not None:
                        entry[2]()
                else:
                    kept.append(entry)
            self._outgoing = kept
        elif self._incoming and self._incoming[0][0].Test():  # one test of a pending request progresses all
            del self._incoming[0]

    def wait(self, request: MPI.Request, what: object = "data") -> None:
        """Wait for one request, polling: spinning first, then with short sleeps, so that ranks may share a core.

        Raises:
            StalledError: nothing came within the stall limit.
        """
        if not request.Test():
            self._wait_until(request.Test, what)
        # by identity: all requests that are complete compare equal
        self._incoming = [entry for entry in self._incoming if entry[0] is not request]

    def drain(self) -> None:
        """Wait until all that was posted to be sent has left.

        Raises:
            StalledError: it did not leave within the stall limit.
        """

        def is_empty() -> bool:
            self.poll()
            return not self._outgoing

        if self._outgoing:
            self._wait_until(is_empty, "sends to leave")

    def sum_in_place(self, tensor: Sendable) -> None:
        """Add a contiguous float32 or float64 tensor on the host over all ranks, in place.

        Raises:
            TypeError: another type; MPI adds 16-bit floats wrongly or not at all.
        """
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in TYPES:
            raise TypeError(f"gradients are summed in float32 or float64, not {tensor.dtype}")
        request = self.comm.Iallreduce(MPI.IN_PLACE, [_buffer(tensor), TYPES[name]], MPI.SUM)
        self.wait(request, f"the sum over {self.size} ranks")

    def sum_to_first(self, values: Sequence[float]) -> list[float] | None:
        """Add numbers up over all ranks and gives the sums on rank 0, None elsewhere; collective."""
        mine = np.array(values, dtype=np.float64)
        total = np.zeros_like(mine) if self.rank == 0 else None
        self.wait(self.comm.Ireduce(mine, total, MPI.SUM), "the sum on rank 0")
        return None if total is None else [float(value) for value in total]

    def post_maximum(self, mine: np.ndarray, of_all: np.ndarray) -> Request:
        """Post the maximum over all ranks of each of some float64 numbers; collective.

        Give the request to `wait` before `of_all` is read; until then both must stay as they are.
        """
        return self.comm.Iallreduce(mine, of_all, MPI.MAX)

    def barrier(self) -> None:
        """Wait for all ranks, without keeping a core busy as MPI's own barrier does."""
        self.wait(self.comm.Ibarrier(), "the other ranks")

    def _wait_until(self, is_done: Callable[[], bool], what: object) -> None:
        begin = time.perf_counter()
        spin_until, deadline = begin + self._spin_s, begin + self._stall_limit_s
        WAITING.begin(what)
        while not is_done():
            now = time.perf_counter()
            if now > deadline:
                deadline = now + WAITING.more_s(begin, self._stall_limit_s, what, f"rank {self.rank} ")
            if now > spin_until:
                time.sleep(self._sleep_s)
            if self._outgoing:
                self.poll()
        WAITING.what = None

    def close(self) -> None:
        """Free the duplicated communicator; collective."""
        self.comm.Free()


def _buffer(data: Sendable) -> Any:
    """Return the data's own bytes, whatever its type: MPI lacks bfloat16, and a raw address serves host and device."""
    if isinstance(data, np.ndarray):
        return MPI.memory.frombuffer(data)
    if not data.is_contiguous():
        raise ValueError(f"only a contiguous tensor can be sent, not one of strides {data.stride()}")
    return MPI.memory.fromaddress(data.data_ptr(), data.numel() * data.element_size())


def ranks_here(comm: Comm) -> int:
    """Return how many ranks of `comm` share this rank's machine, its cores and memory; collective.

    A machine is one start of a kernel: nodes of a SLURM that runs on one machine, and containers, share it, though MPI
    takes them for several. Where the system does not say, MPI's answer counts.
    """
    machine = _machine()
    if all(known := comm.allgather(machine)):
        return known.count(machine)
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = here.size
    here.Free()
    return size


def _machine() -> str:
    """Return what tells this start of this kernel from all others; nothing where the system does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def gather_here(comm: Comm, mine: T) -> list[T]:
    """Return what each rank of `comm` on this rank's node gave, in their order; collective."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    all_of_them = here.allgather(mine)
    here.Free()
    return cast(list[T], all_of_them)


def gpu_support() -> bool:
    """Ask the MPI library whether it takes device pointers (MPIX_Query_cuda_support); False when it cannot say."""
    import ctypes

    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1" or os.environ.get("MV2_USE_CUDA") == "1"
    query.restype = ctypes.c_int
    return bool(query())


def abort(code: int) -> None:
    """End all ranks of the job with an exit code."""
    MPI.COMM_WORLD.Abort(code)
