"""The parts of a pipeline's run: its options, its inputs, and its program.

A feed is called for whole micro-batches by number. It returns the model inputs that this rank's
stages read; with a criterion outside the model, also the target. An exception in a generated stage
is traced to the line of the stage and the author's line that it was generated from: generated
statements carry that place (`# model.py:34`) at their end or above; a class that stands for several
modules carries it where it is called.
"""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from ..data.task import sizes_of
from ..errors import DataError, PlanError, ScheduleError
from ..plan.plan import Plan
from ..plan.structure import names_in
from ..schedule.schedule import Action, Numbering, Schedule
from ..staleness import VersionPair
from .instrumented import Observer, RunRecorder
from .mailbox import Mailbox, Sizes

if TYPE_CHECKING:
    from .loss_weights import LossWeights

Values = Mapping[str, Tensor]
Feed = Callable[[int], Values]
"""A micro-batch's number -> the model inputs that this rank's stages read, and the `target`."""
Criterion = Callable[[Any, Tensor], Tensor]
"""The model's output in its own structure and the target -> the loss."""
LossOf = Callable[[Values, Values], Tensor]
"""A stage's outputs and the feed's values -> the loss."""

TARGET = "target"
"""The name of the criterion's target in a feed."""


def needed_inputs(plan: Plan, stages: Sequence[int], *, criterion: bool = False) -> tuple[str, ...]:
    """The inputs that a feed must give on a rank with these stages; with `criterion` the target,
    last."""
    read = {name for stage in stages for name in plan.stages[stage].inputs}
    if plan.targets is not None and loss_stage(plan) in stages:
        read.add(plan.targets.input)
    names = tuple(spec.name for spec in plan.inputs if spec.name in read)
    has_target = criterion and plan.loss is None and loss_stage(plan) in stages
    return (*names, TARGET) if has_target else names


def output_names(plan: Plan) -> frozenset[str]:
    """The names of the values in the model's output."""
    return frozenset(names_in(plan.outputs))


class FeedOnce:
    """Calls a feed once for each micro-batch, however many stages of the rank read it."""

    def __init__(
        self,
        plan: Plan,
        feed: Feed,
        needed: Sequence[str],
        stages: int,
        device: torch.device,
        rank: int,
    ) -> None:
        self.plan = plan
        self.feed = feed
        self.needed = needed
        self.stages = stages
        self.device = device
        self.rank = rank
        self._unplaced: dict[int, Values] = {}
        self._kept: dict[int, tuple[int, Values]] = {}

    def __call__(self, micro_batch: int) -> Values:
        """The values of a micro-batch on the device, for the next stage of this rank.

        Raises DataError if one is missing, or has a shape that does not fit the plan.
        """
        if not self.needed:
            return {}
        values = self.early(micro_batch)
        left, _ = self._kept.pop(micro_batch)
        if left > 1:
            self._kept[micro_batch] = left - 1, values
        return values

    def early(self, micro_batch: int) -> Values:
        """The same values, before they are asked for."""
        if not self.needed:
            return {}
        if micro_batch not in self._kept:
            self._kept[micro_batch] = self.stages, self._ask(micro_batch)
        return self._kept[micro_batch][1]

    def unplaced(self, micro_batch: int) -> Values:
        """The values of a micro-batch to come where the feed has them, before they are asked for on
        the device."""
        if micro_batch in self._kept:
            return self._kept[micro_batch][1]
        if micro_batch not in self._unplaced:
            self._unplaced[micro_batch] = self._read(micro_batch)
        return self._unplaced[micro_batch]

    def _ask(self, micro_batch: int) -> Values:
        given = self._unplaced.pop(micro_batch, None) or self._read(micro_batch)
        return {name: value.to(self.device) for name, value in given.items()}

    def _read(self, micro_batch: int) -> Values:
        given = self.feed(micro_batch)
        for name in self.needed:
            if name not in given:
                raise DataError(
                    f'micro-batch {micro_batch} has no "{name}" on rank {self.rank}; '
                    f"it has {', '.join(given) or 'nothing'}."
                )
        needed = {name: given[name] for name in self.needed}
        sizes_of(self.plan, needed)
        return needed


def loss_stage(plan: Plan) -> int:
    """The stage that makes the loss, or the last model output for a criterion. Raises PlanError if
    there is none."""
    names = output_names(plan) if plan.loss is None else {plan.loss}
    stages = [spec.index for spec in plan.stages if names & set(spec.outputs)]
    if not stages:
        wanted = " or ".join(sorted(names)) or "an output"
        raise PlanError(f"no stage of {plan.name} makes {wanted}.")
    return stages[-1]


_PLACE = re.compile(r"#.*?(\S+\.py:\d+(?:-\d+)?)")


def where_in_stage(error: BaseException, module: nn.Module) -> str:
    """`stage_1.py:48 in forward (residual_mlp.py:34): return self.head(hidden)`; "" for an
    exception that was not raised through the file of the module's class."""
    try:
        file = inspect.getfile(type(module))
    except (OSError, TypeError):
        return ""
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == file
    ]
    if not frames:
        return ""
    frame, line = frames[-1]
    places = (_authors_place(file, at, one.f_code.co_firstlineno) for one, at in reversed(frames))
    author = next(filter(None, places), "")
    name = re.split(r"[/\\]", file)[-1]
    of_author = f" ({author})" if author else ""
    statement = linecache.getline(file, line).partition("  # ")[0].strip()
    return f"{name}:{line} in {frame.f_code.co_name}{of_author}: {statement}"


def _authors_place(file: str, line: int, first: int) -> str:
    """The nearest place at the end of a line or above it, within the function that begins at
    `first`."""
    for number in range(line, first, -1):
        if match := _PLACE.search(linecache.getline(file, number)):
            return match[1]
    return ""


@contextmanager
def in_eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Eval mode inside; afterwards each module is in the mode that it had."""
    with ExitStack() as restored:
        for module in modules:
            for part in module.modules():
                restored.callback(setattr, part, "training", part.training)
            module.eval()
        yield


Program = tuple[Action, ...]


def forward_only(program: Program) -> Program:
    """The forwards and their messages, for an evaluation."""
    return tuple(action for action in program if action.kind in ("F", "SEND_F", "RECV_F"))


def without_steps(program: Program) -> Program:
    """All actions but the optimizer steps."""
    return tuple(action for action in program if action.kind != "S")


def without(program: Program, micro_batches: Collection[int]) -> Program:
    """The program without the actions of some micro-batches. The order stays legal, because other
    micro-batches never depend on these."""
    return tuple(
        action for action in program if action.kind == "S" or action.index not in micro_batches
    )


def program_of(schedule: Schedule, rank: int, options: RunOptions) -> Program:
    """The actions of a rank, without those that the options leave out; none for a rank that the
    schedule does not have. Raises ScheduleError."""
    program = schedule.ranks[rank] if rank < len(schedule.ranks) else ()
    if not options.get("training", True):
        return forward_only(program)
    if options.get("step", True):
        return program
    if not schedule.synchronous:
        raise ScheduleError(
            f"{schedule.name} steps between its backwards, so it cannot run without steps.",
            "Choose a synchronous schedule, such as 1f1b.",
        )
    return without_steps(program)


def check_schedule(schedule: Schedule, places: Sequence[object]) -> None:
    """Raises ScheduleError for a schedule of stages in other places, or without messages."""
    wanted = schedule.replicas or schedule.rank_of_stage
    if wanted != places:
        raise ScheduleError(
            f"the schedule puts stages on ranks {wanted}, the pipeline on {places}."
        )
    if len(schedule.ranks) > 1 and not schedule.is_lowered:
        raise ScheduleError(
            f"the {schedule.name} schedule has no messages.",
            "Lower it first: lower(schedule, forward_edges(plan), ...).",
        )


def version_pairs(
    program: Program, versions: Mapping[int, int], numbers: Numbering
) -> dict[tuple[int, int], VersionPair]:
    """The versions of each micro-batch at each stage, by stage and the schedule's index.

    `versions` are those of the stages when the program begins.
    """
    met: dict[tuple[int, int], list[int]] = {}
    for action in program:
        if action.kind in ("F", "B", "W"):
            assert action.version is not None
            version = versions[action.stage] + action.version
            met.setdefault((action.stage, action.index), []).append(version)
    return {
        (stage, index): VersionPair(numbers.number(index), seen[0], seen[-1])
        for (stage, index), seen in met.items()
    }


def immediate_backward(program: Program) -> frozenset[tuple[int, int]]:
    """Stage and index of the micro-batches whose backward is the stage's next action after their
    forward. Recomputing saves no memory for them."""
    last: dict[int, Action] = {}
    immediate: set[tuple[int, int]] = set()
    for action in program:
        if action.kind in ("F", "B", "W"):
            before = last.get(action.stage)
            if action.kind == "B" and before and (before.kind, before.index) == ("F", action.index):
                immediate.add((action.stage, action.index))
            last[action.stage] = action
    return frozenset(immediate)


def window_ends(program: Sequence[Action]) -> dict[int, list[int]]:
    """Position of the last backward before each step -> its stages; with split backwards, the last
    B or W."""
    last_backward: dict[int, int] = {}
    ends: dict[int, list[int]] = {}
    for position, action in enumerate(program):
        if action.kind in ("B", "W"):
            last_backward[action.stage] = position
        elif action.kind == "S":
            ends.setdefault(last_backward[action.stage], []).append(action.stage)
    return ends


May = Callable[[int], bool]


class RunOptions(TypedDict, total=False):
    """The options of one run."""

    first_micro_batch: int
    """The number of the schedule's first micro-batch (default 0)."""
    micro_batches_in_all: int | None
    """The micro-batches of a step, if replicas of the pipeline run some of them. They count between
    this pipeline's micro-batches of two steps (default: the schedule's)."""
    observer: Observer | None
    """Receives the events of the run."""
    training: bool
    """Without, only forwards run, in eval mode and without gradients; weights, versions and random
    numbers stay as they are (default True)."""
    sizes: Sizes | Sequence[Sizes] | None
    """The sizes of the micro-batches, for all or for each one of the schedule (default: the
    plan's). The loss of a micro-batch with fewer samples counts less, so that the gradient is that
    of the mean over all samples of a step. All ranks leave out a micro-batch without
    samples."""
    step_samples: int | None
    """The samples of a step, if other ranks run micro-batches of the same step."""
    record: bool
    """Record the time of each action."""
    loss_scale: float
    """A factor on the loss for backwards."""
    step: bool
    """Without, a synchronous schedule ends before its steps, and the next run adds to its gradients
    (default True)."""
    losses: bool
    """Without, an evaluation reads no target and computes no loss outside the model (default
    True)."""
    may: May | None
    """Whether a step, counted from 1 in the schedule, runs. After the first step for which it is
    False, no rank runs any later step."""


def numbering(schedule: Schedule, options: RunOptions) -> Numbering:
    """The numbers of the schedule's micro-batches."""
    every = schedule.step_every
    in_all = options.get("micro_batches_in_all") or every
    return Numbering(options.get("first_micro_batch", 0), every, in_all)


@dataclass
class PipelineRun:
    """The state of one run, shared by its actions. Keys are stage and schedule index."""

    schedule: Schedule
    program: Program
    training: bool
    feed: FeedOnce
    mailbox: Mailbox
    recorder: RunRecorder
    version_pairs: dict[tuple[int, int], VersionPair]
    loss_weights: LossWeights
    read: dict[tuple[int, int], list[Tensor]]
    """The weights that forwards read, sampled."""
    split: frozenset[tuple[int, int]]
    """The split backwards."""
    immediate_backward: frozenset[tuple[int, int]]
    """The micro-batches that are not recomputed."""
    empty: frozenset[int]
    """The micro-batches without samples, which are left out; stages still complete their gradients
    in the order of the whole schedule, which is that of their replicas."""
    numbers: Numbering
    loss_scale: float
    losses: bool
    may: May | None

    def window_of(self, index: int) -> int:
        """The number of the step, in all runs, that a micro-batch of the schedule counts for."""
        return self.numbers.first // self.numbers.in_all + index // self.numbers.of_step

    def is_empty(self, action: Action) -> bool:
        """True for an action of a micro-batch without samples."""
        return action.kind != "S" and action.index in self.empty

    def ends_backward(self, action: Action) -> bool:
        """True for the last action of a micro-batch's backward at a stage."""
        is_first_part = (action.stage, action.index) in self.split and action.kind == "B"
        return action.kind in ("B", "W") and not is_first_part

    def leaves_out(self, action: Action) -> bool:
        """True for an action of a step that is left out."""
        if self.may is None:
            return False
        is_step = action.kind == "S"
        return not self.may(
            action.index if is_step else action.index // self.schedule.step_every + 1
        )


def sizes_of_each(sizes: Sizes | Sequence[Sizes], schedule: Schedule) -> tuple[Sizes, ...]:
    """The sizes of every micro-batch of the schedule. Raises ScheduleError if some are missing."""
    if isinstance(sizes, Mapping):
        return (sizes,) * schedule.micro_batches
    if len(sizes) != schedule.micro_batches:
        raise ScheduleError(
            f"the schedule has {schedule.micro_batches} micro-batches, but there are sizes for "
            f"{len(sizes)}."
        )
    return tuple(sizes)
