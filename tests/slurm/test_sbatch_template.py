"""scripts/gems.sbatch on the mini cluster, with stand-ins for the programs that it calls."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = pytest.mark.slurm

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TEMPLATE = SCRIPTS / "gems.sbatch"

JOBS = """
import pathlib, sys
verb, arguments = sys.argv[1], sys.argv[2:]
home = pathlib.Path.cwd()
if verb == "prepare":
    if "bad=1" in arguments:
        sys.exit(2)
    (home / "prepared").write_text(" ".join(arguments))
    (home / "run").mkdir()
    print(home / "run")
elif verb == "collect":
    (home / "collected").write_text(" ".join(arguments))
"""
ENGINE = """
import os, pathlib, sys
os.environ["MPIR_CVAR_CH4_NETMOD"] = "ofi"  # gems.engine.transport.environment says why
from mpi4py import MPI
keys = ["OMP_NUM_THREADS", "SRUN_CPUS_PER_TASK", "HDF5_USE_FILE_LOCKING"]
words = [MPI.COMM_WORLD.size, os.environ["SLURMD_NODENAME"], *(os.environ[key] for key in keys)]
pathlib.Path(sys.argv[1], f"rank{MPI.COMM_WORLD.rank}").write_text(" ".join(map(str, words)))
MPI.COMM_WORLD.Barrier()
sys.exit(int(os.environ.get("STAND_IN_RC", "0")))
"""
MAPS = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0):
    print("mapped", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder with stand-ins for `python -m jobs` and `python -m gems.engine.run`."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__main__.py").write_text(JOBS)
    (tmp_path / "gems" / "engine").mkdir(parents=True)
    (tmp_path / "gems" / "engine" / "run.py").write_text(ENGINE)
    return tmp_path


@pytest.fixture
def stale_files(mini_slurm: MiniSlurm) -> Iterator[tuple[Path, Path]]:
    """Yield two old shared-memory files named as MPICH does: one nobody uses, one a job has mapped."""
    prefix = f"/dev/shm/mpich_shm_gemstest{os.getpid()}"
    stale = Path(prefix + "_stale")
    mapped = Path(prefix + "_mapped")
    srun = ["srun", "-n1", "--immediate=30", sys.executable, "-c", MAPS, str(mapped)]
    try:
        for path in (stale, mapped):
            path.write_bytes(bytes(mmap.PAGESIZE))
            os.utime(
                path, (time.time() + 600,) * 2
            )  # runs of other tests remove an old file that nobody maps yet
        # A process outside of the cluster would not do: its maps cannot be read from a user
        # namespace.
        with subprocess.Popen(
            srun, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as job:
            assert job.stdout is not None
            assert job.stdout.readline() == "mapped\n"
            for path in (stale, mapped):
                os.utime(path, (time.time() - 600,) * 2)
            yield stale, mapped
    finally:
        for path in (stale, mapped):
            path.unlink(missing_ok=True)


def exit_code(cluster: MiniSlurm, home: Path, *overrides: str, **environment: str) -> int:
    """Return the exit code of the template's job, with `home` as the repository's folder.

    -1 for a signal.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    sbatch = cluster.run(
        *("sbatch", "--parsable", f"--output={home}/out", str(TEMPLATE), *overrides),
        env={"PATH": path, "VENV": "none", "GEMS_HOME": str(home), "PYTHONPATH": "", **environment},
    )
    job = sbatch.stdout.strip()
    assert job.isdigit(), sbatch.stderr
    # Faster than sbatch --wait, which asks every 10 s.
    end = cluster.run("srun", f"--dependency=afterany:{job}", "true", timeout_s=120)
    assert end.returncode == 0, end.stderr
    described = cluster.run("scontrol", "show", "job", job).stdout
    found = re.search(r"\bExitCode=(\d+):(\d+)", described)
    assert found, described
    return int(found[1]) if found[2] == "0" else -1


def test_runs_prepare_ranks_and_collect(
    mini_slurm: MiniSlurm, home: Path, stale_files: tuple[Path, Path]
) -> None:
    """Four ranks on two nodes form one world in the prepared folder.

    Only unused shared memory is removed.
    """
    code = exit_code(mini_slurm, home, "parallel.partitions=4", "a=[1, 2]", CONF="gems_mast")
    assert code == 0, (home / "out").read_text()
    assert (home / "prepared").read_text() == "experiment=gems_mast parallel.partitions=4 a=[1, 2]"
    assert (home / "collected").read_text() == str(home / "run")
    ranks = [(home / "run" / f"rank{rank}").read_text() for rank in range(4)]
    assert ranks == [f"4 n{1 + rank // 2} 1 1 FALSE" for rank in range(4)]
    stale, mapped = stale_files
    assert not stale.exists()
    assert mapped.exists()


def test_keeps_the_exit_code_of_the_ranks(mini_slurm: MiniSlurm, home: Path) -> None:
    """A failure of the ranks is the job's exit code, and what they left is collected all the same."""
    code = exit_code(mini_slurm, home, STAND_IN_RC="4")
    assert code == 4, (home / "out").read_text()
    assert (home / "prepared").read_text() == "experiment=quickstart"
    assert (home / "collected").exists()


def test_stops_at_a_bad_configuration(mini_slurm: MiniSlurm, home: Path) -> None:
    """No rank starts when the configuration is refused; the job has its exit code."""
    code = exit_code(mini_slurm, home, "bad=1")
    assert code == 2, (home / "out").read_text()
    assert not (home / "run").exists()
    assert not (home / "collected").exists()


def test_header_is_accepted(mini_slurm: MiniSlurm) -> None:
    """The template as it stands asks for what a cluster of 2 nodes can give."""
    test_only = mini_slurm.run("sbatch", "--test-only", str(TEMPLATE))
    assert test_only.returncode == 0, test_only.stderr


@pytest.mark.parametrize("name", ["gems.sbatch", "mini_slurm.sh"])
def test_scripts_parse(name: str) -> None:
    """Both scripts are valid for bash, and shellcheck, where there is one, has nothing to say."""
    checks = [["bash", "-n", name]]
    if shutil.which("shellcheck"):
        checks.append(["shellcheck", name])
    for check in checks:
        result = subprocess.run(check, cwd=SCRIPTS, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr
