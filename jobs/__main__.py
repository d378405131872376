"""`gems-jobs VERB`: what a login node does."""

from __future__ import annotations

import sys

from gems.cli.framework import AUTO_CLUSTER, Verb, main

VERBS = {
    "submit": Verb(
        "jobs.cli.submit:submit",
        "run here, or submit a job if the cluster preset says so: after a preflight, and a question"
        " if the job is expensive [--yes]; [--auto-cluster: this machine's preset, unless the"
        " experiment or cluster=NAME chooses one; --force: although nobody can tell whether the"
        " folder's last job has ended] [--after RUN: when its job has ended] [--chain N: N jobs,"
        " one after the other, until the steps are done]",
        ("--dry-run", "--yes", "--force", AUTO_CLUSTER),
        {"--after": (), "--chain": ()},
    ),
    "probe": Verb(
        "jobs.cli.probe:probe",
        "try MPI and device memory with two ranks, here or as a small job: [key=value ...] "
        "[--limit MINUTES]",
        (),
        {"--limit": ()},
        takes_words=True,
    ),
    "study": Verb(
        "jobs.cli.study:study",
        "run the points of a study that are missing or failed: study=NAME [key=value ...]; draw all"
        " of them [--wait: until all jobs have ended; --stop: cancel all of it; --yes: however much"
        " they cost]",
        ("--dry-run", "--wait", "--stop", "--yes"),
        takes_words=True,
    ),
    "status": Verb(
        "jobs.cli.status:status",
        "the runs and studies below runs_dir=runs, or those named: state, step, images/s, "
        "loss; [RUN_OR_STUDY ...] [-v: the points of studies] [--watch SECONDS]",
        ("-v",),
        {"--watch": ()},
        takes_words=True,
    ),
    "logs": Verb(
        "jobs.cli.logs:logs",
        "the output of a run's ranks: RUN [-f: follow it to its end] [--rank K] [--lines N or all]",
        ("-f",),
        {"--rank": (), "--lines": ()},
        takes_words=True,
    ),
    "cancel": Verb(
        "jobs.cli.cancel:cancel",
        "cancel runs, and studies with their points not yet started: RUN_OR_STUDY ... [--yes]",
        ("--yes",),
        takes_words=True,
    ),
    "diagnose": Verb(
        "jobs.cli.diagnose:diagnose",
        "why runs ended, in one paragraph, and what to change: RUN_OR_STUDY ... "
        "[--unblock NODE: remove a node from the blocklist]",
        (),
        {"--unblock": ()},
        takes_words=True,
    ),
    "resubmit": Verb(
        "jobs.cli.resubmit:resubmit",
        "submit runs again from their newest checkpoint, without blocked nodes: "
        "RUN_OR_STUDY ... [cluster.KEY=value ...] [--yes: unchanged, and whatever it costs] "
        "[--force: finished ones too]",
        ("--yes", "--force"),
        takes_words=True,
    ),
    "prepare": Verb("jobs.cli.submit:prepare_run", "make the run folder only, and print its path"),
    "discover": Verb(
        "jobs.cli.discover:discover",
        "draft a cluster preset of this site, from its SLURM",
        takes_words=True,
    ),
    "collect": Verb(
        "jobs.cli.submit:collect",
        "merge the traces of a run folder, draw, print the table",
        takes_words=True,
    ),
}


def run() -> int:
    """Run the command line of this process and return its exit code."""
    return main("jobs", VERBS, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
