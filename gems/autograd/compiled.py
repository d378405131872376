"""Layers as torch.compile makes them.

Forward and backward of each are kernels of its own, compiled on first use.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.outputs import as_tuple
from gems.autograd.torch_internals import dynamo_settings
from gems.errors import ConfigError

KEY = "train.compile"
NO = "set train.compile=false"
# limit for one layer: for training, for evaluation, and if a shape or type differs
RECOMPILES = 8


def check_compiler(device: torch.device) -> None:
    """Check that this machine has what torch.compile makes kernels of a device with.

    Raises:
        ConfigError: no C++ compiler for a processor, no Triton for a GPU.
    """
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            KEY,
            "true",
            f"needs a C++ compiler, and {compiler} is not here",
            f"install it, set CXX, or {NO}",
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            KEY, "true", "needs the package triton on a GPU, which this torch came without", NO
        )


def compile_layers(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    is_drawing: Callable[[nn.Module], bool],
    backend: str = "inductor",
) -> list[nn.Module]:
    """Compile the layers of a stage, which takes `inputs`, and return those that stay as they are.

    These draw random numbers, of which compiled kernels draw others. Which layers do is known after
    a forward: one runs here without a graph, and leaves buffers and generators as they were.
    """
    _run_without_trace(layers, inputs)
    left = [layer for layer in layers if is_drawing(layer)]
    settings: Any = dynamo_settings()
    # layers of one class share their count, and beyond the limit would run as they are without a
    # word
    settings.recompile_limit = max(settings.recompile_limit, RECOMPILES * len(layers))
    settings.accumulated_recompile_limit = max(
        settings.accumulated_recompile_limit, settings.recompile_limit
    )
    for layer in layers:
        if layer not in left:
            # not the call with the layer's own hooks, which switch autocast on and count draws
            layer.forward = torch.compile(layer.forward, dynamic=False, backend=backend)
    return left


def _run_without_trace(layers: Sequence[nn.Module], inputs: Sequence[Tensor]) -> None:
    buffers = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    devices = {tensor.device for tensor in inputs if tensor.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        # a layer may change its input in place
        output: Any = tuple(tensor.clone() for tensor in inputs)
        for layer in layers:
            output = layer(*as_tuple(output))
        for buffer, before in buffers:
            buffer.copy_(before)
