"""Staging: which buffers there are, when the device has finished with them, and how the way is chosen."""

from __future__ import annotations

import ctypes
import math
import os
from contextlib import contextmanager
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from gems.engine.transport import staging
from gems.engine.transport.mpi import GPU_QUERIES, gpu_support
from gems.engine.transport.staging import HostStaging, Staging, open_staging
from gems.errors import ConfigError
from gems.models.build import TensorSpec

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
SPEC = TensorSpec("x", (2, 3), torch.float32)


class Event:
    """An event that is reached when the test says so."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.is_reached = False
        self.stream = ""

    def record(self, stream: Stream) -> None:
        self.stream = stream.name
        self.log.append(f"{stream.name} records")

    def query(self) -> bool:
        return self.is_reached


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def record_event(self) -> Event:
        event = Event(self.log)
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for the event of {event.stream}")


@pytest.fixture
def log(monkeypatch):
    """Stand for a GPU: its memory is plain memory, and what its streams do is written down."""
    calls: list[str] = []
    current = [Stream("compute", calls)]
    names = cycle(("out", "in"))
    empty = torch.empty
    copy = torch.Tensor.copy_

    @contextmanager
    def stream(entered):
        current.append(entered)
        yield
        current.pop()

    def made(shape, dtype, device=None, pin_memory=False):
        calls.append("pin" if pin_memory else f"{current[-1].name} allocates")
        return empty(shape, dtype=dtype)

    def moved(tensor, to, non_blocking=False):
        if to == GPU:
            calls.append(
                f"{current[-1].name} brings" + ("" if non_blocking else ", and the host waits")
            )
        return tensor.clone()

    def copied(buffer, tensor, non_blocking=False):
        calls.append(
            f"{current[-1].name} copies" + ("" if non_blocking else ", and the host waits")
        )
        return copy(buffer, tensor)

    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, on: calls.append(f"kept for {on.name}")
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: Stream(next(names), calls))
    return calls


def test_host_staged_receives_are_brought_on_a_stream_of_their_own(log):
    staged = HostStaging(GPU)
    incoming = staged.receiving(SPEC)
    (buffer,) = incoming.buffers
    assert buffer.is_ready, "nothing has used it"
    buffer.tensor.fill_(3.0)
    del log[:]
    staged.bring(incoming, 0)
    assert log == ["in allocates", "in copies", "in records"]
    tensor = staged.received(incoming)
    assert log[3:] == ["compute waits for the event of in", "kept for compute"]
    assert tuple(tensor.shape) == SPEC.shape and bool((tensor == 3).all())
    (again,) = staged.receiving(SPEC).buffers
    assert again is buffer and not again.is_ready, "the copy still reads it"
    other = staged.receiving(SPEC)
    staged.bring(other, 0)
    other.buffers[0].event.is_reached = True
    for each in (again, other.buffers[0]):
        staged._give_back(each)
    assert staged.receiving(SPEC).buffers == other.buffers, "the one that is ready comes first"


def test_host_staged_sends_a_copy_that_is_made_after_compute_and_kept_until_it_has_left(log):
    staged = HostStaging(GPU)
    tensor = torch.arange(6.0).reshape(2, 3)
    (buffer,) = staged.sending(tensor)
    assert log == ["pin", "out waits for compute", "out copies", "out records"]
    assert not buffer.is_ready and buffer.source.data_ptr() == tensor.data_ptr(), (
        "the copy still reads it"
    )
    buffer.event.is_reached = True
    assert buffer.is_ready and buffer.tensor.tolist() == [0, 1, 2, 3, 4, 5]
    (other,) = staged.sending(tensor + 10)
    assert other is not buffer and buffer.tensor.tolist() == [0, 1, 2, 3, 4, 5]
    staged.sent(buffer)
    del log[:]
    assert staged.sending(tensor) == [buffer]
    assert log[:2] == ["out waits for compute", "out waits for the event of out"]


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3), (4, 5), (3, 2, 5), (7, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_a_tensor_in_any_layout_travels_in_pieces_that_are_joined_as_they_come(shape, dtype):
    staged = HostStaging(GPU, piece_bytes=40)
    spec = TensorSpec("x", shape, dtype)
    made = torch.arange(math.prod(shape), dtype=dtype).reshape(shape)
    sent = made.t().contiguous().t() if len(shape) == 2 else made
    buffers = staged.sending(sent)
    incoming = staged.receiving(spec)
    most = 40 // dtype.itemsize
    assert (
        len(buffers)
        == len(incoming.buffers)
        == staged.num_pieces(spec)
        == max(1, -(-made.numel() // most))
    )
    assert all(buffer.tensor.numel() == most for buffer in buffers[1:])
    for place, (ours, theirs) in enumerate(zip(buffers, incoming.buffers, strict=True)):
        theirs.tensor.copy_(ours.tensor)
        staged.bring(incoming, place)
    got = staged.received(incoming)
    assert got.shape == made.shape and torch.equal(got, made)


def test_direct_gives_mpi_nothing_that_the_device_still_uses(log):
    direct = Staging(GPU)
    incoming = direct.receiving(SPEC)
    (fresh,) = incoming.buffers
    assert log == ["compute allocates", "compute records"]
    assert not fresh.is_ready, "the allocator may give memory that a kernel still reads"
    (buffer,) = direct.sending(torch.zeros(2))
    assert not buffer.is_ready, "the tensor may not be computed yet"
    fresh.event.is_reached = True
    received = direct.received(incoming)
    direct.release((received,))
    (again,) = direct.receiving(SPEC).buffers
    assert again.tensor.data_ptr() == received.data_ptr() and not again.is_ready, (
        "a kernel may still read it"
    )


def test_direct_uses_given_back_buffers_again():
    direct = Staging(CPU)

    def receiving(spec: TensorSpec) -> torch.Tensor:
        (buffer,) = direct.receiving(spec).buffers
        assert buffer.is_ready
        return buffer.tensor

    tensor = receiving(SPEC)
    leaf = tensor.detach().requires_grad_()
    direct.release((leaf,))
    again = receiving(SPEC)
    assert again.data_ptr() == tensor.data_ptr() and not again.requires_grad
    assert receiving(SPEC).data_ptr() != tensor.data_ptr()
    direct.release((again,))
    assert receiving(TensorSpec("x", (3, 2), torch.float32)).data_ptr() != tensor.data_ptr()
    assert receiving(TensorSpec("x", (2, 3), torch.int32)).dtype is torch.int32


@pytest.mark.parametrize("wanted", ["auto", "host", "mpi", "gloo"])
def test_a_processor_s_memory_is_mpi_s_own(comm, wanted):
    assert open_staging(wanted, CPU, comm).is_direct


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    """The settings of torch's allocator that a test makes are its own."""
    monkeypatch.setattr(staging, "set_allocator", lambda settings: None)
    for name in staging.ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("log")
def test_device_pointers_need_a_library_that_takes_them(comm, monkeypatch):
    monkeypatch.setattr(staging, "gpu_support", lambda: False)
    assert not open_staging("auto", GPU, comm).is_direct
    with pytest.raises(
        ConfigError, match=r"machine\.transport=mpi: .*machine\.transport=nccl or host"
    ):
        open_staging("mpi", GPU, comm)


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("passes", [True, False])
def test_a_library_that_claims_it_is_tested(comm, monkeypatch, passes):
    tests = []
    monkeypatch.setattr(staging, "gpu_support", lambda: True)
    monkeypatch.setattr(staging, "_self_test", lambda device, comm: tests.append(device) or passes)
    assert open_staging("auto", GPU, comm).is_direct is passes
    assert tests == [GPU]
    assert not open_staging("host", GPU, comm).is_direct
    assert not open_staging("gloo", GPU, comm).is_direct
    assert tests == [GPU], "machine.transport=host and gloo never touch device pointers"


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


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(
    ("wanted", "takes", "of_user", "expands"),
    [
        ("auto", False, "", True),
        ("auto", True, "", False),
        ("host", True, "", True),
        ("nccl", True, "", True),
        ("auto", False, "max_split_size_mb:64", False),
    ],
)
def test_segments_expand_unless_mpi_takes_pointers_or_the_user_has_chosen(
    comm, monkeypatch, wanted, takes, of_user, expands
):
    told = []
    monkeypatch.setattr(staging, "set_allocator", told.append)
    monkeypatch.setattr(staging, "gpu_support", lambda: takes)
    monkeypatch.setattr(staging, "_self_test", lambda device, comm: True)
    monkeypatch.setattr(staging, "StreamStaging", lambda device: None)
    for name in staging.ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, of_user)
    open_staging(wanted, GPU, comm)
    assert told == [staging.EXPANDABLE] * expands
    assert os.environ["PYTORCH_ALLOC_CONF"] == (staging.EXPANDABLE if expands else of_user)


@pytest.mark.parametrize("name", GPU_QUERIES)
def test_any_of_the_queries_of_mpi_libraries_tells_that_they_take_device_memory(monkeypatch, name):
    def no() -> int:
        return 0

    def yes() -> int:
        return 1

    monkeypatch.setattr(
        ctypes, "CDLL", lambda path: SimpleNamespace(**dict.fromkeys(GPU_QUERIES, no))
    )
    assert not gpu_support.__wrapped__()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(**{name: yes}))
    assert gpu_support.__wrapped__()


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(
    ("settings", "count"), [("expandable_segments:True", 1), ("max_split_size_mb:64", 0)]
)
def test_expandable_segments_are_warned_of_where_mpi_takes_device_memory(
    comm, monkeypatch, caplog, settings, count
):
    monkeypatch.setattr(staging, "gpu_support", lambda: True)
    monkeypatch.setattr(staging, "_self_test", lambda device, comm: True)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    open_staging("auto", GPU, comm)
    assert caplog.text.count("expandable_segments in torch's allocator keeps UCX") == count
