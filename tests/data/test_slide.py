"""Whole-slide images: regions against the arrays that were written, by both libraries, and what is held of them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile

from gems.config.schema import DataConfig
from gems.data import check_data, class_names, open_dataset, pyramid
from gems.data.dataset import generator, turned
from gems.data.inspection import inspect_data
from gems.errors import ConfigError
from scripts.bench.rig import in_child
from scripts.bench.slide import read_region, write_slide

SIDE = 64
HEIGHT = 512
WIDTH = 768
TILE = (128, 128)


@pytest.fixture(params=pyramid.LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each library alone."""
    pytest.importorskip(request.param)
    monkeypatch.setattr(pyramid, "LIBRARIES", (request.param,))
    return str(request.param)


def noise(seed: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save_slide(path: Path, levels: Sequence[np.ndarray], mpp: float | None = None) -> None:
    resolution = (
        {}
        if mpp is None
        else {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
    )
    with tifffile.TiffWriter(path) as file:
        for number, pixels in enumerate(levels):
            file.write(
                pixels, tile=TILE, photometric="rgb", subfiletype=int(number > 0), **resolution
            )


def save_table(folder: Path, *rows: str, columns: str = "file,label,split") -> None:
    (folder / "labels.csv").write_text("\n".join([columns, *rows]) + "\n")


def levels_of(seed: int) -> list[np.ndarray]:
    """Three levels that hold different pixels, so that reading another one shows."""
    return [
        noise(seed),
        noise(seed + 100, HEIGHT // 2, WIDTH // 2),
        noise(seed + 200, HEIGHT // 4, WIDTH // 4),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four slides of noise, two of each class; two for training."""
    for number in range(4):
        save_slide(tmp_path / f"s{number}.tif", levels_of(number), mpp=0.5)
    save_table(
        tmp_path,
        *(
            f"s{n}.tif,{'tumour' if n % 2 else 'benign'},{'train' if n < 2 else 'val'}"
            for n in range(4)
        ),
    )
    return tmp_path


def configured(folder: Path, **changes: Any) -> DataConfig:
    fields: dict[str, Any] = {
        "name": "slide",
        "path": str(folder),
        "height_px": SIDE,
        "width_px": SIDE,
    }
    return DataConfig(**fields | {"normalization": "none", "augment": False} | changes)


def opened(path: Path, seed: int = 0, **changes: Any) -> Any:
    data = configured(path, **changes)
    inspect_data(data, seed)
    return open_dataset(data, seed)


def read(dataset: Any, split: Any, index: int, draw: int = 0) -> np.ndarray:
    """Return a sample as bytes (height, width, 3), for data.normalization=none."""
    return np.rint(dataset.image(split, index, draw) * 255).astype(np.uint8).transpose(1, 2, 0)


def corner(dataset: Any, split: Any, index: int) -> tuple[str, int, int]:
    """Return the file, x and y that the name of a sample says."""
    found = re.fullmatch(r".*/(\S+) at x=(\d+), y=(\d+)", dataset.name_of(split, index))
    assert found is not None
    return found[1], int(found[2]), int(found[3])


class TestRegions:
    @pytest.mark.parametrize(("level", "downsample"), [(0, 1), (1, 2), (2, 4)])
    def test_of_a_level_are_its_pixels(
        self, library: str, folder: Path, level: int, downsample: int
    ) -> None:
        save_table(
            folder,
            "s0.tif,0,train,36,60",
            "s1.tif,1,train,512,256",
            "s2.tif,1,val,8,4",
            columns="file,label,split,x,y",
        )
        dataset = opened(folder, level=level)
        assert (dataset.num_train, dataset.num_validation) == (2, 1)
        for split, index, number, x, y in (
            ("train", 0, 0, 36, 60),
            ("train", 1, 1, 512, 256),
            ("validation", 0, 2, 8, 4),
        ):
            column = x // downsample
            row = y // downsample
            expected = levels_of(number)[level][row : row + SIDE, column : column + SIDE]
            np.testing.assert_array_equal(read(dataset, split, index), expected)
        assert [dataset.label("train", index) for index in (0, 1)] == [0, 1]

    def test_are_whole_where_they_cross_tiles_of_the_file(self, library: str, folder: Path) -> None:
        dataset = opened(folder, height_px=400, width_px=500, region=[77, 33, 500, 400])
        np.testing.assert_array_equal(read(dataset, "train", 0), levels_of(0)[0][33:433, 77:577])

    def test_by_microns_per_pixel_are_those_of_a_level_or_resampled(
        self, library: str, tmp_path: Path
    ) -> None:
        rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
        smooth = np.stack([rows / 4, columns / 4, (rows + columns) / 8], axis=2)
        save_slide(
            tmp_path / "s.tif",
            [smooth.astype(np.uint8), smooth[::2, ::2].astype(np.uint8)],
            mpp=0.25,
        )
        save_table(
            tmp_path, "s.tif,0,train,60,36", "s.tif,1,val,0,0", columns="file,label,split,x,y"
        )
        same = opened(tmp_path, mpp=0.5)
        np.testing.assert_array_equal(
            read(same, "train", 0), smooth[::2, ::2].astype(np.uint8)[18:82, 30:94]
        )
        for mpp in (0.4, 0.75):
            dataset = opened(tmp_path, mpp=mpp, height_px=140, width_px=140)
            middles = (np.arange(140) + 0.5) * mpp / 0.25 - 0.5
            expected = np.stack(
                np.broadcast_arrays(
                    (36 + middles)[:, np.newaxis] / 4,
                    (60 + middles) / 4,
                    ((36 + middles)[:, np.newaxis] + 60 + middles) / 8,
                ),
                axis=2,
            )
            # bytes are rounded down in the slide, and its second level is of the first pixel of
            # four
            assert np.abs(read(dataset, "train", 0).astype(float) - expected).max() < 1.6

    def test_resampled_in_bands_are_as_resampled_whole(
        self, library: str, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changes: dict[str, Any] = {
            "mpp": 0.7,
            "height_px": 300,
            "width_px": 300,
            "region": [50, 40, 421, 421],
        }
        bands = read(opened(folder, **changes), "train", 0)
        monkeypatch.setattr(pyramid, "_MAX_TILE_PX", 10**6)
        slide = pyramid.read_facts(folder / "s0.tif")
        whole = pyramid.Slide(
            slide.path,
            tuple(
                pyramid.Level(each.width_px, each.height_px, each.downsample, 10**6)
                for each in slide.levels
            ),
            slide.mpp,
        )
        with pyramid.Handles().opened(slide.path) as handle:
            ((rows, expected),) = pyramid.read_bands(handle, whole, (50, 40), 1.4, (300, 300))
        assert rows == slice(0, 300)
        # Pillow takes the ends of a band as float32
        difference = np.abs(bands.astype(int) - expected)
        assert difference.max() <= 1 and difference.mean() < 0.05

    def test_of_one_channel_are_grey(self, library: str, folder: Path) -> None:
        dataset = opened(folder, channels=1, region=[0, 0, SIDE, SIDE])
        weights = levels_of(0)[0][:SIDE, :SIDE] @ np.array([0.299, 0.587, 0.114])
        assert np.abs(dataset.image("train", 0)[0] * 255 - weights).max() < 1

    def test_over_a_part_are_a_grid(self, library: str, folder: Path) -> None:
        dataset = opened(folder, region=[100, 50, 200, 130], level=0)
        places = [corner(dataset, "train", index) for index in range(dataset.num_train)]
        assert places == [
            (f"s{n}.tif", 100 + SIDE * i, 50 + SIDE * j)
            for n in (0, 1)
            for j in (0, 1)
            for i in range(3)
        ]
        assert dataset.class_counts("train") == (6, 6)

    def test_over_the_whole_slide(self, library: str, folder: Path) -> None:
        dataset = opened(folder, tissue_share=0, level=1, height_px=128)
        assert dataset.num_train == 2 * (WIDTH // 128) * (HEIGHT // 256)


class TestTissue:
    @pytest.fixture
    def tissue(self, tmp_path: Path) -> Path:
        """Purple from x=256 to 576 and y=128 to 320, on white.

        But for a hole of 64 px at its corner.
        """
        for name in ("a", "b"):
            pixels = np.full((HEIGHT, WIDTH, 3), 240, dtype=np.uint8)
            pixels[128:320, 256:576] = (150, 60, 160)
            pixels[128:192, 256:320] = 240
            save_slide(tmp_path / f"{name}.tif", [pixels, pixels[::2, ::2]])
        save_table(tmp_path, "a.tif,0,train", "b.tif,1,val")
        return tmp_path

    def test_regions_fill_its_box_without_holes(self, library: str, tissue: Path) -> None:
        dataset = opened(tissue)
        places = {corner(dataset, "train", index)[1:] for index in range(dataset.num_train)}
        grid = {(256 + SIDE * i, 128 + SIDE * j) for i in range(5) for j in range(3)}
        assert places == grid - {(256, 128)}
        assert all(
            (read(dataset, "train", index) == (150, 60, 160)).all()
            for index in range(dataset.num_train)
        )

    def test_less_than_a_region_is_in_its_middle(self, library: str, tissue: Path) -> None:
        dataset = opened(tissue, height_px=400, width_px=400)
        assert dataset.num_train == 1
        name, x, y = corner(dataset, "train", 0)
        assert (name, x, y) == ("a.tif", (256 + 576) // 2 - 200, (128 + 320) // 2 - 200)

    def test_none(self, tmp_path: Path) -> None:
        save_slide(tmp_path / "a.tif", [np.full((HEIGHT, WIDTH, 3), 240, dtype=np.uint8)])
        (tmp_path / "labels.csv").write_text("file,label\na.tif,0\n")
        with pytest.raises(
            ConfigError, match=r"data\.tissue_share=0\.1: .*a\.tif shows no tissue"
        ) as caught:
            check_data(configured(tmp_path, class_map={"0": 0}))
        assert "\n" not in str(caught.value)


class TestCoords:
    """Patches of TRIDENT (side at level 0) and of CLAM (side at a level)."""

    CORNERS = ((0, 0), (128, 256), (640, 384))

    def save(self, path: Path, corners: Sequence[tuple[int, int]], **attributes: Any) -> None:
        path.parent.mkdir(exist_ok=True)
        with h5py.File(path, "w") as file:
            file["coords"] = np.array(corners)
            file["coords"].attrs.update({"name": path.stem, **attributes})

    @pytest.mark.parametrize(
        ("ending", "attributes"),
        [
            (".h5", {"patch_size": 64, "patch_level": 1, "downsample": (2.0, 2.0)}),
            (
                "_patches.h5",
                {
                    "patch_size": 64,
                    "patch_size_level0": np.array([128]),
                    "target_magnification": 10,
                },
            ),
        ],
    )
    def test_are_read_at_their_scale(
        self, library: str, folder: Path, ending: str, attributes: dict[str, Any]
    ) -> None:
        for number in range(4):
            self.save(folder / "coords" / f"s{number}{ending}", self.CORNERS, **attributes)
        dataset = opened(folder, coords_path=str(folder / "coords"))
        assert (dataset.num_train, dataset.num_validation) == (6, 6)
        assert [corner(dataset, "train", index) for index in range(6)] == [
            (f"s{number}.tif", *place) for number in (0, 1) for place in self.CORNERS
        ]
        for index, (x, y) in enumerate(self.CORNERS):
            expected = levels_of(0)[1][y // 2 : y // 2 + SIDE, x // 2 : x // 2 + SIDE]
            np.testing.assert_array_equal(read(dataset, "train", index), expected)

    def test_beyond_the_edge_are_white(self, library: str, folder: Path) -> None:
        for number in range(4):
            self.save(
                folder / "coords" / f"s{number}.h5",
                [(WIDTH - 40, HEIGHT - 30)],
                patch_size=SIDE,
                patch_level=0,
            )
        found = read(opened(folder, coords_path=str(folder / "coords")), "train", 0)
        np.testing.assert_array_equal(found[:30, :40], levels_of(0)[0][-30:, -40:])
        assert (found[30:] == 255).all() and (found[:, 40:] == 255).all()

    @pytest.mark.parametrize(
        ("corners", "attributes", "words"),
        [
            ([(0, 0)], {}, "does not say the size of patches"),
            (
                [(0, 0)],
                {"patch_size": 64, "patch_level": 7},
                "is of level 7, and .* has levels 0 to 2",
            ),
            (
                [(WIDTH, 0)],
                {"patch_size_level0": 64},
                f"has a patch at x={WIDTH}, y=0, which is outside",
            ),
        ],
    )
    def test_that_are_refused(
        self, folder: Path, corners: list[tuple[int, int]], attributes: dict[str, Any], words: str
    ) -> None:
        self.save(folder / "s0.h5", corners, **attributes)
        with pytest.raises(ConfigError, match=words) as caught:
            check_data(configured(folder, coords_path=str(folder)))
        assert caught.value.key == "data.coords_path" and "\n" not in str(caught.value)


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "key", "words"),
        [
            ({"path": "/nowhere"}, "data.path", "no such folder or file"),
            ({"level": 3}, "data.level", "has levels 0 to 2"),
            ({"mpp": 0.3}, "data.mpp", "has 0.5 at its finest"),
            ({"level": 1, "mpp": 1.0}, "data.level", "cannot be combined with data.mpp"),
            ({"coords_path": "/nowhere"}, "data.coords_path", "has no coords of slide s0"),
            (
                {"coords_path": "/nowhere", "mpp": 1.0},
                "data.mpp",
                "cannot be combined with data.coords_path",
            ),
            ({"coords_path": "/nowhere", "width_px": 32}, "data.height_px", "are square"),
            ({"region": [700, 0, 100, 100]}, "data.region", "which has 768 x 512 px"),
            ({"region": [0, 0, 50, 100]}, "data.region", "is less than a sample"),
            ({"region": [0, 0, 50]}, "data.region", "must be [x,y,width,height]"),
            (
                {"height_px": 300, "width_px": 300, "level": 1},
                "data.height_px",
                "a sample takes 600 x 600",
            ),
            ({"labels_path": "/nowhere.csv"}, "data.labels_path", "cannot be read"),
            ({"image_column": "slide_id"}, "data.labels_path", "has no column slide_id"),
            ({"num_classes": 3}, "data.num_classes", "set data.num_classes=2"),
            ({"channels": 4}, "data.channels", "slides have 3 channels"),
            ({"bits": 16}, "data.bits", "is not read by data=slide"),
        ],
    )
    def test_of_keys(self, folder: Path, changes: dict[str, Any], key: str, words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            check_data(configured(folder, **changes))
        assert (
            caught.value.key == key and words in str(caught.value) and "\n" not in str(caught.value)
        )

    @pytest.mark.parametrize(
        ("columns", "rows", "words"),
        [
            ("file,label", ["s9.tif,0", "s1.tif,1"], "names s9.tif, and there is no such slide"),
            ("file,label", ["s0.tif,", "s1.tif,1"], "line 2 has no label"),
            ("file,label", ["s0.tif,0", "s0.tif,1"], "names s0.tif twice"),
            ("file,label,x,y", ["s0.tif,0,1,2", "s1.tif,1,-1,2"], "line 3 has x=-1, y=2"),
            ("file,label,x,y", ["s0.tif,0,1,2", "s1.tif,1,705,2"], "at x=705, y=2 is not inside"),
        ],
    )
    def test_of_tables(self, folder: Path, columns: str, rows: list[str], words: str) -> None:
        save_table(folder, *rows, columns=columns)
        with pytest.raises(ConfigError) as caught:
            check_data(configured(folder))
        assert (
            caught.value.key == "data.labels_path"
            and words in str(caught.value)
            and "\n" not in str(caught.value)
        )

    def test_of_files(self, library: str, folder: Path) -> None:
        (folder / "s1.tif").write_text("no slide")
        with pytest.raises(ConfigError, match=r"s1\.tif: no readable slide: ") as caught:
            check_data(configured(folder))
        assert "\n" not in str(caught.value)
        save_slide(folder / "s1.tif", levels_of(1))
        with pytest.raises(
            ConfigError, match=r"data\.mpp=1\.0: .*s1\.tif does not say its microns per pixel"
        ):
            check_data(configured(folder, mpp=1.0))

    def test_without_a_library(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pyramid, "LIBRARIES", ("no_such_library",))
        with pytest.raises(ConfigError, match=r"neither is installed.*gems-train\[slide\]"):
            check_data(configured(folder))


class TestSplits:
    def test_keep_a_slide_whole(self, folder: Path) -> None:
        """CLAM's table: slides without their suffix, and no column split."""
        save_table(folder, *(f"s{n},{n % 2}" for n in range(4)), columns="slide_id,label")
        seen = set()
        for seed in range(6):
            dataset = opened(
                folder,
                seed,
                image_column="slide_id",
                tissue_share=0,
                train_samples=1,
                validation_samples=1,
            )
            names = {
                split: {
                    corner(dataset, split, index)[0] for index in range(dataset.num_images(split))
                }
                for split in ("train", "validation")
            }
            assert (
                not names["train"] & names["validation"]
                and len(names["train"]) == len(names["validation"]) == 2
            )
            assert dataset.class_counts("train") == dataset.class_counts("validation")
            seen.add(frozenset(names["train"]))
        assert len(seen) > 1

    def test_without_one_are_refused(self, folder: Path) -> None:
        save_table(folder, "s0.tif,0,train", "s1.tif,1,train")
        with pytest.raises(ConfigError, match="no region is left for validation"):
            open_dataset(configured(folder), 0)


class TestReading:
    def test_flips_and_turns_by_seed_and_epoch(self, library: str, folder: Path) -> None:
        plain = opened(folder, normalization="imagenet", region=[0, 0, SIDE, SIDE])
        dataset = opened(
            folder, 3, normalization="imagenet", region=[0, 0, SIDE, SIDE], augment=True
        )
        upright = plain.image("train", 0)
        seen = set()
        for draw in range(24):
            image = dataset.image("train", 0, draw)
            np.testing.assert_array_equal(image, turned(upright, generator(3, "augment", 0, draw)))
            np.testing.assert_array_equal(image, dataset.image("train", 0, draw))
            assert image.flags.owndata and image.flags.c_contiguous  # a batch of one is not copied
            seen.add(image.tobytes())
        assert len(seen) == 8
        np.testing.assert_array_equal(
            dataset.image("validation", 0, 5), plain.image("validation", 0)
        )

    def test_a_transform_gets_the_whole_region(self, folder: Path) -> None:
        pytest.importorskip("albumentations")
        dataset = opened(
            folder,
            region=[0, 0, 100, 200],
            height_px=200,
            width_px=100,
            augment=True,
            transform="albumentations.HorizontalFlip",
            transform_kwargs={"p": 1.0},
        )
        np.testing.assert_array_equal(read(dataset, "train", 0), levels_of(0)[0][:200, 99::-1])
        np.testing.assert_array_equal(read(dataset, "validation", 0), levels_of(2)[0][:200, :100])

    def test_computes_mean_and_deviation(self, folder: Path) -> None:
        dataset = opened(folder, normalization="computed", tissue_share=0)
        images = np.stack([dataset.image("train", index) for index in range(dataset.num_train)])
        np.testing.assert_allclose(images.mean((0, 2, 3)), 0, atol=1e-5)
        np.testing.assert_allclose(images.std((0, 2, 3)), 1, atol=1e-5)

    def test_opens_a_slide_when_it_is_read_and_in_each_process(
        self, library: str, folder: Path
    ) -> None:
        dataset = opened(folder, region=[0, 0, SIDE, SIDE])
        assert len(dataset._handles) == 0
        assert [dataset.label("train", index) for index in (0, 1)] == [0, 1] and len(
            dataset._handles
        ) == 0
        image = dataset.image("train", 1)
        assert len(dataset._handles) == 1
        copy = pickle.loads(pickle.dumps(dataset))
        assert len(copy._handles) == 0
        np.testing.assert_array_equal(copy.image("train", 1), image)
        inherited, dataset._handles._process = dict(dataset._handles._open), -1  # as after a fork
        np.testing.assert_array_equal(dataset.image("train", 0), copy.image("train", 0))
        assert len(dataset._handles) == 1 and not dataset._handles._open.items() & inherited.items()
        for handle in inherited.values():
            handle.close()

    def test_closes_slides_beyond_a_few(
        self, library: str, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pyramid, "_MAX_OPEN", 2)
        dataset = opened(folder, region=[0, 0, SIDE, SIDE])
        places = [(split, index) for split in ("train", "validation") for index in (0, 1)] * 2
        images = [dataset.image(split, index).tobytes() for split, index in places]
        assert images[:4] == images[4:] and len(dataset._handles) == 2

    def test_asks_for_no_more_than_the_region(
        self, library: str, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A facade before the library counts what is asked of it."""
        asked = []

        class Counted:
            def __init__(self, handle: Any) -> None:
                self.handle = handle

            def read_region(self, location: Any, level: int, size: tuple[int, int]) -> Any:
                asked.append((level, size[0] * size[1]))
                return self.handle.read_region(location, level, size)

            def close(self) -> None:
                self.handle.close()

        dataset = opened(folder, region=[77, 33, 400, 400], level=1, height_px=200, width_px=200)
        monkeypatch.setattr(
            pyramid, "open_slide", lambda path, real=pyramid.open_slide: Counted(real(path))
        )
        dataset.image("train", 0)
        assert {level for level, _ in asked} == {1} and sum(
            pixels for _, pixels in asked
        ) == 200 * 200

    def test_workers_and_a_resumed_run_read_the_same(self, folder: Path) -> None:
        torch = pytest.importorskip("torch")
        from gems.engine.batch_loader import BatchLoader, ReadShare
        from tests.helpers.toys import make_spec

        dataset = opened(folder, augment=True, tissue_share=0)

        def loader(first_step: int, **changes: Any) -> BatchLoader:
            spec = make_spec("1f1b", 2, train__steps=5, **changes)
            share = ReadShare(0, (0, 1), (1,))
            return BatchLoader(spec, dataset, share, torch.device("cpu"), first_step)

        whole = loader(0)
        workers = loader(0, data__num_workers=2)
        resumed = loader(3)
        for step in range(5):
            expected = whole.batch(step)
            for other in (workers, resumed) if step >= 3 else (workers,):
                found = other.batch(step)
                assert all(torch.equal(found.images[m], expected.images[m]) for m in (0, 1))
                assert torch.equal(found.labels[1], expected.labels[1])
        for each in (whole, workers, resumed):
            each.close()

    def test_holds_little_more_than_the_sample(self, tmp_path: Path) -> None:
        """The resident set of a process that reads one region.

        Scripts/bench/slide.py measures larger ones.
        """
        pytest.importorskip("openslide")
        write_slide(tmp_path, 3072)
        found = in_child(read_region, str(tmp_path), 2048, "openslide", threads=1)
        assert found.get("region_bytes") == 3 * 2048 * 2048 * 4, found
        assert 1.0 <= found["ratio"] <= 1.5


def test_names_of_classes(folder: Path) -> None:
    assert class_names(configured(folder)) == ["benign", "tumour"]


def test_the_slide_of_tissue_has_regions_apart_and_both_classes(cache: Path) -> None:
    dataset = opened(Path("tissue"), level=1, height_px=128, width_px=128)
    assert (cache / "tissue-slide-1" / "slide.tif").exists()
    assert dataset.class_counts("train") == (128, 128) and dataset.class_counts("validation") == (
        32,
        32,
    )
    lefts = {
        split: [corner(dataset, split, index)[1] for index in range(dataset.num_images(split))]
        for split in ("train", "validation")
    }
    assert max(lefts["train"]) + 256 <= min(lefts["validation"])
    written = (cache / "tissue-slide-1" / "slide.tif").stat().st_mtime_ns
    opened(Path("tissue"), level=1, height_px=128, width_px=128)
    assert (cache / "tissue-slide-1" / "slide.tif").stat().st_mtime_ns == written
