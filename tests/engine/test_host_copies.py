"""Copies between a device and host memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gems.engine.offload.host_copies import CpuCopier, CudaCopier
from gems.engine.offload.host_pool import HostPool, PinnedMemory

SIZES = (12, 4096, 1)


def tensors(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)
        for size in SIZES
    ]


def test_on_a_processor_a_copy_is_over_when_it_is_posted():
    copies = CpuCopier()
    made = [*tensors("cpu"), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    on_host = [torch.empty_like(tensor) for tensor in made]
    out = copies.copy_out(list(zip(made, on_host, strict=True)))
    assert out.num_bytes == sum(SIZES) + 480 and copies.is_done(out) and out.start <= out.end
    wanted = [tensor.clone() for tensor in made]
    for tensor in made:
        tensor.zero_()
    back, again = copies.copy_in(on_host)
    assert back.num_bytes == out.num_bytes and back.is_waited_for
    copies.wait(back)
    assert back.is_waited_for
    for got, want, kept in zip(again, wanted, on_host, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride() and got._version == 0
        assert got.data_ptr() != kept.data_ptr(), "the arenas are two"


class OnStreams(TorchDispatchMode):
    """Notes which operations on tensors of a GPU run on another stream than the default one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        is_aside = torch.cuda.current_stream() != torch.cuda.default_stream()
        if is_aside and any(
            isinstance(each, torch.Tensor) and each.is_cuda for each in (*args, made)
        ):
            self.names.add(func.overloadpacket.__name__)
        return made


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_streams_of_copies_do_nothing_else():
    """torch's sanitizer takes `set_` for a write, and so for a race."""
    pool = HostPool(PinnedMemory("rank 0"), "rank 0")
    copies = CudaCopier(torch.device("cuda", 0))
    pairs = [(tensor, pool.borrow(tensor.nbytes)) for tensor in tensors("cuda")]
    with OnStreams() as ran:
        copies.wait(copies.copy_out(pairs))
        copies.copy_in([buffer for _, buffer in pairs])
    assert ran.names == {"copy_"}
    copies.synchronize()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_memory_is_held_until_compute_waits():
    device = torch.device("cuda", 0)
    copies = CudaCopier(device)
    pool = HostPool(PinnedMemory("rank 0"), "rank 0")
    tensor = torch.randn(1 << 22, device=device)
    wanted = tensor.clone()
    buffer = pool.borrow(tensor.nbytes)
    on_host = buffer.view(tensor.dtype)
    out = copies.copy_out([(tensor, on_host)])
    assert out.memory
    copies.wait(out)
    assert not out.memory and out.is_waited_for
    del tensor
    torch.full((1 << 22,), 3.0, device=device)  # takes the memory that was just freed
    back, (again,) = copies.copy_in([on_host])
    copies.wait(back)
    assert torch.equal(again, wanted) and again._version == 0
    copies.synchronize()
    assert copies.is_done(back) and back.start.elapsed_time(back.end) > 0
    pool.release(buffer)
