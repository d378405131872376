"""No value of a configuration is read by a shell: scripts with hostile values are run by bash, with programs that note
byte by byte what they were given. A value comes through as it is, or it is refused in one line.
"""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gems.config.constraints import check_cluster
from gems.config.fields import check_fields
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.utils.run_module import RUN_MODULE
from jobs.batch.launchers import command, module_on_each_node
from jobs.batch.resources import job_spec
from jobs.launch.launch import SWEEP
from jobs.schedulers.scheduler import SCHEDULERS
from tests.helpers.job_helpers import ROOT, MonkeyPatch, Resolved, script_of, with_cluster
from tests.helpers.processes import python
from tests.helpers.warm_python import REAL

NOTES = """#!{python}
import os, sys
open({notes!r}, "wb").write(b"\\0".join(map(os.fsencode, sys.argv[1:])))
open({notes!r} + ".env", "wb").write(b"\\0".join(k + b"=" + v for k, v in os.environb.items()))
print("Submitted batch job 41")
"""
ODD = [
    "it's",
    'two "quotes"',
    "a  b",
    "a\tb",
    "line\nbreak",
    "cr\rlf\r\n",
    "$(touch owned)",
    "`touch owned`",
    "$HOME",
    "${IFS}",
    "; touch owned",
    "| touch owned",
    "& touch owned &",
    "&& touch owned",
    "> owned",
    "' ; touch owned ; '",
    '" ; touch owned ; "',
    "'\"'\"' ; touch owned",
    "x\n touch owned\n",
    "x\n#SBATCH --partition=other\n",
    "#",
    "# no comment",
    "-x",
    "--wrap=touch owned",
    "--",
    "~",
    "*",
    "?",
    "[a]",
    "{a,b}",
    "!!",
    "\\",
    "\\'",
    "%j",
    "%t_%x",
    "a\0b",
    "ünïcode ✓",
    "\u202e",
    "a=b",
    "a:b",
    "a,b",
    "",
]
SLOTS: dict[str, Callable[[RunSpec, str], RunSpec]] = {
    "name": lambda spec, odd: replace(spec, name=odd),
    "runs_dir": lambda spec, odd: replace(spec, runs_dir=f"{spec.runs_dir}/{odd}"),
    "account": lambda spec, odd: with_cluster(spec, account=odd),
    "account_suffix": lambda spec, odd: with_cluster(spec, account="a", account_suffix=odd),
    "partition": lambda spec, odd: with_cluster(spec, partition=odd),
    "mpi": lambda spec, odd: with_cluster(spec, mpi=odd),
    "sbatch": lambda spec, odd: with_cluster(spec, sbatch={"comment": odd}),
    "sbatch_key": lambda spec, odd: with_cluster(spec, sbatch={odd: "1"}),
    "environment": lambda spec, odd: with_cluster(spec, environment={"ODD": odd}),
    "environment_name": lambda spec, odd: with_cluster(spec, environment={odd: "1"}),
    "modules": lambda spec, odd: with_cluster(spec, modules=[odd]),
    "exclude": lambda spec, odd: with_cluster(spec, exclude=[odd]),
    "srun": lambda spec, odd: with_cluster(spec, srun=[f"--comment={odd}"]),
    "gpu_bind": lambda spec, odd: with_cluster(spec, gpu_bind=odd),
    "cpu_bind": lambda spec, odd: with_cluster(spec, cpu_bind=odd),
    "image": lambda spec, odd: with_cluster(spec, container="apptainer", container_image=odd),
    "pyxis": lambda spec, odd: with_cluster(spec, container="pyxis", container_image=odd),
    "container_options": lambda spec, odd: with_cluster(
        spec, container="apptainer", container_image="i", container_options=[f"--env=A={odd}"]
    ),
    "python": lambda spec, odd: with_cluster(spec, python=f"python {shlex.quote(odd)}"),
}

STRICT = (
    "sbatch_key",
    "environment_name",
    "modules",
    "exclude",
    "gpu_bind",
    "cpu_bind",
)  # no free text at all


@pytest.fixture
def base(resolved: Resolved, tmp_path: Path, monkeypatch: MonkeyPatch) -> RunSpec:
    """A run on SLURM, in a folder where nothing may appear.

    SBATCH_ACCOUNT of the user does not count.
    """
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return replace(resolved("cluster=mini"), runs_dir=str(tmp_path / "runs"))


def noting(path: Path, notes: Path) -> Path:
    """Make a program that notes its words and its environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(NOTES.format(python=REAL, notes=str(notes)))
    path.chmod(0o755)
    return path


def noted(notes: Path) -> list[str]:
    data = notes.read_bytes()
    return [os.fsdecode(word) for word in data.split(b"\0")] if data else []


def environment_of(notes: Path) -> dict[str, str]:
    lines = (os.fsdecode(line) for line in Path(f"{notes}.env").read_bytes().split(b"\0"))
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def directives(script: str) -> dict[str, str]:
    """Return the options as sbatch reads them: it takes quotes away, and expands nothing."""
    head = itertools.takewhile(
        lambda line: not line or line.startswith("#"), script.splitlines()
    )  # no further, as sbatch
    words = [line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH")]
    parted = (shlex.split(word) for word in words)
    return {name: value for (word,) in parted for name, _, value in [word.partition("=")]}


@pytest.mark.parametrize("slot", SLOTS)
def test_a_value_comes_through_or_is_refused(base: RunSpec, slot: str) -> None:
    """Every value at this place of script and launch."""
    taken = [odd for odd in ODD if comes_through(SLOTS[slot](base, odd), slot, odd)]
    assert ("ünïcode ✓" in taken) == (slot not in STRICT), (
        "some values must come through, or nothing is tested"
    )


def comes_through(spec: RunSpec, slot: str, odd: str) -> bool:
    """Check the script and the launcher's words for a value; false where it is refused in one line."""
    try:
        script, argv = written(spec)
    except ConfigError as error:
        assert error.exit_code == 2 and str(error).isprintable(), str(error)
        return False
    options = directives(script)
    assert options["--job-name"] == spec.name
    assert options["--output"] == f"{RunFolder.of(spec).logs}/%j_0_log.out"
    given = {
        "account": "--account",
        "partition": "--partition",
        "sbatch": "--comment",
        "exclude": "--exclude",
    }
    if slot in given:
        assert options[given[slot]] == odd
    assert options.get("--partition") == spec.cluster.partition
    if slot in ("srun", "mpi"):
        assert f"--{'comment' if slot == 'srun' else 'mpi'}={odd}" in argv
    assert "\0" not in "".join(argv), "no program can be given that"
    return True


def written(spec: RunSpec) -> tuple[str, list[str]]:
    """Return a script and the launcher's words after the checks that stand before them."""
    check_fields(spec)
    check_cluster(spec.cluster)
    job = job_spec(spec)
    folder = RunFolder.of(spec)
    script = SCHEDULERS["slurm"].script(job, folder)
    module_on_each_node(job, folder, SWEEP)
    return script, command(job, folder)


RUN_BY_BASH = [odd for odd in ODD if odd.isprintable() and "%" not in odd and "\\" not in odd]


@pytest.mark.parametrize("odd", RUN_BY_BASH, ids=ascii)
def test_bash_runs_the_script_and_nothing_else(
    base: RunSpec, tmp_path: Path, monkeypatch: MonkeyPatch, odd: str
) -> None:
    """All places at once, an interpreter of such a name too."""
    name = odd.replace("/", "") or "x"
    notes = tmp_path / "notes"
    python = noting(tmp_path / "bin" / f"py {name}", notes)
    monkeypatch.setattr(sys, "executable", str(python))
    cluster = replace(
        base.cluster,
        account=f"a{odd}",
        partition=f"p{odd}",
        sbatch={"comment": odd, "qos": odd},
        environment={"ODD": odd, "LAST": "yes"},
        archive_code=":" not in odd,
    )
    spec = replace(
        base, name=f"n{name}", runs_dir=str(tmp_path / "runs" / f"d{name}"), cluster=cluster
    )
    script = tmp_path / "script"
    script.write_text(script_of(spec))
    ended = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    folder = RunFolder.of(spec)
    code = [str(folder.code_zip)] if spec.cluster.archive_code else RUN_MODULE
    assert noted(notes) == ["-u", *code, "submitit.core._submit", str(folder.logs)]
    found = environment_of(notes)
    assert (found["ODD"], found["LAST"], found["SRUN_CPUS_PER_TASK"]) == (odd, "yes", "1")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    "odd",
    ["x\n touch owned\n", "x\n#SBATCH --partition=other\n", "cr\rlf\r\n", "%j", "\\'"],
    ids=ascii,
)
def test_a_variable_may_hold_anything(
    base: RunSpec, tmp_path: Path, monkeypatch: MonkeyPatch, odd: str
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setattr(sys, "executable", str(noting(tmp_path / "python", notes)))
    spec = with_cluster(base, environment={"ODD": odd})
    (tmp_path / "script").write_bytes(script_of(spec).encode())
    subprocess.run(["bash", str(tmp_path / "script")], check=True, timeout=60)
    assert environment_of(notes)["ODD"] == odd
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["name='it\\'s $(touch owned) `touch owned`; touch owned #'"], None),
        (['name="two\nlines; touch owned"'], "name"),
        (
            [
                "name=-x",
                "+cluster.sbatch.comment='$(touch owned)'",
                "cluster.account='a $(touch owned)'",
            ],
            None,
        ),
        (["cluster.account='$(touch owned)\n#SBATCH --wrap=touch'"], "cluster.account"),
        (
            ["+cluster.environment.A='\"; touch owned; \"'", "cluster.partition='p;touch owned'"],
            None,
        ),
        (["name='50%j'"], "name"),
        (["cluster.modules=['x; touch owned']"], "cluster.modules"),
        (
            ["cluster.container=apptainer", "cluster.container_image='--writable'"],
            "cluster.container_image",
        ),
        (["cluster.exclude=['n1;touch owned']"], "cluster.exclude"),
    ],
)
@pytest.mark.usefixtures("warm")
def test_through_the_command_line(tmp_path: Path, words: list[str], key: str | None) -> None:
    """The whole way: what sbatch is given is run by bash, or the command refuses in one line and submits nothing."""
    notes = tmp_path / "sbatch was told"
    noting(tmp_path / "bin" / "sbatch", notes)
    (tmp_path / "cwd").mkdir()
    runs = tmp_path / "my 'runs' $(touch owned)"
    quoted = str(runs).replace("'", "\\'")
    argv = [
        "submit",
        "experiment=gems_master",
        "data=synthetic",
        "cluster=mini",
        f"runs_dir='{quoted}'",
        *words,
    ]
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    said = python("-m", "jobs", *argv, cwd=tmp_path / "cwd", env=environment)
    assert "Traceback" not in said.stderr
    assert list((tmp_path / "cwd").iterdir()) == []
    if key is not None:
        assert (
            said.returncode == 2 and len(said.stderr.splitlines()) == 1 and f"{key}" in said.stderr
        ), said.stderr
        assert not notes.exists()
        return
    assert said.returncode == 0, said.stderr
    (script,) = (Path(word) for word in noted(notes) if word.endswith(".sh"))
    (folder,) = runs.iterdir()
    assert (folder / "provenance" / "job.sh").is_file()
    (kept,) = (folder / "logs").glob("*_submission.sh")
    text = kept.read_text()
    assert text == (folder / "provenance" / "job.sh").read_text() and script.parent == kept.parent
    run = tmp_path / "run"
    run.mkdir()
    program = noting(tmp_path / "python", tmp_path / "python was told")
    kept.write_text(
        text.replace(f"exec {shlex.quote(sys.executable)} ", f"exec {shlex.quote(str(program))} ")
    )
    subprocess.run(["bash", str(kept)], cwd=run, check=True, timeout=60)
    assert noted(tmp_path / "python was told") == [
        "-u",
        str(folder / "provenance" / "code.zip"),
        "submitit.core._submit",
        str(folder / "logs"),
    ]
    assert list(run.iterdir()) == []
