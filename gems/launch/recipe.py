"""Check the recipe of a run (loss, optimizer and so on) in a process that has not loaded torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any

from gems.config.recipe import LrSchedulerConfig
from gems.config.schema import RunSpec
from gems.models import num_outputs
from gems.utils.cache import cached
from gems.utils.targets import ask_child, locate, source_of

CHECKER = "gems.engine.verification.recipe"


def needs_check(spec: RunSpec) -> bool:
    """Return whether the recipe of a run has more than names that the schema has checked."""
    recipe = (spec.loss, spec.optimizer, spec.lr_scheduler)
    return spec.machine.is_real and (
        any(part.target is not None or part.kwargs for part in recipe)
        or spec.loss.output is not None
        or spec.lr_scheduler.name != LrSchedulerConfig().name
        or bool(_own_metrics(spec.metrics))
        or bool(spec.optimizer.frozen)
        or spec.data.transform is not None
        or num_outputs(spec.model, spec.data) > 1
    )


def check_recipe(spec: RunSpec) -> str:
    """Check the recipe of a resolved run as its ranks would, and return a summary.

    A child process does so once for each configuration and state of the code, unless torch is
    loaded here.

    Raises:
        ConfigError: A rank would refuse a part of the recipe; the error names the first one.
    """
    if "torch" in sys.modules:
        import_module(CHECKER).check(spec)
    else:
        parts = [asdict(part) for part in (spec.model, spec.data, spec.loss, spec.lr_scheduler)]
        optimizer = {
            **asdict(spec.optimizer),
            # points of a study that differ in numbers only share a result
            "lr": 1.0,
            "momentum": 0.0,
            "weight_decay": bool(spec.optimizer.weight_decay),
        }
        is_constant = spec.lr_scheduler == LrSchedulerConfig()
        length = None if is_constant else (spec.train.steps, spec.parallel.global_batch)
        targets = dict(spec.own_code()) | _own_metrics(spec.metrics)
        if spec.data.transform is not None:
            transform = spec.data.transform
            targets[transform] = locate("data.transform", transform, None)[1]
        hashes = [source_of(target, path) for target, path in targets.items() if path is not None]
        numerics = (spec.train.precision, spec.machine.device)
        key = repr((optimizer, parts, spec.metrics, numerics, length, spec.plugins, hashes))
        text = json.dumps(spec.to_dict())
        cached(None, "recipe", key, lambda: ask_child("recipe", spec.name, CHECKER, text))
    return "loss, optimizer, scheduler, metrics and transform are taken as ranks take them"


def _own_metrics(metrics: Mapping[str, Any]) -> dict[str, str | None]:
    return {
        str(options["target"]): options.get("path")
        for options in metrics.values()
        if options.get("target")
    }
