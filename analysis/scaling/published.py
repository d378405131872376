"""Published figures that a study's points can stand beside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """A published scaling efficiency, of 1: of a schedule and model on a number of ranks, and where it stands."""

    schedule: str
    model: str
    ranks: int
    efficiency: float
    source: str


EFFICIENCIES = (
    Published("gems_master", "resnet-1001-v2", 1024, 0.9732, "Jain et al., SC 2020, abstract; base not stated there"),
)  # fmt: skip


def published(schedule: str, model: str, ranks: int) -> Published | None:
    """Return the published efficiency of a schedule and model on so many ranks, None where there is none."""
    of = (schedule, model, ranks)
    return next((each for each in EFFICIENCIES if (each.schedule, each.model, each.ranks) == of), None)
