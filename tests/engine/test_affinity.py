"""The affinity table, and what it warns of."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from sys import modules
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gems.engine.supervision.affinity import (
    RankLocation,
    locate,
    near_cpus,
    numa_nodes,
    numbers,
    ranges,
    warnings,
    write_affinity,
)

CPU = torch.device("cpu")


def at(
    rank: int, cpus: str, node: str = "n1", gpu: str | None = None, node_cpus: int = 8
) -> RankLocation:
    return RankLocation(
        rank=rank,
        node=node,
        pid=100 + rank,
        local_rank=rank,
        cpus=cpus,
        node_cpus=node_cpus,
        numa_nodes=(0,),
        gpu_name=gpu and "A100",
        gpu_uuid=gpu,
    )


class OneOfThree:
    """Stands for a communicator whose other ranks are like this one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather(self, value: RankLocation) -> Sequence[RankLocation] | None:
        return None if self.rank else [value, value, value]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 3, 8], "0-3,8"),
        ([9, 7, 8, 8, 1], "1,7-9"),
        (range(64, 128), "64-127"),
    ],
)
def test_ranges_are_the_kernels(values: Sequence[int], text: str) -> None:
    assert ranges(values) == text
    assert numbers(text) == sorted(set(values))


def test_this_process_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n0412")
    monkeypatch.setenv("SLURM_LOCALID", "3")
    found = locate(7, CPU)
    assert (found.rank, found.node, found.pid, found.local_rank) == (7, "n0412", os.getpid(), 3)
    assert set(numbers(found.cpus)) == os.sched_getaffinity(0) and found.gpu_uuid is None
    assert locate(7, None) == found, "where compute is emulated, there is no device"


def test_a_gpu_has_a_name_and_a_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"name": "NVIDIA H100", "uuid": "0123-abcd"}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**known)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = locate(0, torch.device("cuda", 2))
    assert (found.gpu_index, found.gpu_name, found.gpu_uuid, found.visible_gpus) == (
        2,
        "NVIDIA H100",
        "0123-abcd",
        4,
    )
    del known["uuid"]  # an older torch on another maker's GPU
    assert locate(0, torch.device("cuda", 2)).gpu_uuid is None


@pytest.fixture
def sys_tree(tmp_path: Path) -> Path:
    """A kernel's tree of two NUMA nodes with CPUs, one without, and three GPUs."""
    for number, cpus in enumerate(("0-3,8-11\n", "4-7,12-15\n", "\n")):
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{number}/cpulist").write_text(cpus)
    for bus, node in (("17", "0"), ("c1", "1"), ("e1", "-1"), ("f1", "2")):
        (tmp_path / f"bus/pci/devices/0000:{bus}:00.0").mkdir(parents=True)
        (tmp_path / f"bus/pci/devices/0000:{bus}:00.0/numa_node").write_text(f"{node}\n")
    return tmp_path


def test_numa_nodes_are_those_of_the_cpus(sys_tree: Path) -> None:
    assert numa_nodes([2], sys_tree) == (0,)
    assert numa_nodes([2, 12], sys_tree) == (0, 1)
    assert numa_nodes([2], sys_tree / "none") == ()


@pytest.mark.parametrize(
    ("bus_id", "near"),
    [
        ("0000:17:00.0", (0, "0-3,8-11")),
        ("0000:c1:00.0", (1, "4-7,12-15")),
        ("0000:e1:00.0", None),
        ("0000:f1:00.0", None),
        ("0000:99:00.0", None),
        (None, None),
    ],
)
def test_a_gpu_is_near_to_the_cpus_of_its_numa_node(
    sys_tree: Path, bus_id: str, near: tuple[int, str] | None
) -> None:
    assert near_cpus(bus_id, sys_tree) == near


def test_a_gpu_s_place_comes_from_torch_or_else_from_nvml(
    sys_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, Any] = {
        "name": "H100",
        "uuid": "a",
        "pci_domain_id": 0,
        "pci_bus_id": 0xC1,
        "pci_device_id": 0,
    }
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**known)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = locate(0, torch.device("cuda", 2), sys_tree)
    assert (found.gpu_bus_id, found.gpu_numa_node, found.gpu_cpus) == (
        "0000:c1:00.0",
        1,
        "4-7,12-15",
    )
    for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"):
        del known[name]
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=b"00000000:17:00.0"),
    )
    monkeypatch.setitem(modules, "pynvml", nvml)
    assert locate(0, torch.device("cuda", 2), sys_tree).gpu_numa_node == 0
    monkeypatch.setitem(modules, "pynvml", None)  # which cannot be imported
    found = locate(0, torch.device("cuda", 2), sys_tree)
    assert (found.gpu_bus_id, found.gpu_numa_node, found.is_far) == (None, None, False)


def test_rank_0_writes_one_file(tmp_path: Path) -> None:
    path = tmp_path / "run" / "affinity.json"
    write_affinity(OneOfThree(1), CPU, path)  # type: ignore[arg-type]
    assert not path.exists()
    write_affinity(OneOfThree(0), CPU, path)  # type: ignore[arg-type]
    table = json.loads(path.read_text())
    assert "MPI" in table["mpi_library"].upper() and len(table["ranks"]) == 3
    assert table["ranks"][0]["pid"] == os.getpid()


def test_a_table_that_cannot_be_written_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    write_affinity(OneOfThree(0), CPU, tmp_path / "file" / "affinity.json")  # type: ignore[arg-type]
    assert "[rank 0] WARNING cannot write " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("locations", "cpus_per_rank", "lines"),
    [
        ([at(0, "0-3"), at(1, "4-7")], 4, []),
        ([at(0, "0-7"), at(1, "0-7")], 4, []),  # not bound at all: nobody is in the way
        (
            [at(0, "0-3"), at(1, "0-3")],
            4,
            ["ranks 0-1 on node n1 share CPUs 0-3, fewer than 4 a rank, and the node has 8"],
        ),
        ([at(0, "0-1", node_cpus=2), at(1, "0-1", node_cpus=2)], 2, []),  # the node has no more
        ([at(0, "0"), at(1, "0", node="n2")], 1, []),
        (
            [at(0, "0-1"), at(1, "2-3"), at(2, "1-2")],
            2,
            ["ranks 0-2 on node n1 share CPUs 0-3, fewer than 2 a rank, and the node has 8"],
        ),
        (
            [at(0, "0"), at(1, "0"), at(2, "0", node="n2"), at(3, "0", node="n2")],
            1,
            [
                "ranks 0-1 on node n1 share CPUs 0, fewer than 1 a rank, and the node has 8, and 1"
                " more nodes"
            ],
        ),
        ([at(0, "0-3", gpu="G1"), at(1, "4-7", gpu="G2")], 1, []),
        (
            [at(0, "0-3", gpu="G1"), at(1, "4-7", gpu="G1")],
            1,
            ["ranks 0-1 on node n1 share one GPU (A100, G1)"],
        ),
        ([at(0, "0-3", gpu="G1"), at(1, "4-7", gpu="G1", node="n2")], 1, []),
    ],
)
def test_ranks_in_each_others_way(
    locations: list[RankLocation], cpus_per_rank: int, lines: list[str]
) -> None:
    found = warnings(locations, cpus_per_rank)
    assert [line.partition("; see cluster.")[0] for line in found] == lines
    assert all("; see cluster." in line for line in found)


def on(
    rank: int, cpus: str, numa: int, gpu: int, gpu_numa: int | None, num_gpus: int = 4
) -> RankLocation:
    """A rank on a node of two NUMA nodes of four CPUs each."""
    near = None if gpu_numa is None else ("0-3", "4-7")[gpu_numa]
    return RankLocation(
        rank,
        "n1",
        100 + rank,
        rank,
        cpus,
        8,
        (numa,),
        gpu,
        "A100",
        f"G{gpu}",
        num_gpus,
        f"0000:{gpu}1:00.0",
        gpu_numa,
        near,
    )


@pytest.mark.parametrize(
    ("locations", "line"),
    [
        ([on(0, "0-1", 0, 0, 0), on(1, "4-5", 1, 1, 1)], None),
        ([on(0, "0-1", 0, 0, None)], None),  # not known
        ([on(0, "0-7", 0, 0, 1)], None),  # not bound: the kernel moves it
        (
            [
                on(0, "0-1", 0, 0, 1),
                on(1, "2-3", 0, 1, 1),
                on(2, "4-5", 1, 2, 0),
                on(3, "6-7", 1, 3, 0),
            ],
            (
                "rank 0 on node n1 runs on CPUs 0-1 (NUMA node 0), and its GPU 0 (0000:01:00.0) is"
                " attached to NUMA node 1 (CPUs 4-7), and 3 more ranks; see"
                " cluster.device_order=[2,3,0,1] or cluster.cpu_bind=map_ldom:1,1,0,0"
            ),
        ),
        (
            [on(0, "0-1", 0, 0, 0, 2), on(1, "2-3", 0, 1, 1, 2)],  # no order of the GPUs helps
            (
                "rank 1 on node n1 runs on CPUs 2-3 (NUMA node 0), and its GPU 1 (0000:11:00.0) is"
                " attached to NUMA node 1 (CPUs 4-7); see cluster.device_order or"
                " cluster.cpu_bind=map_ldom:0,1"
            ),
        ),
        (
            [on(0, "4-5", 1, 0, 0, 1), on(1, "0-1", 0, 0, None, 1)],  # each sees its own GPU alone
            (
                "rank 0 on node n1 runs on CPUs 4-5 (NUMA node 1), and its GPU 0 (0000:01:00.0) is"
                " attached to NUMA node 0 (CPUs 0-3); see cluster.device_order or cluster.cpu_bind"
            ),
        ),
    ],
)
def test_ranks_far_from_their_gpus(locations: list[RankLocation], line: str | None) -> None:
    found = [each for each in warnings(locations, 1) if "NUMA" in each]
    assert found == ([] if line is None else [line])
