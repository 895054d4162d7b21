"""Forward passes over evaluation data -> mean loss, and accuracy of a classifier."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..activity import Activities, Activity
from ..channels import forward_edges
from ..data.task import Task
from ..launching.world import World
from ..lowering import lower
from ..observed import ActionObserver
from ..pipeline import Pipeline
from ..plan import Plan
from ..replication.statistics import first_buffers
from ..schedule import Action, Kind, Schedule, one_step
from ..watching.metrics import EvalRecord
from .sources import MicroBatches


class Evaluation:
    """Evaluates the live weights between two segments. All ranks take part: of several replicas
    each has some of the micro-batches, and all the first one's buffers, which are those written.

    Micro-batches are of one size, so the mean over micro-batches is the mean over samples. A
    classifier's accuracy is counted where one rank makes the logits and reads the labels.
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
        batches: int,
    ) -> None:
        self._activities = activities
        self._task = task
        self._feed = feed
        self._world = world
        self.batches = batches
        outputs = plan.outputs
        self._logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
        # Whole replicas each have a row of micro-batches.
        ends = [batches * part // world.replicas for part in range(world.replicas + 1)]
        self._first, end = ends[world.replica], ends[world.replica + 1]
        self._schedule = _forward_schedule(plan, schedule, end - self._first)

    def __call__(self, pipeline: Pipeline, step: int) -> EvalRecord:
        """Runs every evaluation micro-batch forward; the same record on every rank."""
        counts = _Counts(self._logits if self._task.classes else None, self._activities)

        def feed(micro_batch: int) -> Mapping[str, Tensor]:
            fields = self._feed(micro_batch)
            counts.labels[micro_batch] = fields.get(self._task.label or "")
            return fields

        modules = {index: stage.module for index, stage in pipeline.stages.items()}
        self._activities.first_micro_batch = self._first
        with first_buffers(modules, self._world):
            if self._schedule is not None:
                pipeline.run(
                    self._schedule,
                    feed,
                    observer=counts,
                    training=False,
                    first_micro_batch=self._first,
                )
        with self._activities.during(Activity("meet", "the losses of the evaluation")):
            loss, losses, right, answers = self._world.sums(
                [counts.loss, counts.losses, counts.right, counts.answers]
            )
        accuracy = right / answers if answers else None
        return EvalRecord(step, loss / losses, accuracy, self.batches)


def _forward_schedule(plan: Plan, of: Schedule, batches: int) -> Schedule | None:
    """All forwards, on the ranks of another schedule; as many micro-batches as there are ranks go
    through a rank's stages together. The backwards are there for the form, and left out. None
    without micro-batches."""
    if not batches:
        return None
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
    """Adds up losses and right answers; `labels` are those of the micro-batches that were fed."""

    def __init__(self, logits: str | None, activities: Activities) -> None:
        super().__init__(activities)
        self.labels: dict[int, Tensor | None] = {}
        self.loss = self.losses = self.right = self.answers = 0.0
        self._logits = logits

    def on_loss(self, micro_batch: int, loss: Tensor) -> None:
        self.loss += float(loss)
        self.losses += 1

    def on_outputs(self, micro_batch: int, outputs: Mapping[str, Tensor]) -> None:
        labels = self.labels.get(micro_batch)
        if labels is None or self._logits not in outputs:
            return
        del self.labels[micro_batch]
        right, answers = right_answers(outputs[str(self._logits)], labels)
        self.right += right
        self.answers += answers


def right_answers(logits: Tensor, labels: Tensor) -> tuple[int, int]:
    """How many labels the largest of `logits f[batch, classes]` meets, and of how many.

    Labels are `i64[batch]`; one below 0 asks for no answer, as in cross entropy. Labels of another
    kind (a number to be met, a probability for each class) have no right answer.

    >>> from torch import tensor
    >>> right_answers(tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), tensor([1, 1, -100]))
    (1, 2)
    """
    if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
        return 0, 0
    labels = labels.to(logits.device)
    asked = labels >= 0
    return int((logits.argmax(-1) == labels)[asked].sum()), int(asked.sum())
