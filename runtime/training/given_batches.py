"""The batches, losses and outputs of the steps of a user's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.settings import SettingsError
from ..data.given import GivenBatch
from ..distributed.calls import Call, Calls
from ..distributed.process_groups import World
from ..errors import DataError
from ..executor.instrumented import Observer
from ..executor.run import output_names
from ..plan.plan import Plan
from ..plan.structure import rebuilt


@dataclass
class StepResult:
    """One optimizer step.

    step: its number, from 1 on.
    outputs: the model's output for the whole batch in its own structure, where they were asked for
        and a stage of this rank makes them; None for those of other ranks.
    """

    step: int
    outputs: Any = None
    _content: Tensor = field(
        default_factory=lambda: torch.zeros(2, dtype=torch.float64), repr=False
    )
    _arrival: dist.Work | None = field(default=None, repr=False)
    _call: Call | None = field(default=None, repr=False)

    @property
    def loss(self) -> float:
        """The mean loss of the step's samples, the same on every rank; waits for the slowest."""
        if self._call is not None and self._arrival is not None:
            with self._call.waiting():
                self._arrival.wait()
            self._arrival = None
            self._call.check_sum(float(self._content[1]))
        return float(self._content[0])

    def verify(self) -> None:
        """Raises CallError where other ranks have made another call than this step, if that is
        known already."""
        if self._arrival is None or self._arrival.is_completed():
            _ = self.loss


def shared_loss(
    step: int, part: float, group: dist.ProcessGroup | None, calls: Calls
) -> StepResult:
    """The result of a step on one rank, whose part of the loss is to be added to the others'."""
    content = torch.tensor([part, calls.number], dtype=torch.float64)
    if group is None:
        return StepResult(step, None, content)
    arrival = dist.all_reduce(content, group=group, async_op=True)
    return StepResult(step, None, content, arrival, calls.present)


@dataclass(frozen=True)
class EvalResult:
    """An evaluation.

    loss: the mean over all samples, or over all targets that a cross entropy counts.
    samples: their number.
    """

    loss: float
    samples: int


class Evaluated(Observer):
    """The losses and the outputs that a rank's stages make in forwards.

    samples: of each micro-batch, by its number.
    sums: the sum of the micro-batches' mean losses times their weights, that of the weights, which
        are samples or targets that count, and that of the samples.
    outputs: the model's outputs by micro-batch, if they are kept.
    """

    def __init__(self, samples: Mapping[int, int], *, keeps: bool) -> None:
        self.samples = samples
        self.sums = [0.0, 0.0, 0.0]
        self.outputs: dict[int, dict[str, Tensor]] = {}
        self._keeps = keeps

    def on_loss(self, micro_batch: int, loss: Tensor, targets: float | None) -> None:
        samples = self.samples[micro_batch]
        weight = samples if targets is None else targets
        more = (float(loss) * weight if weight else 0.0, weight, samples)
        self.sums = [before + each for before, each in zip(self.sums, more, strict=True)]

    @property
    def reads_outputs(self) -> bool:
        return self._keeps

    def on_outputs(self, micro_batch: int, outputs: Mapping[str, Tensor]) -> None:
        if self._keeps:
            self.outputs.setdefault(micro_batch, {}).update(outputs)


def gather_outputs(
    plan: Plan,
    of_micro_batch: Mapping[int, Mapping[str, Tensor]],
    sizes: Sequence[Mapping[str, int]],
    weights: Sequence[float | None] = (),
) -> Any:
    """The output of a whole batch, in the model's structure, out of those of its micro-batches in
    their order; None if this rank makes none.

    Tensors with a batch are joined along it; of a loss that is weighted already the result is the
    mean over samples, of another one the mean by the weights of the micro-batches (None for their
    samples) or their sum, and of another tensor without a batch those of all micro-batches,
    stacked.
    """
    if not of_micro_batch:
        return None
    dims = {spec.name: spec.batch_dim for spec in plan.values}
    samples = [size.get("batch", 1) for size in sizes]
    order = [of_micro_batch[number] for number in sorted(of_micro_batch)]
    joined: dict[str, Any] = dict.fromkeys(output_names(plan))
    for name in order[0]:
        parts = [values[name] for values in order]
        dim = dims.get(name)
        if dim is not None:
            joined[name] = torch.cat(parts, dim)
        elif name == plan.loss:
            of_each = weights if weights and None not in weights else samples
            shares = torch.tensor(of_each, dtype=parts[0].dtype, device=parts[0].device)
            losses = torch.stack(parts).flatten()
            is_plain = bool(weights) and plan.loss_is_sum
            mean = (losses * shares)[shares > 0].sum() / shares.sum()
            joined[name] = losses.sum() if is_plain else mean
        else:
            joined[name] = parts[0] if len(parts) == 1 else torch.stack(parts)
    return rebuilt(plan.outputs, joined, {**plan.sizes, **sizes[0], "batch": sum(samples)})


_NOTHING_TRAINS = 2


def check_alike(
    given: GivenBatch, step: int, world: World, calls: Calls, *, has_optimizer: bool | None
) -> None:
    """Compares the calls, batches and optimizers of all ranks at the first step and at every power
    of two; `has_optimizer` is None for a rank on which nothing trains. Raises CallError, DataError
    or SettingsError where they differ."""
    if step & (step - 1):
        return
    answer = _NOTHING_TRAINS if has_optimizer is None else int(has_optimizer)
    own = calls.number.to_bytes(8, "big") + bytes([answer]) + given.digest()
    of_ranks = world.gathered(own)
    calls.check_alike([int.from_bytes(of_rank[:8], "big") for of_rank in of_ranks])
    for rank, of_rank in enumerate(of_ranks):
        if of_rank[9:] != of_ranks[0][9:]:
            raise DataError(
                f"rank {rank} has another batch than rank 0 at step {step + 1}, but all ranks run "
                "the same loop over the same data.",
                "Seed the loader alike on all ranks, such as DataLoader(..., "
                "generator=torch.Generator().manual_seed(0)), and use no DistributedSampler.",
            )
    without = [str(rank) for rank, of_rank in enumerate(of_ranks) if not of_rank[8]]
    if without and any(of_rank[8] == 1 for of_rank in of_ranks):
        raise SettingsError(
            f"the optimizer is given at step {step + 1} on some ranks, but not on rank "
            f"{', '.join(without)}, whose weights would stay as they are.",
            "Give step(batch, optimizer=...) an optimizer on every rank.",
        )


class GivenFeed:
    """The number of a micro-batch -> its values, out of a stream of batches.

    A batch is read when its first micro-batch is asked for, and dropped after its last.

    shape: the first batch; all others have its sizes.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        split: Callable[[Any], GivenBatch],
        shape: GivenBatch,
        first: int,
    ) -> None:
        self.shape = shape
        self._batches, self._split, self._first = batches, split, first
        self._read = 0
        self._kept: dict[int, dict[int, Mapping[str, Tensor]]] = {}

    def __call__(self, micro_batch: int) -> Mapping[str, Tensor]:
        number, index = divmod(micro_batch - self._first, len(self.shape.parts))
        while self._read <= number:
            self._kept[self._read] = dict(enumerate(self._next().parts))
            self._read += 1
        # Replicas each take some of the micro-batches; older batches are over.
        for older in [kept_number for kept_number in self._kept if kept_number < number - 1]:
            del self._kept[older]
        return self._kept[number][index]

    def _next(self) -> GivenBatch:
        batches = list(islice(self._batches, 1))
        if not batches:
            raise DataError(
                f"the stream ended after {self._read} batches, before its last step.",
                "Give stream(..., steps=N) with the number of batches.",
            )
        given = self._split(batches[0])
        if given.sizes != self.shape.sizes:
            raise DataError(
                f"batch {self._read + 1} has micro-batches of {_text(given)} samples, the first "
                f"has {_text(self.shape)}, and in a stream all have the same sizes.",
                "Give DataLoader(..., drop_last=True) and one length, or use step.",
            )
        return given


def _text(given: GivenBatch) -> str:
    return ", ".join(map(str, given.samples))
