"""Find the casts of autocast: run an operation under it on fake tensors, and watch its kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gems.autograd.outputs import map_tensors, tensors_in
from gems.autograd.torch_internals import FakeTensorMode, TorchDispatchMode

_CAST = torch.ops.aten._to_copy.default
_EXPLICIT = ("to", "_to_copy", "type_as")  # casts by the layer itself


class Autocast(torch.autocast):
    """The autocast of a device that may be missing here, for tensors without memory."""

    def __init__(
        self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, *others: Any
    ) -> None:
        super().__init__(device_type, dtype, False, *others)
        self._enabled = enabled


class Casts(NamedTuple):
    """The changes that autocast makes to an operation.

    `dtypes` has the types to which arguments are cast, by their IDs. `options` has keyword
    arguments: a GPU's autocast sets `dtype` so that some operations compute in float32.
    """

    dtypes: Mapping[int, torch.dtype]
    options: Mapping[str, Any]


@contextmanager
def without_memory(
    device: torch.device, low: torch.dtype | None
) -> Iterator[FakeTensorMode | None]:
    """Create tensors without memory in a block.

    They are on the meta device, or with a low type, fake tensors on `device` under autocast, which
    ignores the meta device. Yield the mode of the fake tensors, or None.
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
    """Return the casts with which an operation runs the same kernels without autocast.

    Return None if autocast acts on intermediate tensors of the operation. The tensors belong to
    `mode`. The last of `autocasts` is the innermost.
    """
    if target.overloadpacket.__name__ in _EXPLICIT:
        return Casts({}, {})
    inputs = {id(tensor): tensor for tensor in tensors_in([args, kwargs])}

    def run(args: Any, kwargs: Any, autocasts: Sequence[torch.autocast]) -> tuple[_Watch, Any]:
        watch = _Watch(inputs)
        with torch.no_grad(), mode, watch, ExitStack() as stack:
            for autocast in autocasts:
                stack.enter_context(autocast)
            return watch, target(*args, **kwargs)

    expected, outputs = run(args, kwargs, autocasts)
    with mode:
        cast = {key: inputs[key].to(dtype) for key, dtype in expected.dtypes.items()}
    args, kwargs = map_tensors(lambda tensor: cast.get(id(tensor), tensor), (args, kwargs))
    choices: list[dict[str, Any]] = [{}]
    if any(argument.name == "dtype" for argument in target._schema.arguments):
        choices += [{"dtype": tensor.dtype} for tensor in tensors_in(outputs)]
    for options in choices:
        actual, actual_outputs = run(args, {**kwargs, **options}, ())
        if actual.calls == expected.calls and _dtypes(actual_outputs) == _dtypes(outputs):
            return Casts(expected.dtypes, options)
    return None


def _dtypes(output: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors_in(output)]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the kernels that run, with the types of their arguments, and the casts of `inputs`."""

    def __init__(self, inputs: Mapping[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs = inputs
        self.dtypes: dict[int, torch.dtype] = {}
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is _CAST and id(args[0]) in self._inputs:
            self.dtypes[id(args[0])] = output.dtype
        elif next(tensors_in(output), None) is not None:  # autocast also queries devices
            self.calls.append(
                (func, *(tensor.dtype for tensor in tensors_in([args, kwargs or {}])))
            )
        return output
