"""Check that a network in strips, or with a split backward, is exact; results are cached."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

from gems.errors import ConfigError
from gems.models import layers_of
from gems.profile.store import EXACTNESS_TAKER, take_profile, versions
from gems.profile.subject import Subject
from gems.utils.cache import cached
from gems.utils.targets import source_of

_log = logging.getLogger(__name__)
CHECK = 2  # version of the comparison: change it if it would find more


@dataclass(frozen=True, slots=True)
class Exactness:
    """The compared image (its sides), and the reasons for layers that were left out."""

    image: tuple[int, ...] | None
    left_out: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of the cache."""
        return {"exact": True, **asdict(self)}


def check_exact(subject: Subject, split_by: str | None) -> None:
    """Compare each layer of a user's network with its streaming form or its split backward.

    `split_by` is the name of the run's schedule if that splits the backward. The toolkit's own
    networks are not compared, nor runs without strips and with a full backward.

    Raises:
        ConfigError: A layer differs; the error names it.
    """
    layers = layers_of(subject.model, subject.data)
    targets = {
        layer.target for layer in layers if layer.is_part or not layer.target.startswith("gems.")
    }
    if not targets or (subject.parallel.num_strips == 1 and split_by is None):
        return
    code = [source_of(target, None) for target in sorted(targets) if not target.startswith("gems.")]
    known = {
        **subject.layers,
        "code": code,
        "axes": len(subject.parallel.grid) if subject.parallel.num_strips > 1 else 0,
        "until": subject.parallel.strips_until,
        "frozen": list(subject.optimizer.frozen),
        "check": CHECK,
        **versions(),
    }
    key = json.dumps(known, sort_keys=True, default=str)
    try:
        answer = cached(
            subject.cache_dir,
            "exactness",
            key,
            lambda: take_profile(subject, EXACTNESS_TAKER, "exact"),
        )
    except ConfigError as error:
        if error.key != "schedule":
            raise
        raise ConfigError("schedule", split_by, error.allowed, error.advice) from error
    if answer["left_out"]:
        _log.warning(
            "some layers were not compared with themselves before the run: %s", answer["left_out"]
        )
