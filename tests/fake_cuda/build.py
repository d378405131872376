"""Compile the extension of the fake device, once for each version of its source and of torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAME = "fake_cuda_device"
# headers of single operators halve the time of a source that uses a few
FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-w",
    "-DAT_PER_OPERATOR_HEADERS",
    f"-DTORCH_EXTENSION_NAME={NAME}",
)


def torch_folder() -> Path:
    """Return torch's folder without importing it."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def why_not() -> str | None:
    """Return why there can be no fake device here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "the fake device needs torch"
    if (
        "+cpu" not in (version := importlib.metadata.version("torch"))
        and (torch_folder() / "lib/libtorch_cuda.so").exists()
    ):
        return f"the fake device needs torch's build for processors, not {version}"
    if shutil.which("g++") is None:
        return "the fake device needs g++"
    return None


def library() -> Path:
    """Return the compiled extension, from the cache if its sources have not changed."""
    sources = sorted(HERE.glob("*.cpp"))
    headers = sorted(HERE.glob("*.h"))
    text = b"".join(path.read_bytes() for path in (*sources, *headers))
    versions = f"{importlib.metadata.version('torch')} {sys.version} {FLAGS}"
    key = hashlib.sha256(text + versions.encode()).hexdigest()[:16]
    base = (
        os.environ.get("GEMS_FAKE_CUDA_CACHE") or HERE.parent.parent / ".pytest_cache" / "fake_cuda"
    )
    made = Path(base) / key / f"{NAME}.so"
    made.parent.mkdir(parents=True, exist_ok=True)
    with (made.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait for the first, who compiles
        if not made.exists():
            _compile(sources, made)
    return made


def _compile(sources: list[Path], made: Path) -> None:
    torch = torch_folder()
    folders = [
        torch / "include",
        torch / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    ]
    includes = [f"-I{folder}" for folder in folders]
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:  # moved when whole
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, target: Path) -> None:
            _run(["g++", *FLAGS, *includes, "-c", str(source), "-o", str(target)])

        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(compile_one, sources, objects))
        library = Path(scratch) / made.name
        names = ("c10", "torch_cpu", "torch", "torch_python")
        links = [
            f"-L{torch / 'lib'}",
            f"-Wl,-rpath,{torch / 'lib'}",
            *(f"-l{name}" for name in names),
        ]
        _run(["g++", "-shared", *map(str, objects), *links, "-o", str(library)])
        library.replace(made)


def _run(argv: list[str]) -> None:
    ended = subprocess.run(argv, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"the fake device does not compile:\n{ended.stderr[:8000]}")
