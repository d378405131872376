"""scripts/mini_slurm.sh: life cycle, nodes, MPI over PMI-2, and what it refuses."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = pytest.mark.slurm

HELLO = """
import os
os.environ["MPIR_CVAR_CH4_NETMOD"] = "ofi"  # gems.engine.transport.environment says why
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank)
print("hello", world.rank, world.size, total, MPI.Get_processor_name(), flush=True)
"""
# Freed memory full of noise is what MPI's own memory is then made of.
FROM_NOISE = """
import os
noise = [os.urandom(size) for size in (256, 512, 1024, 2048, 4096, 8192, 16384, 65536) for _ in range(300)]
noise = noise[::7]
from gems.engine.transport.mpi import world
print("hello", world().rank, world().size, world().allreduce(world().rank), flush=True)
"""


def processes_naming(text: str) -> list[str]:
    """Return the command lines of live processes that have `text` in their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in arguments:
            found.append(arguments)
    return found


def test_life_cycle(other_cluster: MiniSlurm) -> None:
    """Up, up again, env, status, a job with fake GPUs, down with a job running, down again."""
    export = f"export SLURM_CONF={other_cluster.conf}"
    assert other_cluster.script("status").returncode == 3
    assert other_cluster.script("env").returncode == 3

    up = other_cluster.script("up", "--nodes=1", "--cpus=3", "--gpus=2")
    assert up.returncode == 0, up.stderr
    assert up.stdout.splitlines()[-1] == export
    assert other_cluster.script("env").stdout == export + "\n"
    again = other_cluster.script("up")
    assert again.returncode == 0
    assert "already up: nodes=1 cpus=3 gpus=2" in again.stderr
    assert again.stdout.splitlines()[-1] == export

    node = other_cluster.run(
        "sinfo", "--noheader", "--Node", "--format=%N %c %G %T %P"
    ).stdout.split()
    assert node == ["n1", "3", "gpu:2", "idle", "debug*"]
    gpus = other_cluster.run("srun", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES")
    assert gpus.stdout == "0,1\n", gpus.stderr

    submitted = other_cluster.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600")
    job = submitted.stdout.strip()
    assert job.isdigit(), submitted.stderr
    started = other_cluster.run("srun", f"--dependency=after:{job}", "true")
    assert started.returncode == 0, started.stderr
    status = other_cluster.script("status")
    assert status.returncode == 0
    assert "PARTITION" in status.stdout
    assert job in status.stdout

    assert processes_naming(str(other_cluster.folder))
    down = other_cluster.script("down")
    assert down.returncode == 0, down.stderr
    assert not other_cluster.folder.exists()
    assert processes_naming(str(other_cluster.folder)) == []
    assert other_cluster.script("status").returncode == 3
    assert other_cluster.script("down").returncode == 0


def test_comes_back_after_a_crash(other_cluster: MiniSlurm) -> None:
    """A controller that was killed is seen by status.

    Up then starts a fresh cluster in the same folder.
    """
    assert other_cluster.script("up", "--nodes=1").returncode == 0
    pid = int((other_cluster.folder / "run" / "slurmctld.pid").read_text())
    os.kill(pid, 9)
    assert other_cluster.script("status").returncode == 3
    up = other_cluster.script("up", "--nodes=2")
    assert up.returncode == 0, up.stderr
    assert other_cluster.settings()["nodes"] == "2"
    assert other_cluster.script("status").returncode == 0
    running = processes_naming(str(other_cluster.conf))
    assert sum("slurmd -f" in line for line in running) == 2


def test_works_where_host_names_cannot_be_set(other_cluster: MiniSlurm, short_tmp: Path) -> None:
    """A machine that forbids UTS namespaces gets nodes that share its host name."""
    refuses = short_tmp / "refuses"
    refuses.mkdir()
    (refuses / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (refuses / "unshare").chmod(0o755)
    up = other_cluster.script(
        "up", env=dict(os.environ, PATH=f"{refuses}{os.pathsep}{os.environ['PATH']}")
    )
    assert up.returncode == 0, up.stderr
    assert not other_cluster.has_own_host_names()
    nodes = other_cluster.run(
        "srun", "-N2", "-n2", "--ntasks-per-node=1", "printenv", "SLURMD_NODENAME"
    )
    assert sorted(nodes.stdout.split()) == ["n1", "n2"], nodes.stderr


def test_nodes_have_their_own_host_names(mini_slurm: MiniSlurm) -> None:
    """Four tasks on two nodes report the nodes' names as host names."""
    if not mini_slurm.has_own_host_names():
        pytest.skip("this machine does not allow UTS namespaces")
    srun = mini_slurm.run("srun", "-N2", "-n4", "--ntasks-per-node=2", "uname", "-n")
    assert sorted(srun.stdout.split()) == ["n1", "n1", "n2", "n2"], srun.stderr


def test_mpi_over_pmi2(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Four ranks on two nodes form one world and reduce over it."""
    program = tmp_path / "hello.py"
    program.write_text(HELLO)
    srun = mini_slurm.run(
        *("srun", "-N2", "-n4", "--ntasks-per-node=2", "--mpi=pmi2", "--kill-on-bad-exit=1"),
        *(sys.executable, "-m", "mpi4py", str(program)),
    )
    assert srun.returncode == 0, srun.stderr
    lines = sorted(
        line.split()[1:] for line in srun.stdout.splitlines() if line.startswith("hello ")
    )
    assert [line[:3] for line in lines] == [[str(rank), "4", "6"] for rank in range(4)]
    if mini_slurm.has_own_host_names():
        assert [line[3] for line in lines] == ["n1", "n1", "n2", "n2"]


def test_ranks_find_each_other_whatever_lies_in_memory(mini_slurm: MiniSlurm) -> None:
    """The engine starts MPI over PMI-2 where noise lies behind the addresses that MPI exchanges."""
    srun = mini_slurm.run(
        *(
            "srun",
            "-N2",
            "-n4",
            "--ntasks-per-node=2",
            "--mpi=pmi2",
            "--kill-on-bad-exit=1",
            "--time=1",
        ),
        *(sys.executable, "-c", FROM_NOISE),
        cwd=Path(__file__).resolve().parents[2],
    )
    assert srun.returncode == 0, srun.stderr
    lines = sorted(line for line in srun.stdout.splitlines() if line.startswith("hello "))
    assert lines == [f"hello {rank} 4 6" for rank in range(4)]


def test_slurm_conf_is_set_for_tests(mini_slurm: MiniSlurm) -> None:
    """A test that takes the cluster can call SLURM's commands without more ado."""
    assert os.environ["SLURM_CONF"] == str(mini_slurm.conf)


def test_missing_packages_are_named(
    cluster_in: Callable[[Path], MiniSlurm], tmp_path: Path
) -> None:
    """Where SLURM is not installed, `up` says in one line what to install and exits 2."""
    for program in ("bash", "realpath"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    up = cluster_in(Path("/tmp/never-made")).script("up", env={"PATH": str(tmp_path)})
    assert up.returncode == 2
    assert up.stderr.count("\n") == 1
    assert "apt-get install -y --no-install-recommends slurm-wlm munge" in up.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "--nodes=0"], "--nodes=0: not a whole number from 1"),
        (["up", "--cpus", "many"], "--cpus=many"),
        (["up", "--what=1"], "option '--what' is unknown; allowed: --nodes"),
        (["start"], "verb 'start' is unknown; allowed: up, down, status, env"),
        (["up", "--dir=/tmp/" + "x" * 80], "at most 60"),
    ],
)
def test_bad_usage(
    arguments: list[str], says: str, cluster_in: Callable[[Path], MiniSlurm], short_tmp: Path
) -> None:
    """A wrong command line ends with exit code 2 and one line."""
    result = cluster_in(short_tmp / "unused").script(*arguments)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


def test_folders_of_others_are_left_alone(
    slurm_installed: None, cluster_in: Callable[[Path], MiniSlurm], short_tmp: Path
) -> None:
    """Neither up nor down touches a folder that up did not make."""
    folder = short_tmp / "mine"
    folder.mkdir()
    (folder / "kept").write_text("x")
    for verb in ("up", "down"):
        assert cluster_in(folder).script(verb).returncode == 2
    assert (folder / "kept").read_text() == "x"
