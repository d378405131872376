"""gems.profile.store: a profile of a file, of the cache, or taken in a child process.

And what is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gems.config.resolve import resolve, run_id
from gems.config.schema import (
    DataConfig,
    MachineConfig,
    ModelConfig,
    ParallelConfig,
    ProfileConfig,
    RunSpec,
    TrainConfig,
)
from gems.errors import ConfigError
from gems.profile import ModelProfile, store
from gems.profile.pace import RunPace
from gems.profile.profilers.layers import take
from gems.profile.store import keep_pace, key_of, known_pace, profile_alone, profile_of, versions
from gems.profile.strip_profile import STRIP_SHARES
from gems.profile.subject import Subject
from tests.helpers.processes import python
from tests.helpers.warm_python import REAL

PLAIN = RunSpec(
    model=ModelConfig(depth=8, norm="none"),
    data=DataConfig(name="synthetic", height_px=32, width_px=32, train_samples=64),
    parallel=ParallelConfig(micro_batch_size=2),
    machine=MachineConfig(device="cpu"),
)


def spec_of(**changes: object) -> RunSpec:
    return resolve(replace(PLAIN, **changes))


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return take(Subject.of(spec_of()))


@pytest.fixture
def path(profile: ModelProfile, tmp_path: Path) -> Path:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile.to_json()))
    return file


def refusal(spec: RunSpec) -> str:
    with pytest.raises(ConfigError) as error:
        profile_of(Subject.of(spec))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def with_path(path: Path, **changes: object) -> RunSpec:
    return spec_of(profile=ProfileConfig(path=str(path)), **changes)


class TestFile:
    def test_it_gives_what_was_written(self, path: Path, profile: ModelProfile) -> None:
        assert profile_of(Subject.of(with_path(path))) == profile

    @pytest.mark.parametrize(
        ("section", "changed", "said"),
        [
            ("data", {"height_px": 64}, "data.height_px=32 instead of 64"),
            ("model", {"norm": "batch", "width": 8}, "model.width=16 instead of 8"),
            ("parallel", {"micro_batch_size": 4}, "micro_batch_size=2 instead of 4"),
        ],
    )
    def test_of_another_run(
        self, path: Path, section: str, changed: dict[str, Any], said: str
    ) -> None:
        given = replace(getattr(PLAIN, section), **changed)
        assert said in refusal(with_path(path, **{section: given}))

    def test_another_torch(self, path: Path) -> None:
        document = json.loads(path.read_text())
        document["versions"]["torch"] = "1.0"
        path.write_text(json.dumps(document))
        assert f"version of torch=1.0 instead of {versions()['torch']}" in refusal(with_path(path))

    def test_other_layers_from_elsewhere(self, path: Path) -> None:
        document = json.loads(path.read_text())
        del document["facts"]["subject"]
        document["layers"][0]["name"] = "first"
        path.write_text(json.dumps(document))
        assert "other layers" in refusal(with_path(path))

    @pytest.mark.parametrize(
        "text", ["", "[]", '{"schema": "gems.profile/0"}', '{"schema": "gems.profile/1"}']
    )
    def test_no_profile(self, path: Path, text: str) -> None:
        path.write_text(text)
        assert refusal(with_path(path)).startswith(f"profile.path={path}: ")

    def test_no_file(self, tmp_path: Path) -> None:
        assert "holds no profile" in refusal(with_path(tmp_path / "none.json"))


class TestCache:
    @pytest.fixture
    def taken(self, monkeypatch: pytest.MonkeyPatch, profile: ModelProfile) -> list[RunSpec]:
        seen: list[RunSpec] = []

        def once(spec: RunSpec) -> dict[str, object]:
            seen.append(spec)
            return json.loads(json.dumps(profile.to_json()))

        monkeypatch.setattr(store, "take_profile", once)
        return seen

    def test_it_is_taken_once(
        self, taken: list[RunSpec], tmp_path: Path, profile: ModelProfile
    ) -> None:
        spec = spec_of(cache_dir=str(tmp_path))
        assert profile_of(Subject.of(spec)) == profile_of(Subject.of(spec)) == profile
        assert len(taken) == 1

    @pytest.mark.parametrize(
        "changes",
        [
            {"model": ModelConfig(depth=14)},
            {"data": DataConfig(name="synthetic", height_px=48, width_px=32, train_samples=64)},
            {"parallel": ParallelConfig(micro_batch_size=1)},
            {"machine": MachineConfig(device="cpu", memory_bytes_per_s=1e12)},
            {"profile": ProfileConfig("measured")},
        ],
    )
    def test_what_it_depends_on(
        self, taken: list[RunSpec], tmp_path: Path, changes: dict[str, object]
    ) -> None:
        profile_of(Subject.of(spec_of(cache_dir=str(tmp_path))))
        profile_of(Subject.of(spec_of(cache_dir=str(tmp_path), **changes)))
        assert len(taken) == 2

    def test_what_it_does_not_depend_on(self, taken: list[RunSpec], tmp_path: Path) -> None:
        profile_of(Subject.of(spec_of(cache_dir=str(tmp_path))))
        profile_of(Subject.of(spec_of(cache_dir=str(tmp_path), name="other", seed=5)))
        assert len(taken) == 1

    @pytest.mark.parametrize(
        ("device", "strips", "cuda_graphs", "is_captured"),
        [
            ("cuda", 1, True, True),
            ("cuda", 1, "auto", True),
            ("cuda", 1, False, False),
            ("cuda", 2, True, False),
            ("cpu", 1, True, False),
        ],
    )
    def test_it_says_whether_the_run_captures_graphs(
        self,
        monkeypatch: pytest.MonkeyPatch,
        profile: ModelProfile,
        device: str,
        strips: int,
        cuda_graphs: bool | str,
        is_captured: bool,
    ) -> None:
        for known in (profile, profile.captured(True)):
            monkeypatch.setattr(store, "profile_alone", lambda _, known=known: known)
            monkeypatch.setattr(store, "_with_times_of_strips", lambda _, made: made)
            subject = Subject.of(
                spec_of(
                    machine=MachineConfig(device=device),
                    parallel=ParallelConfig(micro_batch_size=2, strips=strips),
                    train=TrainConfig(cuda_graphs=cuda_graphs),
                )
            )
            assert profile_of(subject).is_captured == is_captured
            assert profile_of(subject).layers == profile.layers

    def test_a_gpu_is_in_the_key_of_the_device_that_is_there(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nodes with GPUs and without may share a cache."""
        keys = []
        for has_gpu in (True, False):
            monkeypatch.setattr(store, "may_have_gpu", lambda has_gpu=has_gpu: has_gpu)
            keys += [
                key_of(Subject.of(spec_of(machine=MachineConfig(device=device))))
                for device in ("auto", "cpu")
            ]
        assert keys[0] != keys[2] and keys[1] == keys[3]

    def test_the_versions_are_in_the_key(self) -> None:
        assert versions().items() <= key_of(Subject.of(spec_of())).items()


class TestPace:
    """How much longer measured layers take in a run: by the machine, or as calibrated on this node."""

    PACE = RunPace(1.5, 0.001)

    @pytest.fixture(autouse=True)
    def measured(self, monkeypatch: pytest.MonkeyPatch, profile: ModelProfile) -> ModelProfile:
        made = replace(profile, source="measured")
        monkeypatch.setattr(
            store, "take_profile", lambda spec: json.loads(json.dumps(made.to_json()))
        )
        return made

    def on(self, tmp_path: Path, **machine: Any) -> RunSpec:
        cpu = MachineConfig(device="cpu", **machine)
        return spec_of(cache_dir=str(tmp_path), profile=ProfileConfig("measured"), machine=cpu)

    def test_layers_take_longer(self, tmp_path: Path, measured: ModelProfile) -> None:
        spec = self.on(tmp_path, pace_factor=1.5, pace_pass_s=0.001)
        found = profile_of(Subject.of(spec))
        for before, after in zip(measured.layers, found.layers, strict=True):
            assert after.time_s == pytest.approx(1.5 * before.time_s + 0.003)
            assert after.recompute_s == pytest.approx(1.5 * before.recompute_s + 0.001)
            assert after.saved == before.saved
        assert self.PACE.of(found) == found, "once"
        assert profile_alone(Subject.of(spec)) == measured

    def test_it_is_kept_for_this_node(self, tmp_path: Path, measured: ModelProfile) -> None:
        spec = self.on(tmp_path)
        assert known_pace(Subject.of(spec)) is None and profile_of(Subject.of(spec)) == measured
        keep_pace(self.PACE, str(tmp_path), spec.machine)
        assert known_pace(Subject.of(spec)) == self.PACE and profile_of(
            Subject.of(spec)
        ) == self.PACE.of(measured)
        assert known_pace(self.on(tmp_path, threads_per_rank=2)) is None
        given = self.on(tmp_path, pace_factor=2.0)
        assert known_pace(Subject.of(given)) == RunPace(2.0), "the machine's file comes first"

    def test_it_is_not_for_rates_nor_other_machines(
        self, tmp_path: Path, path: Path, profile: ModelProfile
    ) -> None:
        spec = self.on(tmp_path)
        keep_pace(self.PACE, str(tmp_path), spec.machine)
        assert known_pace(Subject.of(replace(spec, profile=ProfileConfig("fake")))) is None
        assert (
            known_pace(Subject.of(replace(spec, machine=replace(spec.machine, kind="simulated"))))
            is None
        )
        assert known_pace(replace(spec, profile=ProfileConfig("measured", path=str(path)))) is None
        fake = spec_of(
            machine=MachineConfig(device="cpu", pace_factor=2.0),
            profile=ProfileConfig(path=str(path)),
        )
        assert profile_of(Subject.of(fake)) == profile, "the file holds no measured times"

    def test_a_pace_is_in_no_identity(self, tmp_path: Path) -> None:
        assert run_id(self.on(tmp_path)) == run_id(
            self.on(tmp_path, pace_factor=1.5, pace_pass_s=0.001)
        )


@pytest.mark.usefixtures("warm")
class TestChild:
    @pytest.fixture(autouse=True)
    def without_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "torch")

    def test_it_takes_the_same_profile(self, tmp_path: Path, profile: ModelProfile) -> None:
        assert profile_of(Subject.of(spec_of(cache_dir=str(tmp_path)))) == profile

    def test_its_refusal_is_ours(self, tmp_path: Path) -> None:
        spec = spec_of(cache_dir=str(tmp_path))
        spec = replace(spec, train=replace(spec.train, precision="bf16_pure"))
        assert refusal(spec).startswith("machine.bfloat16_flops_per_s=null: must be given")

    def test_its_failure_is_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store, "TAKER", "gems.no_such_module")
        assert "could not be taken" in refusal(spec_of(cache_dir=str(tmp_path)))
        assert list(tmp_path.iterdir()) == [], "nothing is kept"


class TestHere:
    """Where torch is loaded, as it is in the tests, a profile on fake tensors is taken in this process."""

    @pytest.fixture(autouse=True)
    def without_children(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(subprocess, "run")

    def test_it_is_the_same_profile(self, tmp_path: Path, profile: ModelProfile) -> None:
        assert profile_of(Subject.of(spec_of(cache_dir=str(tmp_path)))) == profile

    def test_a_failure_is_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store, "TAKER", "gems.no_such_module")
        assert "could not be taken: ModuleNotFoundError: " in refusal(
            spec_of(cache_dir=str(tmp_path))
        )
        assert list(tmp_path.iterdir()) == [], "nothing is kept"


def test_the_caller_loads_no_torch() -> None:
    program = "import sys, gems.profile.store, gems.cli.profile; print('torch' in sys.modules)"
    ended = python("-c", program, executable=REAL)
    assert (ended.stdout.strip(), ended.stderr) == ("False", "")


def in_strips(strips: int, min_positions: int = 1) -> ParallelConfig:
    return ParallelConfig(micro_batch_size=2, strips=strips, min_strip_positions=min_positions)


class TestStrips:
    def test_times_are_those_of_as_many_short_images(self, tmp_path: Path) -> None:
        spec = spec_of(cache_dir=str(tmp_path), parallel=in_strips(4))
        found = profile_of(Subject.of(spec))
        whole = profile_alone(Subject.of(spec))
        short = profile_alone(Subject.of(replace(spec, data=replace(spec.data, height_px=8))))
        assert [layer.time_s for layer in found.layers] == pytest.approx(
            [4 * layer.time_s for layer in short.layers]
        )
        assert (
            found.layers[0].forward_s > whole.layers[0].forward_s
        )  # weights are read in each strip
        assert [layer.kept_bytes for layer in found.layers] == [
            layer.kept_bytes for layer in whole.layers
        ]

    def test_none_is_thinner_than_a_row_of_the_last_map(self, tmp_path: Path) -> None:
        spec = spec_of(cache_dir=str(tmp_path), parallel=in_strips(32))
        short = profile_alone(Subject.of(replace(spec, data=replace(spec.data, height_px=4))))
        assert profile_of(Subject.of(spec)).layers[1].forward_s == pytest.approx(
            8 * short.layers[1].forward_s
        )

    def test_an_image_that_is_too_short_changes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = spec_of(cache_dir=str(tmp_path), parallel=in_strips(4))
        whole = profile_alone(Subject.of(spec))

        def alone(asked: RunSpec) -> ModelProfile:
            if asked.data.height_px < spec.data.height_px:
                raise ConfigError("data.height_px", asked.data.height_px, "is too small")
            return whole

        monkeypatch.setattr(store, "profile_alone", alone)
        found = profile_of(Subject.of(spec))
        assert [layer.time_s for layer in found.layers] == [layer.time_s for layer in whole.layers]

    def test_a_layer_that_waits_for_more_strips_has_the_time_of_their_rows(
        self, tmp_path: Path
    ) -> None:
        spec = spec_of(cache_dir=str(tmp_path), parallel=in_strips(4, 10**6))
        whole = profile_alone(Subject.of(spec))
        found = profile_of(Subject.of(spec))
        assert found.layers[0].time_s == whole.layers[0].time_s, "it takes the whole image at once"
        assert found.facts[STRIP_SHARES][0] == pytest.approx([0, 0, 0, 1])
        assert ModelProfile.from_json(json.loads(json.dumps(found.to_json()))) == found
