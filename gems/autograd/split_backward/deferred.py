"""Weight gradients of one stage and one micro-batch that I defers to W."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gems.autograd.storages import check_unchanged

# computes the gradient of each target from the tensors that I keeps
Compute = Callable[..., Sequence[Tensor | None]]
Key = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a weight gradient: a parameter, or a contiguous view of one.

    The projections of attention are such views of a packed weight.
    """

    parameter: Tensor
    start: int | None = None
    shape: tuple[int, ...] = ()

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Target | None:
        """Return the target for `tensor`.

        Return None if its gradient must pass through more of the graph, or through a hook.
        """
        if tensor.is_leaf:
            return cls(tensor) if can_wait(tensor) else None
        base = tensor._base
        is_part = (
            base is not None and base.is_leaf and base.is_contiguous() and tensor.is_contiguous()
        )
        if base is None or not is_part or not can_wait(base):
            return None
        return cls(base, int(tensor.storage_offset() - base.storage_offset()), tuple(tensor.shape))

    @property
    def key(self) -> Key:
        """The identity of the target."""
        return id(self.parameter), self.start

    def add(self, gradient: Tensor) -> None:
        """Add to the parameter's gradient in place, as autograd does.

        The gradient of a low copy is added to the gradient of its weight.
        """
        parameter = getattr(self.parameter, "master", self.parameter)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        total = parameter.grad
        if self.start is not None:
            total = total.view(-1)[self.start : self.start + gradient.numel()].view(self.shape)
        total.add_(gradient)


@dataclass(slots=True)
class _Record:
    layer: str
    targets: tuple[Target, ...]
    kept: tuple[Tensor, ...]
    versions: tuple[int, ...]
    compute: Compute


def has_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has hooks on its gradient other than the toolkit's own.

    The toolkit has hooks on low copies.
    """
    if hasattr(parameter, "master"):
        return has_hooks(parameter.master)
    return bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def is_plain(tensor: Tensor) -> bool:
    """Return whether operations on a tensor are torch's own, not those of a subclass."""
    return type(tensor).__module__.startswith("torch.") or type(tensor) is Tensor


def can_wait(parameter: Tensor) -> bool:
    """Return whether the gradient of a tensor is only summed, without hooks."""
    return parameter.is_leaf and is_plain(parameter) and not has_hooks(parameter)


class DeferredGradients:
    """Weight gradients of one backward that are still to be computed, in the order of I's backward.

    The bits equal those of a full backward: the same kernels run on the same tensors, and the
    gradients of a parameter that is used several times are summed in the order of autograd's engine
    before they are added to `grad`.
    """

    def __init__(self) -> None:
        self._records: deque[_Record] = deque()

    def add(
        self, layer: str, targets: Sequence[Target], kept: Sequence[Tensor], compute: Compute
    ) -> None:
        """Keep tensors until `run` calls `compute` on them to get the gradients of `targets`."""
        versions = tuple(tensor._version for tensor in kept)
        self._records.append(_Record(layer, tuple(targets), tuple(kept), versions, compute))

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that are kept."""
        for record in self._records:
            yield from record.kept

    def run(self, poll: Callable[[], None]) -> None:
        """Compute and add the gradients, and free their inputs layer by layer.

        `poll` is called after each layer.

        Raises:
            RuntimeError: A tensor was changed in place since it was kept.
        """
        uses = Counter(target.key for record in self._records for target in record.targets)
        sums: dict[Key, Tensor] = {}
        with torch.no_grad():
            while self._records:
                _run(self._records.popleft(), uses, sums)
                poll()


def _run(record: _Record, uses: Counter[Key], sums: dict[Key, Tensor]) -> None:
    """Compute the gradients of one record.

    This is a separate function, so that they are freed before the next ones are computed.
    """
    for tensor, version in zip(record.kept, record.versions, strict=True):
        check_unchanged(tensor, version, record.layer)
    gradients = record.compute(*record.kept)
    for target, gradient in zip(record.targets, gradients, strict=True):
        assert gradient is not None
        key = target.key
        total = gradient if key not in sums else sums[key] + gradient
        uses[key] -= 1
        if uses[key]:
            sums[key] = total
        else:
            sums.pop(key, None)
            target.add(total)
