"""The options of freezing -> a rule that fits the plan, and the steps of its events."""

from __future__ import annotations

from typing import Any

from ..data.streams import UNKNOWN_LENGTH
from ..data.task import GIVEN
from ..freezing.blocks import blocks_of
from ..freezing.elastic import NO_CACHE
from ..freezing.rules import EPOCH, PLASTICITY, TABLE, Events, in_full, parse_rule
from ..limits import typed
from ..plan.plan import Plan, verify_evaluates
from ..staleness.compose import that_evaluate_others
from .batch_layout import StepBatch
from .settings import RunConfig, Settings, SettingsError


def resolve_freezing(settings: Settings, plan: Plan, data: str) -> dict[str, Any]:
    """The resolved options of freezing: the table of a file in full, and when events occur.

    Raises SettingsError and FreezeError for options that do not fit each other or the model.
    """
    if settings.freeze is None:
        for name in ("freeze_every", "freeze_most", "cache"):
            if (value := getattr(settings, name)) not in (None, NO_CACHE):
                raise SettingsError(
                    f"{typed(name, value)}, but nothing is frozen.", "--freeze schedule:1/3"
                )
        return {}
    if settings.compile and settings.cache != NO_CACHE:
        raise SettingsError(
            f"--cache {settings.cache} leaves out blocks, which --compile has made one program of "
            "with the rest of the stage.",
            "Leave one of them out.",
        )
    freeze = in_full(settings.freeze)
    _check_depths(freeze, settings.freeze_most, plan)
    if parse_rule(freeze).kind == PLASTICITY:
        _check_probe(settings, plan, data)
    every = settings.freeze_every or EPOCH
    if every == EPOCH and data == GIVEN:
        raise SettingsError(
            "freeze needs freeze_every as a number of steps: only your loop knows its epochs.",
            "Give the steps between two events: freeze_every=100.",
        )
    return {"freeze": freeze, "freeze_every": every}


def describe_freezing(config: RunConfig, plan: Plan) -> str:
    """The rule of a run and its events, as a phrase."""
    assert config.freeze is not None
    blocks = blocks_of(plan)
    every = config.freeze_every
    when = f"{every} steps" if isinstance(every, int) else "epoch"
    most = "" if config.freeze_most is None else f", at most {config.freeze_most}"
    return (
        f"{config.freeze} every {when}, of {len(blocks)} blocks{most} "
        f"({blocks.paths[0]} to {blocks.paths[-1]})"
    )


def _check_depths(freeze: str, most: int | None, plan: Plan) -> None:
    rule, blocks = parse_rule(freeze), blocks_of(plan)
    unless = "" if blocks.head else ", of which the last one must train, as nothing follows it"
    has = f"{plan.name} has {len(blocks)} blocks ({blocks.paths[0]} to {blocks.paths[-1]}){unless}"
    if rule.kind == TABLE and rule.table[-1][1] > blocks.most:
        event, depth = rule.table[-1]
        raise SettingsError(
            f"--freeze freezes {depth} blocks at event {event}, but {has}.",
            f"Give at most {blocks.most}.",
        )
    if most is not None and most > blocks.most:
        raise SettingsError(f"--freeze-most {most}, but {has}.", f"--freeze-most {blocks.most}")


def _check_probe(settings: Settings, plan: Plan, data: str) -> None:
    """Raises SettingsError and PlanError where no outputs of blocks can be compared."""
    verify_evaluates(plan)
    if data != GIVEN and settings.micro_batch_size == 1:
        raise SettingsError(
            f"--freeze {settings.freeze} compares the samples of a micro-batch, but "
            "--micro-batch-size is 1.",
            "--micro-batch-size 2 or more, or --freeze gradnorm:1/3",
        )


def check_evaluated_weights(config: RunConfig) -> None:
    """Raises SettingsError where other weights are evaluated than those that are trained: they
    would jump when a block freezes."""
    if config.freeze is None:
        return
    others = that_evaluate_others(config.methods)
    given = f"--staleness {config.staleness}" if others else f"--ema {config.ema}"
    if others or config.ema is not None:
        raise SettingsError(
            f"{given} evaluates other weights than it trains, and a frozen block has those that it "
            "was trained with.",
            "Leave --freeze or that option out.",
        )


def events_of(config: RunConfig, batch: StepBatch, length: int) -> Events | None:
    """The steps after which blocks may freeze, in data of `length` samples; None without
    --freeze. Raises SettingsError for epochs of data without a length."""
    if config.freeze is None:
        return None
    if isinstance(config.freeze_every, int):
        return Events(config.freeze_every, batch.counted)
    if length == UNKNOWN_LENGTH:
        raise SettingsError(
            f"--freeze has an event in each epoch, but {config.data} has no length.",
            "--freeze-every 100",
        )
    return Events(length, batch.position)
