"""The command `gems-jobs VERB`, for login nodes: submit, watch, diagnose and cancel runs."""

from __future__ import annotations

import sys

from gems.cli.framework import AUTO_CLUSTER, Verb, main

_RUNS = "RUN_OR_STUDY ..."
VERBS = {
    "submit": Verb(
        "jobs.cli.submit:submit",
        "start a run: here, or as a job if the cluster preset says so",
        ("--dry-run", "--yes", "--force", AUTO_CLUSTER),
        {"--after": (), "--chain": ()},
        notes={
            "--dry-run": "print the script, the resources and the preflight checks; start nothing",
            "--yes": "do not ask to confirm an expensive job",
            "--force": "take the run folder even if it is unknown whether its last job has ended",
            AUTO_CLUSTER: "use this machine's preset if neither cluster= nor the experiment sets"
            " one",
            "--after RUN": "start when the job of RUN has ended, in any state",
            "--chain N": "submit N jobs; each continues the run where its predecessor stopped",
        },
    ),
    "probe": Verb(
        "jobs.cli.probe:probe",
        "test MPI and device memory with two ranks, here or in a small job",
        choices={"--limit": ()},
        takes_words=True,
        notes={"--limit MINUTES": "wait at most this long for the job"},
    ),
    "study": Verb(
        "jobs.cli.study:study",
        "run the points of a study that are missing or failed, and draw all points",
        ("--dry-run", "--wait", "--stop", "--yes"),
        takes_words=True,
        operands="study=NAME [key=value ...]",
        notes={
            "--dry-run": "print the points and the first job; start nothing",
            "--wait": "wait until all jobs have ended",
            "--stop": "cancel the study and its points",
            "--yes": "do not ask to confirm an expensive study",
        },
    ),
    "status": Verb(
        "jobs.cli.status:status",
        "show state, step, images/s and loss of the named runs and studies, or of all in"
        " runs_dir=runs",
        ("-v",),
        {"--watch": ()},
        takes_words=True,
        operands=f"[{_RUNS}]",
        notes={
            "-v": "show the points of studies",
            "--watch SECONDS": "repeat until all have ended",
        },
    ),
    "logs": Verb(
        "jobs.cli.logs:logs",
        "print the output of a run's ranks",
        ("-f",),
        {"--rank": (), "--lines": ()},
        takes_words=True,
        operands="RUN",
        notes={
            "-f": "follow the output until the run has ended",
            "--rank K": "print the lines of rank K only",
            "--lines N": "print the last N lines (default 100), or all",
        },
    ),
    "cancel": Verb(
        "jobs.cli.cancel:cancel",
        "cancel runs, and studies with the points that have not started",
        ("--yes",),
        takes_words=True,
        operands=_RUNS,
        notes={"--yes": "do not ask for confirmation"},
    ),
    "diagnose": Verb(
        "jobs.cli.diagnose:diagnose",
        "explain in one paragraph why runs ended, and what to change",
        choices={"--unblock": ()},
        takes_words=True,
        operands=_RUNS,
        notes={"--unblock NODE": "remove a node from the blocklist instead"},
    ),
    "resubmit": Verb(
        "jobs.cli.resubmit:resubmit",
        "continue runs from their newest checkpoint, without blocked nodes",
        ("--yes", "--force"),
        takes_words=True,
        operands=f"{_RUNS} [cluster.KEY=value ...]",
        notes={
            "--yes": "do not ask to confirm an expensive job, and resubmit even if the cause of"
            " the failure remains",
            "--force": "run finished runs again too",
        },
    ),
    "prepare": Verb(
        "jobs.cli.submit:prepare_run", "write the run folder without starting, and print its path"
    ),
    "discover": Verb(
        "jobs.cli.discover:discover",
        "draft a cluster preset of this site from its SLURM",
        takes_words=True,
        operands="",
    ),
    "collect": Verb(
        "jobs.cli.submit:collect",
        "merge the traces of a run folder, draw it, and print the table",
        takes_words=True,
        operands="RUN_FOLDER",
    ),
}


def run() -> int:
    """Run the command line of this process and return its exit code."""
    return main("jobs", VERBS, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
