"""Build torch modules from layer descriptions, and infer the shapes between them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from gems.autograd.outputs import tensors_in
from gems.config.schema import DataConfig
from gems.data import IMAGES, kind_of, sample_shape
from gems.models.imported.parts import release
from gems.models.layer import Layer
from gems.models.mixed import Precision, compute_in

# one type for parameters and computation, or both types
Dtype = torch.dtype | Precision


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor that crosses from a layer to the next: its shape (N, ...) and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def build_layer(
    layer: Layer,
    index: int,
    seed: int,
    dtype: Dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Build the module of `layer`, the `index`-th layer of its model, in `dtype` on `device`.

    Its parameters depend on (seed, index) alone; those of a part of a whole depend on the seed
    alone. So every partition of the model, every rank and both directions get the same values. They
    are drawn in float32 on the host, so another dtype or device changes them only by rounding. The
    global random state stays unchanged. A layer of mixed precision computes and returns the low
    type, except on the meta device.
    """
    precision = as_precision(dtype)
    module_name, _, class_name = layer.target.partition(":")
    construct = partial(
        getattr(importlib.import_module(module_name), class_name), **dict(layer.options)
    )
    module: nn.Module
    if torch.device(device).type == "meta":
        with torch.device("meta"):
            module = construct()
        return module.to(precision.parameters)
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed the accelerators, which forking the host's state does
        # not undo.
        torch.default_generator.manual_seed(layer_seed(seed, 0 if layer.is_part else index))
        module = construct()
    return compute_in(module.to(device=device, dtype=precision.parameters), precision)


def layer_seed(seed: int, index: int) -> int:
    """Return the seed of a layer's parameters; parts of a whole use index 0."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0])


def build_layers(
    layers: Sequence[Layer],
    first: int,
    last: int,
    seed: int,
    dtype: Dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[nn.Module]:
    """Build layers[first:last], each with its index in the whole model, as `build_layer` does."""
    built = [build_layer(layers[index], index, seed, dtype, device) for index in range(first, last)]
    release()
    return built


def freeze(layers: Iterable[tuple[str, nn.Module]], patterns: Sequence[str]) -> set[str]:
    """Exclude parameters of named layers from training, and return the patterns that matched any.

    A pattern applies to a layer's name, to a parameter's name in the user's class, or to both,
    joined by a dot.
    """
    used = set()
    for layer, module in layers:
        for name, parameter in module.named_parameters():
            matched = {
                pattern
                for pattern in patterns
                if any(fnmatchcase(word, pattern) for word in (layer, name, f"{layer}.{name}"))
            }
            if matched:
                parameter.requires_grad_(False)
            used |= matched
    return used


def input_spec(
    data: DataConfig, micro_batch_size: int, dtype: torch.dtype = torch.float32
) -> TensorSpec:
    """Return the input of the first layer for a micro-batch.

    It is images (N, C, H, W) in `dtype`, or int64 tokens (N, ...).
    """
    is_image = kind_of(data) == IMAGES
    name, input_dtype = ("image", dtype) if is_image else ("tokens", torch.int64)
    return TensorSpec(name, (micro_batch_size, *sample_shape(data)), input_dtype)


def boundary_shapes(
    layers: Sequence[Layer],
    input_shape: tuple[int, ...],
    dtype: Dtype = torch.float32,
    input_dtype: torch.dtype | None = None,
    training: bool = True,
) -> list[tuple[TensorSpec, ...]]:
    """Return, for each layer, the tensors that it passes on for a batch of `input_shape`.

    `dtype` is the type of the parameters, and of the input unless `input_dtype` is given (int64 for
    tokens). In mixed precision, layers pass on the low type. The layers run on torch's meta device,
    so no resolution uses memory; equal layers with equal input run once per process. A layer's
    tensors are named after the layer, with a number if there are several, or by its module's
    `output_names`. Parts of a user's network may pass on other tensors if `training` is False.
    """
    wide, low = as_precision(dtype)
    first_dtype = wide if input_dtype in (None, low) else input_dtype
    specs: tuple[TensorSpec, ...] = (TensorSpec("image", tuple(input_shape), first_dtype or wide),)
    out: list[tuple[TensorSpec, ...]] = []
    for layer in layers:
        with _noting(layer, specs):
            unnamed = tuple(replace(spec, name="") for spec in specs)
            specs = _outputs(
                replace(layer, name="", kind=""), unnamed, wide, training and layer.is_part
            )
        specs = tuple(replace(spec, name=f"{layer.name}{spec.name}") for spec in specs)
        out.append(specs)
    return [
        tuple(replace(spec, dtype=low if spec.dtype is wide else spec.dtype) for spec in specs)
        for specs in out
    ]


def as_precision(dtype: Dtype) -> Precision:
    """Return a precision; a single dtype applies to both parameters and computation."""
    return dtype if isinstance(dtype, Precision) else Precision(dtype, dtype)


def model_output(
    layer: Layer, inputs: Sequence[TensorSpec], dtype: torch.dtype, training: bool = True
) -> Any:
    """Return the output of a model's last layer for such inputs, on torch's meta device.

    It is a tensor, or tensors in tuples, lists and dicts, and may differ in training.
    """
    with _noting(layer, inputs):
        return _run_on_meta(layer, inputs, dtype, training)[1]


@contextlib.contextmanager
def _noting(layer: Layer, inputs: Sequence[TensorSpec]) -> Iterator[None]:
    """Add the layer and the shapes of its input to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"layer {layer.name} took {', '.join(str(spec.shape) for spec in inputs)}")
        raise


def _run_on_meta(
    layer: Layer, inputs: Sequence[TensorSpec], dtype: torch.dtype, training: bool
) -> tuple[nn.Module, Any]:
    """Return a layer's module and its output.

    Only the parts of a user's network run in training mode.
    """
    module = build_layer(layer, 0, 0, dtype, "meta").train(training and layer.is_part)
    tensors = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in inputs]
    with torch.no_grad(), torch.device("meta"):
        return module, module(*tensors)


@functools.lru_cache(maxsize=4096)
def _outputs(
    layer: Layer, specs: tuple[TensorSpec, ...], dtype: torch.dtype, training: bool
) -> tuple[TensorSpec, ...]:
    """Return the outputs of a layer; each name is the suffix that follows the layer's own name."""
    module, output = _run_on_meta(layer, specs, dtype, training)
    tensors = tuple(tensors_in(output))
    names = getattr(module, "output_names", ()) or (range(len(tensors)) if len(tensors) > 1 else ())
    suffixes = [f".{name}" for name in names] or [""]
    return tuple(
        TensorSpec(suffix, tuple(tensor.shape), tensor.dtype)
        for suffix, tensor in zip(suffixes, tensors, strict=True)
    )
