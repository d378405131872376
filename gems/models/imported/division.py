"""Divide a traced network into layers at its blocks, with the tensors that cross between them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import count, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from gems.models.imported.tracing import FROZEN, Path, Traced, block_of, leaves


@dataclass(frozen=True, slots=True)
class Slice:
    """One layer of a traced network.

    Its graph takes the tensors of the layer before, and returns the tensors of `output_names` (a
    single one needs no name). `paths` are the modules, parameters and buffers that it uses.
    """

    name: str
    kind: str
    graph: fx.Graph
    output_names: tuple[str, ...]
    paths: tuple[str, ...]


def divide(root: nn.Module, modes: Sequence[Traced]) -> list[tuple[Slice, ...]]:
    """Divide a network, traced in some modes, into the same layers at its blocks, in run order.

    A new layer begins where the block changes (`block_of`). Steps between blocks, and modules
    without parameters and buffers, belong to the block before; in a Sequential every child is a
    layer. Neighbours become one layer if they share a parameter or a buffer, if something other
    than tensors and sizes would cross between them, or if one changes in place a value that another
    has under two names.

    A tensor that a later layer uses is passed on unchanged by the layers between. A size is passed
    on as the shape of a tensor without elements. A layer that does not run in a mode passes on its
    inputs.
    """
    begun = [_begin(root, list(traced.graph.nodes)[:-1], traced.values) for traced in modes]
    names, numbers = _aligned([of_mode for _, of_mode in begun])
    layer_of: dict[fx.Node, int] = {}
    spans: list[tuple[int, int]] = []
    for traced, (of_nodes, _), places in zip(modes, begun, numbers, strict=True):
        layer_of |= {node: places[layer] for node, layer in of_nodes.items()} | {
            traced.end: len(names) - 1
        }
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
        paths = sorted(
            {str(node.target) for node in inside if node.op in ("call_module", "get_attr")}
        )
        out.append(Slice(titles[layer], kinds[layer], graph, slots, tuple(paths)))
    return tuple(out)


def _aligned(modes: Sequence[Sequence[str]]) -> tuple[list[str], list[list[int]]]:
    """Return the layers that run in any mode, in order, and the numbers of each mode's layers."""
    names = list(modes[0])
    for other in modes[1:]:
        joined: list[str] = []
        for _, first, end, other_first, other_end in SequenceMatcher(
            None, names, other, autojunk=False
        ).get_opcodes():
            ours = names[first:end]
            theirs = list(other[other_first:other_end])
            joined += ours if ours == theirs else [*ours, *theirs]
        names = joined
    numbers = []
    for mode in modes:
        matches = SequenceMatcher(None, names, mode, autojunk=False).get_matching_blocks()
        numbers.append([match.a + offset for match in matches for offset in range(match.size)])
    return names, numbers


def _begin(
    root: nn.Module, nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any]
) -> tuple[dict[fx.Node, int], list[str]]:
    """Return the layer of each node, and the path of the block that begins each layer."""
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
        # an item belongs to the layer that makes its tuple, so it crosses a boundary outside the
        # tuple
        if isinstance(source, fx.Node) and isinstance(values[source], tuple | list | dict):
            layer_of[node] = layer_of[source]
    return layer_of, names


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _sharing(
    root: nn.Module, modes: Iterable[Traced], layer_of: dict[fx.Node, int]
) -> Iterator[tuple[int, int]]:
    """Yield the spans of layers that share a parameter or a buffer.

    Its gradients and statistics must stay in one place.
    """
    users: dict[int, list[int]] = {}
    for traced in modes:
        for node in traced.graph.nodes:
            state = _state(root.get_submodule(str(node.target))) if node.op == "call_module" else []
            for tensor in [traced.values[node]] if node.op == "get_attr" else state:
                users.setdefault(id(tensor), []).append(layer_of[node])
    yield from ((min(layers), max(layers)) for layers in users.values())


def _inseparable(
    traced: Traced, nodes: Iterable[fx.Node], layer_of: dict[fx.Node, int]
) -> Iterator[tuple[int, int]]:
    """Yield the spans of layers that must be one layer in a mode.

    This is so if tensors cannot carry a value that would cross between them, or if one of them
    changes a value that it got under two names, or changes the network's state. A value with only
    one name is copied first (`_graph_of`).
    """
    for node in nodes:
        here = layer_of[node]
        parts = [leaf for _, leaf in leaves(traced.values[node])]
        if not parts or not all(isinstance(part, Tensor) or _is_size(part) for part in parts):
            yield here, _last_use(node, layer_of)
        # values of earlier layers that this step changes in place and that its layer, or a later
        # one, uses
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
    """Return the number of each layer after the layers of each span are merged."""
    is_joined = [False] * num_layers
    for first, last in spans:
        is_joined[first + 1 : last + 1] = [True] * (last - first)
    out: list[int] = []
    for joined in is_joined:
        out.append(out[-1] + (not joined) if out else 0)
    return out


def _crossing(nodes: Sequence[fx.Node], layer_of: dict[fx.Node, int], layer: int) -> list[fx.Node]:
    """Return the values that cross from a layer to the next, the newest first.

    A stage observes the first of them.
    """
    crossing = [node for node in nodes if layer_of[node] <= layer < _last_use(node, layer_of)]
    return crossing[::-1]


def _titles(spans: Sequence[tuple[str, str]]) -> list[str]:
    """Return names for layers that span from one block to another.

    A repeated name gets a number.
    """
    out: list[str] = []
    for first, last in spans:
        title = (first if first == last else f"{first}-{last}") or "network"
        number = sum(title == other.partition("#")[0] for other in out)
        out.append(f"{title}#{number + 1}" if number else title)
    return out


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _slots(node: fx.Node, value: Any) -> list[tuple[str, Path | None]]:
    """Return the names of the tensors that carry a value, each with its place in the value.

    The place is None for the tensor that carries the sizes.
    """
    parts = list(leaves(value))
    slots: list[tuple[str, Path | None]] = [
        (".".join([node.name, *map(str, path)]), path)
        for path, leaf in parts
        if isinstance(leaf, Tensor)
    ]
    return [
        *slots,
        *([(f"{node.name}.sizes", None)] if any(_is_size(leaf) for _, leaf in parts) else []),
    ]


def _take(graph: fx.Graph, whole: Any, path: Path) -> Any:
    for index in path:
        whole = (
            whole[index]
            if isinstance(whole, tuple)
            else graph.call_function(operator.getitem, (whole, index))
        )
    return whole


def _carrier(like: Tensor, *sizes: int) -> Tensor:
    """Return a tensor without elements whose shape is (*sizes, 0).

    There is nothing to send and nothing to wait for.
    """
    return like.new_empty((*sizes, 0), dtype=torch.uint8)


def _stop_gradients() -> bool:
    """Disable gradients from here on; return whether they were enabled."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    return before


def _graph_of(
    traced: Traced,
    inside: Sequence[fx.Node],
    before: Sequence[fx.Node],
    after: Sequence[fx.Node] | None,
) -> tuple[fx.Graph, tuple[str, ...]]:
    """Return the graph of one layer and the names of its outputs (none for a single tensor).

    If `after` is None, it is the last layer, which returns the network's output.
    """
    graph = fx.Graph()
    values = traced.values
    changed = {other for node in inside for other in traced.writes.get(node, ())}
    number = count()
    taken = [
        {path: graph.placeholder(f"taken_{next(number)}") for _, path in _slots(node, values[node])}
        for node in before
    ]
    copies: dict[fx.Node, Any] = {
        node: _rebuild(graph, slots, values[node], node in changed)
        for node, slots in zip(before, taken, strict=True)
    }
    for node in inside:
        mode = graph.call_function(_stop_gradients) if node.meta[FROZEN] else None
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if mode is not None:
            graph.call_function(torch.set_grad_enabled, (mode,))
        if node.op == "placeholder" and node in changed:
            copies[node] = graph.call_function(torch.clone, (copies[node],))
    if after is None:
        graph.output(fx.node.map_arg(traced.end.args[0], copies.__getitem__))
        graph.lint()
        return graph, ()
    like = next(iter(graph.nodes))  # a layer takes at least one tensor
    given: list[tuple[str, Any]] = []
    for node in after:
        sizes = [
            _take(graph, copies[node], path)
            for path, leaf in leaves(values[node])
            if _is_size(leaf)
        ]
        for name, path in _slots(node, values[node]):
            made = (
                graph.call_function(_carrier, (like, *sizes))
                if path is None
                else _take(graph, copies[node], path)
            )
            given.append((name, made))
    graph.output(given[0][1] if len(given) == 1 else tuple(made for _, made in given))
    graph.lint()
    return graph, () if len(given) == 1 else tuple(name for name, _ in given)


def _rebuild(
    graph: fx.Graph, slots: Mapping[Path | None, fx.Node], value: Any, is_changed: bool
) -> Any:
    """Return a value rebuilt from the tensors that carried it.

    They are copied first if the layer changes the value in place.
    """
    places = iter(range(sum(_is_size(leaf) for _, leaf in leaves(value))))

    def build(part: Any, path: Path) -> Any:
        if isinstance(part, tuple | list):
            return tuple(build(inner, (*path, index)) for index, inner in enumerate(part))
        if isinstance(part, Tensor):
            return graph.call_function(torch.clone, (slots[path],)) if is_changed else slots[path]
        shape = graph.call_function(getattr, (slots[None], "shape"))
        return graph.call_function(operator.getitem, (shape, next(places)))

    return build(value, ())
