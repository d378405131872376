"""The check of a node: what it finds, and what it says to the launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gems.launch import node_check
from gems.launch.node_check import (
    answer_probes,
    gpu_fault,
    link_fault,
    node_fault,
    own_address,
    shared_memory_fault,
)

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]
UUIDS = "GPU-1\nGPU-2\n"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer_probes, args=(server,), daemon=True).start()
        yield server


def test_a_node_must_see_the_run_folder(tmp_path: Path) -> None:
    assert node_fault(tmp_path, 0, tmp_path) == f"it does not see the run folder {tmp_path}"
    (tmp_path / "run.yaml").touch()
    assert node_fault(tmp_path, 0, tmp_path) is None


def test_shared_memory_must_be_writable_and_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared_memory_fault(tmp_path) is None
    missing = tmp_path / "missing"
    assert (
        shared_memory_fault(missing) == f"{missing} cannot be written (No such file or directory)"
    )
    monkeypatch.setattr(node_check, "MIN_SHARED_BYTES", 2**70)
    assert "MiB free, and" in str(shared_memory_fault(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("gpus", "listed", "processes", "fault"),
    [
        (2, UUIDS, "", None),
        (4, UUIDS, "", "it has 2 of 4 GPUs"),
        (
            2,
            UUIDS,
            "4711, /usr/bin/python3\n",
            "another process is on its GPUs: 4711 (/usr/bin/python3)",
        ),
        (2, UUIDS, "4711, /usr/bin/nvidia-cuda-mps-server\n", None),
        (2, None, "", None),
    ],
)
def test_gpus_are_there_and_free(
    gpus: int, listed: str | None, processes: str, fault: str | None
) -> None:
    asked: list[list[str]] = []

    def run(argv: list[str]) -> str | None:
        asked.append(argv)
        if argv[0] != "nvidia-smi" or listed is None:
            return None
        return listed if "--query-gpu=uuid" in argv else processes

    assert gpu_fault(gpus, {"CUDA_VISIBLE_DEVICES": "0,1"}, run) == fault
    assert all("--id=0,1" in argv for argv in asked if argv[0] == "nvidia-smi")


def test_amd_gpus_are_counted() -> None:
    listed = json.dumps({"card0": {}, "card1": {}, "system": {}})
    assert (
        gpu_fault(4, {}, lambda argv: listed if argv[0] == "rocm-smi" else None)
        == "it has 2 of 4 GPUs"
    )


def test_a_message_comes_back_from_the_next_node(server: socket.socket) -> None:
    good = ("127.0.0.1", server.getsockname()[1])
    assert link_fault("n1", {"n1": ("127.0.0.1", 1), "n2": good}) is None
    assert link_fault("n1", {"n1": good}) is None
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = ("127.0.0.1", closed.getsockname()[1])
    assert (
        link_fault("n2", {"n1": gone, "n2": good})
        == "no message comes back from n1 (Connection refused)"
    )


def test_the_program_speaks_json_by_lines(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    words = [sys.executable, "-m", "gems.launch.node_check", str(tmp_path), "0"]
    environment = os.environ | {"SLURMD_NODENAME": "n7"}
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        found = json.loads(process.stdout.readline())
        assert (found["node"], found["fault"]) == ("n7", None)
        address = [own_address(), found["address"][1]]
        process.stdin.write(
            json.dumps({"n7": address, "n8": found["address"]}) + "\n"
        )  # it is its own neighbour
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"node": "n7", "link": None}
        process.stdin.close()
    assert process.returncode == 0
