"""The batch script and its submission, with a stand-in for sbatch."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
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
from jobs.schedulers.slurm_client.sbatch import SBATCH_OPTIONS, sbatch_script

SBATCH = """#!{python}
import json, os, pathlib, sys
here = pathlib.Path({here!r})
if "--test-only" in sys.argv:
    (here / "tested").write_text(sys.stdin.read())
    sys.exit(print("sbatch: Job 41 to start at 2026-01-01T00:00:00", file=sys.stderr))
if (here / "refuse").exists():
    sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
record = {{"argv": sys.argv[1:], "script": pathlib.Path(sys.argv[-1]).read_text(), "environment": dict(os.environ)}}
(here / "submitted.json").write_text(json.dumps(record))
print("Submitted batch job 41")
"""
NOBODY = """#!/bin/sh
echo "Unable to contact slurm controller (connect failure)" >&2; exit 1
"""
SQUEUE = """#!/bin/sh
case "$*" in *--jobs=41) echo 'JOBID|STATE|COMMAND'
if [ -e {here}/running ]; then echo '41|RUNNING|job.sh'; fi ;;
*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;; esac
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which sbatch and squeue stand and leave what they were told."""
    here = tmp_path / "slurm"
    here.mkdir()
    silent = [(name, NOBODY) for name in ("scontrol", "sinfo", "sacctmgr")]
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), *silent):
        path = here / name
        path.write_text(text.format(python=sys.executable, here=str(here)))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    return here


def told(cluster: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((cluster / "submitted.json").read_text())
    return record


def directives(script: str) -> list[str]:
    return [
        line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")
    ]


def script_of(spec: RunSpec) -> str:
    return sbatch_script(spec, job_spec(spec), RunFolder.of(spec))


def on_slurm(
    resolved: Callable[..., RunSpec], tmp_path: Path, *overrides: str, **more: Any
) -> RunSpec:
    spec = resolved("cluster=mini", *overrides)
    return replace(spec, runs_dir=str(tmp_path / "runs"), cluster=replace(spec.cluster, **more))


def test_whole_script(
    resolved: Callable[..., RunSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    spec = resolved("cluster=slurm", "parallel.replicas=2", "cluster.account=physics")
    cluster = replace(
        spec.cluster,
        environment={"A": "it's"},
        setup=["module load x"],
        sbatch={"qos": "high", "exclusive": True},
    )
    spec = replace(spec, cluster=cluster, runs_dir="/runs")
    logs = RunFolder.of(spec).logs
    assert script_of(spec).splitlines() == [
        "#!/bin/bash",
        "",
        "# Parameters",
        "#SBATCH --account=physics",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --exclusive",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --job-name=gems_master",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={logs}/%j_0_log.out",
        "#SBATCH --qos=high",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR2@120",
        "#SBATCH --time=60",
        "",
        "# setup",
        "module load x",
        "export SRUN_CPUS_PER_TASK=8",
        "export A='it'\"'\"'s'",
        "",
        "# command",
        "export SUBMITIT_EXECUTOR=slurm",
        (
            f"exec {shlex.quote(sys.executable)} -u {RunFolder.of(spec).code_zip}"
            f" submitit.core._submit {logs}"
        ),
    ]


def test_the_batch_process_is_told_before_the_end(
    resolved: Callable[..., RunSpec], tmp_path: Path
) -> None:
    """Not the ranks, as submitit's own --signal=USR2@90 does.

    A user's own signal and habits go before ours.
    """

    def ends(**cluster: Any) -> list[str]:
        script = script_of(on_slurm(resolved, tmp_path, **cluster))
        return [word for word in directives(script) if re.search("signal|requeue", word)]

    assert ends() == ["--requeue", "--signal=B:USR2@120"]
    assert ends(minutes=4, signal_before_end_s=120)[1:] == ["--signal=B:USR2@120"]
    assert ends(minutes=3, signal_before_end_s=120) == [
        "--requeue"
    ]  # it would come when the run has hardly begun
    assert ends(signal_before_end_s=0, max_requeues=0) == []
    short = on_slurm(resolved, tmp_path, minutes=3, signal_before_end_s=120)
    script = sbatch_script(
        short, replace(job_spec(short), minutes=6), RunFolder.of(short)
    )  # of several runs
    assert "#SBATCH --signal=B:USR2@120\n" in script
    assert ends(sbatch={"signal": "B:TERM@60", "no_requeue": True}) == [
        "--no-requeue",
        "--signal=B:TERM@60",
    ]


def test_account_of_the_users_environment_is_shown(
    resolved: Callable[..., RunSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    assert "--account=mine" in directives(script_of(on_slurm(resolved, tmp_path)))
    assert "--account=theirs" in directives(
        script_of(on_slurm(resolved, tmp_path, account="theirs"))
    )


def test_a_shell_reads_the_values_as_they_are(
    resolved: Callable[..., RunSpec], tmp_path: Path
) -> None:
    value = "$(touch pwned) `touch pwned` \"two\" 'one' ; touch pwned #"
    spec = on_slurm(resolved, tmp_path, environment={"ODD": value})
    spec = replace(spec, name=f"odd {value.replace('/', '')}")
    script = script_of(spec)
    lines = [line for line in script.splitlines() if not line.startswith("exec ")]
    shown = subprocess.run(
        ["bash", "-c", "\n".join([*lines, 'printf %s "$ODD"'])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == value
    assert not (tmp_path / "pwned").exists()
    (job_name,) = [line for line in directives(script) if line.startswith("--job-name=")]
    assert shlex.split(job_name) == [f"--job-name={spec.name}"]


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
    with pytest.raises(ConfigError, match=text):
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
    resolved: Callable[..., RunSpec], change: dict[str, str], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        script_of(replace(resolved("cluster=mini"), **change))
    assert caught.value.key == key


def test_a_variable_needs_a_name(resolved: Callable[..., RunSpec], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.environment\.A B"):
        script_of(on_slurm(resolved, tmp_path, environment={"A B": "1"}))


def test_dry_run_is_what_would_be_submitted(
    resolved: Callable[..., RunSpec],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    spec = on_slurm(resolved, tmp_path, environment={"A": "1"})
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
    assert told(cluster)["script"] == script


def test_submission(
    resolved: Callable[..., RunSpec],
    tmp_path: Path,
    cluster: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = {
        "SLURM_JOB_ID": "7",
        "SLURM_CPU_BIND": "x",
        "SBATCH_PARTITION": "y",
        "PMI_RANK": "0",
        "SRUN_DEBUG": "1",
    }
    for name, value in {**hidden, "SLURM_CONF": "/etc/slurm.conf"}.items():
        monkeypatch.setenv(name, value)
    spec = on_slurm(resolved, tmp_path)
    assert submit(spec, Options()) == 0
    folder = RunFolder.of(spec)
    status = folder.read_status()
    assert (status["state"], status["job_id"]) == ("submitted", "41")
    assert not told(cluster)["environment"].keys() & hidden.keys()
    assert told(cluster)["environment"]["SLURM_CONF"] == "/etc/slurm.conf"
    assert all(os.environ[name] == value for name, value in hidden.items())
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("job     41: nodes 2, tasks 4")
    assert f"gems-jobs logs -f {folder.path}\n" in out
    assert f"gems-jobs status {folder.path}\n" in out
    assert {
        path.name for path in folder.logs.iterdir() if path.is_file() and not path.is_symlink()
    } == {"41_submission.sh", "41_submitted.pkl"}


def test_submission_as_json(
    resolved: Callable[..., RunSpec],
    tmp_path: Path,
    cluster: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = on_slurm(resolved, tmp_path)
    assert submit(spec, Options(json=True)) == 0
    folder = RunFolder.of(spec)
    document = json.loads(capsys.readouterr().out)
    assert [row["check"] for row in document.pop("preflight") if row["ok"] is False] == []
    log = str(folder.logs / "ranks.log")
    assert document == {"job_id": "41", "chain": ["41"], "run_folder": str(folder.path), "log": log}


def test_refused_job_is_one_line_and_leaves_no_litter(
    resolved: Callable[..., RunSpec],
    tmp_path: Path,
    cluster: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (cluster / "refuse").touch()
    spec = on_slurm(resolved, tmp_path)
    with pytest.raises(
        ConfigError, match=r"cluster=mini: sbatch refuses the job: .*Invalid partition name"
    ):
        submit(spec, Options())
    assert capfd.readouterr() == ("", "")
    folder = RunFolder.of(spec)
    assert folder.read_status()["state"] == "prepared"
    assert list(folder.logs.iterdir()) == []
    (cluster / "refuse").unlink()
    assert submit(spec, Options()) == 0


def test_without_sbatch_nothing_is_prepared(
    resolved: Callable[..., RunSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cluster\.scheduler=slurm: needs sbatch"):
        submit(on_slurm(resolved, tmp_path), Options())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("state", ["submitted", "running", "failed"])
def test_a_folder_is_its_jobs_while_the_queue_has_it(
    resolved: Callable[..., RunSpec], tmp_path: Path, cluster: Path, state: str
) -> None:
    spec = on_slurm(resolved, tmp_path)
    submit(spec, Options())
    folder = RunFolder.of(spec)
    folder.write_status(state, job_id="41", host="n1", pid=1, cause="of the run")
    (cluster / "running").touch()
    with pytest.raises(ConfigError, match="belongs to job 41, which has not ended"):
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


def test_a_queue_that_cannot_be_asked_releases_nothing(
    resolved: Callable[..., RunSpec], tmp_path: Path, cluster: Path
) -> None:
    spec = on_slurm(resolved, tmp_path)
    submit(spec, Options())
    (cluster / "squeue").write_text(
        "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n"
    )
    with pytest.raises(
        TryLaterError, match="belongs to job 41, and nobody can tell whether it has ended"
    ):
        submit(spec, Options())
    assert submit(spec, Options(flags=frozenset({"--force"}))) == 0


def test_local_dry_run_is_the_launchers_line(
    resolved: Callable[..., RunSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    resolved: Callable[..., RunSpec], tmp_path: Path, words: tuple[str, ...]
) -> None:
    spec = replace(resolved(*words), runs_dir=str(tmp_path / "runs"))
    manifest = prepare(spec).checkpoints / "step00000003" / MANIFEST_JSON
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"schema": "gems.checkpoint/9"}')
    dry = Options(flags=frozenset({"--dry-run"}))
    with pytest.raises(ConfigError, match=r"^train\.resume=auto: .*schema gems\.checkpoint/9"):
        submit(spec, dry)
    assert submit(replace(spec, train=replace(spec.train, resume="never")), dry) == 0


def test_local_submission_runs_here(
    tiny: Callable[..., tuple[RunFolder, RunSpec]],
    collected: list[RunFolder],
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, spec = tiny()
    assert submit(spec, Options(json=True)) == 0
    status = json.loads(capfd.readouterr().out)
    assert (status["state"], status["run_folder"]) == ("finished", str(folder.path))
    assert collected == [folder]
