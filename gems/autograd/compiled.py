"""Compile layers by torch.compile; each gets its own forward and backward kernels on first use."""

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
    """Check that this machine has the compiler that torch.compile needs for a device.

    Raises:
        ConfigError: There is no C++ compiler for a CPU, or no Triton for a GPU.
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
    """Compile the layers of a stage, which takes `inputs`, and return those that stay eager.

    Layers that draw random numbers stay eager, because compiled kernels would draw other numbers. A
    forward without a graph finds them; buffers and generators are restored after it.
    """
    _run_without_trace(layers, inputs)
    eager = [layer for layer in layers if is_drawing(layer)]
    settings: Any = dynamo_settings()
    # layers of one class share a count, and silently run uncompiled beyond the limit
    settings.recompile_limit = max(settings.recompile_limit, RECOMPILES * len(layers))
    settings.accumulated_recompile_limit = max(
        settings.accumulated_recompile_limit, settings.recompile_limit
    )
    for layer in layers:
        if layer not in eager:
            # not __call__, whose hooks enable autocast and count draws
            layer.forward = torch.compile(layer.forward, dynamic=False, backend=backend)
    return eager


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
