"""gems.cli.framework: every mistake is one line on stderr and code 2, never a traceback.

Also in a process of its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gems.cli.framework import HYDRA_FLAGS
from gems.config.overrides import options_of, valid_keys
from gems.config.schema import RunSpec
from tests.helpers.commands import MINE, SEEN, Gems, Said, check_refusal
from tests.helpers.processes import python
from tests.helpers.warm_python import REAL

ROOT = Path(__file__).resolve().parents[2]


KEYS = sorted(valid_keys())
SCALARS = [key for key in KEYS if "." in key and not key.startswith("cluster.")]
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
NAMES = st.from_regex(r"[a-z_]{1,12}(\.[a-z_]{1,12})?", fullmatch=True)
NO_NUMBER = st.from_regex(r"[g-z]{1,8}", fullmatch=True)
KNOWN_OPTIONS = ("--json", "--config-dir", *HYDRA_FLAGS)
NUMBERS = [
    key
    for key in SCALARS
    if isinstance(getattr(getattr(RunSpec(), key.split(".")[0]), key.split(".")[1]), int | float)
]
HALVES = ["[1", "{a", "'a", "(", "a b)", "${", "???x]"]
NO_SUCH = st.one_of(
    st.tuples(NAMES.filter(lambda name: name not in KEYS), WORDS).map("=".join),
    st.tuples(
        st.sampled_from([key for key in KEYS if options_of(key)]), NO_NUMBER.map("{}x".format)
    ).map("=".join),
    st.sampled_from([f"~{key}" for key in KEYS]),
    st.tuples(st.sampled_from(KEYS), st.sampled_from(HALVES)).map("=".join),
    WORDS.filter(
        lambda word: "=" not in word and not word.startswith(("-", "~")) and word != "level=lowered"
    ),
    WORDS.map("--{}".format).filter(lambda word: word.partition("=")[0] not in KNOWN_OPTIONS),
)
NO_FIT = st.tuples(st.sampled_from(NUMBERS), NO_NUMBER.map("z{}".format) | st.just("null")).map(
    "=".join
)


@given(wrong=NO_SUCH, before=st.booleans())
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_random_mistakes_are_one_line_and_code_2(gems: Gems, wrong: str, before: bool) -> None:
    """Key, options and forms that do not exist: seen before anything is composed."""
    words = [wrong, "seed=1"] if before else ["seed=1", wrong]
    check_refusal(gems("note", *words, verbs=MINE))
    assert not SEEN


@given(wrong=NO_FIT)
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_random_values_of_another_type(gems: Gems, wrong: str) -> None:
    check_refusal(gems("note", wrong, verbs=MINE), wrong)


@pytest.mark.usefixtures("warm")
class TestProcess:
    """The same in a process of its own."""

    def run(self, *argv: str, cwd: Path, executable: str | None = None) -> Said:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        ended = python("-m", "gems", *argv, cwd=cwd, env=environment, executable=executable)
        return Said(ended.returncode, ended.stdout, ended.stderr)

    def test_json_is_alone_on_stdout(self, tmp_path: Path) -> None:
        said = self.run("schedule", "experiment=gems_mast", "--json", cwd=tmp_path)
        assert (said.code, said.err) == (0, "")
        assert len(said.out.splitlines()) == 1
        assert json.loads(said.out)["schema"] == "gems.schedule/1"
        assert not list(tmp_path.iterdir())

    def test_a_mistake(self, tmp_path: Path) -> None:
        check_refusal(
            self.run("schedule", "shcedule=gpipe", cwd=tmp_path, executable=REAL),
            "unknown key; nearest: schedule",
        )

    def test_a_mistake_under_hydra(self, tmp_path: Path) -> None:
        said = self.run("schedule", "-m", "parallel.partitions=0,1", cwd=tmp_path)
        check_refusal(said, "parallel.partitions=0: must be 1 or more")

    def test_help_and_cfg(self, tmp_path: Path) -> None:
        assert self.run("schedule", "--help", cwd=tmp_path).code == 0
        said = self.run("schedule", "--cfg", "job", cwd=tmp_path)
        assert said.code == 0 and "schedule:\n  name: gems_master" in said.out
        assert not list(tmp_path.iterdir())
