"""The monitor: samples memory, power and utilisation in a thread, and measures energy."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch

from gems.utils.host_memory import rss_bytes

Sample = tuple[int, int, int, float, float]  # t_ns, device_bytes, rss_bytes, power_w, utilisation

NAN = float("nan")
_log = logging.getLogger(__name__)


class Gpu:
    """One GPU, read through NVML."""

    def __init__(self, device: torch.device) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        full = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(full)

    def read(self) -> tuple[int, float, float]:
        """Return the device's bytes in use (-1 if unknown), watts, and utilisation from 0 to 1."""
        used = self._query(lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        power = self._query(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000.0)
        busy = self._query(
            lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100.0
        )
        return -1 if used != used else int(used), power, busy

    def counted_j(self) -> float:
        """Return the joules used by the whole device since its driver was loaded.

        NaN if it does not count them.
        """
        return self._query(
            lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000.0
        )

    def bus_id(self) -> str:
        """Return the PCI address as the kernel writes it, as in 0000:17:00.0.

        NVML's domain has eight digits.
        """
        address = self._nvml.nvmlDeviceGetPciInfo(self._handle).busId
        domain, _, rest = (
            (address.decode() if isinstance(address, bytes) else str(address))
            .lower()
            .partition(":")
        )
        return f"{domain[-4:]}:{rest}"

    def _query(self, read: Any) -> float:
        """Return a value, NaN if this GPU does not have it."""
        try:
            return float(read())
        except self._nvml.NVMLError:
            return NAN


def _open_gpu(device: torch.device) -> Gpu | None:
    """Open the device for sampling; None without a GPU, or if its driver has no samples."""
    if device.type != "cuda":
        return None
    import pynvml

    try:
        return Gpu(device)
    except pynvml.NVMLError as error:
        _log.warning("no samples of the GPU's memory and power: %s", error)
        return None


class Monitor:
    """Takes samples until it is closed; without a GPU of the process's memory only.

    Energy is that of the whole GPU, even if ranks share it: by its own counter (Volta and later),
    else by the trapezoidal rule over samples of its power.
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
            taken = self._samples
            self._samples = []
        return taken

    def close(self) -> list[Sample]:
        """Stop sampling, and return the samples left and one last sample."""
        self._stop.set()
        self._thread.join()
        self._sample()
        self._end_j = NAN if self._gpu is None else self._gpu.counted_j()
        return self.take()

    def energy_j(self) -> float | None:
        """Return the energy of this rank's GPU from the monitor's start to its close.

        None if unknown.
        """
        with self._lock:
            integral_j = self._integral_j
        counted_j = self._end_j - self._begin_j
        energy_j = counted_j if counted_j == counted_j and counted_j >= 0 else integral_j
        return energy_j if energy_j == energy_j else None

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        device_bytes, power_w, utilisation = (
            (-1, NAN, NAN) if self._gpu is None else self._gpu.read()
        )
        now_ns = time.perf_counter_ns()
        resident = rss_bytes()
        with self._lock:
            self._samples.append((now_ns, device_bytes, resident, power_w, utilisation))
            if power_w == power_w:  # a missing sample is interpolated
                if self._before is not None:
                    then_ns, before_w = self._before
                    so_far_j = 0.0 if self._integral_j != self._integral_j else self._integral_j
                    self._integral_j = (
                        so_far_j + (before_w + power_w) / 2 * (now_ns - then_ns) / 1e9
                    )
                self._before = now_ns, power_w
