"""The layers of a user's network as torch modules: parts of one whole, which is constructed once."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from gems.errors import ConfigError
from gems.models.imported.division import Slice, divide
from gems.models.imported.tracing import trace
from gems.models.imported.user_code import construct, construct_on_meta, other_generators, place_of_forward, refusal


class Part(nn.Module):
    """One layer of a larger network, with its parameters under the names that they have there.

    Takes the tensors that the layer before gives and gives those named by `output_names`, or one that needs no name.
    """

    def __init__(self, whole: nn.Module, train: Slice, evaluate: Slice) -> None:
        super().__init__()
        self.output_names = train.output_names
        for path in sorted({*train.paths, *evaluate.paths}):
            _adopt(self, whole, path)
        self.train(whole.training)
        self._forwards = {is_training: _compile(self, s.graph) for is_training, s in ((True, train), (False, evaluate))}

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layer as it runs in the network's own forward, in the same mode."""
        out: Tensor | tuple[Tensor, ...] = self._forwards[self.training](self, *tensors)
        return out


def part(text: str, index: int, source: str | None) -> Part:
    """Return the `index`-th layer of the network that `text` describes (`gems.models.imported.describe`).

    The whole network is constructed once, from the host's generator as `build_layer` has seeded it, and each layer is
    taken out of it; asking for a layer again constructs it anew. `source`, the state of the user's code, only tells
    layers apart.

    Raises:
        ConfigError: as `describe`.
    """
    is_meta = torch.get_default_device().type == "meta"
    return _whole(text, None if is_meta else torch.initial_seed()).take(index)


def release() -> None:
    """Forget the whole network, so that layers that nobody has taken use no memory."""
    _whole.cache_clear()


def describe(text: str, num_classes: int) -> dict[str, Any]:
    """Return the names and kinds of the layers, and the least images that the network takes at a time.

    Raises:
        ConfigError: a network that cannot be found, constructed, run or cut into layers, or whose output is not
            (N, num_classes).
    """
    request = json.loads(text)
    target, image = request["target"], tuple(request["image"])
    slices, (_, *shape) = _slices(text)
    if shape != [num_classes]:
        whole = ", ".join(map(str, ("N", *shape)))
        raise ConfigError(
            "model.target", target, f"gives logits of shape ({whole}), must give (N, data.num_classes={num_classes})",
            "set data.num_classes, or what the network calls it in model.kwargs",
        )  # fmt: skip
    return {"layers": [[each.name, each.kind] for each, _ in slices], "min_batch": _min_batch(text, image, num_classes)}


def _min_batch(text: str, image: tuple[int, ...], num_classes: int) -> int:
    """Return 1, or 2 where one image is too few (batch norm over a single value, a dimension that squeeze drops)."""
    whole = _construct_on_meta(text).train()
    with contextlib.suppress(Exception), torch.no_grad(), torch.device("meta"):
        if tuple(whole(torch.empty((1, *image))).shape) == (1, num_classes):
            return 1
    return 2


@lru_cache(maxsize=4)
def _slices(text: str) -> tuple[tuple[tuple[Slice, Slice], ...], tuple[int, ...]]:
    """Return each layer in training and in evaluation, and the shape of the logits of two images."""
    request = json.loads(text)
    target, image = request["target"], tuple(request["image"])
    root = _construct_on_meta(text)
    traced = [trace(root.train(mode), image, target) for mode in (True, False)]
    train, evaluate = (divide(root, each) for each in traced)
    shapes = [[(each.name, each.output_names) for each in slices] for slices in (train, evaluate)]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            "model.target", target,
            f"its forward at {place_of_forward(root)} takes other layers in evaluation than in training",
            "let it take the same ones",
        )  # fmt: skip
    output = next(node for node in traced[0].graph.nodes if node.op == "output").args[0]
    return tuple(zip(train, evaluate, strict=True)), tuple(traced[0].values[output].shape)


def _construct_on_meta(text: str) -> nn.Module:
    request = json.loads(text)
    return construct_on_meta(request["target"], request["kwargs"], request["path"])


@dataclass(slots=True)
class _Whole:
    text: str
    seed: int | None
    module: nn.Module | None = None
    taken: set[int] = field(default_factory=set)

    def take(self, index: int) -> Part:
        slices, _ = _slices(self.text)
        if self.module is None or index in self.taken:
            self.module, self.taken = self._construct(), set()
        self.taken.add(index)
        return Part(self.module, *slices[index])

    def _construct(self) -> nn.Module:
        if self.seed is None:
            return _construct_on_meta(self.text)
        request = json.loads(self.text)
        torch.default_generator.manual_seed(self.seed)
        with other_generators(self.seed):
            return construct(request["target"], request["kwargs"], request["path"])


@lru_cache(maxsize=2)
def _whole(text: str, seed: int | None) -> _Whole:
    return _Whole(text, seed)


def _adopt(part: nn.Module, whole: nn.Module, path: str) -> None:
    """Return `part` the module, parameter or buffer of `whole` at `path`, at the same path."""
    *folders, name = path.split(".")
    into, source = part, whole
    for folder in folders:
        source = source.get_submodule(folder)
        if folder not in into._modules:
            into.add_module(folder, nn.Module())
        into = into.get_submodule(folder)
        if into is source:  # all of it is adopted already
            return
    if name in source._modules:
        into.add_module(name, source.get_submodule(name))
    elif name in source._parameters:
        into.register_parameter(name, source._parameters[name])
    else:
        into.register_buffer(name, source._buffers[name], name not in source._non_persistent_buffers_set)


def _compile(part: nn.Module, graph: fx.Graph) -> Any:
    """Return the function (self, *tensors) that runs a graph on a part and drops each value after its last use."""
    return type(fx.GraphModule(part, graph)).forward


def main(argv: Sequence[str]) -> None:
    """Print, as one line of JSON, what `describe` gives or what it refuses. Anything else goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = describe(argv[0], int(argv[1]))
        except ConfigError as error:
            answer = {"refused": [error.key, str(error.value), error.allowed, error.advice]}
        except Exception as error:  # the toolkit's own fault: still one line for the user
            refused = refusal(json.loads(argv[0])["target"], "cannot be cut into layers", error)
            answer = {"refused": [refused.key, str(refused.value), refused.allowed, refused.advice]}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
