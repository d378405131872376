"""Handle what surrounds the operations of a layer in a trace.

A trace keeps it or refuses it, and leaves the layer unchanged. Hooks and custom autograd functions
would be lost, so they are refused by name. The tensors of a layer are replaced while it is traced;
changes that its forward makes to its attributes are undone afterwards.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from gems.autograd.outputs import map_tensors, tensors_in
from gems.autograd.split_backward.deferred import has_hooks, is_plain
from gems.autograd.torch_internals import is_saving_changed
from gems.streaming.errors import StreamingError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_KINDS = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}
_BACKWARD_KINDS = {
    "_backward_pre_hooks": "full backward pre-hook",
    "_backward_hooks": "full backward hook",
}
_INSTEAD = {
    "SpectralNorm": "use torch.nn.utils.parametrizations.spectral_norm",
    "WeightNorm": "use torch.nn.utils.parametrizations.weight_norm",
}
_GRADIENT_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_READS_GRAPH = (
    Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    torch.autograd.graph.get_gradient_edge,
)
_SETS_GRADIENTS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.from_numpy)
_CONTAINERS = (list, dict, set, deque)
_NO_HOLDERS = (nn.Module, Tensor, type, ModuleType, FunctionType)
_PLAIN = (int, float, str)


def refuse_hooks(layer: str, root: nn.Module) -> None:
    """Refuse hooks of a layer's modules and parameters that are not the toolkit's own.

    Hooks on gradients matter only if gradients are computed.
    """
    is_training = torch.is_grad_enabled()
    for path, module in root.named_modules():
        name = f"{layer}.{path}" if path else layer
        if isinstance(module, torch.jit.ScriptModule):
            raise StreamingError(
                f"layer {name} is TorchScript, which is not traced", "use the module itself"
            )
        for key, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            if not is_plain(tensor):
                text = (
                    f"layer {name} ({type(module).__name__}) has {key} as a {type(tensor).__name__}"
                )
                raise StreamingError(
                    f"{text}, whose own operations strips would lose", "use torch.nn.Parameter"
                )
        for attribute, kind in (_KINDS | _BACKWARD_KINDS if is_training else _KINDS).items():
            for hook in getattr(module, attribute).values():
                hook = getattr(hook, "func", hook)
                if not str(getattr(hook, "__module__", "")).startswith("gems."):
                    title = getattr(hook, "__name__", type(hook).__name__)
                    text = (
                        f"layer {name} ({type(module).__name__}) has a {kind} ({title}), which"
                        " strips would lose"
                    )
                    raise StreamingError(text, _INSTEAD.get(title, "take it out"))
        for key, parameter in module.named_parameters(recurse=False) if is_training else ():
            if has_hooks(parameter):
                text = (
                    f"layer {name} ({type(module).__name__}) has a hook on the gradient of its"
                    f" {key}"
                )
                raise StreamingError(
                    f"{text}, which each strip would call with a part of it", "take it out"
                )


class Recorded(TorchFunctionMode):
    """A mode that runs the functions of a layer on the stand-ins of its tensors.

    It does so wherever the layer gets these tensors from. `where` says which module runs.
    """

    def __init__(self, stand_ins: dict[int, Tensor], where: Callable[[], str]) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._where = where
        self._is_looking = False
        # nodes of autograd's graph, referenced so that each stays the same object
        self._known: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GRADIENT_HOOKS:
            raise StreamingError(
                f"layer {self._where()} registers a hook on a tensor, which strips would lose"
            )
        if func in _GRADIENTS:
            raise StreamingError(
                f"layer {self._where()} computes gradients in its forward, which strips would lose"
            )
        if func in _READS_GRAPH and not self._is_looking:
            raise StreamingError(
                f"layer {self._where()} reads the graph of autograd, whose hooks strips would lose"
            )
        if func in _SETS_GRADIENTS and self._is_weight(args[0]):
            raise StreamingError(
                f"layer {self._where()} sets requires_grad of a parameter in its forward"
            )
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise StreamingError(
                f"layer {self._where()} sets the data of a tensor, which strips would lose"
            )
        if is_saving_changed():
            raise StreamingError(
                f"layer {self._where()} changes what is saved for backward (saved_tensors_hooks)"
            )
        if torch.is_inference_mode_enabled():
            text = f"layer {self._where()} runs in inference mode, which strips would lose"
            raise StreamingError(text, "use torch.no_grad()")
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            func = Tensor.detach
        args, kwargs = (map_tensors(self._stand_in, argument) for argument in (args, kwargs or {}))
        output = func(*args, **kwargs)
        if func in _OF_NUMBERS and output.is_meta:
            text = (
                f"layer {self._where()} makes a tensor of numbers in its forward, whose values a"
                " trace loses"
            )
            raise StreamingError(text, "make it a buffer")
        return output

    def refuse_functions(self, output: Any) -> None:
        """Refuse the output of a module if a custom autograd function was applied on the way."""
        self._is_looking = True
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
        self._is_looking = False
        while nodes:
            node = nodes.pop()
            if node is None or node in self._known:
                continue
            self._known.add(node)
            # torch also has such nodes, for tensors without memory
            made_by = getattr(type(node), "_forward_cls", None)
            if isinstance(node, BackwardCFunction) and not getattr(
                made_by, "__module__", ""
            ).startswith("torch._"):
                name = type(node).__name__.removesuffix("Backward")
                text = (
                    f"layer {self._where()} applies a custom autograd function ({name}), whose"
                    " backward a trace loses"
                )
                instead = (
                    "checkpoint with use_reentrant=False" if name == "CheckpointFunction" else ""
                )
                raise StreamingError(text, instead or "write it with torch's own operations")
            nodes += [before for before, _ in node.next_functions]

    def _is_weight(self, tensor: Tensor) -> bool:
        return id(tensor) in self._stand_ins or any(
            tensor is stand_in for stand_in in self._stand_ins.values()
        )

    def _stand_in(self, tensor: Tensor) -> Tensor:
        return self._stand_ins.get(id(tensor), tensor)


@contextmanager
def untouched(root: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules on exit, with the contents of lists and dicts."""
    before = [
        (container, copy.copy(container))
        for module in root.modules()
        for container in _holders(module)
    ]
    try:
        yield
    finally:
        for container, contents in before:
            container.clear()
            add = container.extend if isinstance(container, list | deque) else container.update
            add(contents)


@contextmanager
def replaced(layer: str, tensors: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Replace parameters and buffers of modules, inside `untouched`.

    Raises:
        StreamingError: The layer has put a tensor of its own in place of one.
    """
    for module, name, tensor in tensors:
        _home(module, name)[name] = tensor
    yield
    for module, name, tensor in tensors:
        if _home(module, name).get(name) is not tensor:
            kind = "buffer" if name in module._buffers else "parameter"
            text = (
                f"layer {layer} ({type(module).__name__}) puts another tensor in place of its"
                f" {kind} {name}"
            )
            raise StreamingError(text, "change it in place (copy_, add_)")


def clear_hooks(modules: Iterable[nn.Module]) -> None:
    """Remove the toolkit's own hooks, inside `untouched`."""
    for module in modules:
        for hooks in _HOOKS:
            setattr(module, hooks, type(getattr(module, hooks))())


def state_of(root: nn.Module) -> dict[tuple[int, str], Any]:
    """Return the plain attributes of the modules, and tensors among them that need gradients.

    Inputs may be part of what these tensors are made of.
    """
    return {
        (number, str(name)): value
        for number, (module, container) in enumerate(
            (module, container) for module in root.modules() for container in _holders(module)
        )
        if isinstance(container, dict) and container is not module._parameters
        for name, value in container.items()
        if isinstance(value, _PLAIN) or (isinstance(value, Tensor) and value.requires_grad)
    }


def _holders(module: nn.Module) -> Iterator[Any]:
    """Yield what a forward may change of a module.

    Its attributes, and those of objects and containers in them.
    """
    yield vars(module)
    for value in list(vars(module).values()):
        if isinstance(value, _CONTAINERS):
            yield value
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(
            value, _NO_HOLDERS
        ):
            yield vars(value)


def changed_attribute(root: nn.Module, before: dict[tuple[int, str], Any]) -> str | None:
    """Return an attribute that a forward has changed and may read in its next call, or None."""
    for key, value in state_of(root).items():
        old = before.get(key)
        is_other = (
            value is not old if isinstance(value, Tensor) else old is not None and value != old
        )
        if is_other:
            return key[1]
    return None


def _home(module: nn.Module, name: str) -> dict[str, Any]:
    return module._buffers if name in module._buffers else module._parameters
