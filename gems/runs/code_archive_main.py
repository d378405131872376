"""The first program of a code snapshot.

`python code.zip MODULE WORD...` runs a module of the archive, as `python -m` would.
The archive is first in the import path, so neither the current folder nor PYTHONPATH can replace
its code. Processes that the module starts by `python -m` use the archive too.
"""

from __future__ import annotations

import functools
import linecache
import os
import runpy
import sys
import zipimport


def main() -> None:
    """Run the module named on the command line."""
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
    # a module that runs as __main__ would get the source lines of this file in tracebacks
    for name in (module, f"{module}.__main__"):
        path = f"{name.replace('.', '/')}.py"
        linecache.cache[f"code.zip/{path}"] = (functools.partial(_source, archive, path),)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _source(archive: str, path: str) -> str:
    return zipimport.zipimporter(archive).get_data(path).decode()


if __name__ == "__main__":
    main()
