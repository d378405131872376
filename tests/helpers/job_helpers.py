"""What the tests of jobs share beside fixtures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gems.config.schema import RunSpec
from gems.errors import ConfigError, GemsError
from gems.runs.folder import RunFolder
from gems.runs.owner import Owner, read_owner
from jobs.batch.resources import job_spec
from jobs.schedulers.scheduler import scheduler_for
from jobs.status.run_status import RunStatus, run_statuses

Capture = pytest.CaptureFixture[str]
MonkeyPatch = pytest.MonkeyPatch
# What the fixtures of these tests return.
Resolved = Callable[..., RunSpec]
Prepared = Callable[..., RunFolder]
Tiny = Callable[..., tuple[RunFolder, RunSpec]]
Called = Callable[..., tuple[str, str]]
ROOT = Path(__file__).resolve().parents[2]


def with_cluster(spec: Any, **more: Any) -> Any:
    """Return a run, or its job, with other values of its cluster."""
    return replace(spec, cluster=replace(spec.cluster, **more))


def script_of(spec: RunSpec, **job: Any) -> str:
    """Return the batch script of a run."""
    return scheduler_for(spec.cluster).script(replace(job_spec(spec), **job), RunFolder.of(spec))


def refused(match: str, error: type[GemsError] = ConfigError) -> Any:
    """Expect an error whose line matches."""
    return pytest.raises(error, match=match)


def status_of(folder: RunFolder) -> RunStatus:
    """Return the status of one run."""
    (run,) = run_statuses([folder]).runs
    return run


def owner_of(folder: RunFolder) -> Owner:
    """Return the owner of a folder that has one."""
    owner = read_owner(folder)
    assert owner is not None
    return owner


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Wait for a condition; fails the test when it does not come true."""
    pause = threading.Event()
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        pause.wait(0.02)
