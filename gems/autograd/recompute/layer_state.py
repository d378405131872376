"""State of layers that recomputation must not advance.

It consists of running statistics, counters and random generators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.random_draws import generators_of

# These need no copies: with tracking disabled they normalise by the batch alone, as in the first
# forward.
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)


@dataclass(slots=True)
class _Entry:
    """A buffer or number of a layer before a forward.

    `home[name]` was `value`, a tensor that equals `copy`.
    """

    home: dict[str, Any]
    name: str
    value: Any
    copy: Tensor | None = None
    version: int = 0

    @property
    def has_changed(self) -> bool:
        now = self.home.get(self.name, self.value)
        if self.copy is None:
            return now is not self.value and now != self.value
        return now is not self.value or self.value._version != self.version


ChangedState = tuple[_Entry, ...]


class LayerState:
    """Buffers and numeric attributes that a forward changes in its layers.

    The previous values of what a forward changed are stored for each micro-batch, so recomputation
    starts from the same state, whatever ran in between. The running statistics of batch norm are
    protected by its own switch, `track_running_stats`. Layers of `torch.nn` without buffers have no
    state.
    """

    def __init__(self, root: nn.Module) -> None:
        self._norms: list[nn.Module] = []
        self._others: list[nn.Module] = []
        for module in root.modules():
            if type(module).forward in _BATCH_NORMS and "forward" not in vars(module):
                self._norms.append(module)
            elif module._buffers or not type(module).__module__.startswith("torch.nn.modules."):
                self._others.append(module)

    def record(self) -> Callable[[], ChangedState]:
        """Record the state before a forward.

        Return a function that, called after the forward, returns the state that has changed.
        """
        buffers = [entry for module in self._others for entry in _buffers(module)]
        attributes = [(vars(module), vars(module).copy()) for module in self._others]

        def changed() -> ChangedState:
            entries = [entry for entry in buffers if entry.has_changed]
            for now, before in attributes:
                if not all(map(operator.is_, now.values(), before.values())):
                    entries += (entry for entry in _numbers(now, before) if entry.has_changed)
            for entry in entries:
                if entry.copy is not None:
                    entry.value = (
                        entry.value if entry.value._version == entry.version else entry.copy
                    )
                    entry.copy = None
            return tuple(entries)

        return changed

    @contextmanager
    def replay(self, state: ChangedState) -> Iterator[None]:
        """Run layers from an earlier state inside the block, then restore the current state."""
        tracked = [(vars(module), vars(module)["track_running_stats"]) for module in self._norms]
        now = [(entry, entry.home[entry.name]) for entry in state]
        try:
            for attributes, _ in tracked:
                attributes["track_running_stats"] = False
            for entry in state:
                value = entry.value
                entry.home[entry.name] = value.clone() if isinstance(value, Tensor) else value
            yield
        finally:
            for attributes, is_tracking in tracked:
                attributes["track_running_stats"] = is_tracking
            for entry, value in now:
                entry.home[entry.name] = value


class RandomState:
    """The random generators that layers on a device may use: torch's, and the layers' own."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._generators = generators_of(device)
        own = (value for module in root.modules() for value in vars(module).values())
        self._generators += [value for value in own if isinstance(value, torch.Generator)]

    def get(self) -> tuple[Tensor, ...]:
        """Return the state of each generator, on the host."""
        return tuple(generator.get_state() for generator in self._generators)

    def set(self, states: Sequence[Tensor]) -> None:
        """Set the state of each generator."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def has_advanced(self, since: Sequence[Tensor]) -> bool:
        """Return whether random numbers were drawn since then."""
        return not all(map(torch.equal, since, self.get()))

    @contextmanager
    def replay(self, states: Sequence[Tensor] | None) -> Iterator[None]:
        """Draw from `states` inside the block, and restore the current states afterwards.

        Do nothing if `states` is None.
        """
        now = None if states is None else self.get()
        try:
            if states is not None:
                self.set(states)
            yield
        finally:
            if now is not None:
                self.set(now)


def _buffers(module: nn.Module) -> Iterator[_Entry]:
    for name, value in module._buffers.items():
        if value is not None:
            yield _Entry(module._buffers, name, value, value.detach().clone(), value._version)


def _numbers(now: dict[str, Any], before: dict[str, Any]) -> Iterator[_Entry]:
    for name, value in before.items():
        if isinstance(value, int | float):
            yield _Entry(now, name, value)
