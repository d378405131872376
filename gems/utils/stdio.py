"""Reports on stderr, and redirection of what C libraries write to stdout.

So stdout contains only the JSON object of a command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

from gems.utils.tables import printable


def report(program: str, text: str) -> None:
    """Print a line on stderr immediately, as in `jobs: text`."""
    print(f"{program}: {printable(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send the process's output to file descriptor 1 to stderr, including C's buffers at the end.

    HiGHS prints lines for some mixed-integer programs, whatever its options are.
    """
    c_library = ctypes.CDLL(None)
    sys.stdout.flush()
    c_library.fflush(None)
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        c_library.fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
