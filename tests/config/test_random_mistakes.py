"""Random wrong overrides and files.

Each ends with code 2 or 3 and one line, and nothing is submitted or left behind.
With GEMS_ALL_CASES=1 twenty times as many.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.__main__ import main as analysis
from gems.cli import framework as cli
from gems.config.schema import RunSpec
from gems.models import layers_of
from gems.profile import LayerProfile, ModelProfile, store
from gems.profile.store import versions
from jobs.__main__ import VERBS as JOBS
from tests.helpers.commands import Said
from tests.helpers.wrong_files import MANGLED, Folder
from tests.helpers.wrong_words import (
    CONTRARY,
    FORMS,
    PERHAPS,
    UNKNOWN_KEYS,
    UNKNOWN_OPTIONS,
    WRONG_VALUES,
    Mistake,
)

ROOT = Path(__file__).resolve().parents[2]
TIMES = 20 if "GEMS_ALL_CASES" in os.environ else 1
# Lines of progress, and what --dry-run tells of the job before it comes to what forbids it.
PROGRESS = (
    "gems: taking the profile",
    "gems: cluster=",
    "jobs: ok ",
    "jobs: -- ",
    "jobs: warn ",
    "jobs: NO ",
    "jobs: nodes ",
    "jobs: the script runs",
    "jobs: nothing is submitted",
)
BUDGETS = ("partition.budget_s=0.1", "memory.budget_s=0.1", "schedule.budget_s=0.1")
LIMIT_CPU_S = 30  # of one command: a hang on this processor, however busy it is
ROOM_BYTES = 8 << 30
LONGEST_LINE = 2500
SBATCH = """#!/bin/sh
case " $* " in *" --test-only "*) exit 0 ;; esac
echo "$@" >> {log}
echo Submitted batch job 7
"""
Jobs = Callable[..., Said]


class Hang(BaseException):
    """A command that takes too long; no handler of the toolkit's may take it for an error."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with workplace(tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("tools")) as run:
        yield run


@contextlib.contextmanager
def workplace(here: Path, tools: Path) -> Iterator[Jobs]:
    """Return the function that runs `gems-jobs` in this process, in a folder of its own and with a false SLURM.

    Words that begin with "analysis" are a command of that program.
    """
    log = tools / "submitted"
    (tools / "sbatch").write_text(SBATCH.format(log=log))
    (tools / "sbatch").chmod(0o755)
    for name in ("squeue", "sacct", "scancel", "sinfo", "scontrol"):
        (tools / name).write_text("#!/bin/sh\nexit 1\n")
        (tools / name).chmod(0o755)
    patch = pytest.MonkeyPatch()
    patch.chdir(here)
    patch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    patch.setenv(
        "GEMS_CACHE_DIR", str(tools / "cache")
    )  # others shall not find profiles that are made up
    real = store.take_profile
    patch.setattr(
        store, "take_profile", lambda spec, *how: real(spec, *how) if how else made_up_profile(spec)
    )
    patch.setattr("jobs.cli.submit.launch", lambda *_, **__: log.write_text("launched") and 0)
    patch.setattr(
        "gems.runs.prepare.write_bundle", lambda folder, spec: folder.mkdir(exist_ok=True) or {}
    )
    before = signal.signal(signal.SIGPROF, _hang)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, limits[1]))

    def run(*argv: str) -> Said:
        for entry in here.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        log.unlink(missing_ok=True)
        streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2)]
        signal.setitimer(signal.ITIMER_PROF, LIMIT_CPU_S)
        try:
            with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                is_picture = argv[0] == "analysis"
                code = analysis(argv[1:]) if is_picture else cli.main("jobs", JOBS, argv)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        out, err = (_text(stream) for stream in streams)
        if code:
            assert not log.exists(), f"{argv} was submitted"
            assert not list(here.iterdir()), f"{argv} left {list(here.iterdir())}"
        return Said(code, out, err)

    yield run
    resource.setrlimit(resource.RLIMIT_AS, limits)
    signal.signal(signal.SIGPROF, before)
    patch.undo()


def made_up_profile(spec: RunSpec) -> dict[str, Any]:
    """Stand in for the child process that takes a profile.

    Figures of the right form at once, whatever the model.
    """
    layers = tuple(
        LayerProfile(
            layer.name,
            layer.kind,
            1e-3 * (1 + index % 3),
            1e-3,
            1e-3,
            1e-3,
            param_bytes=1000 * (index % 5),
            stash_bytes=10_000 * (1 + index % 7),
            output_bytes=3000,
            output_grad_bytes=3000,
            workspace_bytes=100,
            forward_peak_bytes=20_000,
            backward_peak_bytes=9000,
        )
        for index, layer in enumerate(layers_of(spec.model, spec.data))
    )
    data = spec.data
    return ModelProfile(
        spec.model.name,
        data.height_px,
        data.width_px,
        spec.parallel.micro_batch_size,
        spec.train.dtype,
        "cpu",
        "fake",
        layers,
        input_bytes=5000,
        versions=versions(),
    ).to_json()


def _hang(signum: int, frame: FrameType | None) -> None:
    raise Hang


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


def check(said: Said, mistake: Mistake) -> None:
    """A refusal is one line that names what is wrong; only what may be right may be taken."""
    assert said.code in ((2, 3) if mistake.is_wrong else (0, 2, 3)), said
    assert "Traceback" not in said.err
    if said.code == 0:
        return
    lines = [line for line in said.err.split("\n") if line and not line.startswith(PROGRESS)]
    assert len(lines) == 1 and lines[0].startswith(("jobs: ", "analysis: ")), said.err
    assert lines[0].isprintable() and len(lines[0]) <= LONGEST_LINE, lines
    words = lines[0].partition("=")[0]
    named = mistake.named
    assert named in lines[0] or words == f"jobs: {named.removesuffix('.name')}", (named, lines)


def random(num: int) -> Callable[[Any], Any]:
    """The same `num` cases in every run."""
    return settings(
        max_examples=num * TIMES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def submit(jobs: Jobs, mistake: Mistake, is_dry: bool, *words: str) -> None:
    said = jobs("submit", *(["--dry-run"] if is_dry else []), *words, *mistake.words)
    check(said, mistake)
    assert is_dry or not said.code or not said.out


@given(mistake=WRONG_VALUES, is_dry=st.booleans())
@random(100)
def test_values_that_no_key_takes(jobs: Jobs, mistake: Mistake, is_dry: bool) -> None:
    submit(jobs, mistake, is_dry)


@given(mistake=UNKNOWN_KEYS | UNKNOWN_OPTIONS, is_dry=st.booleans())
@random(175)
def test_keys_and_options_that_do_not_exist(jobs: Jobs, mistake: Mistake, is_dry: bool) -> None:
    submit(jobs, mistake, is_dry)


@given(mistake=FORMS, is_dry=st.booleans())
@random(130)
def test_broken_forms(jobs: Jobs, mistake: Mistake, is_dry: bool) -> None:
    submit(jobs, mistake, is_dry)


@given(mistake=CONTRARY, is_dry=st.booleans())
@random(30)
def test_values_that_exclude_each_other(jobs: Jobs, mistake: Mistake, is_dry: bool) -> None:
    submit(jobs, mistake, is_dry, *BUDGETS)


@given(mistake=PERHAPS, is_dry=st.booleans())
@random(20)
def test_values_that_may_suit_each_other(jobs: Jobs, mistake: Mistake, is_dry: bool) -> None:
    submit(jobs, mistake, is_dry, *BUDGETS)


@given(folder=MANGLED)
@random(45)
def test_files_that_hold_something_else(jobs: Jobs, folder: Folder, tmp_path_factory: Any) -> None:
    where = tmp_path_factory.mktemp("files")
    check(jobs(*folder.make(where)), Mistake((), folder.named, folder.is_wrong))
    shutil.rmtree(where)


@pytest.mark.parametrize(
    "words",
    [
        ["seed=-1"],
        ["parallel.partitions=1e30"],
        ["experiment=quickstar"],
        ["name='$(touch owned)/x'"],
        ["data.height_px=${oops}"],
        ["schedule=file", "schedule.path=/"],
        ["name=\udc80"],
        ['cluster.python="\'"'],
        ["machine.device_bytes=1", "parallel.partitions=2"],
        ["train.steps=99999999999999999999"],
    ],
)
@pytest.mark.usefixtures("warm")
def test_in_a_process_of_its_own(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jobs", "submit", "cluster=mini", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GEMS_CACHE_DIR": str(tmp_path / "cache")}
    here = tmp_path / "here"
    here.mkdir()
    ended = subprocess.run(
        command,
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=200,
    )
    check(Said(ended.returncode, ended.stdout, ended.stderr), Mistake(tuple(words)))
    assert not list(here.iterdir())
