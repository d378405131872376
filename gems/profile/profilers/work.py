"""Child process: read a resolved run as JSON on stdin, and print the work of its layers as JSON."""

from __future__ import annotations

import sys
from dataclasses import replace

from gems.models.mixed import Precision
from gems.profile.profilers.chain import profile_model
from gems.profile.profilers.fake import fake_lab, layer_work, machine_rates
from gems.profile.profilers.layer_run import LayerCall, Times
from gems.profile.profilers.layers import answer
from gems.profile.subject import Subject
from gems.profile.work import LayerWork, ModelWork


def take(subject: Subject) -> ModelWork:
    """Return the work of a resolved run's layers on one micro-batch.

    Raises:
        ConfigError: The machine has no rate for the dtype.
    """
    machine = subject.machine
    precision = Precision.of(subject.train.layer_dtype)
    rates = machine_rates(machine, precision)
    kinds: list[LayerWork] = []

    def recorded(call: LayerCall) -> Times:
        kinds.append(layer_work(call, rates))
        return Times(forward_s=float(len(kinds) - 1))  # the number of its kind, not a time

    lab = replace(fake_lab(machine, precision), times=recorded)
    size = subject.parallel.micro_batch_size
    profile = profile_model(
        subject.model, subject.data, size, subject.train.layer_dtype, lab, machine.name, "fake", {}
    )
    numbers = tuple(round(layer.forward_s) for layer in profile.layers)
    return ModelWork(profile, numbers, tuple(kinds))


if __name__ == "__main__":
    sys.exit(answer(take))
