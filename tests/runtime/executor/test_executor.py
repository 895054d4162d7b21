"""Transparency: whatever the schedule, losses and gradients are those of the plain model."""

import os
import re
import time

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.runtime.errors import DataError, PlanError, ScheduleError, TransportError
from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.instrumented import Observer, StepOptimizers
from asyncpipe.runtime.executor.mailbox import forward_edges
from asyncpipe.runtime.executor.run import needed_inputs
from asyncpipe.runtime.executor.stage import StageError
from asyncpipe.runtime.rng import micro_batch_seed
from asyncpipe.runtime.transports import Channel, GlooTransport, LocalHub, run_together
from asyncpipe.runtime.transports.protocol import LocalTransport
from asyncpipe.tests.support.models.hand_plans import (
    HandModel,
    chain,
    passing,
    regression,
    skips,
    tied,
    without_loss,
)
from asyncpipe.tests.support.oracles.async_simulation import (
    Gradients,
    gradients_of,
    plain_losses_and_gradients,
)
from asyncpipe.tests.support.processes.executor import (
    Seen,
    lowered,
    make_pipeline,
    train_rank,
    train_together,
)
from asyncpipe.tests.support.processes.gloo_ranks import run_processes

MODELS = {
    "two blocks": lambda: chain(2),
    "three blocks": lambda: chain(3),
    "four blocks with BatchNorm and dropout": lambda: chain(4, norm=True, dropout=0.25),
    "skips": skips,
    "passing": passing,
}
SCHEDULES = ("gpipe", "1f1b", "seq", "single")


def assert_same(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.equal(found[key], gradient), key


def assert_same_losses(found: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    assert {i: float(loss) for i, loss in found.items()} == {
        i: float(loss) for i, loss in expected.items()
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_buffers_equal_the_plain_loop_to_the_last_bit(
    name: str, schedule: str
) -> None:
    model = MODELS[name]()
    trained = train_together(model, lowered(model, schedule, 5), seed=3)
    modules = model.build()
    losses, gradients = plain_losses_and_gradients(model, modules, range(5), seed=3)
    assert_same_losses(trained.seen.losses, losses)
    assert_same(trained.seen.gradients[1], gradients)
    for module, plain in zip(trained.modules, modules, strict=True):
        for (key, value), (_, expected) in zip(
            module.state_dict().items(), plain.state_dict().items(), strict=True
        ):
            assert torch.equal(value, expected), key


def run_every_model(rank: int, names: list[str], schedules: list[str]) -> dict:
    transport = GlooTransport()
    return {
        (name, schedule): train_rank(
            MODELS[name](), lowered(MODELS[name](), schedule, 5), transport, seed=3
        )
        for name in names
        for schedule in schedules
    }


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ["two blocks"]),
        (3, ["three blocks", "passing"]),
        (4, ["four blocks with BatchNorm and dropout", "skips"]),
    ],
)
def test_real_processes_give_the_plain_loop_to_the_last_bit(ranks: int, names: list[str]) -> None:
    schedules = ["gpipe", "1f1b", "seq"]
    results = run_processes(ranks, run_every_model, names, schedules)
    for name in names:
        model = MODELS[name]()
        losses, gradients = plain_losses_and_gradients(model, model.build(), range(5), seed=3)
        for schedule in schedules:
            of_ranks = [result[name, schedule] for result in results]
            assert_same_losses(of_ranks[-1]["losses"], losses)
            assert_same({k: g for r in of_ranks for k, g in r["gradients"][1].items()}, gradients)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tied_weights_get_the_sum_of_all_holders_gradients_and_stay_equal(schedule: str) -> None:
    model = tied(3)
    trained = train_together(
        model, lowered(model, schedule, 4), segments=3, optimize=lambda p: torch.optim.Adam(p)
    )
    modules = model.build()
    _, gradients = plain_losses_and_gradients(model, modules, range(4))
    summed = gradients[0, "table.weight"] + gradients[2, "out.weight"]
    first = trained.seen.gradients[1]
    assert torch.equal(first[0, "table.weight"], summed)
    assert torch.equal(first[2, "out.weight"], summed)
    assert torch.equal(trained.modules[0].table.weight, trained.modules[2].out.weight)

    modules[2].out.weight = modules[0].table.weight
    modules[0].zero_grad()
    plain_losses_and_gradients(model, modules, range(4))
    torch.testing.assert_close(first[0, "table.weight"], modules[0].table.weight.grad)


def test_a_gradient_of_tied_weights_is_let_go_at_the_step_that_it_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_go: list[tuple[int, int, int]] = []

    def watched(transport: LocalTransport, channel: Channel, index: int) -> None:
        if channel.kind == "shared gradient":
            let_go.append((channel.source, channel.target, index))

    monkeypatch.setattr(LocalTransport, "wait_sent", watched)
    model = tied(3)
    train_together(
        model, lowered(model, "1f1b", 4), segments=3, optimize=lambda p: torch.optim.Adam(p)
    )
    assert sorted(let_go) == [(a, b, step) for a, b in ((0, 2), (2, 0)) for step in (1, 2, 3)]


def test_tied_weights_that_differ_at_the_start_are_refused() -> None:
    model = tied(3)
    modules = model.build()
    with torch.no_grad():
        modules[2].out.weight[0, 0] += 1e-12
    with pytest.raises(PlanError, match=r"table.weight of stage 0 .* differ in value|out.weight"):
        train_together(model, lowered(model, "1f1b", 2), modules=modules)


def test_tied_weights_must_be_separate_tensors() -> None:
    model = tied(2)
    modules = model.build()
    modules[1].out.weight = modules[0].table.weight
    with pytest.raises(PlanError, match="stages 0 and 1 hold table.weight as one tensor"):
        train_together(model, lowered(model, "single", 2), modules=modules)


def test_a_criterion_outside_the_model_makes_the_loss_at_the_last_stage() -> None:
    model = without_loss(3)
    schedule = lowered(model, "1f1b", 4)
    trained = train_together(model, schedule, criterion=nn.functional.mse_loss)
    losses, gradients = plain_losses_and_gradients(
        model, model.build(), range(4), criterion=nn.functional.mse_loss
    )
    assert_same_losses(trained.seen.losses, losses)
    assert_same(trained.seen.gradients[1], gradients)
    assert needed_inputs(model.plan, [0], criterion=True) == ("x",)
    assert needed_inputs(model.plan, [2], criterion=True) == ("target",)
    with pytest.raises(PlanError, match="no criterion was given"):
        train_together(model, schedule)


def test_steps_over_many_mini_batches_equal_plain_training() -> None:
    model = chain(3, norm=True, dropout=0.25)
    trained = train_together(
        model, lowered(model, "1f1b", 4), segments=5, optimize=lambda p: torch.optim.AdamW(p)
    )
    modules = model.build()
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()])
    losses = {}
    for step in range(5):
        optimizer.zero_grad()
        losses |= plain_losses_and_gradients(model, modules, range(4 * step, 4 * step + 4))[0]
        optimizer.step()
    assert_same_losses(trained.seen.losses, losses)
    assert trained.pipelines[1].versions == {1: 5}
    for module, plain in zip(trained.modules, modules, strict=True):
        assert_same(_values(module), _values(plain))


def test_dropout_is_that_of_the_seeded_plain_model_and_leaves_the_generator_alone() -> None:
    model = chain(3, dropout=0.5)
    modules, plain = model.build(), model.build()
    outside = torch.get_rng_state()
    trained = train_together(model, lowered(model, "1f1b", 2), seed=9, modules=modules)
    assert torch.equal(torch.get_rng_state(), outside)
    torch.manual_seed(micro_batch_seed(9, 1))
    assert float(trained.seen.losses[1]) == model.forward(plain, regression(1))["loss"]
    assert float(trained.seen.losses[0]) != float(trained.seen.losses[1])


def test_micro_batch_seeds_differ_in_their_low_32_bits() -> None:
    seeds = {micro_batch_seed(seed, i) & 0xFFFFFFFF for seed in range(20) for i in range(500)}
    assert len(seeds) == 20 * 500
    assert all(0 <= micro_batch_seed(seed, 0) < 2**63 for seed in (0, 1, -1, 2**40))


def test_generator_state_travels_past_stages_that_do_not_draw() -> None:
    assert (1, 3) in forward_edges(skips().plan)
    assert (0, 2) in forward_edges(chain(4, dropout=0.5).plan)
    assert (0, 2) not in forward_edges(chain(4).plan)


def test_evaluation_changes_nothing_and_gives_the_models_outputs() -> None:
    model = tied(3)
    schedule = lowered(model, "1f1b", 4)
    trained = train_together(model, schedule, optimize=lambda p: torch.optim.SGD(p, lr=0.1))
    before = [_values(module) for module in trained.modules]
    outside, seen = torch.get_rng_state(), Seen(dict(enumerate(trained.modules)))
    run_together(
        [
            pipeline.steps(schedule, model.make_inputs, observer=seen, training=False)
            for pipeline in trained.pipelines
        ]
    )
    assert seen.steps == [] and seen.outputs.keys() == set(range(4))
    with torch.no_grad():
        values = model.forward(trained.modules, model.make_inputs(2))
    assert torch.equal(seen.outputs[2]["logits"], values["logits"])
    assert float(seen.losses[2]) == float(values["loss"])
    assert torch.equal(torch.get_rng_state(), outside)
    for module, values_before in zip(trained.modules, before, strict=True):
        assert_same(_values(module), values_before)
        assert module.training
        assert all(parameter.grad is None for parameter in module.parameters())
    assert all(stage.in_flight == 0 for p in trained.pipelines for stage in p.stages.values())


def test_evaluation_runs_batchnorm_and_dropout_in_eval_mode_and_puts_modes_back() -> None:
    model = chain(2, norm=True, dropout=0.5)
    schedule = lowered(model, "gpipe", 2)
    trained = train_together(model, schedule)
    trained.modules[0].norm.eval()
    mean = trained.modules[0].norm.running_mean.clone()
    seen = Seen()
    run_together(
        [
            pipeline.steps(schedule, model.make_inputs, observer=seen, training=False)
            for pipeline in trained.pipelines
        ]
    )
    for module in trained.modules:
        assert module.training
    assert not trained.modules[0].norm.training and trained.modules[0].dropout.training
    assert torch.equal(trained.modules[0].norm.running_mean, mean)
    for module in trained.modules:
        module.eval()
    assert float(seen.losses[0]) == model.forward(trained.modules, regression(0))["loss"]


def test_an_exception_in_a_stage_names_stage_micro_batch_and_cause() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            raise ValueError("no such luck")

    model = chain(2)
    modules = [model.build()[0], Broken()]
    with pytest.raises(StageError) as raised:
        train_together(model, lowered(model, "1f1b", 3), modules=modules)
    assert "stage 1 failed in the forward of micro-batch 0: ValueError: no such luck" in str(
        raised.value
    )
    assert isinstance(raised.value.__cause__, ValueError)


def test_an_exception_in_a_backward_is_named_too() -> None:
    model = chain(2)
    modules = model.build()
    modules[0].matrix.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(StageError, match="stage 0 failed in the backward of micro-batch 0: Zero"):
        train_together(model, lowered(model, "1f1b", 3), modules=modules)


def test_a_feed_that_lacks_an_input_is_named() -> None:
    model = chain(2)
    schedule = lowered(model, "single", 2)
    pipeline = make_pipeline(model, schedule, model.build(), LocalHub().transport(0))
    with pytest.raises(DataError, match='micro-batch 4 has no "y" on rank 0; it has x.'):
        pipeline.run(schedule, lambda i: {"x": regression(i)["x"]}, first_micro_batch=4)


@pytest.mark.parametrize("form", [(4, 7), (4,)])
def test_a_micro_batch_that_the_plan_was_not_made_for_is_refused(form: tuple[int, ...]) -> None:
    model = chain(2)
    schedule = lowered(model, "single", 2)
    pipeline = make_pipeline(model, schedule, model.build(), LocalHub().transport(0))
    with pytest.raises(DataError, match="was captured"):
        pipeline.run(schedule, lambda i: {**regression(i), "x": torch.zeros(form)})


def test_a_micro_batch_of_another_size_is_named_with_both_shapes() -> None:
    model = chain(2)
    short = HandModel(
        model.plan, model.stages, lambda i: {n: v[:2] for n, v in regression(i).items()}
    )
    with pytest.raises(TransportError, match=r"made the activation \"h1\" of micro-batch 0 as "):
        train_together(short, lowered(short, "1f1b", 2))


def test_sizes_of_a_run_may_differ_from_the_plans() -> None:
    model = chain(2)
    schedule = lowered(model, "1f1b", 2)
    hub, modules, seen = LocalHub(2), model.build(), Seen()
    pipelines = [make_pipeline(model, schedule, modules, hub.transport(r)) for r in range(2)]
    run_together(
        [
            pipeline.steps(
                schedule,
                lambda i: {n: v[:2] for n, v in regression(i).items()},
                observer=seen,
                training=False,
                sizes={"batch": 2},
            )
            for pipeline in pipelines
        ]
    )
    assert seen.losses.keys() == {0, 1}


def test_stages_and_schedules_that_do_not_fit_are_refused() -> None:
    model = chain(3)
    modules = dict(enumerate(model.build()))
    with pytest.raises(PlanError, match=r"given stages \[1\] instead of \[0\]"):
        Executor(model.plan, {1: modules[1]}, LocalHub(3).transport(0))
    pipeline = Executor(model.plan, {0: modules[0]}, LocalHub(3).transport(0))
    with pytest.raises(ScheduleError, match="puts stages on ranks"):
        pipeline.run(lowered(model, "single", 2), regression)
    with pytest.raises(ScheduleError, match="has no messages"):
        pipeline.run(lowered(model, "1f1b", 2).compute, regression)


def test_a_run_that_would_wait_for_its_own_process_says_so() -> None:
    model = chain(2)
    schedule = lowered(model, "1f1b", 2)
    pipeline = make_pipeline(model, schedule, model.build(), LocalHub(2).transport(1))
    with pytest.raises(TransportError, match='rank 1 waits for the activation "h1" of micro-b'):
        pipeline.run(schedule, regression)


def test_the_report_has_every_action_and_adds_up() -> None:
    model = chain(2)
    schedule = lowered(model, "single", 3)
    modules = model.build()
    pipeline = make_pipeline(model, schedule, modules, LocalHub().transport(0))
    optimizers = {j: torch.optim.SGD(m.parameters(), lr=0.1) for j, m in enumerate(modules)}
    report = pipeline.run(schedule, regression, observer=StepOptimizers(optimizers), record=True)
    assert [action for action, _, _ in report.events] == list(schedule.ranks[0])
    assert report.busy_s == pytest.approx(sum(end - start for _, start, end in report.events))
    assert 0 < report.busy_s < report.wall_s and 0 < report.idle_share < 1
    assert report.losses.keys() == {0, 1, 2}
    assert pipeline.run(schedule, regression, observer=Observer()).events == ()


def test_the_executor_carries_out_the_schedule_in_its_order() -> None:
    model = chain(2)
    schedule = lowered(model, "1f1b", 4)
    seen = train_together(model, schedule).seen
    for row in schedule.compute.ranks:
        own = [str(action.unversioned) for action in row]
        assert [text for text in seen.actions if text in own] == own


def test_the_comparison_sees_a_swapped_micro_batch_and_a_dropped_gradient() -> None:
    model = chain(2)
    found = train_together(model, lowered(model, "1f1b", 4)).seen.gradients[1]
    modules = model.build()
    _, other_batches = plain_losses_and_gradients(model, modules, range(1, 5))
    with pytest.raises(AssertionError):
        assert_same(found, other_batches)
    modules = model.build()
    for i in range(3):
        (model.forward(modules, regression(i))["loss"] / 4).backward()
    with pytest.raises(AssertionError):
        assert_same(found, gradients_of(modules))


def _values(module: nn.Module) -> Gradients:
    return {(0, name): value.clone() for name, value in module.state_dict().items()}


def train_until_killed(rank: int) -> None:
    class Kill(Observer):
        def on_loss(self, micro_batch: int, loss: Tensor, targets: float | None) -> None:
            if micro_batch == 3:
                os._exit(9)

    model = chain(3)
    schedule = lowered(model, "1f1b", 8)
    pipeline = make_pipeline(model, schedule, model.build(), GlooTransport(timeout_s=50.0))
    pipeline.run(schedule, model.make_inputs, observer=Kill())


def test_a_killed_rank_ends_all_others_with_a_transport_error() -> None:
    start_s = time.monotonic()
    first, second, killed = run_processes(3, train_until_killed, limit_s=45)
    assert time.monotonic() - start_s < 30
    assert killed is None
    # A gradient that was under way may be lost with its sender.
    waits = r'rank 1 waits for the gradient "h2" of micro-batch [123] from rank 2, but rank 2 is'
    assert re.search(waits, second)
    assert "TransportError" in first and "but rank 1 is gone" in first
