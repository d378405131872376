"""What MPICH must be told before it starts, so that its ranks find each other under SLURM."""

from __future__ import annotations

import re
from collections.abc import Mapping

NETMOD = "MPIR_CVAR_CH4_NETMOD"
CHOSEN = (NETMOD, "MPICH_CH4_NETMOD", "MPIR_PARAM_CH4_NETMOD")  # MPICH reads a variable of its own under each


def settings(library: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that this MPI needs where these ranks were started.

    MPICH 5's UCX transport tells every rank's address as the 4096 bytes of memory that begin with it, packed by runs
    of equal bytes, in lines of up to 1100 characters; SLURM's pmi2 plugin reads no line beyond 1024. So MPI starts or
    hangs with what lies in memory behind the address. The OFI transport tells the address alone.

    Args:
        library: The MPI library's own description, as MPI_Get_library_version gives it.
        environment: The variables of this process.
    """
    is_by_slurm = "PMI_FD" in environment and environment.get("SLURM_MPI_TYPE") == "pmi2"
    version = re.match(r"MPICH Version:\s*(\d+)\.", library)
    device = re.search(r"^MPICH Device:\s*ch4:(.+)$", library, re.MULTILINE)
    if not is_by_slurm or version is None or device is None or any(name in environment for name in CHOSEN):
        return {}
    takes_ucx_first = device[1].split()[0] == "ucx"
    if int(version[1]) < 5 or not takes_ucx_first or "ofi" not in device[1].split():
        return {}
    return {NETMOD: "ofi"}
