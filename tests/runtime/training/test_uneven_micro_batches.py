"""Micro-batches of other sizes train as the mean over all samples does in the plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.plan.plan import Plan, TensorSpec
from asyncpipe.runtime.transports import GlooTransport, LocalHub, run_together
from asyncpipe.tests.runtime.executor.test_executor import assert_same, assert_same_losses
from asyncpipe.tests.runtime.executor.test_where_others_err import SPLITS, scheduled
from asyncpipe.tests.support.models.hand_plans import (
    WIDTH,
    Block,
    HandModel,
    HandStage,
    Loss,
    chain,
    hand_model,
    skips,
)
from asyncpipe.tests.support.oracles.async_simulation import (
    gradients_of,
    plain_losses_and_gradients,
)
from asyncpipe.tests.support.processes.executor import (
    Seen,
    lowered,
    make_pipeline,
    train_together,
)
from asyncpipe.tests.support.processes.gloo_ranks import run_processes


def of_sizes(model: HandModel, sizes: Sequence[int]) -> HandModel:
    """The same model fed with micro-batches of these sizes, again and again."""
    return replace(
        model,
        make_inputs=lambda i: {
            name: value[: sizes[i % len(sizes)]] for name, value in model.make_inputs(i).items()
        },
    )


@pytest.mark.parametrize("sizes", [(3, 3, 3, 1), (3, 2), (1, 3, 2, 3)])
@pytest.mark.parametrize("schedule", SPLITS)
@pytest.mark.parametrize("name", ["chain", "skips"])
def test_uneven_micro_batches_give_the_gradient_of_the_mean_over_all_samples(
    name: str, schedule: str, sizes: tuple[int, ...]
) -> None:
    model = of_sizes(chain(3) if name == "chain" else without_dropout(skips()), sizes)
    made = scheduled(model, schedule, len(sizes))
    trained = train_together(model, made, sizes=[{"batch": size} for size in sizes], segments=2)
    plain = model.build()
    batch = [model.make_inputs(i) for i in range(len(sizes))]
    whole = {key: torch.cat([part[key] for part in batch]) for key in batch[0]}
    model.forward(plain, whole)["loss"].backward()
    for key, gradient in gradients_of(plain).items():
        torch.testing.assert_close(trained.seen.gradients[1][key], gradient, rtol=1e-12, atol=1e-14)
    assert trained.seen.gradients[2].keys() == trained.seen.gradients[1].keys()


def uneven_rank(rank: int) -> dict[str, Any]:
    sizes = (3, 3, 3, 1)
    model = of_sizes(chain(3), sizes)
    schedule = lowered(model, "1f1b", 4)
    modules, seen = model.build(), Seen()
    seen.modules = dict(enumerate(modules))
    pipeline = make_pipeline(model, schedule, modules, GlooTransport())
    for _ in range(3):
        pipeline.run(
            schedule,
            model.make_inputs,
            observer=seen,
            sizes=[{"batch": size} for size in sizes],
        )
    pipeline.close()
    return {"gradients": seen.gradients}


def test_uneven_micro_batches_travel_between_processes() -> None:
    results = run_processes(3, uneven_rank)
    model = of_sizes(chain(3), (3, 3, 3, 1))
    plain = model.build()
    for i in range(4):
        inputs = model.make_inputs(i)
        (model.forward(plain, inputs)["loss"] * len(inputs["x"]) / 10).backward()
    for key, gradient in gradients_of(plain).items():
        found = next(r["gradients"][3][key] for r in results if key in r["gradients"][3])
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14)


def test_sizes_for_another_number_of_micro_batches_are_refused() -> None:
    model = chain(2)
    with pytest.raises(ScheduleError, match="has 4 micro-batches, but there are sizes for 3"):
        train_together(model, lowered(model, "1f1b", 4), sizes=[{"batch": 3}] * 3)


def test_a_weight_that_ignores_the_sizes_would_be_seen() -> None:
    """Negative control: the mean of means is not the mean over all samples."""
    sizes = (3, 3, 3, 1)
    model = of_sizes(chain(2), sizes)
    given = [{"batch": size} for size in sizes]
    found = train_together(model, lowered(model, "1f1b", 4), sizes=given).seen.gradients[1]
    _, mean_of_means = plain_losses_and_gradients(model, model.build(), range(4))
    with pytest.raises(AssertionError):
        for key, gradient in mean_of_means.items():
            torch.testing.assert_close(found[key], gradient)


def sequences(stages: int) -> tuple[HandModel, Callable[[int], HandModel]]:
    """Blocks over sequences, whose length is a symbol; and the model fed with another length."""

    def inputs(length: int) -> Callable[[int], dict[str, Tensor]]:
        def make(i: int) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(100 * length + i)
            shape = (2, length, WIDTH)
            x, y = (torch.randn(shape, generator=generator).double() for _ in range(2))
            return {"x": x, "y": y}

        return make

    names = ["x", *(f"h{j}" for j in range(1, stages))]
    blocks = [HandStage(Block, (one,), (two,)) for one, two in zip(names, names[1:], strict=False)]
    model = hand_model([*blocks, HandStage(Loss, (names[-1], "y"), ("loss",))], inputs(5))
    model = replace(model, plan=with_symbols(model.plan, {5: "sequence"}, {"sequence": 5}))
    return model, lambda length: replace(model, make_inputs=inputs(length))


def with_symbols(plan: Plan, symbols: Mapping[int, str], sizes: Mapping[str, int]) -> Plan:
    def named(spec: TensorSpec) -> TensorSpec:
        shape = tuple(symbols.get(n, n) if isinstance(n, int) else n for n in spec.shape)
        return replace(spec, shape=shape)

    stages = tuple(
        replace(
            stage,
            sends=tuple(replace(b, tensor=named(b.tensor)) for b in stage.sends),
            receives=tuple(replace(b, tensor=named(b.tensor)) for b in stage.receives),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages, inputs=tuple(map(named, plan.inputs)), sizes=dict(sizes))


@pytest.mark.parametrize("schedule", SPLITS)
def test_the_sequence_length_may_change_between_steps_and_between_micro_batches(
    schedule: str,
) -> None:
    model, of_length = sequences(3)
    made = scheduled(model, schedule, 3)
    modules, hub = model.build(), LocalHub(len(made.ranks))
    ranks = range(len(made.ranks))
    pipelines = [make_pipeline(model, made, modules, hub.transport(rank)) for rank in ranks]
    for lengths in ((5, 5, 5), (9, 9, 9), (2, 2, 2), (4, 7, 1)):
        fed = replace(model, make_inputs=lambda i, n=lengths: of_length(n[i]).make_inputs(i))
        seen = Seen(dict(enumerate(modules)))
        sizes = [{"sequence": length} for length in lengths]
        run_together(
            [
                pipeline.steps(
                    made,
                    fed.make_inputs,
                    observer=seen,
                    sizes=sizes if len(set(lengths)) > 1 else sizes[0],
                )
                for pipeline in pipelines
            ]
        )
        losses, gradients = plain_losses_and_gradients(fed, model.build(), range(3))
        assert_same_losses(seen.losses, losses)
        assert_same(next(iter(seen.gradients.values())), gradients)


def test_the_mean_over_all_samples_is_exact_for_even_micro_batches() -> None:
    """Weights by samples change nothing where all micro-batches have the same."""
    model = chain(3)
    given = [{"batch": 3}] * 4
    found = [
        train_together(model, lowered(model, "1f1b", 4), sizes=sizes).seen
        for sizes in (None, given)
    ]
    assert_same(found[0].gradients[1], found[1].gradients[1])
    assert not any(math.isnan(float(loss)) for loss in found[1].losses.values())


def without_dropout(model: HandModel) -> HandModel:
    def build(stage: HandStage) -> Callable[[], nn.Module]:
        def built() -> nn.Module:
            module = stage.build()
            for part in module.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
            return module

        return built

    stages = tuple(replace(stage, build=build(stage)) for stage in model.stages)
    return replace(model, stages=stages)
