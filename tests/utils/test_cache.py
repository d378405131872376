"""Results that took long are made once, and a cache that fails is no failure."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

import gems
from gems.utils.cache import cache_folder, cached


class Maker:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> dict[str, int]:
        self.asked += 1
        return {"asked": self.asked}


def test_made_once_for_each_key_and_kind(tmp_path: Path) -> None:
    make = Maker()
    first = [cached(str(tmp_path), kind, key, make) for kind in "ab" for key in "xy"]
    again = [cached(str(tmp_path), kind, key, make) for kind in "ab" for key in "xy"]
    assert first == again == [{"asked": number} for number in (1, 2, 3, 4)]
    assert len(list(tmp_path.iterdir())) == 4


def test_another_version_makes_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()
    cached(str(tmp_path), "a", "x", make)
    monkeypatch.setattr(gems, "__version__", "another")
    cached(str(tmp_path), "a", "x", make)
    assert make.asked == 2


@pytest.mark.parametrize("damage", [b"{", b"[1]", b"\xff"])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    make = Maker()
    cached(str(tmp_path), "a", "x", make)
    next(tmp_path.iterdir()).write_bytes(damage)
    assert cached(str(tmp_path), "a", "x", make) == {"asked": 2}
    assert cached(str(tmp_path), "a", "x", make) == {"asked": 2}


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    make = Maker()
    assert cached(str(tmp_path / "file" / "below"), "a", "x", make) == {"asked": 1}
    assert cached(str(tmp_path / "file" / "below"), "a", "x", make) == {"asked": 2}


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMS_CACHE_DIR", str(tmp_path / "ours"))
    assert cache_folder(str(tmp_path)) == tmp_path
    assert cache_folder() == tmp_path / "ours"
    monkeypatch.delenv("GEMS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "gems"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "gems"


def test_a_user_without_a_home_has_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("GEMS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"gems-cache-{os.getuid()}"
