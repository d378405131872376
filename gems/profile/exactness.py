"""Whether a network in strips, or with a split backward, equals itself.

Asked once for its code and configuration.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

from gems.config.schema import RunSpec
from gems.models import layers_of
from gems.profile.store import EXACTNESS_TAKER, subject_of, take_profile, versions
from gems.utils.cache import cached
from gems.utils.targets import source_of

_log = logging.getLogger(__name__)
CHECK = 2  # another number for comparisons that would find more


@dataclass(frozen=True, slots=True)
class Exactness:
    """What was compared: the image (height, width), and why not all was."""

    image: tuple[int, int] | None
    left_out: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of the cache."""
        return {"exact": True, **asdict(self)}


def check_exact(spec: RunSpec, has_split_backward: bool) -> None:
    """Compare each layer of a user's network with its streaming form and its split backward.

    The toolkit's own networks are not compared, nor runs without strips and with a full backward.

    Raises:
        ConfigError: A layer differs; the error names it.
    """
    layers = layers_of(spec.model, spec.data)
    targets = {
        layer.target for layer in layers if layer.is_part or not layer.target.startswith("gems.")
    }
    if not targets or (spec.parallel.strips == 1 and not has_split_backward):
        return
    code = [source_of(target, None) for target in sorted(targets) if not target.startswith("gems.")]
    known = {
        **subject_of(spec),
        "code": code,
        "is_in_strips": spec.parallel.strips > 1,
        "frozen": list(spec.optimizer.frozen),
        "check": CHECK,
        **versions(),
    }
    key = json.dumps(known, sort_keys=True, default=str)
    found = cached(
        spec.cache_dir, "exactness", key, lambda: take_profile(spec, EXACTNESS_TAKER, "exact")
    )
    if found["left_out"]:
        _log.warning(
            "some layers were not compared with themselves before the run: %s", found["left_out"]
        )
