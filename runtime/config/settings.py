"""All options of `asyncpipe-train` as one frozen value: as asked for, and as resolved for a plan.

A field has one spelling as flag (`--micro-batches 8`), as field and in TOML (`micro_batches = 8`).
Nothing here imports torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import AsyncPipeError
from ..formatting import did_you_mean
from ..limits import refusal, typed
from ..options import options_of
from ..schedule.asynchronous import ASYNCHRONOUS
from ..schedule.builders import AUTO, SCHEDULES, spelled
from .execution_options import ExecutionOptions
from .learning_options import DDP, LearningOptions


class SettingsError(AsyncPipeError):
    """An option with a value that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Settings(ExecutionOptions, LearningOptions):
    """All options of a run as asked for: `LearningOptions` decide what it computes,
    `ExecutionOptions` where and how.

    Times are in seconds, sizes in samples or tokens. None means that the value is chosen for the
    plan at hand (`resolve.py`).
    """

    def __post_init__(self) -> None:
        for name, option in options_of(Settings).items():
            value = getattr(self, name)
            is_open = value is None and option.optional
            if not is_open and (fault := refusal(option.limit, name, value)):
                raise SettingsError(*fault)
        self._check_schedule()
        self._check_trace()
        self._check_checkpoints()
        self._check_evaluations()

    @property
    def is_async(self) -> bool:
        """True when stages step without waiting for the others."""
        return self.schedule in ASYNCHRONOUS

    @property
    def schedule_file(self) -> str | None:
        """The text file of the schedule; None for a schedule with a name."""
        is_path = "/" in self.schedule or self.schedule.endswith(".txt")
        return self.schedule if is_path else None

    @property
    def tensor_ranks(self) -> int:
        """The processes that share out the layers of each stage."""
        return 1 if self.tensor_parallel is None else self.tensor_parallel

    @property
    def trace_steps(self) -> range:
        """The steps to record, counted from 1."""
        if self.trace is None:
            return range(0)
        first, dash, last = self.trace.partition("-")
        if dash:
            return range(int(first), int(last) + 1)
        return range(max(1, self.steps - int(first) + 1), self.steps + 1)

    def _check_schedule(self) -> None:
        legal = (*SCHEDULES, AUTO, DDP)
        if (name := spelled(self.schedule).lower()) in legal:
            object.__setattr__(self, "schedule", name)
        if self.schedule_file:
            if not Path(self.schedule_file).is_file():
                raise SettingsError(
                    f"--schedule {self.schedule}: there is no such file.",
                    f"Write one with --print-schedule, or choose {', '.join(legal)}.",
                )
        elif self.schedule not in legal:
            raise SettingsError(
                f"--schedule {self.schedule} is not known.",
                did_you_mean(self.schedule, legal, f"Choose a .txt file or {', '.join(legal)}."),
            )

    def _check_trace(self) -> None:
        if self.trace is None:
            return
        steps = self.trace_steps
        if not steps or steps[0] < 1:
            raise SettingsError(
                f"--trace {self.trace} names no steps.",
                "--trace 3 records the last three, --trace 10-12 the steps from 10 to 12.",
            )
        if steps[-1] > self.steps and self.epochs is None:
            raise SettingsError(
                f"--trace {self.trace}, but the run has {self.steps} steps.",
                f"--trace 3 records the last three, or --steps {steps[-1]}.",
            )

    def _check_checkpoints(self) -> None:
        if self.keep_best and (not self.save_every or self.eval_batches == 0):
            missing = "no checkpoint is" if not self.save_every else "no evaluation is"
            raise SettingsError(
                f"--keep-best {self.keep_best}, but {missing} made.",
                "--save-every 100" if not self.save_every else "Leave --eval-batches out",
            )

    def _check_evaluations(self) -> None:
        for name in ("metric", "early_stop"):
            value = getattr(self, name)
            if value and self.eval_batches == 0:
                raise SettingsError(
                    f"{typed(name, value)}, but no evaluation is made.", "Leave --eval-batches out."
                )
        if self.early_stop and not self.eval_every:
            raise SettingsError(
                f"--early-stop {self.early_stop}, but there is one evaluation, at the end.",
                "--eval-every 100",
            )

    def to_toml(self) -> str:
        """The TOML text of these options, without those of one call and those that follow from
        others."""
        counted = ("steps", "samples") if self.epochs is not None else ()
        lines = ["# asyncpipe-train --config with this file repeats the run."]
        for name, option in options_of(Settings).items():
            value = getattr(self, name)
            if value is not None and option.scope == "run" and name not in counted:
                # JSON's strings, numbers, booleans and lists are TOML's.
                lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """The options of a run as resolved for its plan; `resolve` makes it.

    The fields below have a value in every run; they are declared as options above. Any other
    option that is None has no meaning for this run: `clip_by` of a run that clips nothing, for
    example.
    """

    micro_batches: int = field()
    micro_batch_size: int = field()
    data: str = field()
    optimizer: str = field()
    lr: float = field()
    momentum: float = field()
    weight_decay: float = field()
    warmup: int = field()
    decay: str = field()
    final_lr_ratio: float = field()
    clip: float = field()
    zero: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if unresolved := [name for name in _RESOLVED if getattr(self, name) is None]:
            raise TypeError(f"not resolved: {', '.join(unresolved)}")

    @property
    def pipelines(self) -> int:
        """The copies of the whole pipeline; 1 where only single stages have replicas."""
        return 1 if self.replicas is None else self.replicas

    @property
    def methods(self) -> str:
        """The staleness methods, joined by +; `none` in a synchronous run."""
        return "none" if self.staleness is None else self.staleness

    def is_logged(self, step: int) -> bool:
        """True if a line is due after a step."""
        return step % self.log_every == 0 or step in (1, self.steps)

    @property
    def left_over(self) -> int:
        """The samples of a short last step; 0 when all steps are whole."""
        count = self.micro_batches * self.pipelines
        return left_over(self, self.global_batch_size or count * self.micro_batch_size)


_RESOLVED = tuple(RunConfig.__annotations__)


def left_over(settings: Settings, samples: int) -> int:
    """The samples of a short last step, where others have so many; 0 when all are whole."""
    usual = "drop" if settings.epochs is None else "proportional"
    if settings.samples is None or (settings.remainder or usual) == "drop":
        return 0
    return settings.samples % samples
