"""Child process: reads a resolved run as JSON on stdin, prints its operators' graph with times and bytes.

As in the fake profile: fake tensors give the bytes, the roofline of `machine=` the times, of each operator alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gems.config.schema import RunSpec
from gems.models import layers_of
from gems.models.blocks.operator import operator_module
from gems.models.build import as_tuple
from gems.models.operators import operators_of
from gems.profile.operator_graph import Op, OpGraph
from gems.profile.profilers.fake import device_of, made_fake, on_meta
from gems.profile.profilers.kernel_workspaces import Workspace, workspace_of
from gems.profile.profilers.layer_run import Loss, training_loss
from gems.profile.profilers.meter import meter
from gems.profile.profilers.roofline import Rates, rates_of, roofline_times
from gems.profile.profilers.take import OPTIMIZER_STATES, answer
from gems.profile.profilers.whole_model import given_tensors


@dataclass(frozen=True, slots=True)
class _Known:
    """What equal operators on equal inputs share."""

    op: Op
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Measure:
    rates: Rates
    mode: FakeTensorMode
    states: int
    workspace: Workspace | None

    def operator(self, module: nn.Module, inputs: tuple[Tensor, ...], is_first: bool, loss: Loss | None) -> _Known:
        with self.mode:
            made_fake(module)
            times = roofline_times(module, inputs, is_first, loss, self.rates)
            metered = meter(module, inputs, is_first, loss, self.workspace)
            made = as_tuple(module(*inputs))
            outputs = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in made)
        state_bytes = metered.param_bytes * (2 + self.states) + metered.buffer_bytes
        held_bytes = state_bytes + metered.left_bytes
        handed_bytes = 0 if loss else sum(output.num_bytes for output in metered.outputs)
        return _Known(
            Op("", times.forward_s, times.input_grad_s + times.weight_grad_s, handed_bytes, held_bytes, state_bytes),
            outputs,
        )


def take(spec: RunSpec) -> OpGraph:
    """Return the operators of a resolved run's model on one micro-batch, on its machine.

    An operator holds its parameters, their gradients, the optimizer's state, and what its forward leaves. The gradients
    of an output that several read are added up in the backward of the operator that made it.

    Raises:
        ConfigError: the machine has no rate for the dtype.
    """
    kind: torch.dtype = getattr(torch, spec.train.dtype)
    rates = rates_of(spec.machine, kind)
    layers = layers_of(spec.model, spec.data)
    operators = operators_of(layers)
    readers = [0] * len(operators)
    for operator in operators:
        for feeder in operator.feeders:
            readers[feeder] += 1
    given = given_tensors(spec.data, spec.parallel.micro_batch_size, kind, torch.device("cpu"))
    mode = FakeTensorMode()
    states = OPTIMIZER_STATES[spec.train.optimizer] if spec.train.optimizer != "sgd" or spec.train.momentum else 0
    known: dict[object, _Known] = {}
    ops: list[Op] = []
    outputs: list[tuple[Tensor, ...]] = []
    with mode:
        start = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in given)
    for number, operator in enumerate(operators):
        inputs = tuple(t for feeder in operator.feeders for t in outputs[feeder]) or start
        layer = layers[operator.layer]
        is_last = number == len(operators) - 1
        key = (
            layer.target, layer.options, operator.path, number == 0, is_last,
            tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs),
        )  # fmt: skip
        if key not in known:
            module = operator_module(operator, on_meta(layer, kind))
            loss = training_loss if is_last else None
            measure = _Measure(rates, mode, states, workspace_of(device_of(spec.machine)))
            known[key] = measure.operator(module, inputs, number == 0, loss)
        found = known[key]
        outputs.append(found.outputs)
        sums_s = max(0, readers[number] - 1) * rates.seconds(0, 3 * found.op.output_bytes)
        ops.append(replace(found.op, name=operator.name, backward_s=found.op.backward_s + sums_s))
    edges = tuple((feeder, at) for at, operator in enumerate(operators) for feeder in operator.feeders)
    return OpGraph(tuple(ops), edges)


if __name__ == "__main__":
    sys.exit(answer(take))
