"""A CUDA device made of host memory, so that every CUDA path of the engine runs on machines without a GPU.

`load.install` must be called before torch is imported. CONTRIBUTING.md says how it works and what
it does not cover.
"""

from __future__ import annotations
