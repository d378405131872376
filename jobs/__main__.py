"""`python -m jobs VERB`: what a login node does."""

from __future__ import annotations

import sys

from gems.cli import Verb, main

VERBS = {
    "submit": Verb(
        "jobs.submit:submit", "run here, or on SLURM when the cluster preset says so", ("--dry-run",)
    ),
    "study": Verb("jobs.study:study", "run the points of a study that are missing or failed: study=NAME [key=value ...]; "
                  "draw all of them", ("--dry-run",), takes_words=True),
    "prepare": Verb("jobs.submit:prepare_run", "make the run folder only, and print its path"),
    "collect": Verb("jobs.collect:collect_verb", "merge the traces of a run folder, draw, print the table",
                    takes_words=True),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main("jobs", VERBS, sys.argv[1:]))
