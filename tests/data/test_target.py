"""A user's own dataset by its dotted name: split, labels, random numbers, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from gems.config.compose import compose
from gems.config.schema import DataConfig
from gems.data import check_data, kind_of, open_dataset, resolve_data, task_of
from gems.data.target import TargetDataset
from gems.errors import ConfigError
from tests.helpers.processes import python
from tests.helpers.warm_python import REAL

SIZE = 12
READS: list[int] = []


class Tiles(TorchDataset[Any]):
    """Tile i has the value i everywhere and class i % 3."""

    def __init__(
        self, size: int = SIZE, channels: int = 3, side: int = 4, label: Any = None
    ) -> None:
        self.size = size
        self.shape = (channels, side, side)
        self.fixed = label

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        READS.append(index)
        return torch.full(self.shape, float(index)), index % 3 if self.fixed is None else self.fixed


class Named(Tiles):
    num_classes = 3

    def __init__(self, split: str) -> None:
        super().__init__(8 if split == "train" else 4)
        self.split = split
        self.class_counts = (3, 3, 2) if split == "train" else (2, 1, 1)

    def label(self, index: int) -> int:
        return index % 3


class Torchvision(Tiles):
    """As those of torchvision: `train`, `targets` and `target_transform`."""

    def __init__(self, train: bool = True, target_transform: Any = None) -> None:
        super().__init__(8 if train else 4)
        self.targets = [index % 3 for index in range(self.size)]
        self.target_transform = target_transform

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = super().__getitem__(index)
        return image, 0 if self.target_transform else label


class Random(Tiles):
    """Crops an image and its mask by all three generators."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        import random

        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        image = torch.full(self.shape, float(index)) + torch.tensor(draws)[:, None, None]
        return image, (image[0] * 1000).long() % 3


class Unrepeatable(Tiles):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return super().__getitem__(index)[0] + float(self.rng.random()), 0


class Collated(Tiles):
    @staticmethod
    def collate(pairs: list[Any]) -> tuple[Any, Any]:
        """Mix each sample with the one before it."""
        images = torch.stack([image for image, _ in pairs])
        return (images + images.roll(1, 0)) / 2, torch.tensor([label for _, label in pairs])


class Liar(Tiles):
    def label(self, index: int) -> int:
        return (index + 1) % 3


class Broken(Tiles):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index >= 0:
            raise OSError("slide 7 is truncated")
        return super().__getitem__(index)


class Stream:
    def __iter__(self) -> Any:
        return iter(())


class Dictionary(Tiles):
    def __getitem__(self, index: int) -> Any:
        return {"image": index}


def tensors(size: int = SIZE) -> TensorDataset:
    return TensorDataset(torch.zeros(size, 3, 4, 4), torch.arange(size) % 3)


def data_of(name: str, **changes: Any) -> DataConfig:
    fields = {
        "target": f"{__name__}.{name}",
        "height_px": 4,
        "width_px": 4,
        "num_classes": 3,
        **changes,
    }
    return DataConfig(**fields)


def opened(name: str, seed: int = 0, **changes: Any) -> TargetDataset:
    dataset = open_dataset(data_of(name, **changes), seed)
    assert isinstance(dataset, TargetDataset)
    return dataset


def refused(name: str, **changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_data(data_of(name, **changes))
    assert "\n" not in str(caught.value)
    return caught.value


def numbers(dataset: TargetDataset, split: Any) -> list[int]:
    return [int(dataset.image(split, index)[0, 0, 0]) for index in range(dataset.num_images(split))]


class TestTheSplit:
    def test_by_the_seed(self) -> None:
        first, again, other = (
            opened("Tiles", seed, train_samples=3, validation_samples=1) for seed in (0, 0, 3)
        )
        assert (first.num_train, first.num_validation) == (9, 3)
        assert sorted(numbers(first, "train") + numbers(first, "validation")) == list(range(SIZE))
        assert (
            numbers(first, "validation")
            == numbers(again, "validation")
            != numbers(other, "validation")
        )

    @pytest.mark.parametrize("name", ["Named", "Torchvision"])
    def test_by_the_argument_of_the_class(self, name: str) -> None:
        dataset = opened(name)
        assert (dataset.num_train, dataset.num_validation) == (8, 4)
        assert numbers(dataset, "validation") == [0, 1, 2, 3]
        assert dataset.class_counts("train") == (3, 3, 2) and dataset.class_counts(
            "validation"
        ) == (2, 1, 1)

    def test_an_argument_that_is_given_divides_nothing(self) -> None:
        dataset = opened(
            "Torchvision", kwargs={"train": False}, train_samples=1, validation_samples=1
        )
        assert (dataset.num_train, dataset.num_validation) == (2, 2)

    def test_by_two_sets_of_arguments(self) -> None:
        dataset = opened("Tiles", kwargs={"size": 7}, validation_kwargs={"size": 5})
        assert (dataset.num_train, dataset.num_validation) == (7, 5)
        named = opened("Named", kwargs={"split": "train"}, validation_kwargs={"split": "other"})
        assert (named.num_train, named.num_validation) == (8, 4)

    def test_by_two_targets(self) -> None:
        dataset = opened(
            "Tiles", validation_target=f"{__name__}.tensors", validation_kwargs={"size": 5}
        )
        assert (dataset.num_train, dataset.num_validation) == (SIZE, 5)
        assert dataset.image("validation", 4).sum() == 0

    @pytest.mark.parametrize("suffix", ["csv", "json"])
    def test_by_a_file(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"split.{suffix}"
        rows = [(0, "val"), (3, "train"), (5, "train"), (7, "test"), (8, "validation")]
        lists = {"train": [3, 5], "val": [0, 8], "test": [7]}
        path.write_text(
            json.dumps(lists)
            if suffix == "json"
            else "index,split\n" + "".join(f"{i},{s}\n" for i, s in rows)
        )
        dataset = opened("Tiles", split_path=str(path))
        assert (numbers(dataset, "train"), numbers(dataset, "validation")) == ([3, 5], [0, 8])

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("index,split\n0,train\n12,validation\n", "names sample 12, and there are 12"),
            ("index,split\n0,train\n0,validation\n", "names sample 0 twice"),
            ("index,split\n0,train\n", "has no sample for validation"),
            ("index,split\n0,train\n1,dev\n", "names a split 'dev'"),
            ("file\nx\n", "is of another form"),
        ],
    )
    def test_a_file_that_divides_otherwise(self, tmp_path: Path, text: str, words: str) -> None:
        path = tmp_path / "split.csv"
        path.write_text(text)
        error = refused("Tiles", split_path=str(path))
        assert error.key == "data.split_path" and words in str(error)


class TestLabels:
    @pytest.mark.parametrize("name", ["Named", "Torchvision"])
    def test_need_no_sample_where_the_dataset_has_them(self, name: str) -> None:
        dataset = opened(name)
        READS.clear()
        assert [dataset.label("train", index) for index in range(4)] == [0, 1, 2, 0]
        assert READS == []

    def test_are_read_with_the_sample_otherwise(self) -> None:
        dataset = opened("Tiles")
        READS.clear()
        assert dataset.label("train", 0) == READS[0] % 3 and len(READS) == 1
        assert sum(dataset.class_counts("validation")) == dataset.num_validation

    def test_are_not_those_of_targets_where_a_transform_changes_them(self) -> None:
        dataset = opened("Torchvision", kwargs={"target_transform": "any"})
        assert [dataset.label("train", index) for index in range(4)] == [0, 0, 0, 0]

    def test_a_sample_with_its_label_is_read_once(self) -> None:
        dataset = opened("Tiles")
        READS.clear()
        dataset.batch("train", np.array([[0, 0], [1, 0]]))
        assert len(READS) == 2

    @pytest.mark.parametrize(
        ("task", "value", "expected"),
        [
            ("multi_label", [1, 0, 1], np.array([1, 0, 1], np.float32)),
            ("regression", [0.5, -2, 7], np.array([0.5, -2, 7], np.float32)),
            ("segmentation", [[0, 1, 2, 9]] * 4, np.array([[0, 1, 2, -1]] * 4)),
        ],
    )
    def test_of_each_task(self, task: str, value: list[Any], expected: Any) -> None:
        dataset = opened("Tiles", task=task, kwargs={"label": value}, ignore_label=9)
        assert task_of(data_of("Tiles", task=task)) == task
        found = np.asarray(dataset.label("train", 0))
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize(
        ("task", "value", "key", "words"),
        [
            (
                "classification",
                3,
                "data.num_classes",
                "has label 3, and there are classes 0 to 2; set data.num_classes=4",
            ),
            ("classification", -1, "data.num_classes", "number them from 0"),
            ("classification", 0.5, "data.task", "a class is a whole number"),
            ("classification", [0, 1, 1], "data.task", "a label of shape (3,)"),
            ("multi_label", [0, 2, 0], "data.task", "other than 0 and 1"),
            ("regression", [0.0, float("nan"), 0.0], "data", "not finite"),
            ("segmentation", [[0] * 4] * 3, "data.task", "a label of shape (3, 4)"),
        ],
    )
    def test_that_are_refused(self, task: str, value: Any, key: str, words: str) -> None:
        error = refused("Tiles", task=task, kwargs={"label": value})
        assert error.key == key and words in str(error)


class TestRandomNumbers:
    def test_are_the_same_for_an_image_and_its_mask_and_differ_by_draw(self) -> None:
        dataset = opened("Random", task="segmentation")
        other = opened("Random", seed=1, task="segmentation")
        image = dataset.image("train", 2, 5)
        mask = dataset.label("train", 2, 5)
        np.testing.assert_array_equal((image[0] * 1000).astype(np.int64) % 3, mask)
        np.testing.assert_array_equal(image, dataset.image("train", 2, 5))
        for different in (dataset.image("train", 2, 6), other.image("train", 2, 5)):
            assert all((different[channel] != image[channel]).all() for channel in range(3))

    def test_of_the_process_are_left_as_they_were(self) -> None:
        import random

        def states() -> str:
            return repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))

        dataset = opened("Random", task="segmentation")
        before = states()
        dataset.image("train", 0)
        assert states() == before


def test_a_collate_of_its_own_sees_whole_samples_whatever_is_wanted() -> None:
    dataset = opened("Collated")
    samples = np.array([[0, 0], [4, 0]])
    images, labels = dataset.batch("train", samples)
    (only_images, none), (nothing, only_labels) = (
        dataset.batch("train", samples, wants, not wants) for wants in (1, 0)
    )
    assert none is nothing is None
    assert images is not None and labels is not None
    mean = (dataset.image("train", 0) + dataset.image("train", 4)) / 2
    np.testing.assert_array_equal(images, np.stack([mean, mean]))
    np.testing.assert_array_equal(images, only_images)
    np.testing.assert_array_equal(labels, only_labels)


def test_a_function_that_gives_one_and_its_arrays_are_not_shared() -> None:
    dataset = opened("tensors")
    images, _ = dataset.batch("train", np.array([[0, 0]]))
    assert images is not None
    images += 1
    assert dataset.image("train", 0).sum() == 0


@pytest.mark.parametrize(
    ("name", "changes", "key", "words"),
    [
        ("Nowhere", {}, "data.target", "nothing named Nowhere"),
        ("Tiles", {"kwargs": {"sise": 3}}, "data.kwargs", "it takes (size=12, channels=3"),
        (
            "Tiles",
            {"kwargs": {"side": 6}},
            "data.target",
            (
                "has shape (3, 6, 6), and the keys say (3, 4, 4); set data.channels=3"
                " data.height_px=6 data.width_px=6"
            ),
        ),
        ("Named", {"num_classes": 4}, "data.num_classes", "set data.num_classes=3"),
        ("Tiles", {"kwargs": {"size": 0}}, "data.validation_samples", "leaves none of 0"),
        ("Unrepeatable", {}, "data.target", "differs when it is read again"),
        ("Liar", {}, "data.target", "give different labels"),
        ("Broken", {}, "data.target", "test_target.py:"),
        ("Stream", {}, "data.target", "must be a map-style dataset"),
        ("Dictionary", {}, "data.target", "is of type dict; must be a pair (sample, label)"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], key: str, words: str) -> None:
    error = refused(name, **changes)
    assert error.key == key and words in str(error)


def test_keys_of_a_target_without_one() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.kwargs=.*is not read by data=synthetic; leave it out, or use data\.target=",
    ):
        check_data(DataConfig(kwargs={"size": 3}))


def test_overrides_of_hydra() -> None:
    words = [
        "data._target_=tests.data.test_target.Tiles",
        "data.kwargs.size=9",
        "data.validation_kwargs.size=5",
    ]
    size = ["data.kwargs.side=32", "data.validation_kwargs.side=32"]
    spec = compose([*words, *size, "data.num_classes=3"])
    assert spec.data.kwargs == {"size": 9, "side": 32} and spec.data.validation_kwargs["size"] == 5
    assert (
        spec.data.name == "Tiles" == resolve_data(spec.data).name and kind_of(spec.data) == "images"
    )


@pytest.mark.usefixtures("warm")
def test_the_login_node_asks_a_child_once(tmp_path: Path) -> None:
    """No torch in this process; the answer is kept until the code or the files of its arguments change."""
    code = "import torch\nopen('imports', 'a').write('x')\nprint('noise')\n"
    code += "class Own(torch.utils.data.Dataset):\n    def __init__(self, root): pass\n"
    code += (
        "    def __len__(self): return 8\n    def __getitem__(self, i): return torch.zeros(3, 4,"
        " 4), i % 5\n"
    )
    (tmp_path / "own_tiles.py").write_text(code)
    (tmp_path / "tiles").mkdir()
    program = (
        f"import sys; sys.executable = {sys.executable!r}\n"
        "from gems.config.schema import *; from gems.data import *; from gems.errors"
        " import ConfigError\nfrom dataclasses import replace\ndata ="
        " DataConfig(target='own_tiles.Own', kwargs={'root': 'tiles'}, height_px=4, width_px=4,"
        " num_classes=5)\ncheck_data(data)\ntry:\n    check_data(replace(data,"
        " num_classes=2))\nexcept ConfigError as error:\n    print(error)\nprint('torch' in"
        " sys.modules)"
    )
    found = []
    for _ in range(2):
        ended = python("-c", program, cwd=tmp_path, check=True, executable=REAL)
        found.append((ended.stdout.splitlines(), len((tmp_path / "imports").read_text())))
    assert [lines[-1] for lines, _ in found] == ["False", "False"]
    assert all("data.num_classes=2" in lines[0] and "sample" in lines[0] for lines, _ in found)
    assert [count for _, count in found] == [2, 3]  # what is refused is asked again
