"""The program of a probing rank.

What it takes for a wrong place, and that it starts fast and leaves its word.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gems.launch import placement_check as probe_rank
from gems.launch.placement_check import fault_of

SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "1024",
    "SLURM_NTASKS": "1024",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "256",
    "SLURM_GPUS_ON_NODE": "4",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3"}


@pytest.mark.parametrize(
    "more", [{}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"ROCR_VISIBLE_DEVICES": "2"}]
)
def test_a_right_place(more: dict[str, str]) -> None:
    assert fault_of(SLURM | more, 1024, 4, 4) is None
    assert fault_of(HYDRA, 4, 4, 0) is None


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "says neither rank nor world size"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, "rank 9 of 1, and the run wants 1024"),
        (SLURM | {"SLURM_PROCID": "1024"}, "rank 1024, and the world size is 1024"),
        (SLURM | {"SLURM_LOCALID": "4"}, "rank 4 on its node, and the run wants 4 a node"),
        (SLURM | {"SLURM_STEP_NUM_NODES": "255"}, "on 255 nodes, and the run wants 256"),
        (SLURM | {"CUDA_VISIBLE_DEVICES": ""}, "sees 0 GPUs"),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"}, "sees 2 GPUs ('0,1'), and the run wants 4"),
        (SLURM | {"SLURM_GPUS_ON_NODE": "2"}, "has 2 GPUs for this job, and the run wants 4"),
    ],
)
def test_a_wrong_place(environment: dict[str, str], says: str) -> None:
    assert says in str(fault_of(environment, 1024, 4, 4))


def run(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable,
        "-I",
        "-S",
        "-X",
        "importtime",
        str(Path(probe_rank.__file__)),
        str(folder),
        *words,
    ]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)


def test_a_rank_among_many_leaves_nothing_and_imports_next_to_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path, SLURM, "1024", "4", "4")
    assert (ended.returncode, ended.stdout, list(tmp_path.iterdir())) == (0, "", [])
    for heavy in ("json", "typing", "collections", "gems", "datetime", "re"):
        assert f" {heavy}\n" not in ended.stderr


def test_the_first_rank_tells_the_world_it_found(tmp_path: Path) -> None:
    assert run(tmp_path, SLURM | {"SLURM_PROCID": "0"}, "1024", "4", "4").returncode == 0
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["num_ranks"], found["num_nodes"], found["gpus_on_node"]) == (1024, 256, 4)
    assert found["node"] == os.uname().nodename


def test_a_misplaced_rank_says_so_and_leaves_a_record(tmp_path: Path) -> None:
    ended = run(tmp_path, SLURM, "512", "4", "4")
    assert ended.returncode == 2
    assert (
        "gems: rank 9 on node" in ended.stderr
        and "rank 9 of 1024, and the run wants 512" in ended.stderr
    )
    record = json.loads((tmp_path / "FAILED.rank0009.json").read_text())
    assert (record["rank"], record["exit_code"], record["step"]) == (9, 2, -1)
    assert run(tmp_path, SLURM, "many").returncode == 2
