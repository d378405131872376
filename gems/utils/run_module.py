"""The start of this toolkit's own processes.

`python -P .../run_module.py MODULE WORD...` runs a module. The option -P keeps the current folder
out of `sys.path`, because a user's folder may be called jobs or analysis. The module is taken from
the code that contains this file.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

INSTALLED = ("-P", "-m")  # runs a module of the interpreter's own packages
_PROGRAM = Path(__file__).resolve()
# The words between an interpreter and the name of a module of this code. A code archive is in
# PYTHONPATH.
RUN_MODULE = ("-P", str(_PROGRAM)) if _PROGRAM.is_file() else INSTALLED


def main() -> None:
    """Run the module named on the command line."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -P run_module.py MODULE WORD...")
    root = str(_PROGRAM.parents[2])
    if root not in map(os.path.realpath, sys.path):
        sys.path.insert(0, root)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
