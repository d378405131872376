"""The recipe of a run tried before its job is queued, by the functions that its ranks call.

As a child process it reads a resolved run as JSON, and prints what the ranks would refuse.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from gems.config.schema import OptimizerConfig, RunSpec
from gems.data import num_train, task_of
from gems.data.images import load_transform
from gems.engine.device import DTYPES
from gems.engine.evaluation.chosen_metrics import open_metrics
from gems.engine.optimization.lr_schedule import STEP, LrSchedule
from gems.engine.optimization.optimizer import build_optimizer
from gems.engine.optimization.parameter_groups import NumberedLayer, check_frozen
from gems.engine.stage_modules import StageModules
from gems.errors import ConfigError
from gems.losses.summed import SummedLoss
from gems.models import Layer, layers_of
from gems.models.build import build_layer, freeze
from gems.utils.registry import load_plugins
from gems.utils.targets import answer, target_error

CPU = torch.device("cpu")
_GPU_WORDS = ("CUDA", "NVIDIA", "HIP")


def check(spec: RunSpec) -> None:
    """Open the loss, optimizer, scheduler, metrics and transform of a resolved run.

    No layer takes memory for that.
    Code that asks for a GPU is left to the ranks, which have one.

    Raises:
        ConfigError: the first that a rank would refuse.
    """
    try:
        layers = layers_of(spec.model, spec.data)
        dtype = DTYPES[spec.train.dtype]
        loss = SummedLoss(
            spec.loss,
            spec.data,
            dtype,
            CPU,
            StageModules(layers, (), ()).output(spec.data, spec.parallel.micro_batch_size, dtype),
        )
        open_metrics(spec.metrics, task_of(spec.data), spec.data.num_classes, loss.scores)
        optimizer = _optimizer(spec.optimizer, spec.seed, layers, dtype)
        rates = spec.lr_scheduler
        samples = 1 if rates.interval == STEP else num_train(spec.data, spec.seed)
        batch = spec.parallel.global_batch
        LrSchedule(rates, spec.optimizer, optimizer, spec.train.steps, batch, samples)
        if spec.data.transform is not None:
            load_transform(spec.data)
    except ConfigError as error:
        if spec.machine.device == "cpu" or not any(word in str(error) for word in _GPU_WORDS):
            raise


def _optimizer(
    config: OptimizerConfig, seed: int, layers: Sequence[Layer], dtype: torch.dtype
) -> torch.optim.Optimizer:
    """Return the optimizer of parameters without values.

    If the optimizer reads values, it gets the parameters of the smallest layer instead.
    """
    built = [
        NumberedLayer(index, layer.name, build_layer(layer, index, seed, dtype, "meta"))
        for index, layer in enumerate(layers)
    ]
    check_frozen(config.frozen, freeze([(each.name, each.module) for each in built], config.frozen))
    try:
        return build_optimizer(config, built, len(layers))
    except ConfigError:
        sizes = {
            layer.place: sum(each.numel() for each in layer.module.parameters()) for layer in built
        }
        place = min((place for place, size in sizes.items() if size), key=sizes.__getitem__)
        module = build_layer(layers[place], place, seed, dtype, CPU)
        return build_optimizer(
            config, [NumberedLayer(place, layers[place].name, module)], len(layers)
        )


def main(argv: Sequence[str]) -> None:
    """Print what `check` refuses."""
    spec = RunSpec.from_dict(json.loads(argv[0]))

    def make() -> dict[str, str]:
        load_plugins(spec.plugins, spec.plugins_dir)
        check(spec)
        return {"torch": torch.__version__}

    answer(make, lambda error: target_error("recipe", spec.name, "cannot be checked", error))


if __name__ == "__main__":
    main(sys.argv[1:])
