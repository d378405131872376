"""Flux and PBS: what is submitted, found, queried and cancelled, and a run that trains in a job of each."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gems.config.schema import RunSpec
from gems.errors import ConfigError, TryLaterError
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.runs.owner import own_job_id
from gems.utils.run_module import RUN_MODULE
from jobs.batch.command import SchedulerError
from jobs.batch.job import UnclearSubmissionError
from jobs.batch.launchers import command
from jobs.batch.resources import job_spec
from jobs.cli.logs import find_log
from jobs.launch import own_job
from jobs.launch.submission import start_run, submit_chain
from jobs.preflight.checks import preflight
from jobs.schedulers import pbs as pbs_module
from jobs.schedulers.scheduler import SCHEDULERS, query_queue, scheduler_of
from jobs.status.cancellation import cancel_all
from jobs.status.job_record import JobRecord
from jobs.status.lookup import Catalogue
from jobs.status.run_status import RunStatus
from tests.helpers.fake_schedulers import FakeScheduler
from tests.helpers.job_helpers import (
    Capture,
    MonkeyPatch,
    Resolved,
    owner_of,
    refused,
    script_of,
    status_of,
    wait_until,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("warm")]
SYSTEMS = ("flux", "pbs")
FIRST = {"flux": "f2kPq", "pbs": "41.server"}
SECOND = {"flux": "f3kPq", "pbs": "42.server"}


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fake(system: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[FakeScheduler]:
    """The commands of a batch system first on PATH, with the mpiexec of these tests."""
    made = FakeScheduler.put(tmp_path / system, system)
    beside = Path(sys.executable).parent
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, (made.here, beside, "/usr/bin", "/bin"))))
    yield made
    made.end_all()


@pytest.fixture
def make(resolved: Resolved, system: str, tmp_path: Path) -> Resolved:
    """Return a small run on one node of a batch system, by its name."""

    def made(name: str = "one", *overrides: str, **cluster: Any) -> RunSpec:
        words = [
            "parallel.partitions=2",
            "cluster.gpus_per_node=0",
            "cluster.ranks_per_node=2",
            "cluster.cpus_per_rank=1",
            "train.steps=4",
        ]
        spec = resolved(f"cluster={system}", *words, *overrides)
        return replace(
            spec,
            name=name,
            runs_dir=str(tmp_path / "runs"),
            cluster=replace(spec.cluster, **cluster),
        )

    return made


def status(spec: RunSpec) -> RunStatus:
    return status_of(RunFolder.of(spec))


def directives(spec: RunSpec, sentinel: str = "#") -> list[str]:
    text = script_of(spec)
    head = text.split("\n\n")[0].splitlines()
    return [line.split(" ", 2 if line.startswith("# flux") else 1)[-1] for line in head[1:]]


@pytest.mark.timeout(300)
def test_a_run_trains_in_a_job(fake: FakeScheduler, make: Resolved, system: str) -> None:
    """From an archive of the code in one, and a long run in the other."""
    spec = make(archive_code=system == "flux")
    fake.hold()
    assert start_run(spec, assume_yes=True) == 0
    folder = RunFolder.of(spec)
    assert (status(spec).state, status(spec).job_id) == ("pending", FIRST[system])
    owner = owner_of(folder)
    assert owner.job_id == FIRST[system]
    with refused(f"belongs to job {FIRST[system]}, which has not ended", TryLaterError):
        start_run(spec, assume_yes=True)
    (fake.here / "hold").unlink()
    wait_until(lambda: not status(spec).is_active, 240.0)
    output = "\n".join(
        path.read_text()
        for path in folder.logs.iterdir()
        if path.is_file() and path.suffix != ".pkl"
    )
    assert status(spec).state == "finished", output
    assert status(spec).step == 4
    assert folder.read_status()["job_id"] == FIRST[system]
    assert find_log(folder).name == "ranks.log" and (folder.path / "trace").is_dir()
    (start,) = json.loads(folder.slurm_json.read_text())["starts"]
    assert (start["job"]["state"], start["end"]["job"]["name"]) == ("RUNNING", "one")
    wait_until(lambda: fake.jobs()[FIRST[system]]["state"] == "ended")  # a moment after the run
    job, errors = SCHEDULERS[system].find_job(FIRST[system])
    assert job is not None and (job.state, job.exit_code, errors) == ("COMPLETED", "0", ())
    assert start_run(spec, assume_yes=True) == 0  # the folder is free again


@pytest.mark.timeout(300)
def test_a_job_that_is_asked_to_save_continues_as_another_until_it_is_cancelled(
    fake: FakeScheduler, make: Resolved, system: str, capsys: Capture
) -> None:
    """The signal before the end, and then what each system ends a running job by.

    SIGHUP and SIGTERM.
    """
    slow = ("machine=emulated", "cost.unit_s=0.002", "train.steps=100000")
    spec = make("long", *slow, minutes=1, signal_before_end_s=0, archive_code=system == "pbs")
    folder = RunFolder.of(spec)
    start_run(spec, assume_yes=True)
    wait_until(lambda: (status(spec).step or 0) > 1, 200.0)
    os.kill(folder.read_status()["pid"], signal.SIGUSR2)
    wait_until(lambda: folder.read_status().get("job_id") == SECOND[system], 60.0)
    (row,) = JobRecord.read(folder).requeues
    assert (row["why"], row["job_id"]) == (FailureCause.TIME_LIMIT, FIRST[system])
    wait_until(
        lambda: status(spec).state == "running" and (status(spec).step or 0) > row["step"], 100.0
    )
    assert cancel_all(Catalogue((folder,), ()), as_json=False) == 0
    assert f"cancelled, job {SECOND[system]}" in capsys.readouterr().out
    recorded = folder.read_status()
    assert (recorded["state"], recorded["exit_code"]) == ("cancelled", own_job.CANCELLED_CODE)


def test_a_job_is_cancelled(
    fake: FakeScheduler, make: Resolved, system: str, capsys: Capture
) -> None:
    spec = make()
    fake.hold()
    start_run(spec, assume_yes=True)
    assert cancel_all(Catalogue((RunFolder.of(spec),), ()), as_json=False) == 0
    assert f"cancelled, job {FIRST[system]}" in capsys.readouterr().out
    assert status(spec).state == "cancelled"
    assert SCHEDULERS[system].cancel([FIRST[system]]) is None  # one that has ended is no error
    assert fake.jobs()[FIRST[system]]["cancelled"]


def test_the_job_of_another_run_is_not_cancelled(
    fake: FakeScheduler, make: Resolved, system: str
) -> None:
    """A job's name is the run's, as each system takes it, and the token is no part of it."""
    spec = make("a name that is long")
    fake.hold()
    if system == "pbs":
        with refused(r"^name='?a name that is long'?: must have no space"):
            start_run(spec, assume_yes=True)
        spec = make("a-name-that-is-long")
    start_run(spec, assume_yes=True)
    assert (
        status(spec).job_name == {"flux": "a name that is long", "pbs": "a-name-that-is-"}[system]
    )
    assert cancel_all(Catalogue((RunFolder.of(spec),), ()), as_json=False) == 0


@pytest.mark.parametrize("who", ["caller", "itself"])
def test_an_interrupted_submission_is_found(
    fake: FakeScheduler, make: Resolved, system: str, who: str
) -> None:
    """The command takes the job, and then it or its caller is killed."""
    spec = make()
    fake.hold()
    (fake.here / "lost").write_text(who)
    if who == "caller":
        pid = os.fork()
        if pid == 0:
            start_run(spec, assume_yes=True)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert RunFolder.of(spec).read_status()["state"] == "submitting"
        assert RunFolder.of(spec).read_status()["scheduler"] == system
    else:
        start_run(spec, assume_yes=True)
    assert (status(spec).state, status(spec).job_id) == ("pending", FIRST[system])
    assert [*fake.jobs()] == [FIRST[system]]


@pytest.mark.parametrize(
    ("code", "text"), [(1, "cannot connect to server x (errno=111)"), (0, ""), (0, "Hello!\n")]
)
def test_no_answer_is_never_no_job(
    fake: FakeScheduler, make: Resolved, system: str, code: int, text: str
) -> None:
    spec = make()
    fake.hold()
    start_run(spec, assume_yes=True)
    fake.fail({"flux": "flux", "pbs": "qstat"}[system], text, code)
    assert (status(spec).state, status(spec).is_guess) == ("submitted", True)
    assert query_queue([FIRST[system]]).error is not None
    with pytest.raises(SchedulerError):
        SCHEDULERS[system].list_jobs([FIRST[system]])
    with refused("nobody can tell whether it has ended", TryLaterError):
        start_run(spec, assume_yes=True)
    assert SCHEDULERS[system].num_queued() is None


def test_nobody_can_tell_whether_a_job_was_taken(
    fake: FakeScheduler, make: Resolved, system: str
) -> None:
    spec = make()
    if system == "flux":
        fake.fail("flux", "what is this?\n", 0)
    else:
        fake.fail("qsub", "what is this?\n", 0)
        fake.fail("qselect", "qselect: cannot connect to server x (errno=111)")
    title = SCHEDULERS[system].title
    with pytest.raises(
        UnclearSubmissionError, match=f"cannot determine whether {title} accepted the job"
    ):
        start_run(spec, assume_yes=True)
    assert RunFolder.of(spec).read_status()["state"] == "submitting"
    assert status(spec).note.endswith(
        f"has gone; cannot determine whether {title} accepted the job"
    )
    for path in fake.here.glob("*.fault"):
        path.unlink()
    assert (status(spec).state, f"ended before {title} had the job" in status(spec).note) == (
        "lost",
        True,
    )


def test_a_refused_job_leaves_nothing(fake: FakeScheduler, make: Resolved, system: str) -> None:
    spec = make()
    fake.fail({"flux": "flux", "pbs": "qsub"}[system], "no such queue")
    with refused("refuses the job: no such queue"):
        start_run(spec, assume_yes=True)
    assert status(spec).state == "prepared"
    assert not any(RunFolder.of(spec).logs.glob(".submission*"))


def test_a_chain_waits_for_the_job_before(fake: FakeScheduler, make: Resolved, system: str) -> None:
    spec = make()
    fake.hold()
    start_run(spec, assume_yes=True)
    chain = submit_chain(job_spec(spec), RunFolder.of(spec), FIRST[system], 2)
    assert chain == [FIRST[system], SECOND[system]]
    assert fake.jobs()[SECOND[system]]["after"] == FIRST[system]


def test_queued_jobs_are_counted(fake: FakeScheduler, make: Resolved, system: str) -> None:
    fake.hold()
    for name in ("one", "two"):
        start_run(make(name, partition="debug"), assume_yes=True)
    scheduler = SCHEDULERS[system]
    assert (
        scheduler.num_queued(),
        scheduler.num_queued("debug"),
        scheduler.num_queued("prod"),
    ) == (2, 2, 0)


def test_the_site_is_not_asked(make: Resolved, system: str) -> None:
    spec = make()
    job = job_spec(spec)
    folder = RunFolder.of(spec)
    script = SCHEDULERS[system].script(job, folder)

    def no_plan() -> Any:
        raise ConfigError("plan", "none", "is not wanted")

    checks = {check.name: check for check in preflight(spec, job, script, no_plan, here=False)}
    assert checks["site"].ok is None and checks["site"].said.startswith("not asked: ")
    assert checks["limits"].said == "the preset has none"
    assert "sbatch" not in checks


def test_a_shell_runs_the_script_up_to_the_program(
    make: Resolved, system: str, tmp_path: Path
) -> None:
    """Modules, variables and the exit code are those of the script; the job is named by the system."""
    value = "it's $(touch pwned) `x`"
    spec = make(environment={"A": value}, setup=["B=2"], archive_code=False, signal_before_end_s=0)
    text = script_of(spec)
    program = [sys.executable, "-u", *RUN_MODULE, "jobs.launch.batch", str(RunFolder.of(spec).path)]
    own = f"exec {shlex.join(program)}\n"
    assert text.endswith(own)
    script = tmp_path / "script.sh"
    script.write_text(
        text.replace(own, 'printf "%s|%s|%s" "$A" "$B" "${FLUX_ENCLOSING_ID:-}"; exit 5\n')
    )
    flux = tmp_path / "bin" / "flux"
    flux.parent.mkdir()
    flux.write_text("#!/bin/sh\necho \u0192ABC\n")
    flux.chmod(0o755)
    environment = {
        "PATH": f"{flux.parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PBS_O_WORKDIR": str(tmp_path),
    }
    ended = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True)
    assert ended.returncode == 5
    assert ended.stdout == f"{value}|2|" + ("\u0192ABC" if system == "flux" else "")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PBS_JOBID": "41.server"}, "41.server"),
        ({"FLUX_ENCLOSING_ID": "\u01922kPq"}, "f2kPq"),
        ({"FLUX_ENCLOSING_ID": "f2kPq", "SLURM_JOB_ID": "41"}, "f2kPq"),
        ({"SLURM_JOB_ID": "41"}, "41"),
        ({}, None),
    ],
)
def test_own_job(variables: dict[str, str], expected: str | None, monkeypatch: MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert own_job_id() == expected


@pytest.mark.parametrize(
    ("job_id", "name"),
    [
        ("41", "slurm"),
        ("41_7", "slurm"),
        (41, "slurm"),
        ("41.pbs-1.site.org", "pbs"),
        ("f2kPq", "flux"),
        ("41.", None),
        ("41_", None),
        ("41_7_1", None),
        ("41_[0-7]", None),
        ("41_7\n", None),
        ("--user=x", None),
        ("f0", None),
        (None, None),
        (True, None),
        ("41.server;x", None),
    ],
)
def test_an_id_tells_its_system(job_id: object, name: str | None) -> None:
    found = scheduler_of(job_id)
    assert (None if found is None else found.name) == name


class TestFlux:
    @pytest.fixture
    def system(self) -> str:
        return "flux"

    def test_directives(self, make: Resolved) -> None:
        spec = make(
            gpus_per_node=4,
            partition="pbatch",
            account="physics",
            exclude=["n1", "n2"],
            minutes=90,
            flux_batch={"exclusive": True, "setattr": ["thp=always", "x=1"], "urgency": 10},
        )
        logs = RunFolder.of(spec).logs
        assert directives(spec) == [
            "--job-name=one",
            "--nodes=1",
            "--nslots=1",
            "--cores-per-slot=2",
            "--gpus-per-slot=4",
            "--time-limit=90m",
            "--queue=pbatch",
            "--bank=physics",
            f"--output='{logs}/{{{{id.f58plain}}}}_0_log.out'",
            "--signal=SIGUSR2@120s",
            "--requires=-host:n1,n2",
            "--exclusive",
            "--setattr=thp=always",
            "--setattr=x=1",
            "--urgency=10",
        ]

    def test_a_short_job_gets_no_signal(self, make: Resolved) -> None:
        assert not any("signal" in line for line in directives(make(minutes=3)))
        assert [
            line for line in directives(make(flux_batch={"signal": "USR1@9"})) if "signal" in line
        ] == ["--signal=USR1@9"]

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            (
                {"queue": "x"},
                r"cluster\.flux_batch\.queue=x: must not be given here; set cluster\.partition",
            ),
            (
                {"N": 2},
                (
                    r"is not the long name of an option of flux batch; as in"
                    r" \+cluster\.flux_batch\.exclusive"
                ),
            ),
            ({"setattr": {"a": 1}}, "must be one value"),
            ({"urgency": "1\n#"}, "must be printable text"),
        ],
    )
    def test_bad_options(self, make: Resolved, options: dict[str, Any], match: str) -> None:
        with refused(match):
            directives(make(flux_batch=options))

    def test_launcher(self, resolved: Resolved) -> None:
        """The other words are those of the presets' golden scripts."""

        def words(*overrides: str) -> list[str]:
            spec = resolved("cluster=flux", *overrides)
            return command(job_spec(spec), RunFolder(Path("/runs/one")))

        argv = words("cluster.flux_run=['-ompibind=off']")
        assert argv[argv.index("-ompibind=off") + 1] == sys.executable
        assert "--setopt=gpu-affinity=per-task" in words("cluster.gpu_bind=closest")
        uneven = words("cluster.gpus_per_node=6", "cluster.ranks_per_node=4")
        assert not any("gpus-per-task" in word for word in uneven)

    def test_of_one_system(self, resolved: Resolved) -> None:
        with refused(r"cluster\.launcher=flux: starts ranks in jobs of cluster\.scheduler=flux"):
            job_spec(resolved("cluster=slurm", "cluster.launcher=flux"))
        with refused(r"cluster\.launcher=srun: starts ranks in jobs of cluster\.scheduler=sl"):
            job_spec(resolved("cluster=pbs", "cluster.launcher=srun"))

    def test_from_within_a_job_the_parent_is_asked(
        self, fake: FakeScheduler, make: Resolved, monkeypatch: MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FLUX_ENCLOSING_ID", "f9kPq")
        fake.hold()
        start_run(make(), assume_yes=True)
        SCHEDULERS["flux"].cancel(["f2kPq"])
        assert all(line.startswith("flux --parent ") for line in fake.asked())
        assert len(fake.asked()) >= 2

    @pytest.mark.parametrize("other", ["job is inactive", "Operation not permitted"])
    def test_a_job_that_was_purged_needs_no_cancel(self, fake: FakeScheduler, other: str) -> None:
        fake.fail("flux", f"flux-cancel: f2kPq: unknown job id\nflux-cancel: f3kPq: {other}")
        assert (SCHEDULERS["flux"].cancel(["f2kPq", "f3kPq"]) is None) == (
            other == "job is inactive"
        )

    def test_a_path_with_a_template(self, make: Resolved) -> None:
        with refused(r"must have no '\{\{'"):
            directives(make("a{{id}}"))


class TestPbs:
    @pytest.fixture
    def system(self) -> str:
        return "pbs"

    def test_directives(self, make: Resolved) -> None:
        spec = make(
            gpus_per_node=4,
            partition="prod",
            account="physics",
            minutes=90,
            max_requeues=0,
            qsub={
                "filesystems": "home:eagle",
                "select": "system=polaris",
                "V": True,
                "W": "umask=022",
                "my_gpus": 2,
            },
        )
        assert directives(spec) == [
            "-N one",
            "-l select=1:ncpus=2:mpiprocs=2:ngpus=4:system=polaris",
            "-l place=scatter",
            "-l filesystems=home:eagle",
            "-l my_gpus=2",
            "-l walltime=01:30:00",
            "-q prod",
            "-A physics",
            "-j oe",
            f"-o {RunFolder.of(spec).logs}/",
            "-r n",
            "-V",
            "-W umask=022",
        ]

    def test_the_script_asks_to_save_before_the_end(self, make: Resolved) -> None:
        text = script_of(make(minutes=60))
        assert "{ sleep 3480 && kill -USR2 $$; }" in text
        short = make(minutes=3)
        assert "sleep" not in script_of(short)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"A": "x"}, r"cluster\.qsub\.A=x: must not be given here; set cluster\.account"),
            ({"l": "mem=1gb"}, r"must not be given here; set the resource by its own name"),
            ({"walltime": "1:00"}, r"set cluster\.minutes"),
            ({"W": "depend=afterok:1"}, "must have no depend; use --after RUN or --chain N"),
            (
                {"select": "2:ncpus=4"},
                "must be what each node needs besides CPUs and GPUs; as in system=polaris",
            ),
            ({"place": True}, "must be the resource's value"),
            ({"place-it": "x"}, "is not an option of one letter, or a resource of -l"),
        ],
    )
    def test_bad_options(self, make: Resolved, options: dict[str, Any], match: str) -> None:
        with refused(match):
            directives(make(qsub=options))

    def test_nodes_cannot_be_left_out(self, make: Resolved) -> None:
        with refused(r"cluster\.exclude=.*PBS has no option that leaves nodes out"):
            directives(make(exclude=["n1"]))

    def test_launcher(self, resolved: Resolved) -> None:
        spec = resolved("cluster=pbs", "parallel.replicas=2", "cluster.mpiexec=[-l]")
        argv = command(job_spec(spec), RunFolder(Path("/runs/one")))
        assert argv[:6] == ["mpiexec", "-n", "8", "-ppn", "4", "-l"]

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            (
                {"job_state": "Q", "comment": "Not Running: no nodes"},
                ("PENDING", "Not Running: no nodes"),
            ),
            ({"job_state": "S"}, ("SUSPENDED", "")),
            ({"job_state": "M"}, ("PENDING", "")),
            ({"job_state": "E"}, ("COMPLETING", "")),
            ({"job_state": "Z", "comment": "new"}, ("Z", "new")),
            ({"job_state": "F", "Exit_status": "0"}, ("COMPLETED", "")),
            ({"job_state": "F", "Exit_status": "3"}, ("FAILED", "")),
            ({"job_state": "F", "Exit_status": "-29"}, ("TIMEOUT", "")),
            ({"job_state": "F", "Exit_status": "271"}, ("CANCELLED", "")),
            (
                {"job_state": "F", "Exit_status": "271", "resources_used.walltime": "01:00:03"},
                ("TIMEOUT", ""),
            ),
            ({"job_state": "F"}, ("CANCELLED", "")),
        ],
    )
    def test_states(self, row: dict[str, str], expected: tuple[str, str]) -> None:
        facts = {
            "Resource_List.walltime": "01:00:00",
            "Variable_List": "A=1,GEMS_SUBMISSION=abc,B=2",
            **row,
        }
        text = "\n".join(
            ["Job Id: 41.server", *(f"    {name} = {value}" for name, value in facts.items()), ""]
        )
        found = pbs_module._parse_job("41.server", pbs_module._rows(text)["41"])
        assert ((found.state, found.reason), found.token) == (expected, "abc")
        assert found.is_active == (row["job_state"] != "F")

    def test_a_job_without_a_state_is_no_answer(self) -> None:
        with pytest.raises(SchedulerError, match=r"printed job 41\.server without a state"):
            pbs_module._parse_job("41.server", {})

    def test_qstat_must_tell_of_each_job(self, fake: FakeScheduler, make: Resolved) -> None:
        """Some releases print the first alone of the jobs that they are asked for."""
        fake.hold()
        for name in ("one", "two"):
            start_run(make(name), assume_yes=True)
        assert len(query_queue(["41.server", "42.server"]).jobs) == 2
        program = (fake.here / "qstat").read_text().splitlines()
        first = (
            "import sys\nsys.argv = [*sys.argv[:3], *[word for word in sys.argv[3:] if '.' in"
            " word][:1]]"
        )
        (fake.here / "qstat").write_text("\n".join([program[0], first, *program[1:]]))
        query = query_queue(["41.server", "42.server"])
        assert (query.jobs, query.error) == ({}, "qstat printed nothing of job 42.server")

    def test_a_site_without_history_is_asked_without(
        self, fake: FakeScheduler, make: Resolved
    ) -> None:
        fake.hold()
        start_run(make(), assume_yes=True)
        program = (fake.here / "qstat").read_text().splitlines()
        refuse = (
            'import sys\nif "-x" in sys.argv: sys.exit("qstat: PBS is not configured to maintain'
            ' job history")'
        )
        (fake.here / "qstat").write_text("\n".join([program[0], refuse, *program[1:]]))
        assert status(make()).state == "pending"
        assert query_queue(["77.server"]) == query_queue([])  # forgotten, and that is an answer

    def test_what_ends_a_job_is_read_in_its_output(self) -> None:
        scheduler = SCHEDULERS["pbs"]
        assert (
            scheduler.kill_cause("=>> PBS: job killed: walltime 63 exceeded limit 60\n")
            == FailureCause.TIME_LIMIT
        )
        for name in ("mem", "vmem"):
            text = f"=>> PBS: job killed: {name} 9kb exceeded limit 8kb\n"
            assert scheduler.kill_cause(text) == FailureCause.HOST_MEMORY
        assert (
            scheduler.kill_cause("=>> PBS: job killed: cput 9 exceeded limit 8\n")
            == "cput 9 exceeded limit 8"
        )
        assert scheduler.kill_cause("hello\n") is None
