"""The layers of a user's network as torch modules.

They are parts of one network, which is constructed once.
"""

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

from gems.autograd.outputs import tensors_in
from gems.config.recipe import TASKS
from gems.errors import ConfigError
from gems.models.blocks.chain import adopt
from gems.models.imported.division import Slice, divide
from gems.models.imported.tracing import trace
from gems.models.imported.user_code import construct, construct_on_meta, other_generators, refusal
from gems.utils.targets import answer
from gems.utils.units import SIDES

# id of a module -> whether it is in training mode in evaluation, and in training
Modes = dict[int, tuple[bool, bool]]


class Part(nn.Module):
    """One layer of a larger network; its parameters keep their names in that network.

    Its input is the tensors of the layer before. Its output is the tensors named by `output_names`,
    or a single tensor without a name. In training and in evaluation, each module is in the mode
    that the network's own `train` sets; this may leave some modules unchanged, such as a frozen
    batch norm.
    """

    def __init__(self, whole: nn.Module, train: Slice, evaluate: Slice, modes: Modes) -> None:
        super().__init__()
        self._output_names = (evaluate.output_names, train.output_names)
        for path in sorted({*train.paths, *evaluate.paths}):
            adopt(self, whole, path)
        self._modes = {
            name: modes[id(module)] for name, module in self.named_modules() if id(module) in modes
        }
        self.train(whole.training)
        # functions (self, *tensors) that drop each value after its last use
        self._forwards = [
            type(fx.GraphModule(self, each.graph)).forward for each in (evaluate, train)
        ]

    def train(self, mode: bool = True) -> Part:
        """Switch between training and evaluation as the whole network does."""
        super().train(mode)
        for name, modes in self._modes.items():
            self.get_submodule(name).training = modes[mode]
        return self

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the tensors that the layer returns in its current mode."""
        return self._output_names[self.training]

    def forward(self, *tensors: Tensor) -> Any:
        """Run the layer as it runs in the network's own forward, in the same mode.

        The last layer returns the network's output.
        """
        return self._forwards[self.training](self, *tensors)


def modes_of(whole: nn.Module) -> Modes:
    """Return the mode of each module of a network, in evaluation and in training.

    The network's own `train` sets these modes.
    """
    was_training = whole.training
    modes = []
    for mode in (False, True):
        whole.train(mode)
        modes.append({id(module): module.training for module in whole.modules()})
    whole.train(was_training)
    return {number: (modes[0][number], modes[1][number]) for number in modes[0]}


def whole_with_parts(
    text: str, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, list[Part]]:
    """Return the uncut network of `text`, as `part` constructs it, and its layers.

    The layers share the tensors of the network.
    """
    slices, _ = _slices(text)
    with torch.random.fork_rng(devices=[]), other_generators(seed):
        torch.default_generator.manual_seed(seed)
        whole = construct(*_request(text)[0]).to(device=device, dtype=dtype)
    modes = modes_of(whole)
    return whole, [Part(whole, *part_slices, modes) for part_slices in slices]


def part(text: str, index: int, source: str | None) -> Part:
    """Return the `index`-th layer of the network that `text` describes.

    `text` is as in `gems.models.imported.describe`. The whole network is constructed once, from the
    host's generator as `build_layer` has seeded it, and each layer is taken out of it; a second
    request for a layer constructs the network anew. `source`, the state of the user's code, only
    tells layers apart.

    Raises:
        ConfigError: As `describe`.
    """
    is_meta = torch.get_default_device().type == "meta"
    return _whole(text, None if is_meta else torch.initial_seed()).take(index)


def release() -> None:
    """Forget the whole network, so that layers that no stage has taken use no memory."""
    _whole.cache_clear()


def describe(text: str, num_classes: int, task: str = TASKS[0]) -> dict[str, Any]:
    """Return the names and kinds of the layers, and the smallest batch that the network takes.

    The smallest batch is 2 if one image is too few (batch norm over a single value, a dimension
    that squeeze drops).

    Raises:
        ConfigError: The network cannot be found, constructed, run or cut into layers, or its output
            has no tensor (N, num_classes), or (N, num_classes, height, width) for a segmentation of images.
    """
    code, image = _request(text)
    slices, shapes = _slices(text)
    is_map = task == "segmentation"
    sides = image[1:] if is_map else ()
    named = "".join(f", data.{name}" for name in SIDES[-len(sides) :]) if is_map else ""
    for of_mode in shapes:
        if not any(shape[1:] == (num_classes, *sides) for shape in of_mode):
            whole = " and ".join(f"({', '.join(map(str, ('N', *shape[1:])))})" for shape in of_mode)
            raise ConfigError(
                "model.target",
                code[0],
                f"gives logits of shape {whole}, must give (N,"
                f" data.num_classes={num_classes}{named}) for {task}",
                "set data.num_classes, or what the network calls it in model.kwargs",
            )
    min_batch = 2
    network = construct_on_meta(*code).train()
    with contextlib.suppress(Exception), torch.no_grad(), torch.device("meta"):
        alone = [tuple(tensor.shape) for tensor in tensors_in(network(torch.empty((1, *image))))]
        if alone == [(1, *shape[1:]) for shape in shapes[0]]:
            min_batch = 1
    return {
        "layers": [[layer_slice.name, layer_slice.kind] for layer_slice, _ in slices],
        "min_batch": min_batch,
        "num_outputs": max(map(len, shapes)),
    }


def _request(text: str) -> tuple[tuple[str, dict[str, Any], str | None, str], tuple[int, ...]]:
    """Return the arguments that construct the network, and the shape of its images.

    The arguments are target, kwargs, path and norm; the shape is channels, then the sides.
    """
    request = json.loads(text)
    code = (request["target"], request["kwargs"], request["path"], request["norm"])
    return code, tuple(request["image"])


@lru_cache(maxsize=4)
def _slices(text: str) -> tuple[tuple[tuple[Slice, Slice], ...], list[list[tuple[int, ...]]]]:
    """Return each layer in training and in evaluation, and the shapes of the outputs' tensors.

    The shapes are those for two images, in training and in evaluation.
    """
    code, image = _request(text)
    root = construct_on_meta(*code)
    traced = [trace(root.train(mode), image, code[0]) for mode in (True, False)]
    train, evaluate = divide(root, traced)
    shapes = [
        [tuple(tensor.shape) for tensor in tensors_in(mode_trace.output)] for mode_trace in traced
    ]
    return tuple(zip(train, evaluate, strict=True)), shapes


@dataclass(slots=True)
class _Whole:
    text: str
    seed: int | None
    module: nn.Module | None = None
    modes: Modes = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)

    def take(self, index: int) -> Part:
        slices, _ = _slices(self.text)
        if self.module is None or index in self.taken:
            code, _ = _request(self.text)
            if self.seed is None:
                self.module = construct_on_meta(*code)
            else:
                torch.default_generator.manual_seed(self.seed)
                with other_generators(self.seed):
                    self.module = construct(*code)
            self.modes = modes_of(self.module)
            self.taken = set()
        self.taken.add(index)
        return Part(self.module, *slices[index], self.modes)


_whole = lru_cache(maxsize=2)(_Whole)


def main(argv: Sequence[str]) -> None:
    """Print the result of `describe`, or its error."""
    answer(
        lambda: describe(argv[0], int(argv[1]), argv[2]),
        lambda error: refusal(_request(argv[0])[0][0], "cannot be cut into layers", error),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
