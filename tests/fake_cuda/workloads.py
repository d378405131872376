"""Small programs of the engine on the device, each of which returns numbers that do not depend on when work is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from gems.config.schema import MemoryConfig, RunSpec
from gems.engine.batch_loader import BatchLoader
from gems.engine.checkpoint.state import HostCopy
from gems.engine.offload.activation_store import ActivationStore
from gems.engine.offload.host_pool import HostPool, PinnedMemory
from gems.engine.optimization.gradients import Gradients
from gems.engine.rank import Rank
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport import staging
from gems.engine.transport.mpi import Transport, world
from gems.engine.transport.p2p_channels import P2PChannels
from gems.engine.transport.staging import HostStaging, Staging
from gems.models.build import TensorSpec
from gems.plan.evaluate import Plan, evaluate
from gems.schedule.action import Action, Kind
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from tests.fake_cuda.load import native
from tests.fake_cuda.watch import device_pointers
from tests.helpers.device import DEVICE
from tests.helpers.rig import ListPart
from tests.helpers.toys import make_spec

Numbers = list[torch.Tensor]
SHAPE = (64, 64)
KEY = (0, 0, 0)
ROW = ("0F0", "0OFFLOAD0", "0FREE0", "0PREFETCH0", "0B0")
STEPS = 2


@cache
def _planned(memory: str) -> tuple[RunSpec, Plan]:
    spec = replace(
        make_spec("1f1b", 1, parallel__micro_batches=3),
        memory=MemoryConfig(memory, asynchronous=True, min_offload_bytes=0),
    )
    return spec, evaluate(spec)


def offload() -> Numbers:
    """Train two steps with activations that leave for host memory, and return the weights."""
    _, made = _planned("vdnn_all")
    rank = Rank.open(made.for_ranks, world(), DEVICE)
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    rank.stages.set_training(True)
    for step in range(STEPS):
        rank.train.run(step, loader.batch(step))
    loader.close()
    assert rank.train.store is not None and rank.train.store.counters.offloaded_bytes > 0
    return [
        parameter.detach().cpu()
        for modules in rank.stages.modules.values()
        for parameter in modules.parameters()
    ]


def trained(schedule: str, has_graphs: bool, steps: int = 3, **changes: object) -> Numbers:
    """Train on one rank, and return weights, buffers and losses."""
    spec = make_spec(schedule, 1, train__cuda_graphs=has_graphs, train__steps=steps, **changes)
    rank = Rank.open(evaluate(spec).for_ranks, world(), DEVICE)
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    rank.stages.set_training(True)
    losses = [rank.train.run(step, loader.batch(step)) for step in range(steps)]
    loader.close()
    tensors = [
        tensor.detach().cpu()
        for modules in rank.stages.modules.values()
        for tensor in (*modules.parameters(), *modules.buffers())
    ]
    return [*tensors, torch.tensor(losses)]


def graphs() -> Numbers:
    """Train with CUDA graphs, and return also how many were launched: fewer if a replay differed."""
    return _counted("zb_h1", train__precision="bf16_mixed")


def spilled_graphs() -> Numbers:
    """Train with graphs whose activations leave for host memory."""
    memory = MemoryConfig("vdnn_all", asynchronous=True, min_offload_bytes=0)
    return _counted("1f1b", memory=memory)


def graphs_of_strips() -> Numbers:
    """Train with graphs of strips."""
    return _counted("1f1b", parallel__strips=2, model__norm="ghost_batch")


def graphs_of_stored_strips() -> Numbers:
    """Train with graphs of strips that leave for host memory."""
    memory = MemoryConfig("vdnn_all", asynchronous=True, min_offload_bytes=0)
    return _counted("1f1b", memory=memory, parallel__strips=2, model__norm="ghost_batch")


def _counted(schedule: str, **changes: object) -> Numbers:
    before = native().counts().get("graph launches", 0)
    computing = torch.cuda.current_stream()
    found = trained(schedule, True, **changes)
    torch.cuda.set_stream(computing)
    return [*found, torch.tensor(native().counts()["graph launches"] - before)]


def _open_store() -> tuple[ActivationStore, HostPool]:
    pool = HostPool(PinnedMemory("rank 0"), "rank 0")
    actions = tuple(map(Action.parse, ROW))
    schedule = Schedule("test", 1, Placement(1, ((0,),)), (actions,))
    return ActivationStore(schedule, pool, Recorder(None, DEVICE), DEVICE), pool


def _forward(store: ActivationStore, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a forward whose activations leave, and return its input and its output."""
    store.begin(KEY, ())
    start = torch.zeros((), requires_grad=True, device=DEVICE)
    with store.saved_tensor_hooks(KEY, 0):
        out = (torch.full(SHAPE, 2.0, device=DEVICE) + start + number).exp().sum()
    store.offload(Action.parse(ROW[1]))
    return start, out


def fetch_on_demand() -> Numbers:
    """Read in backward what no PREFETCH has brought back."""
    store, _ = _open_store()
    found = []
    for number in range(3):
        start, out = _forward(store, number)
        store.free(Action.parse(ROW[2]))
        torch.full(SHAPE, -1.0, device=DEVICE)  # takes the memory
        out.backward()
        found.append(start.grad)
        store.end_backward(KEY, 0)
    return [gradient.cpu() for gradient in found]


def broken_step() -> Numbers:
    """Break a step off while activations are on their way, and let the host use the memory that they go to."""
    store, pool = _open_store()
    found = []
    for number in range(3):
        kept = _forward(store, number)
        store.reset()
        buffer = pool.borrow(4 * SHAPE[0] * SHAPE[1])
        _host_writes(buffer, number)
        torch.cuda.synchronize()
        found.append(buffer.clone())
        pool.release(buffer)
        del kept
    return found


def _host_writes(buffer: torch.Tensor, value: int) -> None:
    """Fill memory on the host, which the fake device does not see by itself."""
    native().host_access(buffer.data_ptr(), buffer.nbytes, True, "the host")
    buffer.fill_(value)


def _messages(is_direct: bool) -> Numbers:
    row = tuple(
        Action(kind, stage, m)
        for m in range(4)
        for kind, stage in ((Kind.SEND_F, 0), (Kind.RECV_F, 1), (Kind.SEND_B, 1), (Kind.RECV_B, 0))
    )
    schedule = Schedule("test", 4, Placement(1, ((0, 0),)), (row,))
    recorder = Recorder(ListPart(), DEVICE)
    links = [Transport(world(), 20.0) for _ in range(2)]
    boundary = (TensorSpec("x", SHAPE, torch.float32),)
    channels = P2PChannels(
        schedule, 0, [boundary], links, (Staging if is_direct else HostStaging)(DEVICE), recorder
    )
    found = []
    for pair in ((0, 1), (2, 3)):
        for m in pair:
            channels.post_receive(Action(Kind.RECV_F, 1, m))
            made = torch.full(SHAPE, float(m), device=DEVICE).exp().cos()
            channels.post_send(Action(Kind.SEND_F, 0, m), (made,))
            del made
            torch.full(SHAPE, -1.0, device=DEVICE)  # takes the memory of what may still leave
        for m in pair:
            (got,) = channels.wait(Action(Kind.RECV_F, 1, m))
            found.append(got.sin() + 1)
            channels.release((got,))
            del got  # whose memory the next message may take
    channels.drain()
    for each in links:
        each.close()
    return [result.cpu() for result in found]


def staged_messages() -> Numbers:
    """Send tensors to this rank itself, through pinned memory."""
    return _messages(False)


def direct_messages() -> Numbers:
    """Send tensors to this rank itself, by device pointers."""
    with device_pointers():
        return _messages(True)


def self_test() -> Numbers:
    """Run the test of device pointers with which a run begins."""
    with device_pointers():
        return [torch.tensor(staging._self_test(DEVICE, world()))]


def loaded_images() -> Numbers:
    """Read images and labels of two steps on the device, as forwards and losses do."""
    spec, made = _planned("vdnn_all")
    micro_batches = range(spec.parallel.micro_batches)
    loader = BatchLoader.open(made.for_ranks, world(), DEVICE)
    found = []
    for step in range(STEPS):
        batch = loader.batch(step)
        found += [labels + 1 for labels in batch.labels.values()]
        for m in micro_batches:
            batch.arrive(m)
            found.append(batch.images[m].sin())
    loader.close()
    return [tensor.cpu() for tensor in found]


def reduced_gradients() -> Numbers:
    """Sum gradients of two stages over two ranks, one of which is made up of zeros, one stage before the other ends."""
    modules = {(0, stage): nn.Linear(64, 64).to(DEVICE) for stage in (0, 1)}
    transport = Transport(world(), 20.0)
    transport.size = 2
    gradients = Gradients(modules, transport, torch.float32, DEVICE, started=[1])
    found = []
    parameters = [p for stage in (1, 0) for p in modules[0, stage].parameters()]
    for step in range(3):
        gradients.zero()
        for number, parameter in enumerate(parameters):
            parameter.grad.add_(torch.full_like(parameter, 1.0 + step).exp().cos())
            if number == 1:
                gradients.start_reduce(1, lambda num_bytes: None)
            gradients.poll()
        gradients.reduce()
        found += [parameter.grad.clone() for parameter in parameters]
    transport.close()
    return [gradient.cpu() for gradient in found]


def checkpoints() -> Numbers:
    """Copy a state to the host while training goes on, and return what the files would get."""
    weight = nn.Parameter(torch.ones(SHAPE, device=DEVICE))
    statistic = torch.zeros(SHAPE, device=DEVICE)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    copies = HostCopy(DEVICE, optimizer)
    found = []
    for step in range(3):
        statistic.add_(1.5)
        weight.grad = torch.full(SHAPE, float(step + 1), device=DEVICE)
        optimizer.step()
        copies.begin({"statistic": statistic}, {"weight": weight.detach()})
        statistic.mul_(3).add_(step)  # of the next forward, before the copies have ended
        weight.grad = weight.detach() * 2
        optimizer.step()
        host = copies.host_tensors()
        found += [host[name].clone() for name in sorted(host)]
    return found


def recorded_times() -> Numbers:
    """Record an action, whose times must be known at the end of the step."""
    part = ListPart()
    recorder = Recorder(part, DEVICE)
    for step in range(2):
        recorder.begin_step(step)
        start = recorder.timestamp()
        torch.full(SHAPE, 2.0, device=DEVICE).exp()
        recorder.compute(Action(Kind.F, 0, 0), start)
        recorder.end_step()
    return [torch.tensor([row[8] <= row[9] for row in part.rows])]


WORKLOADS: dict[str, Callable[[], Numbers]] = {
    made.__name__: made
    for made in (
        offload,
        fetch_on_demand,
        broken_step,
        staged_messages,
        direct_messages,
        self_test,
        loaded_images,
        reduced_gradients,
        checkpoints,
        recorded_times,
        graphs,
        spilled_graphs,
        graphs_of_strips,
        graphs_of_stored_strips,
    )
}
