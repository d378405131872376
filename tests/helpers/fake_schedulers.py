"""Stand-ins for Flux and PBS that really run the scripts of their jobs, one process for all commands of a system.

A job is a folder: its script, what was asked for, and its state, which a process of its own takes
from waiting to running and to its end. What a test writes into `hold` keeps jobs waiting; `fault`
is what a command says in place of an answer. Jobs end with their processes: `end_all` is for the
end of a test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.warm_python import REAL

PROGRAM = """#!{python}
import json, os, pathlib, shlex, signal, subprocess, sys, time
HERE, MPIEXEC = pathlib.Path({here!r}), {mpiexec!r}
NAME, WORDS = os.path.basename(sys.argv[0]), sys.argv[1:]
if WORDS[0] != "run-job":
    with (HERE / "asked").open("a") as log:
        log.write(shlex.join([NAME, *WORDS]) + "\\n")
fault = HERE / f"{{NAME}}.fault"
if fault.exists():
    code, text = fault.read_text().split("|", 1)
    sys.stdout.write(text if code == "0" else "")
    sys.exit(0 if code == "0" else text)
JOBS = HERE / "jobs"
SUBMIT_FAULT = HERE / "lost"  # the job is taken, and the command ends without telling


def read(job):
    return json.loads((JOBS / job / "job.json").read_text())


def write(job, **changes):
    path, facts = JOBS / job / "job.json", read(job) if (JOBS / job / "job.json").exists() else {{}}
    partial = path.with_name(f"partial{{os.getpid()}}")
    partial.write_text(json.dumps(facts | changes))
    partial.rename(path)


def take(job, script, **facts):
    (JOBS / job).mkdir(parents=True)
    (JOBS / job / "script").write_text(script)
    write(job, state="waiting", submitted=time.time(), **facts)
    runner = subprocess.Popen([sys.executable, __file__, "run-job", job], stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    (JOBS / job / "runner").write_text(str(runner.pid))


def run(job):
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # who submits blocks signals meanwhile
    facts = read(job)
    while (HERE / "hold").exists() or (facts["after"] and read(facts["after"])["state"] != "ended"):
        time.sleep(0.05)
        if read(job)["state"] == "ended":
            return
    write(job, state="running", started=time.time())
    own = {{"PBS_JOBID": job, "PBS_O_WORKDIR": facts["cwd"]}} if facts["system"] == "pbs" else {{
        "FLUX_URI": "local:///inner", "INNER_JOB": job}}
    environment = facts["environment"] | own
    with open(facts["output"], "ab") as out:
        ended = subprocess.run(["bash", str(JOBS / job / "script")], env=environment, cwd=facts["cwd"],
                               stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    write(job, state="ended", code=ended.returncode, ended=time.time())


def end(job):
    facts = read(job)
    if facts["state"] == "ended":
        return False
    if facts["state"] == "waiting":
        write(job, state="ended", code=None, ended=time.time(), cancelled=True)
    else:
        write(job, cancelled=True)
        number = signal.SIGTERM if facts["system"] == "pbs" else signal.SIGHUP
        runner = (JOBS / job / "runner").read_text()
        children = pathlib.Path(f"/proc/{{runner}}/task/{{runner}}/children").read_text().split()
        for child in children:
            os.kill(int(child), number)
    return True


def all_jobs():
    return sorted((path.name for path in JOBS.iterdir()), key=lambda name: read(name)["submitted"])


def option(words, *names):
    for index, word in enumerate(words):
        for name in names:
            if word == name:
                return words[index + 1]
            if name.startswith("--") and word.startswith(name + "="):
                return word[len(name) + 1 :]
    return None


def lost(job):
    if SUBMIT_FAULT.exists():
        os.kill(os.getppid() if SUBMIT_FAULT.read_text() == "caller" else os.getpid(), signal.SIGKILL)
    print(job)
"""
FLUX = """

def flux():
    words = WORDS[1:] if WORDS[0] == "--parent" else WORDS
    verb, words = words[0], words[1:]
    if verb == "getattr":
        print("\\u0192" + os.environ["INNER_JOB"][1:])
    elif verb == "run":
        place = next(index for index, word in enumerate(words) if not word.startswith("-"))
        os.execv(MPIEXEC, [MPIEXEC, "-n", option(words, "--ntasks"), *words[place:]])
    elif verb == "batch":
        script = pathlib.Path(words[-1]).read_text()
        given = [word for line in script.splitlines() if line.startswith("# flux: ")
                 for word in shlex.split(line[len("# flux: "):])]
        environment = {k: v for k, v in os.environ.items() if k != "FLUX_ENCLOSING_ID"}
        environment |= dict(word[6:].split("=", 1) for word in words if word.startswith("--env=") and word[6] != "-")
        job = "f" + "23456789ABCDEFGHJKLMNPQRSTUVWXYZ"[len(list(JOBS.iterdir()))] + "kPq"
        after = option(given, "--dependency")
        take(job, script, system="flux", name=option(words, "--job-name"), cwd=os.getcwd(), environment=environment,
             output=option(given, "--output").replace("{{id.f58plain}}", job), queue=option(given, "--queue") or "",
             after=after.partition(":")[2] if after else None, limit=60 * float(option(given, "--time-limit")[:-1]))
        lost("\\u0192" + job[1:])
    elif verb == "jobs":
        columns = [word[1:-1] for word in option(words, "--format").split("|")]
        heads = {"id.f58plain": "JOBID", "returncode": "RC"}
        print("|".join(heads.get(column, column.upper().replace(".", "-")) for column in columns))
        for job in all_jobs():
            facts, cells = read(job), dict.fromkeys(columns, "")
            ended = facts["state"] == "ended"
            result = "CANCELED" if facts.get("cancelled") else "FAILED" if facts.get("code") else "COMPLETED"
            state = {"waiting": "DEPEND" if facts["after"] else "SCHED", "running": "RUN", "ended": "INACTIVE"}
            cells |= {"id.f58plain": job, "state": state[facts["state"]], "result": result if ended else "",
                      "returncode": str(facts["code"]) if ended else "", "queue": facts["queue"],
                      "t_run": str(facts.get("started", 0.0)), "t_inactive": str(facts.get("ended", 0.0)),
                      "expiration": str(facts["started"] + facts["limit"]) if "started" in facts else "0.0",
                      "name": facts["name"], "nodelist": os.uname().nodename}
            print("|".join(cells[column] for column in columns))
    elif verb == "cancel":
        bad = [job for job in words if not end(job)]
        sys.exit("\\n".join(f"flux-cancel: {job}: job is inactive" for job in bad) or 0)


run(WORDS[1]) if WORDS[0] == "run-job" else flux()
"""
PBS = """

def pbs():
    if NAME == "qsub":
        script = pathlib.Path(WORDS[-1]).read_text()
        given = [word for line in script.splitlines() if line.startswith("#PBS ") for word in shlex.split(line[5:])]
        variables = dict(word.split("=", 1) for word in option(WORDS, "-v").split(","))
        kept = {k: os.environ[k] for k in ("HOME", "PATH", "LANG", "TMPDIR") if k in os.environ}
        job = f"{41 + len(list(JOBS.iterdir()))}.server"
        after = option(given, "-W")
        time_limit = next(word[9:] for word in given if word.startswith("walltime="))
        take(job, script, system="pbs", name=option(given, "-N"), cwd=os.getcwd(), environment=kept | variables,
             variables=variables, output=f"{option(given, '-o')}{job}.OU", queue=option(given, "-q") or "workq",
             after=after.partition(":")[2] if after else None, limit=time_limit)
        lost(job)
    elif NAME == "qselect":
        print("\\n".join(all_jobs()))
    elif NAME == "qstat":
        wanted, known = [word for word in WORDS if "." in word], all_jobs()
        for job in (job for job in known if job in wanted):
            facts = read(job)
            state = {"waiting": "H" if facts["after"] else "Q", "running": "R", "ended": "F"}[facts["state"]]
            variables = ",".join(f"{k}={v}" for k, v in {"PBS_O_HOME": "/home/me", **facts["variables"]}.items())
            row = {"Job_Name": facts["name"], "job_state": state, "queue": facts["queue"],
                   "Resource_List.walltime": facts["limit"], "Variable_List": variables}
            if "started" in facts:
                row |= {"stime": time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(facts["started"])),
                        "exec_host": f"{os.uname().nodename}/0*8", "run_count": 1}
            if state == "F" and facts["code"] is not None:
                row["Exit_status"] = 271 if facts.get("cancelled") else facts["code"]
            lines = [f"    {name} = {value}" for name, value in row.items()]
            print(f"Job Id: {job}")
            for line in lines:  # long ones go on behind a tab
                print(line[:79] + "".join(f"\\n\\t{line[at:at + 70]}" for at in range(79, len(line), 70)))
            print()
        sys.exit("\\n".join(f"qstat: Unknown Job Id {job}" for job in wanted if job not in known) or 0)
    elif NAME == "qdel":
        bad = [job for job in WORDS if not end(job)]
        sys.exit("\\n".join(f"qdel: Job has finished {job}" for job in bad) or 0)


run(WORDS[1]) if WORDS[0] == "run-job" else pbs()
"""


@dataclass(frozen=True, slots=True)
class FakeScheduler:
    """The folder of a batch system's commands."""

    here: Path

    @classmethod
    def put(cls, here: Path, system: str) -> FakeScheduler:
        """Put the commands of a system into a folder."""
        (here / "jobs").mkdir(parents=True)
        mpiexec = str(Path(sys.executable).parent / "mpiexec")
        start = PROGRAM.format(python=REAL, here=str(here), mpiexec=mpiexec)
        names = ("flux",) if system == "flux" else ("qsub", "qselect", "qstat", "qdel")
        for name in names:
            path = here / name
            path.write_text(start + (FLUX if system == "flux" else PBS))
            path.chmod(0o755)
        return cls(here)

    def jobs(self) -> dict[str, dict[str, Any]]:
        """Return what is recorded of each job."""
        found = sorted(
            (self.here / "jobs").glob("*/job.json"), key=lambda path: path.parent.stat().st_ctime_ns
        )
        return {path.parent.name: json.loads(path.read_text()) for path in found}

    def hold(self) -> None:
        """Keep jobs waiting."""
        (self.here / "hold").touch()

    def fail(self, name: str, text: str, code: int = 1) -> None:
        """Let a command say something else than an answer."""
        (self.here / f"{name}.fault").write_text(f"{code}|{text}")

    def asked(self) -> list[str]:
        """Return the command lines so far."""
        path = self.here / "asked"
        return path.read_text().splitlines() if path.exists() else []

    def end_all(self) -> None:
        """End the processes of all jobs."""
        for path in self.here.glob("jobs/*/runner"):
            with contextlib.suppress(OSError):
                os.killpg(int(path.read_text()), signal.SIGKILL)
