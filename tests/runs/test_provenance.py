"""gems.runs.provenance: what is kept of the code and the environment, and what is not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gems.config.schema import RunSpec
from gems.runs import provenance
from gems.runs.code_archive import hash_of
from gems.runs.prepare import prepare
from gems.runs.provenance import check_code, code_diff, commit, environment, packages, write_bundle
from gems.utils.atomic_io import read_json


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a little code."""
    root = tmp_path / "it's code"
    for package in ("gems", "jobs", "analysis", "conf"):
        (root / package).mkdir(parents=True)
        (root / package / "one.py").write_text("before\n")
    (root / "README").write_text("before\n")
    (root / ".gitignore").write_text("ignored.py\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=one")
    return root


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, timeout=60)


def test_the_difference_makes_the_code_again(checkout: Path, tmp_path: Path) -> None:
    assert code_diff(checkout) == b""
    (checkout / "gems" / "one.py").write_text("after\n")
    (checkout / "jobs" / "new file.py").write_text("new\n")
    (checkout / "gems" / "ignored.py").write_text("ignored\n")
    (checkout / "README").write_text("of no run's business\n")
    diff = code_diff(checkout)
    assert diff is not None and b"business" not in diff and b"ignored" not in diff
    again = tmp_path / "again"
    subprocess.run(["git", "clone", "--quiet", str(checkout), str(again)], check=True, timeout=60)
    (tmp_path / "diff").write_bytes(diff)
    git(again, "apply", str(tmp_path / "diff"))
    assert (again / "gems" / "one.py").read_text() == "after\n"
    assert (again / "jobs" / "new file.py").read_text() == "new\n"


def test_a_long_difference_is_cut_and_says_so(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "MAX_DIFF_BYTES", 200)
    (checkout / "gems" / "one.py").write_text("after\n" * 1000)
    diff = code_diff(checkout)
    assert (
        diff is not None
        and len(diff) < 300
        and diff.endswith(b"\n# cut here: the code itself is in code.zip\n")
    )


def test_a_folder_inside_of_another_checkout_is_none(checkout: Path) -> None:
    """As are site packages of an environment that lies in somebody's project."""
    inside = checkout / "env"
    inside.mkdir()
    assert code_diff(inside) is None and commit(inside) == "unknown"
    assert len(commit(checkout)) == 40
    (checkout / "gems" / "one.py").write_text("after\n")
    assert commit(checkout).endswith("-dirty")


def test_secrets_and_people_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        "SLURM_JOB_ID": "7",
        "UCX_TLS": "all",
        "GEMS_X": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "MPICH_GPU_SUPPORT_ENABLED": "1",
    }
    left = {
        "SLURM_JWT": "s",
        "SLURM_JOB_USER": "me",
        "SLURM_JOB_UID": "1",
        "AWS_SECRET_ACCESS_KEY": "s",
        "HF_TOKEN": "s",
        "GEMS_API_TOKEN": "s",
        "NCCL_PASSWORD": "s",
        "SSH_AUTH_SOCK": "s",
        "DATABASE_URL": "s",
        "MY_SLURM_X": "s",
    }
    for name, value in (kept | left).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOADEDMODULES", "gcc/13:openmpi")
    found = environment()
    assert found["modules"] == ["gcc/13", "openmpi"]
    assert (
        found["variables"].items() >= kept.items() and not found["variables"].keys() & left.keys()
    )


def test_packages_are_a_requirements_file() -> None:
    lines = packages().splitlines()
    assert lines == sorted(set(lines), key=str.lower) and any(
        line.startswith("numpy==") for line in lines
    )
    assert all(line.count("==") == 1 and " " not in line for line in lines)


def test_a_prepared_run_says_which_code_it_is_of(tmp_path: Path) -> None:
    folder = prepare(RunSpec(name="try", runs_dir=str(tmp_path)))
    summary = read_json(folder.provenance_json)
    assert summary["code_blake2b"] == hash_of(folder.code_zip)
    assert summary["run_yaml_blake2b"] == hash_of(folder.run_yaml)
    assert "prepared" in read_json(folder.provenance / "environment.json")
    assert {path.name for path in folder.provenance.iterdir()} - {"code.diff"} == {
        "code.zip",
        "packages.txt",
        "environment.json",
    }
    assert check_code(folder.provenance, summary) is None
    folder.code_zip.unlink()
    assert "cannot be read" in str(check_code(folder.provenance, summary))
    folder.code_zip.write_bytes(b"other")
    assert "is not what was prepared" in str(check_code(folder.provenance, summary))


def test_the_users_own_network_is_noted_by_a_hash(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Net: pass\n")
    spec = RunSpec()
    spec.model.target, spec.model.path = "mine.Net", str(tmp_path)
    one = write_bundle(tmp_path / "a", spec)["model_code_sha256"]
    assert isinstance(one, str) and len(one) == 16
    assert "model_code_sha256" not in write_bundle(tmp_path / "b", RunSpec())
    assert json.loads((tmp_path / "a" / "environment.json").read_text())["prepared"]["python"]
