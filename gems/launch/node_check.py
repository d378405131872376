"""Check a job's nodes before its ranks start.

The command is `python -m gems.launch.node_check RUN_FOLDER GPUS`, once per node. It prints its
result as one line of JSON, reads a line with the addresses of all nodes, tries the link to the next
node, prints that result, and ends at the end of its input. The launcher has both ends: srun gives
its input to every task. Files that earlier ranks left in shared memory are removed first. The
module needs only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gems.launch.mpich_cleanup import FOLDER as SHARED_MEMORY
from gems.launch.mpich_cleanup import remove_stale_shared_memory

MIN_SHARED_BYTES = 32 << 20
PROBE_BYTES = 1 << 16
LINK_LIMIT_S = 10.0
TOOL_LIMIT_S = 15.0
# an address of no host: connecting a UDP socket sends nothing
ANY_PATH = ("192.0.2.1", 9)
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
IGNORED = ("nvidia-cuda-mps", "-")  # processes that share a GPU by design
Run = Callable[[list[str]], str | None]


def main(argv: list[str]) -> int:
    """Check this node and its link to the next one; return 0, whatever the result."""
    if len(argv) != 2 or not argv[1].isdecimal():
        print("usage: python -m gems.launch.node_check RUN_FOLDER GPUS", file=sys.stderr)
        return 2
    remove_stale_shared_memory()
    node = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    with socket.create_server(("", 0)) as server:
        threading.Thread(target=answer_probes, args=(server,), daemon=True).start()
        address = [own_address(), server.getsockname()[1]]
        fault = node_fault(Path(argv[0]), int(argv[1]))
        say({"node": node, "address": address, "time_ns": time.time_ns(), "fault": fault})
        addresses = json.loads(sys.stdin.readline() or "{}")
        say({"node": node, "link": link_fault(node, addresses)})
        sys.stdin.read()  # other nodes still try the link to this one
    return 0


def say(document: Mapping[str, Any]) -> None:
    """Print an object as a line of JSON."""
    print(json.dumps(document), flush=True)


def node_fault(folder: Path, gpus: int, shared_memory: Path = SHARED_MEMORY) -> str | None:
    """Return the reason why ranks cannot run on this node, or None."""
    try:
        is_seen = (folder / "run.yaml").is_file()
    except OSError as error:
        return f"the run folder cannot be read ({error.strerror})"
    if not is_seen:
        return f"it does not see the run folder {folder}"
    return shared_memory_fault(shared_memory) or (
        gpu_fault(gpus, os.environ, run_tool) if gpus else None
    )


def shared_memory_fault(folder: Path) -> str | None:
    """Return the fault of the folder of shared memory, which MPI uses inside a node, or None."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
        disk = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    free = disk.f_bavail * disk.f_frsize
    if free < MIN_SHARED_BYTES:
        return f"{folder} has {free >> 20} MiB free, and {MIN_SHARED_BYTES >> 20} MiB are needed"
    return None


def run_tool(argv: list[str]) -> str | None:
    """Return the output of a vendor's tool, or None if it is missing or fails."""
    if shutil.which(argv[0]) is None:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ended = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_LIMIT_S
        )
        if ended.returncode == 0:
            return ended.stdout
    return None


def gpu_fault(gpus: int, environment: Mapping[str, str], run: Run) -> str | None:
    """Return the fault of this job's GPUs on a node, according to nvidia-smi or rocm-smi.

    Return None if there is no fault, or without both tools.
    """
    visible = next((environment[name] for name in VISIBLE if environment.get(name)), None)
    chosen = [f"--id={visible}"] if visible is not None else []
    listed = run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", *chosen])
    if listed is not None:
        if (count := len(listed.split())) < gpus:
            return f"it has {count} of {gpus} GPUs"
        fields = "--query-compute-apps=pid,process_name"
        for line in (
            run(["nvidia-smi", fields, "--format=csv,noheader", *chosen]) or ""
        ).splitlines():
            pid, _, name = (word.strip() for word in line.partition(","))
            if pid.isdecimal() and not os.path.basename(name).startswith(IGNORED):
                return f"another process is on its GPUs: {pid} ({name})"
        return None
    listed = run(["rocm-smi", "--showid", "--json"])
    if listed is not None:
        with contextlib.suppress(ValueError):
            count = sum(name.startswith("card") for name in json.loads(listed))
            if count < gpus:
                return f"it has {count} of {gpus} GPUs"
    return None


def own_address() -> str:
    """Return the address under which other nodes reach this one.

    It is the address of the node's name, or else of its outgoing connection.
    """
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(os.uname().nodename)
        if not address.startswith("127."):
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(ANY_PATH)
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def answer_probes(server: socket.socket) -> None:
    """Send the bytes of each connection back, until the server is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(LINK_LIMIT_S)
                connection.sendall(_read(connection))


def link_fault(node: str, addresses: Mapping[str, tuple[str, int]]) -> str | None:
    """Return why a message does not come back from the next node in the ring, or None."""
    ring = list(addresses)
    if node not in addresses or len(ring) < 2:
        return None
    to = ring[(ring.index(node) + 1) % len(ring)]
    host, port = addresses[to]
    try:
        with socket.create_connection((host, port), LINK_LIMIT_S) as connection:
            connection.settimeout(LINK_LIMIT_S)
            sent = os.urandom(PROBE_BYTES)
            connection.sendall(sent)
            return None if _read(connection) == sent else f"a message from {to} came back changed"
    except OSError as error:
        return f"no message comes back from {to} ({error.strerror or error})"


def _read(connection: socket.socket) -> bytes:
    received = bytearray()
    while len(received) < PROBE_BYTES and (chunk := connection.recv(PROBE_BYTES - len(received))):
        received += chunk
    return bytes(received)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
