"""The loss of a run: the sum over micro-batches and the weight of their labels, which give a mean.

The sum of a loss may be one over the positions of maps as well: then parts of maps have losses of
their own.

The gradient of a step is the gradient of one mean over the whole global batch, whatever the
micro-batches, directions and replicas: the sums of the micro-batches are divided by the weight of
all labels of the step.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from gems.autograd.outputs import map_tensors, tensors_in
from gems.config.recipe import AUTO, LOSS_OF_TASK, LOSSES, LossConfig
from gems.config.schema import DataConfig
from gems.data import kind_of, task_of
from gems.data.dataset import IMAGES, NO_LABEL
from gems.errors import ConfigError, one_of
from gems.utils.targets import call_target, check_kwargs, load_target, target_error

Outputs = Any  # the output of a model: a tensor, or tensors in tuples, lists and dicts
LossFunction = Callable[[Outputs, Tensor], Tensor]
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)
_BY_ELEMENT = (
    nn.BCEWithLogitsLoss,
    nn.BCELoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.SoftMarginLoss,
)
# arguments of torch's losses that a configuration gives as lists
_TENSORS = ("weight", "pos_weight")
# sizes of the made-up samples on which a loss is probed
_SAMPLES = 4
_SIDE_PX = 64
# of the maps on which a loss of the user's own is divided: it may treat the worst pixels alone
_DIVIDED_SIDE_PX = 512
_DIVIDED_VALUES = 2**21
# a loss may compute in float32 even if its inputs are float64
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_REFUSAL = "cannot be summed over micro-batches"
_ADVICE = (
    "give it an argument `reduction` (mean or sum), or a method weight(labels) by which its mean is"
    " a sum"
)


@dataclass(frozen=True, slots=True)
class Loss:
    """The configured loss with its own reduction: a mean (or a sum) over the labels of one call.

    `summed` returns the sum instead; it is None if the loss has no such form.
    """

    config: LossConfig
    key: str
    name: str
    function: LossFunction
    summed: LossFunction | None

    @property
    def reduction(self) -> str:
        """Return the reduction of the loss, or mean if the loss does not state one."""
        reduction = self.config.kwargs.get("reduction", getattr(self.function, "reduction", "mean"))
        return str(getattr(reduction, "value", reduction))

    @property
    def takes_one_tensor(self) -> bool:
        """Return whether the loss is torch's own and takes one tensor, not a whole output."""
        return self.config.target is None or isinstance(self.function, (*_BY_CLASS, *_BY_ELEMENT))

    def __call__(self, outputs: Outputs, labels: Tensor) -> Tensor:
        """Return the loss of a model's output."""
        return self.function(self.part(outputs), self.known(labels))

    def part(self, outputs: Outputs) -> Outputs:
        """Return the part of a model's output that the loss takes.

        Raises:
            ConfigError: `loss.output` names no part of the output, or it is missing and required.
        """
        if isinstance(outputs, Tensor):
            return outputs
        output = self.config.output
        names = part_names(outputs)
        if output is not None:
            if output not in names:
                raise ConfigError(
                    "loss.output", output, one_of(names), "name a part of the model's output"
                )
            return named_part(outputs, output)
        if not self.takes_one_tensor:
            return outputs
        tensors = list(tensors_in(outputs))
        if len(tensors) == 1:
            return tensors[0]
        raise ConfigError(
            "loss.output",
            "null",
            f"must be given, for the model gives several tensors; {one_of(names)}",
            "or set loss.target to a loss of your own that takes them all",
        )

    def known(self, labels: Tensor) -> Tensor:
        """Return the labels with the loss's own ignore_index in place of `NO_LABEL`."""
        ignored = getattr(self.function, "ignore_index", NO_LABEL)
        if (
            isinstance(self.function, _BY_CLASS)
            and ignored != NO_LABEL
            and not labels.is_floating_point()
        ):
            return labels.masked_fill(labels == NO_LABEL, ignored)
        return labels


def first_tensor(outputs: Outputs) -> Tensor:
    """Return the first tensor of a model's output."""
    return next(tensors_in(outputs))


def part_names(outputs: Outputs) -> list[str]:
    """Return the keys, fields or indices of a model's output."""
    if isinstance(outputs, Mapping):
        return list(map(str, outputs))
    return list(getattr(outputs, "_fields", map(str, range(len(outputs)))))


def named_part(outputs: Outputs, name: str) -> Outputs:
    """Return a part of a model's output by one of its names."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    return dict(zip(part_names(outputs), values, strict=True))[name]


def open_loss(config: LossConfig, task: str, dtype: torch.dtype, device: torch.device) -> Loss:
    """Build the configured loss, with its tensors in `dtype` on `device`.

    Raises:
        ConfigError: The loss does not exist, does not take the arguments, or has parameters.
    """
    key = "loss.name" if config.target is None else "loss.target"
    name = config.name if config.target is None else config.target
    target = config.target or LOSSES[LOSS_OF_TASK[task] if config.name == AUTO else config.name]
    make = load_target(key, target, config.path)
    kwargs = dict(config.kwargs)
    if getattr(make, "__module__", "").startswith("torch.nn."):
        lists = {
            argument: kwargs[argument]
            for argument in _TENSORS
            if isinstance(kwargs.get(argument), list)
        }
        kwargs |= {
            argument: torch.tensor(value, dtype=dtype, device=device)
            for argument, value in lists.items()
        }
    is_by_class = inspect.isclass(make) and issubclass(make, _BY_CLASS)
    if is_by_class and config.target is None:
        kwargs.setdefault("ignore_index", NO_LABEL)

    def build(more: dict[str, Any]) -> LossFunction:
        if not inspect.isclass(make):
            check_kwargs(key, make, kwargs | more, None, None)
            return partial(make, **kwargs, **more)
        function = call_target(key, target, kwargs | more, config.path)
        if isinstance(function, nn.Module):
            if next(function.parameters(), None) is not None:
                raise ConfigError(
                    key,
                    name,
                    "has parameters, and only those of the model are trained",
                    "make them buffers, or parameters of the model",
                )
            function = function.to(device, dtype)
        return cast(LossFunction, function)

    function = build({})
    summed: LossFunction | None = None
    if "reduction" in _parameters(make):
        summed = (
            build({"reduction": "sum"}) if config.kwargs.get("reduction") != "sum" else function
        )
    elif hasattr(function, "reduction"):
        changed: Any = copy.deepcopy(function)
        changed.reduction = "sum"
        summed = changed
    return Loss(config, key, name, function, summed)


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


class SummedLoss:
    """The loss summed over the labels of a micro-batch, and the weight that turns sums into a mean.

    Attributes:
        is_sum: The user wants the sum over the step, so nothing is divided.
        is_constant: Every sample has the same weight, whatever its labels.
    """

    def __init__(
        self,
        config: LossConfig,
        data: DataConfig,
        dtype: torch.dtype,
        device: torch.device,
        like: Outputs,
    ) -> None:
        """Open the loss and probe it on made-up outputs.

        `like` has the shapes of the model's output.

        Raises:
            ConfigError: `open_loss` fails, the loss cannot take such outputs, or it cannot be
                summed over micro-batches.
        """
        self._task = task_of(data)
        self._data = data
        self._like = like
        self._dtype = torch.float64 if dtype is torch.float64 else torch.float32
        self.loss = open_loss(config, self._task, self._dtype, device)
        self._exact = self.loss
        self._exact_dtype = self._dtype
        self.is_sum = self.loss.reduction == "sum"
        own = getattr(self.loss.function, "weight", None)
        self._own_weight = own if callable(own) and not isinstance(own, Tensor) else None
        self.is_constant = self._weighs_samples_equally()
        self._device = device
        self._divides: bool | None = None
        self._whole_positions: int | None = None  # of a map, if the loss is a mean over them
        if self._dtype is torch.float64 or not self._takes_more_digits(config, device):
            self._check_sum(device)

    def __call__(self, outputs: Outputs, labels: Tensor) -> Tensor:
        """Return the loss summed over the labels of a micro-batch, in float32 or wider."""
        wide = map_tensors(
            lambda tensor: (
                tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
            ),
            outputs,
        )
        return self._sum(
            self.loss, wide, labels.to(self._dtype) if labels.is_floating_point() else labels.long()
        )

    def weight(self, labels: Tensor, like: Outputs | None = None) -> Tensor:
        """Return the weight of labels, a float64 scalar on their device that only they determine.

        Give `like` if the shapes of the outputs differ from those of the model's output.
        """
        share = self._share(labels)
        weight = self._weight_of_all(labels, like)
        return weight if share == 1 else weight * share

    def _weight_of_all(self, labels: Tensor, like: Outputs | None) -> Tensor:
        function = self._exact.function
        labels = labels if labels.is_floating_point() else labels.long()
        if self._own_weight is not None:
            return torch.as_tensor(
                self._own_weight(labels), dtype=torch.float64, device=labels.device
            )
        if self.loss.summed is None or self.is_sum:
            return _scalar(len(labels), labels.device)
        if type(function) in _BY_ELEMENT and self.loss.reduction == "mean":
            return _scalar(labels.numel(), labels.device)
        if (
            isinstance(function, _BY_CLASS)
            and type(function) in _BY_CLASS
            and self.loss.reduction == "mean"
        ):
            return _class_weight(function, self._exact.known(labels))
        return self._ratio(labels, self._like_of(labels) if like is None else like)

    def divides(self) -> bool:
        """Return whether the losses of the parts of maps add up to the loss of the maps.

        Their weights and gradients must do so too. This is compared on made-up maps, in float64 if
        the loss can compute in it; then calls with parts of maps return shares of the sum.
        """
        if self._divides is None:
            self._divides = self._find_division()
        return self._divides

    def scores(self, outputs: Outputs) -> Tensor:
        """Return the scores in a model's output: the tensor of loss.output, or the first one."""
        is_named = self.loss.config.output is not None
        return first_tensor(self.loss.part(outputs) if is_named else outputs)

    def mean(self, total: float, weight: float) -> float:
        """Return the loss over all labels, given their sum `total` and their weight."""
        if self.is_sum:
            return total
        return total / weight if weight else math.nan

    def _weighs_samples_equally(self) -> bool:
        function: Any = self.loss.function
        if self._own_weight is not None:
            return False
        if (
            self.loss.summed is None
            or self.is_sum
            or (type(function) in _BY_ELEMENT and self.loss.reduction == "mean")
        ):
            return True
        if type(function) not in _BY_CLASS or self._task != "classification":
            return False
        return function.weight is None and int(function.ignore_index) < 0

    def _share(self, labels: Tensor) -> float:
        """Return the share of maps that labels are, if the loss is a mean over positions."""
        if self._whole_positions is None or labels.ndim < 3:
            return 1.0
        return math.prod(labels.shape[1:]) / self._whole_positions

    def _sum(self, loss: Loss, outputs: Outputs, labels: Tensor) -> Tensor:
        share = self._share(labels)
        total = self._sum_of_all(loss, outputs, labels)
        return total if share == 1 else total * share

    def _sum_of_all(self, loss: Loss, outputs: Outputs, labels: Tensor) -> Tensor:
        if loss.summed is not None:
            return loss.summed(loss.part(outputs), loss.known(labels))
        weight = self._weight_of_all(labels, None)
        is_empty = not len(labels) if self._own_weight is None else not float(weight)
        if is_empty:  # there is no mean, so return a zero that keeps the graph
            return (
                torch.stack(
                    [tensor.sum() for tensor in tensors_in(outputs) if tensor.is_floating_point()]
                ).sum()
                * 0
            )
        return loss(outputs, labels) * weight.to(self._dtype)

    def _ratio(self, labels: Tensor, like: Outputs, seed: int = 0) -> Tensor:
        """Return sum / mean on made-up outputs."""
        assert self._exact.summed is not None
        labels = labels.to(self._exact_dtype) if labels.is_floating_point() else labels
        outputs = _made_up(like, len(labels), seed, labels.device, self._exact_dtype)
        with torch.no_grad():
            part = self._exact.part(outputs)
            known = self._exact.known(labels)
            ratio = self._exact.summed(part, known) / self._exact.function(part, known)
            return ratio.nan_to_num(0.0)  # 0 / 0 if all labels are ignored

    def _like_of(self, labels: Tensor) -> Outputs:
        """Return the shapes of the outputs for labels, which may be those of parts of maps."""
        if not self._divides or labels.ndim < 3:
            return self._like
        part = tuple(slice(size) for size in labels.shape[1:])
        return map_tensors(lambda tensor: tensor[:, :, *part], self._like)

    def _find_division(self) -> bool:
        sides = self._data.sides_px
        is_of_maps = self._task == "segmentation" and all(
            tensor.is_floating_point() and tuple(tensor.shape[2:]) == sides
            for tensor in tensors_in(self._like)
        )
        if not is_of_maps:
            return False
        is_own = type(self.loss.function) not in (*_BY_CLASS, *_BY_ELEMENT)
        side_px = _SIDE_PX
        if is_own:
            values = sum(tensor.shape[1] for tensor in tensors_in(self._like)) * _SAMPLES
            fitting_px = int((_DIVIDED_VALUES / values) ** (1 / len(sides)))
            side_px = min(max(_SIDE_PX, fitting_px), _DIVIDED_SIDE_PX)
        labels, like = self._made_up_labels(self._device, side_px)
        if self._adds_up(labels, like):
            return True
        if self.loss.summed is not None or self._own_weight is not None or self.is_sum:
            return False
        self._whole_positions = math.prod(labels.shape[1:])  # it may be a mean over positions
        is_mean = self._adds_up(labels, like)
        self._whole_positions = math.prod(sides) if is_mean else None
        return is_mean

    def _adds_up(self, labels: Tensor, like: Outputs) -> bool:
        """Return whether made-up maps and their parts have equal losses, weights and gradients.

        Some labels are ignored, if the loss can ignore any.
        """
        some = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.2
        for partial_labels in (labels.masked_fill(some.to(labels.device), NO_LABEL), labels):
            try:
                return all(
                    self._adds_up_along(axis, outputs, partial_labels, like)
                    for axis in range(1, labels.ndim)
                    for outputs in (
                        _made_up(like, _SAMPLES, axis, self._device, self._exact_dtype),
                    )
                )
            except Exception:  # raised by the user's code, which may take no label of this value
                continue
        return False

    def _adds_up_along(self, axis: int, outputs: Outputs, labels: Tensor, like: Outputs) -> bool:
        size = labels.shape[axis]
        first = max(1, size // 3)
        results = []
        for parts in ([(0, size)], [(0, first), (first, size - first)]):
            leaves = map_tensors(lambda tensor: tensor.detach().requires_grad_(), outputs)
            weight = total = torch.zeros((), dtype=torch.float64, device=labels.device)
            for start, length in parts:
                if not length:
                    continue
                some, shapes = (
                    map_tensors(lambda tensor: tensor.narrow(axis + 1, start, length), whole)  # noqa: B023
                    for whole in (leaves, like)
                )
                of_part = labels.narrow(axis, start, length)
                total = total + self._sum(self._exact, some, of_part)
                if not self.is_sum:  # else nothing is divided by it
                    weight = weight + self.weight(of_part, shapes)
            results.append([total, weight, *torch.autograd.grad(total, list(tensors_in(leaves)))])
        tolerance = _TOLERANCES[self._exact_dtype]
        return all(
            torch.allclose(tensor, whole, rtol=tolerance, atol=tolerance * _typical(whole))
            for whole, tensor in zip(*results, strict=True)
        )

    def _takes_more_digits(self, config: LossConfig, device: torch.device) -> bool:
        """Weigh labels and check the sum in float64; return False if the loss cannot run so.

        The constants of a loss may be float32.
        """
        self._exact = open_loss(config, self._task, torch.float64, device)
        self._exact_dtype = torch.float64
        try:
            self._check_sum(device)
        except ConfigError as error:
            if error.allowed.startswith(_REFUSAL):
                raise
            self._exact = self.loss
            self._exact_dtype = self._dtype
            return False
        return True

    def _check_sum(self, device: torch.device) -> None:
        """Compare the loss of made-up samples with the losses of two parts of them.

        Raises:
            ConfigError: The loss fails on such outputs, is no scalar, or is no sum over samples.
        """
        key = self.loss.key
        name = self.loss.name
        exact = self._exact
        if self.loss.reduction == "none":
            raise ConfigError(
                "loss.kwargs",
                dict(self.loss.config.kwargs),
                "reduction=none gives no scalar",
                "use mean",
            )
        labels, like = self._made_up_labels(device)
        outputs = _made_up(like, _SAMPLES, 0, device, self._exact_dtype)
        tolerance = _TOLERANCES[self._exact_dtype]
        results = []
        try:
            self(map_tensors(lambda tensor: tensor.to(self._dtype), outputs), labels)
            for part in (slice(None), slice(0, 1), slice(1, None)):
                some = map_tensors(operator.itemgetter(part), outputs)
                value = self._sum(exact, some, labels[part])
                if not isinstance(value, Tensor) or value.numel() != 1 or value.ndim:
                    raise ConfigError(
                        key, name, f"must give a scalar tensor, gives {_describe(value)}", _ADVICE
                    )
                results.append((float(value), float(self.weight(labels[part], like))))
            ratios = (
                [results[0][1]]
                if exact.summed is None
                else [float(self._ratio(labels, like, n)) for n in (1, 2)]
            )
        except ConfigError:
            raise
        except Exception as error:
            shapes = ", ".join(
                str(tuple(tensor.shape)) for tensor in tensors_in(exact.part(outputs))
            )
            what = (
                f"cannot take outputs of shape {shapes} and {labels.dtype} labels of shape"
                f" {tuple(labels.shape)}"
            )
            raise target_error(key, name, what.replace("torch.", ""), error) from error
        for whole, first, second in zip(*results, strict=True):
            if not math.isclose(whole, first + second, rel_tol=tolerance, abs_tol=tolerance):
                why = (
                    f"{whole:.6g} of {_SAMPLES} samples, {first + second:.6g} of 1 and of the other"
                    f" {_SAMPLES - 1}"
                )
                raise ConfigError(key, name, f"{_REFUSAL} ({why})", _ADVICE)
        has_ratio = not self.is_sum and self._own_weight is None and exact.summed is not None
        if has_ratio and not math.isclose(ratios[0], ratios[-1], rel_tol=tolerance):
            raise ConfigError(
                key, name, f"{_REFUSAL}: its sum / mean depends on the outputs", _ADVICE
            )

    def _made_up_labels(
        self, device: torch.device, side_px: int = _SIDE_PX
    ) -> tuple[Tensor, Outputs]:
        """Return labels of some samples, and the shapes of the outputs.

        Large maps are cut to a corner, in both.
        """
        data = self._data
        generator = torch.Generator().manual_seed(0)
        like = self._like
        shape: tuple[int, ...] = (_SAMPLES, data.num_classes)
        if self._task in ("multi_label", "regression"):
            values = torch.rand(shape, generator=generator, dtype=torch.float64).to(
                device, self._exact_dtype
            )
            return (values.round() if self._task == "multi_label" else values), like
        shape = (_SAMPLES,) if kind_of(data) == IMAGES else (_SAMPLES, data.length)
        if self._task == "segmentation":
            sides = data.sides_px
            tensors = list(tensors_in(like))
            if max(sides) > side_px and all(tuple(tensor.shape[2:]) == sides for tensor in tensors):
                corner = tuple(slice(side_px) for _ in sides)
                like = map_tensors(lambda tensor: tensor[:, :, *corner], like)
                sides = tuple(min(side, side_px) for side in sides)
            shape = (_SAMPLES, *sides)
        return torch.randint(data.num_classes, shape, generator=generator).to(device), like


def _class_weight(loss: nn.CrossEntropyLoss | nn.NLLLoss, labels: Tensor) -> Tensor:
    if labels.is_floating_point():  # shares of each class, (N, classes, ...)
        return _scalar(labels.numel() / labels.shape[1], labels.device)
    is_known = labels != loss.ignore_index
    if loss.weight is None:
        return is_known.sum().double()
    # not labels[is_known]: a GPU would tell the host how many there are
    weights = loss.weight.double().take(labels.masked_fill(~is_known, 0))
    return weights.masked_fill(~is_known, 0).sum()


def _scalar(value: float, device: torch.device) -> Tensor:
    """Return a number on a device, which torch.tensor would copy while the host waits."""
    return torch.full((), value, dtype=torch.float64, device=device)


def _made_up(
    like: Outputs, num: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Outputs:
    """Return random outputs of `num` samples that are valid both as scores and as probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def make(tensor: Tensor) -> Tensor:
        shape = (num, *tensor.shape[1:])
        if not tensor.is_floating_point():
            return torch.zeros(shape, dtype=tensor.dtype, device=device)
        return (0.05 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)).to(
            device, dtype
        )

    return map_tensors(make, like)


def _typical(tensor: Tensor) -> float:
    """Return the size of the values of a tensor."""
    return float(tensor.detach().abs().mean())


def _describe(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
