"""Messages of one rank to itself: what may be sent, what arrives, and what waiting does."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from gems.engine.transport import mpi
from gems.engine.transport.mpi import Transport, world
from gems.errors import ConfigError, StalledError


@pytest.fixture
def transport(comm):
    opened = Transport(comm, hang_timeout_s=20)
    yield opened
    opened.close()


def exchange(transport: Transport, tensor: torch.Tensor, tag: int = 1) -> torch.Tensor:
    got = torch.empty_like(tensor)
    request = transport.receive(got, 0, tag)
    transport.send(tensor, 0, tag)
    transport.wait(request)
    transport.drain()
    return got


NOT_CONTIGUOUS = {
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "channels_last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sliced": lambda: torch.arange(12.0)[::2],
    "expanded": lambda: torch.ones(1).expand(4),
}


@pytest.mark.parametrize("make", NOT_CONTIGUOUS.values(), ids=NOT_CONTIGUOUS)
def test_a_tensor_in_another_order_is_refused(transport, make):
    """MPI would send the storage as it lies, without a word."""
    tensor = make()
    with pytest.raises(ValueError, match="contiguous"):
        transport.send(tensor, 0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        transport.receive(tensor, 0, 1)
    transport.drain()


class OnGpu:
    """Stands for a tensor of a GPU, which an MPI without device pointers would take for memory of the host."""

    is_cuda = True
    device = "cuda:0"
    dtype = torch.float32

    def is_contiguous(self) -> bool:
        return True


@pytest.mark.parametrize(
    "post", ["send", "receive", "persistent_send", "persistent_receive", "sum_in_place"]
)
def test_a_tensor_of_a_gpu_is_refused_where_mpi_takes_no_device_pointers(
    transport, post, monkeypatch
):
    monkeypatch.setattr(mpi, "gpu_support", lambda: False)
    with pytest.raises(
        ValueError, match=r"no device pointers, .* on cuda:0: use machine\.transport=host"
    ):
        getattr(transport, post)(OnGpu(), *(() if post == "sum_in_place" else (0, 1)))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int64,
        torch.bool,
        torch.uint8,
    ],
)
def test_every_type_travels_bit_by_bit(transport, dtype):
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 256, (5, 7, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        values = values % 2
    tensor = values.view(dtype)  # any bits, NaN among them
    got = exchange(transport, tensor)
    assert torch.equal(got.view(torch.uint8), values)


def test_cells_beside_a_receive_buffer_stay_untouched(transport):
    ensure_exit = 64
    around = torch.full((ensure_exit + 1000 + ensure_exit,), -7.0, dtype=torch.bfloat16)
    inside = around[ensure_exit:-ensure_exit]
    request = transport.receive(inside, 0, 3)
    transport.send(torch.ones(1000, dtype=torch.bfloat16), 0, 3)
    transport.wait(request)
    assert torch.equal(inside, torch.ones(1000, dtype=torch.bfloat16))
    assert bool((around[:ensure_exit] == -7).all()) and bool((around[-ensure_exit:] == -7).all())


def test_an_empty_tensor_travels(transport):
    assert exchange(transport, torch.empty(0, 3)).shape == (0, 3)


def test_what_was_sent_is_told_once_and_freed(transport):
    calls = []
    tensor = torch.ones(10)
    held = weakref.ref(tensor)
    transport.send(tensor, 0, 5, lambda: calls.append("left"))
    del tensor
    gc.collect()
    assert held() is not None, "the transport keeps a tensor that may still be read"
    request = transport.receive(torch.empty(10), 0, 5)
    transport.wait(request)
    transport.drain()
    transport.poll()
    transport.drain()
    gc.collect()
    assert calls == ["left"]
    assert held() is None


def test_requests_may_be_waited_for_in_any_order(transport):
    buffers = [torch.empty(4) for _ in range(4)]
    requests = [transport.receive(buffer, 0, tag) for tag, buffer in enumerate(buffers)]
    for tag in (2, 0, 3, 1):
        transport.send(torch.full((4,), float(tag)), 0, tag)
    for tag in (3, 1, 0, 2):
        transport.wait(requests[tag])
    assert [float(buffer[0]) for buffer in buffers] == [0, 1, 2, 3]


def test_duplicates_do_not_hear_each_other(comm, transport):
    """Each direction has a communicator of its own: equal tags in both are different messages."""
    other = Transport(comm, hang_timeout_s=20)
    here = torch.empty(1)
    there = torch.empty(1)
    requests = transport.receive(here, 0, 1), other.receive(there, 0, 1)
    other.send(torch.tensor([2.0]), 0, 1)
    transport.send(torch.tensor([1.0]), 0, 1)
    transport.wait(requests[0])
    other.wait(requests[1])
    other.drain()
    assert (float(here), float(there)) == (1.0, 2.0)
    other.close()


@pytest.mark.timeout(30)
def test_waiting_for_what_never_comes_ends(comm):
    transport = Transport(comm, hang_timeout_s=0.2)
    request = transport.receive(torch.empty(3), 0, 9)
    with pytest.raises(StalledError, match=r"rank 0 waited 0\.2 s for 1RECV_F3"):
        transport.wait(request, "1RECV_F3")
    transport.send(torch.zeros(3), 0, 9)  # so that nothing is under way at the end
    transport.wait(request)
    transport.drain()
    transport.close()


@pytest.mark.timeout(30)
def test_a_send_that_nobody_takes_ends(comm):
    transport = Transport(comm, hang_timeout_s=0.2)
    big = torch.zeros(1 << 22)
    transport.send(big, 0, 9)
    with pytest.raises(StalledError, match="sends to leave"):
        transport.drain()
    transport.wait(transport.receive(torch.empty_like(big), 0, 9))
    transport.drain()
    transport.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_sums_are_refused_in_types_that_mpi_adds_wrongly(transport, dtype):
    with pytest.raises(TypeError, match="float32 or float64"):
        transport.sum_in_place(torch.ones(4, dtype=dtype))


def test_a_sum_needs_a_contiguous_tensor(transport):
    with pytest.raises(ValueError, match="contiguous"):
        transport.sum_in_place(torch.ones(3, 4).t())


def test_the_world_is_checked_against_slurm(monkeypatch):
    """A wrong `srun --mpi=` starts as many worlds of one rank as there are tasks, without a word."""
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ConfigError, match=r"world of 1 and SLURM started 4 tasks"):
        world()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert world().size == 1
    monkeypatch.delenv("SLURM_PROCID")  # inside a batch script, but not started by srun
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert world().size == 1
