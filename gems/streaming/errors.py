"""The error of modules that cannot run in strips."""

from __future__ import annotations


class StreamingError(ValueError):
    """A module that cannot run in strips.

    Attributes:
        reason: The layer and why, on one line.
        advice: What to change in the module, or an empty string.
        cause: "norm" or "batch_norm" for a norm that needs the whole image, "whole" for another
            layer that does, "mixed" for mixed precision, or an empty string.
    """

    def __init__(self, reason: str, advice: str = "take it out", cause: str = "") -> None:
        self.reason = " ".join(reason.split())
        self.advice = advice
        self.cause = cause
        super().__init__(f"{self.reason}; {advice}" if advice else self.reason)
