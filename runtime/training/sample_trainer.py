"""The setup of a rank -> its stages, trained on the samples of the run's data.

Runs and comparisons train with the same `StageTrainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import nn

from ..config.batch_layout import EvaluationBatch, StepBatch, uses_symbol
from ..config.segments import RunSegment, segments
from ..config.settings import RunConfig
from ..control.metrics import Metric
from ..data.streams import UNKNOWN_LENGTH, StreamSamples
from ..data.task import SampleOrder
from ..data.text import check_vocabulary
from ..errors import DataError
from ..executor.instrumented import Activities, observed_feed
from ..executor.run import needed_inputs
from ..monitoring.gather import RankFigures
from ..schedule.schedule import Schedule
from .batches import Data, Feed, MicroBatches, feed_nothing, of_one_size
from .data_consistency import Agreement
from .evaluation import Evaluator
from .read_ahead import ReadAhead, Workers
from .setup import Setup
from .stages import Probe, TrainedStages
from .stream_feed import StreamFeed

_AHEAD = 2
"""The micro-batches that a worker reads ahead, as torch's DataLoader does."""


_STREAM = "stream"
"""The key of the place in a stream in a checkpoint."""


class StageTrainer:
    """The stages of a rank, and the data that trains them.

    stages: the stages, and what runs and steps them.
    batch: the layout of a step's samples.
    agreement: the data that all ranks agree on.

    Arguments:
    report: called with the metrics of a step once all stages of the rank have made it.
    after_step: called with each stage after its step.
    """

    def __init__(
        self,
        setup: Setup,
        report: Callable[[RankFigures], None],
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        job, world, data, checkpoint = setup.job, setup.world, setup.data, setup.checkpoint
        config, plan = job.config, job.plan
        self._setup, self._config, self._plan = setup, config, plan
        has_criterion = config.criterion is not None
        own = world.grid.stages_of(world.rank, setup.schedule)
        self._reading = [
            stage for stage in own if needed_inputs(plan, (stage,), criterion=has_criterion)
        ]
        self.batch = setup.batch
        order = data.order(config.seed) if data else None
        self._samples = self._training_feed(order)
        if isinstance(self._samples, ReadAhead):
            self._samples.start()  # a fork keeps what memory holds: stages are loaded afterwards
        self._feed = self._observed(self._samples, setup.activities)
        self.stages = TrainedStages(setup, report, after_step)
        if self.stages.freezing is not None and self.stages.freezing.observed_blocks:
            self.stages.probe = Probe(self._probe_feed(order), plan.sizes)
        self.agreement = Agreement(
            world,
            data,
            order,
            first=checkpoint.facts.samples if checkpoint else 0,
            fields=needed_inputs(plan, range(len(plan.stages)), criterion=has_criterion),
            own_fields=setup.fields,
        )
        if setup.cache is not None and self.agreement.length != UNKNOWN_LENGTH:
            setup.cache.samples = self.agreement.length + self.agreement.evaluation_length

    def state(self) -> dict[str, Any]:
        """The place in a stream of samples, as JSON; empty if there is none."""
        state = self._samples.state if isinstance(self._samples, ReadAhead) else None
        return {} if state is None else {_STREAM: state}

    def close(self) -> None:
        """Ends the processes that read data."""
        if isinstance(self._samples, ReadAhead):
            self._samples.close()

    def describe_resumption(self) -> str:
        """A note on samples of a stream that are read again; "" if none are."""
        data, checkpoint = self._setup.data, self._setup.checkpoint
        is_stream = data is not None and isinstance(data.train, StreamSamples)
        if not is_stream or checkpoint is None or _STREAM in checkpoint.facts.trainer:
            return ""
        return (
            f"the stream has no state_dict: its first {checkpoint.facts.samples:,} samples are "
            "read and skipped"
        )

    def _observed(self, feed: MicroBatches, activities: Activities) -> MicroBatches:
        """The feed with its time recorded, and with its sizes checked where ranks need them."""
        if len(self._setup.schedule.ranks) > 1:
            feed = of_one_size(feed, self._plan)
        return observed_feed(feed, activities)

    def _training_feed(self, order: SampleOrder | None) -> MicroBatches:
        """The training micro-batches for this rank's stages."""
        setup, config = self._setup, self._config
        data, fields = setup.data, setup.fields
        if data is None:
            return feed_nothing
        workers = workers_of(config, data)
        if not isinstance(data.train, StreamSamples):
            feed = Feed(data.train, order, self.batch, fields, seed=data.seed, dims=data.dims)
            return ReadAhead(feed, self._training_numbers, workers) if workers.count else feed
        stream = StreamFeed(
            data.train,
            self.batch,
            fields,
            seed=config.seed,
            dims=data.dims,
            first=self.batch.first_of(setup.start, 0),
            place=setup.checkpoint.facts.trainer.get(_STREAM) if setup.checkpoint else None,
        )
        return ReadAhead(stream, self._training_numbers, workers)

    def _probe_feed(self, order: SampleOrder | None) -> MicroBatches:
        """The first micro-batch of the data in all replicas and after each resumption. Raises
        DataError for a stream, which gives it once."""
        setup, data = self._setup, self._setup.data
        if data is None:
            return feed_nothing
        if order is None:
            raise DataError(
                f"--freeze {self._config.freeze} compares the outputs for the same samples at each "
                f"event, but --data {data.source} is a stream, which gives them once.",
                "--freeze gradnorm:1/3, or schedule:1/3",
            )
        batch = StepBatch((self._config.micro_batch_size,))
        feed = Feed(data.train, order, batch, setup.fields, seed=data.seed, dims=data.dims)
        return cache(feed)

    def _evaluation_feed(self, batch: EvaluationBatch) -> MicroBatches:
        """The evaluation micro-batches for this rank's stages."""
        setup, data = self._setup, self._setup.data
        if data is None or data.evaluation is None:
            return feed_nothing
        own = batch.range_of(setup.world.replica, setup.world.replicas)

        def numbers() -> Iterator[int]:
            return (number for number in own if self._reads(number - own.start))

        feed = Feed(data.evaluation, None, batch, setup.fields, seed=data.seed, dims=data.dims)
        workers = workers_of(self._config, data)
        return ReadAhead(feed, numbers, workers) if workers.count else feed

    def _training_numbers(self) -> Iterator[int]:
        """The micro-batches that this rank reads until the end of the run."""
        replica = self._setup.world.replica
        for segment in segments(self._config, self._setup.start):
            numbers = self.batch.numbering(self.batch.first_of(segment.steps.start, replica))
            for index in range(len(segment.steps) * self._config.micro_batches):
                number = numbers.number(index)
                if self._reads(index) and self.batch.place(number)[1]:
                    yield number

    def _reads(self, index: int) -> bool:
        """True if a stage of this rank reads data of a micro-batch of the schedule."""
        world, schedule = self._setup.world, self._setup.schedule
        rank = world.grid.rank_of(world.rank)
        return any(schedule.rank_of(stage, index) == rank for stage in self._reading)

    def make_evaluator(self, activities: Activities) -> Evaluator:
        """Evaluates the stages' weights on the evaluation data."""
        config = self._config
        batch = EvaluationBatch.of(
            self.agreement.evaluation_length,
            config.micro_batch_size,
            most=config.eval_batches,
            is_free=uses_symbol(self._plan, "batch"),
        )
        return Evaluator(
            self._plan,
            self._setup.job.task,
            self._observed(self._evaluation_feed(batch), activities),
            self._setup.world,
            activities,
            schedule=self._setup.schedule,
            batch=batch,
            metric=Metric(self._plan, config) if config.metric else None,
        )

    def run(
        self,
        segment: RunSegment,
        schedule: Schedule,
        may: Callable[[int], bool] | None = None,
    ) -> None:
        """Trains the steps of a segment; `may` is asked before each step of several."""
        world, steps, batch = self._setup.world, segment.steps, self.batch
        is_short = batch.last in steps
        of_step = batch.sizes_of(world.replica, steps.start)
        sizes = [{**self._plan.sizes, "batch": size} for size in of_step]
        for _ in self.stages.run(
            segment,
            schedule,
            self._feed,
            batch,
            batch.first_of(steps.start, world.replica),
            sizes=sizes * len(steps) if is_short or not batch.is_even else None,
            step_samples=batch.samples if world.replicas > 1 or is_short else None,
            may=may if len(steps) > 1 else None,
        ):
            pass


def workers_of(config: RunConfig, data: Data) -> Workers:
    """The workers that read data: those that the options ask for, or those of the DataLoader that
    the user's function returned."""
    count, ahead, begin = config.workers, config.prefetch, None
    if (loader := data.loader) is not None:
        count = loader.num_workers if count is None else count
        ahead = loader.prefetch_factor if ahead is None else ahead
        begin = loader.worker_init_fn
    if isinstance(data.train, StreamSamples):
        # One process reads a stream; a loader's own workers read it where it has some.
        has_own = loader is not None and loader.num_workers > 0
        count, begin = 0 if has_own else min(count or 0, 1), None
    return Workers(count or 0, ahead or _AHEAD, begin)


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
