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

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from ..sharding.buckets import Bucket, UnderWay, make_buckets, with_gradients
from ..sharding.shards import BUCKET_BYTES, naming_peers
from ..staleness.weight_versions import IsFinal
from ..tensor_files import dense
from .clipping import NormShare


@dataclass(eq=False)
class _Window:
    """The buckets of one stage.

    begun: the number of buckets whose all-reduce has begun.
    is_open: True while the last backward runs.
    version: the version that the step with these gradients makes.
    """

    buckets: list[Bucket]
    begun: int = 0
    is_open: bool = False
    version: int = 0


@dataclass
class Summed:
    """The cost of the sums of a step on a rank.

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
        self._under_way = UnderWay()
        groups = {tied.parameter: tied.group for tied in tied_parameters}
        self._shared = {
            stage: [
                Bucket([parameter], groups.get(parameter))
                for parameter in with_gradients(groups or share.shared)
            ]
            for stage, share in shares.items()
        }
        self._place: dict[Tensor, tuple[_Window, Bucket]] = {
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
        """The cost of the sums of all stages for the steps to a version."""
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
        window = self._windows[stage]
        with self._naming_peers():
            for bucket in (*window.buckets, *self._shared[stage]):
                self._under_way.collect(bucket)
            flags = self._flags_of(window)
        for bucket in (*window.buckets, *self._shared[stage]):
            bucket.finish(flags.get(bucket))

    def _flags_of(self, window: _Window) -> dict[Bucket, list[float]]:
        """The number of replicas that have a gradient of each parameter, for the buckets whose
        messages leave it out."""
        buckets = [bucket for bucket in window.buckets if bucket.shards.each_backward]
        if not buckets:
            return {}
        own = torch.tensor([float(has) for bucket in buckets for has in bucket.given])
        own = own.to(buckets[0].parameters[0].device)
        dist.all_reduce(own, group=self._group)
        counts = iter(own.tolist())
        return {bucket: [next(counts) for _ in bucket.parameters] for bucket in buckets}

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

    def _begin(self, bucket: Bucket, version: int) -> None:
        with self._naming_peers():
            if bucket.shards.each_backward:
                sent = self._under_way.begin(bucket, self._group)
            else:
                sent = bucket.begin(self._group)
        counts = self._counts[version]
        counts.elements += bucket.numbers
        # Where single stages have replicas, the holders of a tied parameter sum it together.
        counts.sent["replicas" if bucket.group is None else "tied"] += sent

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


def describe_statistics(plan: Plan, frozen: Collection[str]) -> str:
    """The effect of replicas on the batch norms of a plan whose parameters train, in words; "" for
    a plan without such norms."""
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
    return dense(tensor).flatten().view(torch.uint8).cpu()
