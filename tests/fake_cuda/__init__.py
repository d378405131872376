"""A CUDA device made of host memory, so that every CUDA path of the engine runs on machines without a GPU.

`install` must be called before torch is imported. See docs/contributing for how it works and what it does not cover.
"""

from __future__ import annotations
