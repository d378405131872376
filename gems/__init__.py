"""Training of deep networks on very large images, split over the ranks of a supercomputer.

The names in `__all__` are the public API. Each is imported when it is first used, so that `import
gems` loads neither torch nor MPI nor Hydra, and a login node can use what needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gems.config.compose import compose as compose
    from gems.config.schema import RunSpec as RunSpec
    from gems.engine.checkpoint.state_dict import load_model as load_model
    from gems.engine.checkpoint.weights import load as load_weights
    from gems.engine.in_process import TrainResult as TrainResult
    from gems.engine.in_process import train as train
    from gems.errors import ConfigError as ConfigError
    from gems.errors import DoesNotFitError as DoesNotFitError
    from gems.errors import GemsError as GemsError
    from gems.errors import RankFailedError as RankFailedError
    from gems.errors import ScheduleError as ScheduleError
    from gems.errors import StalledError as StalledError
    from gems.launch.verification import Verification as Verification
    from gems.launch.verification import verify as verify
    from gems.plan.evaluate import Plan as RunPlan
    from gems.plan.evaluate import evaluate as plan_run
    from gems.plan.evaluate import simulate as simulate
    from gems.simulation.prediction import Prediction as Prediction
    from gems.trace.layout import Trace as Trace
    from gems.trace.parts import load_trace as load_trace

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DoesNotFitError",
    "GemsError",
    "Prediction",
    "RankFailedError",
    "RunPlan",
    "RunSpec",
    "ScheduleError",
    "StalledError",
    "Trace",
    "TrainResult",
    "Verification",
    "__version__",
    "compose",
    "load_model",
    "load_trace",
    "load_weights",
    "plan_run",
    "simulate",
    "train",
    "verify",
]

_HOMES = {
    "compose": "gems.config.compose",
    "RunSpec": "gems.config.schema",
    "plan_run": "gems.plan.evaluate:evaluate",
    "RunPlan": "gems.plan.evaluate:Plan",
    "simulate": "gems.plan.evaluate",
    "Prediction": "gems.simulation.prediction",
    "verify": "gems.launch.verification",
    "Verification": "gems.launch.verification",
    "train": "gems.engine.in_process",
    "TrainResult": "gems.engine.in_process",
    "load_trace": "gems.trace.parts",
    "Trace": "gems.trace.layout",
    "load_model": "gems.engine.checkpoint.state_dict",
    "load_weights": "gems.engine.checkpoint.weights:load",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module; errors are all in one."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES.get(name, "gems.errors").partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
