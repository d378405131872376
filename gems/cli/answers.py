"""Parts of the answers of several verbs: the facts of a case, and pictures.

A child process draws, so that no verb loads matplotlib.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gems.cli.framework import Options
from gems.errors import ConfigError, one_of
from gems.profile import ModelProfile
from gems.schedule.schedule import Schedule
from gems.utils.run_module import RUN_MODULE

LIMIT_S = 120
PICTURES = (".png", ".pdf", ".svg")


def case_facts(profile: ModelProfile, schedule: Schedule) -> dict[str, Any]:
    """Return the subject of a prediction: a profile's model and a schedule."""
    return {
        "source": "predicted",
        "model": profile.model,
        **profile.sides,
        "micro_batch_size": profile.micro_batch_size,
        "dtype": profile.dtype,
        "profile_source": profile.source,
        "profile_device": profile.device,
        "schedule": schedule.name,
        "partitions": schedule.num_ranks,
        "micro_batches": schedule.num_whole,
        "strips": schedule.num_strips,
    }


def picture_path(options: Options, default: str | None = None) -> Path | None:
    """Return the path of --picture, before the work is done.

    Raises:
        ConfigError: A picture that could not be written: another suffix, or no such folder.
    """
    name = options.chosen.get("--picture", default)
    if name is None:
        return None
    path = Path(name)
    if path.suffix not in PICTURES:
        raise ConfigError("--picture", path, one_of(PICTURES))
    if not path.absolute().parent.is_dir():
        raise ConfigError("--picture", path, "its folder does not exist", "make the folder first")
    return path


def draw(verb: str, answer: Mapping[str, Any], path: Path) -> str:
    """Have `gems-analysis VERB` draw an answer, and return the picture's path."""
    with tempfile.TemporaryDirectory(prefix=f"gems-{verb}-") as scratch:
        document = Path(scratch) / f"{verb}.json"
        document.write_text(json.dumps(answer))
        argv = [
            sys.executable,
            *RUN_MODULE,
            "analysis",
            verb,
            str(document),
            "--out",
            str(path.absolute()),
        ]
        subprocess.run(argv, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    return str(path)
