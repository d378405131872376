from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from gems.errors import ConfigError
from gems.partition.dlplacer.devices import Devices
from gems.profile.operator_graph import Op, OpGraph
from tests.helpers.op_graphs import branches

A = Op("a", 1.0)
B = Op("b", 2.0, 3.0)


def test_a_graph_knows_its_order_and_its_critical_path() -> None:
    graph = OpGraph((B, A, B), ((1, 0), (1, 2)))
    assert graph.order == (1, 0, 2)
    assert graph.successors == ((), (0, 2), ())
    assert graph.critical_s == 3.0 + 3.0
    assert graph.time_s == 11.0


def test_json_and_back() -> None:
    graph = branches(1, 2, blocks=2)
    assert OpGraph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


@pytest.mark.parametrize(
    ("ops", "edges", "expected"),
    [
        ((), (), "at least one operator"),
        ((A, B), ((0, 2),), "operators run from 0 to 1"),
        ((A, B), ((0, 1), (0, 1)), "twice"),
        ((A, B), ((0, 1), (1, 0)), "cycle"),
        ((A,), ((0, 0),), "cycle"),
        ((replace(A, forward_s=-1.0),), (), "a.forward_s=-1.0"),
        ((replace(A, backward_s=math.nan),), (), "must be 0 or more and finite"),
        ((replace(A, output_bytes="much"),), (), "a.output_bytes=much"),  # type: ignore[arg-type]
    ],
)
def test_bad_graphs_are_refused_in_one_line(
    ops: tuple[Op, ...], edges: tuple[tuple[int, int], ...], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        OpGraph(ops, edges)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"schema": "gems.operators/2"},
        {"schema": "gems.operators/1"},
        {"schema": "gems.operators/1", "ops": [{"name": "a"}], "edges": []},
        {"schema": "gems.operators/1", "ops": [{"name": "a", "forward_s": 1}], "edges": [[0]]},
    ],
)
def test_json_that_is_no_graph_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        OpGraph.from_json(document)


def test_no_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="--devices=0"):
        Devices(0)
