"""Tensors in channels_last between ranks.

No copy on the way, the values and the order of memory that were sent.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gems.engine.batch_loader import BatchLoader
from gems.engine.optimization.gradients import Gradients
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.memory_format import ChannelsLast
from gems.engine.transport.mpi import Comm, Transport
from gems.engine.transport.staging import Buffer
from gems.models.build import TensorSpec
from gems.schedule.action import Action, Kind
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from tests.helpers.device import DEVICE
from tests.helpers.rig import ListPart, staging_for_mpi
from tests.helpers.toys import make_spec, plan_of

MAP = (2, 3, 4, 5)
VECTOR = (2, 7)
SEND = Action(Kind.SEND_F, 0, 0)
RECEIVE = Action(Kind.RECV_F, 1, 0)


class Watched(type(staging_for_mpi())):  # type: ignore[misc]
    """Notes the memory that is sent, or copied to the host for that."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.places: list[int] = []

    def sending(self, tensor: torch.Tensor) -> list[Buffer]:
        buffers = super().sending(tensor)
        sent = buffers[0].tensor if self.is_direct else buffers[0].source
        self.places.append(sent.data_ptr())
        return buffers


@pytest.fixture
def channels(comm: Comm) -> Iterator[tuple[ChannelsLast, Watched]]:
    schedule = Schedule("test", 2, Placement(1, ((0, 0),)), ((SEND, RECEIVE),))
    boundary = (TensorSpec("x", MAP, torch.float32), TensorSpec("y", VECTOR, torch.float32))
    transport = Transport(comm, 20.0)
    staging = Watched(DEVICE)
    yield (
        ChannelsLast(
            schedule, 0, [boundary], [transport] * 2, staging, Recorder(ListPart(), DEVICE)
        ),
        staging,
    )
    transport.close()


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
def test_a_map_arrives_in_channels_last(channels, order) -> None:
    passed, staging = channels
    sent = torch.randn(MAP).to(DEVICE).to(memory_format=order), torch.randn(VECTOR).to(DEVICE)
    memory = []
    for _ in range(2):
        passed.post_receive(RECEIVE)
        passed.post_send(SEND, sent)
        found = passed.wait(RECEIVE)
        passed.drain()
        assert all(map(torch.equal, found, sent)) and [each.shape for each in found] == [
            MAP,
            VECTOR,
        ]
        assert (
            found[0].is_contiguous(memory_format=torch.channels_last) and found[1].is_contiguous()
        )
        memory.append([tensor.data_ptr() for tensor in found])
        passed.release(found)
    shared = [
        place == tensor.data_ptr() for place, tensor in zip(staging.places, 2 * sent, strict=True)
    ]
    assert shared == 2 * [order is torch.channels_last, True], (
        "only another order of memory is copied"
    )
    if staging.is_direct:
        assert memory[0] == memory[1], "buffers are received into again"


def test_images_are_loaded_in_channels_last(comm: Comm) -> None:
    spec = make_spec("1f1b", 1, machine__channels_last=True)
    loader = BatchLoader.open(plan_of(spec), comm, DEVICE)
    batch = loader.batch(0)
    for m, images in batch.images.items():
        if batch.arrive is not None:
            batch.arrive(m)
        assert (
            images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
        )
    loader.close()


def test_gradients_have_the_order_of_their_weights(comm: Comm) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).to(DEVICE)
    module.to(memory_format=torch.channels_last)
    transport = Transport(comm, 20.0)
    gradients = Gradients({(0, 0): module}, transport, torch.float32, DEVICE)
    gradients.zero()
    module(torch.ones(1, 3, 3, 3, device=DEVICE)).sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
    wanted = sum(float(parameter.grad.double().square().sum()) for parameter in module.parameters())
    assert float(gradients.squared_norm()) == pytest.approx(wanted)
    transport.close()
