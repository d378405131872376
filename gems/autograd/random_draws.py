"""Random numbers of layers (dropout, stochastic depth) that do not depend on how a run is split.

Before each module that draws, the generators are seeded by the run's seed, the step, the micro-batch and the module's
name. So any partition, schedule, direction or number of replicas, a recomputation and a resumed run draw the same.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gems.config.schema import ModelConfig

# Attributes under which modules keep the rate at which they draw, and those that always do.
_RATES = ("p", "drop_prob", "drop_rate", "dropout", "dropout_p", "attention_dropout")
_ALWAYS = (nn.RReLU,)
_MASK = 2**63 - 1


def draws_numbers(module: nn.Module) -> bool:
    """Return whether a module draws random numbers in training: it has a rate above 0, or a method that is random."""
    rates = (getattr(module, name, None) for name in _RATES)
    return isinstance(module, _ALWAYS) or any(isinstance(rate, int | float) and rate > 0 for rate in rates)


def layer_prefix(model: ModelConfig, layer: str) -> str:
    """Return what stands before the names of a layer's modules: parts of a user's network have whole paths."""
    return "" if model.target is not None else f"{layer}."


class RandomDraws:
    """Seeds the generators before each watched module, for the micro-batch that `at` has named last."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._now = (0, 0)

    def watch(self, root: nn.Module, prefix: str = "") -> int:
        """Seed before each module in `root` that draws, named by its path after `prefix`; return how many there are."""
        found = [(name, module) for name, module in root.named_modules() if draws_numbers(module)]
        for name, module in found:
            module.register_forward_pre_hook(partial(self._begin, zlib.crc32(f"{prefix}{name}".encode())))
        return len(found)

    def at(self, step: int, micro_batch: int) -> None:
        """Name the micro-batch that runs next, by its number in the global batch."""
        self._now = step, micro_batch

    def _begin(self, name: int, module: nn.Module, given: Any) -> None:
        if not module.training:
            return
        seed = hash((self._seed, *self._now, name)) & _MASK  # of whole numbers, so the same in every process
        torch.default_generator.manual_seed(seed)
        device = next((value.device for value in given if isinstance(value, Tensor)), None)
        if device is not None and device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
