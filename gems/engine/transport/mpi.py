"""Messages between ranks, over MPI.

This is the only module that imports MPI, and the import starts MPI. It needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Union, cast

import mpi4py
import numpy as np

from gems.engine.transport.environment import mpich_settings
from gems.engine.transport.links import SLEEP_S, Links
from gems.engine.transport.polling import SPIN_S, WaitState
from gems.errors import ConfigError

if TYPE_CHECKING:
    import torch

mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
from mpi4py import MPI

# not in a process that only reads samples: there `_clean_start` of the reader sets this
if not MPI.Is_initialized() and os.environ.get("MPI4PY_RC_INITIALIZE") != "false":
    os.environ.update(mpich_settings(MPI.Get_library_version(), os.environ))
    # One call at a time, from any thread: on a GPU, autograd's thread polls while the main thread
    # waits for it.
    MPI.Init_thread(MPI.THREAD_SERIALIZED)

# GPU queries of MPICH and Open MPI, of MPICH only, of Open MPI only
GPU_QUERIES = ("MPIX_Query_cuda_support", "MPIX_Query_hip_support", "MPIX_Query_rocm_support")
MEET_SLEEP_S = 0.0005

Comm = MPI.Intracomm
Request = MPI.Request
PersistentRequest = MPI.Prequest
TYPES = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}


Sendable = Union["torch.Tensor", np.ndarray]  # on the host, or on a device that MPI supports
T = TypeVar("T")


def world() -> Comm:
    """Return the communicator of all ranks.

    Raises:
        ConfigError: The number of tasks that SLURM started differs from the number of ranks that
            MPI sees. A wrong `srun --mpi=` silently makes every rank a world of its own.
    """
    comm = MPI.COMM_WORLD
    # the hydra launcher sets MPI_LOCALNRANKS; under it the SLURM task is its proxy, not this rank
    is_task = "SLURM_PROCID" in os.environ and "MPI_LOCALNRANKS" not in os.environ
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") if is_task else None
    if tasks is not None and int(tasks) != comm.size:
        raise ConfigError(
            "cluster.mpi",
            os.environ.get("SLURM_MPI_TYPE", "default"),
            f"MPI sees a world of {comm.size} and SLURM started {tasks} tasks",
            "give the type that fits this MPI: MPICH pmi2, Open MPI pmix, Cray MPICH cray_shasta"
            " (srun --mpi=list)",
        )
    return comm


def library() -> str:
    """Return the first line of the MPI library's own description."""
    return MPI.Get_library_version().split("\n")[0].strip()


def thread_level() -> str:
    """Return which threads may call this MPI: single, funneled, serialized or multiple."""
    levels = ("single", "funneled", "serialized", "multiple")
    return next(
        level for level in levels if getattr(MPI, f"THREAD_{level.upper()}") == MPI.Query_thread()
    )


class Transport(Links):
    """Sends and receives the bytes of contiguous tensors or arrays on its own MPI communicator.

    Large messages move only while the process is inside MPI, so long work must call `poll`.
    """

    sums_on_device = False

    def __init__(
        self,
        comm: Comm,
        hang_timeout_s: float = 600.0,
        spin_s: float = SPIN_S,
        sleep_s: float = SLEEP_S,
        wait_state: WaitState | None = None,
    ) -> None:
        super().__init__(comm.rank, hang_timeout_s, spin_s, sleep_s, wait_state)
        self.comm = comm.Dup()  # tags need to be unique only within this transport
        self.size = comm.size
        self.max_tag = cast(int, self.comm.Get_attr(MPI.TAG_UB))

    @classmethod
    def of_group(cls, comm: Comm, group: int, *args: Any, **options: Any) -> Self:
        """Open a transport between the ranks of `comm` with the same group; collective.

        The ranks keep their order.

        The further arguments are those of the class.
        """
        ranks = cast(Comm, comm.Split(group, comm.rank))
        transport = cls(ranks, *args, **options)
        ranks.Free()
        return transport

    def send(
        self, tensor: Sendable, rank: int, tag: int, done: Callable[[], None] | None = None
    ) -> None:
        """Post a send; keep the tensor until it has left, then call `done`.

        Raises:
            ValueError: The tensor is not contiguous, so MPI would send its storage in another
                order. Or it is on a GPU and this MPI takes no device pointers: it would read them
                as host pointers.
        """
        self._keep_sent(self.comm.Isend(_buffer(tensor), rank, tag), tensor, done)

    def receive(self, tensor: Sendable, rank: int, tag: int) -> MPI.Request:
        """Post a receive into a contiguous tensor, which may be read after `wait`."""
        request = self.comm.Irecv(_buffer(tensor), rank, tag)
        self._keep_received(request, tensor)
        return request

    def persistent_send(self, data: Sendable, rank: int, tag: int) -> PersistentRequest:
        """Create a persistent send of `data`.

        Start() posts it, Test() returns whether it has left, Free() ends it.
        """
        return self.comm.Send_init(_buffer(data), rank, tag)

    def persistent_receive(self, data: Sendable, rank: int, tag: int) -> PersistentRequest:
        """Create a persistent receive into `data`, used like `persistent_send`."""
        return self.comm.Recv_init(_buffer(data), rank, tag)

    def sum_in_place(self, tensor: Sendable) -> None:
        """Sum a contiguous float32 or float64 tensor on the host over all ranks, in place.

        Raises:
            TypeError: The tensor has another type; MPI adds 16-bit floats wrongly or not at all.
        """
        self.wait_sum(self.post_sum(tensor))

    def post_sum(self, tensor: Sendable) -> Request:
        """Post the sum of a tensor over all ranks, in place, as `sum_in_place` does.

        The tensor may not be used until `wait_sum` for the request has returned.

        Raises:
            TypeError: The tensor is neither float32 nor float64.
        """
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in TYPES:
            raise TypeError(f"gradients are summed in float32 or float64, not {tensor.dtype}")
        return self.comm.Iallreduce(MPI.IN_PLACE, [_buffer(tensor), TYPES[name]], MPI.SUM)

    def wait_sum(self, request: Request) -> None:
        """Wait for a posted sum."""
        self.wait(request, f"the sum over {self.size} ranks")

    def sum_to_first(self, values: Sequence[float]) -> list[float] | None:
        """Return the sums of numbers over all ranks on rank 0 and None elsewhere; collective."""
        local = np.array(values, dtype=np.float64)
        total = np.zeros_like(local) if self.rank == 0 else None
        self.wait(self.comm.Ireduce(local, total, MPI.SUM), "the sum on rank 0")
        return None if total is None else [float(value) for value in total]

    def post_maximum(self, local: np.ndarray, of_all: np.ndarray) -> Request:
        """Post the elementwise maximum of a float64 array over all ranks; collective.

        Neither array may be used until `wait` for the request has returned.
        """
        return self.comm.Iallreduce(local, of_all, MPI.MAX)

    def barrier(self, sleep_s: float | None = None) -> None:
        """Wait for all ranks without keeping a core busy, unlike MPI's own barrier.

        If the wait is long, give a larger `sleep_s` to poll less often.
        """
        request = self.comm.Ibarrier()
        self.wait_until(request.Test, "the other ranks", sleep_s=sleep_s)

    def round_trip_s(self, sent: Sendable, got: Sendable) -> float:
        """Return the seconds of a message from rank 0 to rank 1 and another one back.

        The call is collective over two ranks.
        """
        other = 1 - self.rank
        begin = time.perf_counter()
        if self.rank == 0:
            self.send(sent, other, 1)
        self.wait(self.receive(got, other, 1), "a message of the probe")
        if self.rank == 1:
            self.send(sent, other, 1)
        seconds = time.perf_counter() - begin
        self.drain()
        return seconds

    def close(self) -> None:
        """Free the duplicated communicator; collective."""
        self.comm.Free()


def _buffer(data: Sendable) -> Any:
    """Return a view of the bytes: MPI has no bfloat16, and an address works on host and device."""
    if isinstance(data, np.ndarray):
        return MPI.memory.frombuffer(data)
    if not data.is_contiguous():
        raise ValueError(
            f"only a contiguous tensor can be sent, not one of strides {data.stride()}"
        )
    if data.is_cuda and not gpu_support():
        raise ValueError(
            f"this MPI takes no device pointers, and the tensor is on {data.device}: use"
            " machine.transport=host"
        )
    return MPI.memory.fromaddress(data.data_ptr(), data.numel() * data.element_size())


def meet(comm: Comm) -> None:
    """Wait for all ranks of `comm` without keeping a core busy, unlike MPI's calls; collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(MEET_SLEEP_S)


def allgather(comm: Comm, value: T) -> list[T]:
    """Return the values of all ranks, in rank order; collective.

    The ranks wait for each other without keeping a core busy.
    """
    meet(comm)
    return cast(list[T], comm.allgather(value))


def broadcast(comm: Comm, value: T | None, root: int = 0) -> T:
    """Return the value of the rank `root`; collective.

    The ranks wait for each other without keeping a core busy.
    """
    meet(comm)
    return cast(T, comm.bcast(value, root))


def ranks_here(comm: Comm) -> int:
    """Return the number of ranks of `comm` on this rank's machine; collective.

    Ranks on one machine share its cores and memory. Containers, and the nodes of a SLURM that runs
    on one machine, share a kernel's boot ID, although MPI takes them for several machines. If there
    is no boot ID, MPI decides.
    """
    machine = ""
    with contextlib.suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if all(known := allgather(comm, machine)):
        return known.count(machine)
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = here.size
    here.Free()
    return size


def gather_here(comm: Comm, value: T) -> list[T]:
    """Return the values of the ranks of `comm` on this rank's node, in rank order; collective."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    all_of_them = here.allgather(value)
    here.Free()
    return cast(list[T], all_of_them)


@functools.cache
def gpu_support() -> bool:
    """Return whether the MPI library says that it takes device pointers of CUDA or ROCm."""
    import ctypes

    is_supported = False
    with contextlib.suppress(OSError):
        library = ctypes.CDLL(MPI.__file__)
        for name in GPU_QUERIES:
            query = getattr(library, name, None)
            if query is not None:
                query.restype = ctypes.c_int
                is_supported = is_supported or bool(query())
    return (
        is_supported
        or os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
        or os.environ.get("MV2_USE_CUDA") == "1"
    )


def abort(code: int) -> None:
    """End all ranks of the job with an exit code."""
    MPI.COMM_WORLD.Abort(code)
