"""Apply the autocast of a device that may be missing here to CPU tensors without memory.

A CPU build of torch has CUDA's autocast, but no autograd for CUDA tensors. So each operation runs
without autograd on fake CUDA tensors to find its casts, which are then applied to the CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gems.autograd.casts import Autocast, Casts, find_casts
from gems.autograd.mixed import Elsewhere
from gems.autograd.torch_internals import (
    DispatchKey,
    FakeTensorMode,
    SchemaCheckMode,
    TorchDispatchMode,
    disable_current_modes,
    enable_python_dispatcher,
    has_kernel,
    no_python_dispatcher,
    tree_flatten,
    tree_unflatten,
    without_autocast,
)

_HERE = "cpu"
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_ArgumentCasts = tuple[tuple[torch.dtype | None, ...], Mapping[str, Any]]


def cuda_elsewhere() -> Elsewhere:
    """Return CUDA's autocast for layers on CPU tensors without memory."""
    finder = _Finder(torch.device("cuda"))

    @contextmanager
    def casts() -> Iterator[None]:
        with finder.autocast(), _CastsElsewhere(finder), enable_python_dispatcher():
            yield

    return Elsewhere(finder.device, casts)


class _Like(NamedTuple):
    """The properties of a tensor on which casts may depend."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Like:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class _Finder:
    """Find and cache the casts that a device's autocast applies to operations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._key = getattr(DispatchKey, f"Autocast{device.type.upper()}")
        self._mode: Any = FakeTensorMode()
        self._known: dict[object, _ArgumentCasts] = {}

    def autocast(self, is_enabled: bool = True) -> Autocast:
        """Return the device's autocast, which layers may query and disable.

        It does not affect tensors of other devices.
        """
        return Autocast(self.device.type, torch.get_autocast_dtype(_HERE), is_enabled)

    @property
    def is_on(self) -> bool:
        """Whether autocast is on for the device and for the CPU tensors in its place."""
        return torch.is_autocast_enabled(_HERE) and torch.is_autocast_enabled(self.device.type)

    def is_listed(self, func: Any) -> bool:
        """Return whether autocast has a rule for an operation itself, not only for its parts."""
        return has_kernel(func.name(), self._key)

    def find(self, func: Any, args: Any, kwargs: Any) -> _ArgumentCasts:
        """Return the type to which each argument is cast, or None, and keyword arguments to add."""
        leaves, form = tree_flatten((args, kwargs))
        low = torch.get_autocast_dtype(_HERE)
        kinds = tuple(
            _Like.of(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves
        )
        key = func, low, form, kinds
        if key not in self._known:
            with disable_current_modes(), self.autocast(is_enabled=False):
                with self._mode:
                    like = [
                        kind.empty(self.device) if isinstance(kind, _Like) else kind[1]
                        for kind in kinds
                    ]
                args, kwargs = tree_unflatten(like, form)
                casts = find_casts(self._mode, [self.autocast()], func, args, kwargs)
            dtypes, options = casts or Casts({}, {})  # casts inside the operation are left to it
            self._known[key] = tuple(dtypes.get(id(leaf)) for leaf in like), options
        return self._known[key]


class _CastsElsewhere(SchemaCheckMode):
    """Apply the autocast of another device in place of the tensors' own, while that is on.

    A mode at PreDispatch sees operations before autocast; torch permits only a few classes there,
    among them the base class.
    """

    def __init__(self, finder: _Finder) -> None:
        TorchDispatchMode.__init__(self, DispatchKey.PreDispatch)  # type: ignore[no-untyped-call]
        self._finder = finder
        self._cast_weights: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with no_python_dispatcher():
            if self._finder.is_on:
                if self._finder.is_listed(func):
                    args, kwargs = self._cast_all(func, args, kwargs)
                elif has_kernel(func.name(), _COMPOSITE):
                    with self, enable_python_dispatcher():
                        return func._op_dk(_COMPOSITE, *args, **kwargs)
            with without_autocast():
                return func(*args, **kwargs)

    def _cast_all(self, func: Any, args: Any, kwargs: Any) -> Any:
        dtypes, options = self._finder.find(func, args, kwargs)
        leaves, form = tree_flatten((args, kwargs))
        cast = [
            leaf if dtype is None else self._cast(leaf, dtype)
            for leaf, dtype in zip(leaves, dtypes, strict=True)
        ]
        args, kwargs = tree_unflatten(cast, form)
        return args, {**kwargs, **options}

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a tensor, and like autocast, cache the low-type copies of weights."""
        is_cached = (
            tensor.is_leaf
            and tensor.requires_grad
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
            and (tensor.dtype, dtype) == (torch.float32, torch.get_autocast_dtype(_HERE))
        )
        key = id(tensor), dtype
        if is_cached and key in self._cast_weights:
            return self._cast_weights[key][1]
        with without_autocast():
            cast = tensor.to(dtype)
        if is_cached:
            self._cast_weights[key] = tensor, cast
        return cast
