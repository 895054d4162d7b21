"""Under autocast, and with boundaries cast between ranks, a pipeline is still the plain model.

The uncut model under the same autocast, one region a micro-batch, gives the losses and all
gradients, bit for bit. Where the generated code is not the original to the last bit (gpt2's adds in
another order, t5's original looks whether what it has is float16), its stages in one graph stand in
for the uncut model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import asyncpipe
from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.instrumented import Observer
from asyncpipe.runtime.executor.loading import Pipe, load_stage, run_stage
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.executor.precision import FULL, BoundaryDtypes, Precision, dtypes_of_folder
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.rng import micro_batch_seed
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.transports.gloo import GlooTransport
from asyncpipe.runtime.transports.protocol import LocalHub, run_together
from asyncpipe.tests.support.models.generated import CASES, Case, cut, loss_of
from asyncpipe.tests.support.models.hand_plans import chain
from asyncpipe.tests.support.oracles.async_simulation import Reference, async_run
from asyncpipe.tests.support.processes.executor import lowered, train_together
from asyncpipe.tests.support.processes.gloo_ranks import run_processes

MICRO_BATCHES, STEPS, SEED = 4, 2, 7
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Found = tuple[dict[int, Tensor], dict[tuple[int, str], Tensor]]
"""Losses by micro-batch, and gradients by step and name."""


class Collect(Observer):
    """Losses and gradients on the way, and the optimizer's steps."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self.stages = stages
        self.optimizers = {j: _sgd(stage) for j, stage in stages.items()}
        self.losses: dict[int, Tensor] = {}
        self.gradients: dict[tuple[int, str], Tensor] = {}

    def on_loss(self, micro_batch: int, loss: Tensor, targets: float | None) -> None:
        self.losses[micro_batch] = loss

    def on_step(self, stage: int, version: int) -> None:
        for name, parameter in self.stages[stage].named_parameters():
            if parameter.grad is not None:
                self.gradients[version, name] = parameter.grad.clone()
        self.optimizers[stage].step()


def _sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def plain(
    model: Any, loss_of_micro_batch: Callable[[int], Tensor], dtype: torch.dtype | None
) -> Found:
    """The loop that everybody writes."""
    optimizer = _sgd(model)
    losses, gradients = {}, {}
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for i in range((step - 1) * MICRO_BATCHES, step * MICRO_BATCHES):
            torch.default_generator.manual_seed(micro_batch_seed(SEED, i))
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = loss_of_micro_batch(i)
            (loss / MICRO_BATCHES).backward()
            losses[i] = loss.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[step, name] = parameter.grad.clone()
        optimizer.step()
    return losses, gradients


def pipelined(
    plan: Plan,
    stages: list[nn.Module],
    feed: Callable[[int], dict[str, Tensor]],
    *,
    schedule: str = "1f1b",
    ranks: int | None = None,
    **options: Any,
) -> Found:
    """All ranks in this thread."""
    made = make_schedule(schedule, stages=len(stages), micro_batches=MICRO_BATCHES, ranks=ranks)
    actions = lower(made, forward_edges(plan), grad_edges=gradient_edges(plan))
    hub = LocalHub(len(actions.ranks))
    collect = Collect(dict(enumerate(stages)))
    pipelines = [
        Executor(
            plan,
            {j: stages[j] for j, at in enumerate(actions.rank_of_stage) if at == rank},
            hub.transport(rank),
            rank_of_stage=actions.rank_of_stage,
            seed=SEED,
            **options,
        )
        for rank in range(len(actions.ranks))
    ]
    for step in range(STEPS):
        first = step * MICRO_BATCHES
        run_together(
            [
                pipeline.steps(actions, feed, first_micro_batch=first, observer=collect)
                for pipeline in pipelines
            ]
        )
    return collect.losses, collect.gradients


def loaded(folder: Path, plan: Plan) -> list[nn.Module]:
    return [load_stage(folder, plan, spec.index).train() for spec in plan.stages]


def criterion_of(case: Case) -> Any:
    return F.cross_entropy if case.criterion else None


def recomputing(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))


def assert_same(plan: Plan, expected: Found, actual: Found) -> None:
    """Bit for bit; but tied gradients, which holders add in another order."""
    losses, gradients = expected
    tied = {name for shared in plan.shared for name in shared.names}
    assert list(actual[0]) == list(losses)
    for i, loss in losses.items():
        least = 0.0 if i < MICRO_BATCHES or not tied else 1e-3
        close = torch.allclose(actual[0][i], loss, rtol=least, atol=0)
        assert close, f"the loss of micro-batch {i}"
    assert {name for _, name in actual[1]} >= {name for _, name in gradients} - tied
    for (step, name), gradient in actual[1].items():
        if name not in tied and (step == 1 or not tied):
            assert torch.equal(gradient, gradients[step, name]), f"{name} at step {step}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    made: dict[tuple[str, int], Path] = {}

    def folder(name: str, stages: int) -> Path:
        if (name, stages) not in made:
            made[name, stages] = cut(CASES[name], stages, tmp_path_factory.mktemp(name) / "made")
        return made[name, stages]

    return folder


@pytest.mark.parametrize(
    ("schedule", "stages", "dtype"),
    [
        ("1f1b", 4, "bfloat16"),
        ("1f1b", 2, "float16"),
        ("gpipe", 2, "bfloat16"),
        ("single", 4, "float16"),
        ("zb-h1", 2, "bfloat16"),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_under_autocast_a_pipeline_is_the_plain_model(
    name: str, stages: int, dtype: str, schedule: str, folders: Callable[[str, int], Path]
) -> None:
    case, folder = CASES[name], folders(name, stages)
    plan, precision = read_plan(folder), Precision(HALF[dtype])
    is_other_code = name == "gpt2" or (name, dtype) == ("t5", "float16")
    model: Any = asyncpipe.load(folder) if is_other_code else case.build()
    model.train()
    expected = plain(model, lambda i: loss_of(case, model, case.micro_batch(i)), HALF[dtype])
    actual = pipelined(
        plan,
        loaded(folder, plan),
        case.micro_batch,
        schedule=schedule,
        criterion=criterion_of(case),
        precision=precision,
        dtypes=BoundaryDtypes(by_name=dtypes_of_folder(folder, plan, precision)),
    )
    assert_same(plan, expected, actual)


@pytest.mark.parametrize("name", CASES)
def test_a_second_forward_is_cast_as_the_first(
    name: str, folders: Callable[[str, int], Path]
) -> None:
    case, folder = CASES[name], folders(name, 2)
    plan, precision = read_plan(folder), Precision(torch.bfloat16)
    dtypes = BoundaryDtypes(by_name=dtypes_of_folder(folder, plan, precision))
    options = {"criterion": criterion_of(case), "precision": precision, "dtypes": dtypes}
    kept = pipelined(plan, loaded(folder, plan), case.micro_batch, schedule="gpipe", **options)
    again = recomputing(plan)
    repeated = pipelined(again, loaded(folder, plan), case.micro_batch, schedule="gpipe", **options)
    assert kept[0].keys() == repeated[0].keys() and kept[1].keys() == repeated[1].keys()
    assert all(torch.equal(repeated[0][i], loss) for i, loss in kept[0].items())
    assert all(torch.equal(repeated[1][key], value) for key, value in kept[1].items())


def test_full_precision_is_another_result(folders: Callable[[str, int], Path]) -> None:
    case, folder = CASES["resnet"], folders("resnet", 2)
    plan = read_plan(folder)
    model = case.build().train()
    expected = plain(model, lambda i: loss_of(case, model, case.micro_batch(i)), torch.bfloat16)
    actual = pipelined(plan, loaded(folder, plan), case.micro_batch)
    with pytest.raises(AssertionError, match="the loss of micro-batch 0"):
        assert_same(plan, expected, actual)


def test_boundaries_are_what_stages_make_of_them(folders: Callable[[str, int], Path]) -> None:
    for name, made in (("resnet", "bfloat16"), ("gpt2", "float32")):
        folder = folders(name, 2)
        plan = read_plan(folder)
        found = dtypes_of_folder(folder, plan, Precision(torch.bfloat16))
        assert {str(dtype) for dtype in found.values()} == {f"torch.{made}"}
        assert dtypes_of_folder(folder, plan, FULL) == {}


# ------------------------------------------------------------------ boundaries cast between ranks


class ThroughHalf(torch.autograd.Function):
    """What crosses in bfloat16, forward and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.to(torch.bfloat16).to(gradient.dtype)


class CastPipe:
    """The stages in one graph, with what crosses to each other rank cast on its way."""

    def __init__(self, pipe: Pipe, rank_of_stage: tuple[int, ...]) -> None:
        self.plan, self.stages, self.rank_of_stage = pipe.plan, pipe.stages, rank_of_stage
        self.parameters, self.named_parameters = pipe.parameters, pipe.named_parameters

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        values: dict[str, Any] = dict(inputs)
        source = {b.tensor.name: b.source for b in self.plan.boundaries}
        for spec, stage in zip(self.plan.stages, self.stages, strict=True):
            seen = dict(values)
            for name in set(spec.inputs) & source.keys():
                if self.rank_of_stage[source[name]] == self.rank_of_stage[spec.index]:
                    continue
                if values[name].dtype is torch.float32:
                    needs = values[name].requires_grad
                    half = values[name].to(torch.bfloat16).to(torch.float32)
                    seen[name] = ThroughHalf.apply(values[name]) if needs else half
            values |= run_stage(spec, stage, seen)
        return values


def cast_loss(case: Case, pipe: CastPipe, i: int) -> Tensor:
    inputs = case.micro_batch(i)
    values = pipe(inputs)
    if pipe.plan.loss is not None:
        loss: Tensor = values[pipe.plan.loss]
        return loss
    return F.cross_entropy(values[pipe.plan.outputs], inputs["target"])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["t5", "resnet", "mlp"])
def test_cast_boundaries_are_the_plain_model_with_casts_at_its_cuts(
    name: str, dtype: torch.dtype | None, folders: Callable[[str, int], Path]
) -> None:
    case, folder = CASES[name], folders(name, 4)
    plan, precision = read_plan(folder), Precision(dtype)
    pipe = CastPipe(asyncpipe.load(folder).train(), (0, 1, 2, 3))
    expected = plain(pipe, lambda i: cast_loss(case, pipe, i), dtype)
    made = dtypes_of_folder(folder, plan, precision)
    dtypes = BoundaryDtypes(by_name=made, crossing=torch.bfloat16)
    is_cast = dtype is None or name == "t5"
    assert bool(dtypes.cast(plan)) == is_cast  # under autocast the others are bfloat16 anyway
    options = {"criterion": criterion_of(case), "precision": precision}
    actual = pipelined(plan, loaded(folder, plan), case.micro_batch, dtypes=dtypes, **options)
    assert_same(plan, expected, actual)
    if is_cast:
        uncast = BoundaryDtypes(by_name=made)
        other = pipelined(plan, loaded(folder, plan), case.micro_batch, dtypes=uncast, **options)
        with pytest.raises(AssertionError):
            assert_same(plan, expected, other)


def test_nothing_is_cast_between_stages_of_one_rank(folders: Callable[[str, int], Path]) -> None:
    case, folder = CASES["mlp"], folders("mlp", 4)
    plan = read_plan(folder)
    model = case.build().train()
    expected = plain(model, lambda i: loss_of(case, model, case.micro_batch(i)), None)
    actual = pipelined(
        plan,
        loaded(folder, plan),
        case.micro_batch,
        schedule="single",
        criterion=criterion_of(case),
        dtypes=BoundaryDtypes(crossing=torch.bfloat16),
    )
    assert_same(plan, expected, actual)


def on_a_rank(rank: int, folder: Path) -> Found:
    case = CASES["t5"]
    plan, precision = read_plan(folder), Precision(torch.bfloat16)
    made = make_schedule("1f1b", stages=2, micro_batches=MICRO_BATCHES)
    actions = lower(made, forward_edges(plan), grad_edges=gradient_edges(plan))
    stages = {rank: load_stage(folder, plan, rank).train()}
    collect = Collect(stages)
    found = dtypes_of_folder(folder, plan, precision)
    pipeline = Executor(
        plan,
        stages,
        GlooTransport(),
        seed=SEED,
        precision=precision,
        dtypes=BoundaryDtypes(by_name=found, crossing=torch.bfloat16),
    )
    for step in range(STEPS):
        pipeline.run(
            actions, case.micro_batch, first_micro_batch=step * MICRO_BATCHES, observer=collect
        )
    pipeline.close()
    return collect.losses, collect.gradients


def test_processes_cast_alike(folders: Callable[[str, int], Path]) -> None:
    case, folder = CASES["t5"], folders("t5", 2)
    plan = read_plan(folder)
    pipe = CastPipe(asyncpipe.load(folder).train(), (0, 1))
    expected = plain(pipe, lambda i: cast_loss(case, pipe, i), torch.bfloat16)
    ranks = run_processes(2, on_a_rank, folder)
    losses, gradients = {}, {}
    for rank in ranks:
        assert isinstance(rank, tuple), rank
        losses |= rank[0]
        gradients |= rank[1]
    assert_same(plan, expected, (losses, gradients))


# ------------------------------------------------------------------------------- asynchronous runs


@pytest.mark.parametrize("step_every", [1, 3])
def test_stashed_weights_are_cast_version_by_version(step_every: int) -> None:
    double = chain(3)

    def inputs(i: int) -> dict[str, Tensor]:
        return {name: value.float() for name, value in double.make_inputs(i).items()}

    def optimize(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    model = replace(double, make_inputs=inputs)
    steps = 6
    modules = [module.float() for module in model.build()]
    for module in modules:  # the oracle knows nothing of precision
        module.forward = torch.autocast("cpu", dtype=torch.bfloat16)(module.forward)
    expected = async_run(model, modules, steps, step_every, optimize, method=Reference())
    schedule = lowered(model, "async-1f1b", steps * step_every, step_every)
    fresh = [module.float() for module in model.build()]
    made = {"h1": torch.bfloat16, "h2": torch.bfloat16}
    trained = train_together(
        model,
        schedule,
        optimize=optimize,
        staleness="stash",
        modules=fresh,
        precision=Precision(torch.bfloat16),
        dtypes=BoundaryDtypes(by_name=made),
    )
    assert trained.ledger == expected.ledger
    for own, other in zip(trained.modules, expected.modules, strict=True):
        for name, value in own.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
    assert all(torch.equal(trained.seen.losses[i], loss) for i, loss in expected.losses.items())
