"""Gradients of a stage in several replicas -> their sum in all of them, during the backward pass.

The method is PyTorch's (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2): gradients go
into buckets of about 25 MB, from the last parameter to the first as the backward produces them, and
a bucket's all-reduce begins when all its gradients are final, in the order of the buckets, which is
the same on all replicas. A gradient is final when the window's last backward has accumulated it; if
that backward is split or skips a parameter, or a staleness method corrects the gradient, when the
window is complete. Each replica's loss is
weighted by its share of the step's samples, so the sum of gradients is their mean.

A tied parameter has its own bucket, summed after its holders have exchanged their gradients:
buckets of one size are added in one order, so its holders stay equal to the last bit. Where single
stages have replicas, all ranks of all its holders sum it together instead. A gradient that no
replica has stays None.

Where the parameters of a stage have owners (`--zero`), a bucket has parameters of one owner, which
alone receives the sum; on the others these gradients become None. With `each_backward` that happens
after the backward of every micro-batch, so that no replica holds all gradients of a stage: the
owner adds up the sums, and at most two buckets are under way.

Buffers that depend on data, such as batch norm's statistics, differ between replicas. The first
replica's buffers are the ones that are saved, so an evaluation uses them on all replicas
(`first_buffers`); training continues with each replica's own.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..distributed.equality import TiedParameter
from ..distributed.process_groups import World
from ..executor.instrumented import ActionObserver, Activity
from ..formatting import counted
from ..plan.plan import Plan
from ..sharding.shards import BUCKET_BYTES, UNDER_WAY, WHOLE, Shards, bucketed, naming_peers
from ..staleness.weight_versions import IsFinal
from .clipping import NormShare


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are summed together.

    parameters: the parameters.
    group: the ranks to sum over; None for the group of all buckets.
    shards: the owners of the parameters; one of them owns all of a bucket.
    missing: the number of gradients that are not final yet.
    has_all: True if this replica has a gradient of each parameter.
    flat, work: the tensor being summed and its all-reduce.
    total: the sums so far; None on a replica that does not receive them.
    """

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup | None = None
    shards: Shards = WHOLE
    missing: int = 0
    has_all: bool = False
    flat: Tensor | None = None
    work: dist.Work | None = None
    total: Tensor | None = None

    @property
    def owner(self) -> int | None:
        """The replica that receives the sums; None if all do."""
        return self.shards.owner(self.parameters[0]) if self.shards.is_divided else None

    @property
    def receives(self) -> bool:
        """True if this replica receives the sums."""
        return self.owner in (None, self.shards.copy)

    def collect(self) -> None:
        """Waits for the sum that is under way, if there is one, and adds it to those before."""
        if self.work is None:
            return
        self.work.wait()
        if self.receives:
            self.total = self.flat if self.total is None else self.total.add_(self.flat)
        self.flat = self.work = None


@dataclass(eq=False)
class _Window:
    """The buckets of one stage.

    begun: the number of buckets whose all-reduce has begun.
    is_open: True while the last backward runs.
    version: the version that the step with these gradients makes.
    """

    buckets: list[_Bucket]
    begun: int = 0
    is_open: bool = False
    version: int = 0


@dataclass
class Summed:
    """What the sums of a step have cost a rank.

    elements: the elements of its gradients that were summed.
    sent: the bytes that were given to sums, by purpose.
    """

    elements: int = 0
    sent: Counter[str] = field(default_factory=Counter)


class GradientSums:
    """Sums the gradients of one rank's stages over the ranks with the same stages.

    For each window of a stage, `expect` may be called before its last backward, then `begin` after
    it, and `finish` before the gradients are read, with the version that the step makes.

    peers: the other ranks, for errors.

    Arguments:
    shares: the parameters of each stage.
    group: the ranks with the same stages; None without others.
    tied_parameters: the tied parameters that are summed over all of their ranks, if any.
    """

    def __init__(
        self,
        shares: Mapping[int, NormShare],
        group: dist.ProcessGroup | None,
        peers: str,
        *,
        tied_parameters: Sequence[TiedParameter] = (),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group, self.peers = group, peers
        self._counts: dict[int, Summed] = defaultdict(Summed)
        self._windows = {
            stage: _Window(make_buckets(share.own, bucket_bytes, share.shards) if group else [])
            for stage, share in shares.items()
        }
        self._under_way: deque[_Bucket] = deque()
        groups = {tied.parameter: tied.group for tied in tied_parameters}
        self._shared = {
            stage: [
                _Bucket([parameter], groups.get(parameter))
                for parameter in _with_gradients(groups or share.shared)
            ]
            for stage, share in shares.items()
        }
        self._place: dict[Tensor, tuple[_Window, _Bucket]] = {
            parameter: (window, bucket)
            for window in self._windows.values()
            for bucket in window.buckets
            for parameter in bucket.parameters
        }
        # The garbage collector does not see what hooks hold, which would never be freed.
        accumulated = WeakMethod(self.accumulated)

        def count(parameter: Tensor) -> None:
            if (own := accumulated()) is not None:
                own(parameter)

        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
            for parameter in self._place
        ]

    def close(self) -> None:
        """Lets go of the parameters, between two steps."""
        for hook in self._hooks:
            hook.remove()

    def take_counts(self, version: int) -> Summed:
        """What was summed for the steps to a version, by all stages."""
        return self._counts.pop(version, Summed())

    def expect(self, stage: int, version: int = 0) -> None:
        """Call before the stage's last backward, or with `each_backward` before each: the gradients
        that it accumulates are final."""
        window = self._windows[stage]
        window.is_open, window.version = True, version
        for bucket in window.buckets:
            bucket.missing = len(bucket.parameters)

    def begin(self, stage: int, version: int = 0) -> None:
        """Call when all the stage's own gradients are final: after its last backward, or with
        `each_backward` after each."""
        window = self._windows[stage]
        window.is_open = False
        for bucket in window.buckets[window.begun :]:
            self._begin(bucket, version)
        window.begun = 0

    def finish(self, stage: int, version: int = 0) -> None:
        """Waits until all the stage's gradients are sums, tied parameters included. Raises
        TransportError."""
        for bucket in self._shared[stage]:
            self._begin(bucket, version)
        for bucket in (*self._windows[stage].buckets, *self._shared[stage]):
            if bucket in self._under_way:
                self._under_way.remove(bucket)
            self._finish(bucket)

    def accumulated(self, parameter: Tensor) -> None:
        """Counts a gradient of the last backward as final. Called by a hook of the parameter, and
        by others where that backward reads copies of the weights."""
        if parameter not in self._place:  # a tied one, whose gradient is final at the step
            return
        window, bucket = self._place[parameter]
        if not window.is_open:
            return
        bucket.missing -= 1
        while window.begun < len(window.buckets) and not window.buckets[window.begun].missing:
            self._begin(window.buckets[window.begun], window.version)
            window.begun += 1

    def _begin(self, bucket: _Bucket, version: int) -> None:
        """Sends the gradients in one tensor, followed by flags for those that exist."""
        if bucket.work is not None:  # of the micro-batch before
            self._under_way.remove(bucket)
            with self._naming_peers():
                bucket.collect()
        parameters = bucket.parameters
        device, dtype = parameters[0].device, parameters[0].dtype
        given = [float(parameter.grad is not None) for parameter in parameters]
        parts = [
            torch.zeros(parameter.numel(), device=device, dtype=dtype)
            if parameter.grad is None
            else parameter.grad.reshape(-1)
            for parameter in parameters
        ]
        bucket.flat = torch.cat([*parts, torch.tensor(given, device=device, dtype=dtype)])
        bucket.has_all |= all(given)
        counts = self._counts[version]
        counts.elements += bucket.flat.numel() - len(given)
        # Where single stages have replicas, the holders of a tied parameter sum it together.
        counts.sent["replicas" if bucket.group is None else "tied"] += bucket.flat.nbytes
        for parameter in parameters:
            parameter.grad = None  # now in the bucket
        with self._naming_peers():
            group = bucket.group or self._group
            if bucket.owner is None:
                bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)
            else:
                bucket.work = dist.reduce(
                    bucket.flat, group_dst=bucket.owner, group=group, async_op=True
                )
            if bucket.shards.each_backward:
                self._under_way.append(bucket)
                if len(self._under_way) > UNDER_WAY:
                    self._under_way.popleft().collect()

    def _finish(self, bucket: _Bucket) -> None:
        with self._naming_peers():
            bucket.collect()
        if (total := bucket.total) is not None:
            parameters = bucket.parameters
            sizes = [*(parameter.numel() for parameter in parameters), len(parameters)]
            *sums, given = torch.split(total, sizes)
            counts = [1.0] * len(parameters) if bucket.has_all else given.tolist()
            for parameter, own, count in zip(parameters, sums, counts, strict=True):
                # A view: the gradients are in the bucket until the stage has stepped.
                parameter.grad = own.view_as(parameter) if count else None
        bucket.total, bucket.has_all = None, False

    def _naming_peers(self) -> AbstractContextManager[None]:
        return naming_peers("the gradients cannot be summed", self.peers)


class SummingObserver(ActionObserver):
    """Sums the gradients of a rank's stages over their replicas, as the backwards end.

    shares: the parameters of each stage.
    sums: the sums; None without replicas.
    """

    shares: Mapping[int, NormShare]
    sums: GradientSums | None = None

    def on_backward(self, stage: int, version: int, *, is_last: bool) -> IsFinal | None:
        if self.sums is None or not (is_last or self._sums_each(stage)):
            return None
        self.sums.expect(stage, version)
        return self.sums.accumulated

    def on_micro_batch(self, stage: int, version: int) -> None:
        if self._sums_each(stage):
            self._begin(stage, version)

    def on_gradients(self, stage: int, version: int) -> None:
        if not self._sums_each(stage):
            self._begin(stage, version)

    def on_sums(self, stage: int, version: int) -> None:
        if self.sums is not None:
            waits = f"waits for the gradients of stage {stage} from {self.sums.peers}"
            with self.activities.during(Activity("exchange", waits)):
                self.sums.finish(stage, version)

    def _begin(self, stage: int, version: int) -> None:
        if self.sums is not None:
            with self.activities.during(Activity("exchange", "sends gradients to its replicas")):
                self.sums.begin(stage, version)

    def _sums_each(self, stage: int) -> bool:
        return self.shares[stage].shards.each_backward


def gradient_sums(
    shares: Mapping[int, NormShare],
    tied_parameters: Sequence[TiedParameter],
    world: World,
    gradient_group: dist.ProcessGroup | None,
) -> GradientSums | None:
    """The sums of gradients over replicas; None without any."""
    if gradient_group is None and not tied_parameters:
        return None
    all_ranks = {
        *world.grid.copies_of(world.rank),
        *(rank for tied in tied_parameters for rank in tied.ranks),
    }
    others = sorted(all_ranks - {world.rank})
    peers = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    return GradientSums(shares, gradient_group, peers, tied_parameters=tied_parameters)


def make_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, shards: Shards = WHOLE
) -> list[_Bucket]:
    """Buckets of one owner, dtype and device each, from the last parameter to the first."""
    reverse = _with_gradients(reversed(parameters))
    return [_Bucket(own, shards=shards) for own in bucketed(reverse, shards.kind, bucket_bytes)]


def _with_gradients(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def describe_statistics(plan: Plan, frozen: Collection[str]) -> str:
    """What replicas change about the batch norms of a plan that train, all but those whose
    parameters are frozen; "" without some."""
    names = (name for stage in plan.stages for name in stage.buffers)
    ends = (name.rpartition(".") for name in names)
    norms = [path for path, _, end in ends if end == "running_mean"]
    if not (trained := sum(f"{path}.weight" not in frozen for path in norms)):
        return ""
    return (
        f"the running statistics of {counted(trained, 'batch norm')} will be those of the first "
        "replica's micro-batches; one pipeline's would be those of all"
    )


@contextmanager
def first_buffers(modules: Mapping[int, nn.Module], world: World) -> Iterator[None]:
    """Inside, the stages of a replica have the buffers of the first rank with the same stages.
    Collective among these ranks."""
    own = [buffer.clone() for buffer in _buffers(modules)] if world.data_parallel_group else []
    share_buffers(modules, world)
    try:
        yield
    finally:
        for buffer, value in zip(_buffers(modules), own, strict=False):
            buffer.copy_(value)


@torch.no_grad()
def share_buffers(modules: Mapping[int, nn.Module], world: World) -> None:
    """Gives the stages of a replica the buffers of the first rank with the same stages. Collective
    among these ranks."""
    buffers = _buffers(modules)
    if world.data_parallel_group is None or not buffers:
        return
    content = torch.cat([_bytes(buffer) for buffer in buffers])
    first = world.grid.copies_of(world.rank)[0]
    dist.broadcast(content, src=first, group=world.data_parallel_group)
    parts = torch.split(content, [buffer.nbytes for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        # A copy is aligned for every dtype.
        buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _buffers(modules: Mapping[int, nn.Module]) -> list[Tensor]:
    return [buffer for module in modules.values() for buffer in module.buffers()]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8).cpu()
