"""Gradients that are summed in one message, over all replicas of a stage or at their owner.

The gradients of a step are summed once, at the end of its last backward. Those of each micro-batch
(`Shards.each_backward`) are summed in its own backward and added up at their owner; few messages
are under way at once, and a large gradient is sent from its own memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..plan.sharing import MESSAGE_BYTES, UNDER_WAY
from .shards import WHOLE, Shards, bucketed


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are summed together.

    parameters: the parameters; if they have owners, they have one.
    group: the ranks to sum over; None for the group of all buckets.
    shards: the owners of the parameters.
    missing: the number of gradients that are not final yet.
    given: for each parameter, if it has a gradient on this replica.
    flat, work: the tensor being summed and its all-reduce.
    total: the sums so far; None on a replica without them.
    """

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup | None = None
    shards: Shards = WHOLE
    missing: int = 0
    given: list[bool] = field(default_factory=list)
    flat: Tensor | None = None
    work: dist.Work | None = None
    total: Tensor | None = None

    @property
    def owner(self) -> int | None:
        """The replica that receives the sums; None if all do."""
        return self.shards.owner(self.parameters[0]) if self.shards.is_divided else None

    @property
    def numbers(self) -> int:
        """The elements of all gradients."""
        return sum(parameter.numel() for parameter in self.parameters)

    def begin(self, group: dist.ProcessGroup | None) -> int:
        """Takes the gradients away and sums them; returns the bytes of the message. It ends with
        flags for the gradients that exist, but for those of each micro-batch."""
        parameters = self.parameters
        given = [parameter.grad is not None for parameter in parameters]
        parts = [
            torch.zeros_like(parameter).reshape(-1)
            if parameter.grad is None
            else parameter.grad.reshape(-1)
            for parameter in parameters
        ]
        if not self.shards.each_backward:
            parts.append(torch.tensor(given, device=parts[0].device, dtype=parts[0].dtype))
        self.given = [new or old for new, old in zip(given, self.given or given, strict=True)]
        for parameter in parameters:
            parameter.grad = None
        self.flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        group = self.group or group
        if self.owner is None:
            self.work = dist.all_reduce(self.flat, group=group, async_op=True)
        else:
            self.work = dist.reduce(self.flat, group_dst=self.owner, group=group, async_op=True)
        return self.flat.nbytes

    def collect(self) -> None:
        """Waits for the sum that is under way, if there is one, and adds it to those before."""
        if self.work is None or self.flat is None:
            return
        self.work.wait()
        if self.owner in (None, self.shards.copy):
            self.total = self.flat if self.total is None else self.total.add_(self.flat)
        self.flat = self.work = None

    def finish(self, flags: Sequence[float] | None = None) -> None:
        """Gives the parameters their sums, on the replicas that have them. `flags` count the
        replicas that have each gradient; None if the message counts them."""
        if self.total is not None:
            sizes = [parameter.numel() for parameter in self.parameters]
            *sums, rest = torch.split(self.total, [*sizes, self.total.numel() - sum(sizes)])
            if flags is None:
                flags = [1.0] * len(sizes) if all(self.given) else rest.tolist()
            for parameter, own, count in zip(self.parameters, sums, flags, strict=True):
                # A view: the gradients are in the bucket until the stage has stepped.
                parameter.grad = own.view_as(parameter) if count else None
        self.total, self.given = None, []


class UnderWay:
    """The buckets of each micro-batch that are under way; all replicas begin the same ones in the
    same order."""

    def __init__(self) -> None:
        self._buckets: deque[Bucket] = deque()

    def begin(self, bucket: Bucket, group: dist.ProcessGroup | None) -> int:
        """Begins the sum of a bucket, when few enough others are under way."""
        self.collect(bucket)  # that of the micro-batch before
        if len(self._buckets) == UNDER_WAY:
            self._buckets.popleft().collect()
        self._buckets.append(bucket)
        return bucket.begin(group)

    def collect(self, bucket: Bucket) -> None:
        """Waits for the sum of a bucket, if it is under way."""
        if bucket in self._buckets:
            self._buckets.remove(bucket)
        bucket.collect()


def make_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, shards: Shards = WHOLE
) -> list[Bucket]:
    """Buckets of one owner, dtype and device each, from the last parameter to the first."""
    if shards.each_backward:
        bucket_bytes = min(bucket_bytes, MESSAGE_BYTES)
    reverse = with_gradients(reversed(parameters))
    return [Bucket(own, shards=shards) for own in bucketed(reverse, shards.kind, bucket_bytes)]


def with_gradients(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that need a gradient."""
    return [parameter for parameter in parameters if parameter.requires_grad]
