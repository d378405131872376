"""Step times from MLPerf's public results, as the table that `gems-analysis scaling --table` reads.

`python -m scripts.reproduce.mlperf FOLDER > steps.csv` reads all of
`results/SYSTEM/BENCHMARK/result_*.txt` below a folder, beside `systems/SYSTEM.json`: a row for each
result, the median over its runs. `scripts/data/mlperf_scaling.csv` and `measured_scaling.csv` were
made so, from mlcommons/training_results_v0.6 to v1.1. Logs have had two forms since v0.6: `:::MLL
1541.5 epoch_start: {"value": null, "metadata": {...}}` and `:::MLLOG {"key": ...}`. Results without
the time of a step are named on stderr. Not verified by MLCommons.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMS = re.compile(r":::MLL (?P<time>[\d.]+) (?P<key>[\w.]+): (?P<value>.*)|:::MLLOG (?P<log>.*)")
STOPS = {"epoch_stop": "epoch_start", "block_stop": "block_start"}
BATCH = ("global_batch_size", "input_batch_size")
SAMPLES = ("train_samples", "num_train_examples", "preproc_num_train_examples")
# Of the benchmarks' data sets, which most logs of v0.6 do not give.
DATA_SET_SAMPLES = {"resnet": 1281167, "ssd": 117266}
WHOLE_RUN = "bert"  # the benchmark whose train_samples are those of the run
# Files of systems are JSON with these names in one round, and logs with a Python dictionary inside
# in another.
NODES = re.compile(r"num(?:ber)?[_ ](?:of[_ ])?nodes\W+(\d{1,7})(?!\d)")
RANKS_PER_NODE = re.compile(r"(?:num_accelerators|accelerators_per_node)\W+(\d{1,7})(?!\d)")
ACCELERATOR = re.compile(r"\baccelerator(?:_model_name)?\W+([^\"'\\]+)")


def entries(path: Path) -> Iterator[tuple[str, float, Any, dict[str, Any]]]:
    """Yield key, seconds, value and metadata of each line of a log."""
    for line in path.read_text(errors="replace").splitlines():
        if (match := FORMS.search(line)) is not None:
            document = json.loads(match["log"] or match["value"])
            key = match["key"] or document["key"]
            time_s = float(match["time"]) if match["time"] else document["time_ms"] / 1e3
            yield key, time_s, document["value"], document["metadata"]


def read_log(path: Path) -> tuple[int, float]:
    """Return the global batch and the median seconds of a step of one run.

    A stop ends the start of its number, or the only one that is open: several ranks may write the
    same line, and blocks overlap where evaluation runs beside training. What is open where a run
    starts again was cut off.

    Raises:
        ValueError: The log does not tell the batch, the samples or an epoch.
    """
    values: dict[str, Any] = {}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in STOPS.values()}
    begun: dict[str, dict[Any, tuple[float, float]]] = {name: {} for name in spans}
    for key, time_s, value, metadata in entries(path):
        values.setdefault(key, value)
        number = metadata.get("epoch_num", metadata.get("first_epoch_num"))
        if key == "run_start":
            for cut_off in begun.values():
                cut_off.clear()
        if key in begun:
            begun[key].setdefault(number, (time_s, float(metadata.get("epoch_count", 1))))
        opened = begun.get(STOPS.get(key, ""), {})
        if number not in opened and len(opened) == 1:
            (number,) = opened
        if number in opened:
            start_s, epochs = opened.pop(number)
            spans[STOPS[key]].append(((time_s - start_s) / epochs, epochs))
    epochs_s = next((some for some in spans.values() if some), [])
    batch = next((values[key] for key in BATCH if key in values), None)
    samples = next(
        (values[key] for key in SAMPLES if key in values), DATA_SET_SAMPLES.get(path.parent.name)
    )
    if not batch or not samples or not epochs_s:
        raise ValueError(f"{path}: tells no global batch, training samples or epochs")
    if path.parent.name == WHOLE_RUN:
        epoch_s = sum(seconds * count for seconds, count in epochs_s)
    else:
        epoch_s = statistics.median(seconds for seconds, _ in epochs_s)
    if epoch_s <= 0:
        raise ValueError(f"{path}: an epoch ends before its start")
    return int(batch), epoch_s / math.ceil(samples / batch)


def result(place: Path) -> Iterator[tuple[str, int, int, float, Path]]:
    """Yield series, accelerators, global batch, seconds and place for each batch of a result."""
    steps: dict[int, list[float]] = {}
    for path in sorted(place.glob("result_*.txt")):
        batch, step_s = read_log(path)
        steps.setdefault(batch, []).append(step_s)
    text = (place.parents[2] / "systems" / f"{place.parent.name}.json").read_text()
    sizes = [name.search(text) for name in (NODES, RANKS_PER_NODE)]
    accelerators = math.prod(int(size[1]) if size else 0 for size in sizes)
    named = ACCELERATOR.search(text)
    if not accelerators or named is None:
        raise ValueError(f"{place}: its system has no nodes or accelerators")
    series = f"{place.name}, {place.parents[2].name}, {named[1].strip()}"
    for batch, runs in steps.items():
        yield series, accelerators, batch, statistics.median(runs), place


def main(argv: list[str]) -> None:
    """Print the table."""
    out = csv.writer(sys.stdout)
    out.writerow(["series", "accelerators", "global_batch", "step_s", "source"])
    for place in sorted({path.parent for path in Path(argv[0]).resolve().rglob("result_*.txt")}):
        try:
            out.writerows(result(place))
        except (ValueError, OSError, KeyError, TypeError) as error:
            print(f"left out: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
