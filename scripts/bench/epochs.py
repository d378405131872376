"""Epochs to a target loss of a small network by global batch: the table of `gems plan --epochs`.

One process trains a residual network on the toolkit's tissue and accumulates the gradients of
micro-batches. Normalisation is within a sample, so that a global batch is equivalent to as many
samples over any number of data-parallel workers. Each global batch is tried with several learning
rates, and the one that takes fewest epochs over all seeds counts, as each batch has a best rate of
its own (McCandlish et al. 2018, arXiv 1812.06162). The validation loss is evaluated eight times an
epoch; the moment at which it reached the target is interpolated between two evaluations.

    python -m scripts.bench.epochs --out epochs.json
    gems plan --hybrid --epochs epochs.json ...

The file holds a run for each batch and seed, and lets the planner fit E(B) = E_min (1 + B / B_crit)
to them, or read them as a table if they do not follow that law; the fit and its largest residuals
are printed. A batch that does not reach the target within --most-epochs is left out and named.
Takes Hydra overrides.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gems.config.schema import RunSpec
from gems.data import open_dataset
from gems.engine.optimization.optimizer import build_optimizer
from gems.engine.optimization.parameter_groups import NumberedLayer
from gems.errors import ConfigError
from gems.models import layers_of
from gems.models.build import build_layers
from gems.search.hybrid.epochs import NoiseFit, fit_noise_scale
from gems.search.hybrid.inputs import GivenEpochs, epochs_json
from gems.utils.atomic_io import write_json
from scripts.bench.rig import answered, composed, log, options

MODEL = (
    "model=resnet20_v1 model.depth=8 model.width=4 model.norm=group data=tissue data.height_px=16"
    " data.width_px=16 data.train_samples=2048 data.validation_samples=512 optimizer.momentum=0.9"
)
MICRO_BATCH = 64
BATCHES = [8, 16, 32, 64, 128, 256, 512]
# The learning rate grows with the root of the batch, from this one at that batch, and is tried
# times each of these.
BASE_RATE = 0.02
BASE_BATCH = 16
FACTORS = (2.0, 4.0, 8.0, 16.0)
EVALUATIONS = 8


class Task(NamedTuple):
    """What is trained: the run's configuration, its samples, and where training may stop.

    A split is all its images, (n, channels, height, width), and their labels, (n,).
    """

    spec: RunSpec
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    target_loss: float
    most_epochs: float


def make_task(overrides: Sequence[str], target_loss: float, most_epochs: float) -> Task:
    """Compose the run and read its samples into memory, each as it is first drawn."""
    spec = composed(MODEL, overrides)
    dataset = open_dataset(spec.data, spec.seed)
    splits = []
    for split in ("train", "validation"):
        indices = range(dataset.num_images(split))
        images = torch.stack([torch.from_numpy(dataset.image(split, index)) for index in indices])
        splits.append(
            (images, torch.tensor([int(dataset.label(split, index)) for index in indices]))
        )
    return Task(spec, splits[0], splits[1], target_loss, most_epochs)


def epochs_to_target(task: Task, global_batch: int, rate: float, seed: int) -> float | None:
    """Train until the validation loss reaches the target; return the epochs, or None.

    A loss that is not finite ends it too.
    """
    layers = layers_of(task.spec.model, task.spec.data)
    model = nn.Sequential(*build_layers(layers, 0, len(layers), seed))
    optimizer = build_optimizer(task.spec.optimizer, [NumberedLayer(0, "model", model)], 1)
    for group in optimizer.param_groups:
        group["lr"] = rate
    images, labels = task.train
    every = max(1, round(len(labels) / global_batch / EVALUATIONS))
    before = _validation_loss(model, task)
    seen_before = 0.0
    for step, batch in enumerate(_batches(len(labels), global_batch, seed), start=1):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        for chosen in batch.split(MICRO_BATCH):
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen], reduction="sum")
            (loss / global_batch).backward()
        optimizer.step()
        if step % every:
            continue
        loss_now = _validation_loss(model, task)
        seen = step * global_batch / len(labels)
        if not math.isfinite(loss_now) or seen > task.most_epochs:
            return None
        if loss_now <= task.target_loss:
            share = (before - task.target_loss) / (before - loss_now) if before > loss_now else 1.0
            return seen_before + share * (seen - seen_before)
        before = loss_now
        seen_before = seen
    return None


def _batches(num_samples: int, global_batch: int, seed: int) -> Iterator[Tensor]:
    """Yield the samples of each step, endlessly: one permutation after another.

    A batch may span two.
    """
    generator = torch.Generator().manual_seed(seed)
    waiting = torch.empty(0, dtype=torch.int64)
    while True:
        while len(waiting) < global_batch:
            waiting = torch.cat([waiting, torch.randperm(num_samples, generator=generator)])
        yield waiting[:global_batch]
        waiting = waiting[global_batch:]


@torch.no_grad()
def _validation_loss(model: nn.Module, task: Task) -> float:
    model.eval()
    images, labels = task.validation
    return float(functional.cross_entropy(model(images), labels))


def study(
    task: Task, batches: Sequence[int], seeds: Sequence[int]
) -> tuple[list[dict[str, float]], list[int]]:
    """Train at every batch, rate and seed.

    Return a row for each batch and seed, and the batches that never reached the target. The rate of
    a batch is the one with the smallest mean over the seeds, among those that reach it with all
    seeds.
    """
    rows = []
    missed = []
    for batch in batches:
        reached: dict[float, list[float]] = {}
        for factor in FACTORS:
            rate = BASE_RATE * factor * math.sqrt(batch / BASE_BATCH)
            epochs = [epochs_to_target(task, batch, rate, seed) for seed in seeds]
            if None not in epochs:
                reached[rate] = [count for count in epochs if count is not None]
        if not reached:
            missed.append(batch)
            continue
        best = min(reached, key=lambda rate: sum(reached[rate]))
        rows += [
            {"global_batch": batch, "epochs": epochs, "seed": seed, "learning_rate": best}
            for seed, epochs in zip(seeds, reached[best], strict=True)
        ]
        log(f"batch {batch}: {sum(reached[best]) / len(seeds):.2f} epochs with rate {best:.3g}")
    return rows, missed


def describe_fit(fit: NoiseFit) -> str:
    """Describe the fitted law, its intervals and its largest residuals in one line."""
    least = fit.law.least_epochs
    critical = fit.law.critical_batch
    by_batch: dict[float, list[float]] = defaultdict(list)
    for (batch, _), residual in zip(fit.runs, fit.residuals, strict=True):
        by_batch[batch].append(residual)
    means = max(abs(statistics.fmean(residuals)) for residuals in by_batch.values())
    return (
        f"E_min {least.value:.3g} epochs ({least.low:.3g} to {least.high:.3g}), "
        f"B_crit {critical.value:.3g} samples ({critical.low:.3g} to {critical.high:.3g}), "
        f"means of a batch within {means:.0%}, runs within {max(map(abs, fit.residuals)):.0%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, write the file and print the fit."""
    arguments = options(
        __doc__,
        argv,
        out=Path("epochs.json"),
        target_loss=0.15,
        most_epochs=12.0,
        batches=BATCHES,
        seeds=4,
        json=False,
        overrides={"nargs": "*", "metavar": "key=value"},
    )
    torch.set_num_threads(1)
    begin = time.perf_counter()
    fit = None
    why = ""
    try:
        task = make_task(arguments.overrides, arguments.target_loss, arguments.most_epochs)
        rows, missed = study(task, arguments.batches, range(arguments.seeds))
        if not rows:
            raise ConfigError(
                "--target-loss", arguments.target_loss, "is reached by no batch", "raise it"
            )
        try:
            fit = fit_noise_scale([(row["global_batch"], row["epochs"]) for row in rows])
        except ConfigError as error:
            why = str(error)
        document = {
            "schema": "gems.epochs/1",
            "model": "table" if fit is None else "noise_scale",
            "network": task.spec.model.name,
            "target_loss": arguments.target_loss,
            "samples_per_epoch": len(task.train[1]),
            "missed": missed,
            "runs": rows,
        }
        write_json(arguments.out, document)
    except ConfigError as error:
        log(f"epochs: {error}")
        return error.exit_code
    wall_s = time.perf_counter() - begin
    if not arguments.json:
        left_out = f"; never at the target: {', '.join(map(str, missed))}" if missed else ""
        print(
            f"{why if fit is None else describe_fit(fit)}{left_out}; {wall_s:.0f} s, in {arguments.out}"
        )
    law = None if fit is None else epochs_json(GivenEpochs(fit.law, fit))
    return answered(
        {**document, "path": str(arguments.out), "fit": law, "wall_s": wall_s},
        False,
        arguments.json,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
