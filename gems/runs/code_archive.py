"""The code snapshot: an archive of this code, which a job runs even if the files change later.

A rank opens one file instead of hundreds, which matters when a thousand ranks start at once, and
byte-code beside each source saves them compiling it. The archive of the same code and version of
Python is the same to the byte, so runs of the same code share one file by hard links.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import marshal
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import gems
from gems.utils.atomic_io import atomic_write
from gems.utils.cache import cache_folder

CODE_ZIP = "code.zip"
PACKAGES = ("gems", "jobs", "analysis", "conf")
SUFFIXES = (".py", ".yaml", ".html", ".json", ".csv", ".txt", ".js", ".css", ".sh", ".typed")
MAIN = "gems/runs/code_archive_main.py"  # the archive's own __main__.py
# PEP 552: byte-code that is never compared with its source
UNCHECKED_HASH = (1).to_bytes(4, "little")
# a version of marshal: later ones record reference counts, which differ between processes
WITHOUT_REFERENCES = 2
EPOCH = (1980, 1, 1, 0, 0, 0)
MODE = 0o644


def code_root() -> Path:
    """Return the folder of our packages, or the archive that this process runs from."""
    return Path(gems.__file__).resolve().parents[1]


def from_snapshot(code_zip: Path, module: str) -> list[str]:
    """Return the arguments of a Python interpreter that runs a module from a snapshot."""
    return [str(code_zip), module]


def take_snapshot(
    target: Path, cache_dir: str | None = None, own: Iterable[tuple[str, bytes]] = ()
) -> str:
    """Write an archive of this code and the user's `own` files, and return its BLAKE2b hash.

    If the cache has an archive of the same code, link to it, or copy it if the file system has no
    links. Skip files of the user whose names clash with this toolkit's.

    Raises:
        OSError: The target cannot be written.
    """
    root = code_root()
    if root.is_file():  # we run from a snapshot; so do the runs that we prepare
        share(root, target)
        return hash_of(target)
    sources = list(_sources(root))
    sources += sorted(
        (name, data)
        for name, data in own
        if name.partition("/")[0] not in (*PACKAGES, "__main__.py")
    )
    cached = cache_folder(cache_dir).absolute() / "code" / f"{_key(sources)}.zip"
    try:
        if not zipfile.is_zipfile(cached):
            cached.parent.mkdir(parents=True, exist_ok=True)
            _write(cached, _archive(sources))
        share(cached, target)
    except OSError:  # the cache cannot be written
        _write(target, _archive(sources))
    return hash_of(target)


def hash_of(path: Path) -> str:
    """Return the BLAKE2b hash of a file as 64 hexadecimal digits, like `b2sum --length=256`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _sources(root: Path) -> Iterator[tuple[str, bytes]]:
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in SUFFIXES and "__pycache__" not in path.parts and path.is_file():
                yield path.relative_to(root).as_posix(), path.read_bytes()


def _key(sources: Sequence[tuple[str, bytes]]) -> str:
    digest = hashlib.blake2b(importlib.util.MAGIC_NUMBER, digest_size=16)
    for name, data in sources:
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _archive(sources: Sequence[tuple[str, bytes]]) -> bytes:
    """Return the bytes of the archive, uncompressed: compressed bytes depend on zlib's version."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sources:
            for entry in (name, "__main__.py") if name == MAIN else (name,):
                contents = {entry: data}
                # the file name is relative to the archive, so that no file of a job shadows it
                if entry.endswith(".py"):
                    # a user's file that is never imported may be invalid
                    with contextlib.suppress(SyntaxError, ValueError):
                        code = compile(
                            data, f"{CODE_ZIP}/{entry}", "exec", dont_inherit=True, optimize=0
                        )
                        header = (
                            importlib.util.MAGIC_NUMBER
                            + UNCHECKED_HASH
                            + importlib.util.source_hash(data)
                        )
                        contents[f"{entry}c"] = header + marshal.dumps(code, WITHOUT_REFERENCES)
                for inner, content in contents.items():
                    info = zipfile.ZipInfo(inner, EPOCH)
                    info.external_attr = MODE << 16
                    info.create_system = 3  # Unix, on every system
                    archive.writestr(info, content)
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    with atomic_write(path) as partial:
        partial.write_bytes(data)
        partial.chmod(0o444)  # other runs share it


def share(source: Path, target: Path) -> None:
    """Put an immutable file at `target` too, by a hard link, or as a copy if links fail."""
    with atomic_write(target) as partial:
        try:
            os.link(source, partial)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, partial)
