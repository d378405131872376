"""One stage in the MILP: its storages, possible segments, and the bytes held at each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from gems.memory.optimizer.milp import LinearSum, Program
from gems.memory.plan import Choice, Segment
from gems.memory.storages import Storage, profile_storages
from gems.profile import ModelProfile

# approximate number of possible segments of a stage; longer segments are left out
MAX_OPTIONS = 1200


class StageBlock:
    """The variables of a stage in the MILP.

    There is one per possible segment (`at`), and there are cumulative sums of the bytes on the
    device and of the bytes moved. `given_bytes` is the size of the stage's inputs if they may
    leave; they leave if the whole stage is recomputed as one segment. All expressions are bytes of
    one micro-batch, scaled by the MILP. `value_kept` has the values of the variables if every layer
    is kept. `shared` are the storages that several layers see; `own` has, by layer, the storages
    that no other layer sees.
    """

    def __init__(
        self,
        program: Program,
        profile: ModelProfile,
        first: int,
        end: int,
        least_bytes: int,
        given_bytes: int = 0,
    ) -> None:
        self.program = program
        self.profile = profile
        self.first = first
        self.end = end
        self.given_bytes = given_bytes if given_bytes >= least_bytes else 0
        self.storages = profile_storages(profile).made(first, end, least_bytes)
        self.shared = tuple(
            storage for storage in self.storages if storage.last_use > storage.maker
        )
        self.own: dict[int, list[Storage]] = {layer: [] for layer in range(first, end)}
        self.saved_bytes: Counter[int] = Counter()  # by layer, wherever in the stage it was made
        for storage in self.storages:
            if storage.last_use == storage.maker:
                self.own[storage.maker].append(storage)
            for saver in storage.savers:
                self.saved_bytes[saver] += storage.total_bytes
        self.at = {option: program.variable(1.0, is_whole=True) for option in self._options()}
        self.covering: dict[int, list[Segment]] = {layer: [] for layer in range(first, end)}
        for option in self.at:
            for layer in range(option.first, option.end):
                self.covering[layer].append(option)
        self.value_kept = {
            at: float(option.choice is Choice.KEEP) for option, at in self.at.items()
        }
        self._path()
        # the recomputed segments whose inputs leave, by the storages that are among these
        self.takers = {
            storage: [option for option in self.at if _is_taken(storage, option)]
            for storage in self.shared
        }
        self.held = {storage: self._held(storage) for storage in self.shared}
        self.moved = {
            storage: self._moved(storage)
            for storage in self.shared
            if storage.savers or self.takers[storage]
        }
        self._back = self._returned(owner_of)
        self._extra = self._returned(lambda storage: storage.last_use)
        self._kept_earlier: dict[int, LinearSum] = {}
        self._brought: dict[tuple[int, Choice], dict[int, int]] = {}
        self._sums()

    def _options(self) -> Iterator[Segment]:
        """Yield the possible segments: one layer kept or offloaded, or several layers recomputed.

        For long stages only segments up to some length, and the stage as a whole, are possible. The
        inputs of the first segment are the inputs of the stage.
        """
        first = self.first
        end = self.end
        longest = max(2, MAX_OPTIONS // (2 * (end - first)))
        for begin in range(first, end):
            yield from (
                Segment(begin, begin + 1, choice) for choice in (Choice.KEEP, Choice.OFFLOAD)
            )
            ends = list(range(begin + 1, min(end, begin + longest) + 1))
            if begin == first and end - first > longest:
                ends.append(end)
            for stop in ends:
                yield Segment(begin, stop, Choice.RECOMPUTE)
                option = Segment(begin, stop, Choice.OFFLOAD_INPUTS)
                if any(_is_taken(storage, option) for storage in self.shared) or self._given_bytes(
                    option
                ):
                    yield option
                if any(
                    layer.cheap_s < layer.recompute_s for layer in self.profile.layers[begin:stop]
                ):
                    yield Segment(begin, stop, Choice.SELECTIVE)

    def backward_bytes(self, layer: int) -> LinearSum:
        """Return the bytes on the device in a layer's backward, beyond its own saved bytes.

        These are the bytes that earlier layers keep, and the bytes that a recomputed segment has
        allocated for layers before this one.
        """
        return self._earlier(layer) + LinearSum(
            (self.at[option], self.program.per_byte * self._brought_bytes(option, layer))
            for option in self.covering[layer]
            if option.choice.is_recomputed and option.first < layer
        )

    def again_bytes(self, layer: int) -> LinearSum:
        """Return the bytes on the device while a segment that ends with a layer is recomputed.

        The recompute runs right before the backward of that layer.
        """
        peak = profile_storages(self.profile).recompute_peak_bytes
        return self._earlier(layer) + LinearSum(
            (
                at,
                self.program.per_byte
                * peak(option.first, option.end, option.choice is Choice.SELECTIVE),
            )
            for option, at in self._recomputed_for(layer)
        )

    def again_s(self, layer: int) -> LinearSum:
        """Return the scaled seconds of the recompute right before the backward of a layer."""
        seconds = LinearSum()
        for option, at in self._recomputed_for(layer):
            layers = self.profile.layers[option.first : option.end]
            is_selective = option.choice is Choice.SELECTIVE
            seconds[at] = self.program.per_s * sum(
                storage.cheap_s if is_selective else storage.recompute_s for storage in layers
            )
        return seconds

    def forward_bytes(self, layer: int) -> LinearSum:
        """Return the bytes of earlier layers on the device when the forward of a layer begins.

        At the end of the stage, the stage's inputs that leave are subtracted; elsewhere they count
        as if they stayed.
        """
        kept_bytes = self.before(layer, self.kept_own, self.kept_made)
        return kept_bytes - self._given_left() if layer == self.end else kept_bytes

    def moved_before(self, layer: int, is_forward: bool) -> LinearSum:
        """Return the bytes of earlier layers that copies move.

        In forward these are the bytes that earlier layers made; in backward, the bytes that only
        they need.
        """
        if is_forward:
            moved_bytes = self.before(layer, self.moved_own, self.moved_made)
            return moved_bytes + self._given_left() if layer == self.end else moved_bytes
        return self.before(layer, self.moved_own, self.moved_done) - self._back[layer]

    def worth_kept(self, terms: LinearSum) -> float:
        """Return the value of an expression if every layer is kept."""
        return sum(
            factor * self.value_kept.get(variable, 0.0) for variable, factor in terms.items()
        )

    def returned(self, storage: Storage, layer: int) -> LinearSum:
        """Return whether a storage is back before a layer's backward because of a recompute.

        The recompute is one that covers later layers, too.
        """
        return self._any(option for option in self._last_takers(storage) if option.end > layer)

    def copied_bytes(self, option: Segment) -> int:
        """Return the bytes that leave with an option's copy.

        These are the bytes that leave if the option is copied and nothing later needs them.
        """
        if option.choice is Choice.OFFLOAD_INPUTS:
            taken = sum(
                storage.total_bytes for storage in self.shared if _is_taken(storage, option)
            )
            return taken + self._given_bytes(option)
        is_offloaded = option.choice is Choice.OFFLOAD
        return sum(
            storage.total_bytes
            for storage in self.storages
            if is_offloaded and option.first in storage.savers[-1:]
        )

    def own_movable_bytes(self, layer: int) -> int:
        """Return the bytes that only one layer sees and saves, and that a copy can move."""
        return sum(
            storage.total_bytes
            for storage in self.own[layer]
            if storage.savers and storage.is_movable
        )

    def _given_bytes(self, option: Segment) -> int:
        """Return the bytes of the stage's inputs that leave with a segment."""
        is_whole = (option.first, option.end) == (self.first, self.end)
        return self.given_bytes if is_whole and option.choice is Choice.OFFLOAD_INPUTS else 0

    def _given_left(self) -> LinearSum:
        """Return the bytes of the stage's inputs that leave."""
        sizes = (
            (at, self.program.per_byte * self._given_bytes(option))
            for option, at in self.at.items()
        )
        return LinearSum((at, size) for at, size in sizes if size)

    def _recomputed_for(self, layer: int) -> list[tuple[Segment, int]]:
        """Return the options recomputed right before a layer's backward, with their variables."""
        options = [
            storage
            for storage in self.covering[layer]
            if storage.choice.is_recomputed and storage.end == layer + 1
        ]
        return [(option, self.at[option]) for option in options]

    def _earlier(self, layer: int) -> LinearSum:
        """Return the bytes that earlier layers keep on the device at the backward of a layer."""
        if layer not in self._kept_earlier:
            kept_bytes = self.before(layer, self.kept_own, self.kept_done) + self._extra[layer]
            for storage in self.shared:
                if storage.maker < layer <= storage.last_use and layer not in storage.savers:
                    kept_bytes[self._rest(storage, layer)] = (
                        self.program.per_byte * storage.total_bytes
                    )
            self._kept_earlier[layer] = kept_bytes
        return self._kept_earlier[layer]

    def _path(self) -> None:
        """Require the chosen options to form one path from the first layer to the last."""
        for layer in range(self.first, self.end):
            self.program.constrain(self._any(self.covering[layer]), low=1.0, high=1.0)
            if layer > self.first:
                ending = self._any(
                    option for option in self.covering[layer - 1] if option.end == layer
                )
                starting = self._any(
                    option for option in self.covering[layer] if option.first == layer
                )
                self.program.constrain(ending - starting, low=0.0, high=0.0)

    def _any(self, options: Iterable[Segment]) -> LinearSum:
        """Return whether one of some options over a layer is chosen.

        It is their sum, since they exclude each other.
        """
        return LinearSum((self.at[option], 1.0) for option in options)

    def _offloaded(self, layer: int) -> LinearSum:
        return self._any(
            option for option in self.covering[layer] if option.choice is Choice.OFFLOAD
        )

    def _held(self, storage: Storage) -> int:
        """Make the variable that tells whether a storage stays.

        The last layer that needs it decides, and takes it along if it is offloaded.
        """
        variable = self.program.variable(1.0)
        self.value_kept[variable] = float(bool(storage.savers))
        taken = LinearSum()
        for layer in range(storage.last_use, storage.maker - 1, -1):
            needing = self._needing(storage, layer)
            if needing:
                self.program.constrain(LinearSum({variable: 1.0}) - needing + taken, low=0.0)
            taken += self._taking(storage, layer)
        return variable

    def _moved(self, storage: Storage) -> int:
        """Make the variable that tells whether a storage leaves."""
        variable = self.program.variable(1.0)
        staying = LinearSum()
        for layer in range(storage.last_use, storage.maker - 1, -1):
            needing = self._needing(storage, layer)
            taking = self._taking(storage, layer)
            for terms in (needing, taking):
                if terms and storage.is_movable:
                    self.program.constrain(
                        LinearSum({variable: 1.0, self.held[storage]: 1.0}) - terms, low=0.0
                    )
            if taking:
                self.program.constrain(LinearSum({variable: 1.0}) - taking + staying, low=0.0)
            staying += needing
        return variable

    def _needing(self, storage: Storage, layer: int) -> LinearSum:
        """Return the options over a layer that keep a storage on the device until backward."""

        def needs(option: Segment) -> bool:
            if option.choice.is_recomputed:
                is_product = (
                    option.choice is Choice.SELECTIVE
                    and storage.is_product
                    and layer == storage.maker
                )
                return is_product or (_is_input(storage, option) and not _is_taken(storage, option))
            return layer in storage.savers and (
                option.choice is Choice.KEEP or not storage.is_movable
            )

        return self._any(filter(needs, self.covering[layer]))

    def _taking(self, storage: Storage, layer: int) -> LinearSum:
        """Return the options over a layer that move a storage to the host.

        Each option appears only at the last of its layers.
        """
        offloading = (
            self._offloaded(layer)
            if storage.is_movable and layer in storage.savers
            else LinearSum()
        )
        ending = (
            option
            for option in self.covering[layer]
            if layer == min(option.end - 1, storage.last_use)
        )
        return offloading + self._any(option for option in ending if _is_taken(storage, option))

    def _last_takers(self, storage: Storage) -> list[Segment]:
        return [option for option in self.takers[storage] if storage.last_use < option.end]

    def _returned(self, ends_at: Callable[[Storage], int]) -> dict[int, LinearSum]:
        """Make, for each layer, the variable of the bytes present but not read in its backward.

        They came back for the recompute of a segment that ends with this layer or a later one. For
        each storage that such a segment takes, they count at the layers after `ends_at`, if nothing
        after the segment reads the storage.
        """
        present = {layer: LinearSum() for layer in range(self.first, self.end)}
        for storage in self.takers:
            for option in self._last_takers(storage):
                for layer in range(ends_at(storage) + 1, option.end):
                    present[layer] += {self.at[option]: self.program.per_byte * storage.total_bytes}
        for layer, terms in present.items():
            if terms:
                variable = self.program.variable()
                self.value_kept[variable] = 0.0
                self.program.constrain(LinearSum({variable: 1.0}) - terms, low=0.0, high=0.0)
                present[layer] = LinearSum({variable: 1.0})
        return present

    def _rest(self, storage: Storage, layer: int) -> int:
        """Make the variable that tells whether a storage is in a layer's backward for earlier ones.

        The storage crosses the layer.
        """
        variable = self.program.variable(1.0)
        earlier = [saver for saver in storage.savers if saver < layer]
        self.value_kept[variable] = float(bool(earlier))
        is_there = (
            (Choice.KEEP, Choice.OFFLOAD)
            if storage.savers and storage.savers[-1] > layer
            else (Choice.KEEP,)
        )
        for saver in earlier:
            chosen = self._any(
                option for option in self.covering[saver] if option.choice in is_there
            )
            self.program.constrain(LinearSum({variable: 1.0}) - chosen, low=0.0)
        # the location of an input that leaves with a segment and has later readers is left open
        recomputed = (
            option
            for option in self.covering[layer]
            if option.choice.is_recomputed
            and not (_is_taken(storage, option) and option.end <= storage.last_use)
        )
        taking = self._any(option for option in recomputed if _is_input(storage, option))
        self.program.constrain(LinearSum({variable: 1.0}) - taking, low=0.0)
        return variable

    def _sums(self) -> None:
        """Make the cumulative sums of the bytes of single layers and of shared storages.

        Shared storages are summed by their first and by their last users.
        """
        own = {}
        moved = {}
        for layer, storages in self.own.items():
            size = {
                choice: (
                    self.program.per_byte
                    * sum(storage.total_bytes for storage in storages if _stays(storage, choice))
                )
                for choice in Choice
            }
            own[layer] = LinearSum(
                (self.at[option], size[option.choice]) for option in self.covering[layer]
            )
            moved[layer] = self._offloaded(layer) * (
                self.program.per_byte * self.own_movable_bytes(layer)
            )
        self.kept_own, self.moved_own = self._cumulated(own), self._cumulated(moved)
        self.kept_made = self._by(self.held, lambda storage: storage.maker)
        self.kept_done = self._by(self.held, lambda storage: storage.last_use)
        self.moved_made = self._by(self.moved, lambda storage: storage.maker)
        self.moved_saved = self._by(self.moved, self._may_leave_after)
        self.moved_done = self._by(self.moved, owner_of)

    def _may_leave_after(self, storage: Storage) -> int:
        """Return the first layer after which a storage may leave.

        It is a layer that saves the storage, or one that receives it for a recompute.
        """
        return min([*storage.savers[:1], *(storage.maker + 1,) * bool(self.takers[storage])])

    def _by(
        self, variables: dict[Storage, int], layer_of: Callable[[Storage], int]
    ) -> dict[int, int]:
        terms = {layer: LinearSum() for layer in range(self.first, self.end)}
        for storage, variable in variables.items():
            terms[layer_of(storage)][variable] = self.program.per_byte * storage.total_bytes
        return self._cumulated(terms)

    def _cumulated(self, terms: dict[int, LinearSum]) -> dict[int, int]:
        """Make, for each layer, the variable of the sum up to it."""
        sums: dict[int, int] = {}
        total = 0.0
        for layer in range(self.first, self.end):
            sums[layer] = self.program.variable()
            total += self.worth_kept(terms[layer])
            self.value_kept[sums[layer]] = total
            so_far = LinearSum({sums[layer]: 1.0}) - self.before(layer, sums) - terms[layer]
            self.program.constrain(so_far, low=0.0, high=0.0)
        return sums

    def before(self, layer: int, *sums: dict[int, int]) -> LinearSum:
        """Return the total of some sums up to the layer before one."""
        return LinearSum({storage[layer - 1]: 1.0 for storage in sums if layer - 1 in storage})

    def _brought_bytes(self, option: Segment, layer: int) -> int:
        """Return the bytes that a recompute holds at a layer's backward for layers before it.

        The segment's recompute has made them. For a selective recompute this excludes the bytes
        that the first run kept and that the second run has freed.
        """
        sums = self._brought.get((layer, option.choice))
        if sums is None:
            at = dict.fromkeys(range(self.first, layer), 0)
            for storage in self.storages:
                if storage.last_use < layer:
                    is_kept = option.choice is Choice.SELECTIVE and storage.is_product
                    at[storage.maker] += storage.total_bytes * (bool(storage.savers) - is_kept)
            sums = {}
            total = 0
            for before in range(layer - 1, self.first - 1, -1):
                total += at[before]
                sums[before] = total
            self._brought[layer, option.choice] = sums
        return sums[option.first]


def owner_of(storage: Storage) -> int:
    """Return the last layer that saves a storage, or the one that makes it if none does."""
    return storage.savers[-1] if storage.savers else storage.maker


def _is_input(storage: Storage, option: Segment) -> bool:
    """Return whether a segment receives a storage from an earlier one.

    The segment or a later one needs it.
    """
    return storage.maker < option.first <= storage.last_use


def _is_taken(storage: Storage, option: Segment) -> bool:
    """Return whether a segment receives a storage that leaves with its inputs."""
    return (
        option.choice is Choice.OFFLOAD_INPUTS and storage.is_movable and _is_input(storage, option)
    )


def _stays(storage: Storage, choice: Choice) -> bool:
    """Return whether a storage seen only by its layer stays on the device until backward."""
    if choice is Choice.SELECTIVE:
        return storage.is_product
    return bool(storage.savers) and (
        choice is Choice.KEEP or (choice is Choice.OFFLOAD and not storage.is_movable)
    )
