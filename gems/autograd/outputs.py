"""Outputs of modules: a tensor, or tensors in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_in(part)


def map_tensors(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Apply a function to each tensor of an output, and return the new output."""
    if isinstance(output, Tensor):
        return function(output)
    if isinstance(output, Mapping):
        return {key: map_tensors(function, part) for key, part in output.items()}
    if isinstance(output, tuple | list):
        parts = [map_tensors(function, part) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output


def as_tuple(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the output of a layer as a tuple of tensors."""
    return (output,) if isinstance(output, Tensor) else tuple(output)
