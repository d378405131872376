"""A run of one rank under a memory policy, and the offloading of others, for benchmarks.

The peers (torch's save_on_cpu, torchtune's rule, checkpointing) run the same layers, loss and
optimizer in a plain loop. What a hook copies is counted when it copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gems.autograd.outputs import as_tuple
from gems.config.schema import DataConfig, ModelConfig, RunSpec
from gems.engine.batch_loader import BatchLoader
from gems.engine.device import open_device
from gems.engine.rank import Rank
from gems.engine.transport.mpi import world
from gems.errors import GemsError
from gems.memory.plan import Choice, MemoryPlan, Segment, add_memory
from gems.models import layers_of
from gems.models.build import build_layers
from gems.plan.draft import Draft
from gems.plan.evaluate import evaluate
from gems.plan.rank_plan import RankPlan
from gems.profile.profilers.layer_run import training_loss
from gems.schedule.lower import lower
from scripts.bench.rig import allocator_peaks, composed, square

MIN_BYTES = 1024  # torchtune's min_offload_size
WARM_UP_STEPS = 3  # after which CUDA graphs, if they are on, are captured and compared


def one_rank(model: str, side_px: int, *words: str) -> RunSpec:
    """Return a run of one rank on square images; `words` are more Hydra overrides."""
    sizes = f"model={model} data=synthetic {square(side_px)}"
    ranks = "schedule=gpipe parallel.partitions=1 benchmark.skip_steps=0 cost=profile"
    return composed(sizes, ranks, *words)


def layer_modules(model: ModelConfig, data: DataConfig, device: str = "cpu") -> nn.ModuleList:
    """Build all layers of a model."""
    layers = layers_of(model, data)
    return nn.ModuleList(build_layers(layers, 0, len(layers), seed=0, device=device))


def all_offloaded(spec: RunSpec) -> RankPlan:
    """Return the plan that offloads every layer's saved tensors on demand."""
    boundaries = (0, len(layers_of(spec.model, spec.data)))
    every = {
        layer: Segment(layer, layer + 1, Choice.OFFLOAD, free_after=0, ahead=0)
        for layer in range(boundaries[-1])
    }
    plan = MemoryPlan.by_layer("all", boundaries, every)
    return RankPlan(spec, lower(add_memory(Draft(spec).compute, plan)), boundaries, plan)


class OneRank:
    """The engine on one rank, with one batch of images that every step uses."""

    def __init__(self, plan: RankPlan) -> None:
        self.device = open_device(plan.spec.machine)
        self.rank = Rank.open(plan, world(), self.device)
        self.rank.stages.set_training(True)
        loader = BatchLoader.open(plan, world(), self.device)
        self._batch = loader.batch(0)
        if self._batch.rows is not None:  # they are read once
            rows = [*map(self._batch.rows, range(plan.schedule.num_micro_batches))]
            self._batch = replace(self._batch, rows=rows.__getitem__)
        loader.close()
        self._step = 0

    def step(self) -> None:
        """Run one training step."""
        self.rank.train.run(self._step, self._batch)
        self._step += 1

    def peaks(self) -> dict[str, Any]:
        """Run steps to warm up and return the most bytes of the next one.

        These are saved storages by the engine's count, what the allocator has given out and
        reserved, and host memory.
        """
        for _ in range(WARM_UP_STEPS):
            self.step()
        activations = self.rank.train.activations
        store = self.rank.train.store
        activations.peak_bytes = 0
        allocated, reserved = allocator_peaks(self.device, self.static_bytes(), self.step)
        return {
            "activation_bytes": activations.peak_bytes,
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "host_bytes": 0 if store is None else store.on_host.peak_bytes,
        }

    def static_bytes(self) -> int:
        """Return what is there before a step.

        Parameters, gradients, optimizer state, buffers and the batch.
        """
        modules = nn.ModuleList(self.rank.stages.modules.values())
        tensors = [*modules.parameters(), *modules.buffers()]
        tensors += [
            parameter.grad for parameter in modules.parameters() if parameter.grad is not None
        ]
        values = [
            value for state in self.rank.update.optimizer.state.values() for value in state.values()
        ]
        tensors += [value for value in values if isinstance(value, Tensor)]
        tensors += [*self._batch.images.values(), *self._batch.labels.values()]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def under_policy(spec: RunSpec) -> tuple[dict[str, Any], OneRank | None]:
    """Run the configured policy.

    Return what a step held beside the prediction, or that it was refused, and the run.
    """
    try:
        plan = evaluate(spec)
        run = OneRank(plan.for_ranks)
        peaks = run.peaks()
    except (torch.OutOfMemoryError, GemsError) as error:
        return {"refused": " ".join(str(error).split())[:200]}, None
    (rank,) = plan.memory.ranks
    return {
        "predicted_bytes": rank.peak_bytes,
        "predicted_activation_bytes": rank.peak_activation_bytes,
        "predicted_host_bytes": rank.peak_host_bytes,
        **peaks,
        "error": rank.peak_bytes / peaks["allocated_bytes"] - 1,
        "activation_error": rank.peak_activation_bytes / peaks["activation_bytes"] - 1,
    }, run


def why_not(row: dict[str, Any]) -> str:
    """Return the note of a row whose case did not run."""
    why = row.get("refused") or row.get("failed")
    return f"does not run: {why}" if why else ""


@dataclass(slots=True)
class Traffic:
    """Bytes that a hook copied to host memory, and the storages that autograd saved, each once.

    `known` are storages that neither counts: parameters, buffers, images. Saved ones are held until
    the end, so that no two have the same address.
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


def counted_save_on_cpu(traffic: Traffic) -> saved_tensors_hooks:
    """Return torch's own hooks, which also count the tensors that they copy to another storage."""
    hooks = save_on_cpu(
        pin_memory=True
    )  # without it nothing is copied if the device is a processor
    pack = hooks.pack_hook

    def counted(tensor: Tensor) -> object:
        traffic.see(tensor)
        packed = pack(tensor)
        if _storage(packed[1]) != _storage(tensor):
            traffic.copied(tensor, packed[1].untyped_storage().nbytes())
        return packed

    hooks.pack_hook = counted
    return hooks


def torchtune_rule(traffic: Traffic) -> saved_tensors_hooks:
    """Return hooks that copy each saved tensor, as torchtune's OffloadActivations does.

    All of 1024 bytes and more, unless it is an nn.Parameter or an nn.Buffer. A view is a tensor of
    its own: of a weight (counted with the parameters here) or of an activation.
    """

    def pack(tensor: Tensor) -> Tensor:
        traffic.see(tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < MIN_BYTES or isinstance(tensor, nn.Parameter | nn.Buffer):
            return tensor
        traffic.copied(tensor, num_bytes)
        return torch.empty_like(tensor, device="cpu").copy_(tensor)

    return saved_tensors_hooks(pack, lambda tensor: tensor)


HOOKS = {"save_on_cpu": counted_save_on_cpu, "torchtune's rule": torchtune_rule}


def hook_traffic(name: str, modules: nn.ModuleList, images: Tensor) -> Traffic:
    """Run a forward and backward under a hook and return the copied bytes."""
    traffic = Traffic(
        {_storage(tensor) for tensor in (*modules.parameters(), *modules.buffers(), images)}
    )
    with HOOKS[name](traffic):
        loss = plain_loss(modules, images)
    loss.backward()
    return traffic


def plain_loss(modules: nn.ModuleList, images: Tensor, is_checkpointed: bool = False) -> Tensor:
    """Run the layers and return the loss.

    Checkpointed, each layer keeps its inputs and is recomputed in backward.
    """
    values: tuple[Tensor, ...] = (images,)
    for module in modules:
        loss = (
            checkpoint(module, *values, use_reentrant=False) if is_checkpointed else module(*values)
        )
        values = as_tuple(loss)
    return training_loss(values[0])


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


class PlainLoop:
    """A training step without the engine.

    Forward and backward of each micro-batch, and SGD with momentum.
    `images` are those of each micro-batch (N, C, H, W) on the device, `way` is one of PEERS.
    """

    def __init__(self, modules: nn.ModuleList, images: Sequence[Tensor], way: str) -> None:
        self._modules = modules
        self._images = images
        self._way = way
        self._optimizer = torch.optim.SGD(modules.parameters(), lr=1e-3, momentum=0.9)

    def step(self) -> None:
        """Run one step."""
        self._optimizer.zero_grad(set_to_none=False)
        for images in self._images:
            with PEERS[self._way]():
                loss = plain_loss(self._modules, images, self._way == "checkpoint")
            loss.backward()
        self._optimizer.step()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
