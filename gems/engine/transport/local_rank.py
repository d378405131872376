"""The place of a rank on its node, as its launcher says it."""

from __future__ import annotations

import os

LOCAL_RANK_VARIABLES = (
    "SLURM_LOCALID",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
)


def local_rank() -> int:
    """Return the place of this rank on its node, from whichever launcher says it; 0 when none does."""
    for name in LOCAL_RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    return 0
