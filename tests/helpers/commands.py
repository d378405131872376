"""Commands of `gems` run in the process of a test, with verbs that only note what they were given."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from gems.__main__ import VERBS
from gems.cli import framework as cli
from gems.cli.framework import Options, Verb
from gems.config.schema import RunSpec
from gems.errors import GemsError, RankFailedError, StalledError


class Said(NamedTuple):
    """What a command said."""

    code: int
    out: str
    err: str


Gems = Callable[..., Said]
SEEN: list[tuple[RunSpec | list[str], Options]] = []


def note(spec: RunSpec | list[str], options: Options) -> int | None:
    """The body of the verbs of the tests."""
    SEEN.append((spec, options))
    if isinstance(spec, RunSpec) and spec.name.startswith("fail"):
        raise {"fail4": RankFailedError, "fail5": StalledError, "fail": GemsError}[spec.name](
            "it went wrong"
        )
    if isinstance(spec, RunSpec) and spec.name == "stop":
        raise KeyboardInterrupt
    return 3 if isinstance(spec, RunSpec) and spec.name == "three" else None


NOTE = "tests.helpers.commands:note"
MINE = {
    "note": Verb(
        NOTE,
        "notes the run",
        flags=("level=lowered", "--dry-run"),
        choices={"--pick": ("red", "blue"), "--file": ()},
    ),
    "words": Verb(NOTE, "takes words", takes_words=True, flags=("--all",)),
    "gone": Verb("gems.no_such_module:act", "cannot be loaded"),
}


def runner(
    capfd: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Gems:
    """Return the function that runs a command in this process, in a folder."""
    monkeypatch.chdir(folder)

    def run(*argv: str, verbs: dict[str, Verb] = VERBS) -> Said:
        SEEN.clear()
        before = list(sys.argv), _environment()
        log = logging.getLogger()
        handlers = list(log.handlers)
        level = log.level
        try:
            code = cli.main("gems", verbs, argv)
        finally:
            log.handlers[:], log.level = (
                handlers,
                level,
            )  # Hydra's --info logs to this test's own output
        assert (sys.argv, _environment()) == before, "the process is as it was"
        return Said(code, *capfd.readouterr())

    return run


def check_refusal(said: Said, *contains: str) -> None:
    assert (said.code, said.out) == (2, ""), said
    assert said.err.startswith("gems: ") and said.err.endswith("\n")
    assert len(said.err.splitlines()) == 1, said.err
    for text in contains:
        assert text in said.err


def _environment() -> dict[str, str]:
    """Return the environment, without what torch sets when its compiler is first imported."""
    return {key: value for key, value in os.environ.items() if not key.startswith("TORCHINDUCTOR_")}
