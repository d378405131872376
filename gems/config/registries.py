"""What a configuration may choose by name.

Registries whose entries belong to the folders above this one.
They are here so that a name can be checked where the configuration is composed, with no import of
who registers it. Each folder gives its registry the type of its entries: `gems.models.MODELS`,
`gems.data.DATASETS`, ...
"""

from __future__ import annotations

from typing import Any

from gems.utils.registry import Registry

MODELS: Registry[Any] = Registry("model.name", "gems.models.families.*")
DATASETS: Registry[Any] = Registry("data.name", "gems.data.*", "gems.data.volumes.source")
POLICIES: Registry[Any] = Registry("memory", "gems.memory.registry")
COSTS: Registry[Any] = Registry("cost", "gems.simulation.cost_sources")
METHODS: Registry[Any] = Registry("partition", "gems.partition.methods")
LAUNCHERS: Registry[Any] = Registry("cluster.launcher", "jobs.batch.launchers")
SCHEDULERS: Registry[Any] = Registry("cluster.scheduler", "jobs.schedulers.*")
STAGE_WRAPPERS: Registry[Any] = Registry("train.stage_wrappers")
# Functions from a RunSpec to one with more fields derived, of folders above this one.
RESOLVERS: Registry[Any] = Registry("resolver", "gems.models.resolve")
