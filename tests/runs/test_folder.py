"""gems.runs.folder: a signature for every configuration, and a folder that loses nothing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gems.config.fields import keys
from gems.config.resolve import run_id
from gems.config.schema import CostConfig, RunSpec
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.atomic_io import read_json, write_json
from tests.helpers.processes import python

ROOT = Path(__file__).resolve().parents[2]
# Keys that change no result of a run.
ASIDE = (
    "data.num_workers",
    "runs_dir",
    "cache_dir",
    "parallel.gpus",
    "train.checkpoint_steps",
    "train.checkpoint_s",
    "train.keep_checkpoints",
    "train.max_failed_saves",
    "train.loggers",
    "machine.pace_factor",
    "machine.pace_pass_s",
    "machine.library_bytes",
    "machine.launch_s",
    "machine.bfloat16_launch_s",
    "machine.operator_s",
    "machine.operator_efficiency",
    "machine.memory_efficiency",
    "machine.multiprocessors",
    "machine.winograd",
    "machine.half_rate_channels",
    "machine.bfloat16_half_rate_channels",
    "machine.launches_from",
    "plugins_dir",
    "train.log_level",
    "cluster.hosts",
    "cluster.account_required",
    "cluster.limits",
    "cluster.charge_per",
    "cluster.charge_rate",
    "cluster.charge_unit",
    "cluster.minutes",
    "cluster.account",
    "cluster.exclude",
    "cluster.archive_code",
    "cluster.array",
    "cluster.max_parallel",
    "cluster.runs_per_job",
    "cluster.confirm_above_gpu_hours",
    "cluster.signal_before_end_s",
    "cluster.max_requeues",
    "cluster.scheduler",
    "cluster.flux_batch",
    "cluster.flux_run",
    "cluster.qsub",
    "cluster.mpiexec",
    "cluster.stage",
    "cluster.stage_dir",
    "cluster.stage_above_nodes",
    "cluster.elastic",
    "cluster.elastic_wait_h",
    "cluster.spare_nodes",
    "cluster.check_nodes",
    "cluster.notify",
)
BUNDLE = ["code.zip", "environment.json", "packages.txt"]  # and code.diff in a checkout
FRESH = sorted(
    ["partition.json", "provenance.json", "run.yaml", "schedule.json", "status.json"]
    + [f"provenance/{name}" for name in BUNDLE]
)
IS_ROOT = os.geteuid() == 0


def leaves(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every field that holds a value and no section."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


LEAVES = list(leaves(RunSpec()))


def with_another(key: str) -> RunSpec:
    """Return the default run with another value of a field, of the field's type."""
    spec = RunSpec()
    section, _, name = key.rpartition(".")
    config: Any = getattr(spec, section) if section else spec
    value = getattr(config, name)
    others = {
        bool: lambda: not value,
        int: lambda: value + 1,
        float: lambda: value + 0.5,
        str: lambda: value + "x",
    }
    others |= {
        list: lambda: [*value, "x"],
        dict: lambda: {**value, "x": "1"},
        type(None): lambda: 1,
    }
    other = "profile" if key == "cost.name" else others[type(value)]()  # it is looked up
    setattr(config, name, other)
    return spec


class TestRunId:
    def test_leaves_cover_the_whole_configuration(self) -> None:
        assert {"name", "seed", "model.depth", "cluster.sbatch", "train.initial_checkpoint"} <= set(
            LEAVES
        )
        assert len(LEAVES) == len(set(LEAVES)) > 50

    @pytest.mark.parametrize("key", [key for key in LEAVES if key not in ASIDE])
    def test_every_field_changes_it(self, key: str) -> None:
        assert run_id(with_another(key)) != run_id(RunSpec())

    def test_all_of_them_differ(self) -> None:
        found = {run_id(with_another(key)) for key in LEAVES}
        assert len(found) == len(LEAVES) - len(ASIDE) + 1
        assert all(len(text) == 8 and int(text, 16) >= 0 for text in found)

    def test_where_all_runs_lie_and_what_a_site_allows_does_not(self) -> None:
        assert {run_id(with_another(key)) for key in ASIDE} == {run_id(RunSpec())}

    def test_what_a_profile_fills_does_not(self) -> None:
        spec = RunSpec(cost=CostConfig("profile"))
        measured = CostConfig(
            "profile", forward=0.1, times=[1.0, 2.0], activation_bytes=77, param_bytes=5
        )
        assert run_id(dataclasses.replace(spec, cost=measured)) == run_id(spec)
        assert run_id(RunSpec(cost=CostConfig(forward=0.1))) != run_id(RunSpec())

    def test_a_key_of_a_later_version_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = with_another("seed")
        before = run_id(spec)
        later = [key for key in keys(RunSpec) if key.name != "optimizer.momentum"]
        monkeypatch.setattr("gems.config.resolve.keys", lambda schema: later)
        assert run_id(spec) == before

    def test_order_of_a_mapping_does_not_matter(self) -> None:
        one = RunSpec()
        other = RunSpec()
        one.cluster.environment = {"A": "1", "B": "2"}
        other.cluster.environment = {"B": "2", "A": "1"}
        assert run_id(one) == run_id(other)

    def test_it_survives_run_yaml(self) -> None:
        spec = with_another("optimizer.lr")
        assert run_id(RunSpec.from_dict(yaml.safe_load(yaml.safe_dump(spec.to_dict())))) == run_id(
            spec
        )

    def test_it_is_the_same_in_another_process(self) -> None:
        """With another hash seed, which orders sets and nothing of ours."""
        program = (
            "from gems.config.schema import RunSpec; from gems.runs.folder import run_id;"
            " print(run_id(RunSpec()))"
        )
        for seed in ("1", "2"):
            ended = python("-c", program, env=os.environ | {"PYTHONHASHSEED": seed})
            assert (ended.stdout.strip(), ended.stderr) == (run_id(RunSpec()), "")


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return RunSpec(name="try", runs_dir=str(tmp_path / "runs"))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "code.diff")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class TestPrepare:
    def test_a_new_folder(self, spec: RunSpec, tmp_path: Path) -> None:
        folder = prepare(spec)
        assert folder.path == tmp_path / "runs" / f"try-{run_id(spec)}"
        assert folder.read_spec() == spec
        assert folder.read_status()["state"] == "prepared"
        assert folder.logs.is_dir() and folder.heartbeat(0).parent.is_dir()
        assert sorted(contents(folder.path)) == FRESH

    def test_another_configuration_goes_elsewhere(self, spec: RunSpec) -> None:
        other = dataclasses.replace(spec, seed=1)
        assert prepare(spec).path != prepare(other).path

    def test_preparing_twice_leaves_no_attempt(self, spec: RunSpec) -> None:
        """A dry run, and then the run."""
        prepare(spec)
        folder = prepare(spec)
        assert not (folder.path / "attempts").exists()

    def test_an_earlier_attempt_is_kept_whole(self, spec: RunSpec) -> None:
        folder = prepare(spec)
        left: dict[str, bytes] = {}
        for number in (1, 2, 3):
            (folder.path / "trace").mkdir()
            (folder.path / "trace" / "rank0000.h5").write_bytes(b"events %d" % number)
            (folder.logs / "rank0000.log").write_bytes(b"said %d" % number)
            folder.heartbeat(0).write_bytes(b"beat %d" % number)
            folder.failed_json(1).write_bytes(b"{}")
            folder.write_status("failed", attempt=number)
            before = {
                key: value
                for key, value in contents(folder.path).items()
                if not key.startswith(
                    ("attempts", "run.yaml", "schedule.json", "partition.json", "profile.json")
                )
            }
            left |= {f"attempts/{number:03d}/{key}": value for key, value in before.items()}
            assert len(before) == 4 + len(FRESH) - 3
            folder = prepare(spec)
            now = contents(folder.path)
            assert {key: value for key, value in now.items() if key.startswith("attempts")} == left
            assert sorted(key for key in now if not key.startswith("attempts")) == FRESH
            assert folder.read_status()["state"] == "prepared"

    def test_an_attempt_that_was_thrown_away_does_not_block(self, spec: RunSpec) -> None:
        folder = prepare(spec)
        for name in ("attempts/002", "attempts/note"):
            (folder.path / name).mkdir(parents=True)
        (folder.logs / "rank0000.log").write_text("said")
        prepare(spec)
        assert sorted(path.name for path in (folder.path / "attempts").iterdir()) == [
            "002",
            "003",
            "note",
        ]

    @pytest.mark.parametrize("has_result", [False, True])
    def test_checkpoints_stay_until_a_run_has_finished(
        self, spec: RunSpec, has_result: bool
    ) -> None:
        folder = prepare(spec)
        write_json(folder.checkpoints / "step00000002" / "manifest.json", {})
        (folder.logs / "ranks.log").write_text("said")
        assert folder.attempt == 1
        if has_result:
            write_json(folder.result_json, {})
        assert prepare(spec).attempt == 2
        home = folder.path / "attempts/001/checkpoints" if has_result else folder.checkpoints
        assert (home / "step00000002/manifest.json").exists()
        assert folder.checkpoints.exists() != has_result

    def test_only_the_folder_to_resume_from_is_of_the_id(self, spec: RunSpec) -> None:
        def of(resume: str) -> str:
            return run_id(
                dataclasses.replace(spec, train=dataclasses.replace(spec.train, resume=resume))
            )

        assert of("auto") == of("never") != of("/a/run") != of("/b/run")

    def test_a_log_alone_is_kept(self, spec: RunSpec) -> None:
        folder = prepare(spec)
        (folder.logs / "launcher.log").write_text("it said why")
        prepare(spec)
        assert (folder.path / "attempts/001/logs/launcher.log").read_text() == "it said why"

    def test_a_folder_of_an_earlier_version_is_named(
        self, spec: RunSpec, capsys: pytest.CaptureFixture[str]
    ) -> None:
        older = Path(spec.runs_dir) / "try-0123abcd"
        prepare(spec).path.rename(older)
        values = yaml.safe_load((older / "run.yaml").read_text())
        values["train"]["stall_limit_s"] = values["train"].pop("hang_timeout_s")
        del values["train"]["log_level"]
        (older / "run.yaml").write_text(yaml.safe_dump(values))
        (older.parent / "try-00000000").mkdir()
        prepare(dataclasses.replace(spec, seed=9))
        assert capsys.readouterr().err == ""
        prepare(spec)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"gems: {older} is an older folder of this configuration")
        prepare(spec)
        assert capsys.readouterr().err == "", "it is said once"


class TestRefused:
    def test_another_configuration_in_the_folder(self, spec: RunSpec) -> None:
        folder = prepare(spec)
        values = spec.to_dict() | {"seed": 9}
        folder.run_yaml.write_text(yaml.safe_dump(values))
        before = contents(folder.path)
        with pytest.raises(
            ConfigError,
            match=f"holds another configuration.*not {run_id(spec)}.*choose another name=",
        ):
            prepare(spec)
        assert contents(folder.path) == before

    @pytest.mark.parametrize("text", ["", "- 1", "a: [", "modle: {}", "model: 3", "1: 2"])
    def test_a_run_yaml_that_is_none(self, spec: RunSpec, text: str) -> None:
        folder = prepare(spec)
        folder.run_yaml.write_text(text)
        with pytest.raises(ConfigError) as error:
            prepare(spec)
        assert "\n" not in str(error.value)

    def test_a_run_yaml_of_bytes(self, spec: RunSpec) -> None:
        folder = prepare(spec)
        folder.run_yaml.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"holds no readable run\.yaml"):
            folder.read_spec()

    def test_a_folder_that_was_never_prepared(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"holds no readable run\.yaml.*prepare it first"):
            RunFolder(tmp_path).read_spec()
        assert RunFolder(tmp_path).read_status() == {}

    def test_a_damaged_status(self, spec: RunSpec) -> None:
        folder = prepare(spec)
        folder.status_json.write_text('{"state": "runn')
        with pytest.raises(ConfigError, match=r"status\.json is damaged.*move that folder away"):
            prepare(spec)

    def test_a_run_that_goes_on(self, spec: RunSpec) -> None:
        folder = prepare(spec)
        with subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True
        ) as process:
            folder.write_status("running", pid=process.pid, host=os.uname().nodename)
            with pytest.raises(
                ConfigError, match=f"a run goes on there .process {process.pid}.*wait for it"
            ):
                prepare(spec)
            assert folder.read_status()["state"] == "running"
            process.communicate("\n", timeout=60)
        assert prepare(spec).read_status()["state"] == "prepared", (
            "it has ended, so the folder is free"
        )

    def test_a_run_of_our_own_may_be_prepared_again(self, spec: RunSpec) -> None:
        folder = prepare(spec)
        folder.write_status("running", pid=os.getpid(), host=os.uname().nodename)
        assert prepare(spec).read_status()["state"] == "prepared"

    @pytest.mark.parametrize("more", [{}, {"pid": None}, {"pid": "12"}, {"pid": 2**30}])
    def test_a_run_that_has_gone_does_not_block(self, spec: RunSpec, more: dict[str, Any]) -> None:
        folder = prepare(spec)
        folder.write_status("running", host=os.uname().nodename, **more)
        assert prepare(spec).read_status()["state"] == "prepared"

    def test_a_job_in_the_queue(self, spec: RunSpec) -> None:
        folder = prepare(spec)
        folder.write_status("submitted", job_id=4711)
        with pytest.raises(ConfigError, match="is that of job 4711, which may not have ended"):
            prepare(spec)

    def test_runs_dir_below_a_regular_file(self, spec: RunSpec, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        spec.runs_dir = str(tmp_path / "file" / "runs")
        with pytest.raises(
            ConfigError, match=r"runs_dir=.*cannot write there \(Not a directory"
        ) as error:
            prepare(spec)
        assert error.value.advice == "give runs_dir= a folder of yours"

    @pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
    def test_runs_dir_without_permission(self, spec: RunSpec, tmp_path: Path) -> None:
        (tmp_path / "locked").mkdir(mode=0o500)
        spec.runs_dir = str(tmp_path / "locked" / "runs")
        with pytest.raises(ConfigError, match=r"runs_dir=.*cannot write there \(Permission denied"):
            prepare(spec)

    def test_a_name_too_long_for_a_folder(self, spec: RunSpec) -> None:
        spec.name = "x" * 300
        with pytest.raises(ConfigError, match=r"cannot write there \(File name too long"):
            prepare(spec)


class TestJson:
    def test_a_run_yaml_cut_short_is_no_run(
        self, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replace = Path.replace
        seen = []

        def stop(self: Path, target: Path) -> Path:
            if Path(target).name == "run.yaml":
                seen.append(self.read_text())
                raise OSError(28, "No space left on device", str(target))
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", stop)
        with pytest.raises(ConfigError, match="No space left on device"):
            prepare(spec)
        assert yaml.safe_load(seen[0]) == spec.to_dict(), "it was whole before it got its name"
        assert not list(Path(spec.runs_dir).glob("*/run.yaml"))

    def test_readers_see_one_of_the_documents_whole(self, tmp_path: Path) -> None:
        """Two processes write, one reads: never a half."""
        program = (
            "import sys; from pathlib import Path; from gems.runs.folder import write_json\n"
            "for _ in range(200): write_json(Path(sys.argv[1]), {'x': [int(sys.argv[2])] * 2000})"
        )
        path = tmp_path / "a.json"
        write_json(path, {"x": [0] * 2000})
        writers = [
            subprocess.Popen([sys.executable, "-c", program, str(path), str(k)], cwd=ROOT)
            for k in (1, 2)
        ]
        while any(writer.poll() is None for writer in writers):
            values = read_json(path)["x"]
            assert len(values) == 2000 and len(set(values)) == 1
        assert [writer.wait() for writer in writers] == [0, 0]
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
