"""Options of a training run -> one frozen value, and the TOML file that repeats the run.

A field is spelled alike as flag (`--micro-batches 8`), as field and in TOML (`micro_batches = 8`).
None means: chosen for the plan at hand (`resolve.py`). Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from ..errors import AsyncPipeError
from ..limits import (
    Choice,
    Flag,
    Number,
    Several,
    Text,
    Whole,
    flag_of,
    form,
    limits_of,
    path,
    refusal,
)
from ..reading import Origin, parse_toml, read_text
from ..schedules import ASYNCHRONOUS, AUTO, SCHEDULES, spelled
from ..wording import did_you_mean
from .durations import seconds_of

DDP = "ddp"
"""As a schedule: whole models that share the micro-batches, which are replicas of `single`."""

OPTIMIZERS = ("adamw", "adam", "nadam", "sgd", "sutskever", "muon", "soap")
TRANSPORTS = ("auto", "local", "shm", "gloo", "nccl", "mpi")
_STEPS = Whole(0, 10**12, 100)
_SOME_STEPS = Whole(1, 10**12, 10)

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

    folder: Annotated[str, path("generated_models/gpt2_4p")]

    schedule: Annotated[str, Text("a schedule or a .txt file that has one", "1f1b")] = "1f1b"
    ranks: Annotated[int | None, Whole(1, 2**16, 4)] = None
    replicas: Annotated[int | None, Whole(1, 2**16, 2)] = None
    check_replicas: Annotated[int, _STEPS] = 0
    staleness: Annotated[
        str | None, Text("names of methods, joined by +", "stash", form(r"[A-Za-z0-9_+-]+"))
    ] = None
    annealing_steps: Annotated[int | None, _SOME_STEPS] = None
    ahead: Annotated[
        str | None,
        Text(
            "a factor, a number, or one number for each stage",
            "2x",
            form(r"[0-9]{1,6}x|[0-9]{1,9}( *, *[0-9]{1,9})*"),
        ),
    ] = None
    staleness_cap: Annotated[int | None, _STEPS] = None
    flush_every: Annotated[int, _STEPS] = 0
    sync_start: Annotated[
        str | None,
        Text(
            "a number of steps or a share of them",
            "5%",
            form(r"[0-9]{1,15}|[0-9]{1,9}(\.[0-9]{1,9})?%"),
        ),
    ] = None
    micro_batches: Annotated[int | None, Whole(1, 2**16, 8)] = None
    micro_batch_size: Annotated[int | None, Whole(1, 2**24, 8)] = None
    global_batch_size: Annotated[int | None, Whole(1, 2**40, 64)] = None
    seq: Annotated[int | None, Whole(1, 2**24, 128)] = None

    data: Annotated[
        str | None, Text("a data set, a file or folder, or FILE.py:FUNCTION", "shakespeare")
    ] = None
    tokenizer: Annotated[str | None, Text("bytes, bpe:SIZE or a file", "bpe:4096")] = None

    steps: Annotated[int, _STEPS] = 100
    samples: Annotated[int | None, Whole(1, 10**15, 10_000)] = None
    remainder: Annotated[str, Choice(("drop", "proportional"))] = "drop"
    optimizer: Annotated[str | None, Choice(OPTIMIZERS)] = None
    lr: Annotated[float | None, Number(0, 1e6, 0.001)] = None
    momentum: Annotated[float | None, Number(0, 1, 0.9, below=1)] = None
    betas: Annotated[tuple[float, float], Several(Number(0, 1, 0.9, below=1), count=2)] = (
        0.9,
        0.999,
    )
    refresh_every: Annotated[int | None, _SOME_STEPS] = None
    weight_decay: Annotated[float | None, Number(0, 1e6, 0.01)] = None
    warmup: Annotated[int | None, _STEPS] = None
    decay: Annotated[str | None, Choice(("linear", "cosine", "none"))] = None
    final_lr_ratio: Annotated[float | None, Number(0, 1000, 0.1)] = None
    clip: Annotated[float | None, Number(0, 1e30, 1.0)] = None
    clip_by: Annotated[str | None, Choice(("stage", "proportion", "global", "known"))] = None
    criterion: Annotated[
        str | None, Text("cross_entropy, mse or FILE.py:FUNCTION", "cross_entropy")
    ] = None
    batch_norm: Annotated[str, Choice(("micro-batch", "mini-batch"))] = "micro-batch"
    recompute: Annotated[
        str,
        Text(
            "auto, all, none or numbers of stages",
            "0,2",
            form(r"auto|all|none|[0-9]{1,9}( *, *[0-9]{1,9})*"),
        ),
    ] = "auto"
    seed: Annotated[int, Whole(0, 2**53, 1)] = 1

    init_from: Annotated[str | None, path("runs/gpt2_4p/1")] = None
    resume: Annotated[str | None, Text("auto, a run or a checkpoint", "auto")] = None
    save_every: Annotated[int, _STEPS] = 0
    keep_last: Annotated[int, Whole(1, 10**6, 3)] = 3
    keep_best: Annotated[int, Whole(0, 10**6, 1)] = 0
    save_to: Annotated[str | None, Text("the URL of a place", "s3://bucket/run")] = None
    trust: Annotated[bool, Flag()] = False
    export_hf: Annotated[str | None, path("exported")] = None
    output: Annotated[str | None, path("runs/mine")] = None

    eval_every: Annotated[int, _STEPS] = 0
    eval_batches: Annotated[int, Whole(0, 10**9, 8)] = 8
    log_every: Annotated[int, _SOME_STEPS] = 10
    log: Annotated[str | None, Text("names of trackers, joined by commas", "tensorboard")] = None
    trace: Annotated[
        str | None,
        Text(
            "a number of steps, or the first and the last", "3", form(r"[0-9]{1,15}(-[0-9]{1,15})?")
        ),
    ] = None
    debug: Annotated[
        str | None, Text("all or numbers of ranks", "0,2", form(r"all|[0-9]{1,9}(,[0-9]{1,9})*"))
    ] = None

    device: Annotated[str, Choice(("cpu", "cuda"))] = "cpu"
    ranks_per_gpu: Annotated[int, Whole(1, 2**16, 2)] = 1
    threads: Annotated[int | None, Whole(1, 2**12, 1)] = None
    pin: Annotated[str, Choice(("cores", "numa", "none"))] = "cores"
    timeout_s: Annotated[float, Number(1, 1e8, 300)] = 300.0
    stall_s: Annotated[float, Number(0, 1e8, 60)] = 60.0
    restarts: Annotated[int, Whole(0, 10**6, 3)] = 0
    dtype: Annotated[str, Choice(("float32", "float64"))] = "float32"
    precision: Annotated[str, Choice(("full", "bfloat16", "float16"))] = "full"
    loss_scale: Annotated[float | None, Number(1, 2**64, 65536)] = None
    boundary_dtype: Annotated[str | None, Choice(("bfloat16",))] = None
    transport: Annotated[str, Choice(TRANSPORTS)] = "auto"
    interface: Annotated[str | None, Text("a network interface", "eth0", form(r"\S+"))] = None
    master_addr: Annotated[
        str | None, Text("a host name or an address", "host-0", form(r"\S+"))
    ] = None
    master_port: Annotated[int | None, Whole(1, 2**16 - 1, 29500)] = None
    max_run: Annotated[
        str | None, Text("a time of days, hours, minutes and seconds", "3h50m", seconds_of)
    ] = None

    print_sbatch: Annotated[bool, Flag()] = False
    nodes: Annotated[int | None, Whole(1, 2**16, 2)] = None
    time_limit: Annotated[
        str,
        Text(
            "a time limit of Slurm",
            "24:00:00",
            form(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}"),
        ),
    ] = "24:00:00"

    dry_run: Annotated[bool, Flag()] = False
    print_schedule: Annotated[bool, Flag()] = False
    json: Annotated[bool, Flag()] = False
    quiet: Annotated[bool, Flag()] = False

    def __post_init__(self) -> None:
        for name, (limit, optional) in limits_of(Settings).items():
            value = getattr(self, name)
            if not (value is None and optional) and (fault := refusal(limit, name, value)):
                raise SettingsError(*fault)
        self._check_schedule()
        self._check_trace()
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
            lacks = "no checkpoint is" if not self.save_every else "no evaluation is"
            raise SettingsError(
                f"--keep-best {self.keep_best}, but {lacks} made.",
                "--save-every 100" if not self.save_every else "--eval-batches 8",
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

    Raises SettingsError for an unknown option or a value that is not legal.
    """
    limits = limits_of(Settings)
    if name not in limits:
        raise SettingsError(
            f"{place}: {name} is not an option of asyncpipe-train.",
            did_you_mean(name, limits, f"Options: {', '.join(limits)}."),
        )
    if name == "trust":
        raise SettingsError(
            f"{place}: whose code is run is said on the command line, not in a file.", "--trust"
        )
    limit = limits[name].limit
    if fault := refusal(limit, name, value, place):
        raise SettingsError(*fault)
    if isinstance(limit, Several):
        return tuple(map(float, value))
    return float(value) if isinstance(limit, Number) else value
