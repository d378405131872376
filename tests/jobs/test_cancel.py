"""`gems-jobs cancel`: jobs by one scancel, local runs by their process, studies with all their points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gems.cli.framework import Options, main
from gems.config.schema import RunSpec
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.process_tree import start_time
from jobs.__main__ import VERBS
from jobs.cli import study as study_module
from jobs.launch.launch import launch
from jobs.status import cancellation
from jobs.status.lookup import StudyRecord
from jobs.studies import runner as runner_module
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import ROOT, Called, Capture, MonkeyPatch, Prepared, Tiny, wait_until

Cancel = Callable[..., list[str]]
GONE = 2**22 + 1  # above any process number
SLEEPER = "import signal, sys\nprint(flush=True)\nsignal.pause()"
# The queue has the jobs of which there is a file; scancel removes them.
SQUEUE = 'for job in {here}/4*.job; do [ -e "$job" ] && /bin/cat "$job"; done; true'
SCANCEL = 'for job in "$@"; do /bin/rm {here}/$job.job || exit 1; done'


@pytest.fixture
def cancel(call: Called) -> Cancel:
    """Cancel runs, and return the lines that the command printed."""
    return lambda *words, code=0: call("cancel", *words, code=code)[code == 2].splitlines()


@pytest.fixture
def queue(slurm: FakeSlurm, monkeypatch: MonkeyPatch) -> FakeSlurm:
    """A SLURM whose jobs are files."""
    monkeypatch.setattr(cancellation, "POLL_S", 0.05)
    slurm.does("squeue", SQUEUE.format(here=slurm.here))
    slurm.does("scancel", SCANCEL.format(here=slurm.here))
    return slurm


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A process that stands for the launching one of a local run."""
    started = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stdout.readline() == "\n"
    reaper = threading.Thread(target=started.wait)
    reaper.start()
    yield started
    started.kill()
    reaper.join()
    started.communicate()


def job(
    queue: FakeSlurm,
    folder: RunFolder,
    number: str,
    state: str = "PENDING",
    name: str | None = None,
) -> None:
    """Put a run's job into the queue."""
    name = folder.path.name.rpartition("-")[0] if name is None else name
    (queue.here / f"{number}.job").write_text(f"{number}|{state}|N/A|None|{name}\n")
    folder.write_status("submitted" if state == "PENDING" else "running", job_id=number)


def by(process: subprocess.Popen[str]) -> dict[str, Any]:
    return {"pid": process.pid, "pid_started": start_time(process.pid), "host": os.uname().nodename}


def test_one_scancel_for_all_jobs(prepared: Prepared, queue: FakeSlurm, cancel: Cancel) -> None:
    runs = [prepared(name) for name in ("waits", "goes", "over", "broke")]
    job(queue, runs[0], "41")
    job(queue, runs[1], "42", "RUNNING")
    runs[2].write_status("finished", exit_code=0, job_id="43")
    runs[3].write_status("failed", exit_code=4, job_id="44")
    assert cancel("--yes", "waits", "goes", "over", "broke") == [
        f"{runs[2].path.name}: left, it is finished",
        f"{runs[3].path.name}: left, it is failed",
        f"{runs[0].path.name}: cancelled, job 41",
        f"{runs[1].path.name}: cancelled, job 42",
    ]
    assert [line for line in queue.asked() if line.startswith("scancel")] == ["scancel 41 42"]
    assert [run.read_status()["state"] for run in runs] == [
        "cancelled",
        "cancelled",
        "finished",
        "failed",
    ]
    assert runs[1].read_status()["job_id"] == "42"
    assert [run.cancelled_json.exists() for run in runs] == [True, True, False, False]


def test_what_the_run_says_of_its_end_stands(
    prepared: Prepared, queue: FakeSlurm, cancel: Cancel
) -> None:
    """It may finish while scancel is on its way."""
    folder = prepared()
    job(queue, folder, "41", "RUNNING")
    before = folder.status_json.read_text()
    folder.write_status("finished", exit_code=0, job_id="41")
    end = folder.status_json.read_text()
    folder.status_json.write_text(before)
    queue.does(
        "scancel",
        f"/bin/rm {queue.here}/41.job; /bin/cat > '{folder.status_json}' <<'END'\n{end}END\n",
    )
    assert cancel("--yes", "one") == [f"{folder.path.name}: left, it is finished"]
    assert not folder.cancelled_json.exists()


def test_a_job_of_another_name_is_not_ours_to_end(
    prepared: Prepared, queue: FakeSlurm, cancel: Cancel
) -> None:
    folder = prepared()
    job(queue, folder, "41", "RUNNING", name="all of them")
    (line,) = cancel("--yes", "one", code=1)
    assert line.endswith(
        "refused, job 41 is called 'all of them': `scancel 41` if you mean all of it"
    )
    assert (folder.read_status()["state"], folder.cancelled_json.exists()) == ("running", False)


@pytest.mark.parametrize("job_id", ["41; touch owned", "--user=root", "$(touch owned)"])
def test_a_number_that_is_none_reaches_no_command_line(
    job_id: str, recorded: Prepared, queue: FakeSlurm, cancel: Cancel
) -> None:
    recorded("submitted", job_id=job_id)
    assert "cancelled" not in " ".join(cancel("--yes", "one", code=1))
    assert queue.asked() == []


def test_a_job_that_was_to_start_again(
    prepared: Prepared, queue: FakeSlurm, cancel: Cancel
) -> None:
    """Its first attempt was preempted, and has said so."""
    folder = prepared()
    job(queue, folder, "41")
    folder.write_status(
        "failed", exit_code=143, job_id="41", cause="was stopped by SIGTERM: preempted"
    )
    assert cancel("--yes", "one") == [f"{folder.path.name}: cancelled, job 41"]
    assert (folder.read_status()["state"], folder.read_status()["cause"]) == (
        "cancelled",
        "cancelled",
    )


def test_a_folder_that_cannot_be_written_is_said(
    prepared: Prepared, queue: FakeSlurm, cancel: Cancel
) -> None:
    folder = prepared()
    job(queue, folder, "41")
    folder.cancelled_json.mkdir()  # nothing can take its place
    (line,) = cancel("--yes", "one", code=1)
    assert "refused, cannot write to its folder (Is a directory)" in line
    assert not any(line.startswith("scancel") for line in queue.asked())


def test_a_refused_scancel_is_said(prepared: Prepared, queue: FakeSlurm, cancel: Cancel) -> None:
    folder = prepared()
    job(queue, folder, "41", "RUNNING")
    queue.says("scancel", error="scancel: error: Access/permission denied\n", code=1)
    (line,) = cancel("--yes", "one", code=1)
    assert line.endswith("refused, job 41: scancel failed: error: Access/permission denied")
    assert (folder.read_status()["state"], folder.cancelled_json.exists()) == ("running", False)


def test_a_job_that_takes_its_time_is_said(
    prepared: Prepared, queue: FakeSlurm, cancel: Cancel, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellation, "END_LIMIT_S", 0.0)
    folder = prepared()
    job(queue, folder, "41", "RUNNING")
    queue.says("scancel")
    (line,) = cancel("--yes", "one", code=1)
    assert ": ending, job 41" in line and folder.cancelled_json.exists()
    (queue.here / "41.job").unlink()
    assert cancel("--yes", "one") == [f"{folder.path.name}: left, it is cancelled"]


def test_without_a_queue_to_ask(recorded: Prepared, queue: FakeSlurm, cancel: Cancel) -> None:
    (queue.here / "squeue").unlink()
    folder = recorded("submitted", job_id="41")
    queue.says("scancel")
    assert cancel("--yes", "one") == [f"{folder.path.name}: cancelled, job 41"]
    assert folder.read_status()["state"] == "cancelled"


def test_nobody_there_to_ask(
    prepared: Prepared, queue: FakeSlurm, cancel: Cancel, monkeypatch: MonkeyPatch
) -> None:
    folder = prepared()
    job(queue, folder, "41")
    (line,) = cancel("one", code=2)
    assert line == "jobs: cancel=1: must be confirmed, and stdin is no terminal; add --yes"
    for answer, code in (("no", 1), ("", 1), ("Y", 0)):
        monkeypatch.setattr("sys.stdin", Answer(answer))
        cancel("one", code=code)
        assert folder.read_status()["state"] == ("submitted" if code else "cancelled")


class Answer:
    """Somebody at a terminal."""

    def __init__(self, text: str) -> None:
        self._text = text

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return f"{self._text}\n"


def test_what_to_cancel_must_be_named(prepared: Prepared, slurm: FakeSlurm, cancel: Cancel) -> None:
    assert cancel("--yes", code=2)[0].startswith("jobs: cancel=none: name runs or studies")
    prepared("same"), prepared("same", "seed=1")
    assert "names several runs" in cancel("--yes", "same", code=2)[0]


def test_a_local_run_ends_with_its_process(
    recorded: Prepared, slurm: FakeSlurm, cancel: Cancel, process: subprocess.Popen[str]
) -> None:
    folder = recorded("running", **by(process))
    assert cancel("--yes", "one") == [f"{folder.path.name}: cancelled, process {process.pid}"]
    wait_until(lambda: process.returncode is not None)
    assert process.returncode == -15
    assert (folder.read_status()["state"], folder.read_status()["pid"]) == (
        "cancelled",
        process.pid,
    )
    assert slurm.asked() == []


@pytest.mark.parametrize(
    ("other", "says", "code"),
    [
        ({"pid_started": "1"}, "left, it is lost", 0),
        ({"pid": GONE}, "left, it is lost", 0),
        ({"host": "elsewhere"}, "refused, it runs on elsewhere: call this there", 1),
        ({"pid_started": None}, "refused, its status.json does not tell when process", 1),
    ],
)
def test_a_process_that_may_be_another_is_left_alone(
    other: dict[str, Any],
    says: str,
    code: int,
    recorded: Prepared,
    slurm: FakeSlurm,
    cancel: Cancel,
    process: subprocess.Popen[str],
) -> None:
    folder = recorded("running", **by(process) | other)
    assert says in cancel("--yes", "one", code=code)[0]
    assert process.poll() is None and folder.read_status()["state"] == "running"


@pytest.mark.timeout(120)
def test_real_ranks_are_cancelled_and_say_so(tiny: Tiny, tmp_path: Path, cancel: Cancel) -> None:
    """The launching process is one of its own, as `jobs submit` is; its ranks wait for ever."""
    folder, _ = tiny(TINY="wait:none")
    program = (
        "import sys, pathlib\nfrom gems.runs.folder import RunFolder\nfrom jobs.launch.launch"
        " import launch\nfolder = RunFolder(pathlib.Path(sys.argv[1]))\nsys.exit(launch(folder,"
        " folder.read_spec()))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder.path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            wait_until(
                lambda: (
                    sum(
                        path.read_text().count(" 12 ")
                        for path in folder.heartbeat(0).parent.iterdir()
                    )
                    == 4
                )
            )
            ranks = [
                int(path.read_text().split()[0]) for path in folder.heartbeat(0).parent.iterdir()
            ]
            reaper = threading.Thread(target=launcher.wait)
            reaper.start()
            assert cancel("--yes", folder.path.name) == [
                f"{folder.path.name}: cancelled, process {launcher.pid}"
            ]
            reaper.join(timeout=60)
            assert (
                launcher.stderr is not None
                and "jobs: the run was cancelled" in launcher.stderr.read()
            )
        finally:
            launcher.kill()
    assert launcher.returncode == 143
    status = folder.read_status()
    assert (status["state"], status["exit_code"], status["cause"]) == (
        "cancelled",
        143,
        "was cancelled",
    )
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))


def test_a_run_that_is_prepared_again_is_not_cancelled(
    tiny: Tiny, collected: list[RunFolder]
) -> None:
    folder, spec = tiny()
    (folder.cancelled_json).write_text("{}")
    folder.write_status("cancelled")
    assert launch(prepare(spec), spec, echo=False) == 0
    assert not folder.cancelled_json.exists()
    assert (folder.path / "attempts" / "001" / "cancelled.json").exists()


class TestStudy:
    """A study whose points are stubs; a test says what happens while one runs."""

    @pytest.fixture
    def study(self, tmp_path: Path, monkeypatch: MonkeyPatch) -> Callable[..., int]:
        """Run three points; `during` is called while the first one runs, and may give its exit code."""
        path = tmp_path / "mine.yaml"
        base = [
            "data=synthetic",
            "schedule=1f1b",
            "parallel.partitions=2",
            "parallel.micro_batches=4",
        ]
        axes = {"parallel.replicas": [1, 2, 3]}
        path.write_text(yaml.safe_dump({"base": base, "axes": axes}))
        self.started: list[int] = []

        def run(during: Callable[[RunFolder], int]) -> int:
            def start(spec: RunSpec, *options: Options) -> int:
                folder = prepare(spec)
                folder.write_status("running", pid=os.getpid(), host=os.uname().nodename)
                self.started.append(spec.parallel.replicas)
                code = during(folder) if len(self.started) == 1 else 0
                if folder.read_status()["state"] == "running":
                    folder.write_status("finished" if code == 0 else "failed", exit_code=code)
                return code

            monkeypatch.setattr(runner_module, "start_run", start)
            monkeypatch.setattr(study_module, "draw", lambda folders, out, as_json: (0, None))
            return main("jobs", VERBS, ["study", f"study={path}", f"runs_dir={tmp_path / 'runs'}"])

        return run

    def test_a_cancelled_study_starts_no_more_points(
        self, study: Callable[..., int], tmp_path: Path, capfd: Capture
    ) -> None:
        record = StudyRecord(tmp_path / "runs" / "mine")

        def during(folder: RunFolder) -> int:
            assert (
                record.is_running_here()
                and next(label for label, _ in record.points()) == "parallel.replicas=1"
            )
            record.mark_cancelled()
            return 0

        assert study(during) == 143
        assert self.started == [1]
        assert "study mine was cancelled; the other points are left" in capfd.readouterr().err
        self.started = [0]
        assert study(lambda folder: 0) == 0
        assert self.started == [0, 2, 3] and not record.is_cancelled

    def test_a_cancelled_point_is_not_the_end_of_its_study(self, study: Callable[..., int]) -> None:
        def during(folder: RunFolder) -> int:
            folder.write_status("cancelled", exit_code=143)
            return 143

        assert study(during) == 143
        assert self.started == [1, 2, 3]

    def test_the_points_in_the_queue_go_too_and_the_command_is_waited_for(
        self,
        prepared: Prepared,
        queue: FakeSlurm,
        cancel: Cancel,
        tmp_path: Path,
        process: subprocess.Popen[str],
    ) -> None:
        """While cancel waits for the command, that submits one more point."""
        folders = [prepared("grid", f"parallel.replicas={count}") for count in (1, 2, 3)]
        record = StudyRecord(tmp_path / "runs" / "grid")
        record.begin([(folder.path.name, folder.path) for folder in folders])
        record.study_json.write_text(json.dumps(record.read() | by(process)))
        job(queue, folders[0], "41")

        def submit_another() -> None:
            wait_until(lambda: record.is_cancelled)
            job(queue, folders[1], "42")
            process.kill()

        thread = threading.Thread(target=submit_another)
        thread.start()
        assert cancel("--yes", "grid") == [
            f"{folders[2].path.name}: left, it is prepared",
            f"{folders[0].path.name}: cancelled, job 41",
            f"{folders[1].path.name}: cancelled, job 42",
        ]
        thread.join()
        assert "scancel 41 42" in queue.asked()

    def test_a_command_on_another_host_is_said(
        self, prepared: Prepared, queue: FakeSlurm, cancel: Cancel, tmp_path: Path
    ) -> None:
        folder = prepared("grid")
        record = StudyRecord(tmp_path / "runs" / "grid")
        record.begin([("only", folder.path)])
        record.study_json.write_text(json.dumps(record.read() | {"host": "login2"}))
        assert cancel("--yes", "grid") == [
            f"{folder.path.name}: left, it is prepared",
            "study grid: its command on login2 stops before its next point",
        ]
        assert record.is_cancelled
