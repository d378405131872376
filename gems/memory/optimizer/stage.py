"""One stage in the MILP: its storages, possible segments, and the bytes each layer then holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from gems.memory.layer_storages import Storage, made_storages
from gems.memory.optimizer.milp import Program, Terms
from gems.memory.plan import Choice
from gems.memory.stage_storages import Layers, profile_storages
from gems.profile import LayerProfile, ModelProfile


@dataclass(frozen=True)
class StageLayers:
    """The layers `first` up to `end` of a model, and the storages that they make and that matter to a plan."""

    first: int
    end: int
    layers: tuple[LayerProfile, ...]
    storages: tuple[Storage, ...]
    layer_storages: Layers

    @cached_property
    def full_bytes(self) -> dict[int, int]:
        """What a layer has saved, wherever in the stage it was made, by layer."""
        found = dict.fromkeys(range(self.first, self.end), 0)
        for each in self.storages:
            for saver in each.savers:
                found[saver] += each.total_bytes
        return found

    @cached_property
    def shared(self) -> tuple[Storage, ...]:
        """The storages that several layers see."""
        return tuple(each for each in self.storages if not each.is_own)

    @cached_property
    def own_bytes(self) -> dict[int, int]:
        """What only the layer itself sees and saves, by layer."""
        return self._own(lambda each: bool(each.savers))

    @cached_property
    def own_movable_bytes(self) -> dict[int, int]:
        """The part of `own_bytes` that a copy takes."""
        return self._own(lambda each: bool(each.savers) and each.is_movable)

    @cached_property
    def own_product_bytes(self) -> dict[int, int]:
        """What only the layer itself sees and a selective recompute keeps, by layer."""
        return self._own(lambda each: each.is_product)

    @cached_property
    def own_cheap_bytes(self) -> dict[int, int]:
        """What only the layer itself sees and saves and a selective recompute brings back, by layer."""
        return self._own(lambda each: bool(each.savers) and not each.is_product)

    @cached_property
    def own_let_go_bytes(self) -> dict[int, int]:
        """The part of `own_product_bytes` that no layer saves: a recompute frees it after its use."""
        return self._own(lambda each: each.is_product and not each.savers)

    def layer(self, layer: int) -> LayerProfile:
        """Return a layer by its number in the model."""
        return self.layers[layer - self.first]

    def _own(self, counts: Callable[[Storage], bool]) -> dict[int, int]:
        found = dict.fromkeys(range(self.first, self.end), 0)
        for each in self.storages:
            if each.is_own and counts(each):
                found[each.maker] += each.total_bytes
        return found


def stage_layers(profile: ModelProfile, first: int, end: int, least_bytes: int) -> StageLayers:
    """Return the layers `first` up to `end` with the storages that they make; storages below `least_bytes` stay."""
    storages = made_storages(profile, first, end, least_bytes)
    return StageLayers(first, end, profile.layers[first:end], storages, profile_storages(profile))


# how many possible segments a stage may have, about; longer ones are left out where it has more
MAX_OPTIONS = 1200


@dataclass(frozen=True, slots=True)
class SegmentOption:
    """A possible segment: the layers `first` up to `end`, under one choice."""

    first: int
    end: int
    choice: Choice


def max_option_layers(num_layers: int) -> int:
    """Return how many layers the MILP may recompute together, except the whole stage."""
    return max(2, MAX_OPTIONS // (2 * num_layers))


def segment_options(stage: StageLayers) -> list[SegmentOption]:
    """Return the possible segments of a stage: kept and offloaded ones of a layer, others of several.

    Of long stages only those up to some length, and the stage as a whole.
    """
    first, end = stage.first, stage.end
    longest = max_option_layers(end - first)
    options = []
    for begin in range(first, end):
        options += [SegmentOption(begin, begin + 1, choice) for choice in (Choice.KEEP, Choice.OFFLOAD)]
        ends = [stop for stop in range(begin + 1, end + 1) if stop - begin <= longest]
        if begin == first and end - first > longest:
            ends.append(end)
        for stop in ends:
            options.append(SegmentOption(begin, stop, Choice.RECOMPUTE))
            if any(layer.cheap_s < layer.recompute_s for layer in stage.layers[begin - first : stop - first]):
                options.append(SegmentOption(begin, stop, Choice.SELECTIVE))
    return options


class StageBlock:
    """The variables of a stage: one per possible segment, and cumulative sums of bytes on the device and moved.

    All expressions are bytes of one micro-batch, scaled by the MILP.
    """

    def __init__(self, program: Program, stage: StageLayers) -> None:
        self.program, self.stage = program, stage
        self.options = segment_options(stage)
        self.at = {option: program.variable(0.0, 1.0, is_whole=True) for option in self.options}
        self.covering: dict[int, list[SegmentOption]] = {layer: [] for layer in range(stage.first, stage.end)}
        for option in self.options:
            for layer in range(option.first, option.end):
                self.covering[layer].append(option)
        self.value_kept: dict[int, float] = {
            self.at[option]: float(option.choice is Choice.KEEP) for option in self.options
        }
        self._path()
        self.held = {each: self._held(each) for each in stage.shared}
        self.moved = {each: self._moved(each) for each in stage.shared if each.savers}
        self._kept_earlier: dict[int, Terms] = {}
        self._brought: dict[tuple[int, Choice], dict[int, int]] = {}
        self._sums()

    def backward_bytes(self, layer: int) -> Terms:
        """Return what is on the device during a layer's backward beyond what the layer itself has saved.

        That is what earlier layers keep, and what a recomputed segment has brought for layers before this one.
        """
        found = dict(self._earlier(layer))
        for option in self.covering[layer]:
            if option.choice.is_recomputed and option.first < layer:
                size = self.program.scaled_bytes(self._brought_bytes(option, layer))
                found[self.at[option]] = found.get(self.at[option], 0.0) + size
        return found

    def again_bytes(self, layer: int) -> Terms:
        """Return what is on the device while a segment is recomputed right before the backward of its last layer."""
        layer_storages, found = self.stage.layer_storages, dict(self._earlier(layer))
        for option in self.covering[layer]:
            if option.choice.is_recomputed and option.end == layer + 1:
                is_selective = option.choice is Choice.SELECTIVE
                size = (
                    layer_storages.selective_recompute_peak_bytes(option.first, option.end)
                    if is_selective
                    else float(layer_storages.spans.forward_peak[option.first, option.end])
                )
                found[self.at[option]] = found.get(self.at[option], 0.0) + self.program.scaled_bytes(size)
        return found

    def _earlier(self, layer: int) -> Terms:
        """Return what earlier layers keep on the device at the backward of a layer."""
        if layer not in self._kept_earlier:
            found = _joined(self._before(self.kept_own, layer), self._before(self.kept_done, layer))
            for each in self.stage.shared:
                if each.maker < layer <= each.last_use and layer not in each.savers:
                    found[self._rest(each, layer)] = self.program.scaled_bytes(each.total_bytes)
            self._kept_earlier[layer] = found
        return self._kept_earlier[layer]

    def forward_bytes(self, layer: int) -> Terms:
        """Return what is on the device of earlier layers when the forward of a layer begins."""
        return _joined(self._before(self.kept_own, layer), self._before(self.kept_made, layer))

    def moved_before(self, layer: int, is_forward: bool) -> Terms:
        """Return the bytes that copies take of earlier layers: made by them, or in backward needed by them alone."""
        shared = self.moved_made if is_forward else self.moved_done
        return _joined(self._before(self.moved_own, layer), self._before(shared, layer))

    def posted_before(self, layer: int) -> Terms:
        """Return the bytes whose copies may be posted when a layer's forward begins: saved by earlier ones."""
        return _joined(self._before(self.moved_own, layer), self._before(self.moved_saved, layer))

    def kept_all(self) -> Terms:
        """Return what stays on the device between forward and backward."""
        return self.forward_bytes(self.stage.end)

    def moved_all(self) -> Terms:
        """Return what copies take of a micro-batch."""
        return self.moved_before(self.stage.end, is_forward=True)

    def again_s(self, layer: int) -> Terms:
        """Return the time of the forward that is recomputed right before the backward of a layer, seconds scaled."""
        return {
            self.at[option]: self.program.scaled_s(self.again_time_s(option))
            for option in self.covering[layer]
            if option.choice.is_recomputed and option.end == layer + 1
        }

    def again_time_s(self, option: SegmentOption) -> float:
        """Return the seconds that it takes to recompute an option's forward."""
        layers = [self.stage.layer(layer) for layer in range(option.first, option.end)]
        return sum(layer.cheap_s if option.choice is Choice.SELECTIVE else layer.recompute_s for layer in layers)

    def worth_kept(self, terms: Terms) -> float:
        """Return the value of an expression if every layer is kept."""
        return sum(factor * self.value_kept.get(variable, 0.0) for variable, factor in terms.items())

    def _path(self) -> None:
        """Require the chosen options to form one way from the first layer to the last."""
        for layer in range(self.stage.first, self.stage.end):
            self.program.row({self.at[option]: 1.0 for option in self.covering[layer]}, low=1.0, high=1.0)
            if layer > self.stage.first:
                ending = {self.at[option]: 1.0 for option in self.covering[layer - 1] if option.end == layer}
                starting = {self.at[option]: -1.0 for option in self.covering[layer] if option.first == layer}
                self.program.row(ending | starting, low=0.0, high=0.0)

    def _needs(self, each: Storage, option: SegmentOption, layer: int) -> bool:
        """Whether an option over a layer holds that a storage stays on the device between forward and backward."""
        if option.choice.is_recomputed:
            is_product = option.choice is Choice.SELECTIVE and each.is_product and layer == each.maker
            return is_product or each.is_input_of(option.first)
        if layer not in each.savers:
            return False
        return option.choice is Choice.KEEP or not each.is_movable

    def _held(self, each: Storage) -> int:
        """Make the variable of whether a storage stays: who needs it last decides, and take it along if offloaded.

        The options over one layer exclude each other, so their sum counts.
        """
        variable = self.program.variable(0.0, 1.0)
        self.value_kept[variable] = float(bool(each.savers))
        taken: Terms = {}
        for layer in range(each.last_use, each.maker - 1, -1):
            needing = self._needing(each, layer)
            if needing:
                self.program.row(_joined({variable: 1.0}, _negative(needing), taken), low=0.0)
            taken = _joined(taken, self._taking(each, layer))
        return variable

    def _moved(self, each: Storage) -> int:
        variable = self.program.variable(0.0, 1.0)
        staying: Terms = {}
        for layer in range(each.last_use, each.maker - 1, -1):
            needing, taking = self._needing(each, layer), self._taking(each, layer)
            for terms in (needing, taking):
                if terms and each.is_movable:
                    self.program.row(_joined({variable: 1.0, self.held[each]: 1.0}, _negative(terms)), low=0.0)
            if taking:
                self.program.row(_joined({variable: 1.0}, _negative(taking), staying), low=0.0)
            staying = _joined(staying, needing)
        return variable

    def _needing(self, each: Storage, layer: int) -> Terms:
        return {self.at[option]: 1.0 for option in self.covering[layer] if self._needs(each, option, layer)}

    def _taking(self, each: Storage, layer: int) -> Terms:
        is_taken = each.is_movable and layer in each.savers
        return self._chosen(layer, Choice.OFFLOAD) if is_taken else {}

    def _rest(self, each: Storage, layer: int) -> int:
        """Make the variable of whether a storage that crosses a layer is there in its backward for earlier layers."""
        variable = self.program.variable(0.0, 1.0)
        earlier = [saver for saver in each.savers if saver < layer]
        self.value_kept[variable] = float(bool(earlier))
        for saver in earlier:
            is_there = (Choice.KEEP, Choice.OFFLOAD) if each.savers[-1] > layer else (Choice.KEEP,)
            self.program.row({variable: 1.0} | _negative(self._chosen(saver, *is_there)), low=0.0)
        taking = [
            option for option in self.covering[layer] if option.choice.is_recomputed and each.is_input_of(option.first)
        ]
        self.program.row({variable: 1.0} | {self.at[option]: -1.0 for option in taking}, low=0.0)
        return variable

    def _chosen(self, layer: int, *choices: Choice) -> Terms:
        return {self.at[option]: 1.0 for option in self.covering[layer] if option.choice in choices}

    def _sums(self) -> None:
        """Make the cumulative sums of what one layer uses, and of shared storages by their first and last users."""
        stage, own, moved = self.stage, {}, {}
        for layer in range(stage.first, stage.end):
            stays = stage.own_bytes[layer] - stage.own_movable_bytes[layer]
            size = {
                Choice.KEEP: stage.own_bytes[layer], Choice.OFFLOAD: stays, Choice.RECOMPUTE: 0,
                Choice.SELECTIVE: stage.own_product_bytes[layer],
            }  # fmt: skip
            own[layer] = {
                self.at[option]: self.program.scaled_bytes(size[option.choice]) for option in self.covering[layer]
            }
            moves = self.program.scaled_bytes(stage.own_movable_bytes[layer])
            moved[layer] = {at: moves for at in self._chosen(layer, Choice.OFFLOAD)}
        self.kept_own, self.moved_own = self._cumulated(own), self._cumulated(moved)
        made = {each: each.maker for each in stage.shared}
        self.kept_made = self._by(made, self.held)
        self.kept_done = self._by({each: each.last_use for each in stage.shared}, self.held)
        self.moved_made = self._by({each: made[each] for each in self.moved}, self.moved)
        self.moved_saved = self._by({each: each.savers[0] for each in self.moved}, self.moved)
        self.moved_done = self._by({each: each.savers[-1] for each in self.moved}, self.moved)

    def _by(self, places: dict[Storage, int], variables: dict[Storage, int]) -> dict[int, int]:
        terms: dict[int, Terms] = {layer: {} for layer in range(self.stage.first, self.stage.end)}
        for each, layer in places.items():
            terms[layer][variables[each]] = self.program.scaled_bytes(each.total_bytes)
        return self._cumulated(terms)

    def _cumulated(self, terms: dict[int, Terms]) -> dict[int, int]:
        """Make for each layer the variable of a sum up to it."""
        found: dict[int, int] = {}
        total = 0.0
        for layer in range(self.stage.first, self.stage.end):
            found[layer] = self.program.variable(0.0)
            before = {found[layer - 1]: -1.0} if layer - 1 in found else {}
            self.program.row(_joined({found[layer]: 1.0}, before, _negative(terms[layer])), low=0.0, high=0.0)
            total += self.worth_kept(terms[layer])
            self.value_kept[found[layer]] = total
        return found

    def _before(self, sums: dict[int, int], layer: int) -> Terms:
        return {sums[layer - 1]: 1.0} if layer - 1 in sums else {}

    def _brought_bytes(self, option: SegmentOption, layer: int) -> int:
        """Return the bytes that a segment's recompute has made for layers before `layer` and holds at its backward.

        Of a cheap one without what the first run kept and the second has freed.
        """
        found = self._brought.get((layer, option.choice))
        if found is None:
            stage, is_selective = self.stage, option.choice is Choice.SELECTIVE
            at = dict.fromkeys(range(stage.first, layer), 0)
            for each in stage.shared:
                if each.last_use < layer:
                    at[each.maker] += each.total_bytes * self._is_brought(each, is_selective)
            found, total = {}, 0
            for before in range(layer - 1, stage.first - 1, -1):
                own = stage.own_bytes[before]
                if is_selective:
                    own = stage.own_cheap_bytes[before] - stage.own_let_go_bytes[before]
                total += own + at[before]
                found[before] = total
            self._brought[layer, option.choice] = found
        return found[option.first]

    def _is_brought(self, each: Storage, is_selective: bool) -> int:
        if is_selective and each.is_product:
            return 0 if each.savers else -1
        return 1 if each.savers else 0


def _negative(terms: Terms) -> Terms:
    return {variable: -factor for variable, factor in terms.items()}


def _joined(*parts: Terms) -> Terms:
    found: Terms = {}
    for terms in parts:
        for variable, factor in terms.items():
            found[variable] = found.get(variable, 0.0) + factor
    return found
