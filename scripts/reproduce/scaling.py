"""Measured scaling of others' machines beside the simulator.

ResNet-50 on up to 1536 V100 (MLPerf), and on ABCI.
What a GPU computes is a published time on one GPU or node, which is none of the measured points;
networks are those of conf/machine, whose files name their sources. Nothing is fitted to the points.
In batches of other sizes than the published one, training an image takes more or less time as
inference does, by the table beside it. Prints each point, and the median error by other choices:
another edition of the source, and the same time for an image in every batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

from analysis.scaling.law import Row
from analysis.scaling.published import read_table
from gems import RunSpec, plan_run, simulate
from gems.utils.tables import table
from scripts.bench.rig import composed, square

TABLE = Path(__file__).parents[1] / "data/measured_scaling.csv"
COMPUTE_TIMES = ("forward", "input_grad", "weight_grad", "recompute")


@dataclass(frozen=True, slots=True)
class Base:
    """What predictions on a machine start from.

    The published time of a step of `images` images on each GPU.
    `inference` are images/s of one GPU by batch, of the same source; empty to take the same time in
    every batch.
    """

    machine: str
    gpus: int
    images: int
    step_s: float
    inference: Mapping[int, float] = field(default_factory=dict)

    def image_s(self, images: float) -> float:
        """Return the time of an image in another batch, which changes as that of inference does."""

        def inferred_s(batch: float) -> float:
            times_s = [size / rate for size, rate in self.inference.items()]
            return float(np.interp(batch, list(self.inference), times_s)) / batch

        change = inferred_s(images) / inferred_s(self.images) if self.inference else 1.0
        return change * self.step_s / self.images


@dataclass(frozen=True, slots=True)
class Series:
    """A measured series, and how its runs summed their gradients, of `gradient_bytes` a parameter.

    `choices` are bases by a part of the source of a point, which names its machine; the first
    choice is the one shown. Of a step `sums` all-reduces overlap with backward; one alone follows
    it.
    """

    name: str
    choices: Mapping[str, Mapping[str, Base]]
    sums: int
    gradient_bytes: int


# NVIDIA/DeepLearningExamples, MxNet/Classification/RN50v1.5/README.md, mixed precision on one GPU,
# and its inference.
OLDER = {
    16: 2144,
    32: 2954,
    64: 3428,
    96: 3546,
    128: 3690,
    192: 3828,
    208: 3832,
}  # container 18.12, December 2018
NEWER = {
    16: 2359,
    32: 2902,
    64: 3234,
    128: 3362,
    192: 3178,
    256: 3057,
}  # container 20.12, February 2021
OLDER_BASES = {name: Base(f"{name}_v100", 1, 208, 208 / 1442.6, OLDER) for name in ("dgx1", "dgx2")}
NEWER_BASES = {
    "dgx1": Base("dgx1_v100", 1, 192, 192 / 1376, NEWER),
    "dgx2": Base("dgx2_v100", 1, 256, 256 / 1492, NEWER),
}
# ankahira/paraDL, spatial/results/resnet/4/log, 2020: seconds of the 2nd epoch's 20018 iterations
# on one node.
PARADL = Base("abci_v100", 4, 16, (9429.572 - 4754.069) / 20018)


def fixed(bases: Mapping[str, Base]) -> dict[str, Base]:
    """Return bases that take the same time for an image in every batch."""
    return {name: replace(base, inference={}) for name, base in bases.items()}


ALL_SERIES = (
    Series(
        "v100_resnet50",
        {
            "container 18.12": OLDER_BASES,
            "container 20.12": NEWER_BASES,
            "container 18.12, fixed time of an image": fixed(OLDER_BASES),
            "container 20.12, fixed time of an image": fixed(NEWER_BASES),
        },
        # MXNET_HOROVOD_NUM_GROUPS in config_DGX1_multi.sh and config_DGX2_multi.sh,
        # training_results_v0.6
        16,
        2,  # float16 in run_and_time.sh
    ),
    # float32, and an optimizer that sums in the node and then between nodes
    # (hybrid/train_imagenet.py)
    Series("paradl_resnet50_spatial", {"one node": {"paraDL": PARADL}}, 1, 4),
)


def quiet_s(spec: RunSpec, **parallel: int) -> float:
    """Return a step without stragglers."""
    machine = replace(spec.machine, noise=0.0)
    parallel_config = replace(spec.parallel, **parallel)
    return simulate(replace(spec, machine=machine, parallel=parallel_config)).step_s


def spec_of(series: Series, base: Base, accelerators: int, images: int) -> RunSpec:
    """Return the run of a point, with layers scaled to the base's time for an image.

    A base of several GPUs holds their sum too, which is taken off.
    """
    schedule = "gpipe" if series.sums == 1 else "interleaved_1f1b"
    spec = composed(
        f"model=resnet50 data=synthetic data.num_classes=1000 {square(224)} cost=profile",
        f"machine={base.machine} machine.kind=simulated machine.device_bytes=null",
        f"schedule={schedule}" + (f" schedule.chunks={series.sums}" if series.sums > 1 else ""),
        f"parallel.replicas={accelerators} parallel.micro_batches=1",
        f"parallel.micro_batch_size={images}",
    )
    cost = replace(plan_run(spec).costs, name="uniform")
    param_bytes = cost.param_bytes * series.gradient_bytes // 4
    stages = {name: values for name, values in cost.stages.items() if name != "param_bytes"}
    spec = replace(spec, cost=replace(cost, param_bytes=param_bytes, stages=stages))
    alone_s = quiet_s(spec, replicas=1)
    own_s = quiet_s(spec, replicas=base.gpus) - alone_s
    factor = images * replace(base, step_s=base.step_s - own_s).image_s(images) / alone_s
    times = {name: getattr(cost, name) for name in COMPUTE_TIMES}
    times = {name: time * factor for name, time in times.items() if time is not None}
    for name in COMPUTE_TIMES:
        if name in stages:
            stages[name] = [time * factor for time in stages[name]]
    return replace(spec, cost=replace(spec.cost, **times, stages=stages))


def simulated(
    series: Series, bases: Mapping[str, Base], row: Row
) -> tuple[Base, float, float, float]:
    """Return a row's base, simulated step, exposed sums and stragglers, in seconds."""
    base = next(base for part, base in bases.items() if part in row.where)
    spec = spec_of(series, base, row.accelerators, int(row.samples))
    step_s = simulate(spec).step_s
    without_s = quiet_s(spec)
    return base, step_s, without_s - quiet_s(spec, replicas=1), step_s - without_s


def show(series: Series, rows: list[Row]) -> None:
    """Print the points by the first choice, and the median errors of all."""
    columns = {
        "accelerators": "d",
        "images a GPU": "g",
        "machine": "",
        "measured [ms]": ".1f",
        "simulated [ms]": ".1f",
    }
    columns |= {"error [%]": "+.1f", "exposed sums [ms]": ".1f", "stragglers [ms]": ".1f"}
    medians = {}
    for choice, bases in series.choices.items():
        points = [simulated(series, bases, row) for row in rows]
        errors = [
            step_s / row.step_s - 1.0 for row, (_, step_s, *_) in zip(rows, points, strict=True)
        ]
        if not medians:
            cells = [
                (
                    row.accelerators,
                    row.samples,
                    base.machine,
                    1e3 * row.step_s,
                    1e3 * step_s,
                    100 * error,
                    1e3 * sums_s,
                    1e3 * stragglers_s,
                )
                for row, error, (base, step_s, sums_s, stragglers_s) in zip(
                    rows, errors, points, strict=True
                )
            ]
            print(
                table(
                    columns, cells, title=f"{series.name}: a step, measured by others and SIMULATED"
                )
            )
        medians[choice] = median(map(abs, errors))
    for choice, error in medians.items():
        print(f"  median error {100 * error:.1f} % by {choice}")


def main() -> None:
    """Simulate both series."""
    measured = read_table(TABLE)
    for series in ALL_SERIES:
        show(series, measured[series.name])


if __name__ == "__main__":
    main()
