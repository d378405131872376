"""The fake device itself: numbers, order, memory, random numbers, waits and children.

Run by test_fake_cuda.py.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
from itertools import chain, groupby

import pytest
import torch
from torch import nn

from gems.config.recipe import LossConfig, OptimizerConfig
from gems.config.schema import DataConfig
from gems.engine.offload.host_pool import HostPool, PinnedMemory
from gems.engine.optimization.optimizer import build_optimizer
from gems.engine.optimization.parameter_groups import NumberedLayer
from gems.engine.step_weight import StepWeight
from gems.engine.transport import mpi
from gems.engine.transport.mpi import Transport, world
from gems.losses.summed import SummedLoss
from gems.profile.profilers.layer_run import LayerCall
from gems.profile.profilers.measured import measured_times
from tests.fake_cuda import watch
from tests.fake_cuda.load import native

N = 1 << 12


pytestmark = pytest.mark.usefixtures("clean_device")


def races() -> list[str]:
    found = native().races()
    native().clear_races()
    return found


def trained(device: str) -> list[torch.Tensor]:
    """Train a network of most kinds of layers.

    Without dropout, whose numbers are those of a device.
    """
    torch.manual_seed(1)
    layers = (
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, groups=2),
            nn.GroupNorm(2, 4),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.LayerNorm(16),
            nn.Linear(16, 5),
        )
        .double()
        .to(device)
    )
    images = torch.randn(4, 3, 12, 12).double()
    labels = torch.randint(0, 5, (4,))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(layers(images.to(device)), labels.to(device)).backward()
        optimizer.step()
    return [value.cpu() for value in layers.state_dict().values()]


def test_training_has_the_numbers_of_the_processor_and_on_a_late_device_the_same_bits():
    at_once = trained("cuda")
    for ours, theirs in zip(at_once, trained("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for seed in (1, 2):
        native().set_late(True, seed)
        assert all(map(torch.equal, trained("cuda"), at_once))
    assert races() == []


def test_an_lstm_has_the_numbers_of_the_processor():
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layer = nn.LSTM(5, 7, 2, batch_first=True).double().to(device)
        words = torch.randn(3, 4, 5).double().to(device).requires_grad_()
        out, (hidden, cell) = layer(words)
        (out.sin().sum() + hidden.sum() + cell.cos().sum()).backward()
        return [each.cpu() for each in (out, words.grad, *(p.grad for p in layer.parameters()))]

    for ours, theirs in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def copy_out(waits: bool) -> torch.Tensor:
    side = torch.cuda.Stream()
    host = torch.zeros(N, pin_memory=True)
    made = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    made.add_(2.0)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(made, non_blocking=True)
    side.synchronize()
    return host


def reused_memory(waits: bool) -> torch.Tensor:
    """Memory that a copy still reads is freed on its own stream, and another tensor takes it."""
    side = torch.cuda.Stream()
    host = torch.zeros(N, pin_memory=True)
    made = torch.full((N,), 2.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(made, non_blocking=True)
    if waits:
        made.record_stream(side)
    del made
    torch.full((N,), 3.0, device="cuda")
    torch.cuda.synchronize()
    return host


def event_between(waits: bool) -> torch.Tensor:
    side = torch.cuda.Stream()
    event = torch.cuda.Event()
    made = torch.zeros(N, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made.add_(2.0)
        event.record()
    if waits:
        event.wait()
    return made.clone().cpu()


def ahead_of_the_host(waits: bool) -> torch.Tensor:
    host = torch.zeros(N, pin_memory=True)
    host.copy_(torch.full((N,), 2.0, device="cuda"), non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    native().host_access(host.data_ptr(), host.nbytes, False, "the host")
    return host.clone()


CAPTURED = {
    "item": lambda given: given.sum().item(),
    "a copy that waits": lambda given: given.cpu(),
    "synchronize": lambda given: torch.cuda.synchronize(),
    "cudaStreamQuery": lambda given: torch.cuda.current_stream().query(),
    "set_current_seed": lambda given: torch.cuda.manual_seed(1),
    "nonzero": lambda given: given.nonzero(),
}


@pytest.fixture
def own_stream():
    before = torch.cuda.current_stream()
    torch.cuda.set_stream(torch.cuda.Stream())
    yield
    torch.cuda.set_stream(before)


@pytest.mark.usefixtures("own_stream")
@pytest.mark.parametrize("late", [False, True])
def test_a_graph_runs_its_kernels_at_each_replay_and_none_at_its_capture(late):
    native().set_late(late, 1)
    given = torch.ones(N, device="cuda")
    total = torch.zeros(N, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        made = given * 3
        total.add_(made)
    assert float(total.sum()) == 0 and made.isnan().all()
    for number in (1.0, 2.0):
        given.fill_(number)
        graph.replay()
    assert float(total.sum()) == N * (3 + 6) and float(made[0]) == 6
    assert races() == []


@pytest.mark.usefixtures("own_stream")
def test_each_replay_draws_other_numbers():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        made = torch.rand(N, device="cuda")
    graph.replay()
    first = made.clone()
    graph.replay()
    assert not torch.equal(first, made)


@pytest.mark.usefixtures("own_stream")
def test_memory_of_a_pool_stays_its_own_and_is_used_again_by_graphs_of_the_same_pool():
    pool = torch.cuda.graph_pool_handle()

    def captured() -> int:
        with torch.cuda.graph(
            torch.cuda.CUDAGraph(), pool=pool, stream=torch.cuda.current_stream()
        ):
            return torch.zeros(N, device="cuda").data_ptr()

    place = captured()
    assert torch.zeros(N, device="cuda").data_ptr() != place == captured()


@pytest.mark.usefixtures("own_stream")
@pytest.mark.parametrize("what", CAPTURED)
def test_a_capture_refuses_what_cuda_refuses(what):
    given = torch.ones(N, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        with pytest.raises(RuntimeError, match=f"stream is capturing: {what}"):
            CAPTURED[what](given)
    finally:
        graph.capture_end()


def test_the_default_stream_cannot_be_captured():
    with pytest.raises(RuntimeError, match="default stream"):
        torch.cuda.CUDAGraph().capture_begin()


PROGRAMS = [copy_out, reused_memory, event_between, ahead_of_the_host]


def test_a_page_is_registered_once_until_it_is_unregistered_whatever_is_mapped_there():
    cudart = torch.cuda.cudart()
    memory = torch.frombuffer(mmap.mmap(-1, 4 * mmap.PAGESIZE), dtype=torch.uint8)
    place = memory.data_ptr()
    register = cudart.cudaHostRegister
    assert register(place, 2 * mmap.PAGESIZE, 0) == 0
    assert register(place + mmap.PAGESIZE, 2 * mmap.PAGESIZE, 0) == register(place, 1, 0) == 712
    assert register(place + 2 * mmap.PAGESIZE, 1, 0) == 0
    assert "already mapped" in cudart.cudaGetErrorString(712)
    for first in (0, 2):
        assert cudart.cudaHostUnregister(place + first * mmap.PAGESIZE) == 0
        assert cudart.cudaHostUnregister(place + first * mmap.PAGESIZE) == 713


def test_pages_of_a_pool_that_is_gone_may_be_registered_again():
    places = []
    for _ in range(2):
        pool = HostPool(PinnedMemory("rank 0"), "rank 0")
        places.append({pool.borrow(mmap.PAGESIZE).data_ptr() for _ in range(20)})
        del pool
    assert places[0] & places[1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_missing_wait_is_a_race_and_on_a_late_device_a_wrong_number(program):
    def on(late: bool, waits: bool, seed: int = 0) -> bool:
        torch.cuda.synchronize()
        native().set_late(late, seed)
        return bool((program(waits) == 2).all())

    assert on(False, True) and all(on(True, True, seed) for seed in range(10)) and races() == []
    assert on(False, False) and len(races()) > 0
    assert not all(on(True, False, seed) for seed in range(10))


def test_parts_of_a_tensor_may_be_used_by_several_streams_at_once():
    whole = torch.zeros(4 * N, device="cuda")
    sides = [torch.cuda.Stream() for _ in range(4)]
    for number, side in enumerate(sides):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            whole[number * N : (number + 1) * N].add_(number)
    assert races() == []
    whole[N - 1 : N + 1].cpu()
    assert len(races()) == 2


def test_mpi_that_takes_no_device_pointers_is_given_none():
    transport = Transport(world(), hang_timeout_s=20)
    tensor = torch.ones(N, device="cuda")
    for post in (transport.send, transport.receive):
        with pytest.raises(
            ValueError, match=r"no device pointers, .* on cuda:0: use machine\.transport=host"
        ):
            post(tensor, 0, 1)
    with pytest.raises(ValueError, match="no device pointers"):
        transport.sum_in_place(tensor)
    transport.close()


def test_mpi_that_takes_none_cannot_read_one_that_it_is_given(monkeypatch):
    answers = iter([True, False])  # to the engine, which asks first, and to the device
    monkeypatch.setattr(mpi, "gpu_support", lambda: next(answers))
    assert mpi._buffer(torch.ones(N, device="cuda")).address == watch._unreadable()


def test_mpi_reads_and_writes_until_it_is_waited_for(monkeypatch):
    monkeypatch.setattr(mpi, "gpu_support", lambda: True)
    transport = Transport(world(), hang_timeout_s=20)
    sent = torch.ones(N, device="cuda")
    got = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    request = transport.receive(got, 0, 1)
    transport.send(sent, 0, 1)
    sent + 1
    assert races() == []
    sent.add_(1)
    assert "MPI's send may still be reading" in races()[0]
    got.sum()
    assert "MPI's receive may still be writing" in races()[0]
    torch.cuda.synchronize()
    transport.wait(request)
    transport.drain()
    got.sum()
    sent.mul_(2)
    assert races() == []
    transport.close()


def test_memory_is_counted_reused_and_limited():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    made = torch.empty(1000, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 1024
    place = made.data_ptr()
    del made
    assert (
        torch.cuda.memory_allocated() == before
        and torch.cuda.max_memory_allocated() == before + 1024
    )
    assert torch.empty(1000, dtype=torch.uint8, device="cuda").data_ptr() == place
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((reserved + (1 << 20)) / total)
    torch.empty(1 << 20, dtype=torch.uint8, device="cuda")  # takes what was cached before it
    with pytest.raises(
        torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 2097152 bytes"
    ):
        torch.empty(1 << 21, dtype=torch.uint8, device="cuda")


def test_dropout_keeps_a_mask_of_booleans():
    x = torch.ones(N, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    out = nn.functional.dropout(x, 0.25)
    assert torch.cuda.memory_allocated() - before == 4 * N + N
    share = float((out == 0).double().mean())
    assert abs(share - 0.25) < 0.05 and float(out.detach().max()) == pytest.approx(4 / 3)
    out.sum().backward()
    assert torch.equal(x.grad, out)


@pytest.mark.parametrize("late", [False, True])
def test_random_numbers_come_from_the_generator_of_the_device(late):
    native().set_late(late, 1)
    torch.cuda.manual_seed(3)
    generator = torch.cuda.default_generators[0]
    state = generator.get_state()
    on_host = torch.get_rng_state()
    first = [
        torch.rand(5, device="cuda"),
        torch.randn(5, device="cuda"),
        torch.randperm(9, device="cuda"),
    ]
    assert not torch.equal(generator.get_state(), state) and torch.equal(
        torch.get_rng_state(), on_host
    )
    torch.cuda.manual_seed(3)
    again = [
        torch.rand(5, device="cuda"),
        torch.randn(5, device="cuda"),
        torch.randperm(9, device="cuda"),
    ]
    assert all(map(torch.equal, first, again))
    assert not torch.equal(torch.rand(5, device="cuda"), first[0])


def test_waits_of_the_host_are_counted():
    native().clear_counts()
    made = torch.ones(N, device="cuda")
    pinned = torch.zeros(N, pin_memory=True)
    pinned.copy_(made, non_blocking=True)
    made.copy_(pinned, non_blocking=True)
    assert not any(name.startswith("wait") for name in native().counts())
    made.cpu()
    pinned.copy_(made)
    made.sum().item()
    torch.cuda.current_stream().synchronize()
    torch.cuda.Event().synchronize()  # of nothing
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    torch.cuda.synchronize()
    bool((made > 0).all())
    assert waits() == {
        "wait: copy to the host": 2,
        "wait: item": 2,
        "wait: stream": 1,
        "wait: event": 1,
        "wait: device": 1,
    }


def waits() -> dict[str, int]:
    return {name: number for name, number in native().counts().items() if name.startswith("wait")}


def test_the_weight_of_a_step_waits_once_if_it_depends_on_labels():
    pixels = DataConfig(target="a.B", task="segmentation", height_px=6, width_px=5, num_classes=3)
    weighted = LossConfig(kwargs={"weight": [1.0, 9.0, 0.25]})
    labels = torch.arange(-1, 3).repeat(15).view(2, 6, 5).cuda()
    for data, config, shape, given, later in (
        (DataConfig(num_classes=3), LossConfig(), (2, 3), labels[:, 0, 1], {}),
        (pixels, weighted, (2, 3, 6, 5), labels, {"wait: item": 1}),
    ):
        like = torch.empty(shape, device="meta")
        loss = SummedLoss(config, data, torch.float32, labels.device, like)
        step_weight = StepWeight(loss, 4)
        first = step_weight({0: given, 1: given})
        native().clear_counts()
        assert step_weight({0: given, 1: given}) == first
        assert waits() == later


# beside one kernel for all parameters, the fake device counts the steps of each by a kernel
@pytest.mark.parametrize(("name", "expected"), [("sgd", 1), ("adamw", 1 + 4)])
def test_one_kernel_updates_all_parameters_unless_that_changes_results(name, expected):
    def count(dtype: torch.dtype, **kwargs: object) -> int:
        layers = [
            NumberedLayer(place, str(place), nn.Linear(2, 2).to("cuda", dtype)) for place in (0, 1)
        ]
        optimizer = build_optimizer(OptimizerConfig(name, lr=0.1, kwargs=kwargs), layers, 2)
        for parameter in chain.from_iterable(layer.module.parameters() for layer in layers):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        native().clear_counts()
        optimizer.step()
        assert not waits()
        return native().counts()["kernels"]

    assert count(torch.float32) == count(torch.float64) == expected
    assert count(torch.bfloat16) > expected and count(torch.float32, foreach=True) > expected


def test_a_layer_is_timed_without_waiting_for_the_device_between_its_runs(monkeypatch):
    calls: list[str] = []
    for name in ("record", "synchronize"):
        method = getattr(torch.cuda.Event, name)
        monkeypatch.setattr(
            torch.cuda.Event,
            name,
            lambda event, method=method, name=name: (calls.append(name), method(event)),
        )
    call = LayerCall(nn.Conv2d(2, 3, 3).cuda(), [torch.randn(2, 2, 8, 8).cuda()])
    times = measured_times(call, 5)
    assert min(times.forward_s, times.input_grad_s, times.cheap_s) > 0
    # warm-up and repetitions of the backwards, and those of a selective recompute
    assert [name for name, _ in groupby(calls)] == ["record", "synchronize"] * 4


def test_children_have_the_device_too():
    program = "import sys, torch; print(torch.ones(2, device='cuda').sum().item(), *sys.argv[1:])"
    ended = subprocess.run(
        [sys.executable, "-c", program, "a b"], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "2.0 a b\n"), ended.stderr


def test_a_race_of_a_child_is_seen():
    from tests.fake_cuda import plugin

    program = (
        "import torch; made = torch.ones(9, device='cuda')\nwith"
        " torch.cuda.stream(torch.cuda.Stream()): made.sum()"
    )
    known = plugin._reports()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    (path,) = plugin._reports() - known
    assert (
        "sum on stream 1 reads what fill_ on stream 0 may still be writing"
        in plugin._races_of(path)[0]
    )
    path.unlink()
