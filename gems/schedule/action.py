"""An action: the smallest piece of work that a schedule names."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from gems.errors import ConfigError, one_of


class Kind(StrEnum):
    """The kind of an action; the value is its name in text, JSON and traces.

    Modules with loops over all actions of a schedule bind members to module constants, because
    reading a member from the class of an Enum takes longer than looking up an action.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's letter
    W = "W"
    R = "R"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    OFFLOAD = "OFFLOAD"
    PREFETCH = "PREFETCH"
    FREE = "FREE"
    AWAIT = "AWAIT"
    START_REDUCE = "START_REDUCE"
    REDUCE_GRAD = "REDUCE_GRAD"
    STEP = "STEP"

    # Enum's own hash is Python code, and an action's hash is taken millions of times
    __hash__ = str.__hash__


COMPUTE_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R})
SEND_KINDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECV_KINDS = frozenset({Kind.RECV_F, Kind.RECV_B})
COPY_KINDS = frozenset({Kind.OFFLOAD, Kind.PREFETCH})
# waits for copies of the same rank: FREE for a copy out, whose memory is free afterwards, AWAIT for
# a copy back
WAIT_KINDS = frozenset({Kind.FREE, Kind.AWAIT})
RANK_KINDS = frozenset({Kind.REDUCE_GRAD, Kind.STEP})
# a rank continues after these have ended; other actions are only posted
BLOCKING_KINDS = COMPUTE_KINDS | WAIT_KINDS | RANK_KINDS

_TEXT = re.compile(
    r"(?P<stage>\d+)(?:\.(?P<segment>\d+))?(?P<kind>[A-Z_]+)(?P<micro_batch>\d+)?(?:/(?P<direction>\d+))?"
)


class Action(NamedTuple):
    """One item of a rank's schedule.

    Text form: `[stage][.segment]KIND[micro_batch][/direction]`, as in `2F5`, `0SEND_B3/1`;
    direction 0 is omitted. A segment is a part of its stage, counted from 0. A transfer carries the
    stage of the rank that runs it: `0SEND_F5` pairs with `1RECV_F5`. START_REDUCE starts to sum the
    gradients of its stage over the replicas, while the rank computes other stages. REDUCE_GRAD,
    which sums the rest and waits for all sums, and STEP act on the whole rank and carry its lowest
    stage. A named tuple is several times cheaper to create and to hash than a dataclass.
    """

    kind: Kind
    stage: int
    micro_batch: int | None = None
    direction: int = 0
    segment: int | None = None

    def __str__(self) -> str:
        segment = "" if self.segment is None else f".{self.segment}"
        micro_batch = "" if self.micro_batch is None else str(self.micro_batch)
        direction = f"/{self.direction}" if self.direction else ""
        return f"{self.stage}{segment}{self.kind.value}{micro_batch}{direction}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form.

        Raises:
            ConfigError: the text is not an action, or its kind is unknown.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                "action",
                text,
                "allowed: [stage][.segment]KIND[micro_batch][/direction], as in 2F5 or 0B3/1",
            )
        if match["kind"] not in Kind.__members__:
            raise ConfigError("action", text, f"kind {match['kind']}: " + one_of(Kind.__members__))
        micro_batch, segment = (
            None if match[name] is None else int(match[name]) for name in ("micro_batch", "segment")
        )
        return cls(
            Kind(match["kind"]),
            int(match["stage"]),
            micro_batch,
            int(match["direction"] or 0),
            segment,
        )


# Builders of a micro-batch's actions on a stage: (stage, micro_batch, direction=0).
forward = partial(Action, Kind.F)
backward = partial(Action, Kind.B)
input_gradient = partial(Action, Kind.I)
weight_gradient = partial(Action, Kind.W)
