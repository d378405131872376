"""Modules that take an image in strips or blocks, exactly: a library for torch, of no use of gems.

`stream` makes such a module of any other. Inside, a module is traced into operations (`trace`),
each of which runs on what is there of the map (`operations`), by a plan of each axis (`axis_plan`)
and of their product (`block_plan`). Nothing is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gems.streaming.errors import StreamingError as StreamingError
    from gems.streaming.streamed import Streamed as Streamed
    from gems.streaming.streamed import stream as stream

__all__ = ["Streamed", "StreamingError", "stream"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: tracing takes long to load."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gems.streaming import errors, streamed

    return getattr(errors if name == "StreamingError" else streamed, name)
