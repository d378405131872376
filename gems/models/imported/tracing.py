"""Trace a user's network into a graph of its blocks.

It uses symbolic tracing (Reed et al. 2022, arXiv 2112.08429) on torch's meta device. Only the code
between blocks is traced. A block is called unchanged, so its code is arbitrary.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute, TraceError

from gems.autograd.outputs import tensors_in
from gems.errors import ConfigError
from gems.models.imported.user_code import check_inputs, check_momentum, place_of_forward, refusal
from gems.utils.units import SIDES

Path = tuple[int, ...]
TRACED_BATCH = 2
# key in a node's meta: whether the network, in training, computes this step without gradients
FROZEN = "frozen"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_WHOLE_CALLS = ("einops",)  # packages whose functions are steps of the graph, like those of torch
_PLAIN = "a size or a value as a plain number (of a size only a block's own forward makes one)"


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced graph with the values of its nodes, their in-place writes and its output.

    `values` maps each node to its value. `writes` maps a node to the earlier nodes whose values it
    changed in place. `output` is the output of the network: a tensor, or tensors in tuples, lists
    and dicts.
    """

    graph: fx.Graph
    values: dict[fx.Node, Any]
    writes: dict[fx.Node, tuple[fx.Node, ...]]
    output: Any

    @property
    def end(self) -> fx.Node:
        """The output node."""
        last: fx.Node = list(self.graph.nodes)[-1]
        return last


def trace(root: nn.Module, image: tuple[int, ...], target: str) -> Traced:
    """Trace a network on the meta device, in its current mode, for images of one size.

    `image` is (channels, height, width), or (channels, depth, height, width) of a volume. A branch
    that depends on shapes is taken as for two images of this size. The sizes themselves stay steps
    of the graph.

    Raises:
        ConfigError: A step cannot be traced or does not run (the error names its line), or the
            output contains no tensor.
    """
    tracer = _Tracer(image)
    check_inputs(root, target)
    _check_hooks(root, target)
    try:
        with torch.set_grad_enabled(root.training), _functions_refused(tracer):
            graph = tracer.trace(root)
    except ConfigError:
        raise
    except Exception as error:
        check_momentum(root, target)
        if isinstance(error, TypeError) and _Value.__name__ in str(error):
            error = TraceError(_PLAIN).with_traceback(error.__traceback__)
        if isinstance(error, TraceError | NameError | NotImplementedError):
            raise refusal(target, "cannot be cut into layers", error, why=str(error)) from error
        axes = ", ".join(name.removesuffix("_px") for name in SIDES[1 - len(image) :])
        what = f"does not run on images of {'x'.join(map(str, image))} (channels, {axes})"
        raise refusal(target, what, error) from error
    end = next(node for node in graph.nodes if node.op == "output")
    value = fx.node.map_arg(end.args[0], tracer.values.__getitem__)
    if next(tensors_in(value), None) is None:
        raise ConfigError(
            "model.target",
            target,
            f"its forward at {place_of_forward(root)} must give a tensor of scores, and gives"
            f" {type(value).__name__}",
        )
    return Traced(graph, tracer.values, tracer.writes, value)


def _check_hooks(root: nn.Module, target: str) -> None:
    """Raise ConfigError for hooks of a module that is divided, because no layer would call them."""
    for path, module in root.named_modules():
        for kind in _HOOKS if not path else _HOOKS[2:] if is_open(root, path) else ():
            if getattr(module, kind):
                name = f"{path or 'the network'} ({type(module).__name__})"
                text = (
                    f"{name} has hooks ({kind.strip('_')}), which are lost when it is cut into"
                    " layers"
                )
                raise ConfigError(
                    "model.target",
                    target,
                    text,
                    "register them on blocks inside of it, or take them out",
                )


def is_open(root: nn.Module, path: str) -> bool:
    """Return whether a module's parts are layers by themselves.

    A module that is not open is a block. These modules are open: the network; a Sequential,
    ModuleList or ModuleDict directly in it; and any other module that is such a container of
    modules with modules of their own, or that has one as a direct child (a list of lists of blocks,
    a backbone).
    """
    if not path:
        return True
    module = root.get_submodule(path)
    if type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS):
        return False
    if isinstance(module, _CONTAINERS):
        is_plain = type(module).forward in (nn.Sequential.forward, nn.Module.forward)
        return (is_plain and "." not in path) or _holds_blocks(module)
    return any(
        isinstance(child, _CONTAINERS) and _holds_blocks(child) for child in module.children()
    )


def block_of(root: nn.Module, path: str) -> str:
    """Return the path of the block that contains the module at `path`, or "" if it is open.

    A block contains itself.
    """
    words = path.split(".")
    blocks = (".".join(words[: end + 1]) for end in range(len(words)))
    return next((block for block in blocks if not is_open(root, block)), "")


def _holds_blocks(container: nn.Module) -> bool:
    return any(next(child.children(), None) is not None for child in container.children())


_IN_PLACE = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)


class _Value(fx.Proxy):
    """A traced value that knows its length if it is a tuple or list, and is changed in place.

    A plain proxy turns `x += y` into a new tensor, and another name of x would not see the change.
    """

    def __getattr__(self, k: str) -> Attribute:
        if k.startswith("__array"):  # numpy's protocol of array-like objects
            raise AttributeError(k)
        return _Attribute(self, k)

    def __getitem__(self, index: Any) -> fx.Proxy:
        if isinstance(index, str) and isinstance(self.tracer.values[self.node], Tensor):  # type: ignore[attr-defined]
            raise TraceError(
                f"[{index!r}] of its input, which is one tensor of images (N, channels, height,"
                " width)"
            )
        return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.tracer.constant(self.node), dtype=dtype)  # type: ignore[attr-defined]

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
    return lambda self, other: self.tracer.create_proxy(
        "call_function", function, (self, other), {}
    )


for _name in _IN_PLACE:
    setattr(_Value, f"__i{_name}__", _in_place(_name))


class _Attribute(Attribute, _Value):
    """An attribute of a traced value; it becomes a step if it is used without being called."""


class _Tracer(fx.Tracer):
    """A tracer that runs each step on the meta device as it records it.

    So shapes can decide branches, and the in-place writes of each step are known.
    """

    proxy_buffer_attributes = True

    def __init__(self, image: tuple[int, ...]) -> None:
        packages = (math, *(sys.modules[name] for name in _WHOLE_CALLS if name in sys.modules))
        super().__init__(autowrap_modules=packages)  # type: ignore[arg-type]
        self.values: dict[fx.Node, Any] = {}
        self.writes: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._image = image
        self._versions: dict[fx.Node, int] = {}
        self.is_running = False

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
        node.meta[FROZEN] = self.root.training and not torch.is_grad_enabled()
        # parameters among arguments, and named tuples, become nodes without a proxy
        if kind == "get_attr" or isinstance(node.target, type):
            self._evaluate(node)
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, np.generic | np.ndarray):
            return super().create_arg(a.tolist())
        if isinstance(a, Tensor) and not any(
            a is known for known in (*self.root.parameters(), *self.root.buffers())
        ):
            raise TraceError(
                "a tensor that is no parameter, no registered buffer and not made of the image"
            )
        return super().create_arg(a)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return (
            forward(*args, **kwargs)
            if self.is_running
            else super().call_module(m, forward, args, kwargs)
        )

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        return (
            attr_val if self.is_running else super().getattr(attr, attr_val, parameter_proxy_cache)
        )

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

    def constant(self, node: fx.Node) -> Any:
        """Return the sizes that a step computes, as constants.

        Raises:
            TraceError: The value contains a tensor, or depends on the number of images.
        """
        value = self.values[node]
        if any(isinstance(leaf, Tensor) for _, leaf in leaves(value)):
            raise TraceError("the values of a tensor as an array of numpy")
        others: dict[fx.Node, Any] = {}
        for step in self.graph.nodes:
            others[step] = self._run(step, others, TRACED_BATCH + 1)
            if step is node:
                break
        self._versions = {other: _version(self.values[other]) for other in self._versions}
        if others[node] != value:
            raise TraceError("the number of images as an array of numpy")
        return value

    def _evaluate(self, node: fx.Node) -> None:
        if node in self.values:
            return
        self.values[node] = self._run(node, self.values)
        # find the values that changed; views of one storage share their version counter
        if any(
            self._versions.get(other) != _version(self.values[other])
            for other in node.all_input_nodes
        ):
            now = {other: _version(self.values[other]) for other in self._versions}
            self.writes[node] = tuple(other for other in now if now[other] != self._versions[other])
            self._versions = now
        self._versions[node] = _version(self.values[node])

    def _run(self, node: fx.Node, values: Mapping[fx.Node, Any], batch: int = TRACED_BATCH) -> Any:
        """Return the value of a step on the meta device, without recording anything."""
        before = self.is_running
        self.is_running = True
        try:
            with torch.no_grad(), torch.device("meta"):
                return self._call(node, values, batch)
        finally:
            self.is_running = before

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any], batch: int) -> Any:
        target: Any = node.target
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            return torch.empty((batch, *self._image))
        if node.op == "get_attr":
            return operator.attrgetter(target)(self.root)
        if node.op == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)


@contextmanager
def _functions_refused(tracer: _Tracer) -> Iterator[None]:
    """Raise TraceError on exit if a custom autograd function was applied between blocks.

    It would run on traced values as on any others, but only its forward would be recorded.
    """
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is _APPLY and not tracer.is_running:
            names.append(frame.f_locals["cls"].__name__)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
    if names:
        raise TraceError(
            f"a custom autograd function ({names[0]}) between its blocks: apply it in a module of"
            " its own"
        )


def _version(value: Any) -> int:
    """Return how often the tensors in a value were changed in place."""
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_version, value)) if isinstance(value, tuple | list) else 0


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of nested tuples and lists, each with its path of indices."""
    if isinstance(value, tuple | list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value
