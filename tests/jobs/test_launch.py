"""The launch, with real ranks under mpiexec that do nothing but beat."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gems.config.compose import compose
from gems.launch.local_launcher import Ended
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import read_beat
from gems.runs.prepare import prepare
from jobs.diagnosis.report import diagnose_run
from jobs.launch import launch as launch_module
from jobs.launch import rank_watch
from jobs.launch.launch import collect, launch
from tests.helpers.job_helpers import Capture, MonkeyPatch, Resolved, Tiny, refused, wait_until
from tests.helpers.small_disk import small_disk

Collected = list[RunFolder]

pytestmark = pytest.mark.timeout(120)


def at_step_12(folder: RunFolder) -> bool:
    beats = [read_beat(folder.heartbeat(rank)) for rank in range(4)]
    return all(beat is not None and beat.step == 12 for beat in beats)


def lines_of_jobs(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("jobs: ")]


def test_a_run_that_succeeds_is_collected(
    tiny: Tiny, collected: Collected, swept: list[str], capfd: Capture
) -> None:
    folder, spec = tiny()
    assert launch(folder, spec) == 0
    assert swept == ["shared memory"]
    assert collected == [folder]
    status = folder.read_status()
    assert (status["state"], status["exit_code"], status["launcher"]) == ("finished", 0, "mpiexec")
    assert (status["pid"], status["host"]) == (os.getpid(), os.uname().nodename)
    out, err = capfd.readouterr()
    log = (folder.logs / "ranks.log").read_text()
    for rank in range(4):
        assert f"hello from {rank}\n" in err
        assert f"hello from {rank}\n" in log
    assert out == ""


def test_output_can_go_to_the_log_alone(tiny: Tiny, collected: Collected, capfd: Capture) -> None:
    folder, spec = tiny()
    assert launch(folder, spec, echo=False) == 0
    assert capfd.readouterr() == ("", "")
    assert "hello from 3" in (folder.logs / "ranks.log").read_text()


def test_killed_rank_ends_the_run_and_is_named(
    tiny: Tiny, collected: Collected, capfd: Capture
) -> None:
    folder, spec = tiny(TINY="wait:none")

    def kill() -> None:
        wait_until(lambda: at_step_12(folder))
        beat = read_beat(folder.heartbeat(2))
        assert beat is not None
        os.kill(beat.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    code = launch(folder, spec)
    killer.join()
    assert code == 4
    status = folder.read_status()
    node = os.uname().nodename
    assert lines_of_jobs(capfd.readouterr().err) == [
        f"jobs: rank 2 on node {node} was killed by signal 9 (SIGKILL) in step 12, action 2F3; "
        f"traces up to the last finished step are in {folder.path / 'trace'}"
    ]
    named = ("failed", 4, 2, node, 12, "2F3", 9, "was killed by signal 9 (SIGKILL)")
    fields = ("state", "exit_code", "rank", "node", "step", "action", "signal", "cause")
    assert tuple(status[field] for field in fields) == named
    assert collected == [folder]


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("signal:1", "was killed by signal 11 (SIGSEGV) in step 12, action 1F3;"),
        ("exit:1", "ended with exit code 3 in step 12, action 1F3;"),
    ],
)
def test_ranks_that_die_without_a_word(
    tiny: Tiny, collected: Collected, capfd: Capture, monkeypatch: MonkeyPatch, mode: str, text: str
) -> None:
    folder, spec = tiny(TINY=mode)
    monkeypatch.setattr(rank_watch, "ABORT_LIMIT_S", 0.5)
    assert launch(folder, spec) == 4
    (line,) = lines_of_jobs(capfd.readouterr().err)
    assert line.startswith(f"jobs: rank 1 on node {os.uname().nodename} {text}")


@pytest.mark.parametrize("code", [2, 4])
def test_a_ranks_own_record_decides(
    tiny: Tiny, collected: Collected, capfd: Capture, code: int
) -> None:
    folder, spec = tiny(TINY="raise:3", CODE=str(code))
    assert launch(folder, spec) == code
    (line,) = lines_of_jobs(capfd.readouterr().err)
    node = os.uname().nodename
    assert line.startswith(
        f"jobs: rank 3 on node {node} failed in step 12, action 1F3: ValueError: no such thing;"
    )
    assert folder.read_status()["rank"] == 3


def test_a_failed_rank_whose_abort_reaches_nobody(
    tiny: Tiny, collected: Collected, monkeypatch: MonkeyPatch
) -> None:
    folder, spec = tiny(TINY="linger:1", CODE="2")
    monkeypatch.setattr(rank_watch, "ABORT_LIMIT_S", 0.5)
    assert launch(folder, spec) == 2
    assert folder.read_status()["rank"] == 1


def test_a_rank_that_ends_before_mpi_starts_does_not_leave_the_others_waiting(
    tiny: Tiny, capfd: Capture, monkeypatch: MonkeyPatch
) -> None:
    folder, spec = tiny(TINY="early:2")
    monkeypatch.setattr(rank_watch, "ABORT_LIMIT_S", 0.5)
    assert launch(folder, spec) == 4
    (line,) = lines_of_jobs(capfd.readouterr().err)
    assert line.startswith("jobs: rank 2 ended with exit code 1: ImportError: no such library; ")


def test_ranks_that_are_all_stopped_have_stalled(
    tiny: Tiny, collected: Collected, capfd: Capture, monkeypatch: MonkeyPatch
) -> None:
    folder, spec = tiny(TINY="wait:none")
    spec = replace(spec, train=replace(spec.train, hang_timeout_s=1.0))
    monkeypatch.setattr(rank_watch, "MARGIN_S", 0.5)
    monkeypatch.setattr(rank_watch, "PHASE_FACTOR", 60.0)

    def stop() -> None:
        wait_until(lambda: at_step_12(folder))
        for rank in range(4):
            beat = read_beat(folder.heartbeat(rank))
            assert beat is not None
            os.kill(beat.pid, signal.SIGSTOP)

    stopper = threading.Thread(target=stop)
    stopper.start()
    code = launch(folder, spec)
    stopper.join()
    (line,) = lines_of_jobs(capfd.readouterr().err)
    assert (code, folder.read_status()["exit_code"]) == (5, 5)
    assert re.search(
        r"rank \d on node \S+ stopped moving in step 12, .*: no rank has sent a heartbeat for", line
    )


def test_a_run_folder_that_is_gone_ends_the_run_with_one_line(
    tiny: Tiny, collected: Collected, capfd: Capture
) -> None:
    folder, spec = tiny(TINY="wait:none")

    def remove() -> None:
        wait_until(lambda: at_step_12(folder))
        shutil.rmtree(folder.path)

    remover = threading.Thread(target=remove)
    remover.start()
    code = launch(folder, spec)
    remover.join()
    assert code == 4 and collected == [] and not folder.path.exists()
    (line,) = lines_of_jobs(capfd.readouterr().err)
    assert line == f"jobs: the run folder {folder.path} is gone: the run has been ended"


def test_failure_without_traces_points_to_the_log(
    tiny: Tiny, collected: Collected, capfd: Capture
) -> None:
    folder, spec = tiny()
    spec.cluster.python = f"{sys.executable} {folder.path / 'missing.py'}"
    assert launch(folder, spec) == 4
    (line,) = lines_of_jobs(capfd.readouterr().err)
    assert "missing.py" in line
    assert line.endswith(f"; the ranks' output is in {folder.logs / 'ranks.log'}")
    assert collected == []


def test_ranks_that_end_with_0_beside_a_record_have_failed(
    tiny: Tiny, collected: Collected, write_failed: Callable[..., None], monkeypatch: MonkeyPatch
) -> None:
    """As when every rank is a world of its own: srun gives 0 when the last words of all are lost."""
    folder, spec = tiny()

    def ranks(*words: Any, **more: Any) -> Ended:
        write_failed(folder, 0, "2026", "world size", 2)
        return Ended(0, ())

    monkeypatch.setattr(launch_module, "run_ranks", ranks)
    assert launch(folder, spec) == 2
    assert folder.read_status()["state"] == "failed"


def test_sigterm_ends_the_run_with_a_status(
    tiny: Tiny, collected: Collected, capfd: Capture
) -> None:
    folder, spec = tiny(TINY="wait:none")

    def stop() -> None:
        wait_until(lambda: at_step_12(folder))
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    code = launch(folder, spec)
    stopper.join()
    assert code == 143
    (line,) = lines_of_jobs(capfd.readouterr().err)
    assert "the run was stopped by SIGTERM" in line
    assert folder.read_status()["state"] == "failed"
    assert collected == []


def test_interruption_is_kept_in_the_status(tiny: Tiny, monkeypatch: MonkeyPatch) -> None:
    folder, spec = tiny()

    def interrupt(*words: Any, **more: Any) -> Ended:
        assert folder.read_status()["state"] == "running"
        raise KeyboardInterrupt

    monkeypatch.setattr(launch_module, "run_ranks", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch(folder, spec)
    status = folder.read_status()
    assert (status["state"], status["exit_code"], status["cause"]) == ("failed", 130, "interrupted")
    assert diagnose_run(folder).cause is FailureCause.CANCELLED


def test_missing_srun_is_kept_in_the_status(
    tiny: Tiny, resolved: Resolved, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    folder, _ = tiny()
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("srun: cannot be started"):
        launch(folder, resolved("cluster=mini"))
    assert folder.read_status()["exit_code"] == 2


def test_ranks_learn_whether_a_person_looks_on(tiny: Tiny, monkeypatch: MonkeyPatch) -> None:
    folder, spec = tiny(OMP_NUM_THREADS="7")
    seen: list[dict[str, str]] = []

    def note(argv: list[str], environment: dict[str, str], *words: Any, **more: Any) -> Ended:
        seen.append(environment)
        return Ended(1, ())

    monkeypatch.setattr(launch_module, "run_ranks", note)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    launch(folder, spec)
    launch(folder, spec, echo=False)
    assert [environment.get("GEMS_PROGRESS") for environment in seen] == ["bar", None]
    assert seen[0]["OMP_NUM_THREADS"] == "7"  # cluster.environment goes before our defaults


@pytest.mark.parametrize("first", ["probe", "sweep", "ranks"])
def test_a_cancelled_job_is_cancelled_whatever_ends_first(
    first: str, tiny: Tiny, resolved: Resolved, monkeypatch: MonkeyPatch
) -> None:
    folder, _ = tiny()
    stopped = Ended(-signal.SIGTERM, (), stopped_by="SIGTERM")

    def sweep(argv: list[str], *words: Any, **more: Any) -> Ended:
        if first == "ranks":
            return Ended(
                -signal.SIGTERM, ()
            )  # SLURM's signal has reached srun, and not yet this process
        assert first == "sweep" and "gems.launch.mpich_cleanup" in argv, (
            "the ranks of the run must not start"
        )
        return stopped

    monkeypatch.setattr(launch_module, "run_ranks", sweep)
    if first == "probe":
        monkeypatch.setattr(launch_module.MpiProbe, "run_first", lambda *words: stopped)
    elif first == "sweep":
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    folder.cancelled_json.write_text("{}")
    launch(folder, resolved("cluster=mini"))
    status = folder.read_status()
    assert (status["state"], status["cause_class"]) == ("cancelled", "cancelled")


def test_a_restarted_job_sweeps_every_node_and_a_job_probes_first(
    tiny: Tiny, resolved: Resolved, monkeypatch: MonkeyPatch
) -> None:
    folder, _ = tiny()
    started: list[list[str]] = []

    def note(argv: list[str], *words: Any, **more: Any) -> Ended:
        started.append(argv)
        return Ended(1, ())

    monkeypatch.setattr(launch_module, "run_ranks", note)
    monkeypatch.setattr(
        launch_module.MpiProbe,
        "run_first",
        lambda *words: started.append(["gems.engine.transport.probe"]),
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    launch(folder, resolved("cluster=mini"))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    launch(folder, resolved("cluster=mini"))
    modules = [next(word for word in argv if word.startswith("gems.")) for argv in started]
    assert modules == [
        "gems.engine.transport.probe",
        "gems.engine.run",
        "gems.launch.mpich_cleanup",
        *modules[:2],
    ]
    assert folder.read_status()["job_id"] == "7"


def test_nothing_of_an_earlier_launch_is_lost_or_mistaken(
    tiny: Tiny, collected: Collected, write_failed: Callable[..., None]
) -> None:
    folder, spec = tiny()
    write_failed(folder, 1, "2026", "of yesterday")
    (folder.path / "attempts" / "007").mkdir(parents=True)
    (folder.logs / "ranks.log").write_text("of yesterday")
    (folder.logs / "7_0_log.out").write_text("SLURM writes here now")
    assert launch(folder, spec) == 0
    assert (folder.path / "attempts" / "008" / "FAILED.rank0001.json").exists()
    assert (folder.path / "attempts" / "008" / "ranks.log").read_text() == "of yesterday"
    assert (folder.logs / "7_0_log.out").exists()
    assert "of yesterday" not in (folder.logs / "ranks.log").read_text()


def test_collection_is_a_child_with_its_own_exit_code(tiny: Tiny, capfd: Capture) -> None:
    """There is no trace to collect, so the real child fails.

    It says so and leaves this process alone.
    """
    folder, _ = tiny()
    before = set(sys.modules)
    assert collect(folder) != 0
    assert capfd.readouterr().err != ""
    assert not {"h5py", "matplotlib"} & (sys.modules.keys() - before)


def test_a_configuration_that_was_edited_is_refused_in_one_line(
    tiny: Tiny, collected: Collected
) -> None:
    folder, spec = tiny()
    text = folder.run_yaml.read_text()
    folder.run_yaml.write_text(text.replace("  log_level: info\n", "  log_level: debug\n"))
    assert folder.run_yaml.read_text() != text
    with refused(r"^run folder=.*: its run\.yaml is not what was prepared") as caught:
        launch(folder, folder.read_spec())
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    status = folder.read_status()
    assert (status["state"], status["exit_code"], status["cause_class"]) == (
        "failed",
        2,
        "configuration",
    )
    folder.run_yaml.write_text(text)
    assert launch(folder, spec, echo=False) == 0


def test_a_disk_that_stays_full_is_a_failure_with_a_status(
    tmp_path: Path, collected: Collected, capfd: Capture
) -> None:
    words = (
        "experiment=gems_master",
        "data=synthetic",
        "machine=emulated",
        "train.steps=100000",
        "cost.unit_s=0.002",
        "train.checkpoint_steps=5",
        "train.max_failed_saves=1",
    )
    with small_disk(tmp_path / "disk", 1 << 14) as disk:
        spec = compose([*words, f"runs_dir={disk.path}"])
        folder = prepare(spec)

        def fill() -> None:
            wait_until(lambda: any(folder.checkpoints.glob("*/manifest.json")))
            disk.fill()

        filler = threading.Thread(target=fill)
        filler.start()
        assert launch(folder, spec, echo=False) == 4
        filler.join()
        status = folder.read_status()
        assert (status["state"], status["exit_code"], status["cause_class"]) == (
            "failed",
            4,
            "file system",
        )
        assert (
            "could not be saved" in status["cause"] and "No space left on device" in status["cause"]
        )
        last = max(
            int(path.parent.name.removeprefix("step"))
            for path in folder.checkpoints.glob("*/manifest.json")
        )
        assert last < status["step"] <= last + 5
        (line,) = lines_of_jobs(capfd.readouterr().err)
        assert "No space left on device" in line
