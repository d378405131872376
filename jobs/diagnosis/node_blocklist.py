"""Bad nodes: those on which runs have failed through no fault of theirs, kept in `runs_dir/bad_nodes.json`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gems.config.cluster import NODE_NAME
from gems.utils.atomic_io import read_json, write_json

FILE = "bad_nodes.json"
LIFE = timedelta(days=14)
MAX_RUNS = 20


@dataclass(frozen=True, slots=True)
class BadNode:
    """A node of a cluster and the last failure that it is to blame for; `runs` are all that it has failed, each once."""

    cluster: str
    node: str
    reason: str
    run: str
    utc: str
    runs: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many attempts of runs have failed there."""
        return len(self.runs)

    def line(self) -> str:
        """Describe the entry."""
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"node {self.node} of {self.cluster} has failed {times}, last {self.run} at {self.utc}: {self.reason}"


@dataclass(frozen=True, slots=True)
class BadNodes:
    """The nodes kept in a folder of runs. An entry ends 14 days after its last failure, since nodes are repaired."""

    runs_dir: Path

    @property
    def path(self) -> Path:
        """The file; there is none before the first node."""
        return self.runs_dir / FILE

    def entries(self, now: datetime | None = None) -> tuple[BadNode, ...]:
        """Return the entries that still count; damaged ones, and a damaged file, count as none."""
        now = now or datetime.now(UTC)
        rows: Any = None
        with contextlib.suppress(OSError, ValueError):
            rows = read_json(self.path).get("nodes")
        found = (_entry(row) for row in rows) if isinstance(rows, list) else ()
        return tuple(entry for entry in found if entry is not None and _age(entry, now) < LIFE)

    def of_cluster(self, cluster: str) -> tuple[BadNode, ...]:
        """Return the entries of one cluster; another's nodes may have the same names."""
        return tuple(entry for entry in self.entries() if entry.cluster == cluster)

    def add(self, cluster: str, node: str, reason: str, run: str, utc: str) -> BadNode | None:
        """Record a failure of a node and gives its entry; a failure that is known is not counted again.

        Names that are no host names are left out: they would be handed to SLURM.

        Raises:
            OSError: the folder cannot be written.
        """
        if NODE_NAME.fullmatch(node) is None:
            return None
        known = self.entries()
        same = next((entry for entry in known if (entry.cluster, entry.node) == (cluster, node)), None)
        runs = same.runs if same is not None else ()
        if same is not None and run in runs:
            return same
        entry = BadNode(cluster, node, reason, run, utc, (*runs, run)[-MAX_RUNS:])
        self._write([each for each in known if each is not same] + [entry])
        return entry

    def forget(self, node: str) -> tuple[BadNode, ...]:
        """Take a node out, of whatever cluster, and gives its entries.

        Raises:
            OSError: the folder cannot be written.
        """
        known = self.entries()
        gone = tuple(entry for entry in known if entry.node == node)
        if gone:
            self._write([entry for entry in known if entry not in gone])
        return gone

    def note(self, cluster: str) -> str | None:
        """Report in one line which nodes of a cluster are known to be bad; None where there is none."""
        names = [entry.node for entry in self.of_cluster(cluster)]
        if not names:
            return None
        return (
            f"runs have failed on node{'s' if len(names) > 1 else ''} {', '.join(names)} of {cluster}; "
            f"to leave {'them' if len(names) > 1 else 'it'} out: cluster.exclude=[{','.join(names)}]"
        )

    def _write(self, entries: Iterable[BadNode]) -> None:
        rows = [{**asdict(entry), "runs": list(entry.runs), "count": entry.count} for entry in entries]
        write_json(self.path, {"kept_days": LIFE.days, "nodes": rows})


def exclude_option(names: Iterable[str]) -> dict[str, str]:
    """Return sbatch's option that leaves nodes out; nothing where there are none."""
    joined = ",".join(dict.fromkeys(names))
    return {"exclude": joined} if joined else {}


def _entry(row: object) -> BadNode | None:
    if not isinstance(row, dict):
        return None
    texts = {name: row.get(name) for name in ("cluster", "node", "reason", "run", "utc")}
    runs = row.get("runs")
    if not all(isinstance(text, str) for text in texts.values()) or not isinstance(runs, list):
        return None
    if NODE_NAME.fullmatch(str(texts["node"])) is None:
        return None
    return BadNode(**{name: str(text) for name, text in texts.items()}, runs=tuple(map(str, runs)))


def _age(entry: BadNode, now: datetime) -> timedelta:
    with contextlib.suppress(ValueError, TypeError):
        return now - datetime.fromisoformat(entry.utc)
    return LIFE
