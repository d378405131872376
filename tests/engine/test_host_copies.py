"""Copies between a device and host memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gems.engine.offload.host_copies import CpuCopier, CudaCopier, as_bytes
from gems.engine.offload.host_pool import HostPool, PinnedMemory

SIZES = (12, 4096, 1)


def storages(device: str) -> list[torch.UntypedStorage]:
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES
    ]
    return [row.to(device).untyped_storage() for row in rows]


def test_on_a_processor_a_copy_is_over_when_it_is_posted():
    copies = CpuCopier()
    made = storages("cpu")
    buffers = [torch.zeros(size + 3, dtype=torch.uint8) for size in SIZES]
    out = copies.copy_out(list(zip(made, buffers, strict=True)))
    assert out.num_bytes == sum(SIZES) and copies.is_done(out) and out.start <= out.end
    wanted = [as_bytes(storage).clone() for storage in made]
    for storage in made:
        as_bytes(storage).zero_()
    back, again = copies.copy_in(list(zip(buffers, SIZES, strict=True)))
    assert back.num_bytes == sum(SIZES) and not back.is_waited_for
    copies.wait(back)
    assert back.is_waited_for
    assert [storage.nbytes() for storage in again] == list(SIZES)
    assert all(torch.equal(as_bytes(got), want) for got, want in zip(again, wanted, strict=True))
    assert not {s.data_ptr() for s in again} & {b.data_ptr() for b in buffers}, "the arenas are two"


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
    pairs = [(storage, pool.borrow(storage.nbytes())) for storage in storages("cuda")]
    with OnStreams() as ran:
        copies.wait(copies.copy_out(pairs))
        copies.copy_in([(buffer, buffer.nbytes) for _, buffer in pairs])
    assert ran.names == {"copy_"}
    copies.synchronize()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_memory_is_held_until_compute_waits():
    device = torch.device("cuda", 0)
    copies = CudaCopier(device)
    pool = HostPool(PinnedMemory("rank 0"), "rank 0")
    tensor = torch.randn(1 << 22, device=device)
    wanted = tensor.clone()
    memory = tensor.untyped_storage()
    buffer = pool.borrow(memory.nbytes())
    out = copies.copy_out([(memory, buffer)])
    assert out.memory
    copies.wait(out)
    assert not out.memory and out.is_waited_for
    del tensor, memory
    torch.full((1 << 22,), 3.0, device=device)  # takes the memory that was just freed
    back, (again,) = copies.copy_in([(buffer, wanted.nbytes)])
    copies.wait(back)
    got = torch.empty(0, device=device).set_(again, 0, (1 << 22,), (1,))
    assert torch.equal(got, wanted)
    copies.synchronize()
    assert copies.is_done(back) and back.start.elapsed_time(back.end) > 0
    pool.release(buffer)
