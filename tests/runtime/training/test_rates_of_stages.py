"""Every stage's learning rate follows the schedule by its own steps, not by the pipeline's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncpipe.runtime.control.learning_rate import lr_factor
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.training.optimizer_step import OptimizerStepper
from asyncpipe.runtime.transports import LocalHub, run_together
from asyncpipe.tests.support.models.hand_plans import HandModel, chain
from asyncpipe.tests.support.processes.executor import lowered, make_pipeline
from asyncpipe.tests.support.run_configs import run_config

STAGES, STEPS = 3, 6


def with_names(model: HandModel) -> HandModel:
    """The plan says which parameters its stages have, which trainers ask."""
    stages = tuple(
        replace(stage, parameters=tuple(dict(module.named_parameters())))
        for stage, module in zip(model.plan.stages, model.build(), strict=True)
    )
    return replace(model, plan=replace(model.plan, stages=stages))


@pytest.mark.parametrize("step_every", [1, 4])
def test_each_stage_counts_its_own_steps(step_every: int) -> None:
    model = with_names(chain(STAGES))
    settings = run_config(
        folder="x",
        schedule="async-1f1b",
        micro_batches=step_every,
        steps=STEPS,
        optimizer="sgd",
        lr=0.1,
        warmup=2,
        decay="linear",
    )
    schedule = lowered(model, "async-1f1b", STEPS * step_every, step_every)
    hub, modules = LocalHub(STAGES), model.build()
    met: list[tuple[int, int, float]] = []
    pipelines, trainers = [], []
    for rank, module in enumerate(modules):
        pipeline = make_pipeline(model, schedule, modules, hub.transport(rank), "stash+delay-rate")
        trainer = OptimizerStepper(
            model.plan,
            {rank: module},
            settings,
            World(),
            lambda _: None,
            lr_scale=pipeline.lr_scale,
        )
        optimizer = trainer.optimizers[rank].optimizer
        assert optimizer is not None

        def note(stepping, *_, rank=rank, pipeline=pipeline) -> None:
            met.append((rank, pipeline.versions[rank], stepping.param_groups[0]["lr"]))

        optimizer.register_step_pre_hook(note)
        pipelines.append(pipeline)
        trainers.append(trainer)
    run_together(
        [
            pipeline.steps(schedule, model.make_inputs, observer=trainer)
            for pipeline, trainer in zip(pipelines, trainers, strict=True)
        ]
    )
    for stage in range(STAGES):
        ahead = STAGES - 1 - stage
        taus = [
            sum(t // step_every - max(0, t - ahead) // step_every for t in window) / step_every
            for window in (range(v * step_every, (v + 1) * step_every) for v in range(STEPS))
        ]
        assert [rate for rank, _, rate in met if rank == stage] == pytest.approx(
            [
                0.1 * lr_factor(step, steps=STEPS, warmup=2, decay="linear") / (1 + taus[step])
                for step in range(STEPS)
            ]
        )
    # They are not at the same step at the same time: that it comes out alike is each one's doing.
    order = [version for _, version, _ in met]
    assert order != sorted(order) or step_every > 1
