"""Check the nodes of a job: their devices, files, clocks and links."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gems.launch.local_launcher import Ended, Output, run_ranks
from gems.launch.node_check import LINK_LIMIT_S, TOOL_LIMIT_S
from gems.runs.folder import RunFolder
from gems.runs.owner import CLOCKS_S
from jobs.batch.launchers import module_on_each_node
from jobs.batch.output import report
from jobs.batch.resources import JobSpec

ANSWER_LIMIT_S = 60.0  # a cold file system may take as long to give every node the interpreter
MORE_S = 15.0  # after the first answer, in which a good node has given its own
END_LIMIT_S = 5.0
SILENT = "it did not answer"
LINK = "link"
NODE_CHECK = "gems.launch.node_check"


class NodeCheck:
    """The launcher's end of `gems.launch.node_check`.

    It collects the nodes' reports and sends the addresses of all nodes to every node.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._said: dict[str, dict[str, Any]] = {}
        self._links: dict[str, str | None] = {}
        self._begin_s = self._phase_s = time.monotonic()
        self._input: int | None = None
        self._is_sent = False

    def run(self, job: JobSpec, folder: RunFolder, environment: Mapping[str, str]) -> Ended:
        """Run the check on all nodes, each within time limits; return how it ended."""
        every = replace(job, nodes=len(self._nodes), nodelist=tuple(self._nodes))
        words = (str(folder.path), str(job.gpus_per_node))
        argv = module_on_each_node(every, folder, NODE_CHECK, *words, asks_gpus=True)
        source, self._input = os.pipe()
        self._begin_s = time.monotonic()
        try:
            ended = run_ranks(
                argv,
                environment,
                Output(folder.logs / "nodes.log", False, self.feed),
                give_up=self.is_over,
                source=source,
            )
        finally:
            os.close(source)
            self._close()
        if not self._said and ended.stopped_by is None:
            last = f": {ended.tail[-1]}" if ended.tail else ""
            report(f"the check of the nodes got no answer, and is left out{last}")
        return ended

    def feed(self, line: str) -> None:
        """Process a line of output."""
        try:
            said = json.loads(line)
        except ValueError:
            return
        if not isinstance(said, dict) or said.get("node") not in self._nodes:
            return
        if LINK in said:
            self._links[said["node"]] = said[LINK]
        else:
            self._said[said["node"]] = said | {"offset_s": said["time_ns"] / 1e9 - time.time()}
            self._phase_s = time.monotonic() if len(self._said) == 1 else self._phase_s

    def is_over(self) -> bool:
        """Send the addresses after all nodes have answered, and end the input after all have tried.

        This is polled.
        """
        now_s = time.monotonic()
        if self._input is None:
            return now_s - self._phase_s > END_LIMIT_S
        late = now_s - self._begin_s > ANSWER_LIMIT_S
        late = late or (bool(self._said) and now_s - self._phase_s > MORE_S + TOOL_LIMIT_S)
        if not self._is_sent and (len(self._said) == len(self._nodes) or late):
            self._is_sent = True
            self._phase_s = now_s
            addresses = {
                node: self._said[node]["address"] for node in self._nodes if node in self._said
            }
            os.write(self._input, (json.dumps(addresses) + "\n").encode())
        elif self._is_sent and (
            len(self._links) >= len(self._said) or now_s - self._phase_s > 2 * LINK_LIMIT_S
        ):
            self._close()
            self._phase_s = now_s
        return False

    def _close(self) -> None:
        if self._input is not None:
            os.close(self._input)
            self._input = None

    def faults(self) -> dict[str, str]:
        """Return the fault of each faulty node.

        If no node has answered, the check itself is at fault, and no node is named.
        """
        if not self._said:
            return {}
        faults = {node: fault for node in self._nodes if (fault := self._fault(node)) is not None}
        # both ends of a link that fails are suspects; the one that more nodes cannot reach is at
        # fault
        alive = [node for node in self._nodes if node in self._said]
        for node, fault in self._links.items():
            if fault is not None and node not in faults and len(alive) > 1:
                to = alive[(alive.index(node) + 1) % len(alive)]
                faults.setdefault(to, f"{node} gets no answer from it: {fault}")
        return faults

    def _fault(self, node: str) -> str | None:
        said = self._said.get(node)
        if said is None:
            return SILENT
        if said["fault"]:
            return str(said["fault"])
        first = next(self._said[each]["offset_s"] for each in self._nodes if each in self._said)
        if abs(said["offset_s"] - first) > CLOCKS_S:
            return f"its clock is {said['offset_s'] - first:+.0f} s off that of the first node"
        return None
