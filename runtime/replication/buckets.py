"""Gradients of one stage in several replicas -> their sum in all of them, while backwards go on.

PyTorch's way (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2): gradients go into buckets
of about 25 MB, from the last parameter to the first as a backward makes them, and a bucket's
all-reduce begins when all its gradients are final, in the order of the buckets, which is the same
on all replicas. A gradient is final when the window's last backward has accumulated it; where that
backward is in two parts, or leaves a parameter out, when the window is complete. A loss counts its
samples' share of the whole step in every replica, so the sum of gradients is their mean.

A parameter of several stages has a bucket to itself, summed after its holders have exchanged their
gradients: buckets of one size are added in one order, so its holders stay equal to the last bit.
Where single stages have replicas, all ranks of all its holders sum it together instead.
A gradient that no replica has stays None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import TransportError
from ..training.clipping import Share
from .holders import Held

BUCKET_BYTES = 25 << 20


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients travel together, among the ranks of `group`, if it is another than
    that of all buckets; `missing` are not final yet, and `has_all` says whether this replica had a
    gradient of each."""

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup | None = None
    missing: int = 0
    has_all: bool = False
    flat: Tensor | None = None
    work: dist.Work | None = None


@dataclass(eq=False)
class _Window:
    """The buckets of one stage, and how many of them are on their way."""

    buckets: list[_Bucket]
    begun: int = 0
    is_open: bool = False


class GradientSums:
    """Sums the gradients of one rank's stages over the ranks of `group`, which have the same; None
    where no other has.

    `peers` names them in errors. `held` are the parameters of several stages, if they are summed
    over all of their ranks. For each window of a stage `expect` may be called before its last
    backward, then `begin` after it, and `finish` before the gradients are read.
    """

    def __init__(
        self,
        shares: Mapping[int, Share],
        group: dist.ProcessGroup | None,
        peers: str,
        *,
        held: Sequence[Held] = (),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group, self._peers = group, peers
        self._windows = {
            stage: _Window(make_buckets(share.own, bucket_bytes) if group else [])
            for stage, share in shares.items()
        }
        groups = {each.parameter: each.group for each in held}
        self._shared = {
            stage: [
                _Bucket([parameter], groups.get(parameter))
                for parameter in _with_gradients(groups or share.shared)
            ]
            for stage, share in shares.items()
        }
        for window in self._windows.values():
            for bucket in window.buckets:
                for parameter in bucket.parameters:
                    self._follow(parameter, bucket, window)

    def expect(self, stage: int) -> None:
        """The stage's last backward begins: what it accumulates is final."""
        window = self._windows[stage]
        window.is_open = True
        for bucket in window.buckets:
            bucket.missing = len(bucket.parameters)

    def begin(self, stage: int) -> None:
        """The stage's own gradients are all final."""
        window = self._windows[stage]
        window.is_open = False
        for bucket in window.buckets[window.begun :]:
            self._begin(bucket)
        window.begun = 0

    def finish(self, stage: int) -> None:
        """Waits until all the stage's gradients are sums, those of parameters that other stages
        hold too among them. Raises TransportError."""
        for bucket in self._shared[stage]:
            self._begin(bucket)
        for bucket in (*self._windows[stage].buckets, *self._shared[stage]):
            self._finish(bucket)

    def _follow(self, parameter: nn.Parameter, bucket: _Bucket, window: _Window) -> None:
        def accumulated(_: Tensor) -> None:
            if not window.is_open:
                return
            bucket.missing -= 1
            while window.begun < len(window.buckets) and not window.buckets[window.begun].missing:
                self._begin(window.buckets[window.begun])
                window.begun += 1

        parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def _begin(self, bucket: _Bucket) -> None:
        """Sends the gradients in one tensor, behind them which of them there are."""
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
        bucket.has_all = all(given)
        for parameter in parameters:
            parameter.grad = None  # now in the bucket
        with self._telling():
            group = bucket.group or self._group
            bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)

    def _finish(self, bucket: _Bucket) -> None:
        assert bucket.flat is not None and bucket.work is not None
        with self._telling():
            bucket.work.wait()
        parameters = bucket.parameters
        sizes = [*(parameter.numel() for parameter in parameters), len(parameters)]
        *sums, given = torch.split(bucket.flat, sizes)
        counts = [1.0] * len(parameters) if bucket.has_all else given.tolist()
        for parameter, total, count in zip(parameters, sums, counts, strict=True):
            # A view: the gradients are in the bucket until the stage has stepped.
            parameter.grad = total.view_as(parameter) if count else None
        bucket.flat = bucket.work = None

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Within, an error of torch.distributed becomes one that names who is waited for."""
        try:
            yield
        except RuntimeError as error:
            raise TransportError(
                f"the gradients cannot be summed over {self._peers}: {str(error).splitlines()[0]}",
                "What the others say tells why; --timeout-s allows more time.",
            ) from error


def make_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """From the last parameter to the first, those of one dtype and device together."""
    buckets: list[_Bucket] = []
    size = 0
    for parameter in _with_gradients(reversed(parameters)):
        last = buckets[-1].parameters[-1] if buckets else None
        fits = last is not None and size + parameter.nbytes <= bucket_bytes
        if not fits or last is None or (last.dtype, last.device) != _kind(parameter):
            buckets.append(_Bucket([]))
            size = 0
        buckets[-1].parameters.append(parameter)
        size += parameter.nbytes
    return buckets


def _with_gradients(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
