"""Options of a training run -> one frozen value, and the TOML file that repeats the run.

A field is spelled alike as flag (`--micro-batches 8`), as field and in TOML (`micro_batches = 8`).
None means: chosen for the plan at hand (`resolve.py`). Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from ..errors import AsyncPipeError
from ..reading import Origin, parse_toml, read_text
from ..schedules import ASYNCHRONOUS, AUTO, SCHEDULES, spelled
from ..wording import did_you_mean
from .durations import seconds_of
from .legal_values import fault_of, flag_of

DDP = "ddp"
"""As a schedule: whole models that share the micro-batches, which are replicas of `single`."""

OF_THIS_CALL = frozenset(
    {
        *("dry_run", "print_schedule", "json", "quiet", "output", "debug", "resume", "trust"),
        *("print_sbatch", "nodes", "time_limit", "max_run"),
    }
)
TO_BE_GIVEN = "???"
"""A value in TOML that a flag must win over."""

SWEEP = "sweep"
"""The table of a TOML file that has lists of values (`runtime/sweep/variants.py`)."""


class SettingsError(AsyncPipeError):
    """An option whose value cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All options of `asyncpipe-train`. Times in seconds, sizes in samples or tokens.

    `schedule` is a name or a text file, whose path has a slash or ends in .txt; `ranks` share the
    stages, by default as many as the schedule or the plan has, and there are `replicas` of the
    whole pipeline, by default as many as the plan has side by side. `micro_batches` is the number
    of micro-batches of one optimizer step in each replica, under every schedule (8, or what
    `global_batch_size` and `micro_batch_size` make it); under `ddp`, until it is resolved to
    replicas of `single`, that of all together. Once resolved, `global_batch_size` is there only
    where the last micro-batch is smaller than the others. `clip` bounds the gradient norm over all
    stages; 0 is off. `clip_by` is what an asynchronous run clips by (`async_clipping.py`). Over
    `annealing_steps` the staleness method pipemare-rate returns to the learning rate. Weights are
    of `dtype`; forwards compute under autocast to `precision`, unless it is "full". `loss_scale` is
    the first one (2**16 in float16). Boundary tensors that are wider are cast to `boundary_dtype`
    between ranks.

    Of an asynchronous schedule, stages run so far `ahead` (`asynchronous.depths`), no weights are
    staler than `staleness_cap` steps, the pipeline drains every `flush_every` steps, and the first
    steps, of which `sync_start` is the number or the share, are synchronous. `samples` make as many
    steps as they are enough for, and `remainder` says what becomes of those left over.

    A checkpoint is written every `save_every` steps, 0 for none but those that a signal asks for;
    of them the `keep_last` newest are kept and the `keep_best` with the lowest evaluation loss.
    `resume` is a run, a checkpoint, or "auto" (`checkpoint/resuming.py`), `save_to` the URL of a
    place that has them too (`checkpoint/elsewhere.py`). `max_run` is how long the command may take
    (`durations.py`) before it ends as after SIGTERM.
    """

    folder: str

    schedule: str = "1f1b"
    ranks: int | None = None
    replicas: int | None = None
    check_replicas: int = 0
    staleness: str | None = None
    annealing_steps: int | None = None
    ahead: str | None = None
    staleness_cap: int | None = None
    flush_every: int = 0
    sync_start: str | None = None
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    seq: int | None = None

    data: str | None = None
    tokenizer: str | None = None

    steps: int = 100
    samples: int | None = None
    remainder: str = "drop"
    optimizer: str | None = None
    lr: float | None = None
    momentum: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    refresh_every: int | None = None
    weight_decay: float | None = None
    warmup: int | None = None
    decay: str | None = None
    final_lr_ratio: float | None = None
    clip: float | None = None
    clip_by: str | None = None
    criterion: str | None = None
    batch_norm: str = "micro-batch"
    recompute: str = "auto"
    seed: int = 1

    init_from: str | None = None
    resume: str | None = None
    save_every: int = 0
    keep_last: int = 3
    keep_best: int = 0
    save_to: str | None = None
    trust: bool = False
    export_hf: str | None = None
    output: str | None = None

    eval_every: int = 0
    eval_batches: int = 8
    log_every: int = 10
    log: str | None = None
    trace: str | None = None
    debug: str | None = None

    device: str = "cpu"
    ranks_per_gpu: int = 1
    threads: int | None = None
    pin: str = "cores"
    timeout_s: float = 300.0
    stall_s: float = 60.0
    restarts: int = 0
    dtype: str = "float32"
    precision: str = "full"
    loss_scale: float | None = None
    boundary_dtype: str | None = None
    transport: str = "auto"
    interface: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    max_run: str | None = None

    print_sbatch: bool = False
    nodes: int | None = None
    time_limit: str = "24:00:00"

    dry_run: bool = False
    print_schedule: bool = False
    json: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        self._check_schedule()
        for option in fields(self):
            value = getattr(self, option.name)
            if value is not None and (fault := fault_of(option.name, value)):
                raise SettingsError(*fault)
        if not all(0 <= beta < 1 for beta in self.betas):
            first, second = self.betas
            raise SettingsError(f"--betas {first} {second}: both must be from 0 to below 1.")
        self._check_trace()
        self._check_debug()
        if self.max_run is not None and seconds_of(self.max_run) is None:
            raise SettingsError(
                f"--max-run {self.max_run} is no time.", "--max-run 3h50m, 45m, 90s or 2d12h."
            )
        self._check_checkpoints()

    @property
    def is_async(self) -> bool:
        """Whether stages step without waiting for the others."""
        return self.schedule in ASYNCHRONOUS

    @property
    def schedule_file(self) -> str | None:
        """The text file that has the schedule, if it is not one of the named."""
        is_path = "/" in self.schedule or self.schedule.endswith(".txt")
        return self.schedule if is_path else None

    @property
    def max_run_s(self) -> int | None:
        """How long the command may take."""
        return None if self.max_run is None else seconds_of(self.max_run)

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled for the backward, and steps with an overflow are left out."""
        return self.precision == "float16"

    @property
    def trace_steps(self) -> range:
        """The steps to record, counted from 1: the last so many, or those from one to another."""
        if self.trace is None:
            return range(0)
        first, dash, last = self.trace.partition("-")
        if dash:
            return range(int(first), int(last) + 1)
        return range(max(1, self.steps - int(first) + 1), self.steps + 1)

    @property
    def left_over(self) -> int:
        """The micro-batches of a short last step; 0 where all steps are whole."""
        if self.samples is None or self.remainder == "drop":
            return 0
        size = self.micro_batch_size or 1
        return self.samples // size % (self.micro_batches or 1)

    @property
    def patience_s(self) -> float:
        """How long a rank waits: `timeout_s`, or days while a debugger may hold another."""
        return self.timeout_s if self.debug is None else 7 * 86_400.0

    def is_debugged(self, rank: int) -> bool:
        """Whether a debugger is to be attached to the rank."""
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
        found = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", self.trace)
        steps = self.trace_steps if found else range(0)
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
            lacks = "no checkpoint is" if not self.save_every else "no evaluation is"
            raise SettingsError(
                f"--keep-best {self.keep_best}, but {lacks} made.",
                "--save-every 100" if not self.save_every else "--eval-batches 8",
            )

    def _check_debug(self) -> None:
        if self.debug is not None and not re.fullmatch(r"all|\d{1,9}(,\d{1,9})*", self.debug):
            raise SettingsError(
                f"--debug {self.debug} names no ranks.", "--debug 1, --debug 0,2 or --debug all."
            )

    def to_toml(self) -> str:
        """The TOML text of these options, but for those that concern one call only."""
        lines = ["# asyncpipe-train --config with this file repeats the run."]
        for option in fields(self):
            value = getattr(self, option.name)
            if value is not None and option.name not in OF_THIS_CALL:
                # JSON's strings, numbers, booleans and lists are TOML's.
                lines.append(f"{option.name} = {json.dumps(value, ensure_ascii=False)}")
        return "\n".join(lines) + "\n"


def read_config(path: str | Path) -> dict[str, Any]:
    """Reads options from a TOML file; each is checked for its name and type. What is to be given
    for every run anew may be `"???"` there.

    Raises SettingsError for a missing or damaged file, an unknown option or a wrong type.
    """
    raw = read_toml(path)
    return {
        name: checked(name, value, str(path)) if value != TO_BE_GIVEN else value
        for name, value in raw.items()
        if name != SWEEP
    }


def read_toml(path: str | Path) -> dict[str, Any]:
    """What is in the file of `--config`. Raises SettingsError for a missing or damaged one."""
    path = Path(path)
    if not path.is_file():
        raise SettingsError(f"--config {path}: there is no such file.")
    origin = Origin(str(path), SettingsError)
    return parse_toml(read_text(path, origin), origin)


def settings_from(options: Mapping[str, Any]) -> Settings:
    """Settings from named options.

    Raises SettingsError when there is no `folder`, or a value that is still to be given.
    """
    for name, value in options.items():
        if value == TO_BE_GIVEN:
            raise SettingsError(
                f"{name} is {TO_BE_GIVEN} in the file of --config: it is to be given.",
                f"{flag_of(name)} VALUE",
            )
    if "folder" not in options:
        raise SettingsError(
            "no generated folder was named.", "asyncpipe-train generated_models/gpt2_4p"
        )
    return Settings(**options)


def checked(name: str, value: Any, place: str) -> Any:
    """The value of an option as it stands in `place`, of the option's type.

    Raises SettingsError for an unknown option or a wrong type.
    """
    kinds = get_type_hints(Settings)
    if name not in kinds:
        raise SettingsError(
            f"{place}: {name} is not an option of asyncpipe-train.",
            did_you_mean(name, kinds, f"Options: {', '.join(kinds)}."),
        )
    if name == "trust":
        raise SettingsError(
            f"{place}: whose code is run is said on the command line, not in a file.", "--trust"
        )
    if name == "betas":
        if isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)):
            return (float(value[0]), float(value[1]))
        raise SettingsError(f"{place}: betas = {value!r} is not two numbers.")
    legal = [kind for kind in get_args(kinds[name]) or (kinds[name],) if kind is not NoneType]
    if float in legal and _is_number(value):
        return float(value)
    if type(value) not in legal:
        words = " or ".join(kind.__name__ for kind in legal)
        raise SettingsError(f"{place}: {name} = {value!r} is not of type {words}.")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
