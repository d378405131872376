"""Load the fake device: before torch, which asks for CUDA's hooks once, when it is imported."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from typing import Any

from gems.utils import gpus
from tests.fake_cuda.build import NAME, library, torch_folder
from tests.fake_cuda.children import take_over
from tests.fake_cuda.watch import watch

GIB = 2**30
_native: Any = None


def native() -> Any:
    """Return the extension, or None if the fake device is not installed in this process."""
    return _native


def install() -> Any:
    """Make torch see fake GPUs in this process, and return the extension."""
    global _native
    if _native is not None:
        return _native
    if "torch" in sys.modules:
        raise RuntimeError("the fake device must be installed before torch is imported")
    path = library()
    for name in ("c10", "torch_cpu", "torch", "shm", "torch_python"):
        ctypes.CDLL(str(torch_folder() / "lib" / f"lib{name}.so"))
    ctypes.CDLL(str(path))
    import torch  # noqa: F401

    from tests.fake_cuda.cuda import patch
    from tests.fake_cuda.nccl import install as install_nccl

    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    watch(made)
    take_over(path.parent)
    patch(
        made,
        int(os.environ.get("GEMS_FAKE_GPUS", "1")),
        int(os.environ.get("GEMS_FAKE_GPU_BYTES", 16 * GIB)),
    )
    install_nccl()
    gpus.DRIVER_FILES = (path,)
    if seed := os.environ.get("GEMS_FAKE_CUDA_LATE"):
        made.set_late(True, int(seed))
    _native = made
    return made
