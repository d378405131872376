"""The memory benchmarks: what hooks copy is counted right, ours moves each storage once, and the search for a size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gems.models.build import input_spec
from gems.plan.evaluate import evaluate
from scripts.bench import memory_gpu
from scripts.bench.memory_rig import (
    OneRank,
    PlainLoop,
    all_offloaded,
    hook_traffic,
    layer_modules,
    one_rank,
    plain_loss,
)

SIDE = 16
SIDE_OF_RUN = 32
FLOAT = 4
# of one profile, which is taken once
SMALL = ("model.depth=8", "parallel.micro_batches=2", "parallel.micro_batch_size=2", "machine=cpu")


def small_net() -> nn.ModuleList:
    """What the ReLU gives is saved by itself and by the convolution behind it.

    All else is images or small.
    """
    torch.manual_seed(0)
    return nn.ModuleList(
        [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, SIDE), nn.Flatten()]
    )


RELU_BYTES = 2 * 8 * SIDE * SIDE * FLOAT
IMAGES = (2, 3, SIDE, SIDE)


def test_torchtune_s_rule_copies_a_tensor_for_each_that_saves_it():
    found = hook_traffic("torchtune's rule", small_net(), torch.randn(IMAGES))
    assert found.moved_bytes == 2 * RELU_BYTES
    assert found.num_copies == 2
    assert RELU_BYTES <= found.saved_bytes < RELU_BYTES + 1024


def test_save_on_cpu_is_counted_by_what_it_copies():
    found = hook_traffic("save_on_cpu", small_net(), torch.randn(IMAGES))
    assert 2 * RELU_BYTES <= found.moved_bytes < 2 * RELU_BYTES + 1024
    assert found.known_bytes >= sum(p.nbytes for p in small_net().parameters() if p.dim() > 1)


def test_a_view_of_a_weight_is_counted_apart():
    modules = nn.ModuleList([nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 4), nn.Linear(4, 4)])
    found = hook_traffic("torchtune's rule", modules, torch.randn(IMAGES))
    assert found.moved_bytes == 0  # but for the images, no saved activation has 1024 bytes
    assert (
        found.known_bytes == torch.randn(IMAGES).nbytes
    )  # flattened, they are another tensor in their memory


@pytest.mark.parametrize("way", ["save_on_cpu", "checkpoint"])
def test_a_peer_s_step_is_that_of_the_plain_loop(way):
    images = [torch.randn(IMAGES, generator=torch.Generator().manual_seed(m)) for m in range(2)]
    nets = {name: small_net() for name in ("plain", way)}
    for name, net in nets.items():
        loop = PlainLoop(net, images, name)
        loop.step()
        loop.step()
    for mine, its in zip(nets["plain"].parameters(), nets[way].parameters(), strict=True):
        assert torch.equal(mine, its)
    assert not torch.equal(next(nets[way].parameters()), next(small_net().parameters()))


def test_ours_moves_each_storage_once_and_nothing_else():
    spec = one_rank("resnet20_v1", SIDE_OF_RUN, *SMALL, "memory.min_offload_bytes=0")
    plain = hook_traffic(
        "save_on_cpu",
        layer_modules(spec.model, spec.data),
        torch.randn(input_spec(spec.data, 2).shape),
    )
    ours = OneRank(all_offloaded(spec))
    ours.step()
    assert ours.rank.train.store is not None
    counters = ours.rank.train.store.counters
    assert counters.offloaded_bytes == counters.prefetched_bytes == 2 * plain.saved_bytes
    assert counters.num_misses == 0
    assert plain.moved_bytes > 1.3 * plain.saved_bytes


@pytest.mark.parametrize(
    "words", [["memory=keep"], ["memory=recompute"]], ids=["keep", "recompute"]
)
def test_peaks_are_measured_where_they_were_predicted(words):
    spec = one_rank("resnet20_v1", SIDE_OF_RUN, *SMALL, "schedule=1f1b", *words)
    plan = evaluate(spec)
    found = OneRank(plan.for_ranks).peaks()
    (walked,) = plan.memory.ranks
    assert found["activation_bytes"] == pytest.approx(walked.peak_activation_bytes, rel=0.05)
    assert found["allocated_bytes"] == pytest.approx(walked.peak_bytes, rel=0.05)
    assert found["allocated_bytes"] > found["activation_bytes"] > 0


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert memory_gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "bench-memory-gpu: torch sees no CUDA GPU here: nothing was measured\n"


@pytest.mark.parametrize(("most", "expected"), [(1400, 1280), (512, 512), (511, 0), (10**6, 16384)])
def test_the_largest_size_is_found(most, expected, monkeypatch):
    tried = []

    def child(what, model, side_px, *words):
        tried.append(side_px)
        return {"step_s": 1.0} if side_px <= most else {"refused": "too large"}

    monkeypatch.setattr(memory_gpu, "_child", child)
    (row,) = memory_gpu.largest_rows(["keep"], {})
    assert row["side_px"] == expected
    assert len(tried) == len(set(tried))


def test_a_case_of_the_gpu_s_runs_in_every_way(monkeypatch):
    """On a processor stands in what only a GPU answers."""
    held = iter(range(100, 1000, 100))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(memory_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(memory_gpu, "_held_bytes", lambda made: next(held))
    monkeypatch.setattr(memory_gpu, "gpu_machine", lambda **rates: "machine=cpu model.depth=8")
    monkeypatch.setattr(memory_gpu, "PROFILE", "profile=fake")
    monkeypatch.setattr(memory_gpu, "BATCH", 2)
    half = "memory=plan memory.target_reduction=0.1 memory.budget_s=1"
    ours = {"keep": "memory=keep", "plan, graphs": f"{half} {memory_gpu.GRAPHS}"}
    monkeypatch.setattr(memory_gpu, "OURS", ours)
    row = memory_gpu.compare_ways("resnet20_v1", SIDE_OF_RUN, rounds=1, rates={})
    ways = row["ways"]
    assert set(ways) == {*ours, "plain", "save_on_cpu", "torchtune", "checkpoint"}
    assert "not installed" in ways["torchtune"]["refused"]
    assert ways["keep"]["overhead"] == ways["keep"]["saved"] == 0
    assert ways["plan, graphs"]["saved"] == 1 - 200 / 100
    assert all(found["step_s"] > 0 for way, found in ways.items() if way != "torchtune")


def test_the_loss_is_the_same_with_layers_run_again():
    images = torch.randn(IMAGES)
    assert torch.equal(
        plain_loss(small_net(), images), plain_loss(small_net(), images, is_checkpointed=True)
    )
