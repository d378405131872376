"""Layers as one list of operations of torch's core, for inputs of one shape.

`make_fx` records what a forward calls above autograd, on the meta device. Whatever a block is written like, there are
few operations left, and shapes and choices by shape are settled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from gems.errors import ConfigError, one_line
from gems.models.outputs import map_tensors, tensors_in

KEY = "parallel.strips"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True, slots=True)
class Ref:
    """The number of a value: inputs come first, then what each step gives."""

    number: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer of a module, which is looked up when it is read."""

    module: nn.Module
    name: str

    def get(self) -> Any:
        """Return the tensor that the module has now."""
        return getattr(self.module, self.name)


@dataclass(frozen=True, slots=True)
class Step:
    """One operation.

    `name` is that of the module that called it, in the whole network, and `call` tells its calls apart. `args` hold
    `Ref` and `Weight` for tensors. `value` is what it gives, of the meta device.
    """

    name: str
    kind: str
    call: int
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any

    @property
    def operation(self) -> str:
        """The name of the operation, without that of its overload."""
        packet = getattr(self.target, "overloadpacket", self.target)
        return str(packet.__name__)


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps of neighbouring layers, the values that they give at last, and in which structure."""

    inputs: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    structure: Any


class _RefusedError(Exception):
    """What is wrong with a layer, and what to do."""


def trace(layers: Sequence[tuple[str, nn.Module]], inputs: Sequence[Tensor], strips: int) -> Trace:
    """Trace named layers, each of which takes what the one before gives, in the mode that they are in.

    `inputs` are tensors of the meta device, `strips` their number, for messages.

    Raises:
        ConfigError: a layer whose operations depend on values.
    """
    steps: list[Step] = []
    values: list[Any] = list(inputs)
    numbers = list(range(len(inputs)))
    structure: Any = None
    for name, module in layers:
        given = [values[number] for number in numbers]
        try:
            graph, structure, names = _graph_of(name, module, given)
            numbers = _append(steps, values, numbers, module, graph, names)
        except _RefusedError as error:
            raise ConfigError(KEY, strips, *error.args) from None
        except Exception as error:
            text = f"layer {name} cannot be traced into operations ({one_line(str(error))[:200]})"
            raise ConfigError(KEY, strips, text, f"set {KEY}=1") from error
    return Trace(tuple(inputs), tuple(steps), tuple(numbers), structure)


def _graph_of(
    name: str, module: nn.Module, inputs: Sequence[Tensor]
) -> tuple[fx.GraphModule, Any, dict[str, tuple[str, str, int]]]:
    """Return the graph of a layer, what it gives, and for each node the module that called it, its class and call."""
    state = {key: torch.empty_like(tensor, device="meta") for key, tensor in _state(module)}
    names: dict[str, tuple[str, str, int]] = {}
    outer = (name, type(module).__name__, 0)
    kept: list[Any] = []

    def run(state: dict[str, Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        with _calls(name, module, outer, names):
            kept.append(functional_call(module, state, tensors))
        return tuple(tensors_in(kept[0]))

    with torch.no_grad(), torch.device("meta"):
        graph = make_fx(run, pre_dispatch=True)(state, *inputs)
    return graph, kept[0], names


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


@contextmanager
def _calls(
    layer: str, root: nn.Module, outer: tuple[str, str, int], names: dict[str, tuple[str, str, int]]
) -> Iterator[None]:
    """Note for the nodes that are made inside which module made them; other hooks of the modules rest meanwhile."""
    graph = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
    stack = [outer]
    calls = 0

    def mark() -> None:
        for node in reversed(graph.nodes):
            if node.name in names:
                break
            names[node.name] = stack[-1]

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any) -> None:
            nonlocal calls
            mark()
            calls += 1
            stack.append((name, type(module).__name__, calls))

        return hook

    def leave(module: nn.Module, given: Any, made: Any) -> None:
        mark()
        stack.pop()

    before = [(module, {each: getattr(module, each) for each in _HOOKS}) for module in root.modules()]
    try:
        for path, module in root.named_modules():
            for each in _HOOKS:
                setattr(module, each, type(getattr(module, each))())
            module.register_forward_pre_hook(enter(f"{layer}.{path}" if path else layer))
            module.register_forward_hook(leave)
        yield
        mark()
    finally:
        for module, hooks in before:
            for each, found in hooks.items():
                setattr(module, each, found)


def _append(
    steps: list[Step],
    values: list[Any],
    inputs: Sequence[int],
    module: nn.Module,
    graph: fx.GraphModule,
    names: dict[str, tuple[str, str, int]],
) -> list[int]:
    """Append the steps of a layer's graph, and return the numbers of the values that it gives."""
    found: dict[fx.Node, Any] = {}
    weights = iter([_weight(module, key) for key, _ in _state(module)])
    given = iter([Ref(number) for number in inputs])
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(weights, None) or next(given)
        elif node.op == "get_attr":
            found[node] = Weight(graph, str(node.target))
        elif node.op == "output":
            outputs = fx.node.map_arg(node.args[0], found.__getitem__)
        elif node.users or isinstance(node.meta.get("val"), Tensor):  # a choice of a type, say, is a plain value by now
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), found.__getitem__)
            _refuse_alias(node, names)
            value = map_tensors(_of_meta, node.meta["val"])
            found[node] = Ref(len(values))
            values.append(value)
            name, kind, call = names[node.name]
            steps.append(Step(name, kind, call, node.target, args, kwargs, value))
    for position, each in enumerate(outputs):
        if isinstance(each, Weight):
            raise _RefusedError(f"layer {names[node.name][0]} gives a parameter as output {position}", f"set {KEY}=1")
    return [each.number for each in outputs]


def _of_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the meta device like one that was recorded."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _weight(root: nn.Module, path: str) -> Weight:
    folder, _, name = path.rpartition(".")
    return Weight(root.get_submodule(folder), name)


def _refuse_alias(node: fx.Node, names: dict[str, tuple[str, str, int]]) -> None:
    """Refuse a change in place of a tensor that goes by another name later: here steps give new tensors."""
    changed = node.args[0] if node.args else None
    if not is_in_place(node.target) or not isinstance(changed, fx.Node):
        return
    later = [other for other in node.graph.nodes if node < other]
    if any(read < node and _base(read) is _base(changed) for other in later for read in other.all_input_nodes):
        text = f"layer {names[node.name][0]} changes in place ({node.target}) what has another name"
        raise _RefusedError(text, f"write to a new tensor, or set {KEY}=1")


def _base(node: fx.Node) -> fx.Node:
    """Return the node whose memory a node's value is part of."""
    returned = getattr(getattr(node.target, "_schema", None), "returns", ())
    is_view = node.target is operator.getitem or any(each.alias_info is not None for each in returned)
    first = node.args[0] if is_view and node.args else None
    return _base(first) if isinstance(first, fx.Node) else node


def is_in_place(target: Any) -> bool:
    """Return whether an operation changes its first argument."""
    schema = getattr(target, "_schema", None)
    return target is not operator.getitem and schema is not None and str(schema.name).endswith("_")
