"""The functions and classes of torch.cuda, on the fake device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from gems.autograd.torch_internals import disable_current_modes
from tests.fake_cuda.watch import APART

_native: Any = None
NAME = "fake GPU"
PINNING_ERRORS = {
    712: "part or all of the requested memory range is already mapped",
    713: "pointer does not correspond to a registered memory region",
}
DRIVER = "00000000-0000-0000-0000-00000000000"


class Stream(torch.Stream):
    """As torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if given:
            return super().__new__(cls, **given)
        return super().__new__(cls, torch.device("cuda", _index(device)), priority=priority)

    def wait_event(self, event: Event) -> None:
        super().wait_event(event)

    def wait_stream(self, stream: Stream) -> None:
        super().wait_stream(stream)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        super().synchronize()

    def query(self) -> bool:
        return super().query()

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    """As torch.cuda.Event."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Event:
        made = super().__new__(
            cls, torch.device("cuda", torch.cuda.current_device()), enable_timing=enable_timing
        )
        made.has_time = enable_timing
        return made

    def record(self, stream: Stream | None = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: Stream | None = None) -> None:
        (torch.cuda.current_stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        super().synchronize()

    def query(self) -> bool:
        return super().query()

    def elapsed_time(self, end_event: Event) -> float:
        if not (self.has_time and end_event.has_time):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return _native.elapsed_ms(self.event_id, end_event.event_id)


class device:  # noqa: N801
    """As torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self.prev_idx = torch.cuda.current_device()
        torch.cuda.set_device(self.idx)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_device(self.prev_idx)


class CUDAGraph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._number: int | None = None
        self._pool: tuple[int, int] | None = None

    def capture_begin(
        self,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        self._pool = graph_pool_handle() if pool is None else pool
        self._number = _native.begin_capture(self._pool[0])

    def capture_end(self) -> None:
        _native.end_capture()

    def replay(self) -> None:
        if self._number is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        with disable_current_modes():  # a replay dispatches nothing
            _native.replay(self._number)

    def reset(self) -> None:
        if self._number is not None:
            _native.drop_graph(self._number)
            self._number = None

    def pool(self) -> tuple[int, int]:
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def __del__(self) -> None:
        self.reset()


def graph_pool_handle() -> tuple[int, int]:
    """As torch.cuda.graph_pool_handle."""
    return _native.new_pool(), 0


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def patch(native: Any, num_devices: int, total_bytes: int) -> None:
    """Put the fake device in the place of torch.cuda's functions."""
    global _native
    _native = native
    native.open(num_devices, total_bytes)

    def current_stream(device: Any = None) -> Stream:
        index = _index(device)
        return Stream(stream_id=native.current_stream(index), device_index=index, device_type=1)

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            native.set_stream(stream.device_index, stream.stream_id)

    @contextlib.contextmanager
    def stream(stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        index = stream.device_index
        before = native.current_stream(index)
        device_before = native.current_device()
        native.set_device(index)
        native.set_stream(index, stream.stream_id)
        try:
            yield
        finally:
            native.set_stream(index, before)
            native.set_device(device_before)

    def statistic(place: int) -> Any:
        return lambda device=None: native.statistics(_index(device))[place]

    def memory_stats(device: Any = None) -> dict[str, int]:
        allocated, _, reserved, _ = native.statistics(_index(device))[:4]
        found = {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "inactive_split_bytes": 0,
        }  # never split
        return {f"{name}.all.current": size for name, size in found.items()}

    def set_fraction(fraction: float, device: Any = None) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        native.limit(_index(device), int(fraction * total_bytes))

    def properties(device: Any = None) -> SimpleNamespace:
        index = _index(device)
        whose = f"{os.getpid():08x}{DRIVER[8:]}" if os.environ.get(APART) else DRIVER
        return SimpleNamespace(
            name=NAME,
            uuid=f"{whose}{index}",
            total_memory=total_bytes,
            multi_processor_count=1,
            major=8,
            minor=0,
        )

    cudart = SimpleNamespace(
        cudaHostRegister=lambda place, size, flags: native.pin(place, size),
        cudaHostUnregister=native.unpin,
        cudaGetErrorString=PINNING_ERRORS.__getitem__,
    )
    found = {
        "Stream": Stream,
        "Event": Event,
        "device": device,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(
            stream_id=0, device_index=_index(device), device_type=1
        ),
        "set_stream": set_stream,
        "stream": stream,
        "synchronize": lambda device=None: native.synchronize(_index(device)),
        "memory_allocated": statistic(0),
        "max_memory_allocated": statistic(1),
        "memory_reserved": statistic(2),
        "max_memory_reserved": statistic(3),
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": lambda device=None: native.reset_peaks(_index(device)),
        "empty_cache": native.empty_cache,
        "mem_get_info": lambda device=None: (
            total_bytes - native.statistics(_index(device))[2],
            total_bytes,
        ),
        "set_per_process_memory_fraction": set_fraction,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: num_devices,
        "current_device": native.current_device,
        "set_device": lambda device: native.set_device(_index(device)),
        "get_device_properties": properties,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (8, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": graph_pool_handle,
        "is_current_stream_capturing": native.is_capturing,
        "cudart": lambda: cudart,
        "default_generators": tuple(
            native.default_generator(index) for index in range(num_devices)
        ),
    }
    torch.backends.cudnn.enabled = False  # there is none
    torch._C._host_emptyCache = lambda: None  # type: ignore[attr-defined]
    for name, value in found.items():
        setattr(torch.cuda, name, value)
        for module in (
            torch.cuda.random,
            torch.cuda.memory,
        ):  # which have imported some of them by name
            if hasattr(module, name):
                setattr(module, name, value)
