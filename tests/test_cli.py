"""gems.cli: verbs, overrides, --json, Hydra's options, exit codes, and one line for every mistake."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gems import cli
from gems.__main__ import VERBS
from gems.cli import Options, Verb
from gems.compose import options_of, valid_keys
from gems.config import RunSpec
from gems.errors import GemsError, RankFailedError, StalledError

ROOT = Path(__file__).resolve().parent.parent


class Said(NamedTuple):
    """What a command said."""

    code: int
    out: str
    err: str


Gems = Callable[..., Said]
SEEN: list[tuple[RunSpec | list[str], Options]] = []


def note(spec: RunSpec | list[str], options: Options) -> int | None:
    """The body of the verbs of these tests."""
    SEEN.append((spec, options))
    if isinstance(spec, RunSpec) and spec.name.startswith("fail"):
        raise {"fail4": RankFailedError, "fail5": StalledError, "fail": GemsError}[spec.name]("it went wrong")
    if isinstance(spec, RunSpec) and spec.name == "stop":
        raise KeyboardInterrupt
    return 3 if isinstance(spec, RunSpec) and spec.name == "three" else None


NOTE = "tests.test_cli:note"
MINE = {
    "note": Verb(NOTE, "notes the run", flags=("level=lowered", "--dry-run")),
    "words": Verb(NOTE, "takes words", takes_words=True, flags=("--all",)),
    "gone": Verb("gems.no_such_module:act", "cannot be loaded"),
}


@pytest.fixture
def gems(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gems:
    """Runs a command of `python -m gems` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str, verbs: dict[str, Verb] = VERBS) -> Said:
        SEEN.clear()
        before = list(sys.argv), dict(os.environ)
        log = logging.getLogger()
        handlers, level = list(log.handlers), log.level
        try:
            code = cli.main("gems", verbs, argv)
        finally:
            log.handlers[:], log.level = handlers, level  # Hydra's --info logs to this test's own output
        assert (sys.argv, dict(os.environ)) == before, "the process is as it was"
        return Said(code, *capfd.readouterr())

    return run


def check_refusal(said: Said, *contains: str) -> None:
    assert (said.code, said.out) == (2, ""), said
    assert said.err.startswith("gems: ") and said.err.endswith("\n")
    assert len(said.err.splitlines()) == 1, said.err
    for text in contains:
        assert text in said.err


class TestVerbs:
    def test_a_verb_gets_the_resolved_run_and_the_options(self, gems: Gems) -> None:
        assert gems("note", "seed=3", "--json", "level=lowered", "experiment=1f1b", verbs=MINE) == (0, "", "")
        ((spec, options),) = SEEN
        assert isinstance(spec, RunSpec)
        assert (spec.seed, spec.name, spec.parallel.parts) == (3, "1f1b", 1)
        assert options == Options(json=True, flags=frozenset({"level=lowered"}))

    def test_a_verb_of_words_gets_them_as_they_are(self, gems: Gems) -> None:
        assert gems("words", "a", "b=c", "--all", verbs=MINE).code == 0
        (seen,) = SEEN
        assert seen == (["a", "b=c"], Options(flags=frozenset({"--all"})))

    @pytest.mark.parametrize(
        ("name", "code", "err"),
        [
            ("three", 3, ""),
            ("fine", 0, ""),
            ("fail", 1, "gems: it went wrong\n"),
            ("fail4", 4, "gems: it went wrong\n"),
            ("fail5", 5, "gems: it went wrong\n"),
            ("stop", 130, ""),
        ],
    )
    @pytest.mark.parametrize("through_hydra", [[], ["--multirun"]])
    def test_exit_codes(self, gems: Gems, name: str, code: int, err: str, through_hydra: list[str]) -> None:
        assert gems("note", f"name={name}", *through_hydra, verbs=MINE) == (code, "", err)

    def test_usage(self, gems: Gems) -> None:
        asked, bare = gems("--help"), gems()
        assert asked.out == bare.out and (asked.code, bare.code) == (0, 2)
        assert gems("-h") == asked
        for name, verb in VERBS.items():
            assert name in asked.out and verb.help in asked.out

    def test_help_of_a_verb_of_words(self, gems: Gems) -> None:
        said = gems("words", "--help", verbs=MINE)
        assert (said.code, said.out, SEEN) == (0, "python -m gems words: takes words\n", [])

    def test_unknown_verb(self, gems: Gems) -> None:
        check_refusal(gems("schedul"), "command=schedul: allowed: schedule, verify; nearest: schedule")

    def test_a_verb_is_loaded_only_when_it_is_run(self, gems: Gems) -> None:
        assert gems("words", "a", verbs=MINE).code == 0
        with pytest.raises(ModuleNotFoundError):
            gems("gone", verbs=MINE)

    @pytest.mark.parametrize(
        "option", ["--jsn", "-x", "--dry-run=1", "--all", "--json=1", "--config-name=a", "-"]
    )
    def test_unknown_options(self, gems: Gems, option: str) -> None:
        check_refusal(gems("note", option, verbs=MINE), f"option={option}: unknown; nearest: ")
        check_refusal(
            gems("note", option, "--cfg", "job", verbs=MINE), f"option={option}: unknown; nearest: "
        )

    @pytest.mark.parametrize("option", ["--al", "--cfg", "-m", "--json=1"])
    def test_unknown_options_of_a_verb_of_words(self, gems: Gems, option: str) -> None:
        check_refusal(gems("words", option, verbs=MINE), f"option={option}: unknown; nearest: ")


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "contains"),
        [
            (["parallel.partition=2"], "parallel.partition=2: unknown key; nearest: "),
            (["schedule=gpip"], "nearest: gpipe"),
            (["parallel.partitions=x"], "could not be converted to Integer"),
            (["seed"], "not of the form key=value"),
            (["~model"], "cannot be taken away"),
            (["name=???"], "must be given"),
            (["data=folder"], "data.path="),
            (["parallel.partitions=0"], "must be 1 or more"),
            (["schedule=gems_mast", "parallel.micro_batches=3"], "must be even"),
        ],
    )
    @pytest.mark.parametrize("through_hydra", [[], ["-m"]])
    def test_one_line(self, gems: Gems, words: list[str], contains: str, through_hydra: list[str]) -> None:
        check_refusal(gems("schedule", *words, *through_hydra), contains)


class TestHydra:
    @pytest.mark.parametrize("words", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
    def test_cfg_prints_the_composed_configuration(self, gems: Gems, words: list[str]) -> None:
        said = gems("note", "seed=41", *words, "experiment=gpipe", "--resolve", verbs=MINE)
        assert (said.code, said.err, SEEN) == (0, "", [])
        assert "\nseed: 41\n" in said.out and "name: gpipe\n" in said.out
        assert not list(Path.cwd().iterdir()), "asking leaves nothing behind"

    def test_a_part_of_the_configuration(self, gems: Gems) -> None:
        said = gems("note", "--cfg", "job", "--package", "train", "train.steps=77", verbs=MINE)
        assert said.code == 0 and "steps: 77" in said.out and "seed" not in said.out

    @pytest.mark.parametrize("option", ["--help", "-h"])
    def test_help_lists_groups_and_keys(self, gems: Gems, option: str) -> None:
        said = gems("note", option, verbs=MINE)
        assert (said.code, said.err, SEEN) == (0, "", [])
        assert "schedule: 1f1b, gems_mast, gems_master" in said.out and "learning_rate: 0.05" in said.out

    @pytest.mark.parametrize(
        "words", [["--info"], ["--info", "searchpath"], ["-i", "seed=1"], ["--hydra-help"], ["--version"]]
    )
    def test_other_questions(self, gems: Gems, words: list[str]) -> None:
        said = gems("note", *words, verbs=MINE)
        assert (said.code, said.err, SEEN) == (0, "", []) and said.out

    def test_multirun_runs_each(self, gems: Gems) -> None:
        assert gems("note", "-m", "seed=5,6", "schedule=gpipe,1f1b", verbs=MINE).code == 0
        runs = [(spec.seed, spec.schedule.name) for spec, _ in SEEN if isinstance(spec, RunSpec)]
        assert runs == [(5, "gpipe"), (5, "1f1b"), (6, "gpipe"), (6, "1f1b")]
        assert not list(Path.cwd().glob("**/*.log")), "Hydra writes no log of its own"

    def test_multirun_with_json_is_an_object_a_line(self, gems: Gems) -> None:
        said = gems("schedule", "--json", "--multirun", "parallel.partitions=1,2", "parallel.micro_batches=2")
        assert said.code == 0 and said.err == ""
        assert [json.loads(line)["ranks"] for line in said.out.splitlines()] == [1, 2]

    def test_multirun_over_a_pattern_of_options(self, gems: Gems) -> None:
        assert gems("note", "-m", "schedule=glob(gems*)", verbs=MINE).code == 0
        assert [spec.schedule.name for spec, _ in SEEN if isinstance(spec, RunSpec)] == [
            "gems_mast",
            "gems_master",
        ]

    def test_the_first_failure_ends_a_sweep(self, gems: Gems) -> None:
        said = gems("note", "-m", "name=fine,fail4,never", verbs=MINE)
        assert said == (4, "", "gems: it went wrong\n")
        assert [spec.name for spec, _ in SEEN if isinstance(spec, RunSpec)] == ["fine", "fail4"]

    def test_the_worst_code_of_a_sweep(self, gems: Gems) -> None:
        assert gems("note", "-m", "name=fine,three,good", verbs=MINE).code == 3
        assert len(SEEN) == 3

    @pytest.mark.parametrize(
        ("words", "contains"),
        [
            (["--cfg"], "--cfg=: allowed: job, hydra, all"),
            (["--cfg", "jobs"], "--cfg=jobs: allowed: job, hydra, all"),
            (["--cfg", "seed=1"], "--cfg=seed=1: allowed"),
            (["-c", "--resolve"], "-c=--resolve: allowed"),
            (["--info=everything"], "--info=everything: allowed: all, config"),
            (["--cfg", "job", "-p"], "-p=: must name a part"),
            (["--multirun=2"], "--multirun=2: takes no value"),
            (["--cfg", "job", "seed=x"], "seed=x: "),
            (["--cfg", "job", "foo=1"], "foo=1: unknown key"),
            (["-m", "seed=1,x"], "could not be converted to Integer"),
            (["-m", "schedule=gpipe,gpip"], "schedule=gpip: allowed"),
            (["-m", "seed=1,-2"], "seed=-2: must be 0 or more"),
            (["-m", "runs_dir=/dev/null/runs"], "cannot be read or written (Not a directory)"),
        ],
    )
    def test_mistakes(self, gems: Gems, words: list[str], contains: str) -> None:
        check_refusal(gems("note", *words, verbs=MINE), contains)


class TestConfigDir:
    @pytest.fixture
    def my_conf(self, tmp_path: Path) -> Path:
        folder = tmp_path / "it's mine"
        (folder / "experiment").mkdir(parents=True)
        text = "# @package _global_\ndefaults:\n  - override /schedule: gpipe\nname: mine\n"
        (folder / "experiment" / "mine.yaml").write_text(text)
        return folder

    @pytest.mark.parametrize("form", [["--config-dir", "{}"], ["--config-dir={}"], ["-cd", "{}"]])
    def test_an_experiment_of_ones_own(self, gems: Gems, my_conf: Path, form: list[str]) -> None:
        for path in (str(my_conf), my_conf.name):
            words = [word.format(path) for word in form]
            assert gems("note", *words, "experiment=mine", verbs=MINE) == (0, "", "")
            assert [(spec.name, spec.schedule.name) for spec, _ in SEEN if isinstance(spec, RunSpec)] == [
                ("mine", "gpipe")
            ]

    def test_together_with_hydras_own_options(self, gems: Gems, my_conf: Path) -> None:
        said = gems("note", "--config-dir", str(my_conf), "experiment=mine", "--cfg", "job", verbs=MINE)
        assert said.code == 0 and said.out.startswith("name: mine\n")
        assert gems("note", "--config-dir", str(my_conf), "experiment=mine,gpipe", "-m", verbs=MINE).code == 0
        assert [spec.name for spec, _ in SEEN if isinstance(spec, RunSpec)] == ["mine", "gpipe"]

    @pytest.mark.parametrize(
        "words", [["--config-dir", "nowhere"], ["--config-dir=/dev/null"], ["--config-dir"]]
    )
    def test_no_folder(self, gems: Gems, words: list[str]) -> None:
        check_refusal(gems("note", *words, verbs=MINE), "--config-dir=", ": is not a folder")

    def test_unknown_experiment_beside_ones_own(self, gems: Gems, my_conf: Path) -> None:
        check_refusal(
            gems("note", "--config-dir", str(my_conf), "experiment=min", verbs=MINE), "nearest: mine"
        )


KEYS = sorted(valid_keys())
SCALARS = [key for key in KEYS if "." in key and not key.startswith("cluster.")]
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
NAMES = st.from_regex(r"[a-z_]{1,12}(\.[a-z_]{1,12})?", fullmatch=True)
NO_NUMBER = st.from_regex(r"[g-z]{1,8}", fullmatch=True)
NUMBERS = [
    key
    for key in SCALARS
    if isinstance(getattr(getattr(RunSpec(), key.split(".")[0]), key.split(".")[1]), int | float)
]
WRONG = st.one_of(
    st.tuples(NAMES.filter(lambda name: name not in KEYS), WORDS).map("=".join),
    st.tuples(st.sampled_from([key for key in KEYS if options_of(key)]), NO_NUMBER.map("{}x".format)).map("=".join),
    st.tuples(st.sampled_from(NUMBERS), NO_NUMBER.map("z{}".format)).map("=".join),
    st.sampled_from([f"~{key}" for key in KEYS]),
    st.sampled_from(NUMBERS).map("{}=null".format),
    st.tuples(st.sampled_from(KEYS), st.sampled_from(["[1", "{a", "'a", "(", "a b)", "${", "???x]"])).map("=".join),
    WORDS.filter(lambda word: "=" not in word and not word.startswith(("-", "~")) and word != "level=lowered"),
    WORDS.map("--{}".format).filter(lambda word: word.partition("=")[0] not in ("--json", *cli.HYDRA_FLAGS, "--config-dir")),
)  # fmt: skip


@given(wrong=WRONG, before=st.booleans())
@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip
def test_random_mistakes_are_one_line_and_code_2(gems: Gems, wrong: str, before: bool) -> None:
    words = [wrong, "seed=1"] if before else ["seed=1", wrong]
    check_refusal(gems("note", *words, verbs=MINE))
    assert not SEEN


class TestProcess:
    """The same in a process of its own."""

    def run(self, *argv: str, cwd: Path) -> Said:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [sys.executable, "-m", "gems", *argv],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Said(ended.returncode, ended.stdout, ended.stderr)

    def test_json_is_alone_on_stdout(self, tmp_path: Path) -> None:
        said = self.run("schedule", "experiment=gems_mast", "--json", cwd=tmp_path)
        assert (said.code, said.err) == (0, "")
        assert len(said.out.splitlines()) == 1
        assert json.loads(said.out)["schema"] == "gems.schedule/1"
        assert not list(tmp_path.iterdir())

    def test_a_mistake(self, tmp_path: Path) -> None:
        check_refusal(self.run("schedule", "shcedule=gpipe", cwd=tmp_path), "unknown key; nearest: schedule")

    def test_a_mistake_under_hydra(self, tmp_path: Path) -> None:
        said = self.run("schedule", "-m", "parallel.partitions=0,1", cwd=tmp_path)
        check_refusal(said, "parallel.partitions=0: must be 1 or more")

    def test_help_and_cfg(self, tmp_path: Path) -> None:
        assert self.run("schedule", "--help", cwd=tmp_path).code == 0
        said = self.run("schedule", "--cfg", "job", cwd=tmp_path)
        assert said.code == 0 and "schedule:\n  name: gems_master" in said.out
        assert not list(tmp_path.iterdir())
