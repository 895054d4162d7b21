"""Settings + Plan -> the tensor ranks of a run, or the error that names what they do not fit."""

from __future__ import annotations

from dataclasses import replace

from ..freezing.elastic import NO_CACHE
from ..optimizers.facts import facts_of
from ..plan.plan import Plan
from ..plan.validate import with_option
from ..staleness.compose import METHODS, parse, reads_optimizer
from ..staleness.predicted_weights import AggregatedMsnag
from .learning_options import DDP
from .settings import RunConfig, Settings, SettingsError


def with_tensor_ranks(settings: Settings, plan: Plan) -> Settings:
    """The settings with a number of tensor ranks: the plan's, or 1 where a process has the whole
    model. Raises SettingsError for a folder or options without tensor parallelism."""
    ranks = settings.tensor_parallel
    if ranks is None:
        is_whole = settings.schedule in ("single", DDP)
        ranks = 1 if is_whole else plan.tensor_parallel
    if ranks > 1:
        _check_folder(settings, plan, ranks)
        _check_options(settings, plan, ranks)
    return replace(settings, tensor_parallel=ranks)


def _check_folder(settings: Settings, plan: Plan, ranks: int) -> None:
    if plan.tensor_parallel > 1:
        return
    again = with_option(plan.command, "--tensor-parallel", ranks)
    raise SettingsError(
        f"--tensor-parallel {ranks}, but the stages of {settings.folder} were generated for 1 "
        "tensor rank and have no split layers.",
        f"{again} --force",
    )


def _check_options(settings: Settings, plan: Plan, ranks: int) -> None:
    """Raises SettingsError for what tensor ranks cannot be combined with."""
    given = f"--tensor-parallel {ranks}"
    if settings.schedule == DDP:
        raise SettingsError(
            f"{given}, but under ddp each process has the whole model.",
            f"--schedule single {given} --replicas N",
        )
    if plan.stage_replicas and settings.replicas is None and settings.schedule != "single":
        raise SettingsError(
            f"{given}, but the plan has replicas of single stages, which have no tensor ranks.",
            "--replicas 1 for one rank a stage",
        )
    for name, usual in (("elastic", False), ("compile", False), ("cache", NO_CACHE)):
        if getattr(settings, name) != usual:
            flag = f"--{name}"
            raise SettingsError(
                f"{flag} is not possible with {given}.", f"Leave {flag} out, or --tensor-parallel 1"
            )


def check_tensor_ranks(config: RunConfig) -> None:
    """Raises SettingsError for a staleness method that needs more of a split weight than a rank
    has."""
    if config.tensor_ranks == 1:
        return
    given = f"--tensor-parallel {config.tensor_ranks}"
    for name in parse(config.methods):
        if reads_optimizer(name) and not facts_of(config.optimizer).elementwise:
            raise SettingsError(
                f"--staleness {name} reads the state of the optimizer, but with {given} a rank has "
                f"that of {config.optimizer} for some matrices.",
                "--staleness stash, or --optimizer adamw",
            )
        if config.clip and issubclass(METHODS[name], AggregatedMsnag):
            raise SettingsError(
                f"--staleness {name} with --clip {config.clip:g} expects the norm of a stage's "
                f"gradients, of which a rank has parts with {given}.",
                "--clip 0, or --staleness stash",
            )
