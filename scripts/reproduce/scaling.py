"""Measured scaling of others' machines beside the simulator.

ResNet-50 on up to 1536 V100 (MLPerf), and on ABCI.
What a GPU computes is a published time on one GPU or node, which is none of the measured points;
networks are those of conf/machine. Nothing is fitted to the points. In batches of other sizes than
the published one, training an image takes more or less time as inference does, by the table beside
it. Prints each point, each constant with its source, and the median error by other choices: another
edition of the source, and the same time for an image in every batch. `--json` prints one object.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from analysis.scaling.projection import COMPUTE, varied
from analysis.scaling.published import read_table
from analysis.scaling.step_time import Row
from gems.config.schema import RunSpec
from gems.errors import ConfigError, GemsError, one_of
from gems.partition.links import network_in_seconds
from gems.schedule.replicas import all_reduce
from gems.simulation.build import lowered_schedule
from gems.simulation.prediction import predict_schedule
from gems.simulation.profiled_costs import with_profiled_costs
from gems.utils.tables import table
from gems.utils.units import counted
from scripts.bench.rig import answered, composed, options, square

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "scripts/data/measured_scaling.csv"
MACHINE_KEYS = (
    "link_bytes_per_s",
    "link_latency_s",
    "node_bytes_per_s",
    "node_latency_s",
    "ranks_per_node",
    "noise",
)
PIECES = {
    "compute_s": "compute [ms]",
    "all_reduce_s": "exposed sum [ms]",
    "stragglers_s": "stragglers [ms]",
}


@dataclass(frozen=True, slots=True)
class Base:
    """What predictions on a machine start from.

    The published time of a step of `images` images on each GPU.
    `inference` are images/s of one GPU by batch, of the same source; empty if none are published.
    """

    machine: str
    gpus: int
    images: int
    step_s: float
    source: str
    inference: Mapping[int, float] = field(default_factory=dict)

    def image_s(self, images: int) -> float:
        """Return the time of an image in a batch of another size, which changes as that of inference does."""

        def inferred_s(batch: int) -> float:
            times_s = [size / rate for size, rate in self.inference.items()]
            return float(np.interp(batch, list(self.inference), times_s)) / batch

        change = inferred_s(images) / inferred_s(self.images) if self.inference else 1.0
        return change * self.step_s / self.images


@dataclass(frozen=True, slots=True)
class Series:
    """A measured series, and how its runs summed their gradients.

    Attributes:
        choices: bases by a part of the source of a point, which names its machine; the first choice
            is the one shown.
        sums: how many all-reduces of a step overlap with backward; 1 if one follows it.
        gradient_bytes: of one parameter.
        source: of the two.
    """

    name: str
    choices: Mapping[str, Mapping[str, Base]]
    sums: int
    gradient_bytes: int
    source: str


MXNET = (
    "{} images/s on 1 GPU with mixed precision, and the table of inference:"
    " NVIDIA/DeepLearningExamples, MxNet/Classification/RN50v1.5/README.md, container {}"
)
OLDER = "18.12, December 2018"
NEWER = "20.12, February 2021"
INFERENCE = {
    OLDER: {16: 2144, 32: 2954, 64: 3428, 96: 3546, 128: 3690, 192: 3828, 208: 3832},
    NEWER: {16: 2359, 32: 2902, 64: 3234, 128: 3362, 192: 3178, 256: 3057},
}


def mxnet(machine: str, edition: str, images: int, rate: float) -> Base:
    """Return the base that an edition of NVIDIA's page on MXNet gives."""
    return Base(machine, 1, images, images / rate, MXNET.format(rate, edition), INFERENCE[edition])


def with_fixed(choices: Mapping[str, Mapping[str, Base]]) -> Mapping[str, Mapping[str, Base]]:
    """Return choices, and for each one that takes the same time for an image in every batch."""
    fixed = {
        f"{name}, fixed time of an image": {
            part: replace(base, inference={}) for part, base in bases.items()
        }
        for name, bases in choices.items()
    }
    return {**choices, **fixed}


PARADL = (
    "ankahira/paraDL, spatial/results/resnet/4/log, 2020: seconds of the 2nd epoch's 20018"
    " iterations on one node"
)
ALL_SERIES = (
    Series(
        "v100_resnet50",
        with_fixed(
            {
                f"container {OLDER}": {
                    "dgx1": mxnet("dgx1_v100", OLDER, 208, 1442.6),
                    "dgx2": mxnet("dgx2_v100", OLDER, 208, 1442.6),
                },
                f"container {NEWER}": {
                    "dgx1": mxnet("dgx1_v100", NEWER, 192, 1376),
                    "dgx2": mxnet("dgx2_v100", NEWER, 256, 1492),
                },
            }
        ),
        16,
        2,
        "float16 in run_and_time.sh, and MXNET_HOROVOD_NUM_GROUPS=16 in config_DGX1_multi.sh and"
        " config_DGX2_multi.sh, training_results_v0.6, 2019",
    ),
    Series(
        "paradl_resnet50_spatial",
        {"one node": {"paraDL": Base("abci_v100", 4, 16, (9429.572 - 4754.069) / 20018, PARADL)}},
        1,
        4,
        "float32, and an optimizer that sums in the node and then between nodes"
        " (hybrid/train_imagenet.py, 2020)",
    ),
)


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step beside the simulated one and its parts.

    `error` is simulated over measured, less 1.
    """

    accelerators: int
    global_batch: int
    machine: str
    measured_s: float
    simulated_s: float
    low_s: float
    high_s: float
    compute_s: float
    all_reduce_s: float
    stragglers_s: float
    error: float
    source: str


def spec_of(series: Series, base: Base, accelerators: int, images: int) -> RunSpec:
    """Return the run of a point with the costs of its layers, scaled so that an image takes as long as by the base.

    A base of several GPUs holds their sum too, which is taken off.
    """
    spec = composed(
        f"model=resnet50 data=synthetic data.num_classes=1000 {square(224)} machine={base.machine}"
        " cost=profile",
        "machine.kind=simulated machine.device_bytes=null",
        (
            "schedule=gpipe"
            if series.sums == 1
            else f"schedule=interleaved_1f1b schedule.chunks={series.sums}"
        ),
        f"parallel.replicas={accelerators} parallel.micro_batches=1"
        f" parallel.micro_batch_size={images}",
    )
    spec = with_profiled_costs(spec)
    stages = {
        name: values for name, values in spec.cost.stages.items() if name != "param_bytes"
    }  # the sums are alike
    cost = replace(
        spec.cost, param_bytes=spec.cost.param_bytes * series.gradient_bytes // 4, stages=stages
    )
    own = all_reduce(network_in_seconds(spec), range(base.gpus), cost.param_bytes).time
    wanted_s = images * replace(base, step_s=base.step_s - own).image_s(images)
    return varied(replace(spec, cost=cost), {COMPUTE: _compute_s(spec) / wanted_s})


def _compute_s(spec: RunSpec) -> float:
    return sum(getattr(spec.cost, name) for name in ("forward", "input_grad", "weight_grad"))


def simulated(bases: Mapping[str, Base], series: Series, row: Row) -> Point:
    """Simulate a row of a series.

    Raises:
        ConfigError: a row of a machine that the series does not know, or whose batch is not whole
        on each GPU.
    """
    base = next((base for part, base in bases.items() if part in row.where), None)
    if base is None:
        raise ConfigError("table", row.where, f"names none of the machines {one_of(bases)}")
    images, remainder = divmod(row.global_batch, row.accelerators)
    if remainder:
        raise ConfigError(
            "global_batch",
            row.global_batch,
            f"is no multiple of its {row.accelerators} accelerators",
        )
    spec = spec_of(series, base, row.accelerators, images)
    schedule = lowered_schedule(spec)
    step = predict_schedule(spec, schedule)
    quiet_s = predict_schedule(
        replace(spec, machine=replace(spec.machine, noise=0.0)), schedule
    ).step_s
    compute_s = _compute_s(spec)
    return Point(
        row.accelerators,
        row.global_batch,
        base.machine,
        row.step_s,
        step.step_s,
        *step.interval,
        compute_s,
        quiet_s - compute_s,
        step.step_s - quiet_s,
        step.step_s / row.step_s - 1,
        row.where,
    )


def constants(series: Series, bases: Mapping[str, Base]) -> Iterator[tuple[str, str]]:
    """Yield what a series is predicted from, each with its source."""
    for base in bases.values():
        value = (
            f"{base.step_s:.6g} s a step of {base.images} images a GPU, on"
            f" {counted(base.gpus, 'GPU')}"
        )
        yield f"{base.machine}: {value}", base.source
    sums = "one sum after backward" if series.sums == 1 else f"{series.sums} sums beside backward"
    yield f"gradients of {series.gradient_bytes} bytes a parameter, {sums}", series.source
    for base in bases.values():
        machine = composed(f"machine={base.machine}").machine
        values = ", ".join(f"{key} {getattr(machine, key):g}" for key in MACHINE_KEYS)
        path = ROOT / f"conf/machine/{base.machine}.yaml"
        notes = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
        yield f"{base.machine}: {values}", " ".join(notes)


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print the points, the median of their errors, those of other choices, and the constants."""
    columns = {
        "accelerators": "d",
        "batch": "d",
        "machine": "",
        "measured [ms]": ".1f",
        "simulated [ms]": ".1f",
    }
    columns |= {"error [%]": "+.1f"} | dict.fromkeys(PIECES.values(), ".1f")
    names = ("accelerators", "global_batch", "machine")
    scales = {"measured_s": 1e3, "simulated_s": 1e3, "error": 1e2} | dict.fromkeys(PIECES, 1e3)
    rows = [
        (*(point[name] for name in names), *(scale * point[name] for name, scale in scales.items()))
        for point in found["points"]
    ]
    print(table(columns, rows, title=f"{name}: a step, measured by others and SIMULATED"))
    print(
        f"median error {100 * found['median_error']:.1f} % over {len(rows)} points; none of them is"
        " a base"
    )
    for choice, error in found["median_errors"].items():
        print(f"  {100 * error:4.1f} % by {choice}")
    for value, source in found["constants"].items():
        print(f"  {value}\n    {source}")


def reproduced(series: Series, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the points of a series by its first choice, the median errors of all, and the constants."""
    points = {
        name: [simulated(bases, series, row) for row in rows]
        for name, bases in series.choices.items()
    }
    errors = {name: median(abs(point.error) for point in made) for name, made in points.items()}
    first = next(iter(series.choices))
    return {
        "source": "simulated",
        "choice": first,
        "median_error": errors[first],
        "median_errors": errors,
        "points": [asdict(point) for point in points[first]],
        "constants": dict(constants(series, series.choices[first])),
    }


def main(argv: Sequence[str]) -> int:
    """Simulate each series and return the exit code."""
    names = tuple(series.name for series in ALL_SERIES)
    given = options(__doc__, argv, json=False, table=TABLE, series={"choices": names})
    answer: dict[str, Any] = {}
    try:
        measured = read_table(given.table)
        for series in ALL_SERIES:
            if given.series in (None, series.name):
                if series.name not in measured:
                    raise ConfigError(
                        "table", given.table, f"has no series {series.name}", one_of(measured)
                    )
                answer[series.name] = reproduced(series, measured[series.name])
                if not given.json:
                    show(series.name, answer[series.name])
    except GemsError as error:
        print(f"scaling: {error}", file=sys.stderr)
        return error.exit_code
    return answered(answer, False, given.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
