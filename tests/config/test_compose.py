"""gems.config.compose: from conf/ and overrides to a resolved run, and one line for what cannot be composed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf.errors import InterpolationResolutionError

from gems.config.compose import compose, composed
from gems.config.overrides import CONF, options_of, translate, valid_keys
from gems.config.resolve import resolve
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.models import MODELS
from gems.schedule import FAMILIES

# A user's own folder of configuration: an experiment and a cluster.
MINE = {
    "experiment/mine.yaml": (
        """
        # @package _global_
        defaults:
          - override /schedule: gpipe
          - override /cluster: site
        name: mine
        parallel: {partitions: 2, micro_batches: 4}
    """
    ),
    "cluster/site.yaml": (
        """
        name: site
        launcher: srun
        account: p123
    """
    ),
}


@pytest.fixture
def my_conf(tmp_path: Path) -> Path:
    folder = tmp_path / "it's my [conf]"
    for name, text in MINE.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        lines = text.splitlines()[1:]
        path.write_text("\n".join(line[8:] for line in lines))
    return folder


def search_path(folder: Path) -> str:
    quoted = str(folder).replace("'", r"\'")
    return f"hydra.searchpath=['file://{quoted}']"


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(overrides)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def files_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


class TestConf:
    def test_the_defaults_of_conf_run(self) -> None:
        spec = compose([])
        assert (
            spec.name == "run"
            and spec.data.name == "tissue"
            and spec.schedule.name == "gems_master"
        )
        assert spec == resolve(spec), "it is resolved"

    @pytest.mark.parametrize("name", options_of("experiment"))
    def test_every_experiment_composes_under_its_name(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "pretrained.safetensors").touch()  # which make run CONF=finetune makes
        monkeypatch.chdir(tmp_path)
        assert compose([f"experiment={name}"]).name == name

    @pytest.mark.parametrize("name", FAMILIES)
    def test_every_schedule_has_an_option(self, name: str) -> None:
        assert compose([f"schedule={name}", "schedule.activation_cap=1"]).schedule.name == name

    @pytest.mark.parametrize("option", files_of("model"))
    def test_every_model_composes_with_data_that_it_takes(self, option: str) -> None:
        family = MODELS[yaml.safe_load((CONF / "model" / f"{option}.yaml").read_text())["name"]]
        sized = ["data=synthetic", "data.height_px=128", "data.width_px=128"]
        data = sized if family.takes == "images" else [f"data={family.takes}"]
        assert compose([f"model={option}", "parallel.partitions=2", *data]).model.name

    @pytest.mark.parametrize("group", ["machine", "cluster", "cost", "parallel"])
    def test_every_option_composes(self, group: str) -> None:
        for option in options_of(group):
            assert compose([f"{group}={option}", "parallel.partitions=2", "data=synthetic"])

    @pytest.mark.parametrize("group", ["schedule", "data", "cluster", "machine", "cost"])
    def test_an_options_name_is_its_files(self, group: str) -> None:
        for option in files_of(group):
            assert yaml.safe_load((CONF / group / f"{option}.yaml").read_text())["name"] == option

    def test_models_are_of_known_families(self) -> None:
        for option in files_of("model"):
            assert yaml.safe_load((CONF / "model" / f"{option}.yaml").read_text())["name"] in MODELS

    def test_conf_of_the_tests_equals_the_schemas_defaults_where_it_is_silent(self) -> None:
        spec = compose(["data=synthetic"])
        assert spec.train == RunSpec().train and spec.cost == RunSpec().cost


class TestOverrides:
    def test_values_and_options(self) -> None:
        spec = compose(
            [
                "schedule=1f1b",
                "parallel.partitions=2",
                "parallel.micro_batches=4",
                "seed=3",
                "optimizer.lr=1e-3",
            ]
        )
        assert spec.schedule.name == "1f1b"
        assert (spec.parallel.partitions, spec.parallel.micro_batches) == (2, 4)
        assert (spec.partition.name, spec.parallel.boundaries) == ("exact", None)
        assert (spec.seed, spec.optimizer.lr) == (3, 0.001)

    def test_an_override_goes_over_the_experiment(self) -> None:
        assert compose(["experiment=1f1b", "train.steps=7"]).train.steps == 7
        assert compose(["train.steps=7", "experiment=1f1b"]).train.steps == 7

    @pytest.mark.parametrize(
        ("size", "num_bytes"),
        [
            ("16GB", 16 * 10**9),
            ("1.5GiB", 3 << 29),
            ("64MiB", 64 << 20),
            ("2kB", 2000),
            ("3KiB", 3072),
            ("1TB", 10**12),
            ("123", 123),
        ],
    )
    def test_a_size_may_carry_its_unit(self, size: str, num_bytes: int) -> None:
        cost = compose([f"cost.activation_bytes={size}"]).cost
        assert cost.activation_bytes == num_bytes

    def test_a_rate_may_carry_its_unit(self) -> None:
        assert compose(["machine.link_bytes_per_s=12.5GB/s"]).machine.link_bytes_per_s == 12.5e9

    def test_a_unit_where_no_bytes_are_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"data\.height_px=16GB"):
            compose(["data.height_px=16GB"])

    def test_lists_mappings_and_null(self) -> None:
        spec = compose(
            [
                'cluster.setup=[module load mpi,"export A=1"]',
                "+cluster.environment.OMP_NUM_THREADS=2",
                "++cluster.sbatch.mem=10G",
                "model={depth: 56}",
                "data.path=null",
            ]
        )
        assert spec.cluster.setup == ["module load mpi", "export A=1"]
        assert spec.cluster.environment == {"OMP_NUM_THREADS": "2"}
        assert spec.cluster.sbatch == {"mem": "10G"}
        assert (spec.model.depth, spec.data.path) == (56, None)

    def test_values_of_a_mask_may_be_numbers(self) -> None:
        assert composed(["data=masks", "data.class_map={0: 0, 255: 1}"]).data.class_map == {
            "0": 0,
            "255": 1,
        }

    def test_interpolation(self) -> None:
        assert compose(["name=seed_${seed}", "seed=4"]).name == "seed_4"

    def test_a_run_leaves_nothing_to_the_next(self) -> None:
        plain = compose([])
        compose(
            [
                "+cluster.sbatch.qos=long",
                "parallel.partitions=2",
                "metrics.auc.target=my.auc",
                "seed=3",
            ]
        )
        assert compose([]) == plain

    def test_composing_twice_gives_the_same(self) -> None:
        overrides = ["experiment=gems_mast", "seed=2"]
        assert compose(overrides) == compose(overrides)

    def test_every_key_of_the_schema_may_be_named(self) -> None:
        keys = set(valid_keys())
        assert {
            "model",
            "schedule",
            "experiment",
            "seed",
            "parallel.partitions",
            "cluster.sbatch",
        } <= keys
        assert "model.__init__" not in keys and "hydra" not in keys


class TestRefused:
    @pytest.mark.parametrize(
        ("override", "start", "contains"),
        [
            ("schedul=gpipe", "schedul=gpipe: unknown key; nearest: ", "schedule"),
            (
                "parallel.partition=2",
                "parallel.partition=2: unknown key; nearest: ",
                "parallel.partitions",
            ),
            ("+parallel.foo=1", "parallel.foo=1: unknown key; nearest: ", "parallel"),
            ("++foo.bar=1", "foo.bar=1: unknown key; nearest: ", ""),
            ("model={dept: 56}", "model.dept=", "unknown key"),
            ("schedule=gpip", "schedule=gpip: allowed: 1f1b, ", "nearest: gpipe"),
            ("schedule=[gpipe,1f1bb]", "schedule=1f1bb: allowed: ", "nearest: 1f1b"),
            ("experiment=quikstart", "experiment=quikstart: allowed: ", "nearest: quickstart"),
            ("experiment=null", "experiment=null: allowed: ", "quickstart"),
            ("parallel=3", "parallel=3: allowed: default", ""),
            ("model=true", "model=True: allowed: ", "resnet20_v1"),
            ("schedule=", "schedule=: allowed: ", "gpipe"),
            ("parallel.partitions=two", "parallel.partitions=two: must be a whole number", ""),
            ("parallel.partitions=1.5", "parallel.partitions=1.5: must be a whole number", ""),
            ("parallel.partitions=true", "parallel.partitions=True: must be a whole number", ""),
            ("parallel.boundaries=[0,a]", "parallel.boundaries[1]=a: must be a whole number", ""),
            (f"optimizer.lr={'1' * 400}", "optimizer.lr=111", "too large"),
            ("cluster.limits=[5]", "cluster.limits[0]=5: must be a mapping", ""),
            ("seed=null", "seed=null: ", "must be a whole number"),
            ("train.evaluate=maybe", "train.evaluate=maybe: must be true or false", ""),
            ("optimizer.lr=fast", "optimizer.lr=fast: must be a number", ""),
            ("name=[1,2]", "name=[1,2]: ", "must be text"),
            ("name=???", "name=???: must be given", "add name=..."),
            ("name=${nope}", "name=${nope}: ", "Interpolation key 'nope' not found"),
            ("seed=${seed}", "seed=${seed}: ", "Recursive interpolation"),
            ("~model", "~model=: a key cannot be taken away", "model=..."),
            ("~train.steps", "~train.steps=: a key cannot be taken away", "train.steps=..."),
            ("seed", "override=seed: not of the form key=value", "quote"),
            ("model.depth=[1", "override=model.depth=[1: not of the form key=value", ""),
            ("name=a=b c)", "override=name=a=b c): not of the form", ""),
            ("=1", "=1: unknown key", ""),
            ("seed=1,2", "seed=1,2: Ambiguous value", ""),
            ("seed=range(1,3)", "seed=range(1,3): Sweep parameters", "--multirun"),
            (
                "cluster.environment.A=1",
                "cluster.environment.A=1: is not there yet",
                "+cluster.environment.A=",
            ),
            ("data=folder", "data.path=", "directory"),
            ("hydra.nope=1", "hydra.nope=1: unknown key", ""),
            ("hydra/launcher=nope", "", "hydra/launcher/nope"),
            ("hydra/launcher=null", "", "must be a string or a list"),
            ("hydra.searchpath=3", "", "must be a list of strings"),
            ("hydra.searchpath=[file:///no/such]", "--config-dir=/no/such: is not a folder", ""),
            ("model@x=resnet20_v1", "", "model@x"),
        ],
    )
    def test_one_line(self, override: str, start: str, contains: str) -> None:
        line = refusal(override)
        assert line.startswith(start), line
        assert contains in line

    def test_a_good_override_beside_a_bad_one_is_not_blamed(self) -> None:
        assert refusal("seed=3", "parallel.partitions=two", "name=x").startswith(
            "parallel.partitions=two"
        )
        assert refusal("seed=3", "model.depth=[1", "name=x").startswith("override=model.depth=[1")

    def test_a_circle_whose_key_omegaconf_does_not_name(self) -> None:
        error = InterpolationResolutionError("Recursive interpolation detected")
        assert str(translate(error, ["name=x", "+seed=${seed}"])).startswith(
            "seed=${seed}: Recursive"
        )

    def test_what_resolve_refuses(self) -> None:
        assert (
            refusal("parallel.partitions=0")
            == "parallel.partitions=0: must be 1 or more; ranks of one pipeline"
        )

    def test_after_a_refusal_all_is_well(self) -> None:
        refusal("schedule=gpip")
        refusal("parallel.partitions=two")
        assert compose(["seed=1"]).seed == 1


class TestMyConf:
    def test_an_experiment_and_a_cluster_of_ones_own(self, my_conf: Path) -> None:
        spec = compose([search_path(my_conf), "experiment=mine"])
        assert (spec.name, spec.schedule.name, spec.parallel.micro_batches) == ("mine", "gpipe", 4)
        assert (spec.cluster.name, spec.cluster.account) == ("site", "p123")

    def test_they_stand_among_the_options(self, my_conf: Path) -> None:
        line = refusal(search_path(my_conf), "experiment=min")
        assert "mine" in line.partition("allowed: ")[2] and "quickstart" in line
        assert "nearest: mine" in line
        assert options_of("experiment", [CONF, my_conf]) == sorted(
            [*options_of("experiment"), "mine"]
        )

    def test_without_the_folder_they_are_unknown(self) -> None:
        assert refusal("experiment=mine").startswith("experiment=mine: allowed: ")

    def test_a_file_is_read_again_once_it_has_changed(self, my_conf: Path) -> None:
        words = [search_path(my_conf), "cluster=site"]
        assert compose(words).cluster.account == "p123"
        (my_conf / "cluster" / "site.yaml").write_text("name: site\nlauncher: srun\naccount: p45\n")
        assert compose(words).cluster.account == "p45"
        (my_conf / "cluster" / "site.yaml").unlink()
        assert "cluster=site" in refusal(*words)

    def test_a_group_of_ones_own(self, my_conf: Path) -> None:
        (my_conf / "recipe").mkdir()
        (my_conf / "recipe" / "long.yaml").write_text("# @package _global_\nseed: 7\n")
        assert compose([search_path(my_conf), "+recipe=long"]).seed == 7

    def test_a_mistake_in_ones_own_file(self, my_conf: Path) -> None:
        (my_conf / "cluster" / "site.yaml").write_text("acount: p123\n")
        assert "cluster.acount" in refusal(search_path(my_conf), "cluster=site")

    def test_a_file_that_is_no_yaml(self, my_conf: Path) -> None:
        (my_conf / "cluster" / "site.yaml").write_text("a: [1\nb: 2\n")
        line = refusal(search_path(my_conf), "cluster=site")
        assert "is no YAML" in line and "cluster/site.yaml" in line
        (my_conf / "cluster" / "site.yaml").write_bytes(b"\xff\x00")
        assert "is no YAML" in refusal(search_path(my_conf), "cluster=site")
        (my_conf / "cluster" / "site.yaml").write_text("- a\n- b\n")
        assert refusal(search_path(my_conf), "cluster=site")

    def test_a_file_that_cannot_be_read(self, my_conf: Path) -> None:
        (my_conf / "cluster" / "site.yaml").unlink()
        (my_conf / "cluster" / "site.yaml").mkdir()
        assert refusal(search_path(my_conf), "cluster=site")

    def test_a_missing_value_in_ones_own_file(self, my_conf: Path) -> None:
        (my_conf / "cluster" / "site.yaml").write_text("launcher: ???\nname: ???\n")
        spec = compose([search_path(my_conf), "cluster=site"])
        assert spec.cluster.launcher == "mpiexec", "the schema's default stands"


def test_hydras_spelling_of_a_target_in_a_file_of_ones_own(tmp_path):
    path = tmp_path / "optimizer" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("_target_: my.Lamb\n_partial_: true\nbetas: [0.8, 0.9]\nlayer_decay: 0.9\n")
    found = compose(
        [f"hydra.searchpath=['file://{tmp_path}']", "optimizer=mine", "optimizer.kwargs.eps=0.1"]
    ).optimizer
    assert (found.target, found.kwargs) == ("my.Lamb", {"betas": [0.8, 0.9], "eps": 0.1})
    assert found.layer_decay == 0.9
