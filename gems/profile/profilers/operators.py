"""Child process: read a resolved run as JSON on stdin, and print its operators' graph as JSON.

Operators have times and bytes as in the fake profile: fake tensors determine the bytes, and the
roofline of `machine=` the times, of each operator separately.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from gems.autograd.outputs import tensors_in
from gems.models import layers_of
from gems.models.blocks.chain import operator_module
from gems.models.mixed import Precision, compute_in
from gems.models.steps import operators_of
from gems.profile.operator_graph import Op, OpGraph
from gems.profile.profilers.chain import Lab, given_tensors
from gems.profile.profilers.fake import (
    autocast_elsewhere,
    fake_lab,
    machine_rates,
    made_fake,
    on_meta,
)
from gems.profile.profilers.layer_run import LayerCall, task_loss
from gems.profile.profilers.layers import answer
from gems.profile.profilers.meter import meter
from gems.profile.subject import Subject


def take(subject: Subject) -> OpGraph:
    """Return the operators of a resolved run's model on one micro-batch, on its machine.

    An operator holds its parameters, their gradients, the optimizer's state, and the tensors that
    outlive its forward. If several operators read an output, its gradients are added in the
    backward of the operator that made it.

    Raises:
        ConfigError: The machine has no rate for the dtype.
    """
    precision = Precision.of(subject.train.precision)
    lab = fake_lab(subject.machine, precision)
    elsewhere = autocast_elsewhere(subject.machine, precision)
    layers = layers_of(subject.model, subject.data)
    operators = operators_of(layers)
    readers = Counter(other for operator in operators for other in operator.predecessors)
    rates = machine_rates(subject.machine, precision)
    known: dict[object, tuple[Op, tuple[Tensor, ...]]] = {}
    ops: list[Op] = []
    outputs: list[tuple[Tensor, ...]] = []
    with lab.mode:
        start = tuple(
            given_tensors(
                subject.data, subject.parallel.micro_batch_size, precision.compute, lab.device
            )
        )
    for number, operator in enumerate(operators):
        inputs = tuple(t for other in operator.predecessors for t in outputs[other]) or start
        layer = layers[operator.layer]
        loss = task_loss(subject.data) if number == len(operators) - 1 else None
        key = (
            layer.target,
            layer.options,
            operator.path,
            number == 0,
            loss is None,
            tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs),
        )
        if key not in known:
            module = operator_module(operator, on_meta(layer, precision.parameters))
            with lab.mode:
                compute_in(made_fake(module), precision, elsewhere)
                call = LayerCall(module, inputs, number == 0, loss)
                known[key] = _measured(call, lab, subject.optimizer.num_states)
        op, op_outputs = known[key]
        outputs.append(op_outputs)
        sums_s = max(0, readers[number] - 1) * rates.seconds(0, 3 * op.output_bytes)
        ops.append(replace(op, name=operator.name, backward_s=op.backward_s + sums_s))
    edges = tuple(
        (other, at) for at, operator in enumerate(operators) for other in operator.predecessors
    )
    return OpGraph(tuple(ops), edges)


def _measured(call: LayerCall, lab: Lab, num_states: int) -> tuple[Op, tuple[Tensor, ...]]:
    """Return the costs of an operator without a name, and its outputs on fake tensors."""
    times = lab.times(call)
    layer_meter = meter(call, lab.workspace)
    outputs = tuple(
        torch.empty(tensor.shape, dtype=tensor.dtype)
        for tensor in tensors_in(call.module(*call.inputs))
    )
    state_bytes = layer_meter.layer.param_bytes * (2 + num_states) + layer_meter.layer.buffer_bytes
    op = Op(
        "",
        times.forward_s,
        times.input_grad_s + times.weight_grad_s,
        0 if call.loss else sum(output.layout.num_bytes for output in layer_meter.outputs),
        state_bytes + layer_meter.left_bytes,
        state_bytes,
    )
    return op, outputs


if __name__ == "__main__":
    sys.exit(answer(take))
