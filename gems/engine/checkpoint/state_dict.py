"""Plain state dicts: weights by their names in the user's own class, and matching with a model.

A user's own network has its own names ("layer1.0.conv1.weight"). A network of the toolkit has the
name of the layer followed by the name inside the layer ("stem.conv.weight").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gems.autograd.outputs import as_tuple
from gems.config.checkpoint_schema import MANIFEST_JSON, check_schema
from gems.config.schema import DataConfig, ModelConfig
from gems.engine.checkpoint import weights
from gems.engine.checkpoint.manifest import Manifest, checkpoint_folders
from gems.errors import ConfigError
from gems.models import layers_of
from gems.models.build import build_layers
from gems.models.imported.user_code import construct, construct_on_meta
from gems.runs.folder import RunFolder
from gems.runs.lookup import find_run
from gems.utils.atomic_io import atomic_write

if TYPE_CHECKING:
    from gems.engine.rank import Rank

KEY = "train.initial_checkpoint"
SAFETENSORS = ".safetensors"
# keys under which a training script's checkpoint may nest its state dict
NESTED = ("state_dict", "model_state_dict", "model", "module", "net")
# Counter of batch norm. Older files lack it, a frozen batch norm has none, and only a batch norm
# without a momentum reads it.
COUNTER = "num_batches_tracked"
MAX_NAMES = 4  # listed in a message


def read_state_dict(path: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Read weights by name from a file, or from the folder of a run, weights or a checkpoint.

    A file is .pt, .pth or .safetensors. Only tensors are unpickled, and a file is mapped into
    memory, not copied. A training script's checkpoint may have its tensors one level down, under a
    key such as "state_dict" or "model".

    Raises:
        ConfigError: The file cannot be read, or holds no tensors by name.
    """
    if path.is_dir():
        layers = _read_layers(path)
        return {
            full_name(model, layer, key): value
            for layer, state in layers.items()
            for key, value in state.items()
        }
    try:
        state: Any = (
            load_file(path)
            if path.suffix == SAFETENSORS
            else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        )
    except Exception as error:  # whatever pickle, zip or the mapping raises
        lines = str(error).strip().splitlines() or [""]
        raise ConfigError(
            KEY, path, f"cannot be read ({type(error).__name__}: {lines[0]})"
        ) from error
    for name in NESTED:
        if (
            isinstance(state, Mapping)
            and not _is_state_dict(state)
            and isinstance(state.get(name), Mapping)
        ):
            state = state[name]
    if not isinstance(state, Mapping) or not _is_state_dict(state):
        kind = (
            f"keys {_listed(map(str, state))}"
            if isinstance(state, Mapping)
            else type(state).__name__
        )
        raise ConfigError(KEY, path, f"holds no state dict, but {kind}", "save module.state_dict()")
    return dict(state)


def _read_layers(path: Path) -> weights.Weights:
    """Return the weights of a finished run, or of the newest checkpoint of an unfinished one."""
    run = RunFolder(path)
    saved = [path] if (path / MANIFEST_JSON).exists() else checkpoint_folders(run.checkpoints)
    if not saved or run.checkpoint.is_dir():
        return weights.load(path)
    layers: weights.Weights = {}
    check_schema(KEY, path, saved[0])
    try:
        for file in Manifest.read(saved[0]).files:
            with safe_open(str(saved[0] / file.name), framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - no mapping
                    kind, _, rest = name.partition("/")
                    if kind in ("parameters", "buffers"):
                        layer, _, key = rest.partition("/")
                        layers.setdefault(layer, {})[key] = shard.get_tensor(name).clone()
    except Exception as error:
        raise ConfigError(
            KEY, saved[0], f"cannot be read ({type(error).__name__}: {error})"
        ) from error
    return layers


def _is_state_dict(state: Mapping[Any, Any]) -> bool:
    return bool(state) and all(isinstance(value, Tensor) for value in state.values())


def full_name(model: ModelConfig, layer: str, key: str) -> str:
    """Return the name in the whole network of the tensor that its layer calls `key`."""
    return key if model.target is not None else f"{layer}.{key}"


@dataclass(frozen=True, slots=True)
class Match:
    """How weights fit a model.

    Attributes:
        names: The name in the file of each tensor of the model that is loaded.
        drawn_anew: The model's tensors that keep newly drawn values.
        unused: The names in the file that are left over.
        removed_prefix: Removed from the names in the file.
        added_prefix: Put before the names in the file.
    """

    names: Mapping[str, str]
    drawn_anew: tuple[str, ...]
    unused: tuple[str, ...]
    removed_prefix: str
    added_prefix: str

    def describe(self, path: Path | str) -> str:
        """Describe in one line what was loaded."""
        total = len(self.names) + len(self.drawn_anew)
        removed = f", without the prefix {self.removed_prefix}" if self.removed_prefix else ""
        added = f", into {self.added_prefix.rstrip('.')}" if self.added_prefix else ""
        anew = f"; drawn anew: {_listed(self.drawn_anew)}" if self.drawn_anew else ""
        unused = f"; not used: {_listed(self.unused)}" if self.unused else ""
        return f"{len(self.names)} of {total} tensors from {path}{removed}{added}{anew}{unused}"


def match_names(
    wanted: Mapping[str, Sequence[int]],
    saved_shapes: Mapping[str, Sequence[int]],
    path: Path | str,
    prefix: str | None = None,
    is_strict: bool = True,
    new: Sequence[str] = (),
) -> Match:
    """Match the names and shapes of a model's tensors with those of a file.

    `prefix` is removed from the names in the file. If it is None, the prefix that makes most names
    fit is chosen; this may also be a prefix that the file lacks, because its network is a submodule
    of the model. Tensors of the model that match a pattern of `new` are drawn anew. If `is_strict`,
    the file must hold all the others, and nothing else.

    Raises:
        ConfigError: No name fits, a shape differs, or, if strict, names are missing or left over.
    """
    removed, added = _prefixes(wanted, saved_shapes) if prefix is None else (prefix, "")
    theirs = {
        added + name.removeprefix(removed): name
        for name in saved_shapes
        if name.startswith(removed)
    }
    is_new = {name: any(fnmatchcase(name, pattern) for pattern in new) for name in wanted}
    names = {name: theirs[name] for name in wanted if name in theirs and not is_new[name]}
    if not names:
        raise ConfigError(
            KEY,
            path,
            f"has no tensor of this model (it has {_listed(saved_shapes)}, the model has"
            f" {_listed(wanted)})",
            "give the prefix of its names by train.initial_prefix",
        )
    for name, saved in names.items():
        if tuple(wanted[name]) != tuple(saved_shapes[saved]):
            layer = name.rpartition(".")[0]
            raise ConfigError(
                KEY,
                path,
                f"has {saved} of shape {_shape(saved_shapes[saved])}, and the model"
                f" {_shape(wanted[name])}",
                f"draw it anew by train.initial_new=[{layer}.*]",
            )
    anew = tuple(name for name in wanted if name not in names and not name.endswith(COUNTER))
    missing = [name for name in anew if not is_new[name]]
    used = {*names.values(), *(theirs[name] for name in wanted if name in theirs)}
    unused = tuple(name for name in saved_shapes if name not in used and not name.endswith(COUNTER))
    advice = (
        "name what may be drawn anew by train.initial_new=[...], or set train.initial_strict=false"
    )
    if is_strict and missing:
        raise ConfigError(KEY, path, f"lacks {_listed(missing)}", advice)
    if is_strict and unused:
        raise ConfigError(
            KEY,
            path,
            f"has more than this model: {_listed(unused)}",
            "set train.initial_strict=false",
        )
    return Match(names, anew, unused, removed, added)


def _prefixes(wanted: Iterable[str], saved_names: Iterable[str]) -> tuple[str, str]:
    """Return the prefixes to remove from and to add to the file's names for most matches."""
    ours = set(wanted)
    theirs = set(saved_names)
    heads = [(head, "") for head in _heads(theirs)] + [("", head) for head in _heads(ours)]

    def num_fits(prefixes: tuple[str, str]) -> int:
        removed, added = prefixes
        return sum(
            name.startswith(removed) and added + name.removeprefix(removed) in ours
            for name in theirs
        )

    return max([("", ""), *heads], key=num_fits)


def _heads(names: Iterable[str]) -> list[str]:
    """Return the first word and the first two words of each name, with their dots."""
    words = [name.split(".") for name in names]
    return sorted(
        {".".join(parts[:count]) + "." for parts in words for count in (1, 2) if len(parts) > count}
    )


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - MAX_NAMES} more" if len(every) > MAX_NAMES else ""
    return ", ".join(every[:MAX_NAMES]) + more


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"


def restore(rank: Rank, path: Path) -> Match:
    """Load weights into every stage of this rank and return how they fit.

    The partition with which the weights were saved does not matter.

    Raises:
        ConfigError: Raised by `read_state_dict` or `match_names`.
    """
    spec = rank.plan.spec
    train = spec.train
    model = spec.model
    state = read_state_dict(path, model)
    wanted = {
        name: tuple(value.shape)
        for name, value in whole_model(model, spec.data, device="meta").state_dict().items()
    }
    saved_shapes = {name: tuple(value.shape) for name, value in state.items()}
    match = match_names(
        wanted, saved_shapes, path, train.initial_prefix, train.initial_strict, train.initial_new
    )
    for key in rank.stages.modules:
        for layer_name, module in rank.stages.named_layers(key):
            full = {inner: full_name(model, layer_name, inner) for inner in module.state_dict()}
            tensors = {
                inner: state[match.names[name]]
                for inner, name in full.items()
                if name in match.names
            }
            module.load_state_dict(tensors, strict=False)
    return match


class NamedLayers(nn.Module):
    """A network of the toolkit in one piece.

    Each name in its state dict is the name of a layer, then the name inside the layer.
    """

    def __init__(self, names: Iterable[str], modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self._in_order: list[nn.Module] = []
        for name, module in zip(names, modules, strict=True):
            *folders, last = name.split(".")
            into: nn.Module = self
            for folder in folders:
                if folder not in into._modules:
                    into.add_module(folder, nn.Module())
                into = into.get_submodule(folder)
            into.add_module(last, module)
            self._in_order.append(module)

    def forward(self, *tensors: Tensor) -> Any:
        """Run the layers in order."""
        output: Any = tensors
        for module in self._in_order:
            output = module(*as_tuple(output))
        return output


def whole_model(model: ModelConfig, data: DataConfig, device: str = "cpu") -> nn.Module:
    """Return the configured network in one piece.

    It is an instance of the user's own class, or a `NamedLayers`.
    """
    if model.target is not None:
        make = construct_on_meta if device == "meta" else construct
        return make(model.target, model.kwargs, model.path, model.norm)
    layers = layers_of(model, data)
    return NamedLayers(
        (layer.name for layer in layers), build_layers(layers, 0, len(layers), 0, device=device)
    )


def trained_model(path: Path, model: ModelConfig, data: DataConfig) -> nn.Module:
    """Return the configured network with trained weights, in evaluation mode.

    `path` is the folder of a run or a folder of weights. Tensors that no layer of a run uses keep
    the values from the constructor.

    Raises:
        ConfigError: There are no weights, or they belong to another model.
    """
    module = whole_model(model, data)
    state = module.state_dict()
    weights = read_state_dict(path, model)
    for name in {name for name, _ in module.named_buffers()} - state.keys():
        weights.pop(name, None)  # a checkpoint also has the buffers that are not persistent
    strange = [name for name in weights if name not in state]
    if strange:
        raise ConfigError(KEY, path, f"has weights of another model: {_listed(strange)}")
    module.load_state_dict(state | weights, strict=True)
    return module.eval()


def load_model(run: str | Path) -> nn.Module:
    """Return the network of a run with its trained weights, in evaluation mode.

    It is an instance of the user's own class, or one module with all layers of a network of the
    toolkit. `run` is the run's folder, or its name below runs/.

    Raises:
        ConfigError: The run does not exist or has no weights.
    """
    path = find_run(str(run))
    spec = RunFolder(path).read_spec()
    return trained_model(path, spec.model, spec.data)


def write_state_dict(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict as .safetensors, or with torch.save for any other suffix.

    The write is atomic: the file appears only when it is complete.

    Raises:
        ConfigError: The file cannot be written.
    """
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    try:
        with atomic_write(path) as partial:
            if path.suffix == SAFETENSORS:
                save_file(plain, partial, metadata={"format": "pt"})
            else:
                torch.save(plain, partial)
    except OSError as error:
        raise ConfigError("--out", path, f"cannot be written ({error.strerror})") from error
