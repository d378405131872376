"""Test the preflight.

It is one list of checks before anything is queued, shown by a dry run too, and a question before
expensive jobs.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gems.cli.framework import Options
from gems.config.schema import RunSpec
from gems.errors import DoesNotFitError, TryLaterError
from gems.plan.evaluate import evaluate, simulate
from gems.runs.folder import RunFolder
from jobs.batch.preset_limits import is_on_site
from jobs.batch.resources import job_spec
from jobs.cli.submit import submit
from jobs.launch.submission import start_run
from jobs.preflight.checks import check_free_space, check_host_memory, find_storage
from jobs.preflight.cost import describe_cost, is_confirmed
from jobs.schedulers.slurm_client.limits import describe_start, parse_estimate
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Capture, MonkeyPatch, Resolved, refused, with_cluster

SEEN = (
    "sbatch: Job 41 to start at 2030-01-02T03:04:05 using 4 processors on nodes n[1-2] in partition"
    " debug"
)
DRY = Options(flags=frozenset({"--dry-run"}))
PARTITION = "PartitionName=debug Default=YES MaxNodes=UNLIMITED MaxTime=60 State=UP TotalNodes=2"


@pytest.fixture
def site(slurm: FakeSlurm) -> FakeSlurm:
    """A SLURM that takes jobs: sbatch keeps what it is given, and tells a start when it is only asked."""
    slurm.says("scontrol", PARTITION)
    slurm.says("sinfo", "debug*|2|4|9000|gpu:2|idle")
    slurm.says("sacctmgr", error="Slurm accounting storage is disabled", code=1)
    slurm.says("squeue")
    slurm.does(
        "sbatch",
        f"""
case "$*" in
--test-only) /bin/cat > {slurm.here}/tested; echo '{SEEN}' >&2 ;;
*) echo "Submitted batch job 41" ;;
esac""",
    )
    return slurm


@pytest.fixture
def on(resolved: Resolved, tmp_path: Path) -> Resolved:
    """Compose a run on the mini cluster, with some of its values changed."""

    def make(*overrides: str, **more: Any) -> RunSpec:
        spec = resolved("cluster=mini", *overrides)
        return replace(spec, runs_dir=str(tmp_path / "runs"), cluster=replace(spec.cluster, **more))

    return make


def rows(text: str) -> dict[str, dict[str, Any]]:
    return {row["check"]: row for row in json.loads(text)["preflight"]}


def test_every_check_has_a_row(
    site: FakeSlurm, on: Resolved, tmp_path: Path, capsys: Capture
) -> None:
    spec = on()
    assert submit(spec, replace(DRY, json=True)) == 0
    out = capsys.readouterr().out
    found = rows(out)
    assert list(found) == [
        "configuration",
        "folder",
        "limits",
        "partition",
        "account",
        "sbatch",
        "cost",
        "probe",
        "memory",
        "room",
        "time",
    ]
    assert all(row.keys() == {"check", "ok", "said"} for row in found.values())
    assert (found["partition"]["ok"], found["account"]["ok"], found["sbatch"]["ok"]) == (
        True,
        None,
        True,
    )
    assert "to start in about" in found["sbatch"]["said"] and "on n[1-2]" in found["sbatch"]["said"]
    assert (site.here / "tested").read_text() == json.loads(out)["script"]
    assert not (tmp_path / "runs").exists()


def test_the_table_of_a_submission(site: FakeSlurm, on: Resolved, capsys: Capture) -> None:
    spec = on()
    assert submit(spec, Options()) == 0
    out, err = capsys.readouterr()
    assert out.startswith("job     41: ")
    lines = err.splitlines()
    assert len(lines) == 11 and all(line.startswith(("jobs: ok ", "jobs: -- ")) for line in lines)
    assert any(
        line.startswith("jobs: ok   partition     debug: 2 of 2 nodes up, 2 idle") for line in lines
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"partition": "no"}, r"^cluster\.partition=no: "),
        ({"minutes": 61}, r"^cluster\.minutes=61: partition debug allows at most 60"),
        ({"gpus_per_node": 3, "ranks_per_node": 2}, r"^cluster\.gpus_per_node=3: "),
        ({"cpus_per_rank": 3}, r"^cluster\.cpus_per_rank=3: "),
    ],
)
def test_nothing_is_submitted_of_what_is_refused(
    site: FakeSlurm, on: Resolved, tmp_path: Path, more: dict[str, Any], says: str, capfd: Capture
) -> None:
    spec = on(**more)
    with refused(says):
        submit(spec, Options())
    assert capfd.readouterr() == ("", "")
    with refused(says):
        start_run(spec)
    assert not (tmp_path / "runs").exists()
    with refused(says):
        submit(spec, DRY)
    assert capfd.readouterr() == ("", "")
    assert all("--test-only" in words for words in site.asked() if words.startswith("sbatch"))


def test_a_script_that_sbatch_refuses(site: FakeSlurm, on: Resolved, tmp_path: Path) -> None:
    site.says(
        "sbatch",
        error="allocation failure: Requested node configuration is not available\n",
        code=1,
    )
    with refused(
        r"^cluster=mini: sbatch refuses the job: Requested node configuration is not"
        r" available; see"
    ):
        submit(on(), Options())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("state", "nodes", "reason", "says"),
    [
        (
            "UP",
            "1|4|9000|gpu:2|drained",
            "Requested node configuration is not available",
            "1 of 2 nodes of partition debug are up (others: drained)",
        ),
        (
            "UP",
            "1|4|9000|gpu:2|down*",
            "Required node not available (down, drained or reserved)",
            "1 of 2 nodes of partition debug are up (others: down)",
        ),
        ("DOWN", "1|4|9000|gpu:2|idle", "", "partition debug is down"),
    ],
)
def test_what_cannot_run_now_is_queued_with_a_warning(
    site: FakeSlurm, on: Resolved, capsys: Capture, state: str, nodes: str, reason: str, says: str
) -> None:
    site.says("scontrol", PARTITION.replace("State=UP", f"State={state}"))
    site.says("sinfo", "debug*|1|4|9000|gpu:2|idle", f"debug*|{nodes}")
    answer = f"echo 'allocation failure: {reason}' >&2; exit 1" if reason else f"echo '{SEEN}' >&2"
    site.does(
        "sbatch", f"case $1 in --test-only) {answer} ;; *) echo Submitted batch job 41 ;; esac"
    )
    assert submit(on(), Options()) == 0
    out, err = capsys.readouterr()
    assert out.startswith("job     41: ")
    warned = {line.split()[2]: line for line in err.splitlines() if line.startswith("jobs: warn")}
    assert says in warned["partition"]
    assert not reason or warned["sbatch"].endswith(f"it would wait in the queue: {says}")


def test_a_refusal_for_another_reason_is_one_though_nodes_are_drained(
    site: FakeSlurm, on: Resolved
) -> None:
    site.says("sinfo", "debug*|2|4|9000|gpu:2|drained")
    site.says("sbatch", error="allocation failure: Invalid feature specification\n", code=1)
    with refused("sbatch refuses the job: Invalid feature specification"):
        submit(on(), Options())


def test_a_partition_that_takes_no_jobs_is_for_later(site: FakeSlurm, on: Resolved) -> None:
    site.says("scontrol", PARTITION.replace("State=UP", "State=DRAIN"))
    with refused(r"takes no jobs now .state DRAIN.", TryLaterError):
        submit(on(), Options())


def test_a_slurm_that_cannot_be_reached_refuses_nothing(site: FakeSlurm, on: Resolved) -> None:
    for name in ("scontrol", "sinfo", "squeue", "sbatch"):
        site.says(name, error="Unable to contact slurm controller (connect failure)\n", code=1)
    spec = on()
    with refused("SLURM cannot be reached, and nothing is submitted", TryLaterError):
        submit(spec, Options())
    assert RunFolder.of(spec).read_status()["state"] == "prepared"
    site.says("sbatch", "Submitted batch job 42")
    assert submit(spec, Options()) == 0  # the folder was given back


def test_more_memory_than_the_device_has_is_exit_code_3(
    site: FakeSlurm, on: Resolved, tmp_path: Path, capfd: Capture
) -> None:
    spec = on("machine.device_bytes=100000")
    for options in (Options(), DRY):
        with pytest.raises(DoesNotFitError, match=r"above machine\.device_bytes=100000") as caught:
            submit(spec, options)
        assert caught.value.exit_code == 3
    assert capfd.readouterr().out == ""
    assert not (tmp_path / "runs").exists()
    assert [
        words for words in site.asked() if words.startswith("sbatch") and "--test-only" not in words
    ] == []


def test_predicted_memory_beside_the_device(site: FakeSlurm, on: Resolved, capsys: Capture) -> None:
    submit(on("machine.device_bytes=4294967296"), replace(DRY, json=True))
    row = rows(capsys.readouterr().out)["memory"]
    assert row["ok"] is True and row["said"].endswith(" of 4.00 GiB")


def test_more_host_memory_than_a_node_has(on: Resolved) -> None:
    spec = on("memory=vdnn_all")
    peak = evaluate(spec).peak
    assert peak is not None and peak.host_bytes > 0
    check_host_memory(peak.host_bytes, spec.memory, peak)
    with pytest.raises(DoesNotFitError, match=r"above cluster\.node_memory_bytes="):
        check_host_memory(peak.host_bytes - 1, spec.memory, peak)


def test_steps_that_take_longer_than_the_minutes(
    site: FakeSlurm, on: Resolved, capsys: Capture
) -> None:
    """Ten hours of timed waits in ten minutes: a warning, for a prediction may be wrong."""
    spec = on("machine=emulated", "cost.unit_s=10", "train.steps=600")
    seconds = evaluate(spec).steps_s
    assert seconds is not None and seconds > 600
    assert submit(spec, replace(DRY, json=True)) == 0
    row = rows(capsys.readouterr().out)["time"]
    assert row["ok"] is False and "would not finish" in row["said"]


@pytest.mark.cases
def test_the_predicted_minutes_have_the_step_under_noise(resolved: Resolved) -> None:
    words = ("machine=emulated", "cost.unit_s=10", "train.steps=600", "machine.noise=0.1")
    spec = resolved("cluster=mini", *words)
    assert evaluate(spec).steps_s == 600 * simulate(spec).step_s
    assert simulate(spec).interval[0] < simulate(spec).step_s


def test_rates_of_a_processor_tell_nothing_of_a_gpu(on: Resolved) -> None:
    spec = on()
    made = evaluate(spec)
    assert made.profile is not None and (made.steps_s or 0) > 0
    assert replace(made, spec=with_cluster(spec, gpus_per_node=2)).steps_s is None


def test_the_time_of_a_schedule_found_under_a_cap_is_predicted(resolved: Resolved) -> None:
    """Its cap is in units of equal parts, which the parts of the profile are not."""
    words = (
        "experiment=1f1b",
        "schedule=capped",
        "schedule.activation_cap=1",
        "schedule.budget_s=0.2",
    )
    assert (evaluate(resolved(*words)).steps_s or 0) > 0


def test_a_preset_of_elsewhere_is_not_asked_here(
    site: FakeSlurm, on: Resolved, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    spec = on(hosts=["login*.far.away"], partition="theirs")
    assert not is_on_site(spec.cluster)
    assert submit(spec, replace(DRY, json=True)) == 0
    found = rows(capsys.readouterr().out)
    assert {found[name]["ok"] for name in ("partition", "account", "sbatch")} == {None}
    assert site.asked() == []
    with refused(r"^cluster=\w+: is not submitted from .* none of its hosts \(login\*.far.away\)"):
        submit(spec, Options())
    assert site.asked() == []
    monkeypatch.setenv("SLURM_JOB_ID", "41")  # compute nodes have names of their own
    with refused(r"cluster.partition=theirs"):
        submit(spec, Options())


def test_without_any_slurm_a_dry_run_goes_on(
    slurm: FakeSlurm, on: Resolved, capsys: Capture
) -> None:
    assert submit(on(), replace(DRY, json=True)) == 0
    found = rows(capsys.readouterr().out)
    assert found["sbatch"] == {
        "check": "sbatch",
        "ok": None,
        "said": "not asked: sbatch is not on PATH",
    }


@pytest.mark.parametrize(
    ("said", "start", "words"),
    [
        (
            SEEN,
            datetime(2030, 1, 2, 3, 4, 5),
            "sbatch accepts it, to start in about 3.0 h (2030-01-02 03:04) on n[1-2]",
        ),
        (
            SEEN.replace("2030", "2029"),
            datetime(2029, 1, 2, 3, 4, 5),
            "sbatch accepts it, to start at once on n[1-2]",
        ),
        ("sbatch: Job 7 to start at Unknown", None, "sbatch accepts it, and estimates no start"),
        ("", None, "sbatch accepts it, and estimates no start"),
    ],
)
def test_the_estimate_of_a_start(said: str, start: datetime | None, words: str) -> None:
    found, nodes = parse_estimate(said)
    assert found == start
    assert describe_start(found, nodes, datetime(2030, 1, 2, 0, 4, 5)) == words


def test_cost_in_words(on: Resolved) -> None:
    one = job_spec(on(gpus_per_node=4, minutes=90, charge_per="gpu-hour", charge_rate=2.0))
    assert describe_cost([one]) == "12 GPU-hours (8 GPUs for 90 min, charge 24 gpu-hour)"
    assert describe_cost([one, one]) == "24 GPU-hours (2 jobs, charge 48 gpu-hour)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "agreed"),
    [("y\n", True), ("YES\n", True), ("\n", False), ("", False), ("no\n", False)],
)
def test_a_question_on_the_terminal(
    site: FakeSlurm,
    on: Resolved,
    answer: str,
    agreed: bool,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    spec = on(gpus_per_node=2, minutes=60, confirm_above_gpu_hours=3.9)
    assert submit(spec, Options()) == (0 if agreed else 1)
    out, err = capsys.readouterr()
    assert (
        "4 GPU-hours (4 GPUs for 60 min), above cluster.confirm_above_gpu_hours=3.9: submit? [y/N] "
        in err
    )
    assert RunFolder.of(spec).path.exists() == agreed == out.startswith("job     41")
    assert ("nothing is submitted" in err) != agreed


def test_nobody_is_there_to_ask(
    site: FakeSlurm, on: Resolved, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    spec = on(gpus_per_node=2, minutes=60, confirm_above_gpu_hours=0)
    with refused(
        r"^cluster\.confirm_above_gpu_hours=0: 4 GPU-hours .* stdin is no terminal; add --yes$"
    ):
        submit(spec, Options())
    with refused(r"stdin is no terminal"):
        start_run(spec)
    assert not (tmp_path / "runs").exists()
    assert start_run(spec, assume_yes=True) == 0


def test_no_question_below_the_limit(resolved: Resolved, on: Resolved) -> None:
    for limit in (None, 4.0):
        job = job_spec(on(gpus_per_node=2, minutes=60, confirm_above_gpu_hours=limit))
        assert is_confirmed([job], assume_yes=False)
    here = job_spec(resolved())
    assert is_confirmed([with_cluster(here, confirm_above_gpu_hours=0.0)], assume_yes=False)


def test_a_folder_that_cannot_be_written(on: Resolved, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with refused(r"^runs_dir=.*/runs: cannot write there \(Not a directory: .*/runs\)"):
        find_storage(RunFolder.of(on()), on().runs_dir)


def test_free_space(on: Resolved, tmp_path: Path) -> None:
    spec = on()
    storage = find_storage(RunFolder.of(spec), spec.runs_dir)
    assert storage.path == tmp_path and storage.kind != "unknown"
    check_free_space(spec.runs_dir, replace(storage, free_bytes=1 << 30), 1 << 30)
    for poor in (replace(storage, free_bytes=1 << 20), replace(storage, files=3)):
        with refused(r"^runs_dir="):
            check_free_space(spec.runs_dir, poor)
    with refused(r"1.00 GiB are free there, and the run writes 2.00 GiB"):
        check_free_space(spec.runs_dir, replace(storage, free_bytes=1 << 30), 2 << 30)
    kinds = ("tmpfs", "nfs4", "lustre", "fuse.beegfs", "ext4")
    assert [replace(storage, kind=kind).is_shared for kind in kinds] == [
        False,
        True,
        True,
        True,
        None,
    ]
