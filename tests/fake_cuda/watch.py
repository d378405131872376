"""What reads and writes memory beside kernels and copies.

MPI, from posting to completion, and files of checkpoints.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.abc
import importlib.machinery
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

_WAYS = ("send", "receive")  # by whether memory is written
PIECE_BYTES = 1000  # no whole number of most tensors' rows
APART = "GEMS_FAKE_GPUS_APART"  # set: each process has GPUs of its own, as NCCL asks
DIRECT = "GEMS_FAKE_CUDA_DIRECT"  # set: this MPI takes device pointers, as the bytes are the host's
UNREADABLE_BYTES = 1 << 30


def watch(native: Any) -> None:
    """Watch modules of the engine as soon as they have been imported."""
    watched = {
        "gems.engine.transport.mpi": lambda module: _watch_mpi(native, module),
        "gems.engine.transport.polling": _advance_in_waits,
        "gems.engine.transport.nccl_gloo": lambda module: _watch_links(
            native, module.GroupLinks, "gloo"
        ),
        "gems.engine.transport.staging": _with_small_pieces,
        "gems.engine.checkpoint.state": lambda module: _watch_checkpoint(native, module),
    }
    for name in watched.keys() & sys.modules.keys():
        watched[name](sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(watched))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function on a module once it has been run."""

    def __init__(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        self._calls = calls

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._calls:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            self._calls[name](module)

        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


class _Open:
    """The messages of a transport that are under way.

    Those of one that is gone have nobody to wait for them.
    """

    def __init__(self, native: Any, transport: Any) -> None:
        self._native = native
        self._numbers: set[int] = set()
        self.receives: dict[
            int, tuple[Any, int | None]
        ] = {}  # by the id of a request, which is kept
        weakref.finalize(transport, self.end_all)

    def begin(self, tensor: Any, writes: bool, name: str) -> int | None:
        if not hasattr(tensor, "data_ptr") or not tensor.numel():
            return None
        number = self._native.begin_message(
            tensor.data_ptr(), tensor.numel() * tensor.element_size(), writes, name
        )
        self._numbers.add(number)
        return int(number)

    def end(self, number: int | None) -> None:
        if number is not None and number in self._numbers:
            self._numbers.remove(number)
            self._native.end_message(number)

    def end_all(self) -> None:
        for number in self._numbers:
            self._native.forget_message(number)
        self._numbers.clear()


def _watch_links(native: Any, kind: Any, name: str) -> None:
    """Watch the messages of links; those of NCCL follow their stream, and copies there are watched."""
    send = kind.send
    receive = kind.receive
    wait = kind.wait
    is_complete = kind.is_complete
    close = kind.close

    def begin(links: Any, tensor: Any, writes: bool) -> int | None:
        is_streamed = name == "gloo" and getattr(tensor, "is_cuda", False)
        return (
            None
            if is_streamed
            else _messages(native, links).begin(tensor, writes, f"{name}'s {_WAYS[writes]}")
        )

    def watched_send(
        self: Any, tensor: Any, rank: int, tag: int, done: Callable[[], None] | None = None
    ) -> None:
        number = begin(self, tensor, False)

        def ended() -> None:
            _messages(native, self).end(number)
            if done is not None:
                done()

        send(self, tensor, rank, tag, ended)

    def watched_receive(self: Any, tensor: Any, rank: int, tag: int) -> Any:
        number = begin(self, tensor, True)
        request = receive(self, tensor, rank, tag)
        _messages(native, self).receives[id(request)] = request, number
        return request

    def end_receive(links: Any, request: Any) -> None:
        messages = _messages(native, links)
        messages.end(messages.receives.pop(id(request), (None, None))[1])

    def watched_wait(self: Any, request: Any, *given: Any) -> None:
        wait(self, request, *given)
        end_receive(self, request)

    def watched_is_complete(self: Any, request: Any) -> bool:
        if not is_complete(self, request):
            return False
        end_receive(self, request)
        return True

    def watched_close(self: Any) -> None:
        _messages(native, self).end_all()
        close(self)

    kind.send = watched_send
    kind.receive = watched_receive
    kind.wait = watched_wait
    kind.is_complete = watched_is_complete
    kind.close = watched_close


def _advance_in_waits(module: ModuleType) -> None:
    """Let messages of NCCL go on while a rank waits for anything."""
    from tests.fake_cuda import nccl  # which needs torch, and so the device

    wait_until = module.WaitState.wait_until

    def watched(self: Any, is_done: Callable[[], object], *given: Any, **named: Any) -> None:
        def is_done_after_messages() -> object:
            nccl.advance()
            return is_done()

        wait_until(self, is_done_after_messages, *given, **named)

    module.WaitState.wait_until = watched


def _messages(native: Any, links: Any) -> _Open:
    if "_fake_messages" not in links.__dict__:
        links._fake_messages = _Open(native, links)
    return links._fake_messages


def _watch_mpi(native: Any, module: ModuleType) -> None:
    kind = module.Transport
    _watch_links(native, kind, "MPI")
    post_sum = kind.post_sum

    def watched_sum(self: Any, tensor: Any) -> Any:
        number = _messages(native, self).begin(tensor, True, "MPI's sum")
        request = post_sum(self, tensor)
        _messages(native, self).receives[id(request)] = request, number  # whose wait ends it
        return request

    kind.post_sum = watched_sum
    if os.environ.get(DIRECT):
        module.gpu_support = lambda: True
    _give_unreadable_memory(module)


@contextlib.contextmanager
def device_pointers() -> Iterator[None]:
    """Let MPI take device pointers."""
    from gems.engine.transport import mpi

    before = mpi.gpu_support
    mpi.gpu_support = lambda: True
    try:
        yield
    finally:
        mpi.gpu_support = before


def _give_unreadable_memory(module: ModuleType) -> None:
    """Let an MPI that takes no device pointers crash on one, as it does where they are no addresses of the host."""
    buffer = module._buffer

    def watched(data: Any) -> Any:
        made = buffer(data)
        is_unknown = getattr(data, "is_cuda", False) and not module.gpu_support()
        return module.MPI.memory.fromaddress(_unreadable(), len(made)) if is_unknown else made

    module._buffer = watched


@functools.cache
def _unreadable() -> int:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return int(libc.mmap(None, UNREADABLE_BYTES, 0, flags, -1, 0))


def _with_small_pieces(module: ModuleType) -> None:
    """Let the small messages of tests travel in pieces too."""
    module.HostStaging.__init__.__defaults__ = (PIECE_BYTES,)


def _watch_checkpoint(native: Any, module: ModuleType) -> None:
    kind = module.HostCopy
    host_tensors = kind.host_tensors

    def watched(self: Any) -> Any:
        found = host_tensors(self)
        for name, tensor in self._copies.items():
            native.host_access(tensor.data_ptr(), tensor.nbytes, False, f"the checkpoint of {name}")
        return found

    kind.host_tensors = watched
