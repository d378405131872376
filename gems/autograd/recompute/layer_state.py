"""Layer state: running statistics, counters and other state of layers that a second forward must not advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Their second run needs no copies: with tracking off they normalise by the batch alone, as in the first.
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)


@dataclass(slots=True)
class _Cell:
    """One buffer or number of a layer as it was: `home[name]` was `value`, a tensor equal to `copy`."""

    home: dict[str, Any]
    name: str
    value: Any
    copy: Tensor | None = None
    version: int = 0

    @classmethod
    def of_buffer(cls, home: dict[str, Any], name: str, value: Tensor) -> _Cell:
        return cls(home, name, value, value.detach().clone(), value._version)

    @property
    def has_moved(self) -> bool:
        now = self.home.get(self.name, self.value)
        if self.copy is None:
            return now is not self.value and now != self.value
        return now is not self.value or self.value._version != self.version

    def let_go(self) -> None:
        """Keep of a tensor what it was, and only once."""
        if self.copy is not None:
            self.value = self.value if self.value._version == self.version else self.copy
            self.copy = None


State = tuple[_Cell, ...]


class LayerState:
    """What a forward changes in its layers besides giving an output: buffers, and numbers that are attributes.

    Batch norm's running statistics are left alone by its own switch; of all other layers outside of `torch.nn`, and of
    those in it that have buffers, what a forward has changed is noted with the micro-batch, so that its second run
    starts from the same state whatever ran in between.
    """

    def __init__(self, root: nn.Module) -> None:
        found = list(root.modules())
        self._norms = [module for module in found if _is_batch_norm(module)]
        self._others = [
            module for module in found if not _is_batch_norm(module) and (_is_own(module) or module._buffers)
        ]

    def before(self) -> Callable[[], State]:
        """Record the state now; called behind the forward, what this gives tells what was changed, and from what."""
        cells = [cell for module in self._others for cell in _cells(module)]

        def changed() -> State:
            moved = tuple(cell for cell in cells if cell.has_moved)
            for cell in moved:
                cell.let_go()
            return moved

        return changed

    @contextmanager
    def again(self, state: State) -> Iterator[None]:
        """Let layers run from an earlier state inside; behind it, all is as it was."""
        tracked = [(vars(module), module.track_running_stats) for module in self._norms]
        now = [(cell, cell.home[cell.name]) for cell in state]
        try:
            for attributes, _ in tracked:
                attributes["track_running_stats"] = False
            for cell in state:
                cell.home[cell.name] = cell.value
            yield
        finally:
            for attributes, was in tracked:
                attributes["track_running_stats"] = was
            for cell, value in now:
                cell.home[cell.name] = value


class RandomState:
    """The random numbers that layers on a device may draw: torch's generators, and those that layers own."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        own = (value for module in root.modules() for value in vars(module).values())
        self._generators += [value for value in own if isinstance(value, torch.Generator)]

    def now(self) -> tuple[Tensor, ...]:
        """Return the state of every generator, on the host."""
        return tuple(generator.get_state() for generator in self._generators)

    def set(self, states: Sequence[Tensor]) -> None:
        """Put every generator into the state given."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def moved(self, since: Sequence[Tensor]) -> bool:
        """Return whether numbers were drawn since then."""
        return not all(torch.equal(was, now) for was, now in zip(since, self.now(), strict=True))

    @contextmanager
    def again(self, states: Sequence[Tensor] | None) -> Iterator[None]:
        """Draw from `states` on inside, and from where it was behind; with None nothing is drawn."""
        now = None if states is None else self.now()
        try:
            if states is not None:
                self.set(states)
            yield
        finally:
            if now is not None:
                self.set(now)


def _is_batch_norm(module: nn.Module) -> bool:
    return type(module).forward in _BATCH_NORMS and "forward" not in vars(module)


def _is_own(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.nn.modules.")


def _cells(module: nn.Module) -> Iterator[_Cell]:
    for name, value in module._buffers.items():
        if value is not None:
            yield _Cell.of_buffer(module._buffers, name, value)
    for name, value in vars(module).items():
        if isinstance(value, int | float):
            yield _Cell(vars(module), name, value)
