"""The runner of a study, with stubs in the place of runs and of the drawing.

One study goes through mpiexec.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gems.cli.framework import main
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.run_module import RUN_MODULE
from jobs.__main__ import VERBS
from jobs.batch import launchers
from jobs.batch.launchers import command
from jobs.batch.resources import JobSpec, job_spec
from jobs.cli import study as study_module
from jobs.cli.study import draw, is_due, point_state
from jobs.launch.submission import start_run
from jobs.schedulers.slurm_client.limits import refusal as sbatch_refusal
from jobs.studies import runner as runner_module
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Capture, MonkeyPatch, Resolved, Tiny, status_of

Study = Callable[..., int]

BASE = ["data=synthetic", "schedule=1f1b", "parallel.partitions=2", "parallel.micro_batches=4"]
WORDS = ("parallel.replicas=1", "parallel.replicas=2", "parallel.replicas=3")


class Stub:
    """Stands for a start: notes the runs, which end as `codes` says by their replicas.

    And for the drawing.
    """

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.codes: dict[int, int] = {}
        self.started: list[int] = []
        self.drawn: list[list[str]] = []
        self.out: Path | None = None
        self.drawing_code = 0

    def start(self, spec: RunSpec) -> int:
        self.started.append(spec.parallel.replicas)
        code = self.codes.get(spec.parallel.replicas, 0)
        if code == 2:
            raise ConfigError("run folder", "x", "cannot be used")
        prepare(spec).write_status("failed" if code else "finished", exit_code=code)
        return code

    def draw(
        self, folders: list[Path], out: Path, *, as_json: bool
    ) -> tuple[int, dict[str, Any] | None]:
        self.drawn.append([folder.name for folder in folders])
        self.out = out
        return self.drawing_code, {"csv": "scaling.csv"} if as_json else None

    def take_started(self) -> list[int]:
        started = self.started
        self.started = []
        return started


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: MonkeyPatch) -> Stub:
    made = Stub(tmp_path / "runs")
    monkeypatch.setattr(runner_module, "start_run", made.start)
    monkeypatch.setattr(study_module, "draw", made.draw)
    return made


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Run `jobs study` of three points in this process and gives its exit code."""

    def run(*words: str, points: tuple[str, ...] = WORDS, base: list[str] = BASE) -> int:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({"base": base, "points": [[point] for point in points]}))
        return main(
            "jobs", VERBS, ["study", f"study={path}", f"runs_dir={tmp_path / 'runs'}", *words]
        )

    return run


def test_every_point_runs_once(stub: Stub, study: Study, capfd: Capture) -> None:
    assert study() == 0
    out, err = capfd.readouterr()
    assert stub.started == [1, 2, 3]
    assert "jobs: study mine: 3 points (3 missing); 3 to run\n" in err
    assert "jobs: point 2 of 3: parallel.replicas=2, 4 ranks\n" in err
    folders = [line.split()[-1] for line in out.splitlines()[1:]]
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        [str(number), "finished", word] for number, word in enumerate(WORDS, 1)
    ]
    assert all(RunFolder(Path(folder)).read_spec() for folder in folders)
    assert stub.drawn == [[Path(folder).name for folder in folders]]
    assert stub.out == stub.runs / "mine"


def test_a_second_call_runs_nothing_and_says_so(stub: Stub, study: Study, capfd: Capture) -> None:
    study()
    stub.take_started()
    capfd.readouterr()
    assert study() == 0
    assert stub.started == []
    assert capfd.readouterr().err == "jobs: study mine: 3 points (3 finished); nothing to run\n"
    assert len(stub.drawn) == 2 and stub.drawn[0] == stub.drawn[1]


def test_a_failed_point_is_said_the_rest_go_on_and_it_alone_runs_again(
    stub: Stub, study: Study, capfd: Capture
) -> None:
    stub.codes = {1: 5, 2: 4}
    assert study() == 5
    out, err = capfd.readouterr()
    assert stub.take_started() == [1, 2, 3]
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["failed", "failed", "finished"]
    assert "point 2 of 3 (parallel.replicas=2) has failed: " in err
    assert len(stub.drawn[0]) == 1
    stub.codes = {2: 4}
    assert study() == 4
    assert stub.take_started() == [1, 2]
    assert "3 points (2 failed, 1 finished); 2 to run" in capfd.readouterr().err
    stub.codes = {}
    assert study() == 0
    assert stub.take_started() == [2]


def test_a_point_that_cannot_start_is_one_line(stub: Stub, study: Study, capfd: Capture) -> None:
    stub.codes = {2: 2}
    assert study() == 2
    out, err = capfd.readouterr()
    assert stub.started == [1, 2, 3]
    assert (
        "jobs: point 2 of 3 (parallel.replicas=2) cannot start: run folder=x: cannot be used\n"
        in err
    )
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["finished", "missing", "finished"]


def test_a_stopped_run_ends_the_study(stub: Stub, study: Study, capfd: Capture) -> None:
    stub.codes = {2: 143}
    assert study() == 143
    assert stub.started == [1, 2]
    assert [line.split()[1] for line in capfd.readouterr().out.splitlines()[1:]] == [
        "finished",
        "failed",
        "missing",
    ]


def test_json_is_one_object(stub: Stub, study: Study, capfd: Capture) -> None:
    stub.codes = {3: 4}
    stub.drawing_code = 2
    assert study("--json") == 4
    answer = json.loads(capfd.readouterr().out)
    assert (answer["study"], answer["num_run"], answer["scaling"]) == (
        "mine",
        3,
        {"csv": "scaling.csv"},
    )
    assert [point["state"] for point in answer["points"]] == ["finished", "finished", "failed"]
    assert [point["ranks"] for point in answer["points"]] == [2, 4, 6]
    assert [point["point"] for point in answer["points"]] == list(WORDS)
    assert RunFolder(Path(answer["points"][2]["run_folder"])).read_status()["exit_code"] == 4


def test_a_drawing_that_fails_is_in_the_exit_code(stub: Stub, study: Study) -> None:
    stub.drawing_code = 2
    assert study() == 2
    assert stub.started == [1, 2, 3]


def test_nothing_is_drawn_of_nothing(stub: Stub, study: Study) -> None:
    stub.codes = dict.fromkeys((1, 2, 3), 4)
    assert study() == 4
    assert stub.drawn == []


def test_a_dry_run_starts_nothing(stub: Stub, study: Study, capfd: Capture) -> None:
    assert study("--dry-run") == 0
    out, err = capfd.readouterr()
    assert (stub.started, stub.drawn, err) == ([], [], "")
    assert [line.split()[1:3] for line in out.splitlines()[1:]] == [
        ["missing", word] for word in WORDS
    ]
    assert not stub.runs.exists()
    assert study("--dry-run", "--json") == 0
    assert [point["state"] for point in json.loads(capfd.readouterr().out)["points"]] == [
        "missing"
    ] * 3


def test_overrides_go_to_every_point(stub: Stub, study: Study, tmp_path: Path) -> None:
    study("train.steps=7")
    assert study() == 0
    assert stub.started == [1, 2, 3, 1, 2, 3]
    assert study("train.steps=7") == 0
    assert len(stub.started) == 6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], r"jobs: study=none: give one study: allowed: .*emulated_scaling"),
        (["study=a", "study=b"], r"jobs: study=study=a study=b: give one study"),
        (["study=emulated"], r"jobs: study=emulated: allowed: .*nearest: emulated_scaling"),
        (["study=emulated_scaling", "--dry"], r"jobs: option=--dry: unknown; nearest: --dry-run"),
    ],
)
def test_bad_words_are_one_line(words: list[str], says: str, capfd: Capture) -> None:
    assert main("jobs", VERBS, ["study", *words]) == 2
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert out == "" and re.match(says, line), line


def test_one_bad_point_and_none_runs(stub: Stub, study: Study, capfd: Capture) -> None:
    assert study(points=(*WORDS, "parallel.replica=1")) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "jobs: point 4 of study mine (parallel.replica=1): parallel.replica=1: unknown key"
    )
    assert (stub.started, stub.runs.exists()) == ([], False)


def test_a_run_that_goes_on_is_left_alone_and_one_that_has_gone_runs_again(
    stub: Stub, study: Study, capfd: Capture
) -> None:
    study()
    folders = [stub.runs / name for name in stub.drawn[0]]
    gone = 2**22 + 1  # above any process number
    for folder, pid in zip(folders[:2], (os.getppid(), gone), strict=True):
        RunFolder(folder).write_status("running", pid=pid, host=os.uname().nodename)
    stub.take_started()
    capfd.readouterr()
    assert study() == 0
    out, err = capfd.readouterr()
    assert stub.started == [2]
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["running", "finished", "finished"]
    assert "3 points (1 failed, 1 finished, 1 running); 1 to run" in err


def state(folder: RunFolder) -> str:
    return point_state(status_of(folder))


def test_states_by_status_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert state(folder) == "missing"
    for word, fields, expected in (
        ("prepared", {}, "prepared"),
        ("finished", {"exit_code": 0, "collected": True}, "finished"),
        ("finished", {"exit_code": 2, "collected": False}, "failed"),
        ("failed", {"exit_code": 4}, "failed"),
        ("stopped", {"exit_code": 0}, "stopped"),
        ("running", {"pid": os.getpid(), "host": os.uname().nodename}, "failed"),
        ("running", {"pid": 2**22 + 1, "host": os.uname().nodename}, "failed"),
    ):
        folder.write_status(word, **fields)
        assert state(folder) == expected
        assert is_due(expected) == (expected != "finished")


@pytest.mark.timeout(120)
def test_a_study_of_real_ranks(
    study: Study, tiny: Tiny, collected: list[RunFolder], monkeypatch: MonkeyPatch, capfd: Capture
) -> None:
    """The ranks are a tiny program under mpiexec; one point's rank 1 fails."""
    _, spec = tiny()
    drawn: list[list[Path]] = []
    monkeypatch.setattr(
        study_module, "draw", lambda folders, out, as_json: (drawn.append(folders) or 0, None)
    )
    python = spec.cluster.python or ""
    base = [*BASE, f'cluster.python="{python}"']
    points = ("parallel.replicas=1", "+cluster.environment.TINY=exit:1")
    assert study(points=points, base=base) == 4
    out, err = capfd.readouterr()
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["finished", "failed"]
    assert f"rank 1 on node {os.uname().nodename} ended with exit code 3 in step 12" in err
    assert "hello" not in out + err
    assert [folder.path for folder in collected[:1]] == drawn[0]
    assert "hello from 1" in (drawn[0][0] / "logs" / "ranks.log").read_text()
    assert study(points=points[:1], base=base) == 0
    assert "nothing to run" in capfd.readouterr().err


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (2, "failed"), (3, "failed")])
def test_a_simulated_point_is_one_process_whose_code_counts(
    code: int,
    state: str,
    study: Study,
    stub: Stub,
    collected: list[RunFolder],
    monkeypatch: MonkeyPatch,
    capfd: Capture,
) -> None:
    program = f"import sys; print('gems: it cannot be' if {code} else 'fine'); sys.exit({code})"
    monkeypatch.setattr(
        launchers,
        "by_simulator",
        lambda job, folder: [*job.python, "-c", program, str(folder.path)],
    )
    monkeypatch.setattr(runner_module, "start_run", start_run)
    assert study(points=("machine.kind=simulated",)) == code
    out, err = capfd.readouterr()
    assert out.splitlines()[1].split()[1] == state
    assert collected == []  # the trace is whole, and a study draws its own picture
    assert ("ended with exit code" in err and "gems: it cannot be" in err) == (code > 0)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("warm")
def test_simulated_points_from_the_file_to_the_picture(
    study: Study, tmp_path: Path, capfd: Capture
) -> None:
    base = [
        *BASE,
        "machine=simulated",
        "train.steps=2",
        "benchmark.skip_steps=1",
        "cost.unit_s=0.001",
    ]
    assert study(points=WORDS[:2], base=base) == 0
    out = capfd.readouterr().out
    with (tmp_path / "runs" / "mine" / "scaling.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["source"], row["ranks"]) for row in rows] == [
        ("simulated", "2"),
        ("simulated", "4"),
    ]
    # 4 micro-batches of forward and backward on 2 ranks take (4 + 2 - 1) x 3 units of 1 ms (1F1B's
    # closed form)
    assert [float(row["step_median_s"]) for row in rows] == pytest.approx([0.015, 0.015])
    assert [float(row["parallel_efficiency"]) for row in rows] == pytest.approx([1.0, 1.0])
    assert out.splitlines()[-3:] == [
        str(tmp_path / "runs" / "mine" / f"scaling.{kind}") for kind in ("png", "pdf", "csv")
    ]
    written = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("mine-*/trace.h5")
    }
    assert study("--json", points=WORDS[:2], base=base) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["num_run"], len(answer["scaling"]["points"]), len(written)) == (0, 2, 2)
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.fixture
def queued(monkeypatch: MonkeyPatch, slurm: FakeSlurm) -> list[str]:
    """A SLURM that takes every job and keeps it waiting.

    Gives the names of the folders, in the order of submission.
    """
    submitted: list[str] = []
    slurm.does("squeue", f"/bin/cat {slurm.here}/queue 2>/dev/null; exit 0")

    def take(self: object, job: JobSpec, folder: RunFolder, works: object, token: str) -> str:
        submitted.append(folder.path.name)
        number = str(40 + len(submitted))
        with (slurm.here / "queue").open("a") as queue:
            queue.write(f"{number}|PENDING|N/A|Priority|mine\n")
        return number

    slurm.says("sbatch")
    monkeypatch.setattr("jobs.schedulers.slurm.Slurm.submit", take)
    return submitted


def test_points_on_slurm_are_submitted_once_and_one_call_asks_for_all(
    study: Study, queued: list[str], slurm: FakeSlurm, capfd: Capture
) -> None:
    assert study("cluster=mini", points=WORDS[:2]) == 0
    lines = [line.split()[1:3] for line in capfd.readouterr().out.splitlines()[1:]]
    assert lines == [["pending", "41"], ["pending", "42"]]
    assert len(set(queued)) == 2
    before = len(slurm.asked())
    assert study("cluster=mini", points=WORDS[:2]) == 0
    assert "2 points (2 pending); nothing to run" in capfd.readouterr().err
    assert len(queued) == 2
    asked = slurm.asked()[before:]
    assert all(line.endswith("--jobs=41,42") for line in asked) and len(asked) <= 2


def test_what_the_queue_does_not_take_waits_for_the_next_call(
    study: Study, queued: list[str], slurm: FakeSlurm, capfd: Capture
) -> None:
    words = ("cluster=mini", "+cluster.limits=[{queued_jobs: 2}]")
    assert study(*words) == 0
    out, err = capfd.readouterr()
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["pending", "pending", "waiting"]
    assert "the queue is full; 1 points wait for the next call (or --wait)" in err
    assert len(queued) == 2
    assert study(*words) == 0
    assert "(1 missing, 2 pending); 1 to run" in capfd.readouterr().err
    assert len(queued) == 2
    (slurm.here / "queue").write_text("42|PENDING|N/A|Priority|mine\n")
    folder = RunFolder(Path(out.splitlines()[1].split()[-1]))
    folder.write_status("finished", exit_code=0, job_id="41")
    study(*words)
    assert len(queued) == 3


def test_wait_submits_as_room_comes_and_ends_with_the_last_job(
    study: Study,
    queued: list[str],
    slurm: FakeSlurm,
    stub: Stub,
    monkeypatch: MonkeyPatch,
    capfd: Capture,
) -> None:
    """At each look the oldest job has ended, the second one with a failure."""
    monkeypatch.setattr(runner_module, "start_run", start_run)
    ended: list[str] = []

    class Looks:
        def wait(self, seconds: float) -> None:
            lines = (slurm.here / "queue").read_text().splitlines()
            job = lines[0].partition("|")[0]
            (slurm.here / "queue").write_text("".join(f"{line}\n" for line in lines[1:]))
            folder = RunFolder(stub.runs / queued[int(job) - 41])
            code = 4 if job == "42" else 0
            folder.write_status("failed" if code else "finished", exit_code=code, job_id=job)
            ended.append(job)

    monkeypatch.setattr("jobs.studies.runner.threading.Event", Looks)
    assert study("cluster=mini", "--wait", "+cluster.limits=[{queued_jobs: 1}]") == 4
    out, err = capfd.readouterr()
    assert ended == ["41", "42", "43"]
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["finished", "failed", "finished"]
    assert "jobs: study mine: 2 missing, 1 pending, 2 of them wait for a slot in the queue\n" in err
    assert len(stub.drawn) == 1 and len(stub.drawn[0]) == 2


@pytest.mark.usefixtures("queued")
@pytest.mark.parametrize(
    ("refusal", "others", "waiting", "code"),
    [
        (
            (
                "error: QOSMaxSubmitJobPerUserLimit Job violates accounting/QOS policy (job submit"
                " limit)"
            ),
            "9",
            2,
            0,
        ),
        ("error: AssocMaxSubmitJobLimit Job violates accounting/QOS policy", "9", 2, 0),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "9",
            2,
            0,
        ),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "",
            0,
            2,
        ),
        ("error: QOSMaxWallDurationPerJobLimit Job violates accounting/QOS policy", "9", 0, 2),
        ("Invalid partition name specified", "9", 0, 2),
    ],
)
def test_what_sbatch_refuses_for_now_waits_and_what_it_refuses_for_good_is_said(
    refusal: str,
    others: str,
    waiting: int,
    code: int,
    study: Study,
    slurm: FakeSlurm,
    monkeypatch: MonkeyPatch,
    capfd: Capture,
) -> None:
    asked: list[str] = []

    def refuse(self: object, job: JobSpec, folder: RunFolder, works: object, token: str) -> str:
        asked.append(folder.path.name)
        raise sbatch_refusal("mini", refusal)

    (slurm.here / "queue").write_text(f"{others}\n" if others else "")
    monkeypatch.setattr("jobs.schedulers.slurm.Slurm.submit", refuse)
    assert study("cluster=mini", points=WORDS[:2]) == code
    out, err = capfd.readouterr()
    assert [line.split()[1] for line in out.splitlines()[1:]].count("waiting") == waiting
    assert err.count("cannot start: ") == 2 - waiting
    assert len(asked) == (1 if waiting else 2)


def test_stop_cancels_the_whole_study(
    study: Study, queued: list[str], slurm: FakeSlurm, capfd: Capture, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.status.cancellation.COMMAND_LIMIT_S", 0.1)  # of this very process
    study("cluster=mini")
    capfd.readouterr()
    slurm.does("scancel", f": > {slurm.here}/queue")
    assert study("cluster=mini", "--stop") == 0
    assert capfd.readouterr().out.count(": cancelled, job ") == 3
    assert "scancel 41 42 43" in slurm.asked()
    assert study("cluster=mini", "--dry-run") == 0
    out, err = capfd.readouterr()
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["cancelled"] * 3
    assert (
        "#SBATCH --job-name=" in err
        and "the script of the first of 3 points, at most 0 GPU-hours" in err
    )


def test_a_simulated_run_is_one_process_here_whatever_the_cluster(resolved: Resolved) -> None:
    job = job_spec(resolved("machine=simulated", "cluster=slurm", "parallel.replicas=2"))
    assert (job.launcher, job.nodes, job.tasks, job.gpus) == ("simulated", 1, 1, 0)
    folder = RunFolder(Path("/runs/one"))
    assert command(job, folder) == [
        sys.executable,
        *RUN_MODULE,
        "gems.runs.simulated_run",
        "/runs/one",
    ]


def test_a_study_is_not_a_run(capfd: Capture) -> None:
    assert main("jobs", VERBS, ["submit", "study=emulated_scaling"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        line.startswith("jobs: study=emulated_scaling: names many runs")
        and "jobs study study=" in line
    )


def test_the_drawing_is_a_child(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    code, answer = draw([tmp_path / "none"], tmp_path / "out", as_json=True)
    assert (code, answer) == (2, None)
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\nprintf \'{"words": "%s"}\' "$*"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    code, answer = draw([tmp_path / "a", tmp_path / "b"], tmp_path / "out", as_json=True)
    folders = str(tmp_path / "a"), str(tmp_path / "b")
    words = [*RUN_MODULE, "analysis", "scaling", *folders, "--out", str(tmp_path / "out")]
    assert (code, answer) == (0, {"words": shlex.join([*words, "--json"])})
