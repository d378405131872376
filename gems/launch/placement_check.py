"""The program of a probing rank.

The command is `gems/launch/placement_check.py RUN_FOLDER RANKS RANKS_PER_NODE GPUS_PER_NODE`. It
checks whether the launcher placed this rank as the run requires, using the variables that launchers
set. It does not start MPI and imports only two modules, so a thousand ranks start in seconds,
whereas the real program would take minutes. A rank that finds a fault writes FAILED.rank<k>.json;
the first one writes result.json.
"""

from __future__ import annotations

import os
import sys

# importing it from typing would cost each rank the import
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

RANK = (
    "SLURM_PROCID",
    "PMI_RANK",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
)
NUM_RANKS = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "FLUX_JOB_SIZE",
)
LOCAL_RANK = (
    "SLURM_LOCALID",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
)
NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "FLUX_JOB_NNODES")
GPUS_ON_NODE = ("SLURM_GPUS_ON_NODE",)
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
WRONG_PLACE = 2


def main(argv: Sequence[str]) -> int:
    """Check this rank's place; return 0, or 2 if it is not the required one."""
    if len(argv) != 4 or not all(word.isdecimal() for word in argv[1:]):
        print(
            "usage: placement_check.py RUN_FOLDER RANKS RANKS_PER_NODE GPUS_PER_NODE",
            file=sys.stderr,
        )
        return WRONG_PLACE
    folder, (ranks, per_node, gpus) = argv[0], (int(word) for word in argv[1:])
    rank = _number(os.environ, RANK) or 0
    node = os.uname().nodename
    fault = fault_of(os.environ, ranks, per_node, gpus)
    if fault is not None:
        from datetime import UTC, datetime

        print(
            f"gems: rank {rank} on node {node} is in the wrong place: {fault}",
            file=sys.stderr,
            flush=True,
        )
        _write(
            os.path.join(folder, f"FAILED.rank{rank:04d}.json"),
            {
                "rank": rank,
                "node": node,
                "pid": os.getpid(),
                "step": -1,
                "action": "start",
                "cause": fault,
                "exit_code": WRONG_PLACE,
                "utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
            },
        )
        return WRONG_PLACE
    if rank == 0:
        _write(
            os.path.join(folder, "result.json"),
            {
                "num_steps": 0,
                "num_ranks": ranks,
                "num_nodes": _number(os.environ, NUM_NODES) or 1,
                "node": node,
                "visible_gpus": next(
                    (os.environ[name] for name in VISIBLE if name in os.environ), None
                ),
                "gpus_on_node": _number(os.environ, GPUS_ON_NODE),
            },
        )
    return 0


def fault_of(environment: Mapping[str, str], ranks: int, per_node: int, gpus: int) -> str | None:
    """Return the fault of the place of the rank with these variables, or None.

    The run requires a world of `ranks`, with `per_node` of them on a node, and `gpus` of a node's
    GPUs, or 0 for none. Without a list of visible GPUs, a rank sees all GPUs of its node.
    """
    rank = _number(environment, RANK)
    size = _number(environment, NUM_RANKS)
    local = _number(environment, LOCAL_RANK)
    nodes = _number(environment, NUM_NODES)
    if rank is None or size is None:
        return "the launcher says neither rank nor world size: none of " + ", ".join(
            (*RANK, *NUM_RANKS)
        )
    if size != ranks:
        return f"it is rank {rank} of {size}, and the run wants {ranks}"
    if rank >= size:
        return f"it is rank {rank}, and the world size is {size}"
    if local is not None and local >= per_node:
        return f"it is rank {local} on its node, and the run wants {per_node} a node"
    if nodes is not None and nodes != -(-ranks // per_node):
        return f"the ranks are on {nodes} nodes, and the run wants {-(-ranks // per_node)}"
    if not gpus:
        return None
    listed = next((environment[name] for name in VISIBLE if name in environment), None)
    on_node = None
    if listed is None:
        on_node = _number(environment, GPUS_ON_NODE)
    elif (count := len([word for word in listed.split(",") if word])) not in (1, gpus):
        return (
            f"it sees {count} GPUs ({listed!r}), and the run wants {gpus} of a node, or one a rank"
        )
    if on_node is not None and on_node < gpus:
        return f"its node has {on_node} GPUs for this job, and the run wants {gpus}"
    return None


def _number(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    text = next((environment[name] for name in names if name in environment), "")
    return int(text) if text.isdecimal() else None


def _write(path: str, document: dict[str, Any]) -> None:
    """Write a JSON file that appears complete or not at all.

    Modules that few ranks need are imported only by these ranks.
    """
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
