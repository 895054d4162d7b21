"""Forward passes over evaluation data -> mean loss, and accuracy of a classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..activity import Activities, Activity
from ..channels import forward_edges
from ..data.task import Task
from ..launching.world import World
from ..lowering import lower
from ..observed import ActionObserver
from ..pipeline import Pipeline
from ..plan import Plan
from ..schedule import Action, Kind, Schedule, one_step
from ..watching.metrics import EvalRecord
from .sources import MicroBatches


class Evaluation:
    """Evaluates the live weights between two segments; all ranks take part, and of several replicas
    the first one's read the data: their weights are equal, and its statistics are those written.

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
        rank_of_stage: Sequence[int],
        batches: int,
    ) -> None:
        self._activities = activities
        self._task = task
        self._feed = feed
        self._world = world
        self.batches = batches
        outputs = plan.outputs
        self._logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
        self._schedule = _forward_schedule(plan, rank_of_stage, batches) if batches else None

    def __call__(self, pipeline: Pipeline, step: int) -> EvalRecord:
        """Runs every evaluation micro-batch forward; the same record on every rank."""
        assert self._schedule is not None
        counts = _Counts(self._logits if self._task.classes else None, self._activities)

        def feed(micro_batch: int) -> Mapping[str, Tensor]:
            fields = self._feed(micro_batch)
            counts.labels[micro_batch] = fields.get(self._task.label or "")
            return fields

        if self._world.replica == 0:
            pipeline.run(self._schedule, feed, observer=counts, training=False)
        with self._activities.during(Activity("meet", "the losses of the evaluation")):
            loss, losses, right, answers = self._world.sums(
                [counts.loss, counts.losses, counts.right, counts.answers]
            )
        accuracy = right / answers if answers else None
        return EvalRecord(step, loss / losses, accuracy, self.batches)


def _forward_schedule(plan: Plan, rank_of_stage: Sequence[int], batches: int) -> Schedule:
    """All forwards; as many micro-batches as there are ranks go through a rank's stages together.
    The backwards are there for the form, and left out."""
    ranks = len(set(rank_of_stage))
    kinds: tuple[Kind, Kind] = ("F", "B")
    actions = [
        Action(stage, kind, index)
        for kind, order in zip(kinds, (1, -1), strict=True)
        for first in range(0, batches, ranks)
        for stage in range(len(rank_of_stage))[::order]
        for index in range(first, min(first + ranks, batches))
    ]
    rows = [[a for a in actions if rank_of_stage[a.stage] == rank] for rank in range(ranks)]
    schedule = one_step("evaluation", rows, rank_of_stage)
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
        answers = outputs[str(self._logits)].argmax(-1).cpu()
        self.right += float((answers == labels).sum())
        self.answers += answers.numel()
