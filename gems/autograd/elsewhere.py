"""Autocast of a device that need not be here, acting on the processor's tensors without memory.

A build of torch for processors has CUDA's autocast, but no autograd for CUDA's tensors. So what is
cast is found by running each operation without autograd on tensors of CUDA without memory, and is
cast in those of the processor.
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
_Found = tuple[tuple[torch.dtype | None, ...], Mapping[str, Any]]


def cuda_elsewhere() -> Elsewhere:
    """Return CUDA's autocast for layers on tensors without memory of the processor."""
    found = _Finder(torch.device("cuda"))

    @contextmanager
    def casts() -> Iterator[None]:
        with found.autocast(), _CastsElsewhere(found), enable_python_dispatcher():
            yield

    return Elsewhere(found.device, casts)


class _Like(NamedTuple):
    """What casts may depend on in a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Like:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def made(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class _Finder:
    """Finds what a device's autocast does to operations; each on equal arguments once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._key = getattr(DispatchKey, f"Autocast{device.type.upper()}")
        self._mode: Any = FakeTensorMode()
        self._known: dict[object, _Found] = {}

    def autocast(self, is_enabled: bool = True) -> Autocast:
        """Return the device's autocast, so that layers can ask for it and end it.

        It leaves tensors of other devices alone.
        """
        return Autocast(self.device.type, torch.get_autocast_dtype(_HERE), is_enabled)

    @property
    def is_on(self) -> bool:
        """Whether autocast is on, for the device and for the tensors that stand for its own."""
        return torch.is_autocast_enabled(_HERE) and torch.is_autocast_enabled(self.device.type)

    def is_listed(self, func: Any) -> bool:
        """Whether autocast acts on an operation itself, not only on those of which it is made."""
        return has_kernel(func.name(), self._key)

    def find(self, func: Any, args: Any, kwargs: Any) -> _Found:
        """Return the types to which the arguments are cast, by their place, and options that are set."""
        leaves, form = tree_flatten((args, kwargs))
        low = torch.get_autocast_dtype(_HERE)
        kinds = tuple(
            _Like.of(each) if isinstance(each, Tensor) else (type(each), each) for each in leaves
        )
        key = func, low, form, kinds
        if key not in self._known:
            with disable_current_modes(), self.autocast(is_enabled=False):
                with self._mode:
                    like = [
                        each.made(self.device) if isinstance(each, _Like) else each[1]
                        for each in kinds
                    ]
                args, kwargs = tree_unflatten(like, form)
                casts = find_casts(self._mode, [self.autocast()], func, args, kwargs)
            dtypes, options = casts or Casts({}, {})  # what is cast on the way only stays as it is
            self._known[key] = tuple(dtypes.get(id(each)) for each in like), options
        return self._known[key]


class _CastsElsewhere(SchemaCheckMode):
    """A mode that casts as the autocast of another device does, in place of the tensors' own.

    It does so if the tensors' own autocast is on. It sees operations before autocast does; torch
    lets few classes there, of which this is one.
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
            each if dtype is None else self._cast(each, dtype)
            for each, dtype in zip(leaves, dtypes, strict=True)
        ]
        args, kwargs = tree_unflatten(cast, form)
        return args, {**kwargs, **options}

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a tensor; a weight that becomes of the low type once, as autocast does."""
        is_kept = (
            tensor.is_leaf
            and tensor.requires_grad
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
            and (tensor.dtype, dtype) == (torch.float32, torch.get_autocast_dtype(_HERE))
        )
        key = id(tensor), dtype
        if is_kept and key in self._cast_weights:
            return self._cast_weights[key][1]
        with without_autocast():
            made = tensor.to(dtype)
        if is_kept:
            self._cast_weights[key] = tensor, made
        return made
