"""Habits of sites that the mini cluster lacks, as stand-ins before its commands.

Runs that users touch meanwhile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from gems.cli.framework import main
from gems.runs.folder import RunFolder
from jobs.__main__ import VERBS
from tests.helpers.fault_runs import EMULATED
from tests.helpers.fault_table import note
from tests.helpers.mini_runs import end_of, job_fields, wait_until
from tests.helpers.processes import ROOT

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.cases,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("no_job_is_left"),
]
HELD = "+cluster.sbatch.hold=true"
SHORT = [*EMULATED, "train.steps=3", "cluster.nodes=1", "cluster.ranks_per_node=4"]
# A second cluster, whose jobs its commands know with --clusters alone.
ON_SERIAL = """
words=() seen=
for word; do case $word in --clusters=serial) seen=1 ;; *) words+=("$word") ;; esac; done
if [ "$seen" ] || [ NAME != squeue ]; then exec REAL "${words[@]}"; fi
case " $* " in *" --noheader "*) exit ;; esac
echo "JOBID|STATE|COMMAND"
"""
SUBMIT_TO_SERIAL = """
case " $* " in *" --test-only "*) grep -v "SBATCH --clusters" | REAL --test-only; exit ;; esac
grep -v "SBATCH --clusters" "$1" > "$1.serial.sh"
echo "This is job 12 of at most 100"
echo "$(REAL "$1.serial.sh") on cluster serial"
"""
NO_ARRAYS = """
case " $* " in *" --test-only "*) exec REAL "$@" ;; esac
if grep -q "SBATCH --array" "$1"; then echo "sbatch: error: no job arrays on this system" >&2; exit 1; fi
exec REAL "$@"
"""
BANNER = """
case " $* " in *" --test-only "*) exec REAL "$@" ;; esac
echo "This is job 12 of at most 100"; REAL "$@"; echo "Submitted batch job 13 was your last one"
"""


class Site:
    """Commands before those of the mini cluster, and the command line in this process."""

    def __init__(self, bin: Path, runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.bin = bin
        self.runs = runs
        self.capfd = capfd

    def has(self, name: str, script: str) -> None:
        """Put a command before the real one, which the script calls REAL."""
        path = self.bin / name
        real = str(shutil.which(name))
        path.write_text("#!/bin/bash\n" + script.replace("REAL", real).replace("NAME", name))
        path.chmod(0o755)

    def jobs(self, *words: str, code: int = 0) -> str:
        """Run a command of jobs and return what it said."""
        self.capfd.readouterr()
        ended = main("jobs", VERBS, [*words])
        out, err = self.capfd.readouterr()
        assert ended == code, out + err
        return out + err

    def submit(self, *words: str) -> tuple[str, RunFolder]:
        """Submit a short run."""
        said = self.jobs("submit", *SHORT, f"runs_dir={self.runs}", *words)
        lines = dict(
            line.split(maxsplit=1)
            for line in said.splitlines()
            if line.startswith(("job ", "folder "))
        )
        return lines["job"].partition(":")[0], RunFolder(Path(lines["folder"]))


@pytest.fixture
def site(
    mini_slurm: MiniSlurm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Site:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return Site(tmp_path / "bin", tmp_path / "runs", capfd)


def test_a_second_cluster(site: Site, mini_slurm: MiniSlurm) -> None:
    for name, script in (
        ("squeue", ON_SERIAL),
        ("scancel", ON_SERIAL),
        ("scontrol", ON_SERIAL),
        ("sinfo", ON_SERIAL),
        ("sbatch", SUBMIT_TO_SERIAL),
    ):
        site.has(name, script)
    words = [HELD, "+cluster.sbatch.clusters=serial"]
    job, folder = site.submit(*words)
    assert job.endswith("@serial")
    assert "JobHeldUser: `scontrol --clusters=serial release" in site.jobs(
        "status", str(folder.path)
    )
    refused = site.jobs("submit", *SHORT, f"runs_dir={site.runs}", *words, code=2)
    assert f"belongs to job {job}, which has not ended" in refused
    said = site.jobs("cancel", "--yes", str(folder.path))
    assert f"cancelled, job {job}" in said
    assert job_fields(mini_slurm, job.partition("@")[0])["JobState"] == "CANCELLED"
    note("second cluster", "cancelled", said, 0)


def test_arrays_are_refused(site: Site, tmp_path: Path) -> None:
    site.has("sbatch", NO_ARRAYS)
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump({"base": [*SHORT, HELD], "axes": {"seed": [1, 2]}}))
    said = site.jobs("study", f"study={path}", f"runs_dir={site.runs}")
    (line,) = [line for line in said.splitlines() if "cluster.array=false" in line]
    assert "no job arrays on this system" in line
    ids = {folder.read_status()["job_id"] for folder in map(RunFolder, site.runs.glob("*-*"))}
    assert len(ids) == 2 and not any("_" in job_id for job_id in ids)
    note("arrays refused", "submitted", line, 0)


def test_a_banner(site: Site, mini_slurm: MiniSlurm) -> None:
    site.has("sbatch", BANNER)
    job, _ = site.submit(HELD)
    assert mini_slurm.run("squeue", "--noheader", "--format=%i").stdout.split() == [job]
    note("banner of the site", "pending", f"job {job}", 0)


def test_a_finished_run_is_requeued_and_submitted_again(site: Site, mini_slurm: MiniSlurm) -> None:
    job, folder = site.submit()
    assert end_of(folder, 60)["state"] == "finished"
    job_fields(mini_slurm, job)

    def contents() -> dict[str, bytes]:
        own = [
            path for path in folder.path.rglob("*") if path.is_file() and path.parent != folder.logs
        ]
        return {str(path): path.read_bytes() for path in own}

    before = contents()
    assert mini_slurm.run("scontrol", "requeue", job).returncode == 0
    log = folder.logs / f"{job}_0_log.out"

    def has_run() -> bool:
        # a job that starts before its node has cleared the first start away fails there, before its
        # script runs
        if "JobState=FAILED" in mini_slurm.run("scontrol", "show", "job", job).stdout:
            mini_slurm.run("scontrol", "requeue", job)
        mini_slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        return "has finished: nothing is left to do" in log.read_text()

    wait_until(
        has_run,
        80,
        "it does not start",
        lambda: str(mini_slurm.run("scontrol", "show", "job", job).stdout) + log.read_text(),
    )
    assert job_fields(mini_slurm, job)["JobState"] == "COMPLETED"
    assert contents() == before
    said = site.jobs("submit", *SHORT, f"runs_dir={site.runs}")
    assert "has finished, and nothing is submitted" in said and contents() == before
    note("finished run requeued", "finished", said, 0)


def test_the_folder_of_a_job_is_moved(site: Site, mini_slurm: MiniSlurm) -> None:
    job, folder = site.submit(HELD)
    moved = RunFolder(folder.path.rename(folder.path.with_name("moved-12345678")))
    mini_slurm.run("scontrol", "release", job)
    assert job_fields(mini_slurm, job)["JobState"] == "FAILED"
    said = site.jobs("diagnose", str(moved.path))
    assert f"the run folder was moved while its job waited, from {folder.path}" in said
    assert "To change: move it back, or submit it" in said
    note("folder moved while queued", "failed", said.splitlines()[0])


def test_a_user_without_a_name(site: Site, mini_slurm: MiniSlurm) -> None:
    words = ["unshare", "-U", "--map-user=4242", "--map-group=4242"]
    if subprocess.run([*words, "true"], capture_output=True).returncode != 0:
        pytest.skip("no user namespaces here")
    argv = [
        *words,
        sys.executable,
        "-m",
        "jobs",
        "submit",
        *SHORT,
        f"runs_dir={site.runs}",
        "--dry-run",
    ]
    ended = subprocess.run(
        argv, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert "#SBATCH --job-name" in ended.stdout and "Traceback" not in ended.stderr
    note("unknown uid", "shown", ended.stderr, 0)
