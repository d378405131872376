"""Schedules: the ordered actions of each rank. Pure: no torch, no MPI, no Hydra."""

from gems.schedule.registry import (
    CAPPED,
    FAMILIES,
    FROM_FILE,
    PLACED,
    Family,
    Request,
    Terms,
    generate,
    is_searched,
    published,
    schedule_family,
)
from gems.schedule.schedule import Schedule

__all__ = [
    "ACTIONS",
    "CAPPED",
    "FAMILIES",
    "FROM_FILE",
    "PLACED",
    "PLACEMENTS",
    "Family",
    "Request",
    "Schedule",
    "Terms",
    "generate",
    "is_searched",
    "published",
    "schedule_family",
]

ACTIONS = ("recompute", "offload")
PLACEMENTS = ("linear", "bidirectional", "v", "wave")
