"""RunConfig -> the samples of each micro-batch of a step, and the number of replicas.

All micro-batches have the same size, except that the last one is smaller if the samples leave a
remainder. The first replica has the first micro-batches of every step, and so on, so a
step is the same as that of one pipeline with all micro-batches.

A replica is a copy of the whole pipeline with its own micro-batches. `ddp` is replicas of a
pipeline of one rank, which has all stages. A plan may have replicas of single stages instead; then
their number is not an option.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ..errors import PlanError
from ..plan.plan import Plan
from ..plan.sharing import GRADIENTS
from ..schedule.interleaved import REPLICATED
from ..schedule.schedule import Numbering, Schedule
from .learning_options import DDP
from .settings import RunConfig, Settings, SettingsError


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The samples of each micro-batch of a step, in all replicas. A run that is resumed after
    `first_step` steps begins at `first_sample`, whatever the batch was before.

    In a last step with fewer samples, the first micro-batches have their usual size, the next one
    has the remaining samples, and those after it are empty and are left out.

    short, last: the micro-batches of such a step, and its number, counted from 0.
    unit: the samples of the first steps, if steps grow during a run (`--grow batch`); otherwise 0.

    >>> batch = StepBatch((8, 8, 8, 6), replicas=2)
    >>> batch.samples, batch.is_even, batch.place(5)
    (30, False, (38, 8))
    >>> ending = batch.ending_with(19, last=2)
    >>> ending.sizes_of(1, step=2), ending.position(3), ending.place(10)
    ((3, 0), 79, (76, 3))
    >>> batch.sizes_of(replica=1), batch.first_of(step=2, replica=1)
    ((8, 6), 10)
    >>> grown = StepBatch((8, 8, 8, 8), replicas=2, first_step=5, first_sample=80, unit=16)
    >>> grown.growth, [grown.counted(step) for step in (5, 6, 7)]
    (2.0, [5, 7, 9])
    """

    sizes: tuple[int, ...]
    replicas: int = 1
    first_step: int = 0
    first_sample: int = 0
    short: tuple[int, ...] = ()
    last: int = -1
    unit: int = 0

    @classmethod
    def of(cls, config: RunConfig, *, first_step: int = 0, first_sample: int = 0) -> StepBatch:
        batch = cls.divided(
            config.micro_batches,
            config.micro_batch_size,
            config.global_batch_size,
            replicas=config.pipelines,
        )
        batch = replace(batch, first_step=first_step, first_sample=first_sample)
        return batch.ending_with(config.left_over, config.steps - 1)

    @classmethod
    def divided(
        cls,
        micro_batches: int,
        micro_batch_size: int,
        global_batch_size: int | None,
        *,
        replicas: int = 1,
    ) -> StepBatch:
        """As the options of these names; None stands for micro-batches that are all equal."""
        count = micro_batches * replicas
        total = global_batch_size or count * micro_batch_size
        equal = (micro_batch_size,) * (count - 1)
        return cls((*equal, total - sum(equal)), replicas)

    def ending_with(self, samples: int, last: int) -> StepBatch:
        """The same with only `samples` in the step `last`; 0 leaves that step like the others."""
        if not samples:
            return self
        ends = zip(self.sizes, accumulate(self.sizes), strict=True)
        short = (min(size, max(0, samples + size - end)) for size, end in ends)
        return replace(self, short=tuple(short), last=last)

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    @property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    @property
    def in_replica(self) -> int:
        """The micro-batches of a step in each replica."""
        return len(self.sizes) // self.replicas

    def sizes_at(self, step: int) -> tuple[int, ...]:
        """The samples of each micro-batch of a step, counted from 0."""
        return self.short if step == self.last else self.sizes

    def sizes_of(self, replica: int, step: int = 0) -> tuple[int, ...]:
        """The part of a replica."""
        first = replica * self.in_replica
        return self.sizes_at(step)[first : first + self.in_replica]

    def first_of(self, step: int, replica: int) -> int:
        """The number of a replica's first micro-batch of a step, both counted from 0."""
        return step * len(self.sizes) + replica * self.in_replica

    def numbering(self, first: int) -> Numbering:
        """The numbers of the micro-batches of a replica, the first of which has the number
        `first`."""
        return Numbering(first, self.in_replica, len(self.sizes))

    def place(self, micro_batch: int) -> tuple[int, int]:
        """The position of the first sample of a micro-batch, counted over all steps, and how many
        it has."""
        step, index = divmod(micro_batch, len(self.sizes))
        sizes = self.sizes_at(step)
        return self.position(step) + sum(sizes[:index]), sizes[index]

    def position(self, step: int) -> int:
        """The samples that were consumed when so many steps were made."""
        fewer = self.samples - sum(self.short) if 0 <= self.last < step else 0
        return self.first_sample + (step - self.first_step) * self.samples - fewer

    @property
    def growth(self) -> float:
        """How many times the samples of the first steps a step has."""
        return self.samples / self.unit if self.unit else 1.0

    def counted(self, step: int) -> int:
        """The steps that would have been made so far, had none grown: where the learning rate and
        events of freezing are in a run, which follow its samples."""
        return max(0, self.position(step)) // self.unit if self.unit else step


@dataclass(frozen=True, slots=True)
class EvaluationBatch:
    """The micro-batches of an evaluation. All have one size, except that the last one is smaller if
    the samples leave a remainder and the model accepts it.

    size: the samples of a micro-batch
    count: the number of micro-batches
    samples: the samples that are evaluated
    length: the samples that there are
    is_free: True if a micro-batch may be smaller

    >>> whole = EvaluationBatch.of(10, 4)
    >>> whole.count, whole.samples, whole.place(2), whole.sizes(whole.range_of(1, 2))
    (3, 10, (8, 2), (4, 2))
    >>> EvaluationBatch.of(10, 4, is_free=False).samples, EvaluationBatch.of(10, 4, most=1).samples
    (8, 4)
    """

    size: int
    count: int
    samples: int
    length: int
    is_free: bool

    @classmethod
    def of(
        cls, length: int, size: int, *, most: int | None = None, is_free: bool = True
    ) -> EvaluationBatch:
        """The whole data of `length` samples, or at most so many micro-batches."""
        count = -(-length // size) if is_free else max(length // size, min(length, 1))
        count = count if most is None else min(count, most)
        return cls(size, count, min(count * size, length), length, is_free)

    def place(self, micro_batch: int) -> tuple[int, int]:
        """The first sample of a micro-batch, and how many it has."""
        first = micro_batch * self.size
        return first, min(self.size, self.length - first) if self.is_free else self.size

    def range_of(self, replica: int, replicas: int) -> range:
        """The micro-batches of a replica: an equal part, one after the other."""
        return range(
            self.count * replica // replicas,
            self.count * (replica + 1) // replicas,
        )

    def sizes(self, micro_batches: range) -> tuple[int, ...]:
        """The samples of each of these micro-batches."""
        return tuple(self.place(micro_batch)[1] for micro_batch in micro_batches)


def uses_symbol(plan: Plan, symbol: str) -> bool:
    """True if a size of an input depends on this symbol."""
    return any(
        isinstance(size, str) and symbol in size for spec in plan.inputs for size in spec.shape
    )


def in_words(replicas: int) -> str:
    """`1 replica` or `2 replicas`."""
    return f"{replicas} replica{'s' if replicas > 1 else ''}"


def stage_replicas(plan: Plan, settings: Settings) -> tuple[tuple[int, ...], ...]:
    """The ranks of each stage where the plan has single stages on several and these are trained;
    () where a pipeline has one of each, as `--replicas` says."""
    has_none = settings.replicas is not None or settings.schedule in ("single", DDP)
    return () if has_none else plan.stage_replicas


def planned_replicas(plan: Plan) -> int:
    """The whole pipelines that the plan has side by side; 1 where single stages are on several
    ranks."""
    counts = {len(stage.ranks) for stage in plan.stages}
    return counts.pop() if len(counts) == 1 else 1


def with_replicas(settings: Settings, plan: Plan) -> Settings:
    """The settings with a number of replicas, by default the plan's, none where it has those of
    single stages; `ddp` becomes so many of `single`, which share the micro-batches out evenly.

    Raises SettingsError where they cannot.
    """
    if ranks_of_stage := stage_replicas(plan, settings):
        _check_stage_replicas(settings, ranks_of_stage)
        return settings
    replicas = settings.replicas or (1 if settings.schedule == "single" else planned_replicas(plan))
    is_alone = replicas * (settings.tensor_parallel or 1) == 1
    if settings.check_replicas and settings.schedule != DDP and is_alone:
        raise SettingsError(
            f"--check-replicas {settings.check_replicas}, but there is 1 replica.",
            "--replicas 2, or leave it out.",
        )
    if settings.schedule != DDP:
        return replace(settings, replicas=replicas)
    if settings.ranks not in (None, 1):
        raise SettingsError(
            f"--ranks {settings.ranks}, but under ddp each process has all stages.",
            f"--replicas {settings.ranks}",
        )
    replicas = settings.replicas or len(plan.stages_of_rank)
    total = settings.micro_batches
    if total is None and settings.global_batch_size and settings.micro_batch_size:
        total = -(-settings.global_batch_size // settings.micro_batch_size)
    total = total or -(-8 // replicas) * replicas
    if total % replicas:
        near = [str(n) for n in (total // replicas * replicas, -(-total // replicas) * replicas)]
        raise SettingsError(
            f"{total} micro-batches cannot be shared out evenly among {replicas} processes.",
            f"--micro-batches {' or '.join(n for n in near if n != '0')}",
        )
    return replace(
        settings, schedule="single", ranks=None, replicas=replicas, micro_batches=total // replicas
    )


def with_zero(settings: Settings, plan: Plan) -> Settings:
    """The settings with what replicas share out: by default what the plan says, nothing where there
    is one. Raises SettingsError where replicas have nothing to share out, or no way to."""
    of_stages = stage_replicas(plan, settings)
    has_one = not of_stages and (settings.replicas or 1) == 1
    if settings.zero is None:
        settings = replace(settings, zero=0 if has_one else plan.setting.zero)
    if settings.zero and has_one and not settings.elastic:
        raise SettingsError(
            f"--zero {settings.zero} shares optimizer state out over replicas, but there is 1 "
            "replica.",
            "--replicas 2, or leave it out.",
        )
    if settings.zero == GRADIENTS and of_stages:
        raise SettingsError(
            f"--zero {settings.zero} sums the gradients of every micro-batch over all replicas, "
            f"but the plan has {describe_stages(of_stages)}, which have micro-batches of their "
            "own.",
            "--zero 1",
        )
    return settings


def _check_stage_replicas(settings: Settings, ranks_of_stage: Sequence[Sequence[int]]) -> None:
    """Raises SettingsError for what single stages with replicas cannot be combined with."""
    has = describe_stages(ranks_of_stage)
    cure = "--replicas 1 for one rank a stage"
    if settings.schedule not in REPLICATED and not settings.schedule_file:
        raise SettingsError(
            f"the plan has {has}, but single stages have no replicas under {settings.schedule}.",
            f"--schedule {' or '.join(REPLICATED)}, or {cure}.",
        )
    ranks = sum(map(len, ranks_of_stage))
    if settings.ranks not in (None, ranks):
        raise SettingsError(
            f"--ranks {settings.ranks}, but the plan has {has}: {ranks} ranks.",
            f"Leave it out, or {cure}.",
        )


def describe_stages(ranks_of_stage: Sequence[Sequence[int]]) -> str:
    """The stages that are on several ranks.

    >>> describe_stages([[0, 1], [2], [3, 4, 5]])
    'stage 0 on ranks 0-1, stage 2 on ranks 3-5'
    """
    parts = []
    for stage, ranks in enumerate(ranks_of_stage):
        in_a_row = list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
        shown = f"{ranks[0]}-{ranks[-1]}" if in_a_row else ", ".join(map(str, ranks))
        parts += [f"stage {stage} on ranks {shown}"] * (len(ranks) > 1)
    return ", ".join(parts)


def check_ranks(
    plan: Plan, schedule: Schedule, started: int, replicas: int = 1, tensor_ranks: int = 1
) -> None:
    """Raises PlanError unless the number of started ranks is the one that the schedule needs."""
    stages, in_pipeline = len(plan.stages), len(schedule.ranks)
    wanted = in_pipeline * tensor_ranks * replicas
    if started == wanted:
        return
    if schedule.name == "single" and wanted == 1:
        raise PlanError(
            f"--schedule single runs all {stages} stages in 1 process, {started} ranks were "
            "started.",
            "Start it without a launcher, or choose --schedule 1f1b, or ddp.",
        )
    were = "1 rank was" if started == 1 else f"{started} ranks were"
    on = f" on {in_pipeline} ranks under {schedule.name}" if in_pipeline != stages else ""
    times = f" × {tensor_ranks} tensor ranks" if tensor_ranks > 1 else ""
    times += f" × {in_words(replicas)}" if replicas > 1 else ""
    times += f" = {wanted} ranks" if times else ""
    ways = [f"Use {wanted} ranks"]
    if schedule.replicas:
        ways += [f"--replicas {started // stages}"] * (started % stages == 0)
    elif started % (in_pipeline * tensor_ranks) == 0:
        ways.append(f"--replicas {started // (in_pipeline * tensor_ranks)}")
    elif tensor_ranks > 1 and started == in_pipeline * replicas:
        ways.append("--tensor-parallel 1")
    elif replicas > 1:
        ways.append(f"another multiple of {in_pipeline} with --replicas")
    if started > 1 and replicas * tensor_ranks == 1:
        again = ("asyncpipe-partition", "--model", plan.model, "--stages", str(started))
        ways.append(f"partition again: {shlex.join(again)}")
    elif started == 1:
        ways.append("--schedule single")
    raise PlanError(
        f"the plan has {stages} stages{on}{times}, {were} started.", f"{', or '.join(ways)}."
    )


def as_started(settings: Settings, started: int) -> Settings:
    """The settings for so many started ranks: as many replicas of `ddp`, if none were asked for."""
    if settings.schedule != DDP or settings.replicas is not None:
        return settings
    return replace(settings, replicas=started)
