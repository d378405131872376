"""A user's network traced into a graph of its blocks, and divided into layers with the tensors that cross between them.

The graph comes from symbolic tracing (Reed et al. 2022, arXiv 2112.08429) on torch's meta device. Only what is between
blocks is traced; a block is called as it is, so anything may happen inside of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import count, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from gems.errors import ConfigError
from gems.models.imported.user_code import place_of_forward, refusal
from gems.models.outputs import tensors_in

TRACED_BATCH = 2
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_PLAIN = "a size or a value as a plain number (of a size only a block's own forward makes one)"


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph, the value that each of its nodes gave, which earlier nodes' values it changed in place, and its output.

    `output` is what the network gives: a tensor, or tensors in tuples, lists and dicts.
    """

    graph: fx.Graph
    values: dict[fx.Node, Any]
    writes: dict[fx.Node, tuple[fx.Node, ...]]
    output: Any

    @property
    def end(self) -> fx.Node:
        """The node of the output."""
        last: fx.Node = list(self.graph.nodes)[-1]
        return last


def trace(root: nn.Module, image: tuple[int, int, int], target: str) -> Traced:
    """Trace a network on the meta device for images (channels, height, width), in the mode that it is in.

    A choice that shapes decide is taken as for two images of this size. Sizes themselves stay steps of the graph.

    Raises:
        ConfigError: a step that cannot be traced or does not run, with its line, or an output without a tensor.
    """
    tracer = _Tracer(image)
    try:
        graph = tracer.trace(root)
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and _Value.__name__ in str(error):
            error = TraceError(_PLAIN).with_traceback(error.__traceback__)
        if isinstance(error, TraceError | NameError | NotImplementedError):
            raise refusal(target, "cannot be cut into layers", error, why=str(error)) from error
        what = f"does not run on images of {image[0]}x{image[1]}x{image[2]} (channels, height, width)"
        raise refusal(target, what, error) from error
    end = next(node for node in graph.nodes if node.op == "output")
    value = fx.node.map_arg(end.args[0], tracer.values.__getitem__)
    if next(tensors_in(value), None) is None:
        raise ConfigError(
            "model.target", target,
            f"its forward at {place_of_forward(root)} must give a tensor of scores, and gives {type(value).__name__}",
        )  # fmt: skip
    return Traced(graph, tracer.values, tracer.writes, value)


def is_open(root: nn.Module, path: str) -> bool:
    """Return whether a module's parts are layers by themselves; a module that is not open is a block.

    Open are the network; a Sequential, ModuleList or ModuleDict directly in it; and any other module that is such a
    container of modules with modules of their own, or holds one directly (a list of lists of blocks, a backbone).
    """
    if not path:
        return True
    module = root.get_submodule(path)
    if type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS):
        return False
    if isinstance(module, _CONTAINERS):
        is_plain = type(module).forward in (nn.Sequential.forward, nn.Module.forward)
        return (is_plain and "." not in path) or _holds_blocks(module)
    return any(isinstance(child, _CONTAINERS) and _holds_blocks(child) for child in module.children())


def block_of(root: nn.Module, path: str) -> str:
    """Return the path of the block that the module at `path` is, or is part of, or nothing where it is open."""
    words = path.split(".")
    blocks = (".".join(words[: end + 1]) for end in range(len(words)))
    return next((block for block in blocks if not is_open(root, block)), "")


def _holds_blocks(container: nn.Module) -> bool:
    return any(next(child.children(), None) is not None for child in container.children())


_IN_PLACE = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")


class _Value(fx.Proxy):
    """A traced value: it knows its length where it is a tuple or list, and what changes it in place stays in place.

    A plain proxy makes a new tensor of `x += y`, which another name of x would not see.
    """

    def __len__(self) -> int:
        value = self.tracer.values[self.node]  # type: ignore[attr-defined]
        if isinstance(value, Tensor):
            raise TraceError("the length of a tensor as a plain number")
        return len(value)

    def __int__(self) -> Any:
        raise TraceError(_PLAIN)

    __float__ = __int__

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _in_place(name: str) -> Callable[[_Value, Any], fx.Proxy]:
    function = getattr(operator, f"i{name}")
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in _IN_PLACE:
    setattr(_Value, f"__i{_name}__", _in_place(_name))


class _Tracer(fx.Tracer):
    """Runs each step on the meta device as it is recorded, so that shapes can decide, and records what it changed."""

    proxy_buffer_attributes = True

    def __init__(self, image: tuple[int, int, int]) -> None:
        super().__init__()
        self.values: dict[fx.Node, Any] = {}
        self.writes: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._image = image
        self._versions: dict[fx.Node, int] = {}
        self._is_running = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not is_open(self.root, module_qualified_name)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        return root_fn, [self.root, self.create_proxy("placeholder", "image", (), {})]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Callable[[fx.Node], fx.Proxy] | None = None,
    ) -> fx.Proxy:
        made = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        self._evaluate(made.node)
        return made

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        # parameters among arguments, and named tuples, are made into nodes without a proxy
        if kind == "get_attr" or isinstance(node.target, type):
            self._evaluate(node)
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not any(a is known for known in (*self.root.parameters(), *self.root.buffers())):
            raise TraceError("a tensor that is no parameter, no registered buffer and not made of the image")
        return super().create_arg(a)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self._is_running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        return attr_val if self._is_running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = self.values[obj.node]
        if isinstance(value, Tensor):
            raise TraceError("a choice by the values of a tensor (shapes and settings may choose)")
        return bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        value = self.values[obj.node]
        if not isinstance(value, tuple | list):
            return super().iter(obj)
        return iter([obj[index] for index in range(len(value))])  # type: ignore[index]

    def _evaluate(self, node: fx.Node) -> None:
        if node in self.values:
            return
        before, self._is_running = self._is_running, True
        try:
            with torch.no_grad(), torch.device("meta"):
                self.values[node] = self._run(node)
        finally:
            self._is_running = before
        # which values have changed; views of one storage count their changes together
        if any(self._versions.get(other) != _version(self.values[other]) for other in node.all_input_nodes):
            now = {other: _version(self.values[other]) for other in self._versions}
            self.writes[node] = tuple(other for other in now if now[other] != self._versions[other])
            self._versions = now
        self._versions[node] = _version(self.values[node])

    def _run(self, node: fx.Node) -> Any:
        target: Any = node.target
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.op == "placeholder":
            return torch.empty((TRACED_BATCH, *self._image))
        if node.op == "get_attr":
            return operator.attrgetter(target)(self.root)
        if node.op == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)


def _version(value: Any) -> int:
    """Return how often the tensors in a value were changed in place."""
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_version, value)) if isinstance(value, tuple | list) else 0


Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """One layer of a traced network.

    Its graph takes what the layer before gives, and gives the tensors of `output_names` (one needs no name). `paths`
    are those of the modules, parameters and buffers that it uses.
    """

    name: str
    kind: str
    graph: fx.Graph
    output_names: tuple[str, ...]
    paths: tuple[str, ...]


def divide(root: nn.Module, modes: Sequence[Traced]) -> list[tuple[Slice, ...]]:
    """Divide a network traced in some modes into the same layers at its blocks, in the order in which they run.

    A new layer begins where the block changes (`block_of`). Steps between blocks, and modules without
    parameters and buffers, belong to the block before; in a Sequential every child is a layer. Neighbours become one
    layer when they share a parameter or a buffer, when something other than tensors and sizes would cross between
    them, or when one changes in place what another holds by two names.

    A tensor that a later layer uses is handed on, as it is, by the layers between. A size is handed on as the shape
    of a tensor without elements. A layer that does not run in a mode hands on what it gets.
    """
    begun = [_begin(root, list(each.graph.nodes)[:-1], each.values) for each in modes]
    names, numbers = _aligned([of_mode for _, of_mode in begun])
    layer_of: dict[fx.Node, int] = {}
    spans: list[tuple[int, int]] = []
    for traced, (of_nodes, _), places in zip(modes, begun, numbers, strict=True):
        layer_of |= {node: places[layer] for node, layer in of_nodes.items()} | {traced.end: len(names) - 1}
        nodes = list(of_nodes)
        spans += _inseparable(traced, nodes, layer_of)
        spans += [(n, n + 1) for n in range(len(names) - 1) if not _crossing(nodes, layer_of, n)]
    spans += _sharing(root, modes, layer_of)
    merged = _merge(len(names), spans)
    layer_of = {node: merged[layer] for node, layer in layer_of.items()}
    groups = [list(group) for _, group in groupby(range(len(names)), key=merged.__getitem__)]
    titles = _titles([(names[group[0]], names[group[-1]]) for group in groups])
    kinds = [type(root.get_submodule(names[group[0]])).__name__ for group in groups]
    return [_slices_of(traced, layer_of, titles, kinds) for traced in modes]


def _slices_of(
    traced: Traced, layer_of: dict[fx.Node, int], titles: Sequence[str], kinds: Sequence[str]
) -> tuple[Slice, ...]:
    """Return the layers of a network in one mode."""
    *nodes, _ = traced.graph.nodes
    boundaries = [_crossing(nodes, layer_of, layer) for layer in range(len(titles) - 1)]
    out = []
    for layer, (before, after) in enumerate(pairwise([[], *boundaries, None])):
        inside = [node for node in nodes if layer_of[node] == layer]
        graph, slots = _graph_of(traced, inside, before or [], after)
        paths = sorted({str(node.target) for node in inside if node.op in ("call_module", "get_attr")})
        out.append(Slice(titles[layer], kinds[layer], graph, slots, tuple(paths)))
    return tuple(out)


def _aligned(modes: Sequence[Sequence[str]]) -> tuple[list[str], list[list[int]]]:
    """Return the layers that run in any of the modes, in order, and the number of each mode's layers among them."""
    names = list(modes[0])
    for other in modes[1:]:
        joined: list[str] = []
        for _, first, end, other_first, other_end in SequenceMatcher(None, names, other, autojunk=False).get_opcodes():
            mine, theirs = names[first:end], list(other[other_first:other_end])
            joined += mine if mine == theirs else [*mine, *theirs]
        names = joined
    numbers = []
    for mode in modes:
        matches = SequenceMatcher(None, names, mode, autojunk=False).get_matching_blocks()
        numbers.append([match.a + offset for match in matches for offset in range(match.size)])
    return names, numbers


def _begin(
    root: nn.Module, nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any]
) -> tuple[dict[fx.Node, int], list[str]]:
    """Return the layer of each node, and for each layer the path of the block that began it."""
    layer_of: dict[fx.Node, int] = {}
    names = [""]
    is_chain = type(root).forward is nn.Sequential.forward
    for node in nodes:
        block = block_of(root, str(node.target)) if node.op == "call_module" else ""
        if block and not is_chain and not _state(root.get_submodule(block)):
            block = ""
        if block and not names[-1]:
            names[-1] = block
        elif block and (block != names[-1] or is_chain):
            names.append(block)
        layer_of[node] = len(names) - 1
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and isinstance(values[source], tuple | list | dict):
            layer_of[node] = layer_of[source]  # what is taken out of a tuple does not cross inside of it
    return layer_of, names


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _sharing(root: nn.Module, modes: Iterable[Traced], layer_of: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Yield the spans of layers that share a parameter or a buffer, whose gradients and statistics are one."""
    users: dict[int, list[int]] = {}
    for traced in modes:
        for node in traced.graph.nodes:
            state = _state(root.get_submodule(str(node.target))) if node.op == "call_module" else []
            for tensor in [traced.values[node]] if node.op == "get_attr" else state:
                users.setdefault(id(tensor), []).append(layer_of[node])
    yield from ((min(layers), max(layers)) for layers in users.values())


def _inseparable(traced: Traced, nodes: Iterable[fx.Node], layer_of: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Yield the spans of layers that must be one in a mode.

    A value would cross between them that no tensors carry. Or one changes what came to it by two names, or changes the
    network's state; what came by one name only is copied first (`_graph_of`).
    """
    for node in nodes:
        here = layer_of[node]
        leaves = [leaf for _, leaf in _leaves(traced.values[node])]
        if not leaves or not all(isinstance(leaf, Tensor) or _is_size(leaf) for leaf in leaves):
            yield here, _last_use(node, layer_of)
        # values of layers before that this step changes in place and that its layer, or a later one, uses
        changed = [
            other
            for other in traced.writes.get(node, ())
            if layer_of[other] < here and _last_use(other, layer_of) >= here
        ]
        if len(changed) > 1 or any(other.op == "get_attr" for other in changed):
            yield min(layer_of[other] for other in changed), here


def _last_use(node: fx.Node, layer_of: dict[fx.Node, int]) -> int:
    return max((layer_of[user] for user in node.users), default=layer_of[node])


def _merge(num_layers: int, spans: Iterable[tuple[int, int]]) -> list[int]:
    """Return each layer's number once the layers of a span are one."""
    is_joined = [False] * num_layers
    for first, last in spans:
        is_joined[first + 1 : last + 1] = [True] * (last - first)
    out: list[int] = []
    for joined in is_joined:
        out.append(out[-1] + (not joined) if out else 0)
    return out


def _crossing(nodes: Sequence[fx.Node], layer_of: dict[fx.Node, int], layer: int) -> list[fx.Node]:
    """Return the values that cross from a layer to the next, the newest first: the one that a stage listens to."""
    crossing = [node for node in nodes if layer_of[node] <= layer < _last_use(node, layer_of)]
    return crossing[::-1]


def _titles(spans: Sequence[tuple[str, str]]) -> list[str]:
    """Return names for layers that run from one block to another; one that comes again gets a number."""
    out: list[str] = []
    for first, last in spans:
        title = (first if first == last else f"{first}-{last}") or "network"
        number = sum(title == other.partition("#")[0] for other in out)
        out.append(f"{title}#{number + 1}" if number else title)
    return out


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what a value holds that is no tuple and no list, with its place."""
    if isinstance(value, tuple | list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _slots(node: fx.Node, value: Any) -> list[tuple[str, Path | None]]:
    """Return the names of the tensors that carry a value, with the place of each in it; None carries the sizes."""
    leaves = list(_leaves(value))
    slots: list[tuple[str, Path | None]] = [
        (".".join([node.name, *map(str, path)]), path) for path, leaf in leaves if isinstance(leaf, Tensor)
    ]
    return [*slots, *([(f"{node.name}.sizes", None)] if any(_is_size(leaf) for _, leaf in leaves) else [])]


def _take(graph: fx.Graph, whole: Any, path: Path) -> Any:
    for index in path:
        whole = whole[index] if isinstance(whole, tuple) else graph.call_function(operator.getitem, (whole, index))
    return whole


def _carrier(like: Tensor, *sizes: int) -> Tensor:
    """Return a tensor without elements whose shape is (*sizes, 0): nothing to send, and nothing to wait for."""
    return like.new_empty((*sizes, 0), dtype=torch.uint8)


def _graph_of(
    traced: Traced, inside: Sequence[fx.Node], before: Sequence[fx.Node], after: Sequence[fx.Node] | None
) -> tuple[fx.Graph, tuple[str, ...]]:
    """Return the graph of one layer and the names of what it gives (none for a single tensor).

    Without `after` it is the last one, which gives the network's output.
    """
    graph = fx.Graph()
    values = traced.values
    changed = {other for node in inside for other in traced.writes.get(node, ())}
    number = count()
    taken = [
        {path: graph.placeholder(f"taken_{next(number)}") for _, path in _slots(node, values[node])} for node in before
    ]
    copies: dict[fx.Node, Any] = {
        node: _rebuild(graph, slots, values[node], node in changed) for node, slots in zip(before, taken, strict=True)
    }
    for node in inside:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder" and node in changed:
            copies[node] = graph.call_function(torch.clone, (copies[node],))
    if after is None:
        graph.output(fx.node.map_arg(traced.end.args[0], copies.__getitem__))
        graph.lint()
        return graph, ()
    like = next(iter(graph.nodes))  # a layer takes one tensor at least
    given: list[tuple[str, Any]] = []
    for node in after:
        sizes = [_take(graph, copies[node], path) for path, leaf in _leaves(values[node]) if _is_size(leaf)]
        for name, path in _slots(node, values[node]):
            made = graph.call_function(_carrier, (like, *sizes)) if path is None else _take(graph, copies[node], path)
            given.append((name, made))
    graph.output(given[0][1] if len(given) == 1 else tuple(made for _, made in given))
    graph.lint()
    return graph, () if len(given) == 1 else tuple(name for name, _ in given)


def _rebuild(graph: fx.Graph, slots: Mapping[Path | None, fx.Node], value: Any, is_changed: bool) -> Any:
    """Return a value made again of the tensors that carried it, copied first where the layer changes it in place."""
    places = iter(range(sum(_is_size(leaf) for _, leaf in _leaves(value))))

    def build(part: Any, path: Path) -> Any:
        if isinstance(part, tuple | list):
            return tuple(build(inner, (*path, index)) for index, inner in enumerate(part))
        if isinstance(part, Tensor):
            return graph.call_function(torch.clone, (slots[path],)) if is_changed else slots[path]
        shape = graph.call_function(getattr, (slots[None], "shape"))
        return graph.call_function(operator.getitem, (shape, next(places)))

    return build(value, ())
