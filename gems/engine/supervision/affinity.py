"""The affinity table: where each rank runs, on which cores and which GPU, and a warning where ranks are in each other's way."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems.engine.transport.local_rank import local_rank
from gems.engine.transport.mpi import Comm, library
from gems.utils.atomic_io import write_json

if TYPE_CHECKING:
    import torch

NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: its node, the CPUs it may use as in "0-7,64-71", their NUMA nodes, and its GPU."""

    rank: int
    node: str
    pid: int
    local_rank: int
    cpus: str
    node_cpus: int
    numa_nodes: tuple[int, ...]
    gpu_index: int | None = None
    gpu_name: str | None = None
    gpu_uuid: str | None = None
    visible_gpus: int = 0


def write_affinity(comm: Comm, device: torch.device | None, path: Path, cpus_per_rank: int = 1) -> None:
    """Gather where all ranks run to rank 0, which writes `path` and says on stderr what looks wrong; collective.

    One gather and one file, however many ranks there are. A file that cannot be written ends no run.
    """
    places = comm.gather(place(comm.rank, device))
    if places is None:
        return
    for line in warnings(places, cpus_per_rank):
        print(f"gems: {line}", file=sys.stderr, flush=True)
    table: dict[str, Any] = {"mpi_library": library(), "ranks": [asdict(each) for each in places]}
    try:
        write_json(path, table, indent=None)
    except OSError as error:
        print(f"gems: no table of the ranks' places: {error}", file=sys.stderr, flush=True)


def place(rank: int, device: torch.device | None) -> Place:
    """Return where this process runs; with no device, as where compute is emulated, without torch."""
    cpus = os.sched_getaffinity(0)
    here = Place(
        rank=rank, node=os.environ.get("SLURMD_NODENAME") or os.uname().nodename, pid=os.getpid(),
        local_rank=local_rank(), cpus=ranges(cpus), node_cpus=os.cpu_count() or len(cpus), numa_nodes=numa_nodes(cpus),
    )  # fmt: skip
    if device is None or device.type != "cuda":
        return here
    import torch

    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)  # torch knows it since 2.4, of ROCm later
    return Place(
        **asdict(here)
        | {
            "gpu_index": device.index, "gpu_name": properties.name, "gpu_uuid": None if uuid is None else str(uuid),
            "visible_gpus": torch.cuda.device_count(),
        }
    )  # fmt: skip


def warnings(places: Sequence[Place], cpus_per_rank: int) -> list[str]:
    """Return a line for the first node where ranks share a GPU, and one where they crowd on too few CPUs.

    Ranks that may all use all CPUs of a node are not in each other's way. Those are that together have fewer than
    `cpus_per_rank` each, on a node that has enough: they were bound to the same ones.
    """
    lines = []
    of_gpu: dict[tuple[str, str], list[Place]] = defaultdict(list)
    of_node: dict[str, list[Place]] = defaultdict(list)
    for each in places:
        of_node[each.node].append(each)
        if each.gpu_uuid is not None:
            of_gpu[each.node, each.gpu_uuid].append(each)
    shared = [(key, group) for key, group in of_gpu.items() if len(group) > 1]
    if shared:
        (node, uuid), group = shared[0]
        lines.append(
            f"ranks {_listed(group)} on node {node} share one GPU ({group[0].gpu_name}, {uuid}){_more(len(shared))}; "
            "see cluster.gpus_per_node, cluster.ranks_per_node, cluster.gpu_bind and cluster.device_order"
        )
    crowded = [(node, group) for node, here in of_node.items() if (group := _crowded(here, cpus_per_rank))]
    if crowded:
        node, group = crowded[0]
        lines.append(
            f"ranks {_listed(group)} on node {node} share CPUs {ranges(_union(group))}, fewer than {cpus_per_rank} a rank, "
            f"and the node has {group[0].node_cpus}{_more(len(crowded))}; see cluster.cpu_bind and cluster.cpus_per_rank"
        )
    return lines


def _crowded(here: Sequence[Place], cpus_per_rank: int) -> list[Place]:
    """Return the first ranks of a node that overlap and together have too few CPUs, where the node has enough for all."""
    if here[0].node_cpus < len(here) * cpus_per_rank:
        return []
    groups: list[tuple[set[int], list[Place]]] = []
    for each in here:
        cpus, members = set(numbers(each.cpus)), [each]
        apart = []
        for other in groups:
            if other[0] & cpus:
                cpus, members = cpus | other[0], [*other[1], *members]
            else:
                apart.append(other)
        groups = [*apart, (cpus, members)]
    return next((sorted(members, key=lambda each: each.rank) for cpus, members in groups
                 if len(members) > 1 and len(cpus) < len(members) * cpus_per_rank), [])  # fmt: skip


def _union(group: Iterable[Place]) -> set[int]:
    return set().union(*(numbers(each.cpus) for each in group))


def _listed(group: Sequence[Place]) -> str:
    return ranges(each.rank for each in group)


def _more(count: int) -> str:
    return f", and so at {count - 1} other places" if count > 1 else ""


def ranges(values: Iterable[int]) -> str:
    """Write numbers as the kernel does: "0-3,8"."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def numbers(text: str) -> list[int]:
    """Read what `ranges` writes."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def numa_nodes(cpus: Iterable[int], folder: Path = NODES) -> tuple[int, ...]:
    """Return the NUMA nodes that some of these CPUs belong to; none where the kernel does not tell."""
    wanted = set(cpus)
    found = []
    for path in folder.glob("node[0-9]*/cpulist"):
        try:
            here = wanted & set(numbers(path.read_text()))
        except (OSError, ValueError):
            continue
        if here:
            found.append(int(path.parent.name.removeprefix("node")))
    return tuple(sorted(found))
