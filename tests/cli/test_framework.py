"""gems.cli.framework: verbs, overrides, --json, Hydra's options and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gems.__main__ import VERBS
from gems.cli.framework import Options
from gems.config.compose import COMMON
from gems.config.fields import keys
from gems.config.schema import RunSpec
from tests.helpers.commands import MINE, SEEN, Gems, check_refusal


class TestVerbs:
    def test_a_verb_gets_the_resolved_run_and_the_options(self, gems: Gems) -> None:
        assert gems("note", "seed=3", "--json", "level=lowered", "experiment=1f1b", verbs=MINE) == (
            0,
            "",
            "",
        )
        ((spec, options),) = SEEN
        assert isinstance(spec, RunSpec)
        assert (spec.seed, spec.name, spec.parallel.parts) == (3, "1f1b", 1)
        assert options == Options(json=True, flags=frozenset({"level=lowered"}))

    @pytest.mark.parametrize("words", [["--pick", "red"], ["--pick=red"]])
    def test_an_option_with_a_value(self, gems: Gems, words: list[str]) -> None:
        assert gems("note", "seed=3", *words, "--file", "a.png", verbs=MINE) == (0, "", "")
        ((spec, options),) = SEEN
        assert spec.seed == 3
        assert options.chosen == {"--pick": "red", "--file": "a.png"}

    @pytest.mark.parametrize(
        ("words", "refused"),
        [
            (["--pick", "green"], "--pick=green: allowed: red, blue"),
            (["--pick"], "--pick=none: allowed: red, blue"),
            (["--pick="], "--pick=none: allowed: red, blue"),
            (["--file", "--json"], "--file=--json: must have a value"),
        ],
    )
    def test_an_option_with_a_wrong_value(self, gems: Gems, words: list[str], refused: str) -> None:
        check_refusal(gems("note", *words, verbs=MINE), refused)

    def test_a_verb_of_words_gets_them_as_they_are(self, gems: Gems) -> None:
        assert gems("words", "a", "b=c", "--all", verbs=MINE).code == 0
        (seen,) = SEEN
        assert seen == (["a", "b=c"], Options(flags=frozenset({"--all"})))

    @pytest.mark.parametrize(
        ("name", "code", "err", "through_hydra"),
        [
            ("three", 3, "", []),
            ("fine", 0, "", []),
            ("fail", 1, "gems: it went wrong\n", []),
            ("fail4", 4, "gems: it went wrong\n", []),
            ("fail5", 5, "gems: it went wrong\n", []),
            ("stop", 130, "", []),
            ("three", 3, "", ["--multirun"]),
            ("fail5", 5, "gems: it went wrong\n", ["--multirun"]),
            ("stop", 130, "", ["--multirun"]),
        ],
    )
    def test_exit_codes(
        self, gems: Gems, name: str, code: int, err: str, through_hydra: list[str]
    ) -> None:
        label = f"== name={name} ==\n" if through_hydra else ""
        assert gems("note", f"name={name}", *through_hydra, verbs=MINE) == (code, label, err)

    def test_usage(self, gems: Gems) -> None:
        asked = gems("--help")
        bare = gems()
        assert asked.out == bare.out and (asked.code, bare.code) == (0, 2)
        assert gems("-h") == asked
        for name, verb in VERBS.items():
            assert name in asked.out and verb.help in " ".join(asked.out.split())

    def test_help_of_a_verb_of_words(self, gems: Gems) -> None:
        said = gems("words", "--help", verbs=MINE)
        usage = "usage: gems words [key=value ...] [--json] [--all]\n\n"
        assert (said.code, said.out, SEEN) == (0, f"{usage}takes words\n", [])

    def test_unknown_verb(self, gems: Gems) -> None:
        allowed = (
            "schedule, simulate, profile, partition, memory, place, plan, evaluate, predict,"
            " export, verify"
        )
        check_refusal(gems("schedul"), f"command=schedul: allowed: {allowed}; nearest: schedule")

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
        assert re.search("schedule: 1f1b, .*gems_mast, gems_master", said.out)
        assert "\noptimizer.lr=0.05\n    learning rate [above 0]\n" in said.out
        everything = gems("note", option, "--all", verbs=MINE)
        for key in keys(RunSpec):
            assert (f"\n{key.name}=" in said.out) == (key.name in COMMON)
            assert f"\n{key.name}=" in everything.out

    @pytest.mark.parametrize("verb", VERBS)
    def test_every_option_is_explained(self, verb: str) -> None:
        options = {option.split()[0] for option in VERBS[verb].notes}
        assert {*VERBS[verb].flags, *VERBS[verb].choices} == options

    @pytest.mark.parametrize("verb", VERBS)
    def test_help_fits_80_columns(self, gems: Gems, verb: str) -> None:
        for words in ([], ["--all"]):
            lines = gems(verb, "--help", *words).out.splitlines()
            assert max(map(len, lines)) <= 80, verb

    def test_help_shows_the_verbs_options_and_the_values_of_overrides(self, gems: Gems) -> None:
        said = gems("note", "--help", "model=resnet101", "train.steps=7", verbs=MINE)
        usage = "[--json] [level=lowered] [--dry-run] [--pick red|blue] [--file VALUE]"
        assert usage in " ".join(said.out.split())
        assert "\nmodel.depth=101\n" in said.out and "\ntrain.steps=7\n" in said.out
        check_refusal(
            gems("note", "--help", "train.step=7", verbs=MINE), "train.step=7: unknown key"
        )

    @pytest.mark.parametrize(
        "words",
        [["--info"], ["--info", "searchpath"], ["-i", "seed=1"], ["--hydra-help"], ["--version"]],
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
        said = gems(
            "schedule",
            "--json",
            "--multirun",
            "parallel.partitions=1,2",
            "parallel.micro_batches=2",
        )
        assert said.code == 0 and said.err == ""
        assert [json.loads(line)["ranks"] for line in said.out.splitlines()] == [1, 2]

    def test_multirun_over_a_pattern_of_options(self, gems: Gems) -> None:
        assert gems("note", "-m", "schedule=glob(gems*)", verbs=MINE).code == 0
        assert [spec.schedule.name for spec, _ in SEEN if isinstance(spec, RunSpec)] == [
            "gems_mast",
            "gems_master",
            "gems_zb",
        ]

    def test_the_first_failure_ends_a_sweep(self, gems: Gems) -> None:
        said = gems("note", "-m", "name=fine,fail4,never", verbs=MINE)
        assert said == (4, "== name=fine ==\n== name=fail4 ==\n", "gems: it went wrong\n")
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
            (["-m", "seed=1,x"], "must be a whole number"),
            (["-m", "schedule=gpipe,gpip"], "schedule=gpip: allowed"),
            (["-m", "seed=-2,1"], "seed=-2: must be 0 or more"),
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
            assert [
                (spec.name, spec.schedule.name) for spec, _ in SEEN if isinstance(spec, RunSpec)
            ] == [("mine", "gpipe")]

    def test_together_with_hydras_own_options(self, gems: Gems, my_conf: Path) -> None:
        said = gems(
            "note", "--config-dir", str(my_conf), "experiment=mine", "--cfg", "job", verbs=MINE
        )
        assert said.code == 0 and said.out.startswith("name: mine\n")
        assert (
            gems(
                "note", "--config-dir", str(my_conf), "experiment=mine,gpipe", "-m", verbs=MINE
            ).code
            == 0
        )
        assert [spec.name for spec, _ in SEEN if isinstance(spec, RunSpec)] == ["mine", "gpipe"]

    @pytest.mark.parametrize(
        "words", [["--config-dir", "nowhere"], ["--config-dir=/dev/null"], ["--config-dir"]]
    )
    def test_no_folder(self, gems: Gems, words: list[str]) -> None:
        check_refusal(gems("note", *words, verbs=MINE), "--config-dir=", ": is not a folder")

    def test_unknown_experiment_beside_ones_own(self, gems: Gems, my_conf: Path) -> None:
        check_refusal(
            gems("note", "--config-dir", str(my_conf), "experiment=min", verbs=MINE),
            "nearest: mine",
        )
