"""Whole pipelines compute the same over every transport: losses, gradients, weights, to the bit.

What they are compared with is the same pipeline with all its ranks in one thread, over `local`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.tests.support.models.hand_plans import chain, passing, skips, tied
from asyncpipe.tests.support.processes.executor import lowered, train_rank, train_together
from asyncpipe.tests.support.processes.transports import PROCESS_KINDS, open_transport, run_ranks

SCHEDULES = (("gpipe", None), ("1f1b", None), ("async-1f1b", 2))
HAND_MODELS: dict[str, Callable[[], Any]] = {
    "dropout": partial(chain, 2, norm=True, dropout=0.25),
    "tied": tied,
    "skips": skips,
    "passing": passing,
}


@dataclass(frozen=True)
class Generated:
    """A generated folder, as the executor takes models written by hand."""

    folder: Path
    name: str

    @property
    def plan(self) -> Plan:
        return read_plan(self.folder)

    @property
    def stages(self) -> range:
        return range(len(self.plan.stages))

    def build(self) -> list[nn.Module]:
        return [load_stage(self.folder, self.plan, j).train() for j in self.stages]

    def make_inputs(self, i: int) -> dict[str, Tensor]:
        # It brings the compiler with it, which the other processes here do without.
        from asyncpipe.tests.support.models.generated import CASES

        return CASES[self.name].micro_batch(i)


def run_schedules(rank: int, kind: str, model: Any) -> list[dict[str, Any]]:
    made = HAND_MODELS[model]() if isinstance(model, str) else Generated(*model)
    results = []
    for name, step_every in SCHEDULES:
        transport = open_transport(kind)
        schedule = lowered(made, name, 6, step_every)
        results.append(train_rank(made, schedule, transport, optimize=sgd, segments=2, seed=3))
    return results


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def check(kind: str, made: Any, model: Any) -> None:
    torch.set_num_threads(1)
    results = run_ranks(kind, len(made.stages), run_schedules, model)
    for number, (name, step_every) in enumerate(SCHEDULES):
        schedule = lowered(made, name, 6, step_every)
        together = train_together(made, schedule, optimize=sgd, segments=2, seed=3)
        losses, gradients, states = {}, {}, {}
        for rank, result in enumerate(results):
            assert isinstance(result, list), f"rank {rank}: {result}"
            losses |= result[number]["losses"]
            states |= result[number]["states"]
            for version, of_version in result[number]["gradients"].items():
                gradients |= {(version, *key): value for key, value in of_version.items()}
        expected = {
            (version, *key): value
            for version, of_version in together.seen.gradients.items()
            for key, value in of_version.items()
        }
        assert_equal(losses, together.seen.losses, name)
        assert_equal(gradients, expected, name)
        for j, module in enumerate(together.modules):
            assert_equal(states[j], module.state_dict(), name)


def assert_equal(found: dict[Any, Tensor], expected: dict[Any, Tensor], schedule: str) -> None:
    assert found.keys() == expected.keys() and found
    for key, value in found.items():
        assert torch.equal(value, expected[key]), (schedule, key)


@pytest.mark.parametrize("name", HAND_MODELS)
@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_a_pipeline_is_the_same_over_every_transport(kind: str, name: str) -> None:
    check(kind, HAND_MODELS[name](), name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from asyncpipe.tests.support.models.generated import CASES, cut

    return cut(CASES["gpt2"], 3, tmp_path_factory.mktemp("gpt2") / "3p")


@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_a_generated_pipeline_is_the_same_over_every_transport(kind: str, folder: Path) -> None:
    model = folder, "gpt2"
    check(kind, Generated(*model), model)
