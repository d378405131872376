"""Settings that select torch's GPU kernels."""

from __future__ import annotations

import os

import torch

from gems.config.schema import MachineConfig


def choose_kernels(machine: MachineConfig) -> None:
    """Set torch's switches for this process, before it runs anything on its GPU."""
    if machine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = machine.cudnn_benchmark
    if machine.tf32 is not None:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = machine.tf32
