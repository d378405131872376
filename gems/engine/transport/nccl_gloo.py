"""Links over process groups of torch.distributed: NCCL between GPUs, gloo between hosts.

A process group matches messages by their order, so each edge has a group of its own. MPI starts the
ranks, and tells them where to meet.
"""

from __future__ import annotations

import datetime
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gems.autograd.torch_internals import stores
from gems.config.cluster import GLOO, NCCL
from gems.engine.transport.links import SLEEP_S, Links, Request
from gems.engine.transport.mpi import Comm, allgather, broadcast, meet, ranks_here
from gems.engine.transport.polling import SPIN_S, WaitState
from gems.errors import ConfigError, LostPeerError
from gems.schedule.edges import edges_of
from gems.schedule.placement import Placement

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NO_TIMEOUT = datetime.timedelta(
    days=7
)  # how long a rank may wait is the run's to say, not a group's
WAKE_S = 0.001  # after which a wait over gloo looks around, though no message was over
_SOURCE = 0
_DESTINATION = 1
T = TypeVar("T")


class _Rendezvous:
    """Where ranks find each other to open groups; collective over `comm`.

    A thread opens the groups, since torch waits for the other ranks without a call of MPI, for
    whose messages they may wait before they get there.
    """

    def __init__(
        self,
        backend: str,
        comm: Comm,
        device: torch.device,
        hang_timeout_s: float,
        waits: WaitState,
    ) -> None:
        self._backend = backend
        self._device = device
        self._rank = comm.rank
        self._hang_timeout_s = hang_timeout_s
        self._waits = waits
        set_device = partial(torch.cuda.set_device, device) if backend == NCCL else None
        self._pool = ThreadPoolExecutor(1, "open groups", initializer=set_device)
        is_here = ranks_here(comm) == comm.size
        tcp_store, self._prefix_store = stores()
        host = "127.0.0.1" if is_here else socket.gethostname()
        server = (
            tcp_store(host, 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
        )
        address = broadcast(comm, None if server is None else (host, server.port))
        meet(comm)  # all have it before any waits in torch for the others, where MPI may not move
        self._store = server or tcp_store(*address, is_master=False, wait_for_workers=False)
        self._gloo_device: Any = None
        if backend == GLOO:
            make = dist.ProcessGroupGloo.create_device
            interface = os.environ.get(GLOO_INTERFACE)
            if interface:
                self._gloo_device = make(interface=interface)
            else:
                self._gloo_device = (
                    make(hostname=host)
                    if is_here
                    else dist.ProcessGroupGloo.create_default_device()
                )

    def open(self, name: str, rank: int, size: int) -> Any:
        """Open the group of `size` ranks that ask for this name; collective over them."""
        return self._in_thread(name, lambda: self._open(name, rank, size))

    def exchange_first(self, name: str, post: Callable[[Tensor], Request]) -> None:
        """Let NCCL connect the ranks of a group, by a message; collective over them."""
        if self._backend == NCCL:
            first = self._in_thread(name, lambda: post(torch.zeros(1, device=self._device)))
            self._wait_until(first.Test, name)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _in_thread(self, name: str, call: Callable[[], T]) -> T:
        called = self._pool.submit(call)
        self._wait_until(called.done, name)
        return called.result()

    def _wait_until(self, is_done: Callable[[], bool], name: str) -> None:
        what = f"other ranks to open {name}"
        who = f"rank {self._rank} "
        self._waits.wait_until(is_done, what, self._hang_timeout_s, WAKE_S, who=who)

    def _open(self, name: str, rank: int, size: int) -> Any:
        store = self._prefix_store(name, self._store)
        if self._backend == NCCL:
            nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            nccl._timeout = NO_TIMEOUT
            return dist.ProcessGroupNCCL(store, rank, size, nccl)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = NO_TIMEOUT
        gloo._devices = [self._gloo_device]
        return dist.ProcessGroupGloo(store, rank, size, gloo)


def _failed(error: RuntimeError) -> LostPeerError:
    """Return the failure of the run for what torch reports of a message."""
    return LostPeerError(f"a message of a process group failed: {error}")


class _Message:
    """A message of NCCL or a sum, which goes on by itself."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def Test(self) -> bool:  # noqa: N802, as mpi4py
        try:
            if not self._work.is_completed():
                return False
            self._work.wait()  # of which the group lets go of the tensor; raises what went wrong
        except RuntimeError as error:
            raise _failed(error) from error
        return True


class _GlooMessage:
    """A message of gloo, which reports its end only to a waiter; so a thread waits for it."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.is_over = False
        self.error: RuntimeError | None = None

    def Test(self) -> bool:  # noqa: N802, as mpi4py
        if self.error is not None:
            raise _failed(self.error) from self.error
        return self.is_over


class _Edge:
    """The process group of an edge, on one of its two ranks.

    `arrived` is set when a message of gloo is over.
    """

    def __init__(self, group: Any, is_gloo: bool, arrived: threading.Event) -> None:
        self._group = group
        self._is_gloo = is_gloo
        self._arrived = arrived
        self._posted: SimpleQueue[_GlooMessage | None] = SimpleQueue()
        if is_gloo:
            threading.Thread(target=self._wait_in_turn, name="gloo", daemon=True).start()

    def send(self, tensor: Tensor) -> _Message | _GlooMessage:
        return self._under_way(lambda: self._group.send([tensor], _DESTINATION, 0))

    def receive(self, tensor: Tensor) -> _Message | _GlooMessage:
        return self._under_way(lambda: self._group.recv([tensor], _SOURCE, 0))

    def close(self) -> None:
        self._posted.put(None)
        self._group.shutdown()
        self._group = None  # whose threads end with it

    def _under_way(self, post: Callable[[], Any]) -> _Message | _GlooMessage:
        try:
            work = post()
        except (
            RuntimeError
        ) as error:  # the peer was gone before, or the message failed while it was posted
            raise _failed(error) from error
        if not self._is_gloo:
            return _Message(work)
        message = _GlooMessage(work)
        self._posted.put(message)
        return message

    def _wait_in_turn(self) -> None:
        while (message := self._posted.get()) is not None:
            try:
                message.work.wait()
                message.is_over = True
            except RuntimeError as error:
                message.error = error
            message.work = None
            self._arrived.set()


class GroupLinks(Links):
    """Messages in one direction, in order; each edge has its own process group.

    Tags are ignored. Messages that are posted to NCCL follow the work on the current stream.
    """

    max_tag = 2**62

    def __init__(
        self,
        rank: int,
        to: Mapping[int, _Edge],
        by: Mapping[int, _Edge],
        arrived: threading.Event,
        is_nccl: bool,
        hang_timeout_s: float,
        wait_state: WaitState | None = None,
    ) -> None:
        # never spins over gloo: the thread that waits for a message needs Python's lock to say that
        # it is over
        spin_s, sleep_s = (SPIN_S, SLEEP_S) if is_nccl else (0.0, WAKE_S)
        super().__init__(rank, hang_timeout_s, spin_s, sleep_s, wait_state)
        self._to = to
        self._by = by
        self._arrived = arrived

    def send(
        self, tensor: Tensor, rank: int, tag: int, done: Callable[[], None] | None = None
    ) -> None:
        """Post a send; keep the tensor until it has left, then call `done`."""
        self._keep_sent(self._to[rank].send(tensor), tensor, done)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Request:
        """Post a receive into a tensor, which may be read after `wait` for the request."""
        request = self._by[rank].receive(tensor)
        self._keep_received(request, tensor)
        return request

    def _sleep(self, seconds: float) -> None:
        """Sleep until a message of gloo is over; it may be over already."""
        self._arrived.wait(seconds)
        self._arrived.clear()

    def close(self) -> None:
        """Shut the groups down."""
        for edge in (*self._to.values(), *self._by.values()):
            edge.close()


class GroupSum:
    """Sums tensors over the ranks of a process group; NCCL sums tensors of a GPU."""

    def __init__(
        self, group: Any, rank: int, is_nccl: bool, hang_timeout_s: float, wait_state: WaitState
    ) -> None:
        self.size = group.size()
        self.sums_on_device = is_nccl
        self._group = group
        self._rank = rank
        self._hang_timeout_s = hang_timeout_s
        self._wait_state = wait_state

    def post_sum(self, tensor: Tensor) -> Request:
        """Post the sum of a contiguous tensor, in place.

        NCCL's follows the work on the current stream.
        """
        try:
            return _Message(self._group.allreduce([tensor]))
        except RuntimeError as error:
            raise _failed(error) from error

    def wait_sum(self, request: Request) -> None:
        """Wait for a posted sum.

        Raises:
            LostPeerError: Another rank is gone.
            StalledError: The sum was not over within the hang timeout.
        """
        what = f"the sum over {self.size} ranks"
        who = f"rank {self._rank} "
        self._wait_state.wait_until(request.Test, what, self._hang_timeout_s, SLEEP_S, who=who)

    def sum_in_place(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over all ranks.

        Raises:
            LostPeerError: Another rank is gone.
            StalledError: The sum was not over within the hang timeout.
        """
        self.wait_sum(self.post_sum(tensor))

    def close(self) -> None:
        """Shut the group down."""
        self._group.shutdown()
        self._group = None  # whose threads end with it


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of a rank: forward and backward links, and the gradient sum."""

    links: tuple[GroupLinks, GroupLinks]
    gradients: GroupSum


def open_groups(
    backend: str,
    comm: Comm,
    device: torch.device,
    placement: Placement,
    num_replicas: int,
    hang_timeout_s: float,
    wait_state: WaitState | None = None,
) -> Groups:
    """Open the groups of every edge of this rank, and that of the copies of its stages.

    Collective over `comm`.
    NCCL connects two ranks when both have posted their first message, for which a thread waits. A
    list may post others first on either side, so a message on each edge goes ahead of it, edge by
    edge in one order.

    Raises:
        ConfigError: NCCL without GPUs, in a torch that lacks it, or with two ranks on one GPU.
        StalledError: another rank did not open a group within the hang timeout.
    """
    if backend == NCCL:
        _check_nccl(comm, device)
    replica, rank = divmod(comm.rank, placement.num_ranks)
    is_nccl = backend == NCCL
    waits = wait_state or WaitState()
    # over a network what is left of a broadcast may move only while its root is in MPI, where no
    # group waits
    waits.progress_mpi = comm.Iprobe
    arrived = threading.Event()
    rendezvous = _Rendezvous(backend, comm, device, hang_timeout_s, waits)
    to: tuple[dict[int, _Edge], ...] = ({}, {})
    by: tuple[dict[int, _Edge], ...] = ({}, {})
    # in one order on all ranks, so that none waits for another in a circle
    for edge in edges_of(placement):
        if rank in (edge.source, edge.destination):
            is_source = rank == edge.source
            name = f"{replica}/{edge.source}-{edge.destination}/{int(edge.is_backward)}"
            group = rendezvous.open(name, _SOURCE if is_source else _DESTINATION, 2)
            ends, peer = (to, edge.destination) if is_source else (by, edge.source)
            ends[edge.is_backward][peer] = link = _Edge(group, not is_nccl, arrived)
            rendezvous.exchange_first(name, link.send if is_source else link.receive)
    forward, backward = (
        GroupLinks(rank, *ends, arrived, is_nccl, hang_timeout_s, waits)
        for ends in zip(to, by, strict=True)
    )
    peers = placement.reduce_group(rank, num_replicas)
    name = f"copies/{peers[0]}"
    same = rendezvous.open(name, peers.index(comm.rank), len(peers))
    sums = GroupSum(same, comm.rank, is_nccl, hang_timeout_s, waits)
    if sums.size > 1:
        rendezvous.exchange_first(name, sums.post_sum)
    rendezvous.close()
    meet(comm)  # all have found each other before the first rank may end, and with it the store
    return Groups((forward, backward), sums)


def _check_nccl(comm: Comm, device: torch.device) -> None:
    if device.type != "cuda" or not dist.is_nccl_available():
        fault = "ranks have no GPU" if device.type != "cuda" else "this torch is built without NCCL"
        raise ConfigError("machine.transport", NCCL, fault, "use machine.transport=mpi or gloo")
    gpu = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    users = [rank for rank, other in enumerate(allgather(comm, gpu)) if other == gpu]
    if len(users) > 1:
        raise ConfigError(
            "machine.transport",
            NCCL,
            f"ranks {users[0]} and {users[1]} share a GPU, which NCCL refuses",
            "use machine.transport=mpi or host, or start one rank for each GPU",
        )
