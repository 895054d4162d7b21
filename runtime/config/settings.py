"""All options of `asyncpipe-train` as one frozen value.

A field has one spelling as flag (`--micro-batches 8`), as field and in TOML (`micro_batches = 8`).
None means that it is chosen for the plan at hand (`resolve.py`). Nothing here imports torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..errors import AsyncPipeError
from ..formatting import did_you_mean
from ..limits import refusal
from ..schedule.asynchronous import ASYNCHRONOUS
from ..schedule.builders import AUTO, SCHEDULES, spelled
from .execution_options import ExecutionOptions, seconds_of
from .learning_options import DDP, LearningOptions
from .options import options_of


class SettingsError(AsyncPipeError):
    """An option with a value that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Settings(ExecutionOptions, LearningOptions):
    """All options of a run: `LearningOptions` decide what it computes, `ExecutionOptions` where and
    how. Times are in seconds, sizes in samples or tokens."""

    def __post_init__(self) -> None:
        for name, option in options_of(Settings).items():
            value = getattr(self, name)
            is_open = value is None and option.optional
            if not is_open and (fault := refusal(option.limit, name, value)):
                raise SettingsError(*fault)
        self._check_schedule()
        self._check_trace()
        self._check_checkpoints()

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
    def max_run_s(self) -> int | None:
        """The longest duration of the command, in seconds."""
        return None if self.max_run is None else seconds_of(self.max_run)

    @property
    def is_scaled(self) -> bool:
        """True when the loss is scaled for the backward and steps with an overflow are skipped."""
        return self.precision == "float16"

    @property
    def trace_steps(self) -> range:
        """The steps to record, counted from 1."""
        if self.trace is None:
            return range(0)
        first, dash, last = self.trace.partition("-")
        if dash:
            return range(int(first), int(last) + 1)
        return range(max(1, self.steps - int(first) + 1), self.steps + 1)

    @property
    def left_over(self) -> int:
        """The micro-batches of a short last step; 0 when all steps are whole."""
        if self.samples is None or self.remainder == "drop":
            return 0
        size = self.micro_batch_size or 1
        return self.samples // size % (self.micro_batches or 1)

    @property
    def patience_s(self) -> float:
        """Seconds that a rank waits: `timeout_s`, or a week while a debugger may stop another."""
        return self.timeout_s if self.debug is None else 7 * 86_400.0

    def is_debugged(self, rank: int) -> bool:
        """True when the rank waits for a debugger."""
        return self.debug == "all" or str(rank) in (self.debug or "").split(",")

    def _check_schedule(self) -> None:
        legal = (*SCHEDULES, AUTO, DDP)
        if spelled(self.schedule) in legal:
            object.__setattr__(self, "schedule", spelled(self.schedule))
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
        if steps[-1] > self.steps:
            raise SettingsError(
                f"--trace {self.trace}, but the run has {self.steps} steps.",
                f"--trace 3 records the last three, or --steps {steps[-1]}.",
            )

    def _check_checkpoints(self) -> None:
        if self.keep_best and not (self.save_every and self.eval_batches):
            missing = "no checkpoint is" if not self.save_every else "no evaluation is"
            raise SettingsError(
                f"--keep-best {self.keep_best}, but {missing} made.",
                "--save-every 100" if not self.save_every else "--eval-batches 8",
            )

    def to_toml(self) -> str:
        """The TOML text of these options, without those of one call."""
        lines = ["# asyncpipe-train --config with this file repeats the run."]
        for name, option in options_of(Settings).items():
            value = getattr(self, name)
            if value is not None and option.scope == "run":
                # JSON's strings, numbers, booleans and lists are TOML's.
                lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
        return "\n".join(lines) + "\n"
