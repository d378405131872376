"""The registry of data sources, its checks, and that none of it needs torch."""

from __future__ import annotations

import numpy as np
import pytest

from gems.config.schema import DataConfig
from gems.data import DATASETS, Dataset, Image, Source, Split, check_data, open_dataset
from gems.errors import ConfigError
from tests.helpers.processes import python


class Ramps(Dataset):
    """Images whose every pixel is their index."""

    def _pixels(self, split: Split, index: int) -> Image:
        return np.full(self.shape, index, dtype=np.float32)

    def _label(self, split: Split, index: int) -> int:
        return 0


def test_an_unknown_source_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        open_dataset(DataConfig(name="tisue"), 0)
    assert caught.value.key == "data.name"
    assert "did you mean tissue" in str(caught.value)


@pytest.mark.parametrize(
    "key",
    ["height_px", "width_px", "channels", "train_samples", "validation_samples", "num_classes"],
)
@pytest.mark.parametrize("name", ["synthetic", "tissue", "folder"])
def test_counts_below_the_least_are_refused(name: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data(DataConfig(**{"name": name, key: 0}))  # type: ignore[arg-type]
    assert caught.value.key == f"data.{key}"


def test_prefetching_may_be_switched_off_but_not_negative() -> None:
    check_data(DataConfig(prefetch_steps=0))
    with pytest.raises(ConfigError, match="prefetch_steps=-1"):
        check_data(DataConfig(prefetch_steps=-1))


def test_a_source_may_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DATASETS.entries, "ramps", raising=False)
    source = Source(open=lambda data, seed: Ramps((1, 2, 2), 2, 4, 4, seed, data.augment))
    DATASETS.register("ramps", source)
    DATASETS.register("ramps", source)
    dataset = open_dataset(DataConfig(name="ramps"), 0)
    assert dataset.image("train", 3).tolist() == [[[3, 3], [3, 3]]]
    assert dataset.class_counts("train") == (4, 0)
    with pytest.raises(ValueError, match="registered already"):
        DATASETS.register("tissue", source)


def test_reading_images_loads_no_torch() -> None:
    program = (
        "import sys; from gems.config.schema import *; from gems.data import *; import"
        " gems.data.micro_batch_reader; [check_data(DataConfig(name=name)) for name in ('tissue',"
        " 'synthetic')]; print('skimage' in sys.modules, 'PIL' in sys.modules);"
        " open_dataset(DataConfig(name='tissue'), 0).image('train', 0); print('torch' in"
        " sys.modules)"
    )
    done = python("-c", program, check=True)
    assert done.stdout.split() == ["False", "False", "False"]
