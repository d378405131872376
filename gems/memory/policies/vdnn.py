"""vDNN: offload the inputs of layers after forward, and prefetch them before backward.

Source: Rhu et al. 2016, arXiv 1602.08124, section III. vDNN offloads the input X of each feature
extraction layer during its forward, and brings it back during a later layer's backward. Here X are
the saved tensors of a layer: each layer is a segment, and a tensor that several layers save leaves
with the last of them (the paper's reference count). A copy is posted after its layer's forward. If
the next layer is offloaded as well, the copy includes the layer's output, which is the next
layer's X.

The paper's layers are single operations; a layer here may be a whole block. So vdnn_conv selects
tensors: it offloads the saved tensors that convolutions read, even if other operations save them,
too. Other inputs of poolings and norms, and what activations save, stay on the device.

For the prefetch window, convolutions are the layers whose kind says so, and composites with weights
(residual blocks, inception modules, cells), since convolutions take most of their time. Poolings,
norms, activations and layers for sequences do not count. The classifier (kinds linear and head)
stays on the device, as in the paper.
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
    """Offload every feature extraction layer that saves anything, whether or not the plan fits.

    As published, the rank waits at the end of each layer for the copies that ran meanwhile: a copy
    out can overlap with the next action of the rank, a copy back with one layer (the paper's
    window). If `asynchronous`, it waits for a copy out only when it has ended by the profile's
    times, and for a copy back only when it is needed.
    """
    return _plan(case, "vdnn_all", _saving(case), asynchronous)


def vdnn_conv(case: MemoryCase, asynchronous: bool = False) -> MemoryPlan:
    """Offload only inputs of convolutions, whose long forward hides the copy; else as `vdnn_all`.

    Such a tensor leaves after the forward of the layer whose convolution saves it. If a profile
    does not identify inputs of convolutions, layers with convolutions are offloaded as a whole.
    """
    if any(storage.conv_savers for layer in case.profile.layers for storage in layer.saved):
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
    """Return the first of the paper's trials that fits (section III.C).

    The trials are none, conv and all with the fastest convolution algorithms, then conv and all
    with less workspace. The paper trades speed for workspace separately for each convolution. torch
    has only cuDNN's benchmark switch for all layers; `counters` has the trial, and the setting of
    the switch under `cudnn_benchmark`. If the profile was measured on a GPU, the workspaces of
    convolutions are attributed to the fast algorithms (`without_workspace`); otherwise the switch
    does not change any bytes. It never changes times.

    Raises:
        DoesNotFitError: offloading all layers, with the least workspace, does not fit the device.
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
    for number, (trial, plan, trial_case) in enumerate(trials, 2):
        # up to the first rank that exceeds the limit
        peaks_by_rank = trial_case.peak_bytes(plan) if number <= len(trials) else iter(least)
        peaks = list(takewhile(limit.__ge__, peaks_by_rank))
        counters = {
            "trial": trial,
            "cudnn_benchmark": trial_case is case,
            "trials": number,
            "peak_bytes": peaks,
        }
        if len(peaks) == len(least):
            break
    return replace(plan, policy="vdnn_dyn", counters={**(plan.counters or {}), **counters})


def without_workspace(profile: ModelProfile) -> ModelProfile:
    """Return a profile measured on a GPU as if convolutions needed no workspace.

    This is a lower bound, since the temporary memory of a composite's other kernels is subtracted,
    too. Other profiles are returned unchanged.
    """
    if profile.source != "measured" or profile.device == "cpu":
        return profile
    return replace(profile, layers=tuple(map(_lean, profile.layers)))


def is_conv(layer: LayerProfile) -> bool:
    """Return whether a layer has a convolution, so that its time hides a copy."""
    kind = layer.kind.lower()
    if "conv" in kind:
        return True
    return layer.param_bytes > 0 and not any(word in kind for word in _NO_CONVOLUTIONS)


def is_classifier(layer: LayerProfile) -> bool:
    """Return whether a layer belongs to the classifier, which vDNN does not offload."""
    return layer.kind.lower() in _CLASSIFIERS


def _saving(case: MemoryCase, only_conv_inputs: bool = False) -> list[bool]:
    """Return, for each layer, whether it extracts features and saves anything movable.

    With `only_conv_inputs`, its convolutions must save it.
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
        offloads = [(end - 1, 0, False)] if chosen[end - 1] else []
        for place, back in enumerate(prefetch_window(convs[first:end], chosen[first:end])):
            if back is not None:
                offloads.append((first + back, place - back, not asynchronous))
        for layer, ahead, is_awaited in offloads:
            layers[layer] = Segment(
                layer, layer + 1, Choice.OFFLOAD, ahead=ahead, is_awaited=is_awaited
            )
    plan = replace(
        MemoryPlan.by_layer(policy, case.boundaries, layers), only_conv_inputs=only_conv_inputs
    )
    if asynchronous:
        plan = _without_waits(case, plan)
    moved = sum(
        storage.total_bytes
        for first, end in pairwise(case.boundaries)
        for storage in saved_storages(case.profile, first, end, case.least_bytes)
        if storage.is_movable
        and storage.owner in layers
        and (storage.conv_savers or not only_conv_inputs)
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
    """Set `free_after` to the fewest actions, over all micro-batches, after which a copy has ended.

    Times are those of the profile. The limit is the beginning of the stage's backward, where a
    later segment may bring back the same storages.
    """
    lowered = case.lowered(plan)
    costs = segment_costs(case.profile, plan, lowered, case.d2h_bytes_per_s, case.h2d_bytes_per_s)
    needed: dict[Place, int] = {}
    for actions in lowered.rank_schedules:
        compute = [action for action in actions if action.kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
        ends = list(accumulate(map(costs.time, compute)))
        forwards = {action: index for index, action in enumerate(compute) if action.kind is Kind.F}
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
            first = forwards[forward]
            engine = max(engine, ends[first]) + costs.time(action)
            hiding = next(
                (index for index in range(first + 1, len(ends)) if ends[index] >= engine), len(ends)
            )
            count = max(1, min(hiding, turns[key] - 1, back[forward] - 2) - first)
            needed[place_of(action)] = min(needed.get(place_of(action), count), count)
    return plan.changed(
        lambda place, segment: replace(segment, free_after=needed.get(place, segment.free_after))
    )


def prefetch_window(
    is_conv: Sequence[bool], is_offloaded: Sequence[bool]
) -> tuple[int | None, ...]:
    """Return, for each layer, the layer whose input is fetched during its backward, if any.

    It is the nearest earlier layer whose input is offloaded and not yet prefetched. The search ends
    at the next convolution, so that nothing returns long before it is needed (Rhu et al. 2016,
    arXiv 1602.08124, figure 10). Every offloaded input appears once, at the latest with the next
    layer. Only the input of the last layer is fetched on demand. The arguments have an entry for
    each layer, in forward order.
    """
    fetched: list[int | None] = [None] * len(is_conv)
    for layer in reversed(range(len(is_conv))):
        for before in reversed(range(layer)):
            if is_offloaded[before] and before not in fetched:
                fetched[layer] = before
                break
            if is_conv[before]:
                break
    return tuple(fetched)
