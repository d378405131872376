"""A traced network divided into layers: which steps each runs, and the tensors that cross from one to the next."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from gems.models.imported.tracing import Traced, block_of

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


def divide(root: nn.Module, traced: Traced) -> tuple[Slice, ...]:
    """Divide a traced network into layers at its blocks, in the order in which they run.

    A new layer begins where the block changes (`tracing.block_of`). Steps between blocks, and modules without
    parameters and buffers, belong to the block before; in a Sequential every child is a layer. Neighbours become one
    layer when they share a parameter or a buffer, when something other than tensors and sizes would cross between
    them, or when one changes in place what another holds by two names.

    A tensor that a later layer uses is handed on, as it is, by the layers between. A size is handed on as the shape
    of a tensor without elements.
    """
    *nodes, end = traced.graph.nodes
    layer_of, names = _begin(root, nodes, traced.values)
    layer_of[end] = len(names) - 1
    empty = ((n, n + 1) for n in range(len(names) - 1) if not _crossing(nodes, layer_of, n))
    spans = [*_shared(root, nodes, layer_of), *_uncarried(traced, nodes, layer_of), *_aliased(traced, nodes, layer_of)]
    merged = _merge(len(names), [*spans, *empty])
    layer_of = {node: merged[layer] for node, layer in layer_of.items()}
    groups = [list(group) for _, group in groupby(range(len(names)), key=merged.__getitem__)]
    titles = _titles([(names[group[0]], names[group[-1]]) for group in groups])
    boundaries = [_crossing(nodes, layer_of, layer) for layer in range(len(groups) - 1)]
    out = []
    for layer, (before, after) in enumerate(pairwise([[], *boundaries, end.all_input_nodes])):
        inside = [node for node in nodes if layer_of[node] == layer]
        graph, slots = _graph_of(traced, inside, before, after)
        paths = sorted({str(node.target) for node in inside if node.op in ("call_module", "get_attr")})
        kind = type(root.get_submodule(names[groups[layer][0]])).__name__
        out.append(Slice(titles[layer], kind, graph, slots, tuple(paths)))
    return tuple(out)


def _begin(
    root: nn.Module, nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any]
) -> tuple[dict[fx.Node, int], list[str]]:
    """Return the layer of each node, and for each layer the path of the block that began it."""
    layer_of: dict[fx.Node, int] = {}
    names = [""]
    is_chain = type(root).forward is nn.Sequential.forward
    for node in nodes:
        block = block_of(root, str(node.target)) if node.op == "call_module" else ""
        if block and not is_chain and not _has_state(root.get_submodule(block)):
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


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _shared(root: nn.Module, nodes: Iterable[fx.Node], layer_of: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Yield the spans of layers that share a parameter or a buffer, whose gradients and statistics are one."""
    users: dict[int, list[int]] = {}
    for node in nodes:
        for tensor in _state_of(root, node):
            users.setdefault(id(tensor), []).append(layer_of[node])
    yield from ((min(layers), max(layers)) for layers in users.values())


def _state_of(root: nn.Module, node: fx.Node) -> list[Tensor]:
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return [getattr(root.get_submodule(owner), name)]
    return []


def _last_use(node: fx.Node, layer_of: dict[fx.Node, int]) -> int:
    return max((layer_of[user] for user in node.users), default=layer_of[node])


def _uncarried(traced: Traced, nodes: Iterable[fx.Node], layer_of: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Yield the spans of layers between which a value would cross that no tensors carry."""
    for node in nodes:
        if _last_use(node, layer_of) > layer_of[node] and not _is_carried(traced.values[node]):
            yield layer_of[node], _last_use(node, layer_of)


def _aliased(traced: Traced, nodes: Iterable[fx.Node], layer_of: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Yield the spans of layers of which one changes what came to it by two names, or changes the network's state.

    What came by one name only is copied first (`_graph_of`).
    """
    for node in nodes:
        changed = _changed(traced, node, layer_of)
        if len(changed) > 1 or any(other.op == "get_attr" for other in changed):
            yield min(layer_of[other] for other in changed), layer_of[node]


def _changed(traced: Traced, node: fx.Node, layer_of: dict[fx.Node, int]) -> list[fx.Node]:
    """Return the values of layers before that a step changes in place and that its layer, or one behind, uses."""
    here = layer_of[node]
    return [
        other for other in traced.writes.get(node, ()) if layer_of[other] < here and _last_use(other, layer_of) >= here
    ]


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


def _is_carried(value: Any) -> bool:
    leaves = list(_leaves(value))
    return bool(leaves) and all(isinstance(leaf, Tensor) or _is_size(leaf) for _, leaf in leaves)


def _slots(node: fx.Node, value: Any) -> list[tuple[str, Path | None]]:
    """Return the names of the tensors that carry a value, with the place of each in it; None carries the sizes."""
    leaves = list(_leaves(value))
    slots: list[tuple[str, Path | None]] = [
        (".".join([node.name, *map(str, path)]), path) for path, leaf in leaves if isinstance(leaf, Tensor)
    ]
    return [*slots, *([(f"{node.name}.sizes", None)] if any(_is_size(leaf) for _, leaf in leaves) else [])]


def _take(graph: fx.Graph, whole: Any, path: Path) -> Any:
    for index in path:
        whole = whole[index] if isinstance(whole, tuple) else graph.call_function(_item, (whole, index))
    return whole


def _item(whole: Any, index: int) -> Any:
    return whole[index]


def _carrier(like: Tensor, *sizes: int) -> Tensor:
    """Return a tensor without elements whose shape is (*sizes, 0): nothing to send, and nothing to wait for."""
    return like.new_empty((*sizes, 0), dtype=torch.uint8)


def _graph_of(
    traced: Traced, inside: Sequence[fx.Node], before: Sequence[fx.Node], after: Sequence[fx.Node]
) -> tuple[fx.Graph, tuple[str, ...]]:
    """Return the graph of one layer and the names of what it gives (none for a single tensor)."""
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
        return graph.call_function(_item, (shape, next(places)))

    return build(value, ())
