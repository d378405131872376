"""The state of a rank: named tensors, copied to the host and restored into any partition.

In a shard they are named `parameters/LAYER/KEY`, `average/LAYER/KEY`, `buffers/LAYER/KEY`,
`optimizer/SLOT/LAYER/KEY` and, for a buffer that may differ from copy to copy,
`copies/DIRECTION/LAYER/KEY`. Rank 0 also has `losses`, `schedule` and `loss_scale`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from gems.autograd.recompute.layer_state import RandomState
from gems.engine.checkpoint.manifest import Manifest, rank_layout, shard_name
from gems.engine.rank import Rank
from gems.engine.stage import StageKey
from gems.errors import ConfigError

LOSSES = "losses"
SCHEDULE = "schedule"
LOSS_SCALE = "loss_scale"
NUMBER = ":number"  # suffix of a slot that is no tensor
_PYTHON = "random/python"
_NUMPY = "random/numpy"
_TORCH = "random/torch"
Averages = Mapping[nn.Parameter, Tensor]


def layer_owners(rank: Rank) -> dict[str, int]:
    """Return the rank whose shard has each layer, or each operator if stages are operators.

    The equal copies of a stage, over directions and replicas, each write a share of its layers.
    """
    placement = rank.plan.schedule.placement
    parallel = rank.plan.spec.parallel
    owners = {}
    for stage in range(placement.num_stages):
        for index, part in enumerate(rank.stages.of_model.unit_names(stage)):
            replica, direction = divmod(index, placement.num_directions)
            owners[part] = replica % parallel.replicas * parallel.partitions + placement.rank_of(
                direction, stage
            )
    return owners


def state_tensors(rank: Rank) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that this rank saves.

    These are its share of the layers, the counters of its copies, and its random states.
    Parameters, optimizer state and running statistics are equal in all copies, so only one copy is
    saved. Other buffers, such as batch norm's count of batches, advance with the micro-batches of
    each copy, so every rank saves its own.

    Returns:
        The tensors that the next forward changes, and those that only the optimizer changes.
    """
    owners = layer_owners(rank)
    index = rank.comm.rank
    early = _random_states(rank)
    late = {}
    update = rank.update
    averages = {} if update.average is None else update.average.by_parameter()
    if index == 0:
        early[SCHEDULE] = update.schedule.state()
        if update.scale is not None:
            early[LOSS_SCALE] = update.scale.state()
    for (direction, _), name, part, module in _layers(rank):
        if owners[part] == index:
            early |= {f"buffers/{name}/{key}": buffer for key, buffer in module.named_buffers()}
            for key, parameter in module.named_parameters():
                late[f"parameters/{name}/{key}"] = parameter.detach()
                if parameter in averages:
                    late[f"average/{name}/{key}"] = averages[parameter]
                for slot, value in update.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        late[f"optimizer/{slot}/{name}/{key}"] = value
                    elif isinstance(value, int | float):
                        late[f"optimizer/{slot}{NUMBER}/{name}/{key}"] = torch.tensor(
                            value, dtype=torch.float64
                        )
        early |= {f"copies/{direction}/{name}/{key}": buffer for key, buffer in _counters(module)}
    return early, late


def restore_state(rank: Rank, folder: Path, manifest: Manifest) -> list[float]:
    """Load a checkpoint into every layer of this rank, whatever partition it was saved with.

    Random states and the counters of copies are restored if the layout is the same. Otherwise,
    generators are seeded anew from the seed, the rank and the step.

    Returns:
        On rank 0, the training loss of every step that was done.

    Raises:
        ConfigError: A tensor is missing or has another shape.
    """
    update = rank.update
    averages = {} if update.average is None else update.average.by_parameter()
    groups = update.optimizer.state_dict()["param_groups"]
    parameters = (p for group in update.optimizer.param_groups for p in group["params"])
    places = {id(p): place for place, p in enumerate(parameters)}
    optimizer_state: dict[int, dict[str, Any]] = {}
    is_same = manifest.layout == rank_layout(rank.plan)
    with _Shards(folder) as shards, torch.no_grad():
        for (direction, _), name, part, module in _layers(rank):
            # of an operator, or of its layer
            owner = manifest.owners.get(part, manifest.owners.get(name))
            if owner is None:
                raise ConfigError(
                    "train.resume",
                    folder,
                    f"has layer {name} in operators on several ranks",
                    "resume it with schedule=placed, or start from its weights"
                    " (train.initial_checkpoint)",
                )
            _restore_layer(shards, owner, name, module, averages)
            for key, parameter in module.named_parameters():
                state = shards.optimizer_state(owner, f"{name}/{key}")
                if state and parameter.requires_grad:
                    optimizer_state[places[id(parameter)]] = state
            if is_same:
                for key, buffer in _counters(module):
                    shards.copy_into(buffer, rank.comm.rank, f"copies/{direction}/{name}/{key}")
        if is_same:
            _set_random_states(rank, shards)
        else:
            _seed_random_states(rank.plan.spec.seed, rank.comm.rank, manifest.step)
        losses = shards.tensor(0, LOSSES).tolist() if rank.comm.rank == 0 else []
        if update.scale is not None and LOSS_SCALE in shards.names(0):
            update.scale.restore(shards.tensor(0, LOSS_SCALE))
        schedule = shards.tensor(0, SCHEDULE) if SCHEDULE in shards.names(0) else None
    update.optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})
    update.schedule.restore(manifest.step, schedule)
    return list(map(float, losses))


def _restore_layer(
    shards: _Shards, owner: int, name: str, module: nn.Module, averages: Averages
) -> None:
    """Read the buffers, parameters and averages of a layer from the shard of its owner."""
    for key, buffer in module.named_buffers():
        shards.copy_into(buffer, owner, f"buffers/{name}/{key}")
    for key, parameter in module.named_parameters():
        weight = f"parameters/{name}/{key}"
        shards.copy_into(parameter, owner, weight)
        if parameter in averages:
            saved = f"average/{name}/{key}"
            has_average = saved in shards.names(owner)
            shards.copy_into(averages[parameter], owner, saved if has_average else weight)


def _number_or_tensor(slot: str, value: Tensor) -> tuple[str, Any]:
    """Return a slot of an optimizer's state in its original form: numbers are saved as tensors."""
    if not slot.endswith(NUMBER):
        return slot, value
    number = float(value)
    return slot.removesuffix(NUMBER), int(number) if number.is_integer() else number


class _Shards(contextlib.ExitStack):
    """The files of a checkpoint; each file is opened on first use."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._files: dict[int, tuple[Any, frozenset[str]]] = {}
        self._slots: dict[int, list[str]] = {}  # names of the optimizer's tensors for a parameter

    def names(self, rank: int) -> frozenset[str]:
        """Return the names of the tensors in a rank's file."""
        if rank not in self._files:
            file: Any = self.enter_context(
                safe_open(str(self._folder / shard_name(rank)), framework="pt")
            )
            self._files[rank] = file, frozenset(file.keys())
            self._slots[rank] = sorted(
                {name.split("/")[1] for name in self.names(rank) if name.startswith("optimizer/")}
            )
        return self._files[rank][1]

    def optimizer_state(self, rank: int, parameter: str) -> dict[str, Any]:
        """Return the optimizer's state for a parameter; empty if it was not trained."""
        names = self.names(rank)
        return dict(
            _number_or_tensor(slot, self.tensor(rank, name))
            for slot in self._slots[rank]
            if (name := f"optimizer/{slot}/{parameter}") in names
        )

    def tensor(self, rank: int, name: str) -> Tensor:
        """Return a copy of a tensor: the original may map a file that is removed later."""
        if name not in self.names(rank):
            raise self._misfit(rank, f"holds no {name}")
        tensor: Tensor = self._files[rank][0].get_tensor(name)
        return tensor.clone()

    def copy_into(self, target: Tensor, rank: int, name: str) -> None:
        """Read a tensor into an existing one."""
        saved = self.tensor(rank, name)
        if saved.shape != target.shape or saved.dtype != target.dtype:
            theirs, ours = (f"{tuple(t.shape)} {t.dtype}" for t in (saved, target))
            raise self._misfit(rank, f"has {name} as {theirs}, not {ours}")
        target.copy_(saved)

    def _misfit(self, rank: int, what: str) -> ConfigError:
        return ConfigError(
            "train.resume",
            self._folder,
            f"does not fit this model: {shard_name(rank)} {what}",
            "use the model that it was saved with",
        )


def _layers(rank: Rank) -> Iterator[tuple[StageKey, str, str, nn.Module]]:
    """Yield the stage key, layer name, part name and module of each layer or operator here."""
    for key in rank.stages.modules:
        parts = rank.stages.of_model.unit_names(key[1])
        for part, (name, module) in zip(parts, rank.stages.named_layers(key), strict=True):
            yield key, name, part, module


def _counters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the buffers that are not averaged over the copies: all that are not floating-point."""
    return (
        (key, buffer) for key, buffer in module.named_buffers() if not buffer.is_floating_point()
    )


def _torch_random(rank: Rank) -> RandomState:
    return RandomState(nn.ModuleList(rank.stages.modules.values()), rank.device)


def _random_states(rank: Rank) -> dict[str, Tensor]:
    """Return the random states of torch, layers, numpy and Python as tensors."""
    version, key, gauss = random.getstate()
    _, words, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        # a cached Gaussian is saved as its bits
        _PYTHON: torch.tensor(
            [version, *key, gauss is not None, _bits(gauss or 0.0)], dtype=torch.int64
        ),
        _NUMPY: torch.tensor(
            [*map(int, words), place, has_gauss, _bits(float(cached))], dtype=torch.int64
        ),
        **{f"{_TORCH}/{number}": state for number, state in enumerate(_torch_random(rank).get())},
    }


def _set_random_states(rank: Rank, shards: _Shards) -> None:
    generators = _torch_random(rank)
    number = rank.comm.rank
    version, *key, has_gauss, gauss = shards.tensor(number, _PYTHON).tolist()
    random.setstate((version, tuple(key), _number(gauss) if has_gauss else None))
    *words, place, has_cached, cached = shards.tensor(number, _NUMPY).tolist()
    np.random.set_state(("MT19937", np.array(words, np.uint32), place, has_cached, _number(cached)))
    generators.set(
        [shards.tensor(number, f"{_TORCH}/{place}") for place in range(len(generators.get()))]
    )


def _seed_random_states(seed: int, rank: int, step: int) -> None:
    drawn = np.random.SeedSequence((seed, rank, step))
    seeds = [int(seed) for seed in drawn.generate_state(3, np.uint32)]
    torch.manual_seed(seeds[0])
    np.random.seed(seeds[1])
    random.seed(seeds[2])


def _bits(number: float) -> int:
    return int(np.float64(number).view(np.int64))


def _number(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))


class HostCopy:
    """Copies a state to host memory, which the next checkpoint reuses.

    On a GPU, a separate stream copies to pinned memory. The compute stream waits at once for
    `early` tensors, and for the `late` ones only before the optimizer's next step.
    """

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer) -> None:
        self._copies: dict[str, Tensor] = {}
        self._cuda: Any = torch.cuda if device.type == "cuda" else None
        self._device = device
        self._stream: Any = self._cuda.Stream(device) if self._cuda is not None else None
        self._copied: Any = None
        if self._cuda is not None:
            optimizer.register_step_pre_hook(lambda *_: self._wait_for_copies())

    def begin(self, early: dict[str, Tensor], late: dict[str, Tensor]) -> None:
        """Begin to copy the tensors."""
        before = self._copies
        self._copies = {}
        for name, tensor in (early | late).items():
            buffer = before.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu"
                )
            self._copies[name] = buffer
        if self._cuda is None:
            self._copy(early | late)
            return
        computing = self._cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with self._cuda.stream(self._stream):
            self._copy(early)
            computing.wait_event(self._stream.record_event())
            self._copy(late)
            self._copied = self._stream.record_event()

    def num_bytes(self) -> int:
        """Return the bytes of the copies."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._copies.values())

    def host_tensors(self) -> dict[str, Tensor]:
        """Wait for the copies and return them, valid until the next; callable by any thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copies

    def _copy(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor, non_blocking=True)

    def _wait_for_copies(self) -> None:
        if self._copied is not None:
            self._cuda.current_stream(self._device).wait_event(self._copied)


class RankState(HostCopy):
    """Copies of a rank's share of the state; on rank 0, also of the losses."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank.device, rank.update.optimizer)
        self._rank = rank

    def take(self, losses: Sequence[float]) -> None:
        """Copy the current state; `losses` are those of all steps so far."""
        early, late = state_tensors(self._rank)
        if self._rank.comm.rank == 0:
            early[LOSSES] = torch.tensor(losses, dtype=torch.float64)
        self.begin(early, late)
