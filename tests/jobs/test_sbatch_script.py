"""The batch script and its submission, with a stand-in for sbatch."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gems.cli.framework import Options
from gems.config.checkpoint_schema import MANIFEST_JSON
from gems.config.schema import RunSpec
from gems.errors import ConfigError, TryLaterError
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.run_module import RUN_MODULE
from jobs.batch.resources import job_spec
from jobs.cli.submit import submit
from jobs.schedulers.scheduler import SCHEDULERS
from jobs.schedulers.slurm import SBATCH_OPTIONS
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Capture, MonkeyPatch, Resolved, Tiny, refused, script_of

SBATCH = """
case "$*" in *--test-only*) echo 'sbatch: Job 41 to start at 2026-01-01T00:00:00' >&2; exit ;; esac
if [ -e {here}/refuse ]; then
    echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2; exit 1
fi
/bin/cp "$1" {here}/script; /usr/bin/env > {here}/environment
echo Submitted batch job 41
"""
SQUEUE = """
case "$*" in *--jobs=41) echo 'JOBID|STATE|COMMAND'
if [ -e {here}/running ]; then echo '41|RUNNING|job.sh'; fi ;;
*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;; esac
"""


@pytest.fixture
def cluster(slurm: FakeSlurm) -> Path:
    """A folder in which sbatch and squeue stand, and sbatch leaves what it was told."""
    for name, script in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        slurm.does(name, script.format(here=slurm.here))
    for name in ("scontrol", "sinfo", "sacctmgr"):
        slurm.says(name, error="Unable to contact slurm controller (connect failure)\n", code=1)
    return slurm.here


def directives(script: str) -> list[str]:
    return [
        line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")
    ]


@pytest.fixture
def on(resolved: Resolved, tmp_path: Path) -> Resolved:
    """Compose a run on the mini cluster, with some of its values changed."""

    def make(*overrides: str, **more: Any) -> RunSpec:
        spec = resolved("cluster=mini", *overrides)
        return replace(spec, runs_dir=str(tmp_path / "runs"), cluster=replace(spec.cluster, **more))

    return make


def test_the_batch_process_is_told_before_the_end(on: Resolved) -> None:
    """Not the ranks, as submitit's own --signal=USR2@90 does.

    A user's own signal and habits go before ours.
    """

    def ends(**cluster: Any) -> list[str]:
        script = script_of(on(**cluster))
        return [word for word in directives(script) if re.search("signal|requeue", word)]

    assert ends() == ["--requeue", "--signal=B:USR2@120"]
    assert ends(minutes=4, signal_before_end_s=120)[1:] == ["--signal=B:USR2@120"]
    assert ends(minutes=3, signal_before_end_s=120) == [
        "--requeue"
    ]  # it would come when the run has hardly begun
    assert ends(signal_before_end_s=0, max_requeues=0) == []
    short = on(minutes=3, signal_before_end_s=120)
    script = SCHEDULERS["slurm"].script(
        replace(job_spec(short), minutes=6), RunFolder.of(short)
    )  # of several runs
    assert "#SBATCH --signal=B:USR2@120\n" in script
    assert ends(sbatch={"signal": "B:TERM@60", "no_requeue": True}) == [
        "--no-requeue",
        "--signal=B:TERM@60",
    ]


def test_account_of_the_users_environment_is_shown(on: Resolved, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    assert "--account=mine" in directives(script_of(on()))
    assert "--account=theirs" in directives(script_of(on(account="theirs")))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nodes": 3}, r"^cluster\.sbatch\.nodes=3: must not be given here; set cluster\.nodes$"),
        ({"ntasks_per_node": 3}, r"cluster\.ranks_per_node"),
        ({"--time": 3}, r"cluster\.minutes"),
        ({"x y": 1}, "not the long name"),
        ({"q": {"a": 1}}, "must be one value"),
        ({"comment": "a\nrm -rf x"}, "must be printable"),
    ],
)
def test_sbatch_options_that_are_refused(options: dict[str, Any], text: str) -> None:
    with refused(text):
        SBATCH_OPTIONS.checked(options)


def test_sbatch_options_that_are_taken() -> None:
    given = {
        "qos": "high",
        "--exclusive": True,
        "mail_type": "END",
        "hold": False,
        "mem": 0,
        "gres": None,
    }
    assert SBATCH_OPTIONS.checked(given) == {
        "qos": "high",
        "exclusive": True,
        "mail-type": "END",
        "mem": 0,
    }


@pytest.mark.parametrize(
    ("change", "key"),
    [({"name": "50%j"}, "name"), ({"name": "a\\b"}, "name"), ({"runs_dir": "/r%t"}, "runs_dir")],
)
def test_paths_that_slurm_would_rewrite(
    resolved: Resolved, change: dict[str, str], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        script_of(replace(resolved("cluster=mini"), **change))
    assert caught.value.key == key


def test_a_variable_needs_a_name(on: Resolved) -> None:
    with refused(r"cluster\.environment\.A B"):
        script_of(on(environment={"A B": "1"}))


def test_dry_run_is_what_would_be_submitted(
    on: Resolved,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    spec = on(environment={"A": "1"})
    monkeypatch.setenv("PATH", str(tmp_path))  # a laptop: no sbatch, no srun
    assert submit(spec, Options(flags=frozenset({"--dry-run"}))) == 0
    script, said = capsys.readouterr()
    assert not (tmp_path / "runs").exists()
    assert "srun --nodes=2 --ntasks=4 --ntasks-per-node=2" in said
    assert (
        "nodes 2, tasks 4, tasks per node 2, CPUs per task 1, GPUs 0, minutes 10, GPU-hours 0"
        in said
    )
    assert submit(spec, Options(json=True, flags=frozenset({"--dry-run"}))) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["script"] == script
    figures = ("nodes", "tasks", "tasks_per_node", "gpus", "minutes", "gpu_hours")
    assert [shown[figure] for figure in figures] == [2, 4, 2, 0, 10, 0.0]
    assert (shown["command"][0], shown["run_folder"]) == ("srun", str(RunFolder.of(spec).path))

    cluster: Path = request.getfixturevalue("cluster")
    assert submit(spec, Options()) == 0
    assert (cluster / "script").read_text() == script


def test_submission(on: Resolved, cluster: Path, capsys: Capture, monkeypatch: MonkeyPatch) -> None:
    hidden = {
        "SLURM_JOB_ID": "7",
        "SLURM_CPU_BIND": "x",
        "SBATCH_PARTITION": "y",
        "PMI_RANK": "0",
        "SRUN_DEBUG": "1",
    }
    for name, value in {**hidden, "SLURM_CONF": "/etc/slurm.conf"}.items():
        monkeypatch.setenv(name, value)
    spec = on()
    assert submit(spec, Options()) == 0
    folder = RunFolder.of(spec)
    status = folder.read_status()
    assert (status["state"], status["job_id"]) == ("submitted", "41")
    environment = (cluster / "environment").read_text().splitlines()
    assert not {line.partition("=")[0] for line in environment} & hidden.keys()
    assert "SLURM_CONF=/etc/slurm.conf" in environment
    assert all(os.environ[name] == value for name, value in hidden.items())
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("job     41: nodes 2, tasks 4")
    assert f"gems-jobs logs -f {folder.path}\n" in out
    assert f"gems-jobs status {folder.path}\n" in out
    assert {
        path.name for path in folder.logs.iterdir() if path.is_file() and not path.is_symlink()
    } == {"41_submission.sh", "41_submitted.pkl"}


def test_submission_as_json(on: Resolved, cluster: Path, capsys: Capture) -> None:
    spec = on()
    assert submit(spec, Options(json=True)) == 0
    folder = RunFolder.of(spec)
    document = json.loads(capsys.readouterr().out)
    assert [row["check"] for row in document.pop("preflight") if row["ok"] is False] == []
    log = str(folder.logs / "ranks.log")
    assert document == {"job_id": "41", "chain": ["41"], "run_folder": str(folder.path), "log": log}


def test_refused_job_is_one_line_and_leaves_no_litter(
    on: Resolved, cluster: Path, capfd: Capture
) -> None:
    (cluster / "refuse").touch()
    spec = on()
    with refused(r"cluster=mini: sbatch refuses the job: .*Invalid partition name"):
        submit(spec, Options())
    assert capfd.readouterr() == ("", "")
    folder = RunFolder.of(spec)
    assert folder.read_status()["state"] == "prepared"
    assert list(folder.logs.iterdir()) == []
    (cluster / "refuse").unlink()
    assert submit(spec, Options()) == 0


def test_without_sbatch_nothing_is_prepared(
    on: Resolved, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(r"cluster\.scheduler=slurm: needs sbatch"):
        submit(on(), Options())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("state", ["submitted", "running", "failed"])
def test_a_folder_is_its_jobs_while_the_queue_has_it(
    on: Resolved, cluster: Path, state: str
) -> None:
    spec = on()
    submit(spec, Options())
    folder = RunFolder.of(spec)
    folder.write_status(state, job_id="41", host="n1", pid=1, cause="of the run")
    (cluster / "running").touch()
    with refused("belongs to job 41, which has not ended"):
        submit(spec, Options())
    assert folder.read_status()["state"] == state
    (cluster / "running").unlink()
    assert submit(spec, Options()) == 0  # it was cancelled, or lost with its node
    (kept,) = (folder.path / "attempts").iterdir()
    cause = json.loads((kept / "status.json").read_text())["cause"]
    assert cause == (
        "of the run"
        if state == "failed"
        else "the job left the queue: cancelled, lost or out of time"
    )


def test_a_queue_that_cannot_be_asked_releases_nothing(on: Resolved, cluster: Path) -> None:
    spec = on()
    submit(spec, Options())
    (cluster / "squeue").write_text(
        "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n"
    )
    with refused("belongs to job 41, and nobody can tell whether it has ended", TryLaterError):
        submit(spec, Options())
    assert submit(spec, Options(flags=frozenset({"--force"}))) == 0


def test_local_dry_run_is_the_launchers_line(
    resolved: Resolved, tmp_path: Path, capsys: Capture
) -> None:
    spec = replace(resolved(), runs_dir=str(tmp_path / "my runs"))
    assert submit(spec, Options(flags=frozenset({"--dry-run"}))) == 0
    out, err = capsys.readouterr()
    words = shlex.split(out)
    assert words[-4:] == [*RUN_MODULE, "gems.engine.run", str(RunFolder.of(spec).path)]
    assert words[words.index("-n") + 1] == "4"
    assert "tasks 4" in err and not (tmp_path / "my runs").exists()


@pytest.mark.cases
@pytest.mark.parametrize("words", [(), ("cluster=mini",)])
def test_a_dry_run_refuses_checkpoints_of_another_schema(
    resolved: Resolved, tmp_path: Path, words: tuple[str, ...]
) -> None:
    spec = replace(resolved(*words), runs_dir=str(tmp_path / "runs"))
    manifest = prepare(spec).checkpoints / "step00000003" / MANIFEST_JSON
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"schema": "gems.checkpoint/9"}')
    dry = Options(flags=frozenset({"--dry-run"}))
    with refused(r"^train\.resume=auto: .*schema gems\.checkpoint/9"):
        submit(spec, dry)
    assert submit(replace(spec, train=replace(spec.train, resume="never")), dry) == 0


def test_local_submission_runs_here(tiny: Tiny, collected: list[RunFolder], capfd: Capture) -> None:
    folder, spec = tiny()
    assert submit(spec, Options(json=True)) == 0
    status = json.loads(capfd.readouterr().out)
    assert (status["state"], status["run_folder"]) == ("finished", str(folder.path))
    assert collected == [folder]
