"""The private names of torch that the packages use; no other module takes one.

Each comment says what serves instead if a release of torch has the name no longer. `import torch`
itself loads all of them, except for `mem_tracker` and SchemaCheckMode, which takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage
from torch._C import DispatchKey  # has no public name: torch.library takes its members as texts

# none: drop gems.autograd.elsewhere
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._ops import OpOverload  # type(torch.ops.aten.add.Tensor)

# torch.device("meta"), which loses the device of a tensor
from torch._subclasses import FakeTensorMode

# none: drop gems.autograd.elsewhere
from torch._subclasses.schema_check_mode import SchemaCheckMode

# torch.autocast(...).__enter__
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast  # torch.autocast(...).__exit__

# torch.autograd.backward, whose own checks take as long again as a small graph
from torch.autograd.graph import GradientEdge, _engine_run_backward

# none: count bytes by torch.autograd.graph's hooks
from torch.utils._python_dispatch import TorchDispatchMode

# leave the modes first
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# the package optree
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "SET_GRAD_MODE",
    "DispatchKey",
    "FakeTensorMode",
    "OpOverload",
    "SchemaCheckMode",
    "TorchDispatchMode",
    "TreeSpec",
    "copy_all",
    "current_autograd_node",
    "disable_current_modes",
    "dynamo_settings",
    "enable_python_dispatcher",
    "end_capture_memory",
    "enter_autocast",
    "exit_autocast",
    "foreach",
    "free_weak",
    "has_kernel",
    "is_saving_changed",
    "is_transformed",
    "lerp_all",
    "mem_tracker",
    "no_python_dispatcher",
    "run_engine",
    "set_allocator",
    "storage_at",
    "storage_of_weak",
    "stores",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "use_counts",
    "weak_pointer",
    "without_autocast",
]

# what PYTORCH_ALLOC_CONF says, once the environment has been read
set_allocator: Any = torch._C._accelerator_setAllocatorSettings
# the node for torch.set_grad_enabled in a graph
SET_GRAD_MODE: Any = torch._C._set_grad_enabled


def is_transformed() -> bool:
    """Return whether torch.func (vmap, grad, jvp) or forward_ad runs what is called now.

    If it is gone: return False.
    """
    is_dual = torch.autograd.forward_ad._current_level >= 0
    return is_dual or torch._C._functorch.peek_interpreter_stack() is not None


def is_saving_changed() -> bool:
    """Return whether hooks but a checkpoint's act on what is saved for backward.

    If it is gone: refuse nothing.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not str(hooks[0].__module__).startswith("torch.utils.checkpoint")


def current_autograd_node() -> Any:
    """Return the node of the graph that autograd runs now, or None.

    If it is gone: count no sums in place.
    """
    return torch._C._current_autograd_node()


def has_kernel(operation: str, key: DispatchKey) -> bool:
    """Return whether an operation has a kernel for a dispatch key. If it is gone: drop elsewhere."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation, key)


def without_autocast() -> Any:
    """Return a guard that keeps the autocast of a processor away.

    If it is gone: torch.autocast(enabled=False).
    """
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(DispatchKey.AutocastCPU))


def use_counts(tensor: Tensor) -> tuple[int, int]:
    """Return how many hold a tensor and its storage.

    If it is gone: take every sum as one that is not in place.
    """
    storage = tensor.untyped_storage()
    return int(tensor._use_count()), int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


def storage_of_weak(reference: int) -> UntypedStorage | None:
    """Return the storage of a weak pointer, or None. If it is gone: weakref.ref of the tensors."""
    storage: UntypedStorage | None = UntypedStorage._new_with_weak_ptr(reference)
    return storage


# a weak pointer to a storage, whose value is its address, and its end; if they are gone:
# torch.multiprocessing.reductions.StorageWeakRef, which takes several times as long to make
weak_pointer: Any = UntypedStorage._weak_ref
free_weak: Any = UntypedStorage._free_weak_ref


def end_capture_memory(device: torch.device, pool: Any) -> None:
    """Let the allocator leave the pool of a capture that failed, which torch's capture_end does not.

    If it is gone: do nothing; memory that other streams have used is not reused then.
    """
    with suppress(RuntimeError):  # it has left
        torch._C._cuda_endAllocateToPool(device.index, pool)


def storage_at(address: int, num_bytes: int, device: torch.device) -> UntypedStorage:
    """Return a storage over memory that it does not own.

    If it is gone: torch.as_tensor of an object with `__cuda_array_interface__`.
    """
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return cast(UntypedStorage, storage)


def run_engine(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Run the backward of a graph from its edges. If it is gone: torch.autograd.backward."""
    keep_graph = create_graph = False
    _engine_run_backward(
        tuple(edges),
        tuple(gradients),
        keep_graph,
        create_graph,
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others by few kernels. If it is gone: Tensor.copy_ for each."""
    if targets:
        torch._foreach_copy_(targets, sources)


def foreach(operation: str) -> Any:
    """Return the form of an operation that takes lists. If it is gone: call it for each tensor."""
    return getattr(torch, f"_foreach_{operation}")


def lerp_all(values: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move tensors towards others in place. If it is gone: Tensor.lerp_ for each."""
    torch._foreach_lerp_(values, ends, weight)


def dynamo_settings() -> Any:
    """Return the settings of torch.compile. If they are gone: leave the limits as they are."""
    return torch._dynamo.config


def mem_tracker() -> Any:
    """Return the class that counts the memory of a model; loading it takes seconds.

    If it is gone: LiveBytes alone.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    return MemTracker


def stores() -> tuple[Any, Any]:
    """Return torch.distributed's TCPStore and PrefixStore.

    They have no types under their public names.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    return TCPStore, PrefixStore
