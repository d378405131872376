"""Schedules: which rank does what, in which order. Pure: no torch, no MPI, no Hydra."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gems.schedule.costs import StageCosts
from gems.schedule.families.chimera import chimera
from gems.schedule.families.dualpipe_v import dualpipe_v
from gems.schedule.families.gems_master import gems_mast, gems_master
from gems.schedule.families.gems_zb import gems_zb
from gems.schedule.families.gpipe import gpipe
from gems.schedule.families.interleaved import interleaved_1f1b, looped_bfs
from gems.schedule.families.layer_parallel import layer_parallel
from gems.schedule.families.one_f_one_b import one_f_one_b
from gems.schedule.families.published_schedules import named
from gems.schedule.families.v_shape import v_half, v_min
from gems.schedule.families.zb_v import zb_v
from gems.schedule.families.zero_bubble import zb_h1, zb_h2
from gems.schedule.request import Request
from gems.schedule.schedule import Schedule
from gems.schedule.synthesis import capped

FROM_FILE = "file"
PLACED = "placed"
SEARCHED = ("capped",)
ACTIONS = ("recompute", "offload")
PLACEMENTS = ("linear", "bidirectional", "v", "wave")


@dataclass(frozen=True, slots=True)
class Family:
    """A named schedule.

    `num_directions` is how many ways its pipeline runs, `has_runs` whether GEMS's replications x parts make its
    micro-batches. `stages_per_rank` is None where the request says it (`chunks`), and 0 where a search does.
    """

    build: Callable[[Request], Schedule]
    num_directions: int = 1
    has_runs: bool = False
    stages_per_rank: int | None = 1

    def stages(self, chunks: int) -> int:
        """Return the stages that a rank holds in one direction, 0 where that is known only once it is built."""
        return chunks if self.stages_per_rank is None else self.stages_per_rank


def _with_costs(build: Callable[[int, int, StageCosts], Schedule], stages_per_rank: int) -> Family:
    """Make the family of a schedule that looks at stage times."""
    return Family(
        lambda r: build(r.num_ranks, r.num_micro_batches, r.costs.stages(stages_per_rank * r.num_ranks)),
        stages_per_rank=stages_per_rank,
    )


FAMILIES: dict[str, Family] = {
    "layer_parallel": Family(lambda r: layer_parallel(r.num_ranks, r.num_micro_batches)),
    "gpipe": Family(lambda r: gpipe(r.num_ranks, r.num_micro_batches)),
    "1f1b": Family(lambda r: one_f_one_b(r.num_ranks, r.num_micro_batches, r.cap)),
    "interleaved_1f1b": Family(
        lambda r: interleaved_1f1b(r.num_ranks, r.num_micro_batches, r.chunks), stages_per_rank=None
    ),
    "looped_bfs": Family(lambda r: looped_bfs(r.num_ranks, r.num_micro_batches, r.chunks), stages_per_rank=None),
    "zb_h1": _with_costs(zb_h1, 1),
    "zb_h2": _with_costs(zb_h2, 1),
    "zb_v": _with_costs(zb_v, 2),
    "v_half": _with_costs(v_half, 2),
    "v_min": _with_costs(v_min, 2),
    "dualpipe_v": Family(lambda r: dualpipe_v(r.num_ranks, r.num_micro_batches), stages_per_rank=2),
    "chimera": Family(lambda r: chimera(r.num_ranks, r.num_micro_batches), num_directions=2),
    "gems_mast": Family(lambda r: gems_mast(r.num_ranks, r.num_parts), num_directions=2, has_runs=True),
    "gems_master": Family(
        lambda r: gems_master(r.num_ranks, r.num_micro_batches // r.num_parts, r.num_parts),
        num_directions=2,
        has_runs=True,
    ),
    "gems_zb": Family(lambda r: gems_zb(r.num_ranks, r.num_micro_batches), num_directions=2),
    "capped": Family(lambda r: capped(r, named(r)).schedule, stages_per_rank=0),
}
PUBLISHED = tuple(name for name in FAMILIES if name not in SEARCHED)


def generate(name: str, num_ranks: int, num_micro_batches: int, num_parts: int = 1, **more: object) -> Schedule:
    """Build the compute-only schedule of a family in `FAMILIES`; `more` are further fields of `Request`.

    Raises:
        ConfigError: counts or a cap that the family cannot serve.
    """
    return FAMILIES[name].build(Request(num_ranks, num_micro_batches, num_parts, **more))  # type: ignore[arg-type]
