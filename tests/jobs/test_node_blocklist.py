"""The list of bad nodes: counted once a failure, forgotten by hand or by time, never a word for a shell."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gems.config.cluster import ClusterConfig
from gems.config.fields import check_fields
from jobs.diagnosis.node_blocklist import NodeBlocklist
from tests.helpers.job_helpers import Resolved, refused, script_of

NOW = datetime.now(UTC)


def utc(days: float = 0.0) -> str:
    return (NOW - timedelta(days=days)).isoformat(timespec="seconds")


def test_a_failure_counts_once(tmp_path: Path) -> None:
    nodes = NodeBlocklist(tmp_path)
    assert nodes.entries() == () and nodes.note("mini") is None
    for run in ("a attempt 1", "a attempt 1", "a attempt 2"):
        entry = nodes.add("mini", "n2", "node failed: x", run, utc())
    assert entry is not None and len(entry.runs) == 2
    nodes.add("other", "n2", "device failed", "b attempt 1", utc())
    assert [(e.cluster, e.node, len(e.runs)) for e in nodes.entries()] == [
        ("mini", "n2", 2),
        ("other", "n2", 1),
    ]
    assert [entry.node for entry in nodes.blocked("mini")] == ["n2"] and nodes.blocked(
        "other"
    ) == ()
    assert nodes.note("other") is None, "one failure may be a coincidence"
    assert (
        nodes.note("mini")
        == "runs have failed on node n2 of mini; to exclude it: cluster.exclude=[n2]"
    )
    assert [e.node for e in nodes.remove("n2")] == ["n2", "n2"] and nodes.entries() == ()


def test_entries_end_after_a_fortnight(tmp_path: Path) -> None:
    nodes = NodeBlocklist(tmp_path)
    nodes.add("mini", "old", "x", "a", utc(13.9))
    nodes.add("mini", "new", "x", "a", utc())
    assert [entry.node for entry in nodes.entries()] == ["old", "new"]
    nodes.add("mini", "gone", "x", "a", utc(14.1))
    assert [entry.node for entry in nodes.entries()] == ["old", "new"]
    assert json.loads(nodes.path.read_text())["kept_days"] == 14


@pytest.mark.parametrize(
    "name", ["", "-n1", "n1,n2", "$(touch owned)", "n[1-9]", "n1\n", "n 1", "n1;ls", "x" * 300]
)
def test_a_name_that_is_no_host_name_is_never_kept(tmp_path: Path, name: str) -> None:
    nodes = NodeBlocklist(tmp_path)
    assert nodes.add("mini", name, "x", "a", utc()) is None
    rows = [
        {"cluster": "mini", "node": name, "reason": "x", "run": "a", "utc": utc(), "runs": ["a"]}
    ]
    nodes.path.write_text(json.dumps({"nodes": rows}))
    assert nodes.entries() == ()
    if name != "n[1-9]":  # a user may leave out several at once
        with refused("must be names of nodes"):
            check_fields(ClusterConfig(exclude=[name]), "cluster.")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    nodes = NodeBlocklist(tmp_path)
    nodes.path.write_text(text)
    assert nodes.entries() == ()
    nodes.add("mini", "n1", "x", "a", utc())
    assert [entry.node for entry in nodes.entries()] == ["n1"]


def test_the_option_names_each_node_once(resolved: Resolved) -> None:
    for nodes, options in (("n1,n2,n1", ["#SBATCH --exclude=n1,n2"]), ("", [])):
        spec = resolved("cluster=mini", f"cluster.exclude=[{nodes}]")
        script = script_of(spec)
        assert [line for line in script.splitlines() if "exclude" in line] == options
