"""`gems VERB`: schedules and checks of a configuration, without an allocation."""

from __future__ import annotations

import gc
import sys

from gems.cli.framework import Verb, main

ON_PAPER = "gems.plan.evaluate:with_strips_on_paper"
VERBS = {
    "schedule": Verb(
        "gems.cli.schedule:show_schedule",
        "prints the schedule: grid, JSON, or with format=torch its CSV; level=lowered shows all"
        " actions",
        flags=("level=lowered", "level=compute", "format=torch"),
        completes=ON_PAPER,
    ),
    "simulate": Verb(
        "gems.cli.simulate:show_simulation",
        "predicts time, efficiency and memory of a step, and how far it is from the bound",
        completes=ON_PAPER,
    ),
    "profile": Verb(
        "gems.cli.profile:show_profile",
        "takes the time and the bytes of every layer; --from FILE,FILE,... extrapolates, --hdf5"
        " FILE writes",
        choices={"--from": (), "--hdf5": ()},
    ),
    "partition": Verb(
        "gems.cli.partition:show_partition",
        "cuts the model: --compare all methods, --largest depth|resolution|micro_batch, --picture"
        " FILE",
        flags=("--compare",),
        choices={"--largest": ("depth", "resolution", "micro_batch"), "--picture": ()},
    ),
    "memory": Verb(
        "gems.cli.memory:show_memory",
        "what becomes of each layer's activations, and what that costs: --compare all policies,"
        " --picture FILE",
        flags=("--compare",),
        choices={"--picture": ()},
    ),
    "place": Verb(
        "gems.cli.place:show_dlplacer",
        "on which devices a model's operators run: --devices N, --method auto|cp_sat|milp|heft,"
        " --picture FILE",
        choices={"--devices": (), "--method": ("auto", "cp_sat", "milp", "heft"), "--picture": ()},
    ),
    "plan": Verb(
        "gems.cli.plan:show_plan",
        "the fastest configurations on parallel.gpus=N: --global-batch N, --top 10, --budget S,"
        " --epochs FILE, --write FILE, --strips: the best in strips too; or --hybrid: data against"
        " model parallelism",
        flags=("--hybrid", "--strips"),
        completes=None,
        choices=dict.fromkeys(
            (
                "--top",
                "--global-batch",
                "--budget",
                "--write",
                "--epochs",
                "--efficiency",
                "--speedup",
            ),
            (),
        ),
    ),
    "evaluate": Verb(
        "gems.cli.evaluate:evaluate",
        "measures a run's weights: evaluate RUN [data=... key=value ...] [--weights best]",
        choices={"--weights": ("last", "best", "average")},
        takes_words=True,
    ),
    "predict": Verb(
        "gems.cli.predict:predict",
        "what a run's weights say of images: predict RUN [--input FILE|FOLDER|PATTERN ...] --out"
        " FOLDER [--weights best]",
        choices={"--input": (), "--out": (), "--weights": ("last", "best", "average")},
        takes_words=True,
    ),
    "export": Verb(
        "gems.cli.export:export",
        "writes a run's weights as a plain state dict: export RUN --out FILE.safetensors|.pt"
        " [--weights best]",
        choices={"--out": (), "--weights": ("last", "best", "average")},
        takes_words=True,
    ),
    "verify": Verb(
        "gems.cli.verify:verify",
        "compares the configured run with one unsplit process: max relative error",
    ),
}


def run() -> int:
    """Run the command line of this process and return its exit code."""
    # a large schedule is a million tuples in no cycle: to look through them as usual takes a
    # quarter of a search's time
    gc.set_threshold(50_000, 20, 20)
    return main("gems", VERBS, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
