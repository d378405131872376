"""The monitor: samples memory, power and utilisation beside the work, and counts the energy."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch

from gems.utils.host_memory import rss_bytes

Sample = tuple[int, int, int, float, float]  # t_ns, device_bytes, rss_bytes, power_w, utilisation

NAN = float("nan")


class _Gpu:
    """One GPU seen through NVML."""

    def __init__(self, device: torch.device) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        full = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(full)

    def read(self) -> tuple[int, float, float]:
        """Return bytes in use on the whole device, watts, and the share of time in use."""
        used = self._ask(lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        power = self._ask(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000.0)
        busy = self._ask(lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100.0)
        return -1 if used != used else int(used), power, busy

    def counted_j(self) -> float:
        """Return the joules that the whole device has taken since its driver was loaded; NaN where it does not count."""
        return self._ask(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000.0)

    def _ask(self, question: Any) -> float:
        """Return NaN for what this GPU does not tell."""
        try:
            return float(question())
        except self._nvml.NVMLError:
            return NAN


def _open_gpu(device: torch.device) -> _Gpu | None:
    """Open the GPU's samples; without a GPU, or where its driver gives none, there are none."""
    if device.type != "cuda":
        return None
    import pynvml

    try:
        return _Gpu(device)
    except pynvml.NVMLError as error:
        print(f"gems: no samples of the GPU's memory and power: {error}", file=sys.stderr, flush=True)
        return None


class Monitor:
    """Takes samples in a thread of its own until it is closed; without a GPU it samples the process alone.

    Energy is that of the whole GPU, also where ranks share it, by its own counter (Volta and later), else by the
    trapezoidal rule over the samples of its power.
    """

    def __init__(self, device: torch.device, interval_s: float) -> None:
        self._interval_s = interval_s
        self._gpu = _open_gpu(device)
        self._samples: list[Sample] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._integral_j = NAN
        self._before: tuple[int, float] | None = None
        self._begin_j = self._end_j = NAN if self._gpu is None else self._gpu.counted_j()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def take(self) -> list[Sample]:
        """Return the samples since the last call."""
        with self._lock:
            taken, self._samples = self._samples, []
        return taken

    def close(self) -> list[Sample]:
        """Stop sampling and gives what is left, with one last sample."""
        self._stop.set()
        self._thread.join()
        self._sample()
        self._end_j = NAN if self._gpu is None else self._gpu.counted_j()
        return self.take()

    def energy_j(self) -> float | None:
        """Return the energy that this rank's GPU took from the monitor's start to its close; None where nobody tells."""
        with self._lock:
            integral_j = self._integral_j
        counted_j = self._end_j - self._begin_j
        found = counted_j if counted_j == counted_j and counted_j >= 0 else integral_j
        return found if found == found else None

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        device_bytes, power_w, utilisation = (-1, NAN, NAN) if self._gpu is None else self._gpu.read()
        now_ns, resident = time.perf_counter_ns(), rss_bytes()
        with self._lock:
            self._samples.append((now_ns, device_bytes, resident, power_w, utilisation))
            if power_w == power_w:  # one sample that the driver did not give is bridged
                if self._before is not None:
                    then_ns, before_w = self._before
                    so_far_j = 0.0 if self._integral_j != self._integral_j else self._integral_j
                    self._integral_j = so_far_j + (before_w + power_w) / 2 * (now_ns - then_ns) / 1e9
                self._before = now_ns, power_w
