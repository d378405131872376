"""A plugin of one file: stages that count their calls by method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from gems.engine.stages.wrappers import WrappedStage, stage_wrapper

COUNTED = ("forward", "recompute", "backward", "backward_input", "backward_weight")
calls: Counter[tuple[int, int, int | None, str]] = Counter()


@stage_wrapper("counting")
class CountingStage(WrappedStage):
    """Counts calls, by direction, stage, segment and method."""

    def __init__(self, stage: Any, key: tuple[int, int, int | None]) -> None:
        super().__init__(stage)
        for name in COUNTED:
            setattr(self, name, self._counted(key, name))

    def _counted(self, key: tuple[int, int, int | None], name: str) -> Callable[..., Any]:
        method = getattr(self.stage, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[(*key, name)] += 1
            return method(*args, **kwargs)

        return call
