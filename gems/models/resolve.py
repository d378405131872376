"""Derive the fields of model and data of a configuration, and check that they fit together."""

from __future__ import annotations

import logging
from dataclasses import replace

from gems.config.constraints import check_boundaries, check_metrics
from gems.config.micro_batches import resolve_micro_batches
from gems.config.registries import RESOLVERS
from gems.config.schema import RunSpec, TrainConfig
from gems.data import check_data, kind_of, num_train, resolve_data, sources_of, task_of
from gems.errors import ConfigError, one_of
from gems.models import MODELS, check_image, layers_of, takes_of, tasks_of
from gems.models.imported.describe import resolve_target
from gems.models.steps import num_branching, operators_of
from gems.schedule import PLACED

_log = logging.getLogger(__name__)


def resolve_model_and_data(spec: RunSpec) -> RunSpec:
    """Return the run with the derived fields of `model` and `data`.

    Raises:
        ConfigError: Model and data do not fit together.
    """
    if spec.model.target is not None:
        spec = replace(spec, model=resolve_target(spec.model))
    for key, value in (("model.kwargs", spec.model.kwargs), ("model.path", spec.model.path)):
        if value and spec.model.target is None:
            raise ConfigError(
                key,
                value,
                "is for a network of your own",
                "name it: model.target=package.module.Class",
            )
    check_data(spec.data)
    reads = takes_of(spec.model)
    gives = kind_of(spec.data)
    if reads != gives:
        sources = [f"data={name}" for name in sources_of(reads)]
        text = f"gives {gives}, but model {spec.model.name} reads {reads}"
        raise ConfigError(
            "data", spec.data.name, text, f"set {' or '.join(sources)}, or another model"
        )
    task = task_of(spec.data)
    tasks = tasks_of(spec.model)
    if task not in tasks:
        able = [f"model={name}" for name, family in sorted(MODELS.items()) if task in family.tasks]
        text = (
            f"model {spec.model.name} gives one score for each class of an image; {one_of(tasks)}"
        )
        raise ConfigError("data.task", task, text, f"set {' or '.join([*able, 'model.target'])}")
    check_metrics(spec.metrics, spec.train.monitor, task)
    check_image(spec.model, spec.data, spec.parallel.micro_batch_size)
    layers = layers_of(spec.model, spec.data)
    if spec.schedule.name == PLACED and not num_branching(operators_of(layers)):
        text = f"lays branches beside each other, and {spec.model.name} is a chain without any"
        advice = "use a model with branches (inception_v3, googlenet), or a schedule of stages"
        raise ConfigError("schedule", PLACED, text, advice)
    if spec.parallel.boundaries is not None:
        num_stages = spec.schedule.num_stages(spec.parallel.partitions)
        boundaries = tuple(spec.parallel.boundaries)
        check_boundaries(boundaries, len(layers), num_stages or len(boundaries) - 1)
    return replace(spec, data=resolve_data(spec.data))


def resolve_epochs(spec: RunSpec) -> RunSpec:
    """Return the run with train.steps derived from train.epochs, which take precedence.

    Raises:
        ConfigError: The epochs are fewer than one step.
    """
    epochs = spec.train.epochs
    default = TrainConfig().steps
    if epochs is None:
        return spec
    samples = num_train(spec.data, spec.seed)
    batch = resolve_micro_batches(spec.parallel, spec.schedule.name).global_batch
    steps = int(epochs * samples // batch)
    if steps < 1:
        text = f"has {samples} samples an epoch, fewer than the {batch} of one step"
        raise ConfigError("train.epochs", epochs, text, "give more epochs, or train.steps")
    if spec.train.steps not in (default, steps):
        text = "train.epochs=%g is %d steps of %d of %d samples; train.steps=%d is not used"
        _log.warning(text, epochs, steps, batch, samples, spec.train.steps)
    return replace(spec, train=replace(spec.train, steps=steps))


RESOLVERS.register("model and data", resolve_model_and_data)
RESOLVERS.register("epochs", resolve_epochs)
