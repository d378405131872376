"""Test gems.runs.code_archive.

It is one archive of the code, the same to the byte, that everything a job starts is imported from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gems.runs import code_archive as snapshot
from gems.runs.code_archive import PACKAGES, from_snapshot, hash_of, take_snapshot
from gems.utils.targets import source_of, sources_of
from tests.helpers.processes import python

ROOT = Path(__file__).resolve().parents[2]
WHERE = """
import json, os, subprocess, sys
import gems, jobs.batch, gems.engine.affinity
child = subprocess.run([sys.executable, "-m", "gems.where_child"], capture_output=True, text=True)
print(json.dumps([gems.__file__, jobs.batch.__file__, sys.argv, __name__, child.stdout, child.stderr]))
"""
FAILING = """
import traceback
try:
    raise ValueError('before')
except ValueError:
    traceback.print_exc()
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of the code as it is."""
    target = tmp_path_factory.mktemp("code of a run") / "code.zip"
    take_snapshot(target, str(tmp_path_factory.mktemp("cache")))
    return target


def run(
    archive: Path, *words: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a module from an archive, with nothing of this repository in the environment."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return python(*from_snapshot(archive, words[0]), *words[1:], cwd=cwd, env=base | environment)


def copy_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> Path:
    """Make a small tree of code that snapshots are taken of, of files by their paths."""
    root = tmp_path / "tree"
    for name in (*PACKAGES, "gems/engine", "gems/runs"):
        (root / name).mkdir(parents=True)
    (root / snapshot.MAIN).write_text((ROOT / snapshot.MAIN).read_text())
    for name, text in {"gems/__init__.py": "", **files}.items():
        (root / name).write_text(text)
    monkeypatch.setattr(snapshot, "code_root", lambda: root)
    return root


def test_it_holds_all_that_the_packages_hold(archive: Path) -> None:
    """What git knows, and not what this test's own list of suffixes says."""
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("no checkout")
    held = set(zipfile.ZipFile(archive).namelist())
    assert [
        name for name in listed.stdout.splitlines() if name not in held and (ROOT / name).exists()
    ] == []


def test_no_module_need_be_compiled(archive: Path) -> None:
    """PEP 552: the byte-code says itself that nobody shall compare it with the source."""
    with zipfile.ZipFile(archive) as held:
        names = set(held.namelist())
        sources = [name for name in names if name.endswith(".py")]
        assert len(sources) > 300 and not [name for name in sources if f"{name}c" not in names]
        for name in sources[:20]:
            head = held.read(f"{name}c")[:16]
            assert head == importlib.util.MAGIC_NUMBER + b"\1\0\0\0" + importlib.util.source_hash(
                held.read(name)
            )


def test_the_same_code_gives_the_same_bytes(archive: Path, tmp_path: Path) -> None:
    """In a process with other hashes, which sets and interned words would show."""
    target = tmp_path / "other.zip"
    code = (
        "import sys, pathlib; from gems.runs.code_archive import take_snapshot; "
        "take_snapshot(pathlib.Path(sys.argv[1]), sys.argv[2])"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(target), str(tmp_path / "cache")],
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        check=True,
        timeout=120,
    )
    assert target.read_bytes() == archive.read_bytes()
    assert hash_of(target) == hashlib.blake2b(archive.read_bytes(), digest_size=32).hexdigest()


def test_a_module_and_its_children_come_from_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the current folder, where there is other code of that name, nor PYTHONPATH stands before it."""
    empty = (
        "jobs/__init__.py",
        "jobs/batch.py",
        "gems/engine/__init__.py",
        "gems/engine/affinity.py",
    )
    asking = {"gems/where.py": WHERE, "gems/where_child.py": "import gems; print(gems.__file__)"}
    copy_of(tmp_path, monkeypatch, dict.fromkeys(empty, "") | asking)
    archive = tmp_path / "run" / "code.zip"
    archive.parent.mkdir()
    take_snapshot(archive, str(tmp_path / "cache"))
    away = tmp_path / "away"
    (away / "gems").mkdir(parents=True)
    (away / "gems" / "__init__.py").write_text("raise SystemExit('the wrong code')")
    said = run(archive, "gems.where", "a b", "$(touch owned)", cwd=away, PYTHONPATH=str(away))
    assert said.returncode == 0, said.stderr
    gems, jobs, argv, name, child, wrong = json.loads(said.stdout)
    assert gems == f"{archive}/gems/__init__.pyc" and jobs == f"{archive}/jobs/batch.pyc"
    assert argv == [f"{archive}/gems/where.pyc", "a b", "$(touch owned)"] and name == "__main__"
    assert child.strip() == gems, wrong


def test_edits_change_nothing_that_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy_of(tmp_path, monkeypatch, {"gems/say.py": "print('before')"})
    one = tmp_path / "one.zip"
    other = tmp_path / "other.zip"
    first = take_snapshot(one, str(tmp_path / "cache"))
    (root / "gems" / "say.py").write_text("print('after')")
    assert take_snapshot(other, str(tmp_path / "cache")) != first
    assert (run(one, "gems.say", cwd=root).stdout, run(other, "gems.say", cwd=root).stdout) == (
        "before\n",
        "after\n",
    )
    assert hash_of(one) == first


def test_runs_of_the_same_code_share_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_of(tmp_path, monkeypatch, {})
    targets = [tmp_path / f"{number}.zip" for number in range(3)]
    for target in (*targets, targets[0]):
        take_snapshot(target, str(tmp_path / "cache"))
    assert len({target.stat().st_ino for target in targets}) == 1
    assert targets[0].stat().st_nlink == 4
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "0.zip",
        "1.zip",
        "2.zip",
    ]


@pytest.mark.parametrize("trouble", ["no links", "no cache", "damaged cache"])
def test_where_the_cache_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    copy_of(tmp_path, monkeypatch, {"gems/say.py": "print('said')"})
    cache = tmp_path / "cache"
    target = tmp_path / "code.zip"
    if trouble == "no links":
        monkeypatch.setattr(os, "link", refuse)
    elif trouble == "no cache":
        cache.write_text("a file")
    else:
        take_snapshot(target, str(cache))
        (kept,) = (cache / "code").iterdir()
        kept.chmod(0o644)
        kept.write_bytes(kept.read_bytes()[:100])
    digest = take_snapshot(target, str(cache))
    assert run(target, "gems.say", cwd=tmp_path).stdout == "said\n" and digest == hash_of(target)


def refuse(*paths: object) -> None:
    raise OSError("no links here")


def test_from_a_snapshot_the_same_snapshot_is_taken(archive: Path, tmp_path: Path) -> None:
    """A job that submits another one hands on what it runs itself."""
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); from gems.runs.code_archive import"
        " take_snapshot; print(take_snapshot(pathlib.Path(sys.argv[2])))"
    )
    said = python(
        "-P",
        "-c",
        code,
        str(archive),
        str(tmp_path / "code.zip"),
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=True,
    )
    assert said.stdout.strip() == hash_of(archive) == hash_of(tmp_path / "code.zip")


@pytest.mark.parametrize(
    ("module", "words", "code", "text"),
    [
        ("gems.engine.run", (), 2, "usage: python -m gems.engine.run RUN_FOLDER"),
        ("gems.launch.mpich_cleanup", (), 0, ""),
        ("submitit.core._submit", (), 2, "usage: "),
        ("analysis", ("collect", "nowhere"), 2, "nowhere"),
        ("gems.runs.simulated_run", ("nowhere",), 2, "nowhere"),
    ],
)
def test_every_program_of_a_job_starts_from_it(
    archive: Path, tmp_path: Path, module: str, words: tuple[str, ...], code: int, text: str
) -> None:
    ended = run(archive, module, *words, cwd=tmp_path)
    assert ended.returncode == code and text in ended.stderr + ended.stdout, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr


def test_a_traceback_shows_the_lines_of_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not those of a file that was edited since, which lies where the job was started."""
    root = copy_of(tmp_path, monkeypatch, {"gems/fail.py": FAILING})
    take_snapshot(tmp_path / "code.zip", str(tmp_path / "cache"))
    (root / "gems" / "fail.py").write_text("# after\n" * 9)
    said = run(tmp_path / "code.zip", "gems.fail", cwd=root).stderr
    assert (
        "code.zip/gems/fail.py" in said
        and "raise ValueError('before')" in said
        and "after" not in said
    )


def test_code_of_the_users_is_in_the_archive_and_comes_from_it(tmp_path: Path) -> None:
    """A file that is changed after submission changes nothing that a job runs."""
    package = tmp_path / "theirs" / "my_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "net.py").write_text("def answer():\n    return 'as submitted'\n")
    (package / "broken.py").write_text("this is no Python")
    path = str(package.parent)
    own = dict(sources_of("my_package.net.answer", path))
    assert sorted(own) == ["my_package/__init__.py", "my_package/broken.py", "my_package/net.py"]
    target = tmp_path / "code.zip"
    take_snapshot(target, str(tmp_path / "cache"), own.items())
    before = source_of("my_package.net.answer", path)
    (package / "net.py").write_text("def answer():\n    return 'changed later'\n")
    (tmp_path / "ask.py").write_text(
        "from gems.utils.targets import load_target, source_of\n"
        f"print(load_target('model.target', 'my_package.net.answer', {path!r})())\n"
        f"print(source_of('my_package.net.answer', {path!r}))\n"
    )
    said = run(target, "ask", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert said.stdout.split("\n")[:2] == ["as submitted", before], said.stderr
    source_of.cache_clear()
    assert source_of("my_package.net.answer", path) != before


def test_a_package_with_one_of_our_names_is_left_out(tmp_path: Path) -> None:
    target = tmp_path / "code.zip"
    take_snapshot(target, str(tmp_path / "cache"), [("analysis/theirs.py", b""), ("mine.py", b"")])
    with zipfile.ZipFile(target) as archive:
        assert "analysis/theirs.py" not in archive.namelist() and "mine.py" in archive.namelist()
