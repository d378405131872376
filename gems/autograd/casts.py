"""Find what autocast casts.

An operation is run under autocast on tensors without memory, and its kernels are watched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gems.autograd.outputs import map_tensors, tensors_in
from gems.autograd.torch_internals import FakeTensorMode, TorchDispatchMode

_CAST = torch.ops.aten._to_copy.default
_EXPLICIT = ("to", "_to_copy", "type_as")  # what a layer casts itself


class Autocast(torch.autocast):
    """The autocast of a device that need not be here, for tensors without memory."""

    def __init__(
        self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, *others: Any
    ) -> None:
        super().__init__(device_type, dtype, False, *others)
        self._enabled = enabled


class Casts(NamedTuple):
    """What autocast does to an operation.

    The types of the arguments that it casts, by their IDs, and other options.
    A GPU's autocast lets some operations compute in float32 by their option `dtype`.
    """

    dtypes: Mapping[int, torch.dtype]
    options: Mapping[str, Any]


@contextmanager
def without_memory(
    device: torch.device, low: torch.dtype | None
) -> Iterator[FakeTensorMode | None]:
    """Make tensors without memory inside a block.

    On the meta device, or as on `device` under autocast to a low type.
    Yields what makes the latter, for autocast leaves tensors of the meta device alone.
    """
    if low is None:
        with torch.device("meta"):
            yield None
    else:
        mode: Any = FakeTensorMode()
        with mode, device, Autocast(device.type, low):
            yield mode


def find_casts(
    mode: FakeTensorMode, autocasts: Sequence[torch.autocast], target: Any, args: Any, kwargs: Any
) -> Casts | None:
    """Return what autocast does to an operation on tensors of a mode.

    None if it acts on what is made on the way.
    The last of `autocasts` is the innermost.

    With these casts the operation runs the same kernels on the same types without autocast, which
    is checked.
    """
    if target.overloadpacket.__name__ in _EXPLICIT:
        return Casts({}, {})
    given = {id(tensor): tensor for tensor in tensors_in([args, kwargs])}

    def run(args: Any, kwargs: Any, autocasts: Sequence[torch.autocast]) -> tuple[_Watch, Any]:
        watch = _Watch(given)
        with torch.no_grad(), mode, watch, ExitStack() as stack:
            for each in autocasts:
                stack.enter_context(each)
            return watch, target(*args, **kwargs)

    wanted, outputs = run(args, kwargs, autocasts)
    with mode:
        cast = {key: given[key].to(dtype) for key, dtype in wanted.dtypes.items()}
    args, kwargs = (
        map_tensors(lambda tensor: cast.get(id(tensor), tensor), each) for each in (args, kwargs)
    )
    choices: list[dict[str, Any]] = [{}]
    if any(each.name == "dtype" for each in target._schema.arguments):
        choices += [{"dtype": tensor.dtype} for tensor in tensors_in(outputs)]
    for options in choices:
        found, made = run(args, {**kwargs, **options}, ())
        if found.calls == wanted.calls and _dtypes(made) == _dtypes(outputs):
            return Casts(wanted.dtypes, options)
    return None


def _dtypes(made: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors_in(made)]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A watch that notes the kernels that run with the types of their arguments.

    The casts of `given` are noted separately.
    """

    def __init__(self, given: Mapping[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given
        self.dtypes: dict[int, torch.dtype] = {}
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is _CAST and id(args[0]) in self._given:
            self.dtypes[id(args[0])] = made.dtype
        elif next(tensors_in(made), None) is not None:  # autocast asks for devices too
            self.calls.append(
                (func, *(tensor.dtype for tensor in tensors_in([args, kwargs or {}])))
            )
        return made
