"""Trace layers into one list of core torch operations, for inputs of one shape.

`make_fx` records what a forward calls above autograd, on the meta device. However a block is
written, few kinds of operations are left, and shapes and choices by shape are settled. The casts of
autocast in a layer of mixed precision become operations too, so that the list runs without
autocast.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from gems.autograd.casts import Autocast, find_casts, without_memory
from gems.autograd.mixed import Mixed, mixed_of
from gems.autograd.outputs import map_tensors, tensors_in
from gems.autograd.torch_internals import (
    SET_GRAD_MODE,
    FakeTensorMode,
    OpOverload,
    enter_autocast,
    exit_autocast,
    tracing_with,
)
from gems.streaming.errors import StreamingError
from gems.streaming.surroundings import (
    Recorded,
    changed_attribute,
    clear_hooks,
    refuse_hooks,
    replaced,
    state_of,
    untouched,
)

Names = dict[str, tuple[str, str, int]]  # of nodes: the module that called it, its class and call


@dataclass(frozen=True, slots=True)
class Ref:
    """The number of a value: inputs come first, then the value of each step."""

    number: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer of a module, or its copy of a `mixed` precision.

    It is looked up when it is read.
    """

    module: nn.Module
    name: str
    mixed: Mixed | None = None

    def get(self) -> Any:
        """Return the tensor that the module has now."""
        return (
            getattr(self.module, self.name)
            if self.mixed is None
            else self.mixed.copy(self.module, self.name)
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One operation.

    `name` is the name, in the whole network, of the module that called it; `call` tells its calls
    apart. `args` contain `Ref` and `Weight` in place of tensors. `value` is the result, on the meta
    device. If `has_grad` is False, the operation runs under `torch.no_grad`.
    """

    name: str
    kind: str
    call: int
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    has_grad: bool = True

    @property
    def operation(self) -> str:
        """The name of the operation, without its overload."""
        packet = getattr(self.target, "overloadpacket", self.target)
        return str(packet.__name__)


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """The steps of neighbouring layers, the values that they return, and the structure of these."""

    inputs: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    structure: Any


@dataclass(frozen=True, slots=True)
class _Layer:
    """The graph of a layer, and the values that it returns.

    `names` gives for each node the module that called it, its class and call. In mixed precision
    `mode` makes tensors without memory, on which `autocasts` act; the last one is the innermost.
    The last of `grad_modes` says whether gradients are computed. Nodes that have become steps are
    in `found`, with what stands for their value.
    """

    weights: list[Weight]
    graph: fx.GraphModule
    structure: Any
    names: Names
    mode: FakeTensorMode | None
    autocasts: list[torch.autocast]
    grad_modes: list[bool]
    found: dict[fx.Node, Any] = field(default_factory=dict)
    has_grad: dict[fx.Node, bool] = field(default_factory=dict)
    cast_weights: dict[tuple[Weight, torch.dtype], Ref] = field(default_factory=dict)


def trace(layers: Sequence[tuple[str, nn.Module]], inputs: Sequence[Tensor]) -> LayerTrace:
    """Trace named layers in their current modes.

    Each layer takes the values that the layer before returns. `inputs` are tensors of the meta
    device.

    Raises:
        StreamingError: A layer has operations that depend on values.
    """
    device = _device([module for _, module in layers])
    tracer = _Tracer(inputs)
    numbers = list(range(len(inputs)))
    structure: Any = None
    for name, module in layers:
        values = [tracer.values[number] for number in numbers]
        try:
            layer = _graph_of(name, module, values, device)
            structure = layer.structure
            numbers = tracer.append(numbers, layer)
        except StreamingError:
            raise
        except Exception as error:
            cause = " ".join(str(error).split())[:200]
            text = f"layer {name} cannot be traced into operations ({cause})"
            raise StreamingError(text, "") from error
    return LayerTrace(tuple(inputs), tuple(tracer.steps), tuple(numbers), structure)


def _graph_of(
    name: str, module: nn.Module, inputs: Sequence[Tensor], device: torch.device
) -> _Layer:
    mixed = mixed_of(module)
    elsewhere = None if mixed is None else mixed.elsewhere
    if elsewhere is not None:
        device = elsewhere.device
    refuse_hooks(name, module)
    weights, tensors, places = _weights_of(module, mixed)
    has_grad = torch.is_grad_enabled()

    def record(args: Any) -> tuple[fx.GraphModule, Any, Names]:
        names: Names = {}
        saved: list[Any] = []

        def run(state: list[Tensor], *values: Tensor) -> tuple[Tensor, ...]:
            stand_ins = {
                id(tensor): stand_in for tensor, stand_in in zip(tensors, state, strict=True)
            }
            changed = [(inner, key, state[number]) for inner, key, number in places]
            with replaced(name, changed), _calls(name, module, stand_ins, names):
                outputs = module(*values)
                saved.append(outputs if mixed is None else mixed.cast(outputs))
            return tuple(tensors_in(saved[0]))

        with tracing_with(mode):
            return make_fx(run, pre_dispatch=True)(*args), saved[0], names

    with without_memory(device, None if mixed is None else mixed.dtype) as mode, untouched(module):
        state = [
            _like(tensor, None if weight.mixed is None else weight.mixed.dtype)
            for tensor, weight in zip(tensors, weights, strict=True)
        ]
        values = [_like(tensor) for tensor in inputs]
        if elsewhere is None:  # else autograd's nodes would need a device that is not there
            for stand_in, tensor in zip(state, tensors, strict=True):
                stand_in.requires_grad_(tensor.requires_grad)
            values = [value.requires_grad_(value.is_floating_point()).clone() for value in values]
        before = state_of(module)
        graph, structure, names = record((state, *values))
        changed = changed_attribute(module, before)
        if changed is not None and str(record((state, *values))[0].graph) != str(graph.graph):
            text = (
                f"layer {name} ({type(module).__name__}) computes with what an earlier call has"
                f" left ({changed})"
            )
            raise StreamingError(text, "keep that in a buffer")
    autocasts: list[torch.autocast] = [] if mixed is None else [Autocast(device.type, mixed.dtype)]
    return _Layer(weights, graph, structure, names, mode, autocasts, [has_grad])


def _weights_of(
    module: nn.Module, mixed: Mixed | None
) -> tuple[list[Weight], list[Tensor], list[tuple[nn.Module, str, int]]]:
    """Return each parameter and buffer of a layer once, and the names that modules use for them."""
    weights: list[Weight] = []
    tensors: list[Tensor] = []
    places: list[tuple[nn.Module, str, int]] = []
    numbers: dict[tuple[int, bool], int] = {}
    for inner in module.modules():
        for key, tensor in (*inner._parameters.items(), *inner._buffers.items()):
            if tensor is None:
                continue
            is_low = mixed is not None and mixed.has_copy(inner, key)
            number = numbers.setdefault((id(tensor), is_low), len(weights))
            if number == len(weights):
                weights.append(Weight(inner, key, mixed if is_low else None))
                tensors.append(tensor)
            places.append((inner, key, number))
    return weights, tensors, places


def _device(modules: Iterable[nn.Module]) -> torch.device:
    """Return the device of the layers, some of which may be built without memory."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return next(
        (tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu")
    )


def _like(tensor: Tensor, dtype: torch.dtype | None = None, device: str | None = None) -> Tensor:
    """Return a tensor of the same shape and layout, optionally of another type or device."""
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device=device
    )


@contextmanager
def _calls(
    layer: str, root: nn.Module, stand_ins: dict[int, Tensor], names: Names
) -> Iterator[None]:
    """Note which module makes each node, and refuse what would be lost."""
    graph = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
    stack = [(layer, type(root).__name__, 0)]
    calls = 0
    recorded = Recorded(stand_ins, lambda: f"{stack[-1][0]} ({stack[-1][1]})")

    def mark() -> None:
        for node in reversed(graph.nodes):
            if node.name in names:
                break
            names[node.name] = stack[-1]

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            nonlocal calls
            mark()
            calls += 1
            stack.append((name, type(module).__name__, calls))

        return hook

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        recorded.refuse_functions(output)
        mark()
        stack.pop()

    clear_hooks(root.modules())
    for path, module in root.named_modules():
        module.register_forward_pre_hook(enter(f"{layer}.{path}" if path else layer))
        module.register_forward_hook(leave)
    with recorded:
        yield
    mark()


class _Tracer:
    """The steps so far of neighbouring layers, and the values of inputs and steps."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.steps: list[Step] = []
        self.values: list[Any] = list(inputs)

    def append(self, inputs: Sequence[int], layer: _Layer) -> list[int]:
        """Append the steps of a layer's graph; return the numbers of the values that it returns."""
        weights = iter(layer.weights)
        refs = iter([Ref(number) for number in inputs])
        values = layer.found
        for node in layer.graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(weights, None) or next(refs)
            elif node.op == "get_attr":
                values[node] = Weight(layer.graph, str(node.target))
            elif node.op == "output":
                outputs = fx.node.map_arg(node.args[0], values.__getitem__)
            elif node.target in (enter_autocast, exit_autocast):
                _change_autocast(layer, node)
            elif node.target is SET_GRAD_MODE:
                layer.grad_modes.append(bool(node.args[0]))
            # other nodes, such as the choice of a type, are plain values by now
            elif node.users or isinstance(node.meta.get("val"), Tensor):
                self._append_operation(layer, node)
        for position, output in enumerate(outputs):
            if isinstance(output, Weight):
                name = layer.names[output.name][0]
                raise StreamingError(
                    f"layer {name} gives a parameter as output {position}", "give a copy of it"
                )
        return [output.number for output in outputs]

    def _append_operation(self, layer: _Layer, node: fx.Node) -> None:
        _refuse_changes(node, layer)
        dtypes, options = _casts_of(layer, node)
        reads: dict[fx.Node, Any] = {
            read: self._cast(layer, node, read, dtypes[read])
            if read in dtypes
            else layer.found[read]
            for read in node.all_input_nodes
        }
        arguments: Any = node.args, {**node.kwargs, **options}
        args, kwargs = fx.node.map_arg(arguments, reads.__getitem__)
        value = map_tensors(_of_meta, node.meta["val"])
        target: Any = node.target
        if not args or not isinstance(args[0], Weight):
            target = _without_change_in_place(target)
        if target is not node.target and len({_value(layer, read).dtype for read in reads}) > 1:
            metas = {read: _of_meta(_value(layer, read)) for read in reads}
            wide = target(*fx.node.map_arg(node.args, metas.__getitem__), **kwargs)
            # an operation that changes its input in place returns the input's type
            if wide.dtype is not value.dtype:
                args = (self._add(layer, node, target, args, kwargs, wide), value.dtype)
                kwargs = {}
                target = torch.ops.aten.to.dtype
        number = self._add(layer, node, target, args, kwargs, value)
        layer.found[node] = next(iter(changed_weights(args, kwargs, target)), number)
        layer.has_grad[node] = layer.grad_modes[-1]

    def _cast(self, layer: _Layer, node: fx.Node, read: fx.Node, dtype: torch.dtype) -> Ref:
        """Cast what a node reads; a weight once, as autocast does."""
        source = layer.found[read]
        if isinstance(source, Weight) and (source, dtype) in layer.cast_weights:
            return layer.cast_weights[source, dtype]
        value = _of_meta(_value(layer, read)).to(dtype)
        cast = self._add(layer, node, torch.ops.aten.to.dtype, (source, dtype), {}, value)
        if isinstance(source, Weight):
            layer.cast_weights[source, dtype] = cast
        return cast

    def _add(
        self, layer: _Layer, node: fx.Node, target: Any, args: Any, kwargs: Any, value: Any
    ) -> Ref:
        module = layer.names[node.name]
        self.steps.append(Step(*module, target, args, kwargs, value, layer.grad_modes[-1]))
        self.values.append(value)
        return Ref(len(self.values) - 1)


def _change_autocast(layer: _Layer, node: fx.Node) -> None:
    """Follow a layer that turns autocast on or off for some of its operations."""
    if node.target is exit_autocast:
        layer.autocasts.pop()
        return
    if layer.mode is None and node.args[2]:
        raise StreamingError(f"layer {layer.names[node.name][0]} turns autocast on")
    arguments: tuple[Any, ...] = node.args
    layer.autocasts.append(Autocast(*arguments))


def _casts_of(layer: _Layer, node: fx.Node) -> tuple[dict[fx.Node, torch.dtype], Mapping[str, Any]]:
    """Return the types to which autocast casts a node's inputs, and the options that it sets."""
    if layer.mode is None or not isinstance(node.target, OpOverload):
        return {}, {}
    reads = {read: _value(layer, read) for read in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), reads.__getitem__)
    casts = find_casts(layer.mode, layer.autocasts, node.target, args, kwargs)
    if casts is None:
        name, kind, _ = layer.names[node.name]
        text = f"layer {name} ({kind}: {node.target}) is cast in parts by mixed precision"
        raise StreamingError(text, "compute in one type", "mixed")
    dtypes = {
        read: casts.dtypes[id(value)] for read, value in reads.items() if id(value) in casts.dtypes
    }
    return dtypes, casts.options


def _value(layer: _Layer, node: fx.Node) -> Any:
    """Return the value of a node, without memory."""
    return getattr(layer.graph, str(node.target)) if node.op == "get_attr" else node.meta["val"]


def _of_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the meta device like a recorded one."""
    return _like(tensor, device="meta")


def _refuse_changes(node: fx.Node, layer: _Layer) -> None:
    """Refuse a change in place that cannot be replaced by steps that return new tensors."""
    target = node.target
    name = layer.names[node.name][0]
    for changed in written(target, node.args, node.kwargs):
        if not isinstance(changed, fx.Node) or isinstance(layer.found[changed], Weight):
            continue
        base = _base(changed)
        where = f"layer {name} changes in place ({target})"
        if isinstance(layer.found[base], Weight):
            raise StreamingError(
                f"{where} a parameter or buffer by another name",
                "change the parameter or buffer itself",
            )
        if not is_in_place(target):
            raise StreamingError(f"{where} what out= names", "write to a new tensor")
        if not layer.grad_modes[-1] and layer.grad_modes[0] and layer.has_grad.get(base, True):
            raise StreamingError(
                f"{where} without gradients what has gradients", "write to a new tensor"
            )
        later = [other for other in node.graph.nodes if node < other]
        if any(
            read < node and _base(read) is base for other in later for read in other.all_input_nodes
        ):
            raise StreamingError(f"{where} what has another name", "write to a new tensor")


def written(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    arguments = getattr(getattr(target, "_schema", None), "arguments", ())
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def changed_weights(args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> list[Weight]:
    """Return the parameters and buffers that an operation writes to."""
    return [argument for argument in written(target, args, kwargs) if isinstance(argument, Weight)]


def _base(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of a node's value."""
    returned = getattr(getattr(node.target, "_schema", None), "returns", ())
    is_view = node.target is operator.getitem or any(
        value.alias_info is not None for value in returned
    )
    first = node.args[0] if is_view and node.args else None
    return _base(first) if isinstance(first, fx.Node) else node


def _without_change_in_place(target: Any) -> Any:
    """Return the operation that returns a new tensor, or the operation itself if there is none."""
    if not is_in_place(target):
        return target
    packet = getattr(torch.ops.aten, target.overloadpacket.__name__.removesuffix("_"), None)
    overload = target._overloadname
    return getattr(packet, overload) if packet and overload in packet.overloads() else target


def is_in_place(target: Any) -> bool:
    """Return whether an operation changes its first argument in place."""
    schema = getattr(target, "_schema", None)
    return target is not operator.getitem and schema is not None and str(schema.name).endswith("_")
