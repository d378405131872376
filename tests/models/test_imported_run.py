"""A user's own U-Net, in a folder of theirs, through the real command line.

Cut in three and equal to the whole.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.processes import python

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).parents[2]
WORDS = (
    "model.target=my_nets.unet.OwnUNet",
    "model.kwargs={width:4}",
    "data=synthetic",
    "data.height_px=18",
    "data.width_px=14",
    "parallel.partitions=3",
    "parallel.micro_batches=4",
    "parallel.micro_batch_size=2",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests, so that the network is read once."""
    made = tmp_path_factory.mktemp("theirs")
    (made / "my_nets").mkdir()
    shutil.copy(ROOT / "tests/helpers/own_unet.py", made / "my_nets" / "unet.py")
    return made


def gems(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "gems", *words, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_trains_as_one_process_would(folder: Path) -> None:
    """With a backward that is split; with a whole one in tests/mpi/test_tasks.py."""
    done = gems(folder, "verify", *WORDS, "schedule=zb_h1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["partitions"], found["schedule"]) == ("OwnUNet", 3, "zb_h1")
    assert found["max_rel_error"] <= 1e-12
    assert found["peak_activation_bytes"] == found["predicted_activation_bytes"]
    # the decoder's last part holds a parameter of the network itself, which no layer of torch's
    # does
    assert set(found["unsplit_layers"]) <= {"up.1"}


def test_more_stages_than_layers_is_one_line(folder: Path) -> None:
    done = gems(folder, "verify", *WORDS, "schedule=1f1b", "parallel.partitions=7")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "the layers of OwnUNet" in done.stderr


def test_a_mistake_of_theirs_is_one_line(folder: Path) -> None:
    text = (folder / "my_nets" / "unet.py").read_text()
    (folder / "mistaken.py").write_text(
        text.replace("skips.append(x)", "skips.append(x if x.sum() > 0 else -x)")
    )
    done = gems(folder, "schedule", "model.target=mistaken.OwnUNet", *WORDS[1:])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert (
        "mistaken.py:" in done.stderr and "`skips.append(x if x.sum() > 0 else -x)`" in done.stderr
    )
