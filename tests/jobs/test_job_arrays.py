"""Points of a study with equal jobs: one job array, on a SLURM that only notes what it is asked."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gems.cli.framework import main
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.runs.owner import own_job_id, take
from jobs.__main__ import VERBS
from jobs.launch import own_job
from jobs.schedulers.slurm_client.jobs import SACCT, SCONTROL, SQUEUE, job_order, query_jobs
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Capture, MonkeyPatch

BASE = [
    "data=synthetic",
    "machine=emulated",
    "cost=uniform",
    "schedule=1f1b",
    "parallel.micro_batches=4",
    "cluster=slurm",
    "cluster.partition=debug",
    "cluster.nodes=1",
    "train.steps=2",
    "benchmark.skip_steps=1",
]
SBATCH = """
case "$*" in *--test-only*) echo "Job 7 to start at 2026-11-25T20:42:22 using 2 processors on nodes n1" >&2; exit;; esac
tasks=$(/bin/sed -n 's/#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
if [ "${{tasks:-0}}" -ge {most} ]; then
    echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
    echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy" >&2
    exit 1
fi
number=$(( $(/bin/cat {here}/number) + 1 ))
echo $number > {here}/number
/bin/cp "$1" {here}/$number.sh
for task in $(/usr/bin/seq 0 ${{tasks:-0}}); do
    echo "$number${{tasks:+_$task}}|PENDING|N/A|Priority|mine" >> {here}/queue
done
echo "Submitted batch job $number"
"""
SQUEUE_SCRIPT = """
case "$*" in *--noheader*) exec /bin/cat {here}/queue ;; esac
echo "JOBID|STATE|COMMAND"
/bin/sed 's,|\\([A-Z]*\\)|.*,|\\1|/x/job.sh,' {here}/queue
"""
PARTITION = (
    "PartitionName=debug Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP TotalNodes=200"
)
SCONTROL_SCRIPT = (
    'case "$*" in *config) echo "MaxArraySize = {size}";; *) echo "{partition}";; esac'
)


class Site:
    """A SLURM that keeps every job waiting, takes at most so many tasks at once, and arrays of so many."""

    def __init__(self, slurm: FakeSlurm) -> None:
        self.slurm = slurm
        self.here = slurm.here
        (self.here / "number").write_text("40")
        (self.here / "queue").touch()
        slurm.does("squeue", SQUEUE_SCRIPT.format(here=self.here))
        slurm.says("sinfo", "debug*|200|64|256000|gpu:4|idle")
        slurm.says("sacctmgr", "me|normal")
        self.allows()

    def allows(self, *, size: int = 1001, most: int = 100000) -> None:
        self.slurm.does("sbatch", SBATCH.format(here=self.here, most=most))
        self.slurm.does("scontrol", SCONTROL_SCRIPT.format(size=size, partition=PARTITION))

    def script(self, number: int) -> str:
        return (self.here / f"{number}.sh").read_text()

    def submissions(self) -> int:
        return sum(
            line.startswith("sbatch ") and "--test-only" not in line for line in self.slurm.asked()
        )


@pytest.fixture
def site(slurm: FakeSlurm) -> Site:
    return Site(slurm)


@pytest.fixture
def study(tmp_path: Path, capfd: Capture) -> Callable[..., tuple[int, list[dict[str, Any]], str]]:
    """Call `jobs study`, and give the exit code, the points and what was said."""

    def call(*words: str, **axes: list[Any]) -> tuple[int, list[dict[str, Any]], str]:
        path = tmp_path / "mine.yaml"
        keys = {"seed": "seed", "partitions": "parallel.partitions"}
        path.write_text(
            yaml.safe_dump(
                {"base": BASE, "axes": {keys[name]: values for name, values in axes.items()}}
            )
        )
        code = main(
            "jobs",
            VERBS,
            ["study", f"study={path}", f"runs_dir={tmp_path / 'runs'}", "--json", *words],
        )
        out, err = capfd.readouterr()
        return code, json.loads(out)["points"] if out else [], err

    return call


Study = Callable[..., tuple[int, list[dict[str, Any]], str]]


def test_equal_points_are_one_array_and_one_alone_is_a_job(study: Study, site: Site) -> None:
    code, points, _ = study(seed=[1, 2], partitions=[1, 2])
    assert (code, [point["job_id"] for point in points]) == (0, ["41_0", "41_1", "42_0", "42_1"])
    assert site.submissions() == 2
    assert [point["state"] for point in points] == ["pending"] * 4
    assert study(seed=[1, 2, 3], partitions=[1, 2])[1][-1]["job_id"] == "44"
    assert "--array" not in site.script(43)


def test_an_array_runs_at_most_so_many_tasks_at_once(study: Study, site: Site) -> None:
    assert study("cluster.max_parallel=2", seed=[1, 2, 3])[0] == 0
    assert "#SBATCH --array=0-2%2\n" in site.script(41)
    site.allows(size=0)  # single jobs would all run at once
    code, _, said = study("cluster.max_parallel=2", seed=[4, 5, 6])
    assert code == 2 and "cluster.max_parallel=2: limits a job array, and this site" in said
    assert site.submissions() == 1
    code, _, said = study("cluster.max_parallel=2", "cluster.array=false", seed=[7, 8])
    assert code == 2 and "cluster.max_parallel=2: limits the job arrays of SLURM" in said


def test_the_script_finds_the_run_of_its_task(study: Study, site: Site, tmp_path: Path) -> None:
    _, points, _ = study("name='my runs'", seed=[1, 2, 3])
    script = site.script(41)
    home = tmp_path / "runs" / "mine"
    assert "#SBATCH --array=0-2%3\n" in script
    assert f"#SBATCH --output={home}/logs/%A_%a_0_log.out\n" in script
    lines = script[: script.index("export SRUN")]
    command = script.splitlines()[-1]
    (home / "logs" / "41_2_0_log.out").write_text("began")
    variables = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "2"}
    say = command.replace("exec", "printf '%s\\n'")
    ended = subprocess.run(
        ["/bin/bash", "-c", f"{lines}\n{say}"],
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    folder = RunFolder(Path(points[2]["run_folder"]))
    assert ended.stdout.splitlines()[-3:] == [
        str(folder.code_zip),
        "submitit.core._submit",
        str(folder.logs),
    ]
    assert (folder.logs / "41_2_0_log.out").read_text() == "began"
    assert (folder.logs / "41_2_submitted.pkl").exists()
    assert folder.job_sh.read_text() == script
    assert folder.read_status()["job_id"] == "41_2"
    same = {
        (Path(point["run_folder"]) / "provenance" / "code.zip").stat().st_ino for point in points
    }
    assert len(same) == 1  # hashed and packed once


def test_the_next_call_submits_what_is_missing_by_one_query(study: Study, site: Site) -> None:
    _, points, _ = study(seed=[1, 2, 3, 4])
    gone = {points[1]["job_id"], points[3]["job_id"]}
    queue = (site.here / "queue").read_text().splitlines()
    (site.here / "queue").write_text(
        "".join(f"{line}\n" for line in queue if line.split("|")[0] not in gone)
    )
    site.slurm.says("sacct")
    before = len(site.slurm.asked())
    _, points, said = study(seed=[1, 2, 3, 4])
    assert "(2 failed, 2 pending); 2 to run" in said
    assert [point["job_id"] for point in points] == ["41_0", "42_0", "41_2", "42_1"]
    asked = [line.split()[0] for line in site.slurm.asked()[before:]]
    assert (
        asked.count("squeue") == 3
    )  # states before, one for the folders to use again, states after
    assert len(asked) <= 12


def test_the_failed_points_of_a_study_are_resubmitted_as_one_array(
    study: Study, site: Site, tmp_path: Path, capfd: Capture
) -> None:
    _, points, _ = study(seed=[1, 2, 3, 4])
    (site.here / "queue").write_text(
        "41_0|PENDING|N/A|Priority|mine\n41_3|PENDING|N/A|Priority|mine\n"
    )
    site.slurm.says("sacct")
    code = main("jobs", VERBS, ["resubmit", f"runs_dir={tmp_path / 'runs'}", "mine", "--json"])
    out, said = capfd.readouterr()
    rows = json.loads(out)["runs"]
    assert (code, [(row["outcome"], row["job_id"]) for row in rows]) == (
        0,
        [("submitted", "42_0"), ("submitted", "42_1")],
    ), said
    assert [row["run_folder"] for row in rows] == [point["run_folder"] for point in points[1:3]]
    assert site.submissions() == 2
    assert [point["job_id"] for point in study(seed=[1, 2, 3, 4])[1]] == [
        "41_0",
        "42_0",
        "42_1",
        "41_3",
    ]


def test_arrays_are_as_large_as_the_site_allows_and_none_where_it_allows_none(
    study: Study, site: Site
) -> None:
    site.allows(size=2)
    assert [point["job_id"] for point in study(seed=[1, 2, 3, 4])[1]] == [
        "41_0",
        "41_1",
        "42_0",
        "42_1",
    ]
    site.allows(size=0)
    assert [point["job_id"] for point in study(seed=[5, 6])[1]] == ["43", "44"]
    site.allows()
    assert [point["job_id"] for point in study("cluster.array=false", seed=[7, 8])[1]] == [
        "45",
        "46",
    ]
    assert [point["job_id"] for point in study(seed=[9, 10])[1]] == ["47_0", "47_1"]


def test_a_full_queue_gets_as_many_as_it_takes(study: Study, site: Site) -> None:
    site.allows(most=3)
    _, points, said = study("+cluster.limits=[{queued_jobs: 5}]", seed=list(range(8)))
    assert [point["job_id"] for point in points[:5]] == ["41_0", "41_1", "42_0", "42_1", "42_2"], (
        said
    )
    assert [point["state"] for point in points] == ["pending"] * 5 + ["waiting"] * 3
    assert "the queue is full; 3 points wait for the next call (or --wait)" in said


def test_points_of_one_task_run_in_turn(study: Study, site: Site) -> None:
    _, points, _ = study("cluster.runs_per_job=2", seed=[1, 2, 3, 4])
    assert [point["job_id"] for point in points] == ["41_0", "41_0", "41_1", "41_1"]


def test_a_point_that_cannot_be_prepared_is_left_out_of_its_array(
    study: Study, site: Site, tmp_path: Path
) -> None:
    _, points, _ = study("--dry-run", seed=[1, 2, 3])
    blocked = Path(points[1]["run_folder"])
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("a file")
    code, points, said = study(seed=[1, 2, 3])
    assert code == 2 and "point 2 of 3 (seed=2) cannot start: runs_dir=" in said
    assert [point["job_id"] for point in points] == ["41_0", None, "41_1"]


def test_a_job_that_the_site_refuses_is_asked_about_once(study: Study, site: Site) -> None:
    code, points, said = study("cluster.partition=other", seed=list(range(6)))
    assert (
        code == 2 and said.count("cluster.partition=other: this SLURM has no such partition") == 6
    )
    assert [point["job_id"] for point in points] == [None] * 6 and site.submissions() == 0


def test_a_hundred_points_are_composed_and_none_is_submitted(study: Study, site: Site) -> None:
    assert len(study("--dry-run", seed=list(range(25)), partitions=[1, 2, 3, 4])[1]) == 100
    assert site.submissions() == 0


def test_the_number_of_commands_is_that_of_the_sizes_and_not_of_the_points(
    study: Study, site: Site
) -> None:
    code, points, _ = study(seed=list(range(10)), partitions=[1, 2, 3, 4])
    assert code == 0 and len({point["job_id"] for point in points}) == 40
    asked = [" ".join(line.split()[:2]).partition("/")[0].strip() for line in site.slurm.asked()]
    assert Counter(asked) == {
        "sbatch": 4,
        "sbatch --test-only": 4,
        "scontrol show": 1,
        "scontrol --all": 1,
        "sinfo --all": 1,
        "sacctmgr --noheader": 1,
        "squeue --noheader": 1,
    }


def test_a_later_job_comes_after_every_task_of_an_array() -> None:
    assert sorted(["41_10", "42", "9", "41_9"], key=job_order) == ["9", "41_9", "41_10", "42"]


def test_every_source_knows_tasks_by_the_number_of_their_array(slurm: FakeSlurm) -> None:
    slurm.says(
        "squeue",
        "41_0|RUNNING|N/A|None|mine",
        "41_1|PENDING|N/A|Priority|mine",
        "42|PENDING|N/A|None|mine",
    )
    slurm.says(
        "sacct",
        "41_0|FAILED|None|Unknown|1:0|n1|Unknown|00:01:00|01:00:00|",
        "41_[1-2]|PENDING||||||||",
    )
    slurm.says(
        "scontrol",
        "JobId=57 ArrayJobId=41 ArrayTaskId=1 JobName=mine JobState=RUNNING Reason=None Restarts=1",
    )
    assert list(query_jobs(["41_1", "41_0", "42"], SQUEUE).jobs) == ["41_0", "41_1", "42"]
    assert query_jobs(["41_0"], SACCT).jobs["41_0"].state == "FAILED"
    assert query_jobs(["41_1"], SCONTROL).jobs["41_1"].restarts == 1
    squeue, sacct, scontrol = slurm.asked()
    assert (
        squeue.endswith(" --jobs=41,42") and " --array " in squeue and sacct.endswith(" --jobs=41")
    )
    assert re.fullmatch(r"scontrol show job 41_1 --oneliner", scontrol)


def test_a_task_knows_its_number_and_reads_its_own_end(
    monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "JOB_ID": "57",
        "ARRAY_JOB_ID": "41",
        "ARRAY_TASK_ID": "0",
        "RESTART_COUNT": "1",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert own_job_id() == "41_0"
    log = tmp_path / "log"  # slurmstepd writes the number that the task has as a job of its own
    log.write_text(
        "slurmstepd: error: *** JOB 57 ON n1 CANCELLED AT 2026-11-25T20:42:22 DUE TO TIME LIMIT"
        " ***\n"
    )
    monkeypatch.setattr(own_job, "_stderr", lambda: log)
    monkeypatch.setattr(own_job, "LOG_START_BYTES", 0)
    assert own_job.kill_reason() == FailureCause.TIME_LIMIT
    folder = RunFolder(tmp_path)
    owner = take(folder, job_id=own_job_id())
    assert owner.is_mine
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert not owner.is_mine
