"""Resolution of model and data: what a configuration derives from its network and its samples, and refuses."""

from __future__ import annotations

from dataclasses import replace

from gems.config.constraints import check_boundaries
from gems.config.registries import RESOLVERS
from gems.config.schema import RunSpec
from gems.data import check_data, kind_of, resolve_data, sources_of
from gems.errors import ConfigError
from gems.models import check_image, layers_of, takes_of
from gems.models.imported.describe import resolve_target
from gems.models.steps import num_branching, operators_of
from gems.schedule import FAMILIES, PLACED


def resolve_model_and_data(spec: RunSpec) -> RunSpec:
    """Return the run with the derived fields of `model` and `data`; raises ConfigError if they do not fit together."""
    if spec.model.target is not None:
        spec = replace(spec, model=resolve_target(spec.model))
    for key, value in (("model.kwargs", spec.model.kwargs), ("model.path", spec.model.path)):
        if value and spec.model.target is None:
            raise ConfigError(key, value, "is for a network of your own", "name it: model.target=package.module.Class")
    check_data(spec.data)
    reads, gives = takes_of(spec.model), kind_of(spec.data)
    if reads != gives:
        sources = [f"data={name}" for name in sources_of(reads)]
        text = f"gives {gives}, but model {spec.model.name} reads {reads}"
        raise ConfigError("data", spec.data.name, text, f"set {' or '.join(sources)}, or another model")
    check_image(spec.model, spec.data, spec.parallel.micro_batch_size)
    layers = layers_of(spec.model, spec.data)
    if spec.schedule.name == PLACED and not num_branching(operators_of(layers)):
        text = f"lays branches beside each other, and {spec.model.name} is a chain without any"
        advice = "use a model with branches (inception_v3, googlenet), or a schedule of stages"
        raise ConfigError("schedule", PLACED, text, advice)
    if spec.parallel.boundaries is not None:
        family = FAMILIES.get(spec.schedule.name)
        num_stages = family.stages(spec.schedule.chunks) * spec.parallel.partitions if family else 0
        boundaries = tuple(spec.parallel.boundaries)
        check_boundaries(boundaries, len(layers), num_stages or len(boundaries) - 1)
    return replace(spec, data=resolve_data(spec.data))


RESOLVERS.register("model and data", resolve_model_and_data)
