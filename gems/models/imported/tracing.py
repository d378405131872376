"""A user's network as a graph of its blocks, with the value that each step gives on torch's meta device.

The graph comes from symbolic tracing (Reed et al. 2022, arXiv 2112.08429). Only what stands between blocks is
traced; a block is called as it is, so anything may happen inside of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from gems.errors import ConfigError
from gems.models.imported.user_code import place_of_forward, refusal

TRACED_BATCH = 2
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_PLAIN = "a size or a value as a plain number (of a size only a block's own forward makes one)"


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph, the value that each of its nodes gave, and which earlier nodes' values it changed in place."""

    graph: fx.Graph
    values: dict[fx.Node, Any]
    writes: dict[fx.Node, tuple[fx.Node, ...]]


def trace(root: nn.Module, image: tuple[int, int, int], target: str) -> Traced:
    """Trace a network on the meta device for images (channels, height, width), in the mode that it is in.

    A choice that shapes decide is taken as for two images of this size. Sizes themselves stay steps of the graph.

    Raises:
        ConfigError: a step that cannot be traced or does not run, with its line, or an output that is not one tensor.
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
    output = next(node for node in graph.nodes if node.op == "output").args[0]
    if not isinstance(output, fx.Node) or not isinstance(tracer.values[output], Tensor):
        raise ConfigError(
            "model.target", target,
            f"its forward at {place_of_forward(root)} must give one tensor of logits, and gives "
            f"{_type_of(output, tracer.values)}",
        )  # fmt: skip
    return Traced(graph, tracer.values, tracer.writes)


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
    for end in range(1, len(words) + 1):
        block = ".".join(words[:end])
        if not is_open(root, block):
            return block
    return ""


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

    def __int__(self) -> int:
        raise TraceError(_PLAIN)

    def __float__(self) -> float:
        raise TraceError(_PLAIN)

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
        if kind == "get_attr":  # parameters among arguments are made into nodes without a proxy
            self._evaluate(node)
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not any(a is known for known in self._state()):
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

    def _state(self) -> Iterator[Tensor]:
        yield from self.root.parameters()
        yield from self.root.buffers()

    def _evaluate(self, node: fx.Node) -> None:
        if node in self.values:
            return
        before, self._is_running = self._is_running, True
        try:
            with torch.no_grad(), torch.device("meta"):
                self.values[node] = self._run(node)
        finally:
            self._is_running = before
        self._note_writes(node)

    def _run(self, node: fx.Node) -> Any:
        target: Any = node.target
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.op == "placeholder":
            return torch.empty((TRACED_BATCH, *self._image))
        if node.op == "get_attr":
            found: Any = self.root
            for word in target.split("."):
                found = getattr(found, word)
            return found
        if node.op == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    def _note_writes(self, node: fx.Node) -> None:
        """Record which values have changed; views of one storage count their changes together."""
        if any(self._versions.get(other) != _version(self.values[other]) for other in node.all_input_nodes):
            now = {other: _version(self.values[other]) for other in self._versions}
            self.writes[node] = tuple(other for other in now if now[other] != self._versions[other])
            self._versions = now
        self._versions[node] = _version(self.values[node])


def _version(value: Any) -> int:
    """Return how often the tensors in a value were changed in place."""
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_version, value)) if isinstance(value, tuple | list) else 0


def _type_of(output: Any, values: dict[fx.Node, Any]) -> str:
    return type(values[output] if isinstance(output, fx.Node) else output).__name__
