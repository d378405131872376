"""A run of one rank under a memory policy, and what others do with saved tensors, for the memory benchmarks.

The peers (torch's save_on_cpu, torchtune's rule, checkpointing) run the same layers, loss and optimizer in a plain
loop. What a hook copies is counted when it copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.data import open_dataset
from gems.engine.activation_store.store import Counters
from gems.engine.batch_loader import BatchLoader
from gems.engine.device import DTYPES, open_device
from gems.engine.pipeline import build_pipeline
from gems.engine.transport.mpi import world
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import Choice, MemoryPlan, Segment, add_memory
from gems.memory.registry import plan_of
from gems.models import layers_of
from gems.models.build import as_tuple
from gems.profile.profilers.layer_run import training_loss
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.simulation.build import compute_schedule
from gems.simulation.memory_case import memory_case
from scripts.bench.rig import allocator_peaks

MIN_BYTES = 1024  # torchtune's min_offload_size


@dataclass(frozen=True, slots=True)
class Peaks:
    """Hold the most bytes of one step.

    They are saved storages by the engine's count, what the allocator has given out and reserved, and host memory.
    """

    activation_bytes: int
    allocated_bytes: int
    reserved_bytes: int | None
    host_bytes: int


def one_rank(model: str, side_px: int, *words: str) -> RunSpec:
    """Return a run of one rank on square images; `words` are more Hydra overrides."""
    sizes = [f"data.height_px={side_px}", f"data.width_px={side_px}"]
    one = ["schedule=gpipe", "parallel.partitions=1", "train.warmup_steps=0"]
    return compose([f"model={model}", "data=synthetic", *sizes, *one, *words])


def one_rank_case(spec: RunSpec) -> MemoryCase:
    """Return what the policies of a one-rank run plan for."""
    return memory_case(spec, compute_schedule(spec), (0, len(layers_of(spec.model, spec.data))))


def planned_outcome(spec: RunSpec, case: MemoryCase) -> PlanOutcome:
    """Return what the configured policy makes of a case."""
    return case.kept if spec.memory.name == "keep" else case.outcome(plan_of(spec.memory, case))


def engine_under(spec: RunSpec, outcome: PlanOutcome) -> OneRank:
    """Return the run of a policy's outcome; one that keeps all runs its stage whole, as a user's does."""
    if spec.memory.name == "keep":
        return OneRank(spec, lower(compute_schedule(spec)), None)
    return OneRank(spec, outcome.schedule, outcome.plan)


def all_offloaded(spec: RunSpec) -> tuple[Schedule, MemoryPlan]:
    """Return the schedule and the plan by which every layer's saved tensors leave and come back on demand."""
    compute = compute_schedule(spec)
    boundaries = (0, len(layers_of(spec.model, spec.data)))
    every = {layer: Segment(layer, layer + 1, Choice.OFFLOAD, free_after=0, ahead=0) for layer in range(boundaries[-1])}
    plan = MemoryPlan.by_layer("all", boundaries, every)
    return lower(add_memory(compute, plan)), plan


class OneRank:
    """The engine on one rank, with one batch of images that every step uses."""

    def __init__(self, spec: RunSpec, schedule: Schedule, plan: MemoryPlan | None) -> None:
        self.device = open_device(spec.machine)
        cuts = (0, len(layers_of(spec.model, spec.data)))
        self.pipeline = build_pipeline(spec, world(), self.device, schedule=schedule, boundaries=cuts, plan=plan)
        self.pipeline.set_training(True)
        images, labels = self.pipeline.image_micro_batches, self.pipeline.label_micro_batches
        data = open_dataset(spec.data, spec.seed)
        loader = BatchLoader(spec, data, 0, images, labels, DTYPES[spec.train.dtype], self.device)
        self._batch = loader.batch(0)
        loader.close()
        self._step = 0

    @property
    def counters(self) -> Counters:
        """What the activation store has moved so far."""
        assert self.pipeline.segments is not None
        return self.pipeline.segments.store.counters

    def step(self) -> None:
        """Run one training step."""
        self.pipeline.train.run(self._step, self._batch)
        self._step += 1

    def peaks(self) -> Peaks:
        """Run a step to warm up and return the most that the next one held."""
        self.step()
        activations, segments = self.pipeline.train.activations, self.pipeline.segments
        activations.peak_bytes = 0
        allocated, reserved = allocator_peaks(self.device, self._static_bytes(), self.step)
        return Peaks(
            activations.peak_bytes, allocated, reserved, 0 if segments is None else segments.store.on_host.peak_bytes
        )

    def _static_bytes(self) -> int:
        """Return what is there before a step: parameters, gradients, optimizer state, buffers and the batch."""
        modules = list(self.pipeline.modules.values())
        parameters = [parameter for module in modules for parameter in module.parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = [
            value
            for state in self.pipeline.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        buffers = [buffer for module in modules for buffer in module.buffers()]
        batch = [*self._batch.images.values(), *self._batch.labels.values()]
        memory = [tensor.untyped_storage() for tensor in (*parameters, *gradients, *states, *buffers, *batch)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


@dataclass(slots=True)
class Traffic:
    """Bytes that a hook copied to host memory, and the storages that autograd saved, each once.

    `known` are storages that neither counts: parameters, buffers, images. Saved ones are held until the end, so that
    no two have the same address.
    """

    known: set[int]
    moved_bytes: int = 0
    num_copies: int = 0
    known_bytes: int = 0
    saved: dict[int, Tensor] = field(default_factory=dict)

    def see(self, tensor: Tensor) -> None:
        """Record that autograd saves a tensor."""
        if _storage(tensor) not in self.known:
            self.saved.setdefault(_storage(tensor), tensor.detach())

    def copied(self, tensor: Tensor, num_bytes: int) -> None:
        """Record that a hook copied a tensor."""
        if _storage(tensor) in self.known:
            self.known_bytes += num_bytes
        else:
            self.moved_bytes += num_bytes
            self.num_copies += 1

    @property
    def saved_bytes(self) -> int:
        """Bytes of the storages saved."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.saved.values())


class CountedSaveOnCpu(save_on_cpu):
    """torch's own, and counts what its pack hook copies: a tensor in another storage."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(pin_memory=True)  # without it nothing is copied if the device is a processor
        pack = self.pack_hook

        def counted(tensor: Tensor) -> object:
            traffic.see(tensor)
            packed = pack(tensor)
            copy = packed[1]
            if _storage(copy) != _storage(tensor):
                traffic.copied(tensor, copy.untyped_storage().nbytes())
            return packed

        self.pack_hook = counted


class TorchtuneRule(saved_tensors_hooks):
    """The rule of torchtune's OffloadActivations, by which each saved tensor is copied on its own.

    All of 1024 bytes and more, unless it is an nn.Parameter or an nn.Buffer. A view is a tensor of its own: of a weight
    (counted with the parameters here) or of an activation.
    """

    def __init__(self, traffic: Traffic) -> None:
        def pack(tensor: Tensor) -> Tensor:
            traffic.see(tensor)
            num_bytes = tensor.numel() * tensor.element_size()
            if num_bytes < MIN_BYTES or isinstance(tensor, nn.Parameter | nn.Buffer):
                return tensor
            traffic.copied(tensor, num_bytes)
            return torch.empty_like(tensor, device="cpu").copy_(tensor)

        super().__init__(pack, lambda tensor: tensor)


HOOKS: dict[str, Callable[[Traffic], AbstractContextManager[object]]] = {
    "save_on_cpu": CountedSaveOnCpu,
    "torchtune's rule": TorchtuneRule,
}


def hook_traffic(name: str, modules: nn.ModuleList, images: Tensor) -> Traffic:
    """Run a forward and backward under a hook and return what it copied."""
    traffic = Traffic({_storage(tensor) for tensor in (*modules.parameters(), *modules.buffers(), images)})
    with HOOKS[name](traffic):
        loss = plain_loss(modules, images)
    loss.backward()
    return traffic


def plain_loss(modules: nn.ModuleList, images: Tensor, is_checkpointed: bool = False) -> Tensor:
    """Run the layers and return the loss; checkpointed, each layer keeps its inputs and is recomputed in backward."""
    values: tuple[Tensor, ...] = (images,)
    for module in modules:
        made = checkpoint(module, *values, use_reentrant=False) if is_checkpointed else module(*values)
        values = as_tuple(made)
    return training_loss(values[0])


class PlainLoop:
    """A training step without the engine: forward and backward of each micro-batch, and SGD with momentum."""

    def __init__(self, modules: nn.ModuleList, images: Sequence[Tensor], way: str) -> None:
        """Take the layers, in order.

        Args:
            modules: the layers.
            images: of each micro-batch (N, C, H, W), on the device.
            way: "plain", "save_on_cpu", "torchtune" or "checkpoint".
        """
        self._modules, self._images = modules, images
        self._is_checkpointed = way == "checkpoint"
        self._hooks = PEERS[way]
        self._optimizer = torch.optim.SGD(modules.parameters(), lr=1e-3, momentum=0.9)

    def step(self) -> None:
        """Run one step."""
        self._optimizer.zero_grad(set_to_none=False)
        for images in self._images:
            with self._hooks():
                loss = plain_loss(self._modules, images, self._is_checkpointed)
            loss.backward()
        self._optimizer.step()


def _torchtune() -> AbstractContextManager[object]:
    from torchtune.training import OffloadActivations  # not a dependency

    offload: AbstractContextManager[object] = OffloadActivations()
    return offload


PEERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "save_on_cpu": lambda: save_on_cpu(pin_memory=True),
    "torchtune": _torchtune,
    "checkpoint": nullcontext,
}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
