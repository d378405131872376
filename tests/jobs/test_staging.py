"""Files that a job copies to its nodes before the ranks start."""

from __future__ import annotations

from pathlib import Path

import pytest

from gems.runs.folder import RunFolder
from jobs.batch.launchers import command
from jobs.batch.resources import job_spec
from jobs.launch.launch import staged
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Capture, MonkeyPatch, Resolved, refused

WORDS = ["cluster=mini", "cluster.stage_above_nodes=1", "cluster.stage_dir=/local/"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> RunFolder:
    """Return the folder of a run whose job, 41, this process is in."""
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    folder = RunFolder(tmp_path / "a run")
    folder.provenance.mkdir(parents=True)
    folder.code_zip.touch()
    return folder


def test_ranks_run_the_copy_of_the_code_which_is_removed(
    resolved: Resolved, slurm: FakeSlurm, folder: RunFolder
) -> None:
    slurm.says("sbcast")
    slurm.says("srun")
    with staged(job_spec(resolved(*WORDS)), folder) as job:
        argv = command(job, folder)
        assert slurm.asked() == [f"sbcast --force {folder.code_zip} /local/gems-41-code.zip"]
    assert argv[-3:] == ["/local/gems-41-code.zip", "gems.engine.run", str(folder.path)]
    assert slurm.asked()[1:] == [
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 --mpi=none rm -f"
        " /local/gems-41-code.zip"
    ]


def test_copies_are_removed_after_an_error_too(
    resolved: Resolved, slurm: FakeSlurm, folder: RunFolder
) -> None:
    slurm.says("sbcast")
    slurm.says("srun")
    with pytest.raises(KeyboardInterrupt), staged(job_spec(resolved(*WORDS)), folder):
        raise KeyboardInterrupt
    assert slurm.asked()[-1].endswith("rm -f /local/gems-41-code.zip")


@pytest.mark.parametrize("container", ["apptainer", "pyxis"])
def test_an_image_is_copied_and_the_copy_of_the_code_seen_in_it(
    resolved: Resolved, slurm: FakeSlurm, folder: RunFolder, tmp_path: Path, container: str
) -> None:
    slurm.says("sbcast")
    slurm.says("srun")
    (tmp_path / "my.sif").touch()
    image = [f"cluster.container={container}", f"cluster.container_image={tmp_path / 'my.sif'}"]
    with staged(job_spec(resolved(*WORDS, *image, "cluster.stage=[image,code]")), folder) as job:
        line = " ".join(command(job, folder))
    assert "/local/gems-41-image.sif" in line and "my.sif" not in line
    seen = "/local/gems-41-code.zip"
    assert (f"--bind={seen}" if container == "apptainer" else f",{seen}:{seen} ") in line
    assert line.endswith(f"python3 {seen} gems.engine.run {folder.path}")
    assert slurm.asked()[-1].endswith("rm -f /local/gems-41-image.sif /local/gems-41-code.zip")


def test_what_cannot_be_copied_is_read_where_it_is(
    resolved: Resolved, slurm: FakeSlurm, folder: RunFolder, capsys: Capture
) -> None:
    slurm.says(
        "sbcast", error="sbcast: error: REQUEST_FILE_BCAST(n2): No space left on device", code=1
    )
    with staged(job_spec(resolved(*WORDS)), folder) as job:
        assert str(folder.code_zip) in command(job, folder)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"jobs: cluster.stage: {folder.code_zip} is read by all nodes where it is (sbcast failed: "
    )
    assert len(slurm.asked()) == 1


@pytest.mark.parametrize(
    "word", ["cluster.stage_above_nodes=2", "cluster.stage=[]", "cluster.archive_code=false"]
)
def test_small_jobs_and_those_with_nothing_to_copy_ask_for_nothing(
    resolved: Resolved, slurm: FakeSlurm, folder: RunFolder, word: str
) -> None:
    with staged(job_spec(resolved(*WORDS, word)), folder) as job:
        assert job.staged == ()
    assert slurm.asked() == []


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("cluster.stage=[data]", "may have code and image"),
        ("cluster.stage_dir=$TMPDIR", "must be an absolute path"),
    ],
)
def test_bad_values_are_one_line(resolved: Resolved, word: str, says: str) -> None:
    with refused(rf"^{word.split('=')[0]}(\[0\])?=.*{says}"):
        resolved(*WORDS[:1], word)
