"""`gems evaluate`: the metrics of a run's weights on its own validation data, or on other data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gems.cli.framework import Options, print_json
from gems.config.compose import changed
from gems.config.overrides import check_overrides
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.launch.scratch_run import run_program
from gems.runs.folder import RunFolder
from gems.runs.lookup import find_run
from gems.utils.tables import name_values

EVALUATE = "gems.engine.evaluation.evaluate_run:evaluate_run"
LAST, BEST, AVERAGE = "last", "best", "average"


def evaluate(words: Sequence[str], options: Options) -> int:
    """Print the metrics of the weights of a run, with overrides such as data=folder data.path=... or fewer partitions.

    Raises:
        ConfigError: no run, no weights, or overrides that cannot run.
        RankFailedError: a rank ended before there was a result.
    """
    spec, path = run_for_inference(words, options.chosen.get("--weights", LAST), "evaluate")
    found = run_program(spec, EVALUATE, "evaluate", trains=False)
    if options.json:
        print_json({"run": str(path), "data": spec.data.name, **found})
    else:
        rows = [(name.replace("_", " "), f"{value:.6g}") for name, value in found.items()]
        print(name_values(rows, title=f"{path.name} on data={spec.data.name}"))
    return 0


def run_for_inference(words: Sequence[str], weights: str, verb: str) -> tuple[RunSpec, Path]:
    """Return a run with overrides, to start from its own weights on this machine, and its folder.

    Raises:
        ConfigError: as `read_run`, or overrides that cannot run.
    """
    spec, overrides, path = read_run(words, weights, verb)
    return changed(spec, overrides, takes_options=True), path


def read_run(words: Sequence[str], weights: str, verb: str) -> tuple[RunSpec, list[str], Path]:
    """Return a run that is to start from its own weights on this machine, the overrides among `words`, and its folder.

    Raises:
        ConfigError: no run, no such weights, or an override that is none.
    """
    names = [word for word in words if "=" not in word]
    if len(names) != 1:
        raise ConfigError("run", " ".join(names) or "none", "must be one run", f"gems {verb} RUN [key=value ...]")
    overrides = [word for word in words if "=" in word]
    check_overrides(overrides)
    path = find_run(names[0])
    spec = RunFolder(path).read_spec()
    train = replace(
        spec.train, initial_checkpoint=str(weights_folder(path, weights)), initial_strict=True, initial_new=[],
        initial_prefix=None, resume="never", evaluate=True, monitor=None, patience=None,
    )  # fmt: skip
    # what was derived from the run's own sizes is derived again
    parallel = replace(spec.parallel, replications=None, parts=None)
    cluster = replace(spec.cluster, nodes=None, ranks_per_node=None)
    return replace(spec, train=train, parallel=parallel, cluster=cluster), overrides, path


def weights_folder(path: Path, weights: str) -> Path:
    """Return the folder of the last weights of a run, of the best, or of those averaged over its steps.

    Raises:
        ConfigError: the run has kept none that were best, or no average.
    """
    if weights == LAST:
        return path
    if weights == AVERAGE:
        average = RunFolder(path).average
        if not average.is_dir():
            raise ConfigError("--weights", weights, f"{path} has none", "train with train.ema_decay=0.999")
        return average
    best = RunFolder(path).best_weights()
    if best is None:
        raise ConfigError("--weights", weights, f"{path} has none", "train with train.monitor=METRIC")
    return best
