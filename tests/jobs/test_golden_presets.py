"""The script of every cluster preset for one paper configuration, as it was when someone last read it.

After a wanted change: GEMS_RENEW_GOLDEN=1 python -m pytest tests/jobs/test_golden_presets.py, then
read `git diff tests/golden`.
"""

from __future__ import annotations

import os
import shlex
import sys

import pytest

from gems.config.overrides import options_of
from gems.config.schema import RunSpec
from gems.runs.folder import RunFolder
from jobs.batch.launchers import command
from jobs.batch.preset_limits import check_limits
from jobs.batch.resources import job_spec
from jobs.schedulers.scheduler import SCHEDULERS
from tests.helpers.job_helpers import ROOT, MonkeyPatch, Resolved

GOLDEN = ROOT / "tests" / "golden"
RENEW = "GEMS_RENEW_GOLDEN"
PAPER = ["experiment=pathology_1024", "parallel.replicas=4", "cluster.account=project"]
PRESETS = [name for name in options_of("cluster") if name != "local"]


def shown(spec: RunSpec) -> str:
    """Return what `jobs submit --dry-run` shows of a run, with this machine's paths by name."""
    job = job_spec(spec)
    folder = RunFolder.of(spec)
    check_limits(job, spec.machine.host_bytes)
    script = SCHEDULERS[spec.cluster.scheduler].script(job, folder)
    text = (
        f"{script}\n# {job.summary()}\n# the script runs:\n# {shlex.join(command(job, folder))}\n"
    )
    for path, name in (
        (str(folder.path), "RUN_FOLDER"),
        (sys.executable, "PYTHON"),
        (str(ROOT), "CODE"),
    ):
        text = text.replace(path, name)
    return text


@pytest.mark.parametrize("name", PRESETS)
def test_script(name: str, resolved: Resolved, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    overrides = ["cluster.nodes=4"] if name == "mini" else []
    text = shown(resolved(*PAPER, f"cluster={name}", *overrides))
    path = GOLDEN / f"submit_{name}.sh"
    if os.environ.get(RENEW):
        path.write_text(text)
    assert text == path.read_text(), f"if that is wanted: {RENEW}=1, and read the difference"


def test_every_golden_file_is_of_a_preset() -> None:
    assert sorted(path.name for path in GOLDEN.glob("submit_*")) == sorted(
        f"submit_{name}.sh" for name in PRESETS
    )
