"""The run's ID, which ends its folder's name.

A hash of what the user asked for, so that the same run finds its folder.
"""

from __future__ import annotations

import hashlib
import json

from gems.config.fields import keys
from gems.config.schema import RESUME_AUTO, RESUME_NEVER, RunSpec

# Fields of `cost` that a profile fills: what is measured is no part of what the user asked for.
PROFILED = (
    "forward", "input_grad", "weight_grad", "recompute", "times", "activations", "unit_s", "activation_bytes",
    "boundary_bytes", "param_bytes",
)  # fmt: skip


def run_id(spec: RunSpec) -> str:
    """Return 8 hexadecimal digits of the values of a resolved run that differ from the schema's defaults.

    Fields with `in_run_id=False` are left out, and so is all that a profile fills. A key that a later version adds
    changes no ID as long as it has its default.
    """
    values = {}
    for key in keys(RunSpec):
        section, _, name = key.name.rpartition(".")
        value = getattr(getattr(spec, section) if section else spec, name)
        is_profiled = section == "cost" and name in PROFILED and spec.cost.name == "profile"
        is_default = value == key.default or (key.name == "train.resume" and value in (RESUME_AUTO, RESUME_NEVER))
        if key.rule.in_run_id and not is_profiled and not is_default:
            values[key.name] = value
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
