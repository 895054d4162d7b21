"""One run of a comparison: its method, its losses and its simulated time.

Losses: the `StageTrainer` of asyncpipe-train trains all stages in this process in the order of the
schedule, so the weights are bitwise the same. Evaluations leave the pipeline full: each stage
copies its weights after the step to evaluate, and the copies of all stages are evaluated together.

Time: the end of each optimizer step with one rank for each stage, by the plan's costs without the
optimizer's. Synchronous steps are those of 1f1b with a flush, one after the other. The start and
the end of an asynchronous segment are simulated; the steps in between follow at the pace reached
by then.

Method: a text such as `stash:muon,lr=0.003`.

sync                        synchronous, the optimizer and learning rates of the command
none, stash, ..             asynchronous, with that --staleness (several joined by +)
stash:muon                  with its own optimizer
stash:adamw,lr=0.001        and with its own options of asyncpipe-train
stash,sync-start=10%        the first tenth of the steps synchronous; sync-end=10%: the last
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config.option_files import checked
from ..config.resolve import costs_at_sizes
from ..config.segments import RunSegment, segments
from ..config.settings import RunConfig, Settings, SettingsError
from ..distributed.process_groups import SharedStore, World
from ..executor.instrumented import Activities
from ..executor.precision import AS_PLANNED
from ..formatting import did_you_mean
from ..known_names import TRAIN
from ..launch.job import make_job
from ..monitoring.gather import RankFigures
from ..optimizers.facts import OPTIMIZERS
from ..options import options_of
from ..plan.forecast import forecast_step
from ..plan.plan import Plan
from ..rng import drawing_from
from ..schedule.builders import make_schedule
from ..staleness.compose import AUTO, parse
from ..training.clipping import LossError
from ..training.read_ahead import readers_end
from ..training.run_summary import with_transfers_of_run
from ..training.sample_trainer import StageTrainer
from ..training.setup import Job, agree
from ..training.stages import make_executor


@dataclass(frozen=True, slots=True)
class Curve:
    """The losses of a run."""

    steps: tuple[int, ...]
    """The steps after which it was evaluated."""
    evaluated: tuple[float, ...]
    """The loss of the evaluation data at each."""
    trained: tuple[float, ...]
    """The mean training loss since the evaluation before."""
    end: str = ""
    """The reason why it ended early; "" if it did not."""

    @property
    def last(self) -> float:
        """The last loss of the evaluation data; infinite for a run that ended early."""
        return math.inf if self.end or not self.evaluated else self.evaluated[-1]


def train_alone(settings: Settings, folder: Path, code: Mapping[str, str] | None = None) -> Curve:
    """Trains a run and evaluates it after every `eval_every` steps and at the end.

    Prepared data is written to `folder`; `code` is as for make_job. A loss of NaN or inf ends the
    run, and its curve says so. Raises AsyncPipeError if settings and plan do not fit.
    """
    alone = replace(settings, tensor_parallel=1)
    if settings.is_async:
        alone = replace(alone, ranks=1, replicas=1)
    with _threads(settings.threads), drawing_from(settings.seed, "run"), readers_end():
        return _Trial(make_job(alone, folder, code)).train()


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Inside, torch computes with so many threads; None: as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Trial:
    """One run: its stages, their training, and its losses so far."""

    def __init__(self, job: Job) -> None:
        world = World()
        self._config = job.config
        setup = agree(job, world, Activities(), SharedStore(world))
        self._trainer = StageTrainer(setup, self._stepped, after_step=self._keep_weights)
        stages = self._trainer.stages
        self._modules, self._executor = stages.modules, stages.executor
        self._evaluation = self._trainer.make_evaluator(Activities())
        self._evaluated = {j: deepcopy(module) for j, module in self._modules.items()}
        self._evaluating = make_executor(setup, self._evaluated, "none")
        self._losses: list[float] = []
        self._points: list[tuple[int, float, float]] = []
        self._kept: dict[int, dict[int, _State]] = defaultdict(dict)
        self._is_synchronous = False

    def train(self) -> Curve:
        """Trains in the segments of asyncpipe-train without evaluations."""
        end = ""
        try:
            for segment in segments(replace(self._config, eval_every=0)):
                self._is_synchronous = segment.synchronous
                self._trainer.run(segment, self._trainer.stages.schedule_of(segment))
        except LossError as error:
            end = error.what
        steps, evaluated, trained = zip(*self._points, strict=True) if self._points else ((),) * 3
        return Curve(steps, evaluated, trained, end)

    def _stepped(self, figures: RankFigures) -> None:
        """Called when all stages have made a step."""
        self._losses.append(figures.loss)

    def _keep_weights(self, stage: int) -> None:
        """Called after a stage's step; stages that step together have stepped when all have."""
        step, every = self._executor.versions[stage], self._config.eval_every
        if step != self._config.steps and (not every or step % every):
            return
        weights = self._kept[step]
        # Autograd must not see a change to the weights that micro-batches in flight have read.
        with self._executor.weights[stage].unseen_by_autograd():
            with self._executor.binders[stage].eval_weights():
                weights[stage] = _copied(_state(self._modules[stage]))
        if len(weights) < len(self._modules):
            return
        if self._is_synchronous:
            weights.update((j, _state(module)) for j, module in self._modules.items())
        self._evaluate(self._kept.pop(step), step)

    @torch.no_grad()
    def _evaluate(self, weights: Mapping[int, _State], step: int) -> None:
        for stage, state in weights.items():
            for own, trained in zip(_state(self._evaluated[stage]), state, strict=True):
                own.copy_(trained)
        since = self._losses[self._points[-1][0] if self._points else 0 : step]
        loss = self._evaluation(self._evaluating, step).loss
        self._points.append((step, loss, sum(since) / len(since)))


_State = Sequence[Tensor]
"""All parameters and buffers of a stage."""


def _state(module: nn.Module) -> _State:
    return [*module.parameters(), *module.buffers()]


def _copied(state: _State) -> _State:
    return [tensor.detach().clone() for tensor in state]


_FLUSHED = "1f1b"
_PACE = 4
"""Steps whose mean duration is the pace."""


def step_ends_ms(job: Job) -> tuple[float, ...]:
    """Milliseconds from the start until all stages have made step 1, 2, ..."""
    config = job.config
    sized = costs_at_sizes(job.plan, job.planned)
    plan = with_transfers_of_run(sized, job.planned, AS_PLANNED)
    ends: list[float] = []
    known: dict[RunSegment, list[float]] = {}
    for segment in segments(replace(config, eval_every=0)):
        alike = replace(segment, steps=range(len(segment.steps)))
        if alike not in known:
            known[alike] = _ends(plan, config, alike)
        start = ends[-1] if ends else 0.0
        ends += [start + end for end in known[alike]]
    return tuple(ends)


def _ends(plan: Plan, config: RunConfig, segment: RunSegment) -> list[float]:
    if segment.synchronous:
        return [forecast_step(plan, _FLUSHED, segment.micro_batches).step_ms]
    steps, stages = len(segment.steps), len(plan.stages)
    # By then every stage has been full for a while, and all stages are as far.
    filled = 2 + -(-4 * stages // segment.micro_batches)
    simulated = min(steps, 2 * filled + _PACE)
    schedule = make_schedule(
        config.schedule,
        stages=stages,
        micro_batches=segment.micro_batches * simulated,
        step_every=segment.micro_batches,
        ahead=config.ahead,
        staleness_cap=config.staleness_cap,
    )
    ends = [0.0] * simulated
    for event in forecast_step(
        plan, schedule, segment.micro_batches, steps=simulated
    ).timeline.events:
        if event.action.kind == "S":
            ends[event.action.index - 1] = max(ends[event.action.index - 1], event.end_ms)
    left_out = steps - simulated
    if not left_out:
        return ends
    middle = filled + _PACE
    pace_ms = (ends[middle - 1] - ends[filled - 1]) / _PACE
    even = [ends[middle - 1] + pace_ms * (1 + step) for step in range(left_out)]
    return [*ends[:middle], *even, *(end + pace_ms * left_out for end in ends[middle:])]


SYNC = "sync"


@dataclass(frozen=True, slots=True)
class ComparedMethod:
    """A method of a comparison."""

    staleness: str
    """`sync` or the names of staleness methods."""
    optimizer: str | None = None
    """Its own optimizer; None for those of the command."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Its own options."""

    @property
    def is_sync(self) -> bool:
        return self.staleness == SYNC

    def __str__(self) -> str:
        """The text that `read_method` reads."""
        written = (f",{name.replace('_', '-')}={_written(own)}" for name, own in self.own.items())
        optimizer = f":{self.optimizer}" if self.optimizer else ""
        return "".join([self.staleness, optimizer, *written])


def read_method(text: str) -> ComparedMethod:
    """The method of a text. Raises SettingsError or ScheduleError for unknown names.

    >>> read_method("stash:muon,lr=0.003,sync-start=10%")
    ComparedMethod(staleness='stash', optimizer='muon', own={'lr': 0.003, 'sync_start': '10%'})
    >>> str(read_method("stash:nadam, betas=0.99/0.999"))
    'stash:nadam,betas=0.99/0.999'
    """
    head, *options = (part.strip() for part in text.split(","))
    staleness, colon, optimizer = head.partition(":")
    if staleness not in (SYNC, AUTO):
        parse(staleness)
    if colon and optimizer not in OPTIMIZERS:
        raise SettingsError(
            f"{text}: {optimizer!r} is not an optimizer.", _one_of(optimizer, OPTIMIZERS)
        )
    return ComparedMethod(
        staleness, optimizer or None, dict(_option(text, option) for option in options)
    )


def _option(text: str, option: str) -> tuple[str, Any]:
    key, _, value = option.partition("=")
    name = key.strip().replace("-", "_")
    own = {known: option for known, option in options_of(Settings).items() if option.of_method}
    if name not in own:
        names = [known.replace("_", "-") for known in own]
        raise SettingsError(
            f"{text}: {key!r} is not an option of a method.",
            TRAIN.meant(key, names, f"Choose {', '.join(names)}."),
        )
    return name, checked(name, own[name].limit.read(value.strip()), text)


def _one_of(word: str, legal: Any) -> str:
    return did_you_mean(word, legal, f"Choose {', '.join(legal)}.")


def _written(value: Any) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return "/".join(part if isinstance(part, str) else f"{part:g}" for part in parts)
