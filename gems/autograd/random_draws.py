"""Random numbers of layers (dropout, stochastic depth) that do not depend on how a run is split.

Each drawing module has its own stream: on entry, the generators are seeded with the run's seed, the
step, the micro-batch and the module's name; on exit, their states are restored. So the numbers are
the same for every partition, schedule, direction and number of replicas, and also if a forward is
recomputed or a run is resumed.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

# attributes with the rate at which a module draws, and classes that always draw
_RATES = ("p", "drop_prob", "drop_rate", "dropout", "dropout_p", "attention_dropout")
_ALWAYS = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_MASK = 2**63 - 1


def generators_of(device: torch.device | None) -> list[torch.Generator]:
    """Return the torch generators from which layers on a device may draw."""
    if device is None or device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def draws_numbers(module: nn.Module) -> bool:
    """Return whether the class or a positive rate shows that a module draws random numbers."""
    rates = (getattr(module, name, None) for name in _RATES)
    return isinstance(module, _ALWAYS) or any(
        isinstance(rate, int | float) and rate > 0 for rate in rates
    )


class RandomDraws:
    """The streams of all watched modules, for the micro-batch of the last call of `at`.

    If `has_paths`, the modules of a layer are named by their paths in the whole network, as in a
    user's network.
    """

    def __init__(self, seed: int, has_paths: bool = False) -> None:
        self._seed = seed
        self._has_paths = has_paths
        self._now = (0, 0)
        self._watched: dict[nn.Module, _Stream] = {}

    def watch(self, layer: str, root: nn.Module) -> None:
        """Watch the modules of a layer that draw or may draw.

        A module that is not torch's may draw until one forward shows that it does not.
        """
        for path, module in root.named_modules():
            is_known = draws_numbers(module)
            if module in self._watched or (
                type(module).__module__.startswith("torch.") and not is_known
            ):
                continue
            name = zlib.crc32(self.name_of(layer, path).encode())
            self._watched[module] = _Stream(self, name, is_known, module)

    def is_drawing(self, layer: nn.Module) -> bool:
        """Return whether a module of a layer draws random numbers, or has not run yet and may."""
        streams = (self._watched.get(module) for module in layer.modules())
        return any(stream is not None and stream.is_attached for stream in streams)

    def name_of(self, layer: str, path: str) -> str:
        """Return the name of a module's stream; `path` is that of the module in its layer."""
        return path if path and self._has_paths else f"{layer}.{path}"

    def at(self, step: int, micro_batch: int) -> None:
        """Set the micro-batch that runs next, by its number in the global batch."""
        self._now = step, micro_batch

    def seed_of(self, name: int) -> int:
        """Return the seed of a module's stream for the present micro-batch."""
        # the hash of integers is the same in every process
        return hash((self._seed, *self._now, name)) & _MASK


class _Stream:
    """The random numbers of one module, by hooks.

    Unless the module `is_known` to draw, its first forward removes the hooks if it does not draw.
    """

    def __init__(self, draws: RandomDraws, name: int, is_known: bool, module: nn.Module) -> None:
        self._draws = draws
        self._name = name
        self._is_known = is_known
        self.is_attached = True
        self._outer: list[list[tuple[torch.Generator, Tensor]]] = []
        self._hooks = (
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave),
        )

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not module.training:
            return
        device = next((value.device for value in inputs if isinstance(value, Tensor)), None)
        generators = generators_of(device)
        self._outer.append([(generator, generator.get_state()) for generator in generators])
        for generator in generators:
            generator.manual_seed(self._draws.seed_of(self._name))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not module.training:
            return
        has_drawn = self._is_known
        for generator, state in self._outer.pop():
            if not self._is_known:
                drawn = generator.get_state()
                has_drawn |= not torch.equal(
                    drawn, generator.manual_seed(self._draws.seed_of(self._name)).get_state()
                )
            generator.set_state(state)
        self._is_known = has_drawn
        if not has_drawn:
            self.is_attached = False
            for hook in self._hooks:
                hook.remove()
