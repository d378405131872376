"""The activation store: what autograd saves for the backward, on device or host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from gems.autograd.convolutions import ConvolutionWatch
from gems.autograd.storages import storage_addresses, tensor_over
from gems.engine.offload.host_copies import Copy, CpuCopier, CudaCopier
from gems.engine.offload.host_pool import HostPool
from gems.engine.offload.saved_tensor_table import (
    Saved,
    SavedStorage,
    SavedTensor,
    SavedTensorTable,
    Trail,
    unchanged,
)
from gems.engine.supervision.recorder import COPY_IN, COPY_OUT, MemoryCounter, Recorder
from gems.memory.residency import Script
from gems.memory.timeline import micro_batch_scripts
from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule

MicroBatchKey = tuple[int, int, int]  # direction, stage, micro-batch


@dataclass(slots=True)
class Counters:
    """Bytes saved and moved so far; each storage counts once.

    `num_misses` counts the storages that were read before their copy back was posted, so that the
    backward had to wait.
    """

    saved_bytes: int = 0
    offloaded_bytes: int = 0
    prefetched_bytes: int = 0
    num_misses: int = 0


class ActivationStore:
    """Keeps what the forwards of segments save and moves it as the schedule says.

    Tensors are kept by direction, stage and micro-batch. The rules are those of
    `gems.memory.residency`: each storage is counted once and moved once in each direction, however
    many tensors share it. Parameters and buffers are never moved. Inputs of a stage are moved only
    if the schedule recomputes and offloads the stage as one. Micro-batches with the same actions on
    a stage save, move and count the same: after the first one, what is never moved is left to
    autograd, and the rules are not asked again.
    """

    def __init__(
        self,
        schedule: Schedule,
        pool: HostPool,
        recorder: Recorder,
        device: torch.device,
        parameters: Iterable[Tensor] = (),
        min_offload_bytes: int = 0,
        convolutions: ConvolutionWatch | None = None,
    ) -> None:
        """Start with an empty store.

        The following are never moved: tensors that are not on `device`, `parameters` (of all stages
        on the rank, and their buffers), and storages smaller than `min_offload_bytes`. With
        `convolutions`, only tensors that are saved while a convolution runs are moved.
        """
        self.activations = recorder.open_counter("activations")
        self.on_host = MemoryCounter(recorder.count_host_bytes)
        self.counters = Counters()
        self._schedule = schedule
        self._copier = CudaCopier(device) if device.type == "cuda" else CpuCopier()
        self._pool = pool
        self._recorder = recorder
        self._device = device
        self._parameters = storage_addresses(parameters)
        self._min_offload_bytes = min_offload_bytes
        self._convolutions = convolutions
        self._tables: dict[MicroBatchKey, SavedTensorTable] = {}
        self._scripts = micro_batch_scripts(action for _, action in schedule.actions())
        self._trails: dict[tuple[int, int, Script], Trail | None] = {}  # None: it changes
        self._lock = threading.RLock()  # saved-tensor hooks run on autograd's threads too

    @property
    def num_in_flight(self) -> int:
        """Return the number of micro-batches of stages for which the store keeps something."""
        return len(self._tables)

    def begin(self, key: MicroBatchKey, inputs: Sequence[Tensor]) -> None:
        """Begin a micro-batch of a stage with its inputs."""
        direction, stage, micro_batch = key
        script = self._scripts[key]
        offloaded = {segment for kind, segment in script if kind is Kind.OFFLOAD}
        takes_inputs = self._schedule.inputs_leave(stage, micro_batch, direction)
        table = SavedTensorTable(
            {segment for _, segment in script},
            offloaded,
            inputs,
            takes_inputs,
            self._trails.get((direction, stage, script)),
        )
        with self._lock:
            self._tables[key] = table
            if table.is_measured:
                self.counters.saved_bytes += table.trail.saved_bytes

    def replace_inputs(self, key: MicroBatchKey, inputs: Sequence[Tensor]) -> None:
        """Take other inputs of a micro-batch, which the store does not hold: it is read again."""
        self._tables[key].given = storage_addresses(inputs)

    def takes_inputs(self, key: MicroBatchKey) -> bool:
        """Return whether only the store holds a micro-batch's inputs after its forward."""
        return self._tables[key].input_bytes is not None

    @contextmanager
    def saved_tensor_hooks(
        self, key: MicroBatchKey, segment: int
    ) -> Iterator[Callable[..., Saved]]:
        """Store what autograd saves inside a block for the backward of a segment, and count it.

        Yields a function that saves a tensor as autograd would, and is told whether it may leave.
        """
        table = self._tables[key]
        save = table.save_again if table.is_measured else partial(self._save, table, segment)
        hooks: AbstractContextManager[object] = nullcontext()
        if table.begin_saves():
            hooks = saved_tensors_hooks(save, self.load)
        with hooks:
            yield save
        table.end_saves()
        self._update_counter(table)

    def save(self, key: MicroBatchKey, segment: int, tensor: Tensor) -> SavedTensor:
        """Save a tensor for the recomputation of a segment, as if autograd had saved it."""
        table = self._tables[key]
        may_leave = table.begin_saves()
        saved = self._save(table, segment, tensor) if may_leave else None
        table.end_saves()
        self._update_counter(table)
        return saved if isinstance(saved, SavedTensor) else SavedTensor(tensor)

    def load(self, saved: Saved) -> Tensor:
        """Return a saved tensor on the device; it may be loaded more than once.

        Raises:
            RuntimeError: The tensor was changed in place after it was saved.
        """
        if isinstance(saved, tuple):
            tensor, version = saved
        else:
            storage = saved.storage
            if storage is not None and (saved.tensor is None or storage.coming is not None):
                with self._lock:
                    if saved.tensor is None:
                        self._load_missing(storage)
                    self._wait_for_copy_in(storage)
            assert saved.tensor is not None
            tensor, version = saved.tensor, saved.version
        return tensor if tensor._version == version else unchanged(tensor, version)

    def record_outputs(self, key: MicroBatchKey, segment: int, outputs: Iterable[Tensor]) -> None:
        """Record the outputs of a segment, which stay in use for a while."""
        self._tables[key].record_outputs(segment, outputs)

    def expect_change(self, key: MicroBatchKey) -> None:
        """Do not take a micro-batch as the measure of later ones, which will save other tensors."""
        self._tables[key].trail.is_complete = False

    def is_counted(self, key: MicroBatchKey, memory: UntypedStorage) -> bool:
        """Return whether memory is counted already, as saved here or as an input."""
        table = self._tables.get(key)
        return table is not None and table.is_counted(memory)

    def offload(self, action: Action) -> None:
        """Post the copy of a segment's saved tensors to host memory."""
        with self._lock:
            table, segment = self._table(action)
            pairs = []
            for saved in table.offload(segment):
                source = saved.source()
                if source is not None:
                    saved.on_host = self._borrow_for(saved)
                    pairs.append((source, saved.on_host))
            copy = table.leaving[segment] = self._copier.copy_out(pairs)
            self.on_host.count_bytes(copy.num_bytes)
            self.counters.offloaded_bytes += copy.num_bytes
            self._recorder.span(action, COPY_OUT, copy.start, copy.end, copy.num_bytes)

    def free(self, action: Action) -> None:
        """Make compute wait for the copy of a segment to the host, then free its device memory."""
        with self._lock:
            table, segment = self._table(action)
            self._free(table, segment)
            self._update_counter(table)

    def prefetch(self, action: Action) -> None:
        """Post the copy back of what a segment's backward reads and the device lacks."""
        with self._lock:
            table, segment = self._table(action)
            self._free(table, segment)
            copy = table.coming[segment] = self._copy_in(table, table.prefetch(segment))
            self._update_counter(table)
            self._recorder.span(action, COPY_IN, copy.start, copy.end, copy.num_bytes)

    def await_copy(self, action: Action) -> None:
        """Make compute wait for the copy of a segment back to the device."""
        with self._lock:
            table, segment = self._table(action)
            self._copier.wait(table.coming[segment])

    def free_copied(self) -> None:
        """Free device memory whose copy has ended, if the schedule has no FREE action for it."""
        with self._lock:
            for (direction, stage, micro_batch), table in self._tables.items():
                is_whole = self._schedule.num_segments[stage] is None
                for segment, copy in list(table.leaving.items()):
                    where = (stage, micro_batch, direction, None if is_whole else segment)
                    if not self._schedule.has(Kind.FREE, *where) and self._copier.is_done(copy):
                        self._free(table, segment)
                        self._update_counter(table)

    def end_backward(
        self, key: MicroBatchKey, segment: int, for_weights: Iterable[Tensor] = ()
    ) -> None:
        """End the backward of a segment; its weight gradients will still read `for_weights`."""
        with self._lock:
            table = self._tables[key]
            for tensor in for_weights if table.begin_saves() else ():
                saved = self._save(table, ~segment, tensor)
                storage = saved.storage if isinstance(saved, SavedTensor) else None
                if storage is not None and not table.is_measured:
                    table.for_weights.add(storage)
                    table.open.add(~segment)
                    table.trail.deferred.add(~segment)
            table.end_saves()
            self._end(key, segment)

    def end_weight_gradients(self, key: MicroBatchKey, segment: int) -> None:
        """End the weight gradients of a segment."""
        with self._lock:
            if key in self._tables and ~segment in self._tables[key].open:
                self._end(key, ~segment)

    def reset(self) -> None:
        """Drop everything after a failed step and return the host memory to the pool."""
        with self._lock:
            self._copier.synchronize()
            for table in self._tables.values():
                for saved in table.storages:
                    self._release_buffer(saved)
                    saved.drop_memory()
            self._tables.clear()
            self.on_host.set_bytes(0)
            self.activations.set_bytes(0)

    def _table(self, action: Action) -> tuple[SavedTensorTable, int]:
        assert action.micro_batch is not None
        return self._tables[action.direction, action.stage, action.micro_batch], action.segment or 0

    def _is_managed(self, table: SavedTensorTable, tensor: Tensor) -> bool:
        """Return whether a tensor is strided, on the device, and no parameter or kept input."""
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor._is_zerotensor()  # of forward mode, without memory
        ):
            return False
        memory = tensor.untyped_storage()
        address = memory.data_ptr()
        return (
            address not in self._parameters
            and address not in table.given
            and memory.nbytes() > 0
            and tensor.device == self._device
        )

    def may_leave(self) -> bool:
        """Return whether the policy moves what is saved now, however small it is."""
        return self._convolutions is None or self._convolutions.is_running

    def _save(
        self, table: SavedTensorTable, segment: int, tensor: Tensor, may_leave: bool | None = None
    ) -> Saved:
        if table.is_measured:
            return table.save_again(tensor)
        with self._lock:
            if not self._is_managed(table, tensor):
                return table.save_unmanaged(tensor)
            if table.input_bytes is None:
                may_leave = self.may_leave() if may_leave is None else may_leave
                is_large = tensor.untyped_storage().nbytes() >= self._min_offload_bytes
                is_movable = is_large and may_leave
            else:  # the inputs of a stage; the profile knows only their sum
                is_movable = table.input_bytes >= self._min_offload_bytes
            before = table.trail.saved_bytes
            saved = table.save(tensor, segment, is_movable)
            self.counters.saved_bytes += table.trail.saved_bytes - before
            return saved

    def _update_counter(self, table: SavedTensorTable) -> None:
        # once at the end of each method: changes inside a method are no peak
        before = table.counted_bytes
        table.count_device_bytes()
        if table.counted_bytes != before:
            self.activations.count_bytes(table.counted_bytes - before)

    def _free(self, table: SavedTensorTable, segment: int) -> None:
        copy = table.leaving.pop(segment, None)
        if copy is not None:
            self._copier.wait(copy)
            for saved in table.free(segment):
                saved.drop_memory()

    def _copy_in(self, table: SavedTensorTable, storages: Sequence[SavedStorage]) -> Copy:
        """Post the copy of storages to new device memory, and rebuild their tensors over it."""
        moved = [
            (saved, saved.on_host)
            for saved in storages
            if saved.on_host is not None and not saved.is_on_device
        ]
        copy, tensors = self._copier.copy_in([on_host for _, on_host in moved])
        for (saved, _), tensor in zip(moved, tensors, strict=True):
            memory = tensor.untyped_storage()
            saved.coming = None if copy.is_waited_for else copy
            saved.rebuild(memory, tensor)
            table.add_memory(saved, memory)
        self.counters.prefetched_bytes += copy.num_bytes
        return copy

    def _load_missing(self, saved: SavedStorage) -> None:
        """Copy back one storage that is read before its PREFETCH."""
        table = next((table for table in self._tables.values() if saved in table.storages), None)
        if table is None:
            raise RuntimeError("a backward reads what was saved in a step that has ended")
        table.fetch(saved)
        self._copy_in(table, [saved])
        self._update_counter(table)
        self.counters.num_misses += 1

    def _wait_for_copy_in(self, saved: SavedStorage) -> None:
        if saved.coming is not None and not saved.coming.is_waited_for:
            self._copier.wait(saved.coming)
        saved.coming = None

    def _end(self, key: MicroBatchKey, segment: int) -> None:
        table = self._tables[key]
        self._free(table, segment)
        num_bytes = sum(map(self._release_buffer, table.end_backward(segment)))
        self.on_host.count_bytes(-num_bytes)
        self._update_counter(table)
        if not table.open:
            del self._tables[key]
            self._keep_trail(key, table)

    def _keep_trail(self, key: MicroBatchKey, table: SavedTensorTable) -> None:
        """Keep the trail of a micro-batch for the next ones, unless they may do otherwise."""
        if table.is_measured and not table.is_changed:
            return
        script = self._scripts[key]
        where = (*key[:2], script)
        # without a FREE, memory is free when a copy has ended
        is_in_order = all(
            (Kind.FREE, segment) in script for kind, segment in script if kind is Kind.OFFLOAD
        )
        if table.is_changed:
            self._trails[where] = None
        elif is_in_order and table.trail.is_complete and self._schedule.num_strips == 1:
            table.trail.forget_unmoved()
            self._trails.setdefault(where, table.trail)

    def _borrow_for(self, saved: SavedStorage) -> Tensor:
        """Return a tensor of host memory for the copy of a storage."""
        buffer = self._pool.borrow(saved.num_bytes)
        assert saved.copied_layout is not None
        dtype, _, size, stride = saved.copied_layout
        if dtype is buffer.dtype and size == buffer.size() and stride == buffer.stride():
            return buffer
        return tensor_over(buffer.untyped_storage(), dtype, 0, size, stride)

    def _release_buffer(self, saved: SavedStorage) -> int:
        """Free the copy of a storage in host memory, and return its bytes."""
        if saved.on_host is None:
            return 0
        if saved.coming is not None:
            self._wait_for_copy_in(saved)
        self._pool.release(saved.on_host)
        saved.on_host = None
        return saved.num_bytes
