"""The private names of torch that the packages use; no other module uses one.

Comments and docstrings name the replacement for the case that a release of torch removes a name.
`import torch` loads all of them except `mem_tracker` and SchemaCheckMode (a millisecond).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage
from torch._C import DispatchKey  # has no public name: torch.library takes its members as texts

# none: drop gems.autograd.elsewhere
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._guards import TracingContext, tracing  # none: see tracing_with
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

# changes the settings of PYTORCH_ALLOC_CONF after the environment has been read
set_allocator: Any = torch._C._accelerator_setAllocatorSettings
# the node for torch.set_grad_enabled in a graph
SET_GRAD_MODE: Any = torch._C._set_grad_enabled


def is_transformed() -> bool:
    """Return whether a torch.func transform (vmap, grad, jvp) or forward_ad is active.

    If it is gone: return False.
    """
    is_dual = torch.autograd.forward_ad._current_level >= 0
    return is_dual or torch._C._functorch.peek_interpreter_stack() is not None


def is_saving_changed() -> bool:
    """Return whether saved-tensor hooks other than a checkpoint's are active.

    If it is gone: refuse nothing.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not str(hooks[0].__module__).startswith("torch.utils.checkpoint")


def current_autograd_node() -> Any:
    """Return the node that autograd is running, or None. If it is gone: count no sums in place."""
    return torch._C._current_autograd_node()


def has_kernel(operation: str, key: DispatchKey) -> bool:
    """Return whether an operation has a kernel for a dispatch key. If it is gone: drop elsewhere."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation, key)


def without_autocast() -> Any:
    """Return a guard that disables the CPU's autocast.

    If it is gone: torch.autocast(enabled=False).
    """
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(DispatchKey.AutocastCPU))


def use_counts(tensor: Tensor) -> tuple[int, int]:
    """Return the reference counts of a tensor and its storage.

    If it is gone: treat every sum as out of place.
    """
    storage = tensor.untyped_storage()
    return int(tensor._use_count()), int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


def storage_of_weak(reference: int) -> UntypedStorage | None:
    """Return the storage of a weak pointer, or None. If it is gone: weakref.ref of the tensors."""
    return cast("UntypedStorage | None", UntypedStorage._new_with_weak_ptr(reference))


# create and free a weak pointer to a storage, whose value is its address; if they are gone:
# torch.multiprocessing.reductions.StorageWeakRef, which takes several times as long to create
weak_pointer: Any = UntypedStorage._weak_ref
free_weak: Any = UntypedStorage._free_weak_ref


def end_capture_memory(device: torch.device, pool: Any) -> None:
    """Make the allocator leave the pool of a failed capture, because torch's capture_end does not.

    If it is gone: do nothing; memory that other streams have used is then not reused.
    """
    with suppress(RuntimeError):  # it has left already
        torch._C._cuda_endAllocateToPool(device.index, pool)


def storage_at(address: int, num_bytes: int, device: torch.device) -> UntypedStorage:
    """Return a storage over memory that it does not own.

    If it is gone: torch.as_tensor of an object with `__cuda_array_interface__`.
    """
    return cast(
        UntypedStorage, torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    )


def run_engine(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Run the backward of a graph from its edges. If it is gone: torch.autograd.backward."""
    _engine_run_backward(
        tuple(edges),
        tuple(gradients),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others with few kernels. If it is gone: Tensor.copy_ for each."""
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


def tracing_with(mode: FakeTensorMode | None) -> AbstractContextManager[Any]:
    """Let `make_fx` record values in one fake mode. If it is gone: it makes a mode for each value."""
    shared = mode or FakeTensorMode(allow_fallback_kernels=True)
    return tracing(TracingContext(shared))


def mem_tracker() -> Any:
    """Return the class that measures the memory of a model; loading it takes seconds.

    If it is gone: LiveBytes alone.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    return MemTracker


def stores() -> tuple[Any, Any]:
    """Return torch.distributed's TCPStore and PrefixStore, whose public names have no types."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    return TCPStore, PrefixStore
