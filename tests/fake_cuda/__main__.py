"""Run a module or a program on the fake device: `python -m tests.fake_cuda -m gems simulate ...`."""

from __future__ import annotations

import atexit
import runpy
import sys

from gems.utils.run_module import RUN_MODULE
from tests.fake_cuda.children import WITHOUT, report
from tests.fake_cuda.load import install


def main(argv: list[str]) -> None:
    """Run what follows `python` on a command line: -m MODULE, run_module.py MODULE or -c PROGRAM."""
    while argv[0] in ("-u", "-P"):
        argv = argv[1:]
    if argv[0] == RUN_MODULE[-1]:
        argv = ["-m", *argv[1:]]
    flag, target, *rest = argv
    if flag == "-m" and target.split(".")[0] in WITHOUT:
        install_executable_only()
    else:
        native = install()
        what = " ".join(argv[1:3])
        atexit.register(lambda: report(what, native.counts(), native.races()))
    if flag == "-m":
        sys.argv = [target, *rest]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        exec(compile(target, "<string>", "exec"), {"__name__": "__main__"})


def install_executable_only() -> None:
    """Give the device to the children of a process that needs none."""
    from tests.fake_cuda.build import library
    from tests.fake_cuda.children import take_over

    take_over(library().parent)


if __name__ == "__main__":
    main(sys.argv[1:])
