"""What MPICH is told before it starts, by who started the ranks and how it was built."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from gems.engine.transport.environment import NETMOD, mpich_settings

BY_SLURM = {"PMI_FD": "11", "SLURM_MPI_TYPE": "pmi2"}
WHEEL = (
    "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH configure:   "
    " --with-pm=hydra\n"
)


def test_mpich_5_under_pmi2_takes_the_transport_with_short_addresses():
    assert mpich_settings(WHEEL, BY_SLURM) == {NETMOD: "ofi"}


@pytest.mark.parametrize(
    ("library", "environment"),
    [
        (WHEEL, {}),
        (WHEEL, {"PMI_FD": "11"}),
        (WHEEL, {"SLURM_MPI_TYPE": "pmi2"}),
        (WHEEL, BY_SLURM | {"SLURM_MPI_TYPE": "pmix"}),
        (WHEEL, BY_SLURM | {NETMOD: "ucx"}),
        (WHEEL, BY_SLURM | {"MPICH_CH4_NETMOD": "ucx"}),
        (WHEEL.replace("5.0.2", "4.3.2"), BY_SLURM),
        (WHEEL.replace("ucx ofi", "ofi ucx"), BY_SLURM),
        (WHEEL.replace("ucx ofi", "ucx"), BY_SLURM),
        (WHEEL.replace("ch4:ucx ofi", "ch3:nemesis"), BY_SLURM),
        ("Open MPI v5.0.7, package: Open MPI", BY_SLURM),
    ],
)
def test_anything_else_is_left_as_it_is(library, environment):
    assert mpich_settings(library, environment) == {}


def test_the_installed_mpi_describes_itself_as_expected():
    library = MPI.Get_library_version()
    if not library.startswith("MPICH Version:"):
        pytest.skip("this MPI is no MPICH")
    assert "MPICH Device:" in library
