"""A user's plugins, a file each: every combination with each other and the toolkit's own trains."""

import importlib
import sys
from itertools import product

import pytest

from gems.config.compose import compose
from gems.config.registries import COSTS, POLICIES, STAGE_WRAPPERS
from gems.engine.verification.compare import compare
from gems.plan.evaluate import evaluate
from gems.schedule import FAMILIES
from gems.schedule.action import Kind
from tests.docs.test_extend import PAGE, QUICK, TOLERANCE, blocks
from tests.helpers.device import DEVICE
from tests.mpi.conftest import sub_world

PLUGINS = {
    "my_schedules": FAMILIES,
    "my_policies": POLICIES,
    "my_costs": COSTS,
    "my_stages": STAGE_WRAPPERS,
}
WORDS = (
    f"plugins=[{','.join(PLUGINS)}]",
    "data=synthetic",
    "parallel.partitions=2",
    "parallel.micro_batches=4",
    "train.precision=float64",
    "train.steps=2",
)


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """Write the page's files outside of the package, and forget them after the test."""
    for block in blocks(PAGE.read_text()):
        name = block.text.partition(".py:")[0].removeprefix("# ")
        if block.language == "python" and name in PLUGINS:
            (tmp_path / f"{name}.py").write_text(block.text + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name, registry in PLUGINS.items():  # other tests count what is registered
        registry.entries.pop("mine", None)
        sys.modules.pop(name, None)


def test_all_combinations_train_exactly(comm, plugins):
    part = sub_world(comm, 2)
    if part is None:
        return
    for schedule, memory, cost, wrappers in product(
        ("mine", "1f1b"), ("mine", "keep"), ("mine", "uniform"), (["mine"], [])
    ):
        words = [f"schedule={schedule}", f"memory={memory}", f"cost={cost}"]
        words.append(f"train.stage_wrappers=[{','.join(wrappers)}]")
        spec = compose([*WORDS, *QUICK, *words])
        plan = evaluate(spec)
        assert plan.memory.plan.policy == memory
        assert plan.costs.from_layers is (cost == "mine")
        forwards = importlib.import_module("my_stages").forwards
        forwards.clear()
        found = compare(plan.for_ranks, part, DEVICE)
        assert found.max_rel_error <= TOLERANCE, words
        assert found.peak_activation_bytes == found.predicted_activation_bytes, words
        actions = plan.schedule.rank_schedules[part.rank]
        of_a_step = sum(action.kind is Kind.F for action in actions)
        assert forwards.total() == (spec.train.steps * of_a_step if wrappers else 0), words
