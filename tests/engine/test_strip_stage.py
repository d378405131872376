"""A stage in strips against plain autograd on whole images.

Gradients, bytes, and memory of messages.
"""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from gems.autograd.outputs import as_tuple
from gems.autograd.storages import storage_addresses
from gems.engine.stages.boundary_tensors import BoundaryTensors
from gems.engine.stages.streamed import EvaluationInStrips, StreamedStage, StripLayers
from gems.engine.stages.whole import WholeStage
from gems.streaming.strip_run import StripRun
from gems.streaming.strip_stage import Boundary, StripStage
from tests.helpers.own_streams import Dilated

CPU = torch.device("cpu")
DTYPE = torch.float64
HEIGHT = 14
ENDS = (5, 9, 14)
NUM = len(ENDS)


class Fork(nn.Module):
    """Hands on rows beside others that are behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 7, padding=3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x), x


class Join(nn.Module):
    """Adds them, so that rows that were received wait for those of a later strip, and so do their gradients."""

    def forward(self, behind: Tensor, ahead: Tensor) -> Tensor:
        return behind + ahead


def classifier() -> list[nn.Module]:
    mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    return [
        nn.Conv2d(3, 4, 5, padding=2),
        Fork(),
        Join(),
        nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3, 2)),
        mean,
    ]


def segmenter() -> list[nn.Module]:
    return [Dilated(), nn.Conv2d(2, 2, 1)]


NETWORKS = {
    "classifier": (classifier, (1, 2, 3, 4)),
    "segmenter": (segmenter, (1,)),
    "uncut": (classifier, ()),
}


def make_stages(
    layers: list[nn.Module], cuts: tuple[int, ...], ends: tuple[int, ...] = ENDS
) -> list[StreamedStage]:
    passed = images(ends)
    stages = []
    for first, end in pairwise((0, *cuts, len(layers))):
        named = [(str(number), layers[number]) for number in range(first, end)]
        form = StripStage(named, passed, NUM)
        stages.append(
            StreamedStage(
                StripLayers(nn.ModuleList(layers[first:end]), form, not first, lambda: None, CPU)
            )
        )
        passed = form.outputs
    return stages


def run_whole(layers: list[nn.Module], image: Tensor) -> Tensor:
    output: tuple[Tensor, ...] = (image,)
    for layer in layers:
        output = as_tuple(layer(*output))
    return output[0]


def images(ends: tuple[int, ...]) -> tuple[Boundary, ...]:
    return (Boundary((2, 3, ends[-1], 6), DTYPE, (ends,)),)


def loss(output: Tensor) -> Tensor:
    return output.square().sum() + output.exp().mean()


def run_forward(stages: list[StreamedStage], image: Tensor, number: int, is_split: bool) -> None:
    for x in range(number * NUM, (number + 1) * NUM):
        tensors: tuple[Tensor, ...] = (image,)
        for stage in stages:
            # as from a message: in memory of its own
            given = tensors if stage is stages[0] else tuple(tensor.clone() for tensor in tensors)
            tensors = stage.forward(x, given, loss if stage is stages[-1] else None, is_split)


def run_backward(stages: list[StreamedStage], number: int, is_split: bool) -> None:
    """Run backward of an image; the memory of messages is overwritten once the stages no longer read it."""
    for x in reversed(range(number * NUM, (number + 1) * NUM)):
        gradients: tuple[Tensor, ...] = (torch.ones((), dtype=DTYPE),)
        for stage in reversed(stages):
            run = stage.backward_input if is_split else stage.backward
            made, inputs = run(x, gradients)
            made = tuple(gradient.clone() for gradient in made)
            for tensor in (*gradients, *(() if stage is stages[0] else inputs)):
                if not storage_addresses([tensor]) & stage.still_read(x):
                    tensor.fill_(float("nan"))
            gradients = made
        assert gradients == ()
    for stage in stages if is_split else ():
        for x in range(number * NUM, (number + 1) * NUM):
            stage.backward_weight(x)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_several_images_equal_those_of_whole_ones(name: str, is_split: bool) -> None:
    torch.manual_seed(0)
    make, cuts = NETWORKS[name]
    layers = [layer.to(DTYPE) for layer in make()]
    batch = torch.randn(3, 2, 3, HEIGHT, 6, dtype=DTYPE)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    for image in batch:
        loss(run_whole(layers, image)).backward()
    wanted = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    stages = make_stages(layers, cuts)
    run_forward(stages, batch[0], 0, is_split)
    run_forward(stages, batch[1], 1, is_split)
    run_backward(stages, 0, is_split)
    run_forward(stages, batch[2], 2, is_split)
    run_backward(stages, 1, is_split)
    run_backward(stages, 2, is_split)
    assert all(stage.num_in_flight == 0 for stage in stages)
    for parameter, gradient in zip(parameters, wanted, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def test_what_is_not_there_is_not_passed_on() -> None:
    """A head gives something in the last strip alone, and rows are as many as were planned."""
    layers = [layer.to(DTYPE) for layer in classifier()]
    first, second = make_stages(layers, (4,))
    image = torch.randn(2, 3, HEIGHT, 6, dtype=DTYPE)
    sizes = [[tuple(tensor.shape) for tensor in first.forward(x, (image,))] for x in range(NUM)]
    planned = BoundaryTensors(
        StripStage([(str(n), layers[n]) for n in range(4)], images(ENDS), NUM).outputs, NUM
    )
    assert sizes == [[spec.shape for spec in planned.specs(strip)] for strip in range(NUM)]
    assert sum(shape[2] for shapes in sizes for shape in shapes) == 6
    assert sizes[0] == [] or sizes[0][0][2] < sizes[-1][0][2]  # deeper maps are behind
    head = BoundaryTensors(StripStage([("head", layers[4])], planned.boundaries, NUM).outputs, NUM)
    assert [len(head.specs(strip)) for strip in range(NUM)] == [0, 0, 1]
    assert second.num_in_flight == 0


def test_strips_share_no_memory() -> None:
    """What weight gradients of one strip read may go while those of the others still run."""
    layers = [layer.to(DTYPE) for layer in classifier()]
    (stage,) = make_stages(layers, ())
    run_forward([stage], torch.randn(2, 3, HEIGHT, 6, dtype=DTYPE), 0, True)
    for x in (2, 1, 0):
        stage.backward_input(x, (torch.ones((), dtype=DTYPE),))
    image = storage_addresses([stage_input for stage_input in layers[0].parameters()])
    read = [stage.still_read(x) - image for x in range(NUM)]
    assert all(read) and len(set.union(*read)) >= sum(map(len, read)) - (
        NUM - 1
    )  # the image is one storage


def test_no_memory_waits_for_python_to_collect_garbage() -> None:
    stages = make_stages([layer.to(DTYPE) for layer in segmenter()], (1,))
    image = torch.randn(2, 3, HEIGHT, 6, dtype=DTYPE)

    def run() -> None:
        for is_split in (False, True):
            run_forward(stages, image, 0, is_split)
            run_backward(stages, 0, is_split)

    run()  # sizes are measured once
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        run()
        gc.collect()  # finds what other threads of the process have left, too
        assert [each for each in gc.garbage if isinstance(each, Tensor | StripRun)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_bytes_of_strips_add_up() -> None:
    """All that came goes, and little more is kept than of the whole image, beside the rows that padding is added to."""
    layers = [layer.to(DTYPE) for layer in classifier()]
    ends = (50, 95, 140)
    image = torch.randn(2, 3, ends[-1], 6, dtype=DTYPE)
    (stage,) = make_stages(layers, (), ends)
    whole = WholeStage(nn.ModuleList(layers), True, lambda: None)
    whole.forward(0, (image,), loss)
    run_forward([stage], image, 0, True)
    brought, kept = (
        [size(x) for x in range(NUM)] for size in (stage.brought_bytes, stage.kept_bytes)
    )
    assert sum(brought) == sum(kept)
    assert whole.kept_bytes(0) <= sum(kept) <= 1.15 * whole.kept_bytes(0) + image.nbytes
    assert brought[0] >= kept[0] > 0
    run_backward([stage], 0, True)
    assert all(stage.held_bytes(x) > 0 for x in range(NUM))
    run_forward([stage], image, 4, True)  # not measured anew
    assert [stage.kept_bytes(4 * NUM + x) for x in range(NUM)] == kept
    stage.reset()
    assert stage.num_in_flight == 0


@pytest.mark.parametrize("is_rows", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_evaluation_gives_what_whole_images_give(name: str, is_rows: bool) -> None:
    torch.manual_seed(0)
    make, cuts = NETWORKS[name]
    layers = [layer.to(DTYPE).eval() for layer in make()]
    made = make_stages(layers, cuts)
    last = made[-1]
    stages = [
        EvaluationInStrips(
            StripLayers(stage.modules, stage.form, stage.is_first, lambda: None, CPU),
            stage.form is last.form,
        )
        for stage in made
    ]
    for image in torch.randn(2, 2, 3, HEIGHT, 6, dtype=DTYPE):
        found = []
        for first, end in pairwise((0, *ENDS)):
            tensors: tuple[Tensor, ...] = (
                image[:, :, first:end].clone() if is_rows else image.clone(),
            )
            for stage in stages:
                given = tuple(tensor.clone() for tensor in tensors)
                tensors = stage.infer(given)
                if stage is not stages[-1]:
                    tensors = tuple(tensor.clone() for tensor in tensors)
                for tensor in given:  # the memory of messages is received into again
                    tensor.fill_(float("nan"))
            found.append(tensors)
        assert found[:-1] == [None, None]
        with torch.no_grad():
            assert torch.allclose(found[-1], run_whole(layers, image), rtol=1e-12, atol=1e-12)
