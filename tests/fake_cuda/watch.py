"""What reads and writes memory beside kernels and copies: MPI, from posting to completion, and files of checkpoints."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

DIRECT = "GEMS_FAKE_CUDA_DIRECT"  # set: this MPI takes device pointers, as the bytes are the host's


def watch(native: Any) -> None:
    """Watch modules of the engine as soon as they have been imported."""
    watched = {
        "gems.engine.transport.mpi": lambda module: _watch_transport(native, module),
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


def _watch_transport(native: Any, module: ModuleType) -> None:
    kind = module.Transport
    send, receive, wait, total, close = kind.send, kind.receive, kind.wait, kind.sum_in_place, kind.close

    def begin(tensor: Any, writes: bool, name: str) -> int | None:
        if not hasattr(tensor, "data_ptr") or not tensor.numel():
            return None
        return native.begin_message(tensor.data_ptr(), tensor.numel() * tensor.element_size(), writes, name)

    def end(number: int | None) -> None:
        if number is not None:
            native.end_message(number)

    def open_receives(self: Any) -> dict[int, tuple[Any, int | None]]:
        return self.__dict__.setdefault("_fake_receives", {})

    def watched_send(self: Any, tensor: Any, rank: int, tag: int, done: Callable[[], None] | None = None) -> None:
        number = begin(tensor, False, "MPI_Isend")

        def ended() -> None:
            end(number)
            if done is not None:
                done()

        send(self, tensor, rank, tag, ended)

    def watched_receive(self: Any, tensor: Any, rank: int, tag: int) -> Any:
        number = begin(tensor, True, "MPI_Irecv")
        request = receive(self, tensor, rank, tag)
        open_receives(self)[id(request)] = request, number
        return request

    def watched_wait(self: Any, request: Any, what: object = "data") -> None:
        wait(self, request, what)
        end(open_receives(self).pop(id(request), (None, None))[1])

    def watched_total(self: Any, tensor: Any) -> None:
        number = begin(tensor, True, "MPI_Iallreduce")
        total(self, tensor)
        end(number)

    def watched_close(self: Any) -> None:
        for _, number in open_receives(self).values():
            end(number)
        close(self)

    kind.send, kind.receive, kind.wait = watched_send, watched_receive, watched_wait
    kind.sum_in_place, kind.close = watched_total, watched_close
    if os.environ.get(DIRECT):
        module.gpu_support = lambda: True


def _watch_checkpoint(native: Any, module: ModuleType) -> None:
    kind = module.HostCopy
    host_tensors = kind.host_tensors

    def watched(self: Any) -> Any:
        found = host_tensors(self)
        for name, tensor in self._copies.items():
            native.host_access(tensor.data_ptr(), tensor.nbytes, False, f"the checkpoint of {name}")
        return found

    kind.host_tensors = watched
