"""The node blocklist: nodes that are to blame for failures of runs, in `runs_dir/bad_nodes.json`.

One failure may be a coincidence: a node is blocked after MIN_FAILURES.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gems.config.cluster import NODE_NAME
from gems.utils.atomic_io import write_json
from jobs.status.job_record import read_or_empty

FILE = "bad_nodes.json"
LIFE = timedelta(days=14)
MIN_FAILURES = 2
MAX_RUNS = 20


@dataclass(frozen=True, slots=True)
class BlockedNode:
    """A node of a cluster with the last failure that it is to blame for; `runs` lists attempts."""

    cluster: str
    node: str
    reason: str
    run: str
    utc: str
    runs: tuple[str, ...]

    @property
    def is_blocked(self) -> bool:
        """Whether the node has failed often enough to be excluded."""
        return len(self.runs) >= MIN_FAILURES

    def describe(self) -> str:
        """Describe the entry in one line."""
        times = "once" if len(self.runs) == 1 else f"{len(self.runs)} times"
        return (
            f"node {self.node} of {self.cluster} has failed {times}, last {self.run} at {self.utc}:"
            f" {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class NodeBlocklist:
    """The blocked nodes of a folder of runs; an entry expires 14 days after its last failure."""

    runs_dir: Path

    @property
    def path(self) -> Path:
        """The file, which exists after the first failure."""
        return self.runs_dir / FILE

    def entries(self, cluster: str | None = None) -> tuple[BlockedNode, ...]:
        """Return the valid entries, blocked or not, of one cluster or of all."""
        rows = map(_parse, read_or_empty(self.path).get("nodes", ()))
        return tuple(
            entry for entry in rows if entry is not None and cluster in (None, entry.cluster)
        )

    def blocked(self, cluster: str) -> tuple[BlockedNode, ...]:
        """Return the entries of blocked nodes of a cluster."""
        return tuple(entry for entry in self.entries(cluster) if entry.is_blocked)

    def add(self, cluster: str, node: str, reason: str, run: str, utc: str) -> BlockedNode | None:
        """Record a failure of a node and return its entry; a known failure is not counted again.

        Ignore an invalid host name, because it would be passed to SLURM. Raise OSError if the
        folder is not writable.
        """
        if NODE_NAME.fullmatch(node) is None:
            return None
        known = self.entries()
        same = next(
            (entry for entry in known if (entry.cluster, entry.node) == (cluster, node)), None
        )
        if same is not None and run in same.runs:
            return same
        runs = (*(same.runs if same is not None else ()), run)[-MAX_RUNS:]
        entry = BlockedNode(cluster, node, reason, run, utc, runs)
        self._write([*(other for other in known if other is not same), entry])
        return entry

    def remove(self, node: str) -> tuple[BlockedNode, ...]:
        """Remove a node of any cluster and return its entries; raise OSError if not writable."""
        known = self.entries()
        removed = tuple(entry for entry in known if entry.node == node)
        if removed:
            self._write([entry for entry in known if entry not in removed])
        return removed

    def note(self, cluster: str) -> str | None:
        """Describe the blocked nodes of a cluster in one line, or return None without any."""
        names = [entry.node for entry in self.blocked(cluster)]
        if not names:
            return None
        plural, them = ("s", "them") if len(names) > 1 else ("", "it")
        what = f"runs have failed on node{plural} {', '.join(names)} of {cluster}"
        return f"{what}; to exclude {them}: cluster.exclude=[{','.join(names)}]"

    def _write(self, entries: Iterable[BlockedNode]) -> None:
        rows = [asdict(entry) for entry in entries]
        write_json(self.path, {"kept_days": LIFE.days, "nodes": rows})


def _parse(row: Mapping[str, Any]) -> BlockedNode | None:
    """Return the entry of a row of the file, or None if it has expired or names no node."""
    entry = BlockedNode(**{**row, "runs": tuple(row["runs"])})
    is_old = datetime.now(UTC) - datetime.fromisoformat(entry.utc) >= LIFE
    return None if is_old or NODE_NAME.fullmatch(entry.node) is None else entry
