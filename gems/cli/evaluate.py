"""`gems evaluate`: the metrics of a run's weights on its own validation data, or on other data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.cli.framework import Options, print_json
from gems.config.compose import changed
from gems.config.overrides import check_overrides
from gems.config.schema import DataConfig, RunSpec
from gems.data import class_names, task_of
from gems.errors import ConfigError
from gems.launch.scratch_run import run_program
from gems.runs.folder import RunFolder
from gems.runs.lookup import find_run
from gems.utils.tables import RIGHT, name_values, table
from gems.utils.units import UNKNOWN

EVALUATE = "gems.engine.evaluation.predictions:evaluate_run"
LAST = "last"
BEST = "best"
AVERAGE = "average"


def evaluate(words: Sequence[str], options: Options) -> int:
    """Print the metrics of the weights of a run, with overrides such as data=folder data.path=... or fewer partitions.

    Raises:
        ConfigError: No run, no weights, or overrides that cannot run.
        RankFailedError: A rank ended before there was a result.
    """
    spec, path = run_for_inference(words, options.chosen.get("--weights", LAST), "evaluate")
    result = run_program(spec, EVALUATE, "evaluate", trains=False)
    if options.json:
        print_json({"run": str(path), "data": spec.data.name, **result})
    else:
        print(
            metric_tables(
                result, names_of_values(spec.data), title=f"{path.name} on data={spec.data.name}"
            )
        )
    return 0


def metric_tables(values: Mapping[str, Any], classes: Sequence[str], *, title: str) -> str:
    """Return metrics for people.

    Numbers by name, figures of each class as columns, and matrices by class.
    """
    by_class = {name: value for name, value in values.items() if _is_list(value, len(classes))}
    matrices = {
        name: rows
        for name, rows in by_class.items()
        if all(_is_list(row, len(classes)) for row in rows)
    }
    columns = {
        name: of for name, of in by_class.items() if not any(isinstance(each, list) for each in of)
    }
    rest = [
        (_words(name), _figure(value))
        for name, value in values.items()
        if name not in matrices | columns
    ]
    parts = [name_values(rest, title=title)]
    if columns:
        heads = {"class": "", **{_words(name): RIGHT for name in columns}}
        rows = [
            (name, *map(_figure, of)) for name, *of in zip(classes, *columns.values(), strict=True)
        ]
        parts.append(table(heads, rows, indent=2))
    for name, matrix in matrices.items():
        heads = {"class": "", **{label: RIGHT for label in _different(classes)}}
        rows = [(label, *map(_figure, of)) for label, of in zip(classes, matrix, strict=True)]
        parts.append(
            f"  {_words(name)}: a row for each true class, a column for each predicted one"
        )
        parts.append(table(heads, rows, indent=2))
    return "\n".join(parts)


def _is_list(value: object, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def _different(names: Sequence[str]) -> list[str]:
    """Return unique names that also differ from the heading of the classes."""
    keys: list[str] = []
    for number, name in enumerate(names):
        keys.append(f"{name} ({number})" if name in (*keys, "class") else name)
    return keys


def _words(name: str) -> str:
    return name.replace("_", " ")


def _figure(value: object) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


def names_of_values(data: DataConfig) -> list[str]:
    """Return a name for each class, label or value that a model of this task gives."""
    if (
        task_of(data) in ("multi_label", "regression")
        and len(data.label_columns) == data.num_classes
    ):
        return list(data.label_columns)
    return class_names(data)


def run_for_inference(words: Sequence[str], weights: str, verb: str) -> tuple[RunSpec, Path]:
    """Return a run with overrides, to start from its own weights on this machine, and its folder.

    Raises:
        ConfigError: As in `read_run`, or overrides that cannot run.
    """
    spec, overrides, path = read_run(words, weights, verb)
    return changed(spec, overrides, takes_options=True), path


def read_run(words: Sequence[str], weights: str, verb: str) -> tuple[RunSpec, list[str], Path]:
    """Return a run that starts from its own weights on this machine, with overrides and folder.

    The overrides are among `words`.

    Raises:
        ConfigError: No run, no such weights, or an override that is none.
    """
    names = [word for word in words if "=" not in word]
    if len(names) != 1:
        raise ConfigError(
            "run", " ".join(names) or "none", "must be one run", f"gems {verb} RUN [key=value ...]"
        )
    overrides = [word for word in words if "=" in word]
    check_overrides(overrides)
    path = find_run(names[0])
    spec = RunFolder(path).read_spec()
    train = replace(
        spec.train,
        initial_checkpoint=str(weights_folder(path, weights)),
        initial_strict=True,
        initial_new=[],
        initial_prefix=None,
        resume="never",
        evaluate=True,
        monitor=None,
        patience=None,
    )
    # what was derived from the run's own sizes is derived again
    parallel = replace(spec.parallel, replications=None, parts=None)
    cluster = replace(spec.cluster, nodes=None, ranks_per_node=None)
    return replace(spec, train=train, parallel=parallel, cluster=cluster), overrides, path


def weights_folder(path: Path, weights: str) -> Path:
    """Return the folder of the last weights of a run, of the best, or of those averaged over its steps.

    Raises:
        ConfigError: The run has kept none that were best, or no average.
    """
    if weights == LAST:
        return path
    if weights == AVERAGE:
        average = RunFolder(path).average
        if not average.is_dir():
            raise ConfigError(
                "--weights", weights, f"{path} has none", "train with train.ema_decay=0.999"
            )
        return average
    best = RunFolder(path).best_weights()
    if best is None:
        raise ConfigError(
            "--weights", weights, f"{path} has none", "train with train.monitor=METRIC"
        )
    return best
