"""Wrappers of stages, which plugins register and `train.stage_wrappers` names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from gems.config.registries import STAGE_WRAPPERS

if TYPE_CHECKING:  # the login node imports plugins too
    from gems.engine.stage import SegmentKey, Stage

Wrapper = Callable[["Stage", "SegmentKey"], "Stage"]


class WrappedStage:
    """A stage that passes everything on to `stage`: override what a wrapper changes."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the wrapped stage."""
        return getattr(self.stage, name)


def stage_wrapper(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function, or a class, from a stage and its key to a stage.

    The key has the direction, the stage and the segment; the latter is None if the stage is one.
    """
    return lambda wrapper: cast(Callable[..., Any], STAGE_WRAPPERS.register(name, wrapper))


def wrap_stage(stage: Stage, key: SegmentKey, names: Iterable[str]) -> Stage:
    """Return a stage in its wrappers, the first of which is the innermost."""
    for name in names:
        stage = STAGE_WRAPPERS[name](stage, key)
    return stage
