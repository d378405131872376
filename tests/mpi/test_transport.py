"""Messages between ranks: order of memory, large messages under compute, sums, waits and clocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from gems.engine.step_loop import measure_offset
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.links import Links
from gems.engine.transport.mpi import Transport, allgather, broadcast
from gems.engine.transport.nccl_gloo import open_groups
from gems.engine.transport.p2p_channels import P2PChannels
from gems.engine.transport.staging import HostStaging
from gems.errors import ConfigError, LostPeerError, StalledError
from gems.models.build import TensorSpec
from gems.schedule.action import Action, Kind
from gems.schedule.placement import Placement, bidirectional, linear
from gems.schedule.schedule import Schedule
from tests.helpers.device import DEVICE, ON_GPU
from tests.helpers.rig import staging_for_mpi

LARGE = 1 << 24  # 64 MiB of float32
LIMIT_S = 60.0


@pytest.fixture
def transport(comm):
    opened = Transport(comm, hang_timeout_s=LIMIT_S)
    yield opened
    opened.drain()
    opened.close()


@pytest.fixture
def folder(comm, tmp_path) -> Path:
    """A folder that all ranks see.

    Flags in files tell things without a call of MPI, which would move messages.
    """
    return broadcast(comm, tmp_path)


def _all_transfers(num_micro_batches: int, placement: Placement) -> Schedule:
    rows = tuple(
        tuple(
            Action(kind, stage, m, direction)
            for direction, stage in placement.stages_on(rank)
            for m in range(num_micro_batches)
            for kind, has in (
                (Kind.RECV_F, stage > 0),
                (Kind.SEND_B, stage > 0),
                (Kind.RECV_B, stage < placement.num_stages - 1),
                (Kind.SEND_F, stage < placement.num_stages - 1),
            )
            if has
        )
        for rank in range(placement.num_ranks)
    )
    return Schedule("test", num_micro_batches, placement, rows)


@pytest.mark.parametrize("by", ["mpi", "gloo"])
def test_both_directions_at_once_in_any_layout(comm, by):
    """The full exchange of a bidirectional pipeline, every tensor its own values, each way in its own order.

    By MPI the sides post in another order; gloo takes messages by their order.
    """
    size = comm.size
    n = 3
    specs = (TensorSpec("x", (2, 3, 4, 5), torch.bfloat16), TensorSpec("index", (7,), torch.int64))
    schedule = _all_transfers(2 * n, bidirectional(size))
    recorder = Recorder(None, DEVICE)
    links: Sequence[Links] = [Transport(comm, LIMIT_S) for _ in range(2)]
    if by == "gloo":
        links = open_groups("gloo", comm, torch.device("cpu"), schedule.placement, 1, LIMIT_S).links
    staging = HostStaging(DEVICE) if by == "gloo" and ON_GPU else staging_for_mpi()
    channels = P2PChannels(schedule, comm.rank, [specs] * (size - 1), links, staging, recorder)

    def made(action: Action) -> tuple[torch.Tensor, ...]:
        seed = ((action.stage * 2 + action.direction) * 100 + action.micro_batch) * 2 + (
            action.kind is Kind.SEND_B
        )
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 3, 5, 4, generator=generator).bfloat16().transpose(2, 3)
        x = x if action.micro_batch % 2 else x.to(memory_format=torch.channels_last)
        index = torch.randint(0, 1 << 40, (7,), generator=generator)
        return (x,) if action.kind is Kind.SEND_B else (x, index)

    receives = []
    sends = []
    for direction in (0, 1):
        stage = schedule.placement.ranks[direction].index(comm.rank)
        for m in range(direction * n, (direction + 1) * n):
            if stage:
                receives.append((Action(Kind.RECV_F, stage, m, direction), Kind.SEND_F, -1))
                sends.append(Action(Kind.SEND_B, stage, m, direction))
            if stage < size - 1:
                receives.append((Action(Kind.RECV_B, stage, m, direction), Kind.SEND_B, 1))
                sends.append(Action(Kind.SEND_F, stage, m, direction))
    for receive, _, _ in receives:
        channels.post_receive(receive)
    for send in sends if by == "gloo" else reversed(sends):
        channels.post_send(send, made(send))
    for receive, kind, step in reversed(receives):
        expected = made(Action(kind, receive.stage + step, receive.micro_batch, receive.direction))
        got = channels.wait(receive)
        assert len(got) == len(expected)
        for tensor, wanted in zip(got, expected, strict=True):
            assert tensor.is_contiguous() and torch.equal(tensor, wanted), receive
        channels.release(got)
    channels.drain()
    assert recorder.memory.held_bytes == 0
    for each in links:
        each.close()


def test_sums_over_groups_are_those_of_the_copies_of_a_stage(comm):
    """Two replicas of a bidirectional pipeline of two ranks: all four hold both stages."""
    groups = open_groups("gloo", comm, torch.device("cpu"), bidirectional(2), 2, LIMIT_S)
    values = torch.full((5,), 10.0**comm.rank, dtype=torch.float64)
    groups.gradients.sum_in_place(values)
    assert groups.gradients.size == 4 and bool((values == 1111).all())
    apart = open_groups("gloo", comm, torch.device("cpu"), linear(2), 2, LIMIT_S)
    values = torch.full((5,), 10.0**comm.rank)
    apart.gradients.sum_in_place(values)
    assert apart.gradients.size == 2 and bool(
        (values == (101 if comm.rank % 2 == 0 else 1010)).all()
    )
    comm.Barrier()
    for opened in (groups, apart):
        for each in (*opened.links, opened.gradients):
            each.close()


def test_a_peer_that_sends_nothing_is_named_after_the_hang_timeout(comm):
    links, _ = open_groups("gloo", comm, torch.device("cpu"), linear(comm.size), 1, 0.2).links
    if comm.rank == 1:
        request = links.receive(torch.empty(3), 0, 0)
        with pytest.raises(StalledError, match=r"rank 1 waited 0\.2 s for 1RECV_F0"):
            links.wait(request, Action(Kind.RECV_F, 1, 0))
    comm.Barrier()
    if comm.rank == 0:
        links.send(torch.ones(3), 1, 0)
        links.drain()
    elif comm.rank == 1:
        links.wait(request)


def test_a_peer_that_is_gone_ends_messages_and_sums(comm):
    """A message that was posted before fails as it is waited for, those after as they are posted."""
    groups = open_groups("gloo", comm, torch.device("cpu"), linear(2), 2, LIMIT_S)
    forward, backward = groups.links
    failure = partial(
        pytest.raises, LostPeerError, match=r"^a message of a process group failed: .*by peer"
    )
    if comm.rank == 1:
        posted = forward.receive(torch.empty(3), 0, 0)
    comm.Barrier()
    if comm.rank == 1:
        with failure():
            forward.wait(posted, Action(Kind.RECV_F, 1, 0))
        with failure():
            forward.receive(torch.empty(3), 0, 0)
        with failure():
            backward.send(torch.empty(3), 0, 0)
            backward.drain()
    if comm.rank == 2:
        with failure():
            groups.gradients.sum_in_place(torch.ones(3))
    for each in (forward, backward, groups.gradients):
        each.close()


def test_nccl_needs_gpus_of_its_own(comm):
    wanted = "share a GPU" if ON_GPU else "ranks have no GPU; use machine.transport=mpi or gloo"
    with pytest.raises(ConfigError, match=wanted):
        open_groups("nccl", comm, DEVICE, linear(comm.size), 1, LIMIT_S)


def test_a_large_message_moves_while_both_sides_compute_and_poll(comm, transport, folder):
    """Also when another message has come already, which is not waited for yet.

    Polling must look past it.
    """
    flag = folder / "left"
    work = torch.rand(64, 64)
    deadline = time.monotonic() + LIMIT_S
    if comm.rank == 0:
        left = []
        transport.send(torch.ones(8), 1, 1)
        transport.drain()
        transport.send(torch.arange(LARGE, dtype=torch.float32), 1, 2, lambda: left.append(True))
        while not left and time.monotonic() < deadline:
            work = torch.tanh(work @ work)
            transport.poll()
        (folder / "written").write_text("left" if left else "never")
        (folder / "written").rename(flag)  # whoever sees the flag sees its text
        assert left
    elif comm.rank == 1:
        small = torch.empty(8)
        large = torch.empty(LARGE)
        first = transport.receive(small, 0, 1)
        second = transport.receive(large, 0, 2)
        while not flag.exists() and time.monotonic() < deadline:
            work = torch.tanh(work @ work)
            transport.poll()
        assert flag.read_text() == "left", "the message did not move while its receiver polled"
        transport.wait(second)
        transport.wait(first)
        assert torch.equal(small, torch.ones(8))
        assert torch.equal(large, torch.arange(LARGE, dtype=torch.float32))


def test_large_messages_around_the_ring(comm, transport):
    """Every rank sends before it receives: nobody waits in a send."""
    got = torch.empty(LARGE // 4, dtype=torch.float64)
    mine = torch.full_like(got, float(comm.rank))
    request = transport.receive(got, (comm.rank - 1) % comm.size, 1)
    transport.send(mine, (comm.rank + 1) % comm.size, 1)
    transport.wait(request)
    transport.drain()
    assert bool((got == (comm.rank - 1) % comm.size).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 1000, 300_001])
def test_a_sum_is_right_and_bit_equal_on_all_ranks(comm, transport, dtype, length):
    def values(rank: int) -> torch.Tensor:
        return torch.randn(length, dtype=dtype, generator=torch.Generator().manual_seed(rank))

    around = torch.full((length + 64,), 7.0, dtype=dtype)
    tensor = around[32:-32]
    tensor.copy_(values(comm.rank))
    transport.sum_in_place(tensor)
    exact = sum(values(rank).double() for rank in range(comm.size))
    tolerance = 8 * comm.size * torch.finfo(dtype).eps
    assert float((tensor.double() - exact).abs().max()) <= tolerance
    assert bool((around[:32] == 7).all()) and bool((around[-32:] == 7).all())
    assert len(set(allgather(comm, tensor.numpy().tobytes()))) == 1, (
        "copies of the weights would drift apart"
    )


def test_numbers_are_summed_on_the_first_rank(comm, transport):
    total = transport.sum_to_first([1.0, comm.rank * 0.5])
    assert total == ([comm.size, 0.5 * sum(range(comm.size))] if comm.rank == 0 else None)


def test_a_barrier_holds_until_the_last_rank_comes(comm, transport, folder):
    if comm.rank == comm.size - 1:
        torch.rand(300, 300) @ torch.rand(300, 300)
        (folder / "last").touch()
    transport.barrier()
    assert (folder / "last").exists()


def test_clocks_of_one_host_agree_within_their_error(comm):
    """Ranks of one host read the same monotonic clock, so the true offset is 0."""
    assert (
        allgather(comm, time.get_clock_info("perf_counter").implementation)
        == ["clock_gettime(CLOCK_MONOTONIC)"] * comm.size
    )
    found = measure_offset(comm, "clock")
    assert abs(found["clock_offset_ns"]) <= found["clock_error_ns"] + 1_000
    if comm.rank == 0:
        assert (found["clock_offset_ns"], found["clock_error_ns"]) == (0, 0)
    else:
        assert found["clock_error_ns"] > 0


def test_an_offset_has_the_sign_that_the_trace_takes_off(comm, monkeypatch):
    """A clock that is ahead by a second has an offset of plus a second."""
    real = time.perf_counter_ns
    ahead_ns = comm.rank * 1_000_000_000
    monkeypatch.setattr(time, "perf_counter_ns", lambda: real() + ahead_ns)
    found = measure_offset(comm, "clock")
    assert abs(found["clock_offset_ns"] - ahead_ns) <= found["clock_error_ns"] + 1_000
