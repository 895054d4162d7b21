"""A generated folder -> this rank's part of a pipeline, for a training loop of the user's own.

    pipe = asyncpipe.Pipeline("generated_models/gpt2_4p", schedule="1f1b", micro_batches=8)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-4)
    for batch in loader:
        result = pipe.step(batch, optimizer=optimizer)

Every rank runs the same loop over the same batches. asyncpipe-train trains with the same object, in
segments of steps whose samples it reads itself.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Unpack
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..config.batch_layout import StepBatch
from ..config.freezing_options import events_of
from ..config.segments import RunSegment, segments
from ..config.settings import SettingsError
from ..data.given import GivenBatch, split_batch
from ..data.streams import UNKNOWN_LENGTH
from ..data.task import input_dtypes
from ..distributed.calls import Calls
from ..distributed.process_groups import SharedStore, leave
from ..errors import DataError
from ..executor.instrumented import Activities
from ..executor.loading import load_unused
from ..executor.run import Criterion
from ..formatting import kind_of
from ..monitoring.gather import RankFigures
from ..process import keep_freed_memory
from .checkpointing import Stopping
from .clipping import clip_all
from .evaluation import forward_schedule
from .given_batches import (
    EvalResult,
    Evaluated,
    GivenFeed,
    StepResult,
    check_alike,
    gather_outputs,
    shared_loss,
)
from .joining import PipelineKeywords, joined_job, own_world
from .own_optimizer import OwnOptimizer, check_has_optimizer
from .own_state import full_state, load_own, loop_facts, save_own
from .replica_gradients import first_buffers
from .setup import agree, with_cache
from .stages import TrainedStages

_NUMBERS = count()  # of pipelines in this process, the same on all ranks


class Pipeline(TrainedStages):
    """This rank's stages, and what runs and steps them.

    folder: the generated folder.
    loss: computes the loss of a model that returns none, as a function of its output and the
        target, or a name as of --criterion.
    trust: the folder's code may run although it was generated elsewhere.
    options: options of asyncpipe-train by name: schedule, micro_batches, ranks, replicas,
        staleness, clip, freeze, precision, device, transport, seed, .. With `optimizer` and `lr`,
        `step` and `stream` use that built-in optimizer, whose schedule of the learning rate ends
        after `steps`.

    The rank, and the address of rank 0, come from the environment, as torchrun, srun and mpirun set
    it, or from a process group that exists already; without either this process runs all stages.
    Batches are the same on all ranks. Calls are collective, but for those that say otherwise.

    Raises AsyncPipeError where folder, options and ranks do not fit, before anything runs.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        loss: Criterion | str | None = None,
        trust: bool = False,
        **options: Unpack[PipelineKeywords],
    ) -> None:
        self._owns_groups = not dist.is_initialized()
        job = joined_job(folder, loss, options)
        world = own_world(job, trust=trust)
        torch.set_num_threads(world.machine.threads)
        keep_freed_memory(few=job.config.zero > 1)
        self._number = next(_NUMBERS)
        board = SharedStore(world, f"pipeline {self._number}")
        given = None if isinstance(loss, str) else loss
        setup = with_cache(agree(job, world, Activities(), board, criterion=given))
        self._calls = Calls(world, board, job.config.patience_s)
        self._own = None if "optimizer" in options else OwnOptimizer(job.plan, job.config)
        super().__init__(setup, self._made_step, own=self._own)
        self.events = events_of(self.config, StepBatch.of(self.config), UNKNOWN_LENGTH)
        self._made: deque[StepResult] = deque()
        self._last = StepResult(0)
        self._steps = self._micro_batches = self._streams = 0
        self._stream: ReferenceType[Generator[StepResult, None, None]] | None = None
        self._unused = (
            load_unused(folder, job.plan, weights=setup.weights) if world.rank == 0 else {}
        )

    @property
    def rank(self) -> int:
        """This process among all ranks."""
        return self._world.rank

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self._world.ranks

    @property
    def steps(self) -> int:
        """The optimizer steps so far."""
        return self._steps

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages under the original model's names. Not collective."""
        return chain.from_iterable(module.named_parameters() for module in self.modules.values())

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages. Not collective."""
        return (parameter for _, parameter in self.named_parameters())

    def step(
        self, batch: Any, *, optimizer: Optimizer | None = None, outputs: bool = False
    ) -> StepResult:
        """One synchronous step on a batch: forward and backward of its micro-batches, and the
        optimizer's step.

        batch: all samples of the step, as the model is called with them: a mapping of its
            arguments, a tuple in their order, or one tensor; a target comes last, or under
            `target`.
        optimizer: any optimizer of torch with parameters of this rank. Without one, and without the
            built-in one, the gradients are left in `.grad` (the mean over the batch; added to those
            that are there), for `clip_grad_norm_` and a step of the loop's own.
        outputs: keep the model's outputs in the result, on the ranks that make them.

        An asynchronous schedule is flushed: `stream` is the way to train without flushes. Raises
        DataError for a batch that does not fit the plan or differs between ranks.
        """
        self._calls.check()
        given = self._split(batch)
        self._use(optimizer, None)
        check_has_optimizer(self.config.zero, self._has_optimizer)
        with self._calls.during(f"step {self._steps + 1}", breaks=True):
            return self._step(given, outputs=outputs)

    def _step(self, given: GivenBatch, *, outputs: bool) -> StepResult:
        world, start = self._world, self._steps
        self._last.verify()
        self.set_probe(given.parts[0])
        self.freeze_due(self._steps)
        in_replica = len(given.parts) // world.replicas
        check_alike(given, start, world, self._calls, has_optimizer=self._has_optimizer)
        own = slice(world.replica * in_replica, (world.replica + 1) * in_replica)
        segment = RunSegment(range(start, start + 1), in_replica, True)
        self.stepper.outputs = {} if outputs else None
        for _ in self.run(
            segment,
            self.schedule_of(segment),
            lambda number: given.parts[number - self._micro_batches],
            StepBatch(given.samples, world.replicas),
            self._micro_batches + own.start,
            sizes=given.sizes[own],
            step_samples=sum(given.samples) if world.replicas > 1 else None,
        ):
            pass
        if self._own is not None:
            self._own.leave_gradients()
        self._steps += 1
        self._micro_batches += len(given.parts)
        self._last = result = self._made.popleft()
        if outputs:
            result.outputs = gather_outputs(self.plan, self.stepper.outputs or {}, given.sizes[own])
        return result

    def stream(
        self,
        batches: Iterable[Any],
        *,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        steps: int | None = None,
    ) -> Iterator[StepResult]:
        """Trains a batch a step, without a flush between the steps of an asynchronous schedule.

        batches: as for `step`, all of one size (DataLoader's drop_last=True). Ranks whose stages
            read no inputs take the first batch alone.
        optimizer: as for `step`; each stage is stepped at its own time. Not optional without the
            built-in one.
        scheduler: stepped after each step of the optimizer; the loop must not step it.
        steps: how many steps to make (default: the number of batches).

        Yields the result of each step in order, when this rank has made it; later steps may be
        under way then. A loop that leaves early, and `flush`, complete those that have begun on any
        rank.
        """
        self._calls.check()
        if steps is None and not hasattr(batches, "__len__"):
            raise DataError(
                f"the number of batches of {kind_of(batches)} is unknown.",
                "Give stream(..., steps=1000).",
            )
        if optimizer is None and self._own is not None:
            raise SettingsError(
                "stream makes the optimizer's steps, but the optimizer is missing.",
                'Give stream(..., optimizer=...), or Pipeline(..., optimizer="adamw", lr=...).',
            )
        self._use(optimizer, scheduler)
        total = len(batches) if steps is None else steps  # type: ignore[arg-type]
        stream = self._streamed(iter(batches), total)
        self._stream = ref(stream)  # so that a loop that leaves it closes it
        return stream

    def flush(self) -> None:
        """Completes the steps that a `stream` has begun, and ends it."""
        if self._stream and (stream := self._stream()):
            stream.close()

    def _streamed(self, batches: Iterator[Any], steps: int) -> Generator[StepResult, None, None]:
        with self._calls.during(f"the stream from step {self._steps + 1}", breaks=True):
            yield from self._stream_steps(batches, steps)

    def _stream_steps(
        self, batches: Iterator[Any], steps: int
    ) -> Generator[StepResult, None, None]:
        world, start = self._world, self._steps
        head = list(islice(batches, min(1, steps)))
        if not head:
            return
        shape = self._split(head[0])
        check_alike(shape, start, world, self._calls, has_optimizer=self._has_optimizer)
        self.set_probe(shape.parts[0])
        feed = GivenFeed(chain(head, batches), self._split, shape, self._micro_batches)
        batch = StepBatch(shape.samples, world.replicas, start)
        self._streams += 1
        gate = Stopping(
            SharedStore(world, f"pipeline {self._number} stream {self._streams}"),
            patience_s=self.config.patience_s,
            signals=(),
        )
        is_left = False
        with gate:
            event_after = self.events.next if self.events else None
            for segment in segments(self.config, start, event_after, start + steps):
                begin, end = segment.steps.start, segment.steps.stop
                if not gate.may(begin + 1):
                    break
                self.freeze_due(self._steps)
                for _ in self._segment(segment, feed, batch, gate):
                    while self._made and not is_left:
                        try:
                            yield self._made.popleft()
                        except GeneratorExit:
                            if sys.is_finalizing():  # no rank can run any more
                                raise
                            is_left = True
                            gate.request("by the loop")
                self._steps = end if gate.last is None else min(gate.last, end)
                self._micro_batches += (self._steps - begin) * len(shape.parts)
                if self._steps < end:
                    break
        self._made.clear()
        if self._own is not None:
            self._own.finish()

    def _segment(
        self, segment: RunSegment, feed: GivenFeed, batch: StepBatch, gate: Stopping
    ) -> Iterator[None]:
        shape, world, begin = feed.shape, self._world, segment.steps.start
        own = len(shape.parts) // world.replicas
        first = self._micro_batches + world.replica * own
        sizes = shape.sizes[world.replica * own : (world.replica + 1) * own]
        yield from self.run(
            segment,
            self.schedule_of(replace(segment, micro_batches=own)),
            feed,
            batch,
            first,
            sizes=sizes * len(segment.steps),
            step_samples=batch.samples if world.replicas > 1 else None,
            may=(lambda step: gate.may(begin + step)) if len(segment.steps) > 1 else None,
        )

    def evaluate(self, batches: Iterable[Any]) -> EvalResult:
        """The mean loss over all samples of these batches, in evaluation mode and without
        gradients; the same on every rank."""
        self._calls.check()
        own, world = [0.0, 0.0, 0.0], self._world
        with self._calls.during("evaluate", breaks=self.ranks > 1):
            for batch in batches:
                given = self._split(batch, even=False)
                done = self._forward(given, world.replica, world.replicas, outputs=False)
                own = [before + each for before, each in zip(own, done.sums, strict=True)]
            own = own if world.tensor_rank == 0 else [0.0] * 3  # the others have the same
            loss, weight, counted, calls = world.sums([*own, self._calls.number])
            self._calls.present.check_sum(calls)
        if not counted:
            raise DataError("evaluate got no batches.", "Give a DataLoader, or a list of batches.")
        return EvalResult(loss / weight if weight else math.nan, int(counted))

    def predict(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The model's output for each batch, in order, in evaluation mode and without gradients: on
        the ranks that make it, as in `StepResult`; None on the others. No target is needed."""
        for batch in batches:
            self._calls.check()
            given = self._split(batch, target=False, even=False)
            with self._calls.during("predict", breaks=self.ranks > 1):
                done = self._forward(given, 0, 1, outputs=True)
            weights = [self.executor.targets.of(part) for part in given.parts]
            yield gather_outputs(self.plan, done.outputs, given.sizes, weights)

    def _forward(self, given: GivenBatch, part: int, parts: int, *, outputs: bool) -> Evaluated:
        """Runs one of several parts of a batch forward; of a small batch it may be empty."""
        first, end = (index * len(given.parts) // parts for index in (part, part + 1))
        done = Evaluated(dict(enumerate(given.samples)), keeps=outputs)
        with first_buffers(self.modules, self._world):
            if first == end:
                return done
            for _ in self.executor.paused(
                forward_schedule(self.plan, self._forward_like, end - first),
                lambda number: given.parts[number],
                observer=done,
                training=False,
                first_micro_batch=first,
                sizes=given.sizes[first:end],
                losses=not outputs,
            ):
                pass
        return done

    def clip_grad_norm_(self, limit: float) -> float:
        """Scales the gradients of all stages so that their common norm is at most `limit`; returns
        the norm before. For gradients that a `step` without an optimizer has left."""
        with self._calls.during("clip_grad_norm_", breaks=False):
            return clip_all(self.plan, self.modules, self._world, limit)

    def state_dict(self, *, full: bool = False) -> dict[str, Tensor]:
        """The weights and buffers of this rank's stages under the original model's names, or a
        tensor rank's parts of them; with `full` those of the whole model, on rank 0 (empty on the
        others).

        Without `full` not collective. The weights are those to evaluate and to save.
        """
        with self.executor.eval_weights():
            own = {
                name: tensor.detach().clone()
                for module in self.modules.values()
                for name, tensor in module.state_dict().items()
            }
        if not full:
            return own
        with self._calls.during("state_dict(full=True)", breaks=False):
            return full_state(self.as_rank(), self._unused)

    def save(
        self, folder: str | Path, *, optimizer: Optimizer | None = None, extra: Any = None
    ) -> None:
        """Writes weights (safetensors, under the original model's names), optimizer state, random
        generators and the number of steps to a new folder, whole or not at all.

        optimizer: the loop's optimizer, by default that of the last step.
        extra: anything that JSON can hold, such as the state of a scheduler; `load` returns it.
        """
        self._calls.check()
        if optimizer is not None:
            self._use(optimizer, None)
        rank = self.as_rank()
        with self._calls.during("save", breaks=False):
            facts = loop_facts(rank, self._steps, self._micro_batches, extra) | self.state()
            save_own(Path(folder), rank, self._unused, facts)

    def load(self, folder: str | Path, *, optimizer: Optimizer | None = None) -> Any:
        """Restores what `save` wrote, also from another number of ranks or another cut of the same
        model; returns `extra`.

        optimizer: the loop's optimizer, whose state is restored too.
        """
        self._calls.check()
        self._use(optimizer, None)
        with self._calls.during("load", breaks=False):
            facts = load_own(Path(folder), self.as_rank())
            self.restore(facts, facts["steps"])
        self._steps, self._micro_batches = facts["steps"], facts["micro_batches"]
        return facts["extra"]

    def close(self) -> None:
        """Ends a stream, and leaves the process groups if this object has created them. Not needed
        at the end of a program."""
        self.flush()
        self._calls.close()
        super().close()
        if self._owns_groups:
            leave()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()

    def _split(self, batch: Any, *, target: bool | None = None, even: bool = True) -> GivenBatch:
        return split_batch(
            self.plan,
            batch,
            self.config.micro_batches * self._world.replicas,
            replicas=self._world.replicas if even else 1,
            target=self.plan.loss is None if target is None else target,
            dtypes=input_dtypes(self.plan, self.config.dtype),
        )

    def _use(self, optimizer: Optimizer | None, scheduler: LRScheduler | None) -> None:
        """Sets the optimizer of the next steps."""
        if self._own is not None:
            self._own.use(optimizer, scheduler, self._steps, list(self.parameters()))
        elif optimizer is not None:
            raise SettingsError(
                f"the pipeline has the built-in optimizer {self.config.optimizer}, and was "
                f"given {kind_of(optimizer)}.",
                "Leave one of them out.",
            )

    @property
    def _has_optimizer(self) -> bool | None:
        """True if the weights of this rank are stepped; None if it has none that train."""
        if not any(parameter.requires_grad for parameter in self.parameters()):
            return None
        return self._own is None or self._own.optimizer is not None

    def _made_step(self, figures: RankFigures) -> None:
        """Called when this rank has completed a step."""
        part = 0.0 if math.isnan(figures.loss) else figures.loss
        self._made.append(shared_loss(int(figures.step), part, self._world.metrics, self._calls))
