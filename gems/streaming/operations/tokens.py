"""Operations on tokens, written as operations on the map that they come from.

Networks flatten a map to tokens, such as (samples, positions, channels), to pool them. In a tensor
of tokens the positions of a block are no neighbours, so it could be made of the whole map only.
Therefore the map keeps its axes, and the steps on tokens take the map. A step without such a form
takes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gems.streaming.operations.elementwise import ROW_FOR_ROW, reduced
from gems.streaming.operations.operation import (
    MAP,
    STATIC,
    Info,
    Known,
    Operation,
    arguments,
    leaves,
    map_refs,
    refs,
    reshaped,
    with_argument,
)
from gems.streaming.operations.running import REDUCTIONS, attention, over_positions
from gems.streaming.trace import Ref, Step, Weight

aten = torch.ops.aten
_VIEWS = frozenset(
    ("view", "reshape", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as")
)
_SAME = frozenset(("contiguous", "clone", "alias"))
_CASTS = frozenset(("to", "_to_copy"))
_DROPOUTS = frozenset(("dropout", "feature_dropout", "alpha_dropout"))
_BY_CHANNEL = frozenset(("batch_norm", "prelu"))
_ALONG_ONE = frozenset(
    ("softmax", "log_softmax", "chunk", "split", "split_with_sizes", "glu", "slice", "cat")
)
_OVER_SEVERAL = frozenset(("sum", "mean", "amax", "amin"))
_PRODUCTS = frozenset(("bmm", "matmul", "mm", "einsum"))


class Tokens(NamedTuple):
    """A value of the trace that has the positions of a map in one dimension.

    Attributes:
        number: The map: it has the positions in `num` dimensions from `first` on.
        first: The first of these.
        num: How many they are.
        is_flat: Whether the value has them in one dimension, and not as the map.
        is_softmax: Whether the value is the softmax of the map over the positions.
        values: By what that is multiplied then, if it is.
    """

    number: int
    first: int
    num: int
    is_flat: bool = True
    is_softmax: bool = False
    values: Tokens | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the value is the map, but for its shape."""
        return self.is_flat and not self.is_softmax

    @property
    def dims(self) -> range:
        """The dimensions of the positions in the map."""
        return range(self.first, self.first + self.num)

    def moved(self, dim: int) -> int:
        """Return the dimension of the map for one of the value that is not of positions."""
        return dim + self.num - 1 if dim > self.first and self.is_flat else dim


class TokenSteps:
    """Writes steps on tokens as steps on maps.

    `numbers` has the operations of values of the trace, `tokens` those that are tokens. `add` adds
    a step or an operation, and returns the number of its value.
    """

    def __init__(
        self,
        known: Known,
        numbers: Mapping[int, int],
        tokens: Mapping[int, Tokens],
        add: Callable[[Step | Operation], int],
    ) -> None:
        self._known = known
        self._numbers = numbers
        self._tokens = tokens
        self._add = add

    def of(self, step: Step) -> Tokens | int | None:
        """Return the tokens that a step gives, or the number of another value.

        None if the step has to be run on what it reads.
        """
        name = step.operation
        inputs = [self._tokens.get(ref.number) for ref in refs(step)]
        if not inputs:
            return None
        tokens = next((value for value in inputs if value is not None), None)
        if name in _VIEWS or (name in ("squeeze", "unsqueeze") and tokens is not None):
            return self._viewed(step)
        if tokens is None:
            return None
        if name in _SAME or (name in _CASTS and tokens.is_softmax):
            return tokens  # sums of products have at least 32 bits
        if name in ("permute", "transpose", "t") and tokens.values is None and tokens.is_flat:
            return self._permuted(step, tokens)
        if any(value is not None and value.is_softmax for value in inputs):
            return self._weighted(step, inputs)
        others = [
            self._known.infos[self._numbers[ref.number]]
            for ref, value in zip(refs(step), inputs, strict=True)
            if value is None
        ]
        if any(info.kind != STATIC for info in others):
            return None
        if name in ROW_FOR_ROW:
            return self._elementwise(step, inputs)
        if len(inputs) - len(others) > 1:
            return None
        if name in REDUCTIONS and not others:
            return self._reduced(step, tokens)
        return self._along(step, tokens)

    def _info(self, tokens: Tokens) -> Info:
        return self._known.infos[tokens.number]

    def _sizes(self, tokens: Tokens) -> list[int]:
        return [int(self._info(tokens).first.shape[dim]) for dim in tokens.dims]

    def _viewed(self, step: Step) -> Tokens | int | None:
        """Return a change of shape, unless the map's axes stay dimensions of it anyway."""
        number = refs(step)[0].number
        tokens = self._tokens.get(number)
        info = self._known.infos[self._numbers[number] if tokens is None else tokens.number]
        if info.kind != MAP or (tokens is not None and tokens.values is not None):
            return None
        shape, wanted = info.value.shape, list(step.value.shape)
        groups = _grouped(shape, info.axes, wanted)
        if groups is None:
            return None
        holding = [
            place for place, dims in enumerate(groups) if not info.axes.keys().isdisjoint(dims)
        ]
        is_flat = len(holding) == 1 and len(groups[holding[0]]) > 1
        if tokens is None and not is_flat:
            return None
        if is_flat:
            dims: Sequence[int] = groups[holding[0]]
            first, num = holding[0], len(dims)
            wanted[first : first + 1] = [shape[dim] for dim in dims]
        elif any(len(groups[place]) > 1 for place in holding):
            return None
        elif tokens is not None:
            held_dims = [place for place, dims in enumerate(groups) if {*dims} & {*tokens.dims}]
            first, num = held_dims[0], held_dims[-1] + 1 - held_dims[0]
        is_softmax = tokens is not None and tokens.is_softmax
        before = self._sizes(tokens) if tokens is not None and is_softmax else None
        if before is not None and prod(before) != prod(wanted[first : first + num]):
            return None
        source = self._numbers[number] if tokens is None else tokens.number
        if wanted != list(shape):
            value = info.value.new_empty(wanted)
            source = self._add(reshaped(step, Ref(source), value))
        viewed = Tokens(source, first, num, is_flat, is_softmax)
        if not self._known.infos[source].axes.keys() <= {*viewed.dims}:
            return None
        return viewed if is_flat or viewed.is_softmax else source

    def _permuted(self, step: Step, tokens: Tokens) -> Tokens:
        ndim = step.value.dim()
        order = list(range(ndim))
        named = arguments(step)
        if step.operation == "permute":
            order = [dim % ndim for dim in named["dims"]]
        elif step.operation == "t":
            order.reverse()
        else:
            one, two = (named[key] % ndim for key in ("dim0", "dim1"))
            order[one], order[two] = order[two], order[one]
        first = order.index(tokens.first)
        whole = [tokens.moved(dim) for dim in order]
        whole[first : first + 1] = tokens.dims
        value = self._info(tokens).value.permute(whole)
        args = (Ref(tokens.number), whole)
        number = self._add(
            replace(step, target=aten.permute.default, args=args, kwargs={}, value=value)
        )
        return tokens._replace(number=number, first=first)

    def _elementwise(self, step: Step, inputs: Sequence[Tokens | None]) -> Tokens | None:
        """Return an operation on each position, of tokens and of what is there for all of them."""
        named = arguments(step)
        places = set()
        for tokens in inputs:
            if tokens is not None:
                behind = self._info(tokens).first.dim() - tokens.first - tokens.num
                places.add((behind, tuple(self._sizes(tokens))))
        if len(places) > 1 or (step.operation in _DROPOUTS and named["train"] and named["p"]):
            return None
        behind, sizes = places.pop()
        first = step.value.dim() - 1 - behind
        if step.operation in _BY_CHANNEL and (first < 2 or named.get("training")):
            return None
        if any(tensor.dim() > behind for tensor in self._fixed(step)):
            return None
        output = Tokens(-1, first, len(sizes))
        if step.operation == "cat":
            dim = named["dim"] % step.value.dim()
            if dim == first:
                return None
            step = replace(step, args=(step.args[0], output.moved(dim)), kwargs={})
        return self._added(step, output, sizes)

    def _fixed(self, step: Step) -> list[Tensor]:
        """Return the tensors that a step takes beside tokens."""
        values = [
            leaf.get()
            if isinstance(leaf, Weight)
            else self._known.infos[self._numbers[leaf.number]].first
            for leaf in leaves(step)
            if isinstance(leaf, Weight)
            or (isinstance(leaf, Ref) and leaf.number not in self._tokens)
        ]
        return [value for value in values if isinstance(value, Tensor)]

    def _along(self, step: Step, tokens: Tokens) -> Tokens | None:
        """Return an operation along dimensions that are not of positions."""
        name, named = step.operation, arguments(step) if step.operation != "getitem" else {}
        info = self._info(tokens)
        ndim = info.first.dim() - tokens.num + 1
        sizes = self._sizes(tokens)
        behind = ndim - 1 - tokens.first
        if name in ("linear", "matmul"):
            weights = self._fixed(step)[:1] if name == "matmul" else []
            is_first = refs(step)[0] == step.args[0] and all(
                weight.dim() == 2 for weight in weights
            )
            return self._added(step, tokens, sizes) if behind and is_first else None
        if name in ("layer_norm", "rms_norm"):
            is_inside = len(named["normalized_shape"]) <= behind
            return self._added(step, tokens, sizes) if is_inside else None
        if name == "getitem":
            return self._added(step, tokens, sizes)
        if name not in (*_ALONG_ONE, "select", "unbind"):
            return None
        dim = named["dim"] % ndim
        if dim == tokens.first:
            is_softmax = name == "softmax" and named["dtype"] is None
            return tokens._replace(is_softmax=True) if is_softmax else None
        output = tokens
        if name in ("select", "unbind"):
            output = tokens._replace(first=tokens.first - (dim < tokens.first))
        return self._added(with_argument(step, "dim", tokens.moved(dim)), output, sizes)

    def _added(self, step: Step, output: Tokens, sizes: Sequence[int]) -> Tokens:
        """Add a step on maps in place of tokens, and return the tokens that it gives."""

        def moved(ref: Ref) -> Ref:
            tokens = self._tokens.get(ref.number)
            return Ref(self._numbers[ref.number] if tokens is None else tokens.number)

        def expanded(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(map(expanded, value))
            shape = list(value.shape)
            shape[output.first : output.first + 1] = sizes
            return value.new_empty(shape)

        value = expanded(step.value)
        args, kwargs = map_refs(moved, step.args), map_refs(moved, step.kwargs)
        return output._replace(
            number=self._add(replace(step, args=args, kwargs=kwargs, value=value))
        )

    def _reduced(self, step: Step, tokens: Tokens) -> Tokens | int | None:
        """Return a reduction over positions, if they are among its dimensions."""
        info = self._info(tokens)
        ndim = info.first.dim() - tokens.num + 1
        over = reduced(step, ndim)
        dims = [tokens.moved(dim) for dim in over]
        if tokens.first not in over:
            if step.operation not in _OVER_SEVERAL:
                return None
            num_dropped = (
                0 if arguments(step)["keepdim"] else sum(dim < tokens.first for dim in over)
            )
            output = tokens._replace(first=tokens.first - num_dropped)
            return self._added(with_argument(step, "dim", dims), output, self._sizes(tokens))
        place = over.index(tokens.first)
        dims[place : place + 1] = tokens.dims
        step = replace(step, args=(Ref(tokens.number), *step.args[1:]))
        return self._add(over_positions(self._known, step, dims))

    def _weighted(self, step: Step, inputs: Sequence[Tokens | None]) -> Tokens | int | None:
        """Return a sum of values times a softmax over positions, or the product to be summed."""
        places = [
            place for place, tokens in enumerate(inputs) if tokens is not None and tokens.is_softmax
        ]
        weights = inputs[places[0]]
        assert weights is not None
        if len(places) > 1:
            return None
        if step.operation == "sum" and weights.values is not None:
            return self._attended(step, weights, weights.values, self._summed(step, weights))
        if len(inputs) != 2 or weights.values is not None:
            return None
        values = inputs[1 - places[0]]
        if step.operation == "mul":
            return self._product(step, weights, values, refs(step)[1 - places[0]])
        if step.operation not in _PRODUCTS or values is None or not weights.is_flat:
            return None
        if not self._contracts(step, [tokens for tokens in inputs if tokens is not None]):
            return None
        target, is_first = step.target, places[0] == 0

        def combine(one: Tensor, other: Tensor) -> Tensor:
            factors = [one, other] if is_first else [other, one]
            product: Tensor = (
                target(step.args[0], factors) if step.operation == "einsum" else target(*factors)
            )
            return product

        return self._attended(step, weights, values, combine)

    def _product(
        self, step: Step, weights: Tokens, values: Tokens | None, ref: Ref
    ) -> Tokens | None:
        behind = self._info(weights).value.dim() - weights.first - weights.num
        if values is None:
            info = self._known.infos[self._numbers[ref.number]]
            first = info.first.dim() - behind - weights.num if info.kind == MAP else -1
            values = Tokens(self._numbers[ref.number], first, weights.num, False)
        info = self._info(values)
        if (
            values.first < 0
            or values.is_flat != weights.is_flat
            or info.first.dim() - values.first - values.num != behind
            or self._sizes(values) != self._sizes(weights)
            or not info.axes.keys() <= {*values.dims}
        ):
            return None
        return weights._replace(values=values)

    def _summed(self, step: Step, weights: Tokens) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return the sum over exactly the positions of a product with one dimension of them."""
        behind = self._info(weights).value.dim() - weights.first - weights.num
        read = step.args[0]
        assert isinstance(read, Ref)
        is_kept = bool(arguments(step).get("keepdim"))
        width = 1 if weights.is_flat else weights.num
        ndim = step.value.dim() + (0 if is_kept else width)
        if reduced(step, ndim) != list(range(ndim - behind - width, ndim - behind)):
            return None
        return lambda one, other: (one * other).sum(-1 - behind, keepdim=True)

    def _contracts(self, step: Step, factors: Sequence[Tokens]) -> bool:
        """Return whether a product adds up over the positions, and over nothing else."""
        ndims: list[int] = [self._info(factor).value.dim() - factor.num + 1 for factor in factors]
        if step.operation != "einsum":
            return factors[0].first == ndims[0] - 1 and 0 <= ndims[1] - 2 == factors[1].first
        left, _, right = step.args[0].replace(" ", "").partition("->")
        terms = left.split(",")
        if not right or "." in left or [len({*term}) for term in terms] != ndims:
            return False
        letters = {term[factor.first] for term, factor in zip(terms, factors, strict=True)}
        return len(letters) == 1 and {*left} - {","} - letters == {*right}

    def _attended(
        self,
        step: Step,
        weights: Tokens,
        values: Tokens,
        combine: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> int | None:
        if combine is None or values.is_softmax:
            return None
        step = replace(step, args=(Ref(weights.number), Ref(values.number)), kwargs={})
        groups = [(tokens.first, tokens.num) for tokens in (weights, values)]
        return self._add(attention(self._known, step, groups, combine))


def _grouped(
    shape: Sequence[int], axes: Mapping[int, int], wanted: Sequence[int]
) -> list[list[int]] | None:
    """Return, for each dimension of a wanted shape, the dimensions of which it consists.

    Dimensions of size 1 that are no axes may come and go.
    """
    groups: list[list[int]] = []
    place = 0
    for size in wanted:
        group: list[int] = []
        while size > 1 and place < len(shape) and shape[place] == 1 and place not in axes:
            place += 1
        reached = 1
        while (
            place < len(shape) and (not group or reached < size) and reached * shape[place] <= size
        ):
            group.append(place)
            reached *= shape[place]
            place += 1
        if reached != size:
            return None
        groups.append(group)
    missing = {dim for dim in range(len(shape)) if not any(dim in group for group in groups)}
    is_lost = any(dim in axes or shape[dim] > 1 for dim in missing)
    return None if is_lost else groups
