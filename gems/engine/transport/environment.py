"""What launchers and MPI libraries read or set in the environment of a rank, before MPI starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

RANK_VARIABLES = (
    "PMI_RANK",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PALS_RANKID",
    "SLURM_PROCID",
    "FLUX_TASK_RANK",
)
# SLURM's last: it is that of the job's one task where a user's own mpiexec starts the ranks
LOCAL_RANK_VARIABLES = (
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
    "FLUX_TASK_LOCAL_ID",
)
NETMOD = "MPIR_CVAR_CH4_NETMOD"
NETMOD_VARIABLES = (NETMOD, "MPICH_CH4_NETMOD", "MPIR_PARAM_CH4_NETMOD")  # MPICH reads each of them


def launched_rank() -> int:
    """Return this process's rank as its launcher numbers it, known also before MPI starts.

    0 if none does.
    """
    return next(
        (int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, "").isdecimal()),
        0,
    )


def local_rank() -> int:
    """Return the number of this rank on its node as its launcher numbers it; 0 if none does."""
    return next((int(os.environ[name]) for name in LOCAL_RANK_VARIABLES if name in os.environ), 0)


def mpich_settings(library: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that this MPI library needs in the environment of its ranks.

    The environment is the one in which the ranks were started. MPICH 5's UCX transport publishes
    each rank's address as the 4096 bytes of memory that begin with it, packed by runs of equal
    bytes, in lines of up to 1100 characters. SLURM's pmi2 plugin reads at most 1024 characters of a
    line. So MPI starts or hangs depending on the memory after the address. The OFI transport
    publishes the address alone.
    """
    is_by_slurm = "PMI_FD" in environment and environment.get("SLURM_MPI_TYPE") == "pmi2"
    version = re.match(r"MPICH Version:\s*(\d+)\.", library)
    device = re.search(r"^MPICH Device:\s*ch4:(.+)$", library, re.MULTILINE)
    if (
        not is_by_slurm
        or version is None
        or device is None
        or any(name in environment for name in NETMOD_VARIABLES)
    ):
        return {}
    takes_ucx_first = device[1].split()[0] == "ucx"
    if int(version[1]) < 5 or not takes_ucx_first or "ofi" not in device[1].split():
        return {}
    return {NETMOD: "ofi"}
