"""The program of a probing rank: `gems/launch/placement_check.py RUN_FOLDER RANKS RANKS_PER_NODE GPUS_PER_NODE`.

It asks whether the launcher gave this rank the place that the run wants, by the variables that launchers set. It starts
no MPI and imports two modules, so that a thousand ranks start in seconds where the real program would take minutes. A
rank that finds something wrong leaves FAILED.rank<k>.json; the first one leaves result.json.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's own name for it would cost each rank the import
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

RANK = ("SLURM_PROCID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID")
NUM_RANKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
LOCAL_RANK = ("SLURM_LOCALID", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID")
NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
GPUS_ON_NODE = ("SLURM_GPUS_ON_NODE",)
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
WRONG_PLACE = 2


def main(argv: Sequence[str]) -> int:
    """Check at this rank's place; gives 0, or 2 where it is not the one that was asked for, which it also says."""
    if len(argv) != 4 or not all(word.isdecimal() for word in argv[1:]):
        print("usage: probe_rank.py RUN_FOLDER RANKS RANKS_PER_NODE GPUS_PER_NODE", file=sys.stderr)
        return WRONG_PLACE
    folder, (ranks, per_node, gpus) = argv[0], (int(word) for word in argv[1:])
    rank = _number(os.environ, RANK)
    fault = fault_of(os.environ, ranks, per_node, gpus)
    if fault is not None:
        _write_failure(folder, rank or 0, fault)
        return WRONG_PLACE
    if rank == 0:
        _write_result(folder, ranks)
    return 0


def fault_of(environment: Mapping[str, str], ranks: int, per_node: int, gpus: int) -> str | None:
    """Report what is wrong with the place that these variables tell of; None where nothing is.

    Args:
        environment: The variables of one rank.
        ranks: World size.
        per_node: Ranks of a node.
        gpus: GPUs of a node that ranks may use, 0 where the run asks for none.
    """
    rank, size = _number(environment, RANK), _number(environment, NUM_RANKS)
    local, nodes = _number(environment, LOCAL_RANK), _number(environment, NUM_NODES)
    if rank is None or size is None:
        return "the launcher says neither rank nor world size: none of " + ", ".join((*RANK, *NUM_RANKS))
    if size != ranks:
        return f"it is rank {rank} of {size}, and the run wants {ranks}"
    if rank >= size:
        return f"it is rank {rank}, and the world size is {size}"
    if local is not None and local >= per_node:
        return f"it is rank {local} on its node, and the run wants {per_node} a node"
    if nodes is not None and nodes != -(-ranks // per_node):
        return f"the ranks are on {nodes} nodes, and the run wants {-(-ranks // per_node)}"
    return _fault_of_gpus(environment, gpus) if gpus else None


def _fault_of_gpus(environment: Mapping[str, str], gpus: int) -> str | None:
    """Report what is wrong with the GPUs; without a list of the visible ones a rank sees all of its node."""
    listed = next((environment[name] for name in VISIBLE if name in environment), None)
    if listed is not None:
        count = len([word for word in listed.split(",") if word])
        if count not in (1, gpus):
            return f"it sees {count} GPUs ({listed!r}), and the run wants {gpus} of a node, or one a rank"
        return None
    on_node = _number(environment, GPUS_ON_NODE)
    if on_node is not None and on_node < gpus:
        return f"its node has {on_node} GPUs for this job, and the run wants {gpus}"
    return None


def _number(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    found = next((environment[name] for name in names if name in environment), "")
    return int(found) if found.isdecimal() else None


def _write_result(folder: str, ranks: int) -> None:
    _write(
        os.path.join(folder, "result.json"),
        {
            "num_steps": 0,
            "num_ranks": ranks,
            "num_nodes": _number(os.environ, NUM_NODES) or 1,
            "node": os.uname().nodename,
            "visible_gpus": next((os.environ[name] for name in VISIBLE if name in os.environ), None),
            "gpus_on_node": _number(os.environ, GPUS_ON_NODE),
        },
    )


def _write_failure(folder: str, rank: int, fault: str) -> None:
    from datetime import UTC, datetime

    node = os.uname().nodename
    print(f"gems: rank {rank} on node {node} is in the wrong place: {fault}", file=sys.stderr, flush=True)
    record = {
        "rank": rank, "node": node, "pid": os.getpid(), "step": -1, "action": "start", "cause": fault,
        "exit_code": WRONG_PLACE, "utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }  # fmt: skip
    _write(os.path.join(folder, f"FAILED.rank{rank:04d}.json"), record)


def _write(path: str, document: dict[str, Any]) -> None:
    """Write a JSON file that appears complete or not at all. Modules that few ranks need are imported by those."""
    import json

    partial = f"{path}.{os.getpid()}.partial"
    try:
        with open(partial, "w") as file:
            file.write(json.dumps(document, indent=1) + "\n")
        os.replace(partial, path)
    except OSError as error:
        print(f"gems: cannot write {path}: {error.strerror}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
