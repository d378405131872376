"""The signature: what a run's folder is called by, so that the same run finds its folder again."""

from __future__ import annotations

import hashlib
import json

from gems.config.schema import RESUME_AUTO, RESUME_NEVER, RunSpec

OF_THE_SITE = (
    "hosts", "limits", "charge_per", "charge_rate", "charge_unit", "minutes", "account", "exclude", "archive_code",
    "runs_per_job", "confirm_above_gpu_hours", "signal_before_end_s", "max_requeues",
)  # fmt: skip
OF_SAFETY = ("checkpoint_steps", "checkpoint_s", "keep_checkpoints")


def signature(spec: RunSpec) -> str:
    """Return 8 hexadecimal digits of the whole resolved configuration, but for what changes no run.

    That are the folders of runs and of the cache, what a site allows and charges, and by which names it is known, and
    how long a job may take, who pays for it, which nodes it shall not use, and how often the state is saved.
    """
    values = {key: value for key, value in spec.to_dict().items() if key not in ("runs_dir", "cache_dir")}
    values["cluster"] = {key: value for key, value in values["cluster"].items() if key not in OF_THE_SITE}
    # a run is held to it, so that it says nothing that partitions and replicas do not
    values["parallel"] = {key: value for key, value in values["parallel"].items() if key != "gpus"}
    unchanged = OF_SAFETY if spec.train.resume not in (RESUME_AUTO, RESUME_NEVER) else (*OF_SAFETY, "resume")
    values["train"] = {key: value for key, value in values["train"].items() if key not in unchanged}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
