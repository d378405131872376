"""The first program of a code snapshot.

`python code.zip MODULE WORD...` runs a module of it, as `python -m` would.
Python puts the archive in front of everything it may import from, so neither the folder that a job
is started in nor PYTHONPATH can bring in other code of that name. What the module starts by `python
-m` comes from the archive too.
"""

from __future__ import annotations

import functools
import linecache
import os
import runpy
import sys
import zipimport


def main() -> None:
    """Run the module that the command line names."""
    if len(sys.argv) < 2:
        sys.exit("usage: python code.zip MODULE WORD...")
    archive = os.path.abspath(sys.path[0])
    sys.path[0] = archive
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in before if folder and folder != archive]
    os.environ["PYTHONPATH"] = os.pathsep.join([archive, *others])
    os.environ["PYTHONSAFEPATH"] = "1"  # `python -m` would look in the current folder first
    module = sys.argv[1]
    del sys.argv[1]
    _show_lines_of(module, archive)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _show_lines_of(module: str, archive: str) -> None:
    """Let tracebacks show the lines of the module that runs.

    By its name, `__main__`, they would find this file's.
    """
    for name in (module, f"{module}.__main__"):
        path = f"{name.replace('.', '/')}.py"
        linecache.cache[f"code.zip/{path}"] = (functools.partial(_source, archive, path),)


def _source(archive: str, path: str) -> str:
    return zipimport.zipimporter(archive).get_data(path).decode()


if __name__ == "__main__":
    main()
