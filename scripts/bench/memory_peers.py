"""What others do with saved tensors: torch's save_on_cpu, torchtune's rule, and checkpointing, as a step of a plain loop.

Each runs the same layers, loss and optimizer as the engine does. What a hook copies is counted where it copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gems.models.build import as_tuple
from gems.profile.profilers.layer_run import training_loss

MIN_BYTES = 1024  # torchtune's min_offload_size


@dataclass(slots=True)
class Traffic:
    """Bytes that a hook copied to host memory, and the storages that autograd saved, each once.

    `known` are storages that neither counts: parameters, buffers, images. Those saved are held until the end, so that
    no two have the same address.
    """

    known: set[int]
    moved_bytes: int = 0
    num_copies: int = 0
    known_bytes: int = 0
    saved: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, modules: nn.Module, images: Tensor) -> Traffic:
        """Begin at nothing."""
        return cls({_memory(tensor) for tensor in (*modules.parameters(), *modules.buffers(), images)})

    def see(self, tensor: Tensor) -> None:
        """Record that autograd saves a tensor."""
        if _memory(tensor) not in self.known:
            self.saved.setdefault(_memory(tensor), tensor.detach())

    def copied(self, tensor: Tensor, num_bytes: int) -> None:
        """Record that a hook copied a tensor."""
        if _memory(tensor) in self.known:
            self.known_bytes += num_bytes
        else:
            self.moved_bytes += num_bytes
            self.num_copies += 1

    @property
    def saved_bytes(self) -> int:
        """Bytes of the storages saved."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.saved.values())


class CountedSaveOnCpu(save_on_cpu):
    """torch's own, with what its pack copies counted: the tensor that it gives lies in another memory."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(pin_memory=True)  # without it nothing is copied where the device is a processor
        pack = self.pack_hook

        def counted(tensor: Tensor) -> object:
            traffic.see(tensor)
            packed = pack(tensor)
            copy = packed[1]
            if _memory(copy) != _memory(tensor):
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
            is_static = isinstance(tensor, nn.Parameter | nn.Buffer)
            if num_bytes < MIN_BYTES or is_static:
                return tensor
            traffic.copied(tensor, num_bytes)
            return torch.empty_like(tensor, device="cpu").copy_(tensor)

        super().__init__(pack, lambda tensor: tensor)


HOOKS: dict[str, Callable[[Traffic], AbstractContextManager[object]]] = {
    "save_on_cpu": CountedSaveOnCpu,
    "torchtune's rule": TorchtuneRule,
}


def hook_traffic(name: str, modules: nn.ModuleList, images: Tensor) -> Traffic:
    """Run a forward and backward under a hook and gives what it copied."""
    traffic = Traffic.of(modules, images)
    with HOOKS[name](traffic):
        loss = loss_of(modules, images)
    loss.backward()
    return traffic


def loss_of(modules: nn.ModuleList, images: Tensor, is_checkpointed: bool = False) -> Tensor:
    """Run the layers and gives the loss; checkpointed, each layer keeps its inputs and is run again in backward."""
    values: tuple[Tensor, ...] = (images,)
    for module in modules:
        made = checkpoint(module, *values, use_reentrant=False) if is_checkpointed else module(*values)
        values = as_tuple(made)
    return training_loss(values[0])


class PlainLoop:
    """A training step without the engine: forward and backward of each micro-batch, and SGD with momentum."""

    def __init__(self, modules: nn.ModuleList, images: Sequence[Tensor], way: str) -> None:
        """Take the layers.

        Args:
            modules: in order.
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
                loss = loss_of(self._modules, images, self._is_checkpointed)
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


def has_torchtune() -> bool:
    """Whether torchtune can be imported."""
    try:
        _torchtune()
    except Exception:
        return False
    return True


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
