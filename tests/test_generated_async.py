"""Asynchronous training of generated stages equals the recurrence, in float64 to the last bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.models.generated import CASES, Inputs, cut
from asyncpipe.tests.support.models.hand_plans import HandModel, HandStage
from asyncpipe.tests.support.oracles.async_simulation import REFERENCES, async_run
from asyncpipe.tests.support.processes.executor import lowered, train_together

STEPS = 5


def as_stages(name: str, folder: Path) -> HandModel:
    """A generated folder as the oracles know models: in double precision."""
    file = folder / "plan.json"
    file.write_text(file.read_text().replace('"float32"', '"float64"'))
    plan = read_plan(folder)
    stages = tuple(
        HandStage(partial(load_stage, folder, plan, spec.index), spec.inputs, spec.outputs)
        for spec in plan.stages
    )

    def make_inputs(i: int) -> Inputs:
        inputs = CASES[name].micro_batch(i)
        return {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}

    return HandModel(plan, stages, make_inputs)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HandModel]:
    made: dict[str, HandModel] = {}

    def model(name: str) -> HandModel:
        if name not in made:
            folder = cut(CASES[name], 3, tmp_path_factory.mktemp(name) / "3p")
            made[name] = as_stages(name, folder)
        return made[name]

    return model


@pytest.mark.parametrize("staleness", ["none", "stash"])
@pytest.mark.parametrize("step_every", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_async_training_of_a_real_model_equals_the_oracle(
    name: str, step_every: int, staleness: str, models: Callable[[str], HandModel]
) -> None:
    model = models(name)
    optimize = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    schedule = lowered(model, "async-1f1b", STEPS * step_every, step_every)
    modules = model.build()
    trained = train_together(
        model, schedule, optimize=optimize, staleness=staleness, seed=5, modules=modules
    )
    oracle = async_run(
        model, model.build(), STEPS, step_every, optimize, method=REFERENCES[staleness](), seed=5
    )
    assert trained.ledger == oracle.ledger
    assert max(b - f for _, _, f, b in trained.ledger) == -(-2 // step_every)
    losses = {i: float(loss) for i, loss in trained.seen.losses.items()}
    assert losses == {i: float(loss) for i, loss in oracle.losses.items()}
    for got, wanted in zip(trained.modules, oracle.modules, strict=True):
        for key, value in got.state_dict().items():
            assert torch.equal(value, wanted.state_dict()[key]), key
