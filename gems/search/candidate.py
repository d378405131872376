"""Candidates: all configurations for a number of devices and a global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gems.memory.registry import POLICIES
from gems.plan.strips_choice import KEY, in_words, shown
from gems.schedule import FAMILIES, Family, Request, Terms

KEEP = "keep"
# Limits for slow candidates in ranks x micro-batches, and for `plan` in layers x micro-batches.
MAX_SLOW = 512
MAX_PLANNED = 128
MAX_FORWARDS = 2**14  # stages x micro-batches of one step


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration: pipeline ranks, replicas, schedule, micro-batches and memory policy.

    `cap` is in micro-batches on a rank's part of the model. `parts` is the number of GEMS's
    micro-batches of one run. `chunks` is the number of stages of a rank if the schedule leaves that
    free. `how` is the memory.recompute of a policy that reads it. `strips` is the number of strips
    of a micro-batch, or the rows and columns of its blocks.
    """

    partitions: int
    replicas: int
    schedule: str
    micro_batch_size: int
    micro_batches: int
    cap: float | None = None
    parts: int = 1
    chunks: int = 1
    memory: str = KEEP
    how: str = ""
    strips: int | tuple[int, ...] = 1

    @property
    def family(self) -> Family:
        """The schedule's family."""
        return FAMILIES[self.schedule]

    @property
    def kept(self) -> Candidate:
        """The same configuration with all activations kept."""
        return replace(self, memory=KEEP, how="")

    @property
    def num_stages(self) -> int:
        """The number of stages of the model; a lower bound for a searched schedule."""
        return self.partitions * (self.family.stages(self.chunks) or 1)

    def terms(self, f: float = 1.0, i: float = 1.0, w: float = 1.0) -> Terms:
        """Return the terms of the family's closed forms.

        `f`, `i` and `w` are the times of the forward, input gradient and weight gradient.
        """
        chunks = self.family.stages(self.chunks)
        return Terms(self.partitions, self.micro_batches, self.parts, chunks, self.cap, f, i, w)

    @property
    def global_batch(self) -> int:
        """The number of images of one optimizer step."""
        return self.replicas * self.micro_batches * self.micro_batch_size

    @property
    def slowness(self) -> int:
        """The reason why the evaluation is slow, from 0 to 3.

        0: not slow, because the schedule follows from the counts alone. 1: the schedule depends on
        the times of the stages. 2: the policy takes seconds. 3: the schedule is searched.
        """
        if self.family.is_searched:
            return 3
        if self.how in POLICIES[self.memory].slow_ways:
            return 2
        return int(not self.family.is_quick)

    @property
    def label(self) -> str:
        """The schedule with its sizes, as short text."""
        cap = "" if self.cap is None else f" K={self.cap:g}"
        parts = f" parts={self.parts}" if self.parts > 1 else ""
        strips = "" if self.strips == 1 else f", {in_words(self.strips)}"
        return (
            self.schedule + cap + parts + (f" v={self.chunks}" if self.chunks > 1 else "") + strips
        )

    @property
    def policy(self) -> str:
        """The memory policy with its memory.recompute, as short text."""
        return f"{self.memory}/{self.how}" if self.how else self.memory

    def overrides(self, boundaries: Sequence[int] = ()) -> tuple[str, ...]:
        """Return the configuration as words of a command line.

        The partition is included if it is given and the schedule is not searched.
        """
        words = [
            f"parallel.partitions={self.partitions}",
            f"parallel.replicas={self.replicas}",
            f"parallel.micro_batches={self.micro_batches}",
            f"parallel.micro_batch_size={self.micro_batch_size}",
            f"schedule={self.schedule}",
            f"memory={self.memory}",
            "cost=profile",
        ]
        words += [f"parallel.parts={self.parts}"] if self.parts > 1 else []
        words += [f"{KEY}={shown(self.strips)}"] if self.strips != 1 else []
        words += [f"schedule.chunks={self.chunks}"] if self.chunks > 1 else []
        words += [f"schedule.activation_cap={self.cap:g}"] if self.cap is not None else []
        words += [f"memory.recompute={self.how}"] if self.how else []
        is_cut = bool(boundaries) and not self.family.is_searched  # a search also finds the cut
        words += [f"parallel.boundaries=[{','.join(map(str, boundaries))}]"] if is_cut else []
        return tuple(words)


def candidates(
    num_gpus: int, global_batch: int, num_layers: int, has_policies: bool = True
) -> list[Candidate]:
    """Return all configurations that use every device and make steps of the global batch.

    `num_gpus` is partitions x replicas, and `num_layers` the largest number of stages. Without
    `has_policies`, activations may neither leave the device nor be recomputed. GPipe and layer
    parallelism are left out: 1F1B with a cap always replaces them and needs less.
    """
    policies = [(KEEP, "")]
    if has_policies:
        policies = [(name, how) for name, policy in POLICIES.items() for how in policy.quick_ways]
        policies += [(name, how) for name, policy in POLICIES.items() for how in policy.slow_ways]
    answer = []
    for partitions in _divisors(num_gpus):
        replicas = num_gpus // partitions
        if global_batch % replicas or partitions > num_layers:
            continue
        batch = global_batch // replicas
        for size in _divisors(batch):
            shape = Candidate(partitions, replicas, "1f1b", size, batch // size)
            for candidate in _schedules(shape):
                if (
                    candidate.num_stages > num_layers
                    or candidate.num_stages * candidate.micro_batches > MAX_FORWARDS
                ):
                    continue
                variants = (replace(candidate, memory=memory, how=how) for memory, how in policies)
                answer += [variant for variant in variants if _is_asked(variant, num_layers)]
    return answer


def _schedules(shape: Candidate) -> Iterator[Candidate]:
    """Yield a shape with every schedule that serves its counts.

    On one rank all orders take equally long, so only 1F1B is yielded.
    """
    if shape.partitions == 1:
        yield shape
        return
    request = Request(shape.partitions, shape.micro_batches)
    for name, family in FAMILIES.items():
        if family.planned is None or (family.num_directions == 2 and shape.micro_batches % 2):
            continue
        for size in family.planned(request):
            chunks = size.chunks if family.stages_per_rank is None else 1
            yield replace(shape, schedule=name, cap=size.cap, parts=size.num_parts, chunks=chunks)


def _is_asked(candidate: Candidate, num_layers: int) -> bool:
    """Return whether the effort to evaluate a candidate is reasonable.

    A searched schedule is only evaluated with all activations kept.
    """
    if candidate.family.is_searched:
        return candidate.memory == KEEP
    if candidate.memory == "plan" and num_layers * candidate.micro_batches > MAX_PLANNED:
        return False
    return not candidate.slowness or candidate.partitions * candidate.micro_batches <= MAX_SLOW


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
