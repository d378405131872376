"""The probe: what it depends on, how long it counts, how it is started, and what a failed one says."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gems.cli.framework import Options
from gems.config.schema import RunSpec
from gems.errors import ConfigError, GemsError, RankFailedError, StalledError
from gems.launch.local_launcher import Ended
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import write_json
from jobs.batch.resources import job_spec
from jobs.cli.probe import probe, probe_table
from jobs.probes import mpi as mpi_probe
from jobs.probes.mpi import MpiProbe, describe_probe, probe_json
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Capture, MonkeyPatch, Resolved, refused

HOST = {"latency_s": 2e-6, "bytes_per_s": 5e9, "message_bytes": 4194304}
FOUND: dict[str, Any] = {
    "schema": "gems.probe/1",
    "mpi": "MPICH Version:      5.0.2",
    "threads": "serialized",
    "world_size": 2,
    "ranks": [{"node": name, "gpu": None, "sees_folder": True} for name in ("n1", "n2")],
    "takes_device_memory": False,
    "device_message": "no GPU",
    "host": HOST,
    "device": None,
    "wall_s": 1.0,
    "nodes": 2,
}


@pytest.fixture
def on(resolved: Resolved, tmp_path: Path) -> Resolved:
    """Compose a run on the mini cluster, with some of its values changed."""

    def make(**more: Any) -> RunSpec:
        spec = resolved("cluster=mini")
        return replace(
            spec, cache_dir=str(tmp_path / "cache"), cluster=replace(spec.cluster, **more)
        )

    return make


@pytest.fixture(autouse=True)
def _nothing_is_probed() -> None:
    """Let jobs probe, which those of other tests do not."""


def probe_of(spec: RunSpec) -> MpiProbe:
    return MpiProbe(job_spec(spec), spec.machine, spec.cache_dir)


def keep(spec: RunSpec, age: timedelta = timedelta(), **more: Any) -> None:
    found = {**FOUND, "utc": (datetime.now(UTC) - age).isoformat(timespec="seconds"), **more}
    probe_of(spec).keep(found)


def is_known(spec: RunSpec) -> bool:
    return probe_of(spec).known() is not None


def test_an_answer_counts_for_thirty_days(on: Resolved) -> None:
    spec = on()
    assert not is_known(spec) and probe_of(spec).is_needed
    keep(spec, timedelta(days=29))
    assert is_known(spec) and not probe_of(spec).is_needed
    keep(spec, timedelta(days=31))
    assert not is_known(spec)
    keep(spec, utc="yesterday")
    assert not is_known(spec)


@pytest.mark.parametrize(
    "more",
    [
        {"mpi": "pmix"},
        {"environment": {"A": "1"}},
        {"modules": ["gcc"]},
        {"setup": ["true"]},
        {"srun": ["--network=x"]},
        {"container": "apptainer", "container_image": "a.sif"},
        {"partition": "other"},
        {"python": "other"},
        {"name": "other"},
        {"gpus_per_node": 2},
    ],
)
def test_an_answer_is_of_one_environment(on: Resolved, more: dict[str, Any]) -> None:
    keep(on())
    assert not is_known(on(**more))


def test_modules_loaded_by_hand_count_where_the_preset_loads_none(
    on: Resolved, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADEDMODULES", "openmpi/4")
    bare = on()
    full = on(modules=["gcc"])
    keep(bare)
    keep(full)
    monkeypatch.setenv("LOADEDMODULES", "openmpi/5")
    assert (is_known(bare), is_known(full)) == (False, True)


def test_minutes_and_size_change_no_answer(on: Resolved) -> None:
    keep(on())
    assert is_known(on(minutes=99, nodes=1, ranks_per_node=4))


def test_an_answer_of_one_node_says_nothing_of_two(on: Resolved) -> None:
    one = [{**rank, "node": "n1"} for rank in FOUND["ranks"]]
    keep(on(), ranks=one, nodes=1)
    assert not is_known(on())
    assert is_known(on(nodes=1, ranks_per_node=4))
    keep(on(), ranks=one, nodes=2)  # two nodes under one host name
    assert is_known(on())


def test_runs_that_need_none(resolved: Resolved) -> None:
    for overrides in (["cluster=local"], ["cluster=slurm", "machine=simulated"]):
        spec = resolved(*overrides)
        assert not probe_of(spec).is_needed


def test_two_ranks_start_as_all_would(on: Resolved, tmp_path: Path) -> None:
    spec = on(gpus_per_node=2, device_order=[1, 0], python="py", srun=["--network=x"])
    folder = RunFolder(tmp_path)
    argv = probe_of(spec).argv(folder)
    assert argv[:5] == [
        "srun",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
    ]
    assert {"--mpi=pmi2", "--gpus-per-node=2", "--gpu-bind=none", "--network=x"} < set(argv)
    assert argv[-6:] == [
        "py",
        str(folder.code_zip),
        "gems.engine.transport.probe",
        str(probe_json(folder)),
        "auto",
        "1,0",
    ]
    one = on(nodes=1, ranks_per_node=4)
    assert probe_of(one).argv(folder)[1:4] == ["--nodes=1", "--ntasks=2", "--ntasks-per-node=2"]
    site = on(launcher="ibrun", python="py")
    assert probe_of(site).argv(folder)[:4] == ["ibrun", "-n", "2", "py"]


def ended(*tail: str, code: int = 1, timed_out: bool = False) -> Ended:
    return Ended(code, tail, timed_out=timed_out)


@pytest.mark.parametrize(
    ("left", "how", "error", "says"),
    [
        (
            {
                "error": "x",
                "config_error": ["cluster.mpi", "default", "MPI sees a world of 1", "give pmi2"],
                "exit_code": 2,
            },
            ended(),
            ConfigError,
            r"^cluster\.mpi=pmi2: MPI sees a world of 1; give pmi2$",
        ),
        (
            {"error": "ImportError: libmpi.so", "config_error": [], "exit_code": 4},
            ended(),
            RankFailedError,
            "ImportError: libmpi",
        ),
        (
            None,
            ended(
                "OMPI was not built with SLURM's PMI support",
                "srun: error: n1: task 0: Exited with exit code 1",
            ),
            RankFailedError,
            (
                "ended with code 1 before MPI had started, with cluster.mpi=pmi2: OMPI was not"
                " built .*; MPICH takes"
            ),
        ),
        (
            None,
            ended("waiting", timed_out=True),
            StalledError,
            "did not end within 180 s: waiting; MPICH takes cluster.mpi=pmi2",
        ),
        (
            {**FOUND, "wall_s": None, "device_message": "trying"} | {"takes_device_memory": True},
            ended("Segmentation fault"),
            ConfigError,
            (
                r"^machine\.transport=auto: MPI claims to take .* when it got some: Segmentation"
                r" fault; use"
            ),
        ),
        (
            {**FOUND, "ranks": [FOUND["ranks"][0], {**FOUND["ranks"][1], "sees_folder": False}]},
            ended(code=0),
            ConfigError,
            r"^runs_dir=.*: node n2 does not see it; use a folder that all nodes share$",
        ),
        (
            FOUND,
            ended("Aborted", code=134),
            RankFailedError,
            "the probe's two ranks ended with code 134: Aborted",
        ),
    ],
)
def test_what_a_failed_probe_says(
    on: Resolved,
    tmp_path: Path,
    left: dict[str, Any] | None,
    how: Ended,
    error: type[GemsError],
    says: str,
) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    if left is not None:
        write_json(
            probe_json(folder),
            {key: value for key, value in left.items() if value is not None or key != "wall_s"},
        )
    with pytest.raises(error, match=says):
        probe_of(on()).read(how, folder)


def test_what_was_found_in_one_line() -> None:
    assert (
        describe_probe(FOUND)
        == "MPICH Version: 5.0.2; 2 ranks on n1, n2; 2.0 us, 5.00 GB/s; no GPU"
    )
    gpu = {
        **FOUND,
        "takes_device_memory": True,
        "device_message": "passed",
        "device": {**HOST, "bytes_per_s": 2e10},
    }
    assert describe_probe(gpu).endswith("; MPI takes device memory, 2.0 us, 20.00 GB/s")
    staged = {**gpu, "device_message": "not taken"}
    assert describe_probe(staged).endswith(
        "; device memory goes through the host: though MPI claims to take it"
    )
    shown = probe_table({**gpu, "cluster": "mini"})
    assert "GPU to GPU" in shown and "machine.link_bytes_per_s=5e+09" in shown


SRUN = """
result=
for word; do case "$word" in *probe.json) result=$word ;; esac; done
/bin/cat {found} > "$result"
exit {code}"""


def test_a_job_probes_once(slurm: FakeSlurm, on: Resolved, tmp_path: Path, capsys: Capture) -> None:
    spec = on()
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    probe_json(folder).write_text("of an earlier attempt")
    found = tmp_path / "found.json"
    found.write_text(json.dumps({**FOUND, "utc": datetime.now(UTC).isoformat()}))
    slurm.does("srun", SRUN.format(found=found, code=0))
    environment = {"PATH": str(slurm.here)}
    for _ in range(2):
        probe_of(spec).run_first(folder, environment)
    assert len(slurm.asked()) == 1
    assert capsys.readouterr().err == f"jobs: probe: {describe_probe(FOUND)}\n"
    assert is_known(spec) and json.loads(probe_json(folder).read_text())["mpi"] == FOUND["mpi"]


def test_a_failed_probe_is_not_kept(slurm: FakeSlurm, on: Resolved, tmp_path: Path) -> None:
    spec = on()
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    slurm.does("srun", "echo no PMI here; exit 1")
    for _ in range(2):
        with pytest.raises(RankFailedError, match="no PMI here"):
            probe_of(spec).run_first(folder, {"PATH": str(slurm.here)})
    assert len(slurm.asked()) == 2 and not is_known(spec)


def test_a_probe_that_is_stopped_is_no_failure_and_not_kept(
    on: Resolved, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    spec = on()
    folder = RunFolder(tmp_path / "run")
    stopped = Ended(-15, (), stopped_by="SIGTERM")
    monkeypatch.setattr(mpi_probe, "run_ranks", lambda *words, **more: stopped)
    assert probe_of(spec).run_first(folder, {}) is stopped
    assert not is_known(spec)


def test_the_probes_own_job(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    """A stand-in runs the very script, whose srun leaves an answer.

    Its job has left the queue then.
    """
    monkeypatch.setenv("GEMS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    found = tmp_path / "found.json"
    found.write_text(json.dumps({**FOUND, "utc": datetime.now(UTC).isoformat()}))
    slurm.does("srun", SRUN.format(found=found, code=0))
    slurm.does(
        "sbatch",
        'for word; do :; done; /bin/sh "$word" && echo "No maintenance. Submitted batch job 7"',
    )
    slurm.says("squeue", error="slurm_load_jobs error: Invalid job id specified", code=1)
    words = ["cluster=mini", f"runs_dir='{tmp_path / 'my runs'}'"]
    assert probe(words, Options(json=True)) == 0
    assert json.loads(capsys.readouterr().out)["nodes"] == 2
    (line,) = [line for line in slurm.asked() if line.startswith("srun")]
    assert "--ntasks=2 --ntasks-per-node=1" in line and "gems.engine.transport.probe" in line
    assert any("--jobs=7" in line for line in slurm.asked())
    (script,) = tmp_path.glob("my runs/probe-mini-*/logs/.submission_file_*.sh")
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"#SBATCH --time=5", "#SBATCH --nodes=2", "#SBATCH --account=physics"} < set(options)
    assert not any("signal" in line for line in options)


def test_a_job_that_does_not_start_is_cancelled(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.cli.probe.POLL_S", 0.01)
    monkeypatch.setattr("jobs.cli.probe._minutes", lambda options: 0.005)
    slurm.says("sbatch", "Submitted batch job 7")
    slurm.says("squeue", "7|PENDING|N/A|Resources|probe")
    slurm.says("scancel")
    with pytest.raises(
        StalledError,
        match=r"job 7 has not ended within 0\.005 min \(PENDING Resources\), and is cancelled",
    ):
        probe(["cluster=mini", f"runs_dir={tmp_path}"], Options())
    assert slurm.asked()[-1] == "scancel 7"


def test_a_job_whose_submission_is_interrupted_is_cancelled(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.does("sbatch", f"kill -INT {os.getpid()}; echo Submitted batch job 7")
    slurm.says("scancel")
    with pytest.raises(KeyboardInterrupt):
        probe(["cluster=mini", f"runs_dir={tmp_path}"], Options())
    assert slurm.asked()[-1] == "scancel 7"


def test_a_submission_without_a_job_is_no_answer(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.says("sbatch")
    slurm.says("squeue", "JOBID|STATE|COMMAND")
    with refused("cannot determine whether SLURM accepted the job"):
        probe(["cluster=mini", f"runs_dir={tmp_path}"], Options())


@pytest.mark.parametrize("limit", ["0", "x", "1.5"])
def test_a_limit_that_is_none(limit: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    with refused(f"^--limit={limit}: "):
        probe(["cluster=mini", f"runs_dir={tmp_path}"], Options(chosen={"--limit": limit}))


def test_a_simulated_machine_has_no_ranks() -> None:
    with refused("has no ranks to probe"):
        probe(["machine=simulated"], Options())
