"""`gems VERB`: schedules and checks of a configuration, without an allocation."""

from __future__ import annotations

import gc
import sys

from gems.cli.framework import Verb, main

ON_PAPER = "gems.plan.evaluate:with_strips_on_paper"
_WEIGHTS = {"--weights": ("last", "best", "average")}
_WEIGHTS_NOTE = {
    "--weights W": "weights of the last step (default), the best validation, or the average"
}
_PICTURE_NOTE = {"--picture FILE": "draw the answer to a .png, .pdf or .svg file"}
VERBS = {
    "schedule": Verb(
        "gems.cli.schedule:show_schedule",
        "print the schedule as a grid, or with --json as JSON",
        flags=("level=lowered", "level=compute", "format=torch"),
        completes=ON_PAPER,
        notes={
            "level=compute": "show compute actions only (default)",
            "level=lowered": "show messages and memory actions too",
            "format=torch": "print the CSV of torch.distributed.pipelining",
        },
    ),
    "simulate": Verb(
        "gems.cli.simulate:show_simulation",
        "predict time, efficiency and memory of a step, and its distance from the bound",
        completes=ON_PAPER,
    ),
    "profile": Verb(
        "gems.cli.profile:show_profile",
        "measure the time and bytes of every layer",
        choices={"--from": (), "--hdf5": ()},
        notes={
            "--from FILE,FILE,...": "extrapolate from profiles of smaller images",
            "--hdf5 FILE": "write the profile to a file",
        },
    ),
    "partition": Verb(
        "gems.cli.partition:show_partition",
        "cut the model into stages",
        flags=("--compare",),
        choices={"--largest": ("depth", "resolution", "micro_batch"), "--picture": ()},
        notes={
            "--compare": "compare all methods",
            "--largest WHAT": "find the largest depth, resolution or micro_batch that fits",
            **_PICTURE_NOTE,
        },
    ),
    "memory": Verb(
        "gems.cli.memory:show_memory",
        "show which activations are kept, recomputed or offloaded, and what this costs",
        flags=("--compare",),
        choices={"--picture": ()},
        notes={"--compare": "compare all policies", **_PICTURE_NOTE},
    ),
    "place": Verb(
        "gems.cli.place:show_dlplacer",
        "place a model's operators on devices",
        choices={"--devices": (), "--method": ("auto", "cp_sat", "milp", "heft"), "--picture": ()},
        notes={
            "--devices N": "number of devices",
            "--method NAME": "solver; auto (default) takes the first that is installed",
            **_PICTURE_NOTE,
        },
    ),
    "plan": Verb(
        "gems.cli.plan:show_plan",
        "find the fastest configurations on parallel.gpus=N",
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
        notes={
            "--top N": "number of configurations to show (default 10)",
            "--global-batch N": "samples of a step over all GPUs",
            "--budget S": "limit the search to so many seconds",
            "--write FILE": "write the best configuration as an experiment",
            "--strips": "search images in strips too",
            "--hybrid": "compare data with model parallelism",
            "--epochs FILE": "epochs to the target by global batch, with --hybrid",
            "--efficiency FILE": "scaling efficiency by number of workers, with --hybrid",
            "--speedup FILE": "speed-up of a step by number of devices, with --hybrid",
        },
    ),
    "evaluate": Verb(
        "gems.cli.evaluate:evaluate",
        "measure the metrics of a run's weights",
        choices=_WEIGHTS,
        takes_words=True,
        operands="RUN [data=... key=value ...]",
        notes=_WEIGHTS_NOTE,
    ),
    "predict": Verb(
        "gems.cli.predict:predict",
        "apply a run's weights to images",
        choices={"--input": (), "--out": (), **_WEIGHTS},
        takes_words=True,
        operands="RUN",
        notes={
            "--input FILE|FOLDER|PATTERN ...": "the images (default: the run's validation split)",
            "--out FOLDER": "folder for the predictions",
            **_WEIGHTS_NOTE,
        },
    ),
    "export": Verb(
        "gems.cli.export:export",
        "write a run's weights as a plain state dict",
        choices={"--out": (), **_WEIGHTS},
        takes_words=True,
        operands="RUN",
        notes={"--out FILE": "a .safetensors or .pt file", **_WEIGHTS_NOTE},
    ),
    "verify": Verb(
        "gems.cli.verify:verify",
        "compare the configured run with one unsplit process: maximum relative error",
    ),
}


def run() -> int:
    """Run the command line of this process and return its exit code."""
    # a large schedule has a million tuples without cycles; scanning them at the default rate
    # takes a quarter of a search's time
    gc.set_threshold(50_000, 20, 20)
    return main("gems", VERBS, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
