"""Reports on stderr, and what libraries write to stdout from C sent there.

A command's JSON object stays alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

from gems.utils.tables import printable


def report(program: str, text: str) -> None:
    """Print a line on stderr at once: `jobs: text`."""
    print(f"{program}: {printable(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what the process writes to file descriptor 1 meanwhile, with what C's buffers hold at the end.

    HiGHS prints lines of its own for some mixed-integer programmes, whatever its options say.
    """
    c_library = ctypes.CDLL(None)
    sys.stdout.flush()
    c_library.fflush(None)
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        c_library.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
