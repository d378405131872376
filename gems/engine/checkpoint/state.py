"""The state of a rank: which tensors make it, by which names, and how they get back into a pipeline of any cut."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from gems.autograd.recompute.layer_state import RandomState
from gems.engine.checkpoint.manifest import Manifest, layout_of
from gems.engine.checkpoint.shard import shard_name
from gems.engine.gradients import Held
from gems.engine.pipeline import Pipeline
from gems.errors import ConfigError

LOSSES = "losses"
_PYTHON, _NUMPY, _TORCH = "random/python", "random/numpy", "random/torch"


def parameter_name(layer: str, key: str) -> str:
    """Return the name of a layer's parameter in a shard."""
    return f"parameters/{layer}/{key}"


def buffer_name(layer: str, key: str) -> str:
    """Return the name of a layer's buffer in a shard."""
    return f"buffers/{layer}/{key}"


def slot_name(slot: str, layer: str, key: str) -> str:
    """Return the name of what the optimizer keeps for a parameter as `slot`."""
    return f"optimizer/{slot}/{layer}/{key}"


def copy_name(direction: int, layer: str, key: str) -> str:
    """Return the name of a buffer that may differ from copy to copy."""
    return f"copies/{direction}/{layer}/{key}"


@dataclass(frozen=True, slots=True)
class State:
    """The tensors that a rank saves, where they live.

    `early` are those that the next forward changes, `late` those that only the optimizer's step does.
    """

    early: dict[str, Tensor]
    late: dict[str, Tensor]


def owners_of(pipeline: Pipeline) -> dict[str, int]:
    """Return the rank whose shard has a layer, or, where operators are placed, an operator.

    The copies of a stage, over directions and replicas, are equal, and take turns: each writes a share of its layers.
    """
    placement, parallel = pipeline.schedule.placement, pipeline.spec.parallel
    owners = {}
    for stage in range(placement.num_stages):
        for index, part in enumerate(pipeline.contents.parts_in(stage)):
            replica, direction = divmod(index, placement.num_directions)
            owners[part] = replica % parallel.replicas * parallel.partitions + placement.rank_of(direction, stage)
    return owners


def state_of(pipeline: Pipeline) -> State:
    """Return what this rank saves: its share of the layers, its copies' counters and its random states.

    Parameters, the optimizer's state and running statistics are equal in all copies (each step sums gradients and
    averages statistics over them), so one copy is saved. Other buffers, such as batch norm's count of batches, advance
    with the micro-batches of each copy, so every rank saves its own too.
    """
    owners, mine = owners_of(pipeline), pipeline.comm.rank
    state = State({}, {})
    for held, name, part, module in _layers(pipeline):
        if owners[part] == mine:
            state.early.update({buffer_name(name, key): buffer for key, buffer in module.named_buffers()})
            for key, parameter in module.named_parameters():
                state.late[parameter_name(name, key)] = parameter.detach()
                for slot, value in pipeline.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        state.late[slot_name(slot, name, key)] = value
        for key, buffer in _counters(module):
            state.early[copy_name(held[0], name, key)] = buffer
    state.early.update(_random_states(pipeline))
    return state


def restore_state(pipeline: Pipeline, folder: Path, manifest: Manifest) -> None:
    """Put a checkpoint's state into every layer of this rank, whatever the cut it was saved with.

    Random states and copies' counters come back where each rank holds what it held; on another layout random numbers go on
    from the seed, the rank and the step.

    Raises:
        ConfigError: a tensor is missing or of another shape.
    """
    optimizer_state: dict[int, dict[str, Tensor]] = {}
    places = {id(p): place for place, p in enumerate(pipeline.optimizer.param_groups[0]["params"])}
    is_same = manifest.layout == layout_of(pipeline.spec, pipeline.schedule, pipeline.cuts)
    with _Shards(folder, manifest) as shards, torch.no_grad():
        for held, name, part, module in _layers(pipeline):
            owner = _owner_of(part, name, manifest, folder)
            for key, buffer in module.named_buffers():
                shards.copy_into(buffer, owner, buffer_name(name, key))
            for key, parameter in module.named_parameters():
                shards.copy_into(parameter, owner, parameter_name(name, key))
                slots = {
                    slot: shards.tensor(owner, slot_name(slot, name, key))
                    for slot in shards.slots(owner)
                    if shards.has(owner, slot_name(slot, name, key))
                }
                if slots:
                    optimizer_state[places[id(parameter)]] = slots
            if is_same:
                for key, buffer in _counters(module):
                    shards.copy_into(buffer, pipeline.comm.rank, copy_name(held[0], name, key))
        if is_same:
            _set_random_states(pipeline, shards)
        else:
            _reseed(pipeline.spec.seed, pipeline.comm.rank, manifest.step)
    groups = pipeline.optimizer.state_dict()["param_groups"]
    pipeline.optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})


def read_losses(folder: Path, manifest: Manifest) -> list[float]:
    """Read the training loss of every step that was done; rank 0 saved it."""
    with _Shards(folder, manifest) as shards:
        return [float(loss) for loss in shards.tensor(0, LOSSES)]


class _Shards:
    """The files of a checkpoint, each opened when the first tensor of it is asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._step = manifest.step
        self._files: dict[int, Any] = {}
        self._names: dict[int, frozenset[str]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *of_error: object) -> None:
        self._stack.close()

    def has(self, rank: int, name: str) -> bool:
        """Return whether a rank's file has a tensor."""
        self._file(rank)
        return name in self._names[rank]

    def slots(self, rank: int) -> list[str]:
        """Return what the optimizer keeps for parameters, by name."""
        self._file(rank)
        return sorted({name.split("/")[1] for name in self._names[rank] if name.startswith("optimizer/")})

    def tensor(self, rank: int, name: str) -> Tensor:
        """Read a tensor; of its own memory, for the library's may be the file's, which is removed one day."""
        if not self.has(rank, name):
            raise self._misfit(rank, f"holds no {name}")
        tensor: Tensor = self._file(rank).get_tensor(name)
        return tensor.clone()

    def copy_into(self, target: Tensor, rank: int, name: str) -> None:
        """Read a tensor into one that is there."""
        found = self.tensor(rank, name)
        if found.shape != target.shape or found.dtype != target.dtype:
            theirs, mine = (f"{tuple(t.shape)} {t.dtype}" for t in (found, target))
            raise self._misfit(rank, f"has {name} as {theirs}, not {mine}")
        target.copy_(found)

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            path = str(self._folder / shard_name(rank))
            self._files[rank] = self._stack.enter_context(safe_open(path, framework="pt"))
            self._names[rank] = frozenset(self._files[rank].keys())
        return self._files[rank]

    def _misfit(self, rank: int, what: str) -> ConfigError:
        return ConfigError(
            "train.resume", self._folder, f"does not fit this model: {shard_name(rank)} {what}",
            "use the model that it was saved with",
        )  # fmt: skip


def _layers(pipeline: Pipeline) -> Iterator[tuple[Held, str, str, nn.Module]]:
    """Yield what this rank holds: direction and stage, the layer's name, and that of the operator where such are placed."""
    for held in pipeline.modules:
        parts = pipeline.contents.parts_in(held[1])
        for part, (name, module) in zip(parts, pipeline.named_layers(held), strict=True):
            yield held, name, part, module


def _owner_of(part: str, name: str, manifest: Manifest, folder: Path) -> int:
    """Return the rank whose shard has an operator, or its whole layer."""
    owner = manifest.owners.get(part, manifest.owners.get(name))
    if owner is None:
        raise ConfigError(
            "train.resume", folder, f"has layer {name} in operators on several ranks",
            "resume it with schedule=placed, or start from its weights (train.initial_checkpoint)",
        )  # fmt: skip
    return owner


def _counters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the buffers that no step averages over the copies: all that are not floating-point."""
    return ((key, buffer) for key, buffer in module.named_buffers() if not buffer.is_floating_point())


def _torch_random(pipeline: Pipeline) -> RandomState:
    return RandomState(nn.ModuleList(pipeline.modules.values()), pipeline.device)


def _random_states(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return every random state of this process as tensors: that of torch, of its layers, of numpy and of Python."""
    version, key, gauss = random.getstate()
    _, words, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        # a Gaussian in store goes as its bits
        _PYTHON: torch.tensor([version, *key, gauss is not None, _bits(gauss or 0.0)], dtype=torch.int64),
        _NUMPY: torch.tensor([*map(int, words), place, has_gauss, _bits(float(cached))], dtype=torch.int64),
        **{f"{_TORCH}/{number}": state for number, state in enumerate(_torch_random(pipeline).now())},
    }


def _set_random_states(pipeline: Pipeline, shards: _Shards) -> None:
    rank, generators = pipeline.comm.rank, _torch_random(pipeline)
    version, *key, has_gauss, gauss = shards.tensor(rank, _PYTHON).tolist()
    random.setstate((version, tuple(key), _number(gauss) if has_gauss else None))
    *words, place, has_cached, cached = shards.tensor(rank, _NUMPY).tolist()
    np.random.set_state(("MT19937", np.array(words, np.uint32), place, has_cached, _number(cached)))
    generators.set([shards.tensor(rank, f"{_TORCH}/{number}") for number in range(len(generators.now()))])


def _reseed(seed: int, rank: int, step: int) -> None:
    drawn = np.random.SeedSequence((seed, rank, step)).generate_state(3, np.uint32)
    torch.manual_seed(int(drawn[0]))
    np.random.seed(int(drawn[1]))
    random.seed(int(drawn[2]))


def _bits(number: float) -> int:
    return int(np.float64(number).view(np.int64))


def _number(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
