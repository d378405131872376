"""gems.profile.scaling and gems.profile.hdf5: profiles at other shapes, and in a trace file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.errors import ConfigError
from gems.profile import LayerProfile, ModelProfile
from gems.profile.hdf5 import read_profile, write_profile
from gems.profile.model_profile import SIZES, STORAGES, TIMES, stash_of
from gems.profile.profilers.fake import fake_profile
from gems.profile.scaling import extrapolate
from tests.helpers.profiled import fake_chain, skipping

MODEL = ModelConfig(depth=8, version=2, block="basic")
CUDA = MachineConfig(device="cuda")  # no workspaces, whose size is not affine


def taken(side_px: int, micro_batch_size: int = 1) -> ModelProfile:
    data = DataConfig(height_px=side_px, width_px=side_px)
    return fake_profile(MODEL, data, micro_batch_size, "float32", CUDA)


@pytest.fixture(scope="module")
def points() -> list[ModelProfile]:
    return [taken(128), taken(192), taken(256)]


def square(side_px: int) -> dict[str, int]:
    return {"height_px": side_px, "width_px": side_px}


class TestExtrapolation:
    def test_a_held_out_resolution_is_met(self, points: list[ModelProfile]) -> None:
        truth = taken(512)
        guess = extrapolate(points, square(512), 1)
        assert (guess.height_px, guess.input_bytes, guess.model) == (
            512,
            truth.input_bytes,
            truth.model,
        )
        for one, other in zip(guess.layers, truth.layers, strict=True):
            for name in SIZES:
                # at another size another operation may be the one that needs most
                rel = 0.1 if name == "workspace_bytes" else 0.01
                assert getattr(one, name) == pytest.approx(getattr(other, name), rel=rel, abs=64), (
                    one.name,
                    name,
                )
            assert one.time_s == pytest.approx(other.time_s, rel=0.03)
            for (ahead, size), (other_ahead, other_size) in zip(
                one.saved_later, other.saved_later, strict=True
            ):
                assert (ahead, size) == (other_ahead, pytest.approx(other_size, rel=0.01))

    def test_a_held_out_micro_batch_is_met(self, points: list[ModelProfile]) -> None:
        truth = taken(96, 8)
        guess = extrapolate(points, square(96), 8)
        for one, other in zip(guess.layers, truth.layers, strict=True):
            assert one.stash_bytes == pytest.approx(other.stash_bytes, rel=0.01)

    def test_the_error_is_that_of_points_left_out(self, points: list[ModelProfile]) -> None:
        error = extrapolate(points, square(512), 1).facts["error"]
        assert 0 <= error["stash_bytes"] < 0.01 and 0 <= error["time_s"] < 0.1
        slower = replace(
            points[1],
            layers=tuple(replace(one, forward_s=2 * one.forward_s) for one in points[1].layers),
        )
        assert (
            extrapolate([points[0], slower, points[2]], square(512), 1).facts["error"]["time_s"]
            > 0.2
        )

    def test_two_points_give_no_error(self, points: list[ModelProfile]) -> None:
        assert extrapolate(points[:2], square(64), 1).facts["error"] is None

    def test_it_meets_its_own_points(self, points: list[ModelProfile]) -> None:
        guess = extrapolate(points[:2], square(128), 1)
        assert [one.stash_bytes for one in guess.layers] == [
            one.stash_bytes for one in points[0].layers
        ]

    @pytest.mark.parametrize(
        "change", [{"model": "other"}, {"dtype": "float64"}, {"source": "measured"}]
    )
    def test_points_of_different_runs_are_refused(
        self, points: list[ModelProfile], change: dict[str, str]
    ) -> None:
        with pytest.raises(ConfigError, match="must all be of one"):
            extrapolate([points[0], replace(points[1], **change)], square(64), 1)

    def test_one_size_is_too_few(self, points: list[ModelProfile]) -> None:
        with pytest.raises(ConfigError, match="two sizes or more"):
            extrapolate([points[0], points[0]], square(64), 1)

    def test_storages_grow_with_the_image(self, points: list[ModelProfile]) -> None:
        truth = taken(512)
        guess = extrapolate(points, square(512), 1)
        for one, other in zip(guess.layers, truth.layers, strict=True):
            for name in STORAGES:
                alike = [
                    [replace(each, num_bytes=0) for each in getattr(layer, name)]
                    for layer in (one, other)
                ]
                assert alike[0] == alike[1]
                assert [each.num_bytes for each in getattr(one, name)] == pytest.approx(
                    [each.num_bytes for each in getattr(other, name)], rel=1e-6, abs=2
                )

    def test_layers_that_save_otherwise_at_another_size_keep_their_sums(
        self, points: list[ModelProfile]
    ) -> None:
        def joined(profile: ModelProfile) -> ModelProfile:
            layers = tuple(
                replace(layer, saved=(), passing=(), cheap_bytes=0) for layer in profile.layers
            )
            return replace(profile, layers=layers)

        guess = extrapolate([points[0], joined(points[1]), points[2]], square(512), 1)
        for one, other in zip(guess.layers, taken(512).layers, strict=True):
            assert one.kept_bytes == pytest.approx(other.kept_bytes, rel=1e-6, abs=4)
            assert stash_of(one.saved)[0] == one.stash_bytes

    def test_it_fits_every_field_that_is_a_number(self) -> None:
        numbers = {
            name
            for name, field in LayerProfile.__dataclass_fields__.items()
            if field.type in ("int", "float")
        }
        assert set(TIMES) | set(SIZES) == numbers


class TestHdf5:
    @pytest.mark.parametrize(
        "make", [lambda: taken(32), lambda: fake_chain(skipping())], ids=["chain", "skips"]
    )
    def test_it_comes_back(self, tmp_path: Path, make) -> None:
        profile = make()
        with h5py.File(tmp_path / "trace.h5", "w") as file:
            write_profile(file.create_group("profile"), profile)
        with h5py.File(tmp_path / "trace.h5") as file:
            assert read_profile(file["profile"]) == profile

    def test_every_column_says_what_it_is(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "trace.h5", "w") as file:
            write_profile(file.create_group("profile"), fake_chain(skipping()))
            assert set(file["profile"]) == set(LayerProfile.__dataclass_fields__)
            for dataset in file["profile"].values():
                assert dataset.attrs["units"] and dataset.attrs["long_name"]
            assert file["profile/stash_bytes"].attrs["units"] == "byte"
            assert np.issubdtype(file["profile/forward_s"].dtype, np.floating)

    def test_another_schema_is_refused(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "trace.h5", "w") as file:
            write_profile(file.create_group("profile"), fake_chain(skipping()))
            file["profile"].attrs["schema"] = "gems.profile/9"
            with pytest.raises(ConfigError, match=r"gems\.profile/1, not gems\.profile/9"):
                read_profile(file["profile"])
