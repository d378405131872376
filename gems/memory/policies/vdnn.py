"""vDNN: layers' inputs are offloaded after forward and prefetched before backward (Rhu et al. 2016).

arXiv 1602.08124, section III. vDNN offloads the input X of each feature extraction layer while the
layer's forward runs, and brings it back while a later layer's backward runs. Here a layer's saved
tensors are its X: each layer is a segment of its own, and a tensor that several layers save leaves
with the last of them, as the paper's reference count has it. A copy is posted after its layer's
forward. It takes the layer's output too where the next layer is offloaded as well, which is then
that layer's X, on its way while that layer runs.

The paper's layers are single operations; one here may be a whole block. So vdnn_conv goes by
tensors: of what a layer saves, those that its convolutions read leave. The inputs of its poolings
and norms, and what else they and activations save, stay. A tensor that others save too is still a
convolution's X.

For the window of the copies back a convolution is a layer whose kind says so, and a composite with
weights (a residual block, an inception module, a cell), since most of its time is in convolutions.
Poolings, norms, activations and what belongs to sequences are none. The classifier (kinds linear
and head) is left untouched, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile

from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase
from gems.memory.plan import Choice, MemoryPlan, Place, Segment, place_of
from gems.memory.storages import saved_storages
from gems.memory.timeline import segment_costs
from gems.profile import LayerProfile, ModelProfile
from gems.schedule.action import Action, Kind

_CLASSIFIERS = ("linear", "head")
_NO_CONVOLUTIONS = (
    "pool",
    "norm",
    "relu",
    "gelu",
    "activation",
    "dropout",
    "linear",
    "head",
    "flatten",
    "embedding",
    "lstm",
    "gru",
    "attention",
)
_HELP = (
    "vdnn moves saved tensors only: use memory=plan, more partitions, or a smaller image or"
    " micro-batch"
)


def vdnn_all(case: MemoryCase, asynchronous: bool = False) -> MemoryPlan:
    """Offload every feature extraction layer that saves anything.

    As published, the rank waits at the end of each layer for the copies that ran beside it: a copy
    out has the next action of the rank to hide behind, and a copy back the one layer of the paper's
    window. With `asynchronous` it waits for a copy out only when, by the profile's times, it has
    ended, and for a copy back only when it is needed. Whether the plan fits the device is not asked
    here.
    """
    return _plan(case, "vdnn_all", _saving(case), asynchronous)


def vdnn_conv(case: MemoryCase, asynchronous: bool = False) -> MemoryPlan:
    """Offload only what convolutions read, whose long forward hides the copy; else as `vdnn_all`.

    Such a tensor leaves after the forward of the layer whose convolution saves it. A profile in
    which no storage is a convolution's input, such as one that knows only sums, does not tell them
    apart: all that a layer with convolutions saves leaves then.
    """
    if any(one.conv_savers for layer in case.profile.layers for one in layer.saved):
        return _plan(
            case,
            "vdnn_conv",
            _saving(case, only_conv_inputs=True),
            asynchronous,
            only_conv_inputs=True,
        )
    chosen = [
        saves and is_conv(layer)
        for layer, saves in zip(case.profile.layers, _saving(case), strict=True)
    ]
    return _plan(case, "vdnn_conv", chosen, asynchronous)


def vdnn_dyn(case: MemoryCase, asynchronous: bool = False) -> MemoryPlan:
    """Take the first that fits of the paper's trials (section III.C).

    None, conv, all, then conv and all again.
    The paper tries its policies with the fastest convolution algorithms first, and then gives up
    speed for workspace, convolution by convolution, down to the algorithm that needs none. torch
    lets nobody choose an algorithm: cuDNN's benchmark switch, one for all layers, stands for the
    choice, and `counters` say under `cudnn_benchmark` how it is to be set, and which trial it was.
    What the switch changes is known only as far as the profile tells: where it was measured on a
    GPU, a convolution's `workspace_bytes` are taken to be the fast algorithm's and to be gone
    without it (see `without_workspace`); elsewhere both settings have the same bytes. Times are the
    same under both.

    Raises:
        DoesNotFitError: not even all layers offloaded, with the least workspace, fit the device.
    """
    lean = replace(case, profile=without_workspace(case.profile))
    keep = replace(_plan(case, "vdnn_dyn", [False] * case.profile.num_layers, False), counters=None)
    conv = vdnn_conv(case, asynchronous)
    everything = vdnn_all(case, asynchronous)
    limit = case.limit_bytes
    if limit is None:
        return replace(keep, counters={"trial": "none", "cudnn_benchmark": True, "trials": 1})
    least = tuple(lean.peak_bytes(everything))
    if max(least) > limit:
        rank = least.index(max(least))
        raise DoesNotFitError(f"rank {rank} under vdnn_all", least[rank], limit, _HELP)
    trials = [
        ("none", keep, case),
        ("conv", conv, case),
        ("all", everything, case),
        ("conv", conv, lean),
        ("all", everything, lean),
    ]
    for number, (trial, plan, tried) in enumerate(trials, 2):
        # up to the first rank that is too full, if there is one
        found = tried.peak_bytes(plan) if number <= len(trials) else iter(least)
        peaks = list(takewhile(limit.__ge__, found))
        counters = {
            "trial": trial,
            "cudnn_benchmark": tried is case,
            "trials": number,
            "peak_bytes": peaks,
        }
        if len(peaks) == len(least):
            break
    return replace(plan, policy="vdnn_dyn", counters={**(plan.counters or {}), **counters})


def without_workspace(profile: ModelProfile) -> ModelProfile:
    """Return a profile as with convolutions that need no workspace.

    One not measured on a GPU as it is.
    This is a lower bound: of a composite, what its other kernels free goes too.
    """
    if profile.source != "measured" or profile.device == "cpu":
        return profile
    return replace(profile, layers=tuple(map(_lean, profile.layers)))


def is_conv(layer: LayerProfile) -> bool:
    """Whether a layer has a convolution, so that its time hides a copy."""
    kind = layer.kind.lower()
    if "conv" in kind:
        return True
    return layer.param_bytes > 0 and not any(word in kind for word in _NO_CONVOLUTIONS)


def is_classifier(layer: LayerProfile) -> bool:
    """Whether a layer belongs to the classifier, which vDNN leaves untouched."""
    return layer.kind.lower() in _CLASSIFIERS


def _saving(case: MemoryCase, only_conv_inputs: bool = False) -> list[bool]:
    """Return for each layer whether it extracts features and saves anything large enough to be moved.

    With `only_conv_inputs` its convolutions are to save it.
    """
    saving: set[int] = set()
    for first, end in pairwise(case.boundaries):
        for storage in saved_storages(case.profile, first, end, case.least_bytes):
            if storage.is_movable:
                saving.update(storage.conv_savers if only_conv_inputs else storage.savers)
    return [
        index in saving and not is_classifier(layer)
        for index, layer in enumerate(case.profile.layers)
    ]


def _plan(
    case: MemoryCase,
    policy: str,
    chosen: Sequence[bool],
    asynchronous: bool,
    only_conv_inputs: bool = False,
) -> MemoryPlan:
    convs = [is_conv(layer) for layer in case.profile.layers]
    layers: dict[int, Segment] = {}
    for first, end in pairwise(case.boundaries):
        found = [(end - 1, 0, False)] if chosen[end - 1] else []
        for place, back in enumerate(prefetch_window(convs[first:end], chosen[first:end])):
            if back is not None:
                found.append((first + back, place - back, not asynchronous))
        for layer, ahead, is_awaited in found:
            layers[layer] = Segment(
                layer, layer + 1, Choice.OFFLOAD, ahead=ahead, is_awaited=is_awaited
            )
    plan = replace(
        MemoryPlan.by_layer(policy, case.boundaries, layers), only_conv_inputs=only_conv_inputs
    )
    if asynchronous:
        plan = _without_waits(case, plan)
    moved = sum(
        one.total_bytes
        for first, end in pairwise(case.boundaries)
        for one in saved_storages(case.profile, first, end, case.least_bytes)
        if one.is_movable and one.owner in layers and (one.conv_savers or not only_conv_inputs)
    )
    return replace(plan, counters={"offloaded_layers": len(layers), "offloaded_layer_bytes": moved})


def _lean(layer: LayerProfile) -> LayerProfile:
    if not is_conv(layer):
        return layer
    spare = layer.workspace_bytes

    def less(peak_bytes: int, at_least: int) -> int:
        return max(min(peak_bytes, at_least), peak_bytes - spare)

    return replace(
        layer,
        workspace_bytes=0,
        forward_peak_bytes=less(layer.forward_peak_bytes, layer.kept_bytes),
        backward_peak_bytes=less(layer.backward_peak_bytes, layer.output_grad_bytes),
        backward_peak_at=tuple((ahead, less(peak, 0)) for ahead, peak in layer.backward_peak_at),
    )


def _without_waits(case: MemoryCase, plan: MemoryPlan) -> MemoryPlan:
    """Set `free_after` to the fewest actions, over all micro-batches, that run until a copy out has ended.

    By the profile's times, and no more than run until the stage's backward begins: there a later
    segment may bring back what this one has taken.
    """
    lowered = case.lowered(plan)
    costs = segment_costs(case.profile, plan, lowered, case.d2h_bytes_per_s, case.h2d_bytes_per_s)
    needed: dict[Place, int] = {}
    for actions in lowered.rank_schedules:
        compute = [action for action in actions if action.kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
        ends = list(accumulate(map(costs.time, compute)))
        made = {action: index for index, action in enumerate(compute) if action.kind is Kind.F}
        back: dict[Action, int] = {}
        turns: dict[tuple[int, int, int | None], int] = {}
        for index, action in enumerate(compute):
            if action.kind in (Kind.B, Kind.I):
                back[action._replace(kind=Kind.F)] = index
                turns.setdefault((action.direction, action.stage, action.micro_batch), index)
        engine = 0.0
        for action in actions:
            if action.kind is not Kind.OFFLOAD:
                continue
            forward = action._replace(kind=Kind.F)
            key = (action.direction, action.stage, action.micro_batch)
            first = made[forward]
            engine = max(engine, ends[first]) + costs.time(action)
            hiding = next(
                (index for index in range(first + 1, len(ends)) if ends[index] >= engine), len(ends)
            )
            count = max(1, min(hiding, turns[key] - 1, back[forward] - 2) - first)
            needed[place_of(action)] = min(needed.get(place_of(action), count), count)
    return plan.changed(
        lambda place, each: replace(each, free_after=needed.get(place, each.free_after))
    )


def find_prefetch(
    layer: int, is_conv: Sequence[bool], is_offloaded: Sequence[bool], is_prefetched: Sequence[bool]
) -> int | None:
    """Return the layer whose input is to be fetched while the backward of `layer` runs.

    None for no one's.
    It is the nearest layer before whose input has left and is not on its way back yet. The search
    ends at the next convolution, so that nothing comes back long before it is needed (Rhu et al.
    2016, arXiv 1602.08124, figure 10).
    """
    for before in range(layer - 1, -1, -1):
        if is_offloaded[before] and not is_prefetched[before]:
            return before
        if is_conv[before]:
            return None
    return None


def prefetch_window(
    is_conv: Sequence[bool], is_offloaded: Sequence[bool]
) -> tuple[int | None, ...]:
    """Return, for each layer, the layer whose input is fetched while its backward runs.

    Every offloaded input appears once, and at the latest with the layer after it. Only the input of
    the very last layer is not fetched ahead; it comes on demand. The arguments have an entry for
    each layer in the order of forward.
    """
    is_prefetched = [False] * len(is_conv)
    fetched: list[int | None] = [None] * len(is_conv)
    for layer in range(len(is_conv) - 1, -1, -1):
        fetched[layer] = found = find_prefetch(layer, is_conv, is_offloaded, is_prefetched)
        if found is not None:
            is_prefetched[found] = True
    return tuple(fetched)
