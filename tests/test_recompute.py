"""Recomputation can only be seen in time and memory: schedules, versions and real processes."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn

import asyncpipe
from asyncpipe.runtime.config.mixed_precision import with_recompute
from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.transports import LocalHub, run_together
from asyncpipe.tests.support.models.generated import CASES, LARGER, cut
from asyncpipe.tests.support.oracles.async_simulation import Reference, async_run
from asyncpipe.tests.support.oracles.measured_memory import peak_of_rank
from asyncpipe.tests.support.processes.executor import lowered, train_together
from asyncpipe.tests.support.processes.gloo_ranks import run_processes
from asyncpipe.tests.test_generated_async import as_stages
from asyncpipe.tests.test_transparency import (
    SCHEDULES,
    assert_equal,
    in_one_process,
    merged,
    on_a_rank,
    plain,
)


def recomputing(name: str, stages: int, folder: Path) -> Plan:
    """A folder whose stages all recompute, the last too."""
    cut(CASES[name], stages, folder)
    file = folder / "plan.json"
    file.write_text(file.read_text().replace('"recompute": false', '"recompute": true'))
    plan = read_plan(folder)
    assert all(stage.recompute for stage in plan.stages)
    return plan


@pytest.mark.parametrize(
    "name",
    ["resnet", "mlp", "gpt2", "t5"],
)
def test_a_pipeline_that_recomputes_equals_the_plain_model(name: str, tmp_path: Path) -> None:
    plan = recomputing(name, 3, tmp_path / "3p")
    plainly = cut(CASES[name], 3, tmp_path / "plainly")
    for schedule in ("gpipe", "1f1b"):
        again = in_one_process(CASES[name], tmp_path / "3p", schedule)
        assert_equal(plan, plain(name), again)
        losses, gradients, state = in_one_process(CASES[name], plainly, schedule)
        assert again[0] == losses
        assert all(torch.equal(value, again[1][key]) for key, value in gradients.items())
        assert all(torch.equal(value, again[2][key]) for key, value in state.items())


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_real_processes_that_recompute_equal_the_plain_model(name: str, tmp_path: Path) -> None:
    plan = recomputing(name, 2, tmp_path / "2p")
    ranks = run_processes(2, on_a_rank, name, tmp_path / "2p", limit_s=200)
    for rank in ranks:
        assert isinstance(rank, dict), rank
    for schedule in SCHEDULES:
        assert_equal(plan, plain(name), merged([rank[schedule] for rank in ranks]))


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_with_a_stash_the_second_forward_reads_the_stashed_weights(
    name: str, tmp_path: Path
) -> None:
    recomputing(name, 3, tmp_path / "3p")
    model = as_stages(name, tmp_path / "3p")
    optimize = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    schedule = lowered(model, "async-1f1b", 6, 1)
    trained = train_together(
        model, schedule, optimize=optimize, staleness="stash", seed=5, modules=model.build()
    )
    oracle = async_run(model, model.build(), 6, 1, optimize, method=Reference(), seed=5)
    assert trained.ledger == oracle.ledger
    losses = {i: float(loss) for i, loss in trained.seen.losses.items()}
    assert losses == {i: float(loss) for i, loss in oracle.losses.items()}
    for got, wanted in zip(trained.modules, oracle.modules, strict=True):
        for key, value in got.state_dict().items():
            assert torch.equal(value, wanted.state_dict()[key]), key


RUNS = {
    "gpipe": {"schedule": "gpipe", "micro_batches": 4},
    "gpipe again": {"schedule": "gpipe", "micro_batches": 4, "recompute": "all"},
    "1f1b": {"schedule": "1f1b", "micro_batches": 8},
    "1f1b again": {"schedule": "1f1b", "micro_batches": 8, "recompute": "all"},
    "async": {"micro_batches": 3},
    "stash": {"micro_batches": 3, "staleness": "stash"},
    "sgd": {"micro_batches": 3, "optimizer": "sgd"},
}
# Every run with one model, and each other model in the runs that its kind of memory matters in:
# activations of another shape; a first stage that trains nothing; a table that two stages hold.
MEASURED = [
    *(("wider gpt2", run) for run in RUNS),
    *(("larger resnet", run) for run in ("gpipe", "gpipe again")),
    *(("frozen gpt2", run) for run in ("1f1b again", "async", "stash")),
    *(("many words", run) for run in ("gpipe again", "1f1b", "stash", "sgd")),
]


@cache
def peaks(name: str, run: str, shared: Path) -> tuple[list[int], list[int]]:
    """The predicted and the measured most bytes of each rank."""
    folder = cut(LARGER[name], 2, shared / f"{name} {run}", **RUNS[run])
    measured = run_processes(2, peak_of_rank, name, folder, limit_s=120)
    assert all(isinstance(peak, int) for peak in measured), measured
    return [stage.peak_bytes for stage in read_plan(folder).stages], measured


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("larger")


@pytest.mark.parametrize(("name", "run"), MEASURED)
def test_the_memory_of_every_rank_is_as_predicted(name: str, run: str, shared: Path) -> None:
    predicted, measured = peaks(name, run, shared)
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("name", ["wider gpt2", "larger resnet"])
def test_what_recomputation_saves_is_as_predicted(name: str, shared: Path) -> None:
    (plain, _), (plain_measured, _) = peaks(name, "gpipe", shared)
    (again, _), (again_measured, _) = peaks(name, "gpipe again", shared)
    assert again_measured < 0.7 * plain_measured
    assert plain - again == pytest.approx(plain_measured - again_measured, rel=0.2)


def test_a_stage_that_trains_nothing_runs_its_forward_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model[0].requires_grad_(False)
    asyncpipe.partition(
        model, {"input": torch.randn(4, 8)}, stages=3, cut_at=["1", "2"], output=tmp_path / "3p",
        loss="mse", profile="analytic", schedule="1f1b", recompute="all",
    )  # fmt: skip
    plan = read_plan(tmp_path / "3p")
    assert [stage.recompute for stage in plan.stages] == [False, True, False]
    plan = with_recompute(with_recompute(plan, "none"), "all")
    assert plan.stages[0].backward_ms == 0.0 and all(stage.recompute for stage in plan.stages)
    stages = [load_stage(tmp_path / "3p", plan, stage.index) for stage in plan.stages]
    calls = [0, 0, 0]

    def count(index: int, *_: object) -> None:
        calls[index] += 1

    for index, stage in enumerate(stages):
        stage.register_forward_hook(partial(count, index))
    made = make_schedule("1f1b", stages=3, micro_batches=4)
    schedule = lower(made, forward_edges(plan), grad_edges=gradient_edges(plan))
    given = {"input": torch.randn(4, 8), "target": torch.randn(4, 8)}
    hub = LocalHub(3)
    pipelines = [
        Executor(plan, {index: stage}, hub.transport(index), criterion=nn.functional.mse_loss)
        for index, stage in enumerate(stages)
    ]
    run_together([pipeline.steps(schedule, lambda _: given) for pipeline in pipelines])
    assert calls == [4, 8, 4]  # the last goes backward at once


def test_what_is_in_flight_alone_is_not_recomputed(tmp_path: Path) -> None:
    cut(CASES["mlp"], 2, tmp_path / "2p", schedule="1f1b", micro_batches=4, recompute="all")
    plan = read_plan(tmp_path / "2p")
    assert [stage.recompute for stage in plan.stages] == [True, False]
    assert [stage.in_flight for stage in plan.stages] == [2, 1]
    assert plan.setting.recompute == "all"
