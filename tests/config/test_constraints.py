"""Test gems.config.constraints.

Covers a cap, its units, and what a search may use, refused with its key when they make no sense.
"""

from __future__ import annotations

from typing import Any

import pytest

from gems.config.resolve import resolve
from gems.errors import ConfigError
from tests.config.test_resolve import spec_of

BAD: list[tuple[dict[str, Any], str]] = [
    ({"schedule__activation_cap": 1.0, "schedule__activation_cap_bytes": 5}, "give one of them"),
    (
        {"schedule__activation_cap_bytes": 5},
        r"activation_cap_bytes=5: needs cost\.activation_bytes",
    ),
    (
        {"schedule__memory_actions": ["compress"]},
        r"schedule\.memory_actions\[0\]=compress: allowed: recompute, offload",
    ),
    (
        {"model__norm": "ghost_batch", "parallel__strips": 0},
        (
            r"parallel\.strips=0: leaves open how many strips there are, by which"
            r" model\.norm=ghost_batch normalizes; give"
        ),
    ),
    (
        {"parallel__strips": [2, 0]},
        r"parallel\.strips=\[2, 0\]: must be a number, or \[rows, columns\] of 1 or more, of at most 4096",
    ),
    ({"parallel__strips": [2, 2, 2]}, r"parallel\.strips=\[2, 2, 2\]: must be a number, or"),
    ({"parallel__strips": [100, 100]}, r"of at most 4096 blocks"),
    ({"parallel__strips": []}, r"parallel\.strips=\[\]: must be a number, or"),
    ({"parallel__strips": "two"}, r"parallel\.strips=two: must be a whole number"),
    ({"parallel__strips": [2, 1.5]}, r"parallel\.strips\[1\]=1\.5: must be a whole number"),
    (
        {"machine__kind": "emulated", "machine__transport": "gloo"},
        (
            r"machine\.transport=gloo: is for ranks with devices, and emulated messages are MPI's;"
            r" leave it out"
        ),
    ),
    (
        {"machine__device": "cpu", "machine__transport": "nccl"},
        r"machine\.transport=nccl: needs GPUs, and machine\.device=cpu has none; use mpi or gloo",
    ),
    ({"schedule__name": "file"}, r"schedule\.path=null: must be given"),
    ({"cost__times": []}, r"cost\.times=\[\]: must have one entry or more"),
    ({"cost__activations": [1.0, 0.0]}, r"cost\.activations\[1\]=0\.0: must be above 0 and finite"),
    (
        {"cost__stages": {"speed": [1.0]}},
        r"cost\.stages\.speed=\[1\.0\]: allowed: forward, input_grad",
    ),
    ({"cost__stages": {"forward": 1.0}}, r"cost\.stages\.forward=1\.0: must be a list of numbers"),
    (
        {"cost__stages": {"forward": [-1.0]}},
        r"cost\.stages\.forward=\[-1\.0\]: must hold numbers of 0 or more",
    ),
    (
        {"cost__stages": {"forward": [1.0], "activation": [1.0, 2.0]}},
        r"of 2 stages: must be as long as",
    ),
    ({"cost__stages": {"forward": [1.0]}}, r"must have input_grad, weight_grad, activation"),
]


@pytest.mark.parametrize(("values", "line"), BAD)
def test_refused_in_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        resolve(spec_of(**values))
    assert "\n" not in str(caught.value)


def test_what_makes_sense_is_kept() -> None:
    values = {
        "schedule__activation_cap": 1.5,
        "schedule__memory_actions": ["offload"],
        "cost__offload": 2.0,
    }
    resolved = resolve(spec_of(**values, schedule__placements=["v", "wave"], cost__recompute=0.0))
    assert (resolved.schedule.activation_cap, resolved.schedule.memory_actions) == (
        1.5,
        ["offload"],
    )
    assert (resolved.cost.recompute, resolved.schedule.placements) == (0.0, ["v", "wave"])
