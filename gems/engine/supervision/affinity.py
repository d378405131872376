"""Affinity: the cores and the GPU of each rank, and warnings about shared or distant ones."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems.engine.transport.environment import local_rank
from gems.engine.transport.mpi import Comm, library
from gems.utils.atomic_io import write_json

if TYPE_CHECKING:
    import torch

SYS = Path("/sys")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The place where a rank runs: its node, the CPUs it may use, their NUMA nodes, and its GPU.

    CPUs are written as in "0-7,64-71". `gpu_numa_node` is the NUMA node that the GPU is attached
    to, and `gpu_cpus` are its CPUs; both are None if unknown.
    """

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
    gpu_bus_id: str | None = None
    gpu_numa_node: int | None = None
    gpu_cpus: str | None = None

    @property
    def is_far(self) -> bool:
        """Return whether all CPUs of the rank are known to be off the NUMA node of its GPU."""
        return self.gpu_cpus is not None and not set(numbers(self.cpus)) & set(
            numbers(self.gpu_cpus)
        )


def write_affinity(
    comm: Comm, device: torch.device | None, path: Path, cpus_per_rank: int = 1
) -> None:
    """Gather the locations of all ranks on rank 0, which writes them and logs warnings; collective.

    An error in writing `path` does not end the run.
    """
    locations = comm.gather(locate(comm.rank, device))
    if locations is None:
        return
    for line in warnings(locations, cpus_per_rank):
        _log.warning(line)
    table: dict[str, Any] = {
        "mpi_library": library(),
        "ranks": [asdict(location) for location in locations],
    }
    try:
        write_json(path, table, indent=None)
    except OSError as error:
        _log.warning("cannot write %s: %s", path, error)


def locate(rank: int, device: torch.device | None, sys: Path = SYS) -> RankLocation:
    """Return the location of this process by the kernel's tree `sys`; load torch only for a GPU."""
    cpus = os.sched_getaffinity(0)
    gpu: dict[str, Any] = {}
    if device is not None and device.type == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(device)
        uuid = getattr(properties, "uuid", None)  # since torch 2.4, later on ROCm
        gpu = {
            "gpu_index": device.index,
            "gpu_name": properties.name,
            "visible_gpus": torch.cuda.device_count(),
        }
        gpu["gpu_uuid"] = None if uuid is None else str(uuid)
        gpu["gpu_bus_id"] = bus_id = _bus_id(device, properties)
        gpu["gpu_numa_node"], gpu["gpu_cpus"] = near_cpus(bus_id, sys) or (None, None)
    return RankLocation(
        rank,
        os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        os.getpid(),
        local_rank(),
        ranges(cpus),
        os.cpu_count() or len(cpus),
        numa_nodes(cpus, sys),
        **gpu,
    )


def warnings(locations: Sequence[RankLocation], cpus_per_rank: int) -> list[str]:
    """Return warnings about shared GPUs, shared CPUs and GPUs far from their ranks.

    There is at most one line of each kind, which describes the first case. Ranks share CPUs if
    their overlapping sets have fewer than `cpus_per_rank` CPUs each, on a node that has enough for
    all.
    """
    lines = []
    of_gpu: dict[tuple[str, str], list[RankLocation]] = defaultdict(list)
    of_node: dict[str, list[RankLocation]] = defaultdict(list)
    for rank in locations:
        of_node[rank.node].append(rank)
        if rank.gpu_uuid is not None:
            of_gpu[rank.node, rank.gpu_uuid].append(rank)
    shared = [group for group in of_gpu.values() if len(group) > 1]
    if shared:
        gpu = shared[0][0]
        lines.append(
            f"ranks {ranges(rank.rank for rank in shared[0])} on node {gpu.node} share one GPU"
            f" ({gpu.gpu_name}, {gpu.gpu_uuid}){_more(len(shared), 'GPUs')}; see"
            " cluster.gpus_per_node, cluster.ranks_per_node, cluster.gpu_bind and"
            " cluster.device_order"
        )
    crowded = [group for here in of_node.values() if (group := _crowded(here, cpus_per_rank))]
    if crowded:
        group = crowded[0]
        cpus = ranges(cpu for rank in group for cpu in numbers(rank.cpus))
        lines.append(
            f"ranks {ranges(rank.rank for rank in group)} on node {group[0].node} share CPUs"
            f" {cpus}, fewer than {cpus_per_rank} a rank, and the node has"
            f" {group[0].node_cpus}{_more(len(crowded), 'nodes')}; see cluster.cpu_bind and"
            " cluster.cpus_per_rank"
        )
    far = [rank for rank in locations if rank.is_far]
    if far:
        one = far[0]
        here = of_node[far[0].node]
        lines.append(
            f"rank {one.rank} on node {one.node} runs on CPUs {one.cpus} (NUMA node"
            f" {ranges(one.numa_nodes)}), and its GPU {one.gpu_index} ({one.gpu_bus_id}) is"
            f" attached to NUMA node {one.gpu_numa_node} (CPUs"
            f" {one.gpu_cpus}){_more(len(far), 'ranks')}; see {_nearer(here)}"
        )
    return lines


def _nearer(here: Sequence[RankLocation]) -> str:
    """Return the configuration keys that bring ranks and GPUs together, with values if known."""
    ranks = sorted(here, key=lambda rank: rank.local_rank)
    order = []
    free = {rank.gpu_index: rank.gpu_numa_node for rank in ranks}
    for rank in ranks:
        near = next((index for index, node in free.items() if node in rank.numa_nodes), None)
        if near is not None:
            free.pop(near)
            order.append(near)
    is_whole = (
        [rank.local_rank for rank in ranks] == [*range(len(ranks))]
        and not free
        and None not in order
    )
    sees_all = all(rank.visible_gpus == len(ranks) for rank in ranks)
    nodes = [rank.gpu_numa_node for rank in ranks]
    bind = "" if None in nodes else f"=map_ldom:{','.join(map(str, nodes))}"
    devices = f"=[{','.join(map(str, order))}]" if is_whole and sees_all else ""
    return f"cluster.device_order{devices} or cluster.cpu_bind{bind}"


def _crowded(here: Sequence[RankLocation], cpus_per_rank: int) -> list[RankLocation]:
    """Return the first ranks of a node with overlapping, too few CPUs, if the node has enough."""
    if here[0].node_cpus < len(here) * cpus_per_rank:
        return []
    groups: list[tuple[set[int], list[RankLocation]]] = []
    for rank in here:
        cpus = set(numbers(rank.cpus))
        met = [group for group in groups if group[0] & cpus]
        groups = [group for group in groups if group not in met]
        groups.append(
            (
                cpus.union(*(group[0] for group in met)),
                [*(member for group in met for member in group[1]), rank],
            )
        )
    return next(
        (
            sorted(members, key=lambda rank: rank.rank)
            for cpus, members in groups
            if len(members) > 1 and len(cpus) < len(members) * cpus_per_rank
        ),
        [],
    )


def _more(count: int, what: str) -> str:
    return f", and {count - 1} more {what}" if count > 1 else ""


def ranges(values: Iterable[int]) -> str:
    """Format numbers as the kernel does, for example "0-3,8"."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def numbers(text: str) -> list[int]:
    """Parse the format of `ranges`."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def numa_nodes(cpus: Iterable[int], sys: Path = SYS) -> tuple[int, ...]:
    """Return the NUMA nodes of these CPUs; the result is empty if the kernel does not list them."""
    wanted = set(cpus)
    return tuple(sorted(node for node, here in _cpus_of_nodes(sys).items() if wanted & here))


def near_cpus(bus_id: str | None, sys: Path = SYS) -> tuple[int, str] | None:
    """Return the NUMA node that a PCI device is attached to, and the CPUs of that node.

    Return None if the kernel does not know the node. A virtual machine has no such node, and the
    memory of some GPUs is a node without CPUs.
    """
    if bus_id is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        node = int((sys / "bus/pci/devices" / bus_id / "numa_node").read_text())
        cpus = _cpus_of_nodes(sys).get(node)
        return (node, ranges(cpus)) if cpus else None
    return None


def _cpus_of_nodes(sys: Path) -> dict[int, set[int]]:
    cpus = {}
    for path in (sys / "devices/system/node").glob("node[0-9]*/cpulist"):
        with contextlib.suppress(OSError, ValueError):
            cpus[int(path.parent.name.removeprefix("node"))] = set(numbers(path.read_text()))
    return cpus


def _bus_id(device: torch.device, properties: Any) -> str | None:
    """Return a GPU's PCI address in the kernel's format, for example 0000:17:00.0.

    Return None if neither torch nor NVML knows it.
    """
    with contextlib.suppress(Exception):
        if hasattr(properties, "pci_bus_id"):  # only in newer versions of torch
            parts = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
            return "{:04x}:{:02x}:{:02x}.0".format(*parts)
        from gems.engine.supervision.monitor import Gpu

        return Gpu(device).bus_id()
    return None
