"""Transfers of a schedule as messages.

Tags, order of memory, bytes, and what a boundary of several tensors sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from gems.engine.supervision.recorder import LINK, Recorder
from gems.engine.transport.message_tags import message_tag
from gems.engine.transport.mpi import Transport
from gems.engine.transport.p2p_channels import P2PChannels
from gems.engine.transport.staging import Staging
from gems.errors import ConfigError
from gems.models.build import TensorSpec
from gems.schedule import FAMILIES, generate
from gems.schedule.action import RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.edges import BACKWARD_KINDS
from gems.schedule.families.given_placement import forward_only
from gems.schedule.lower import lower
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from gems.schedule.strips import with_strips
from gems.trace import KINDS
from tests.helpers.device import DEVICE
from tests.helpers.rig import LateTransport, ListPart, staging_for_mpi


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with DEVICE:
        yield


PAIR = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}


def schedules():
    for name, family in FAMILIES.items():
        if name == "capped":  # a search; its lists are of these kinds
            continue
        for num_ranks in (1, 2, 3, 5):
            for num_micro_batches in (1, 2, 4, 6, 10):
                for parts in (1, 2):
                    if num_micro_batches % (parts * family.num_directions):
                        continue
                    if name == "gems_mast" and num_micro_batches != 2 * parts:
                        continue
                    try:
                        made = generate(name, num_ranks, num_micro_batches, parts)
                    except ConfigError:  # too few micro-batches for this family
                        continue
                    yield lower(made)
                    yield lower(forward_only(made.placement, num_micro_batches))


def test_no_two_messages_of_a_step_share_way_ranks_and_tag():
    """So no order of posting and of arrival can mix them up, whatever is under way at once."""
    num_messages = 0
    for schedule in schedules():
        for num_tensors in (1, 3):
            sent = Counter()
            received = Counter()
            for rank, action in schedule.actions():
                if action.kind not in SEND_KINDS | RECV_KINDS:
                    continue
                step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
                peer = schedule.placement.rank_of(action.direction, action.stage + step)
                for index in range(num_tensors):
                    tag = message_tag(action, index, schedule.num_stages, num_tensors)
                    way = action.kind in BACKWARD_KINDS
                    if action.kind in SEND_KINDS:
                        sent[way, rank, peer, tag] += 1
                    else:
                        received[way, peer, rank, tag] += 1
            assert sent == received, schedule
            assert not sent or max(sent.values()) == 1, schedule
            num_messages += len(sent)
    assert num_messages > 5_000


def test_strips_have_shapes_of_their_own_and_nothing_is_sent_of_one_without_rows():
    schedule = lower(with_strips(generate("1f1b", 2, 1), 3))
    shapes = [(), ((2, 1),), ((2, 4), (3,))]
    boundaries = [
        tuple(TensorSpec(str(n), shape, torch.float32) for n, shape in enumerate(each))
        for each in shapes
    ]
    part = ListPart()
    recorder = Recorder(part, DEVICE)
    links = [
        LateTransport(schedule, 0, way, boundaries, lambda action, index: torch.tensor(7.0))
        for way in range(2)
    ]
    channels = P2PChannels(schedule, 0, boundaries, links, Staging(DEVICE), recorder)
    for strip, expected in enumerate(shapes):
        channels.post_send(Action(Kind.SEND_F, 0, strip), [torch.ones(shape) for shape in expected])
        receive = Action(Kind.RECV_B, 0, strip)
        channels.post_receive(receive)
        received = channels.wait(receive)
        assert [tuple(tensor.shape) for tensor in received] == list(expected)
        channels.release(received)
    channels.drain()
    recorder.end_step()
    assert recorder.memory.held_bytes == 0
    assert len(part.rows) == 2 * len(shapes), "a transfer of nothing ends too"


def test_tags_differ_whatever_the_placement():
    """Where ranks take turns (stages 0 and 2 here, 1 and 3 there), several stages send to the same rank."""
    for kind in PAIR:
        tags = [
            message_tag(Action(kind, stage, m), index, 4, 3)
            for stage in range(4)
            for m in range(5)
            for index in range(3)
        ]
        assert len(set(tags)) == len(tags)


def test_a_send_and_its_receive_have_one_tag():
    for kind, (receive, step) in PAIR.items():
        send = Action(kind, 3, 5, 1)
        assert message_tag(send, 1, 6, 2) == message_tag(Action(receive, 3 + step, 5, 1), 1, 6, 2)


def two_stages_here(num_micro_batches: int = 1) -> Schedule:
    """Both stages on the one rank of the world, so that messages go from it to itself."""
    row = tuple(
        Action(kind, stage, m)
        for m in range(num_micro_batches)
        for kind, stage in ((Kind.SEND_F, 0), (Kind.RECV_F, 1), (Kind.SEND_B, 1), (Kind.RECV_B, 0))
    )
    return Schedule("test", num_micro_batches, Placement(1, ((0, 0),)), (row,))


def open_channels(comm, boundary, num_micro_batches=1):
    part = ListPart()
    recorder = Recorder(part, DEVICE)
    schedule = two_stages_here(num_micro_batches)
    links = [Transport(comm, 20.0) for _ in range(2)]
    channels = P2PChannels(schedule, 0, [boundary], links, staging_for_mpi(), recorder)
    return channels, recorder, part


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), tensor.dtype)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout_arrives_in_logical_order(comm, layout, dtype):
    tensor = layout(torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5).to(dtype))
    channels, _, _ = open_channels(comm, (spec_of("x", tensor),))
    channels.post_receive(Action(Kind.RECV_F, 1, 0))
    channels.post_send(Action(Kind.SEND_F, 0, 0), (tensor,))
    (got,) = channels.wait(Action(Kind.RECV_F, 1, 0))
    channels.drain()
    assert got.is_contiguous() and torch.equal(got, tensor)


def test_a_boundary_of_several_tensors(comm):
    tensors = (
        torch.arange(6.0).reshape(2, 3),
        torch.tensor([[4], [5]]),
        torch.rand(2, 2).bfloat16(),
    )
    channels, _, _ = open_channels(
        comm, tuple(spec_of(f"t{i}", tensor) for i, tensor in enumerate(tensors)), 2
    )
    for m in (0, 1):
        channels.post_receive(Action(Kind.RECV_F, 1, m))
    for m in (1, 0):
        channels.post_send(Action(Kind.SEND_F, 0, m), tuple(tensor + m for tensor in tensors))
    for m in (0, 1):
        for got, tensor in zip(channels.wait(Action(Kind.RECV_F, 1, m)), tensors, strict=True):
            assert got.dtype is tensor.dtype and torch.equal(got, tensor + m)
    channels.drain()


@pytest.mark.timeout(60)
def test_an_integer_tensor_has_no_gradient_message(comm):
    boundary = (TensorSpec("index", (2,), torch.int64), TensorSpec("x", (2, 3), torch.float32))
    channels, _, _ = open_channels(comm, boundary)
    gradient = torch.rand(2, 3)
    channels.post_receive(Action(Kind.RECV_B, 0, 0))
    channels.post_send(Action(Kind.SEND_B, 1, 0), (gradient,))
    got = channels.wait(Action(Kind.RECV_B, 0, 0))
    channels.drain()
    assert len(got) == 1 and torch.equal(got[0], gradient)


def test_bytes_are_held_while_under_way_and_recorded(comm):
    tensors = (torch.rand(4, 4), torch.arange(3))
    size = 4 * 16 + 8 * 3
    channels, recorder, part = open_channels(
        comm, tuple(spec_of(f"t{i}", t) for i, t in enumerate(tensors))
    )
    send = Action(Kind.SEND_F, 0, 0)
    receive = Action(Kind.RECV_F, 1, 0)
    channels.post_receive(receive)
    assert recorder.memory.held_bytes == size
    channels.post_send(send, tensors)
    assert recorder.memory.held_bytes == 2 * size
    got = channels.wait(receive)
    channels.drain()
    assert recorder.memory.held_bytes == size
    channels.release(got)
    assert recorder.memory.held_bytes == 0
    recorder.end_step()
    seen = {(KINDS[row[2]], row[7], row[10]) for row in part.rows}
    assert seen == {("SEND_F", LINK, size), ("RECV_F", LINK, size)}
    assert all(row[8] <= row[9] for row in part.rows)


def test_released_buffers_are_used_again(comm):
    if not staging_for_mpi().is_direct:
        pytest.skip("memory that is copied to is the allocator's")
    channels, _, _ = open_channels(comm, (TensorSpec("x", (1000,), torch.float32),), 3)
    places = []
    for m in range(3):
        channels.post_receive(Action(Kind.RECV_F, 1, m))
        channels.post_send(Action(Kind.SEND_F, 0, m), (torch.full((1000,), float(m)),))
        got = channels.wait(Action(Kind.RECV_F, 1, m))
        assert float(got[0].sum()) == 1000.0 * m
        places.append(got[0].data_ptr())
        channels.drain()
        channels.release(got)
    assert len(set(places)) == 1


def test_more_messages_than_tags_are_refused():
    schedule = lower(generate("1f1b", 4, 100))
    boundaries = [(TensorSpec("x", (1,), torch.float32),)] * 3
    links = [
        LateTransport(schedule, 0, way, boundaries, lambda action, index: torch.zeros(1))
        for way in range(2)
    ]
    top = max(
        message_tag(action, 0, 4, 1)
        for _, action in schedule.actions()
        if action.kind in SEND_KINDS | RECV_KINDS
    )
    recorder = Recorder(None, DEVICE)
    links[0].max_tag = top - 1
    with pytest.raises(ConfigError, match=rf"parallel\.micro_batches=100: .*up to {top - 1} only"):
        P2PChannels(schedule, 0, boundaries, links, Staging(DEVICE), recorder)
    links[0].max_tag = top + 4
    P2PChannels(schedule, 0, boundaries, links, Staging(DEVICE), recorder)
