"""Forward passes over evaluation data -> the mean loss, and the accuracy of a classifier.

A criterion turns a model's outputs and a target into a loss; it has a built-in name or is a
function of the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..config.batch_layout import EvaluationBatch
from ..config.settings import SettingsError
from ..control.metrics import Metric, Sums, of_all_ranks
from ..data.task import Task
from ..distributed.process_groups import World
from ..errors import DataError
from ..executor.executor import Executor
from ..executor.instrumented import ActionObserver, Activities, Activity
from ..executor.mailbox import Sizes, forward_edges
from ..monitoring.records import EvalRecord
from ..plan.plan import Plan
from ..rng import import_seeded
from ..schedule.dependencies import lower
from ..schedule.schedule import Action, Kind, Numbering, Schedule, one_step
from ..user_code import names_object
from .batches import MicroBatches
from .replica_gradients import first_buffers


class Evaluator:
    """Evaluates the live weights between two segments. Collective.

    The loss is the mean over samples, or over the targets that count: a smaller last micro-batch
    counts less. With several replicas, each evaluates some of the micro-batches, with the buffers
    of the first one, which are those that are saved. A classifier's accuracy is computed if one
    rank has both logits and labels.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task,
        feed: MicroBatches,
        world: World,
        activities: Activities,
        *,
        schedule: Schedule,
        batch: EvaluationBatch,
        metric: Metric | None = None,
    ) -> None:
        self._plan = plan
        self._activities = activities
        self._task = task
        self._feed = feed
        self._world = world
        self.batch = batch
        self._metric = metric
        outputs = plan.outputs
        self._logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
        own = batch.range_of(world.replica, world.replicas)
        self._first = own.start
        self._sizes = batch.sizes(own)
        self._schedule = forward_schedule(plan, schedule, len(own)) if own else None

    def __call__(self, pipeline: Executor, step: int) -> EvalRecord:
        """Runs every evaluation micro-batch forward; returns the same record on every rank."""
        logits = self._logits if self._task.classes else None
        shares = {
            self._first + index: size / self.batch.size for index, size in enumerate(self._sizes)
        }
        counts = _Counts(logits, self._activities, shares, self._metric, self.batch.size)

        def feed(micro_batch: int) -> Mapping[str, Tensor]:
            fields = self._feed(micro_batch)
            counts.labels[micro_batch] = fields.get(self._task.label or "")
            return fields

        modules = {index: stage.module for index, stage in pipeline.stages.items()}
        self._activities.numbers = Numbering(self._first)
        with first_buffers(modules, self._world):
            if self._schedule is not None:
                pipeline.run(
                    self._schedule,
                    feed,
                    observer=counts,
                    training=False,
                    first_micro_batch=self._first,
                    sizes=self._own_sizes(),
                )
        with self._activities.during(Activity("meet", "the losses of the evaluation")):
            # Tensor ranks have the same samples, and the first one counts them.
            none = _Counts(None, self._activities, {}, None, self.batch.size)
            own = counts if self._world.tensor_rank == 0 else none
            loss, losses, right, answers = self._world.sums(
                [own.loss, own.losses, own.right, own.answers]
            )
            measured = of_all_ranks(self._world, own.measured) if self._metric else []
        accuracy = right / answers if answers else None
        batch = self.batch
        return EvalRecord(
            step,
            loss / losses if losses else math.nan,
            accuracy,
            batch.count,
            batch.samples,
            batch.length,
            self._metric.result(measured) if self._metric else {},
        )

    def _own_sizes(self) -> list[Sizes] | None:
        """The sizes of each micro-batch; None if all are those of the plan."""
        if len(set(self._sizes)) < 2 and self.batch.size in self._sizes:
            return None
        return [{**self._plan.sizes, "batch": size} for size in self._sizes]


def forward_schedule(plan: Plan, of: Schedule, batches: int) -> Schedule:
    """A schedule of forwards alone, on the ranks of another schedule.

    As many micro-batches as there are ranks pass through a rank's stages together. A schedule must
    have backwards, so it has them too; the pipeline skips them.
    """
    ranks = len(of.ranks)
    kinds: tuple[Kind, Kind] = ("F", "B")
    actions = [
        Action(stage, kind, index)
        for kind, order in zip(kinds, (1, -1), strict=True)
        for first in range(0, batches, ranks)
        for stage in range(of.stages)[::order]
        for index in range(first, min(first + ranks, batches))
    ]
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for action in actions:
        rows[of.rank_of(action.stage, action.index)].append(action)
    schedule = one_step("evaluation", rows, of.rank_of_stage, of.replicas)
    return lower(schedule, forward_edges(plan), grad_edges=())


class _Counts(ActionObserver):
    """Sums up losses, correct answers and metrics.

    labels: those of the micro-batches that were fed.

    Arguments:
    shares: the samples of each micro-batch as a share of those of a whole one, `size`.
    """

    def __init__(
        self,
        logits: str | None,
        activities: Activities,
        shares: Mapping[int, float],
        metric: Metric | None,
        size: int,
    ) -> None:
        super().__init__(activities)
        self._shares = shares
        self._metric, self._size = metric, size
        self.measured: Sums = {}
        self.labels: dict[int, Tensor | None] = {}
        self.loss = self.losses = self.right = self.answers = 0.0
        self._logits = logits

    def on_loss(self, micro_batch: int, loss: Tensor, targets: float | None) -> None:
        share = self._shares[micro_batch] if targets is None else targets
        if share:
            self.loss += float(loss) * share
            self.losses += share

    @property
    def reads_outputs(self) -> bool:
        return self._metric is not None or self._logits is not None

    def on_outputs(self, micro_batch: int, outputs: Mapping[str, Tensor]) -> None:
        labels = self.labels.get(micro_batch)
        if self._metric is not None and self._metric.is_made_by(outputs):
            values = self._metric.of(micro_batch, outputs, labels)
            samples = round(self._shares[micro_batch] * self._size)
            self._metric.add(self.measured, values, samples)
        if labels is None or self._logits not in outputs:
            return
        del self.labels[micro_batch]
        right, answers = right_answers(outputs[str(self._logits)], labels)
        self.right += right
        self.answers += answers


def right_answers(logits: Tensor, labels: Tensor) -> tuple[int, int]:
    """The number of correct predictions of `logits f[batch, classes]`, and of labels.

    Labels are `i64[batch]`; negative ones are ignored, as in cross entropy. Labels of another kind
    (regression targets, class probabilities) have no correct answer.

    >>> from torch import tensor
    >>> right_answers(tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), tensor([1, 1, -100]))
    (1, 2)
    """
    if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
        return 0, 0
    labels = labels.to(logits.device)
    counted = labels >= 0
    return int((logits.argmax(-1) == labels)[counted].sum()), int(counted.sum())


Criterion = Callable[[Any, Tensor], Tensor]


def cross_entropy(outputs: Any, target: Tensor) -> Tensor:
    """The mean cross entropy over all targets; logits `f32[..., classes]`, target `i64[...]`, or
    class probabilities `f32[..., classes]`.

    Raises DataError when the number of targets differs from the number of rows of logits, and for
    targets that are neither classes of the logits nor probabilities.
    """
    logits = logits_of(outputs)
    rows = logits.flatten(0, -2) if logits.ndim > 1 else logits[None]
    if target.is_floating_point() and target.shape == logits.shape:
        return F.cross_entropy(rows, target.reshape(rows.shape))
    if len(rows) != target.numel():
        raise DataError(
            f"cross_entropy takes the last dimension as the classes, so logits of shape "
            f"{tuple(logits.shape)} are {len(rows)} rows of {rows.shape[1]} classes, but the "
            f"targets of shape {tuple(target.shape)} are {target.numel()}.",
            "Let the model return its classes last, for example logits.movedim(1, -1), or give "
            "--criterion my_file.py:function, which may call torch's cross_entropy.",
        )
    if target.is_floating_point() or target.is_complex():
        raise DataError(
            f"cross_entropy takes whole numbers as classes, but the targets are {target.dtype}.",
            "Give them as whole numbers (y.long()), or probabilities of the shape "
            f"{tuple(logits.shape)}; or choose --criterion mse for numbers.",
        )
    try:
        return F.cross_entropy(rows, target.flatten().long())
    except IndexError:
        classes = rows.shape[1]
        raise DataError(
            f"the targets go from {target.min()} to {target.max()}, but the model has {classes} "
            f"classes (0 to {classes - 1}).",
            "Number the classes from 0 on and mark targets that do not count by -100, or give the "
            "model more outputs.",
        ) from None


def mse(outputs: Any, target: Tensor) -> Tensor:
    """The mean squared difference of two tensors of one shape."""
    return F.mse_loss(logits_of(outputs), target)


def logits_of(outputs: Any) -> Tensor:
    """The tensor of an output structure that a criterion uses."""
    if isinstance(outputs, Mapping):
        outputs = outputs["logits"] if "logits" in outputs else tuple(outputs.values())
    if isinstance(outputs, Tensor):
        return outputs
    return next(item for item in outputs if isinstance(item, Tensor))


CRITERIA: Mapping[str, Criterion] = {"cross_entropy": cross_entropy, "mse": mse}


def check_name(name: str) -> None:
    """Raises SettingsError for a name that is neither a built-in criterion nor user code; runs no
    code."""
    if name not in CRITERIA and not names_object(name):
        raise SettingsError(
            f"--criterion {name} is not known.", f"{', '.join(CRITERIA)}, or my_file.py:function"
        )


def find_criterion(name: str, seed: int) -> Criterion:
    """A built-in criterion, or the user's own `module:function` of (outputs, target).

    `seed` is the run's. Raises SettingsError for an unknown name, for a class, and for a module
    with parameters, which nothing would train.
    """
    if name in CRITERIA:
        return CRITERIA[name]
    check_name(name)
    criterion: Criterion = import_seeded(name, "--criterion", SettingsError, seed)
    if isinstance(criterion, type):
        raise SettingsError(
            f"--criterion {name} is a class.",
            f"Name an object of it: own_loss = {criterion.__name__}(...).",
        )
    if isinstance(criterion, nn.Module) and any(
        weight.requires_grad for weight in criterion.parameters()
    ):
        raise SettingsError(
            f"--criterion {name} has parameters, which the run would not train.",
            "Let the forward of the model compute this loss, or set requires_grad of these "
            "parameters to False.",
        )
    return criterion
