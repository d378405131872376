"""A Python whose processes are forked from one that has imported everything: they start in 0.1 s.

`python` in the folder of `warm_python` is a client of `python -m tests.helpers.warm_python FOLDER`.
It sends its words, environment, folder and open files, passes signals on, and ends as the forked
process ends. Words that a fork cannot serve (other options and packages, an archive in PYTHONPATH)
start an ordinary Python. Beside it are mpiexec and the commands of an installation.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import marshal
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REAL = sys.executable  # an ordinary Python
STARTS_ORDINARY = "GEMS_TEST_STARTS_ORDINARY"  # set: what a warm process starts is not warm
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gems", "jobs", "analysis")
COMMANDS = {"gems": "gems", "gems-jobs": "jobs", "gems-analysis": "analysis"}
LONGEST_SOCKET = 100  # characters of its path
MAX_FILES = 64
LEASE = b"lease"
FIRST_OWN = 200  # files of the server; those of a process have lower numbers
CLIENT = """#!{python} -ISE
import _signal, _socket, marshal, os, sys
words, ignored = sys.argv[1:], []
place = next((place for place, word in enumerate(words) if word not in ("-u", "-P")), None)
rest = [] if place is None else words[place:]
is_known = rest[:1] == ["-m"] and rest[1:] and rest[1].split(".")[0] in {packages!r}
is_known = is_known or rest and (rest[0] == "-c" or rest[0].endswith("/gems/utils/run_module.py"))
if not is_known or ".zip" in os.environ.get("PYTHONPATH", ""):
    os.execv({python!r}, [{python!r}, *words])
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [file for file in files if file < {first} and os.path.exists(f"/proc/self/fd/{{file}}")]
files = [file for file in files if os.get_inheritable(file)]
link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
try:
    link.connect({address!r})
except OSError:
    os.execv({python!r}, [{python!r}, *words])
for number in (1, 2, 3, 10, 12, 15, 18):
    if _signal.getsignal(number) == _signal.SIG_IGN:
        ignored.append(number)
    else:
        _signal.signal(number, lambda number, frame: link.send(bytes([number])))
data = marshal.dumps((words, os.getcwdb(), dict(os.environb), files, ignored))
sent = b"".join(file.to_bytes(4, "little") for file in files)
link.sendmsg([len(data).to_bytes(8, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, sent)])
link.sendall(data)
code = int.from_bytes(link.recv(4), "little", signed=True)
if code < 0:
    _signal.signal(-code, _signal.SIG_DFL) if code not in (-9, -19) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def warm_python(folder: Path) -> Iterator[str]:
    """Yield the path of a warm Python; all that use the same folder share one server."""
    address = folder / "socket"
    if len(str(address)) > LONGEST_SOCKET:
        yield sys.executable
        return
    folder.mkdir(exist_ok=True)
    lease = socket.socket(socket.AF_UNIX)
    server = None
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            lease.connect(str(address))
        except OSError:
            server = _start(folder, address)
            lease.connect(str(address))
        lease.sendall(len(LEASE).to_bytes(8, "little") + LEASE)
    yield str(folder / "python")
    lease.close()
    if server is not None:
        server.wait()


def _start(folder: Path, address: Path) -> subprocess.Popen[bytes]:
    """Start a server, which listens at once."""
    beside = Path(sys.executable).parent
    client = CLIENT.format(
        python=sys.executable,
        packages=(*PACKAGES, "examples", "scripts", "tests"),
        address=str(address),
        first=FIRST_OWN,
    )
    texts = {"python": client, "mpiexec": f'#!/bin/sh\nexec {beside / "mpiexec"} "$@"\n'}
    for name, package in COMMANDS.items():
        texts[name] = f'#!/bin/sh\nexec {folder / "python"} -P -m {package} "$@"\n'
    for name, text in texts.items():
        if (beside / name).exists():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
    address.unlink(missing_ok=True)
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen(64)
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.helpers.warm_python",
                str(folder / "python"),
                str(listening.fileno()),
            ],
            cwd=ROOT,
            env=os.environ | threads | {"HDF5_USE_FILE_LOCKING": "FALSE"},
            stdin=subprocess.DEVNULL,
            pass_fds=(listening.fileno(),),
        )


def _import_all() -> None:
    """Import what commands and ranks need.

    The library of MPI draws numbers when it is loaded, which must differ from rank to rank: what
    imports it is left to the processes.
    """
    import PIL.Image

    from gems.config.compose import compose

    sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]
    for package in PACKAGES:
        for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            if not module.name.endswith("__main__"):
                with contextlib.suppress(ImportError):  # of what is not installed
                    importlib.import_module(module.name)
    for name in ("matplotlib.pyplot", "matplotlib.backends.backend_agg", "torch._dynamo"):
        importlib.import_module(name)
    PIL.Image.init()
    compose([])  # Hydra looks for its plugins
    del sys.modules["mpi4py.MPI"]
    gc.collect()
    gc.freeze()


class Server:
    """Forks a process for each client, until the last one that holds a lease has gone."""

    def __init__(self, listening: socket.socket) -> None:
        self._wait = selectors.DefaultSelector()
        self._wait.register(listening, selectors.EVENT_READ, self._accept)
        self._leases = 0
        self._processes: set[int] = set()

    def run(self) -> None:
        """Serve."""
        is_used = False
        while self._leases or not is_used:
            for key, _ in self._wait.select():
                if self._wait.get_map().get(key.fd) is key:  # an event before may have ended it
                    key.data(key.fileobj)
            is_used = is_used or self._leases > 0
        for pid in self._processes:
            os.kill(pid, signal.SIGKILL)

    def _accept(self, listening: socket.socket) -> None:
        link = listening.accept()[0]
        head, files, _, _ = socket.recv_fds(link, 8, MAX_FILES)
        data = b""
        while head and len(data) < (size := int.from_bytes(head, "little")):
            if not (more := link.recv(size - len(data))):
                break
            data += more
        if data == LEASE:
            self._leases += 1
            self._wait.register(link, selectors.EVENT_READ, self._end_lease)
        elif data:
            self._fork(link, files, marshal.loads(data))
        for file in files:
            os.close(file)

    def _end_lease(self, link: socket.socket) -> None:
        self._wait.unregister(link)
        link.close()
        self._leases -= 1

    def _fork(self, link: socket.socket, files: list[int], request: tuple[Any, ...]) -> None:
        pid = os.fork()
        if pid == 0:
            _become(files, *request)
        self._processes.add(pid)
        watch = os.pidfd_open(pid)

        def forward(link: socket.socket) -> None:
            numbers = b""
            with contextlib.suppress(OSError):
                numbers = link.recv(1)
            signal.pidfd_send_signal(watch, numbers[0] if numbers else signal.SIGKILL)
            if not numbers:
                self._wait.unregister(link)

        def end(_: int) -> None:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._processes.discard(pid)
            self._wait.unregister(watch)
            with contextlib.suppress(KeyError):
                self._wait.unregister(link)
            os.close(watch)
            with contextlib.suppress(OSError):
                link.sendall(code.to_bytes(4, "little", signed=True))
            link.close()

        self._wait.register(link, selectors.EVENT_READ, forward)
        self._wait.register(watch, selectors.EVENT_READ, end)


def _become(
    files: list[int],
    words: list[str],
    folder: bytes,
    environment: dict[bytes, bytes],
    numbers: list[int],
    ignored: list[int],
) -> None:
    """Turn a forked process into the one that was asked for, and end it."""
    code = 1
    try:
        os.setsid()
        kept = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN) for file in files]
        os.closerange(0, FIRST_OWN)
        for file, number in zip(kept, numbers, strict=True):
            os.dup2(file, number)
        os.closerange(FIRST_OWN, 2 * FIRST_OWN)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        os.chdir(folder)
        os.environb.clear()
        os.environb.update(environment)
        if os.environ.pop(STARTS_ORDINARY, None):
            sys.executable = REAL
        _set_up_streams("-u" in words or "PYTHONUNBUFFERED" in os.environ)
        _set_up_libraries()
        code = _run(words)
        threading._shutdown()
        atexit._run_exitfuncs()
        _end_mpi(code)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


def _set_up_streams(is_unbuffered: bool) -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
        except OSError:
            stream = None  # type: ignore[assignment]
        else:
            if number:
                is_error = name == "stderr"
                stream.reconfigure(
                    line_buffering=is_error or stream.isatty(),
                    write_through=is_unbuffered,
                    errors="backslashreplace" if is_error else None,
                )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _set_up_libraries() -> None:
    import faulthandler

    import numpy as np
    import torch

    np.random.seed()
    gc.enable()
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    if threads != 1:
        torch.set_num_threads(threads)
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()


def _end_mpi(code: int) -> None:
    """Do what mpi4py does when the interpreter ends, which it never does here."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        ctypes.CDLL(None).exit(code)  # where MPICH takes leave of its launcher


def _run(words: list[str]) -> int:
    """Run the program that follows Python's own options, and return its exit code."""
    rest = [word for place, word in enumerate(words) if place > 1 or word not in ("-u", "-P")]
    is_module = rest[0] in ("-m", "-c")
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    if "-P" not in words[: len(words) - len(rest)]:
        paths.insert(0, os.getcwd() if is_module else str(Path(rest[0]).parent))
    elif not is_module and str(ROOT) not in paths:  # as run_module.py does
        paths.insert(0, str(ROOT))
    sys.path[:] = paths
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.modules.pop(rest[1], None)  # which is to run as __main__
    sys.argv = rest[1:]
    try:
        if rest[0] == "-c":
            sys.argv = ["-c", *rest[2:]]
            exec(compile(rest[1], "<string>", "exec"), main.__dict__)
        else:
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def main(executable: str, number: int) -> None:
    """Serve at a socket that listens already."""
    sys.executable = executable
    listening = socket.socket(fileno=fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN + 80))
    os.close(number)
    _import_all()
    Server(listening).run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
