"""The affinity table, and what it warns of."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gems.engine.supervision.affinity import RankLocation, locate, numa_nodes, numbers, ranges, warnings, write_affinity

CPU = torch.device("cpu")


def at(rank: int, cpus: str, node: str = "n1", gpu: str | None = None, node_cpus: int = 8) -> RankLocation:
    return RankLocation(
        rank=rank, node=node, pid=100 + rank, local_rank=rank, cpus=cpus, node_cpus=node_cpus, numa_nodes=(0,),
        gpu_name=gpu and "A100", gpu_uuid=gpu,
    )  # fmt: skip


class OneOfThree:
    """Stands for a communicator whose other ranks are like this one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather(self, value: RankLocation) -> Sequence[RankLocation] | None:
        return None if self.rank else [value, value, value]


@pytest.mark.parametrize(
    ("values", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3, 8], "0-3,8"), ([9, 7, 8, 8, 1], "1,7-9"), (range(64, 128), "64-127")],
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
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**known))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = locate(0, torch.device("cuda", 2))
    assert (found.gpu_index, found.gpu_name, found.gpu_uuid, found.visible_gpus) == (2, "NVIDIA H100", "0123-abcd", 4)
    del known["uuid"]  # an older torch on another maker's GPU
    assert locate(0, torch.device("cuda", 2)).gpu_uuid is None


def test_numa_nodes_are_those_of_the_cpus(tmp_path: Path) -> None:
    for number, cpus in enumerate(("0-3,8-11\n", "4-7,12-15\n", "\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus)
    assert numa_nodes([2], tmp_path) == (0,)
    assert numa_nodes([2, 12], tmp_path) == (0, 1)
    assert numa_nodes([2], tmp_path / "none") == ()


def test_rank_0_writes_one_file(tmp_path: Path) -> None:
    path = tmp_path / "run" / "affinity.json"
    write_affinity(OneOfThree(1), CPU, path)  # type: ignore[arg-type]
    assert not path.exists()
    write_affinity(OneOfThree(0), CPU, path)  # type: ignore[arg-type]
    table = json.loads(path.read_text())
    assert "MPI" in table["mpi_library"].upper() and len(table["ranks"]) == 3
    assert table["ranks"][0]["pid"] == os.getpid()


def test_a_table_that_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    write_affinity(OneOfThree(0), CPU, tmp_path / "file" / "affinity.json")  # type: ignore[arg-type]
    assert "[rank 0] WARNING cannot write " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("locations", "cpus_per_rank", "lines"),
    [
        ([at(0, "0-3"), at(1, "4-7")], 4, []),
        ([at(0, "0-7"), at(1, "0-7")], 4, []),  # not bound at all: nobody is in the way
        ([at(0, "0-3"), at(1, "0-3")], 4,
        ["ranks 0-1 on node n1 share CPUs 0-3, fewer than 4 a rank, and the node has 8"]),
        ([at(0, "0-1", node_cpus=2), at(1, "0-1", node_cpus=2)], 2, []),  # the node has no more
        ([at(0, "0"), at(1, "0", node="n2")], 1, []),
        (
            [at(0, "0-1"), at(1, "2-3"), at(2, "1-2")], 2,
            ["ranks 0-2 on node n1 share CPUs 0-3, fewer than 2 a rank, and the node has 8"],
        ),
        (
            [at(0, "0"), at(1, "0"), at(2, "0", node="n2"), at(3, "0", node="n2")], 1,
            ["ranks 0-1 on node n1 share CPUs 0, fewer than 1 a rank, and the node has 8, and 1 more nodes"],
        ),
        ([at(0, "0-3", gpu="G1"), at(1, "4-7", gpu="G2")], 1, []),
        ([at(0, "0-3", gpu="G1"), at(1, "4-7", gpu="G1")], 1, ["ranks 0-1 on node n1 share one GPU (A100, G1)"]),
        ([at(0, "0-3", gpu="G1"), at(1, "4-7", gpu="G1", node="n2")], 1, []),
    ],
)  # fmt: skip
def test_ranks_in_each_others_way(locations: list[RankLocation], cpus_per_rank: int, lines: list[str]) -> None:
    found = warnings(locations, cpus_per_rank)
    assert [line.partition("; see cluster.")[0] for line in found] == lines
    assert all("; see cluster." in line for line in found)
