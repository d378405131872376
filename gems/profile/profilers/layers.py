"""Child process: read a resolved run as JSON on stdin, and print its profile as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.models import layers_of
from gems.profile.exactness import Exactness
from gems.profile.model_profile import ModelProfile
from gems.profile.operator_graph import OpGraph
from gems.profile.profilers.fake import fake_profile
from gems.profile.profilers.incremental import McapDevices, incremental_profile
from gems.profile.profilers.measured import measured_profile
from gems.profile.store import REFUSED, is_fake
from gems.profile.strip_profile import StripProfile, StripWork
from gems.profile.subject import Subject
from gems.profile.work import ModelWork
from gems.utils.registry import load_plugins


def take(subject: Subject) -> ModelProfile:
    """Return the profile of a resolved run.

    Raises:
        ConfigError: The machine lacks the device or a rate.
    """
    profile = subject.profile
    machine = subject.machine
    if subject.replays_graphs and machine.launch_s is not None:
        machine = replace(machine, launch_s=0.0, bfloat16_launch_s=0.0)
    run = (
        subject.model,
        subject.data,
        subject.parallel.micro_batch_size,
        subject.train.layer_dtype,
        machine,
    )
    fake = is_fake(profile)
    base = (
        fake_profile(*run, profile.whole_model_peak)
        if fake
        else measured_profile(*run, profile.repetitions)
    )
    if profile.name != "incremental":
        return base
    devices = McapDevices(*run, fake, subject.optimizer.num_states)
    return incremental_profile(
        base, devices.peak_bytes, layers_per_device(subject), machine.device_bytes
    )


def layers_per_device(subject: Subject) -> int | None:
    """Return how many layers share a device in mCAP's runs.

    mCAP uses as many devices as the pipeline has ranks.
    """
    num_layers = len(layers_of(subject.model, subject.data))
    num_devices = subject.parallel.partitions
    return None if num_devices < 3 else (num_layers - 2) // (num_devices - 2) + 1


def answer(
    make: Callable[
        [Subject], ModelProfile | ModelWork | OpGraph | StripProfile | StripWork | Exactness
    ],
) -> int:
    """Print what `make` returns for the resolved run on stdin, as JSON; return the exit code.

    A ConfigError is printed as {"refused": [key, value, allowed, advice]}.
    """
    subject = Subject.of(RunSpec.from_dict(json.load(sys.stdin)))
    load_plugins(subject.plugins, subject.plugins_dir)
    torch.set_num_threads(subject.machine.threads_per_rank)
    try:
        document = make(subject).to_json()
        code = 0
    except ConfigError as error:
        document = {REFUSED: [error.key, str(error.value), error.allowed, error.advice]}
        code = error.exit_code
    json.dump(document, sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(answer(take))
