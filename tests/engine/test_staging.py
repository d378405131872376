"""Staging: which buffers there are, when the device has finished with them, and how the way is chosen."""

from __future__ import annotations

import pytest
import torch

from gems.engine.transport import staging
from gems.engine.transport.staging import Staging, open_staging
from gems.errors import ConfigError
from gems.models.build import TensorSpec

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SPEC = TensorSpec("x", (2, 3), torch.float32)


@pytest.fixture
def log(monkeypatch):
    """Stand for a GPU: pinned memory is plain memory, a device copy another tensor, and the stream is written down."""
    calls: list[str] = []
    empty, copy = torch.empty, torch.Tensor.copy_

    def pinned(shape, dtype, pin_memory):
        assert pin_memory
        calls.append("pin")
        return empty(shape, dtype=dtype)

    def to_device(tensor, device, non_blocking):
        assert device == GPU
        calls.append("to device")
        return tensor.clone()

    def copied(buffer, tensor, non_blocking=False):
        calls.append("to host")
        return copy(buffer, tensor)

    class Stream:
        def synchronize(self):
            calls.append("synchronize")

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "to", to_device)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    return calls


def test_host_staged_receives_through_one_buffer(log):
    staged = Staging(GPU, is_direct=False)
    buffer = staged.borrow(SPEC)
    buffer.fill_(3.0)
    tensor = staged.to_device(buffer)
    assert log == ["pin", "to device", "synchronize"], "the copy is over before the buffer may be filled again"
    again = staged.borrow(SPEC)
    assert again is buffer
    again.fill_(4.0)
    assert bool((tensor == 3).all())
    staged.release((tensor,))
    assert staged.borrow(SPEC) is not tensor, "device memory is torch's own"


def test_host_staged_sends_a_copy_that_is_whole_and_kept_until_it_has_left(log):
    staged = Staging(GPU, is_direct=False)
    tensor = torch.arange(6.0).reshape(3, 2).t()
    told = []
    buffer, done = staged.to_host(tensor, lambda: told.append("left"))
    assert log == ["pin", "to host", "synchronize"], "the copy is over before MPI reads it"
    assert buffer.is_contiguous() and torch.equal(buffer, tensor)
    other, _ = staged.to_host(tensor + 10, lambda: None)
    assert other is not buffer and bool((buffer == tensor).all())
    done()
    assert told == ["left"]
    assert staged.borrow(SPEC) is buffer


def test_direct_waits_for_the_device_before_mpi_reads_or_writes(monkeypatch):
    calls = []

    class Stream:
        def synchronize(self):
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    direct = Staging(CPU)
    direct._device = GPU
    direct.borrow(SPEC)
    assert calls == ["synchronize"], "a kernel may still read what the buffer held"
    direct.to_host(torch.rand(2), lambda: None)
    assert calls == ["synchronize"] * 2


def test_direct_uses_given_back_buffers_again():
    direct = Staging(CPU)
    buffer = direct.borrow(SPEC)
    assert direct.to_device(buffer) is buffer
    leaf = buffer.detach().requires_grad_()
    direct.release((leaf,))
    again = direct.borrow(SPEC)
    assert again.data_ptr() == buffer.data_ptr() and not again.requires_grad
    assert direct.borrow(SPEC).data_ptr() != buffer.data_ptr()
    direct.release((again,))
    assert direct.borrow(TensorSpec("x", (3, 2), torch.float32)).data_ptr() != buffer.data_ptr()
    assert direct.borrow(TensorSpec("x", (2, 3), torch.int32)).dtype is torch.int32


@pytest.mark.parametrize("wanted", ["auto", "host", "gpu"])
def test_a_processor_s_memory_is_mpi_s_own(comm, wanted):
    assert open_staging(wanted, CPU, comm).is_direct


def test_device_pointers_need_a_library_that_takes_them(comm, monkeypatch):
    monkeypatch.setattr(staging, "gpu_support", lambda: False)
    assert not open_staging("auto", GPU, comm).is_direct
    with pytest.raises(ConfigError, match=r"machine\.transport=gpu: .*machine\.transport=host"):
        open_staging("gpu", GPU, comm)


@pytest.mark.parametrize("passes", [True, False])
def test_a_library_that_claims_it_is_tested(comm, monkeypatch, passes):
    tests = []
    monkeypatch.setattr(staging, "gpu_support", lambda: True)
    monkeypatch.setattr(staging, "_self_test", lambda device, comm: tests.append(device) or passes)
    assert open_staging("auto", GPU, comm).is_direct is passes
    assert tests == [GPU]
    assert not open_staging("host", GPU, comm).is_direct
    assert tests == [GPU], "machine.transport=host never touches device pointers"


def test_the_self_test_compares_what_came_back(comm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert staging._self_test(CPU, comm)
    wait = staging.Transport.wait

    def wrong(self, request, what):
        wait(self, request, what)
        self.received[5] += 1

    def receive(self, tensor, rank, tag):
        self.received = tensor
        return original(self, tensor, rank, tag)

    original = staging.Transport.receive
    monkeypatch.setattr(staging.Transport, "receive", receive)
    monkeypatch.setattr(staging.Transport, "wait", wrong)
    assert not staging._self_test(CPU, comm)
