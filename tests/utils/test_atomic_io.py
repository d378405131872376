"""Files that appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gems.utils.atomic_io import atomic_write, read_json, reserve, write_json
from tests.helpers.small_disk import SmallDisk, small_disk


def test_an_error_leaves_the_old_file_and_no_part_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as partial:
        partial.write_text("new")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("sync", [False, True])
def test_the_file_appears_at_the_end(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "file"
    with atomic_write(path, sync=sync) as partial:
        partial.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_link_to_the_same_file_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("shared")
    with atomic_write(path) as partial:
        os.link(path, partial)
    assert list(tmp_path.iterdir()) == [path]


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.json"
    assert read_json(path) == {}
    write_json(path, {"a": [1, None]})
    assert read_json(path) == {"a": [1, None]}
    path.write_text("[1]")
    assert read_json(path) == {}
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="too deep"):
        read_json(path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 64) as disk:
        yield disk


def test_a_file_with_a_reserve_is_replaced_on_a_full_disk_again_and_again(disk: SmallDisk) -> None:
    path = disk.path / "a.json"
    other = disk.path / "b.json"
    write_json(path, {"x": 0})
    write_json(other, {"x": 0})
    reserve(path)
    disk.fill()
    for x in range(1, 6):
        write_json(path, {"x": x, "more": "m" * 500 * x})
        assert read_json(path)["x"] == x
    with pytest.raises(OSError, match=r"No space left on device: '.*b\.json'"):
        write_json(other, {"x": 1, "more": "m" * 5000})
    assert read_json(other) == {"x": 0}
    assert sorted(entry.name for entry in disk.path.iterdir()) == [
        ".reserve",
        "a.json",
        "b.json",
        "filler",
    ]
