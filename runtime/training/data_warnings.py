"""Warnings of data that are legal but probably unintended."""

from __future__ import annotations

from ..config.batch_layout import EvaluationBatch
from ..config.settings import RunConfig
from ..data.task import Task
from ..data.tokens import is_plain_text
from ..formatting import write_duration
from ..plan.forecast import Forecast
from ..plan.plan import READ_FROM, Plan
from .batches import Data

_LONG_S = 60.0


def tokenizer_warning(config: RunConfig, plan: Plan, task: Task) -> str:
    """A warning for a model with trained weights whose text is read as bytes by default; ""
    otherwise."""
    is_read = task.kind == "text" and is_plain_text(config.data) and config.tokenizer is None
    if not is_read or not plan.weights.startswith(READ_FROM):
        return ""
    return (
        f"the text is read as bytes, but the weights of {plan.name} were {plan.weights}, which has "
        "no tokenizer.json: its tokens are others. Give --tokenizer path/to/tokenizer.json."
    )


def evaluation_warning(config: RunConfig, plan: Plan, data: Data, forecast: Forecast | None) -> str:
    """A warning if evaluations of all data take more than a minute, and longer than the training,
    by the plan's costs; "" otherwise."""
    if data.evaluation is None or forecast is None or config.eval_batches is not None:
        return ""
    batch = EvaluationBatch.of(len(data.evaluation), config.micro_batch_size)
    slowest_ms = max(stage.forward_ms for stage in plan.stages)
    once_s = batch.count * slowest_ms / 1e3
    times = config.steps // config.eval_every if config.eval_every else 1
    trained_s = config.steps * forecast.step_ms / 1e3
    if once_s < _LONG_S or once_s * times < trained_s:
        return ""
    part = max(1, int(batch.count * _LONG_S / 4 / once_s))
    return (
        f"an evaluation of all {batch.length:,} samples takes {write_duration(once_s)} by the "
        f"plan's costs, the training {write_duration(trained_s)}. --eval-batches {part} evaluates "
        "a part."
    )
