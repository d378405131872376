"""Host time of a step: Python and torch's dispatcher, with negligible arithmetic.

A deep network on tiny maps, one rank, one thread, micro-batches of one image: our engine under
memory policies and with a split backward, beside a plain torch loop, torch's checkpoint around the
segments that our recompute has, and its save_on_cpu. Strips run on equal arithmetic: one image in k
strips over k images that are as high as a strip. All take turns in one process. Shown are medians
of the CPU time of a step, and of its ratios over the plain loop, over keep, and of strips over
whole images, in the same turn.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gems.models.build import input_spec
from gems.plan.evaluate import evaluate
from gems.plan.rank_plan import RankPlan
from scripts.bench.memory_rig import OneRank, PlainLoop, layer_modules, one_rank
from scripts.bench.rig import Table, answered, in_turns, machine, opened_device, options

STRIPS = (2, 8)
PEERS = ("plain", "checkpoint", "save_on_cpu")
POLICIES = {
    "keep": "memory=keep",
    "recompute": "memory=recompute",
    "vdnn_all": "memory=vdnn_all",
    "plan": "memory=plan memory.target_reduction=0.5",
    "zb_h1": "schedule=zb_h1",
}
MAP_BYTES = 2048  # maps are copied, and vectors by channel are not, as by default at 512 px
WARM_UP_STEPS = 2
Step = Callable[[], object]


def open_steps(model: str, side_px: int, micro_batches: int, only: str) -> dict[str, Step]:
    """Return the steps whose name contains `only`, and the steps they are compared with."""

    def plan(count: int, words: str) -> RankPlan:
        batches = f"parallel.micro_batch_size=1 parallel.micro_batches={count}"
        spec = one_rank(model, side_px, batches, f"memory.min_offload_bytes={MAP_BYTES}", words)
        return evaluate(spec).for_ranks

    def ours(count: int, words: str) -> Step:
        return OneRank(plan(count, words)).step

    def peer(name: str) -> Step:
        of_recompute = plan(micro_batches, POLICIES["recompute"])
        layers = layer_modules(of_recompute.spec.model, of_recompute.spec.data)
        assert of_recompute.memory_plan is not None
        (segments,) = of_recompute.memory_plan.stages
        if name == "checkpoint":
            layers = nn.ModuleList(nn.Sequential(*layers[at.first : at.end]) for at in segments)
        images = torch.randn(micro_batches, *input_spec(of_recompute.spec.data, 1).shape)
        return PlainLoop(layers, list(images), name).step

    ways: dict[str, Callable[[], Step]] = {name: partial(peer, name) for name in PEERS}
    ways |= {name: partial(ours, micro_batches, words) for name, words in POLICIES.items()}
    for k in STRIPS:
        norm = "model.norm=frozen_batch"
        ways[f"{k} whole"] = partial(ours, k, norm)
        height = f"data.height_px={k * side_px} parallel.strips={k}"
        ways[f"{k} strips"] = partial(ours, 1, f"{norm} {height}")
    chosen = {name for name in ways if only in name}
    chosen |= {base for name in chosen for base in bases(name).values()}
    return {name: way() for name, way in ways.items() if name in chosen}


def bases(name: str) -> dict[str, str]:
    """Return the steps that a method is compared with, by the key of the ratio."""
    if name.endswith((" strips", " whole")):
        return {"over_whole": name.replace("strips", "whole")}
    return {"over_plain": "plain", "over_keep": "keep"}


def timed(step: Step) -> float:
    """Return the CPU seconds of a step."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def main(argv: Sequence[str]) -> int:
    """Print the table, or with --json one object."""
    arguments = options(
        __doc__,
        argv,
        json=False,
        only="",
        model="resnet110_v2",
        side_px=16,
        micro_batches=4,
        rounds=15,
    )
    opened_device("bench-host-overhead", "cpu", threads=1)
    facts = machine()
    steps = open_steps(arguments.model, arguments.side_px, arguments.micro_batches, arguments.only)
    in_turns(steps, WARM_UP_STEPS)
    gc.freeze()  # as the ranks of a run
    times_by_name = in_turns(
        {name: partial(timed, step) for name, step in steps.items()}, arguments.rounds
    )
    table = Table(
        "way:<14",
        "step ms=step_s:>9.1f",
        "over plain=over_plain:>11.2f",
        "over keep=over_keep:>11.2f",
        "over whole=over_whole:>11.2f",
    )
    rows: list[dict[str, Any]] = []
    for name, times in times_by_name.items():
        ratios = {
            key: statistics.median(
                time_s / its for time_s, its in zip(times, times_by_name[base], strict=True)
            )
            for key, base in bases(name).items()
        }
        rows.append(table.row({"way": name, "step_s": statistics.median(times), **ratios}))
    return answered({**facts, "torch": torch.__version__, "rows": rows}, False, arguments.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
