"""The setup of a rank -> its stages with their weights, and the pipeline that runs them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..config.mixed_precision import precision_of
from ..data.text import check_vocabulary
from ..executor.instrumented import ObservedTransport
from ..executor.loading import load_stage
from ..executor.pipeline import Pipeline
from ..tensor_files import dtype_of
from .evaluation import find_criterion
from .setup import Setup, make_transport


def load_stages(setup: Setup) -> dict[int, nn.Module]:
    """The stages of this rank by number, on its device, in training mode."""
    config, world = setup.job.config, setup.world
    modules = {}
    for stage in world.grid.stages_of(world.rank, setup.schedule):
        module = load_stage(
            config.folder,
            setup.job.planned,
            stage,
            weights=setup.weights,
            device=world.machine.device,
            code=setup.job.code,
        )
        modules[stage] = module.to(dtype_of(config.dtype)).train()
    return modules


def make_pipeline(setup: Setup, modules: Mapping[int, nn.Module]) -> Pipeline:
    """The pipeline of this rank's stages; every rank calls it."""
    job, world, schedule = setup.job, setup.world, setup.schedule
    config, plan, device = job.config, job.plan, world.machine.device
    transport = make_transport(setup.transport, world, config, plan, schedule, device)
    criterion = find_criterion(config.criterion, config.seed) if config.criterion else None
    return Pipeline(
        plan,
        modules,
        ObservedTransport(
            transport, setup.activities, first_rank=world.grid.first_of(world.replica)
        ),
        rank_of_stage=schedule.rank_of_stage,
        replicas=schedule.replicas,
        staleness=config.methods,
        criterion=criterion,
        device=device,
        precision=precision_of(config),
        dtypes=setup.dtypes,
        seed=config.seed,
        batch_norm_per_step=config.batch_norm == "mini-batch",
    )


def check_tokens(setup: Setup, modules: Mapping[int, nn.Module]) -> None:
    """Raises DataError for a token of the data that an embedding of these stages lacks."""
    data = setup.data
    if data is None or data.largest_token is None:
        return
    plan, sample = setup.job.plan, setup.job.task.sample
    for index, module in modules.items():
        if sample in plan.stages[index].inputs:
            check_vocabulary(
                module,
                plan.stages[index],
                sample,
                data.largest_token(),
                source=data.source,
                tokenizer=data.tokenizer,
            )
