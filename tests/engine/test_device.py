"""The device of a rank, from what each launcher says."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from gems.config.schema import MachineConfig
from gems.engine.device import open_device
from gems.engine.transport.environment import LOCAL_RANK_VARIABLES, local_rank
from gems.errors import ConfigError


@pytest.fixture(autouse=True)
def nobody_says(monkeypatch):
    for name in LOCAL_RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpus(monkeypatch):
    chosen: list[torch.device] = []

    def see(count: int) -> list[torch.device]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return see


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_LOCALID",
        "MPI_LOCALRANKID",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "PALS_LOCAL_RANKID",
    ],
)
def test_local_rank_comes_from_the_launcher(monkeypatch, name):
    assert local_rank() == 0
    monkeypatch.setenv(name, "3")
    assert local_rank() == 3


def test_a_launcher_inside_a_job_knows_the_local_rank_better_than_slurm(monkeypatch):
    monkeypatch.setenv("SLURM_LOCALID", "0")  # of the one task that started mpiexec
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "2")
    assert local_rank() == 2


@pytest.mark.parametrize(
    ("tf32", "products", "convolutions"), [(None, False, True), (True, True, True), (False,) * 3]
)
def test_the_kernels_of_a_gpu_are_those_of_the_machine(
    gpus, monkeypatch, tf32, products, convolutions
):
    gpus(1)
    asked = []
    backends = SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False)),
        cudnn=SimpleNamespace(allow_tf32=True, benchmark=False),
    )
    monkeypatch.setattr(torch, "backends", backends)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    open_device(MachineConfig(tf32=tf32))
    assert (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32) == (products, convolutions)
    assert not backends.cudnn.benchmark and not asked
    open_device(MachineConfig(cudnn_benchmark=True, deterministic=True))
    assert (
        backends.cudnn.benchmark
        and asked == [True]
        and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    )


@pytest.mark.parametrize(
    ("device_bytes", "shares"), [(None, []), (16 * 10**9, [0.2]), (80 * 10**9, []), (10**12, [])]
)
def test_torch_s_allocator_gives_no_more_than_the_machine_has(
    gpus, monkeypatch, device_bytes, shares
):
    gpus(1)
    given = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 10**9)
    )
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: given.append(share)
    )
    open_device(MachineConfig(device_bytes=device_bytes))
    assert given == shares


def test_the_local_rank_picks_a_gpu(gpus, monkeypatch):
    chosen = gpus(4)
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert open_device(MachineConfig()) == torch.device("cuda", 2)
    monkeypatch.setenv("SLURM_LOCALID", "5")
    assert open_device(MachineConfig(device="cuda")) == torch.device("cuda", 1)
    assert [device.index for device in chosen] == [2, 1]


def test_the_one_gpu_that_is_bound_to_the_rank_is_taken(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert open_device(MachineConfig()) == torch.device("cuda", 0)


@pytest.mark.parametrize(("local", "index"), [(0, 3), (1, 2), (3, 0), (4, 3)])
def test_the_sites_order_of_gpus(gpus, monkeypatch, local, index):
    gpus(4)
    monkeypatch.setenv("SLURM_LOCALID", str(local))
    assert open_device(MachineConfig(), [3, 2, 1, 0]) == torch.device("cuda", index)


def test_an_order_does_not_count_where_the_gpu_is_bound(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert open_device(MachineConfig(), [3, 2, 1, 0]) == torch.device("cuda", 0)


def test_an_order_of_more_gpus_than_are_seen(gpus):
    gpus(2)
    with pytest.raises(
        ConfigError,
        match=r"^cluster\.device_order=\[3, 2, 1, 0\]: names 4 GPUs, and this rank sees 2; ",
    ):
        open_device(MachineConfig(), [3, 2, 1, 0])


def test_no_gpu(gpus):
    gpus(0)
    assert open_device(MachineConfig(device="auto")) == torch.device("cpu")
    with pytest.raises(
        ConfigError, match=r"machine\.device=cuda: torch sees no GPU here; use machine=cpu"
    ):
        open_device(MachineConfig(device="cuda"))


def test_a_processor_is_used_on_demand_although_there_are_gpus(gpus):
    chosen = gpus(4)
    assert open_device(MachineConfig(device="cpu")) == torch.device("cpu")
    assert chosen == []


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_those_of_the_configuration(gpus, threads):
    gpus(0)
    open_device(MachineConfig(threads_per_rank=threads))
    assert torch.get_num_threads() == threads
