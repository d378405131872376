"""A user's schedule, memory policy and cost source, a file each, together and with the toolkit's own."""

import sys

from gems.config.compose import compose
from gems.config.registries import COSTS, POLICIES
from gems.engine.verification.compare import compare
from gems.plan.evaluate import evaluate
from gems.schedule import FAMILIES
from tests.docs.test_extend import PAGE, QUICK, TOLERANCE, blocks
from tests.helpers.device import DEVICE
from tests.mpi.conftest import sub_world

PLUGINS = {"my_schedules": FAMILIES, "my_policies": POLICIES, "my_costs": COSTS}
WORDS = (
    "data=synthetic",
    "parallel.partitions=2",
    "parallel.micro_batches=4",
    "train.precision=float64",
    "train.steps=2",
)
# each with each of the others, its own and the toolkit's
PAIRS = (
    ("mine", "mine", "mine"),
    ("mine", "keep", "uniform"),
    ("1f1b", "mine", "uniform"),
    ("1f1b", "keep", "mine"),
)


def test_all_pairs_train_exactly(comm, tmp_path, monkeypatch):
    part = sub_world(comm, 2)
    if part is None:
        return
    for block in blocks(PAGE.read_text()):
        name = block.text.partition(".py:")[0].removeprefix("# ")
        if block.language == "python" and name in PLUGINS:
            (tmp_path / f"{name}.py").write_text(block.text + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for schedule, memory, cost in PAIRS:
            names = [f"schedule={schedule}", f"memory={memory}", f"cost={cost}"]
            spec = compose([f"plugins=[{','.join(PLUGINS)}]", *WORDS, *QUICK, *names])
            plan = evaluate(spec)
            assert plan.memory.plan.policy == memory
            assert plan.costs.from_layers is (cost == "mine")
            found = compare(plan.for_ranks, part, DEVICE)
            assert found.max_rel_error <= TOLERANCE, names
            assert found.peak_activation_bytes == found.predicted_activation_bytes, names
    finally:  # other tests count what is registered
        for name, registry in PLUGINS.items():
            registry.entries.pop("mine", None)
            sys.modules.pop(name, None)
