"""Samples beside the work, with and without a GPU's driver."""

from __future__ import annotations

import math
import mmap
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from gems.engine.supervision.monitor import Monitor
from gems.utils.host_memory import rss_bytes

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
UUID = "01234567-89ab-cdef-0123-456789abcdef"


class NVMLError(Exception):
    """As pynvml's."""


def driver(asked: list[str], **failing: bool) -> SimpleNamespace:
    """Stand for pynvml; a call named in `failing` raises."""

    def answer(name, value):
        def call(*arguments):
            asked.append(name)
            if failing.get(name):
                raise NVMLError(f"{name}: not supported")
            if name == "nvmlDeviceGetHandleByUUID":
                assert arguments == (f"GPU-{UUID}",)
            elif name != "nvmlInit":
                assert arguments == ("handle",)
            return value

        return call

    values = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=7_000_000_001),
        "nvmlDeviceGetPowerUsage": 250_500,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40),
        "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
    }
    return SimpleNamespace(
        NVMLError=NVMLError, **{name: answer(name, value) for name, value in values.items()}
    )


@pytest.fixture
def open_on_gpu(monkeypatch):
    def open_monitor(at_ns=time.perf_counter_ns, **failing: bool) -> Monitor:
        monkeypatch.setattr(
            "gems.engine.supervision.monitor.time", SimpleNamespace(perf_counter_ns=at_ns)
        )
        monkeypatch.setitem(sys.modules, "pynvml", driver([], **failing))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID)
        )
        return Monitor(GPU, 1000.0)

    return open_monitor


def test_a_process_is_sampled_until_it_is_closed():
    monitor = Monitor(CPU, 0.001)
    samples = monitor.take()
    deadline = time.monotonic() + 30
    while len(samples) < 5 and time.monotonic() < deadline:
        samples += monitor.take()
    last = monitor.close()
    assert len(samples) >= 5 and len(last) >= 1
    assert not any(thread.name == "monitor" for thread in threading.enumerate())
    times = [sample[0] for sample in samples + last]
    assert times == sorted(times)
    for _, device_bytes, resident, power_w, utilisation in samples + last:
        assert device_bytes == -1 and math.isnan(power_w) and math.isnan(utilisation)
        assert resident > 10_000_000  # torch alone is larger
    assert monitor.take() == []


def test_resident_memory_grows_with_what_is_touched():
    with mmap.mmap(-1, 50_000_000) as block:  # of its own: the heap may hold this much already
        before = rss_bytes()
        for first in range(0, len(block), mmap.PAGESIZE):
            block[first] = 1
        assert rss_bytes() - before > 40_000_000


def test_a_short_run_has_a_sample_at_its_beginning_and_end():
    monitor = Monitor(CPU, 1000.0)
    assert len(monitor.take()) == 1
    assert len(monitor.close()) == 1


def test_a_gpu_is_found_by_its_uuid_and_read_in_units(open_on_gpu):
    monitor = open_on_gpu()
    ((_, device_bytes, _, power_w, utilisation),) = monitor.take()
    assert (device_bytes, power_w, utilisation) == (7_000_000_001, 250.5, 0.4)
    monitor.close()


def test_what_a_gpu_does_not_tell_is_missing(open_on_gpu):
    monitor = open_on_gpu(nvmlDeviceGetMemoryInfo=True, nvmlDeviceGetPowerUsage=True)
    ((_, device_bytes, resident, power_w, utilisation),) = monitor.close()[:1]
    assert device_bytes == -1 and math.isnan(power_w) and utilisation == 0.4 and resident > 0


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_driver_without_samples_does_not_end_the_run(open_on_gpu, capsys, failing):
    monitor = open_on_gpu(**{failing: True})
    ((_, device_bytes, resident, *_),) = monitor.take()
    assert device_bytes == -1 and resident > 0
    monitor.close()
    said = f"[rank 0] WARNING no samples of the GPU's memory and power: {failing}: not supported\n"
    assert capsys.readouterr().err == said


def test_energy_is_what_the_counter_went_on_by(open_on_gpu):
    monitor = open_on_gpu()
    sys.modules["pynvml"].nvmlDeviceGetTotalEnergyConsumption = lambda handle: 5_012_500
    monitor.close()
    assert monitor.energy_j() == pytest.approx(12.5)


@pytest.mark.parametrize("counted", ["missing", "set back"])
def test_energy_is_the_integral_of_power_where_nothing_counts(open_on_gpu, monkeypatch, counted):
    times_ns = iter([0, 2_000_000_000, 3_000_000_000])
    monitor = open_on_gpu(
        nvmlDeviceGetTotalEnergyConsumption=counted == "missing", at_ns=lambda: next(times_ns)
    )
    if counted == "set back":
        sys.modules["pynvml"].nvmlDeviceGetTotalEnergyConsumption = lambda handle: 1
    sys.modules["pynvml"].nvmlDeviceGetPowerUsage = lambda handle: 350_500
    monitor._sample()
    monitor.close()
    assert monitor.energy_j() == pytest.approx(2 * 300.5 + 1 * 350.5)


def test_nobody_tells_the_energy_of_a_processor(open_on_gpu):
    silent = open_on_gpu(nvmlDeviceGetTotalEnergyConsumption=True, nvmlDeviceGetPowerUsage=True)
    for monitor in (Monitor(CPU, 1000.0), silent):
        monitor.close()
        assert monitor.energy_j() is None
