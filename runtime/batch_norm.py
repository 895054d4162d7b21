"""Batch norms of a stage -> running statistics as if a mini-batch were one batch.

Each micro-batch is normalised by its own mean and variance, as ever; the running statistics are
updated once a mini-batch, with the mean and variance of all its samples. (torchgpipe, Kim et al.
2020, section 4.3, calls it deferred batch normalization.) Means and sums of squared deviations
are put together by the formula of Chan, Golub and LeVeque (1979).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(slots=True)
class _Moments:
    """How many values a channel had, their mean, and the sum of squared deviations from it."""

    count: int
    mean: Tensor
    squares: Tensor

    def __add__(self, other: _Moments) -> _Moments:
        count = self.count + other.count
        apart = other.mean - self.mean
        return _Moments(
            count,
            self.mean + apart * (other.count / count),
            self.squares + other.squares + apart.square() * (self.count * other.count / count),
        )


class MiniBatchNorm:
    """The batch norms of one module that keep running statistics."""

    def __init__(self, module: nn.Module) -> None:
        self._norms = [
            norm
            for norm in module.modules()
            if isinstance(norm, _BatchNorm) and norm.running_mean is not None
        ]
        self._window: int | None = None
        self._seen: dict[int, dict[_BatchNorm, _Moments]] = defaultdict(dict)
        for norm in self._norms:
            norm.register_forward_pre_hook(self._count)

    @contextmanager
    def counting(self, window: int | None) -> Iterator[None]:
        """Around a forward: statistics stay as they are, and its values are counted in a window,
        None for a second forward."""
        self._window = window
        for norm in self._norms:
            norm.track_running_stats = False
        try:
            yield
        finally:
            self._window = None
            for norm in self._norms:
                norm.track_running_stats = True

    @torch.no_grad()
    def finish(self, window: int) -> None:
        """Updates the running statistics by all that was counted up to a window, as one batch."""
        together: dict[_BatchNorm, _Moments] = {}
        for number in sorted(number for number in self._seen if number <= window):
            for norm, moments in self._seen.pop(number).items():
                together[norm] = together[norm] + moments if norm in together else moments
        for norm, moments in together.items():
            mean, variance, updates = norm.running_mean, norm.running_var, norm.num_batches_tracked
            assert mean is not None and variance is not None and updates is not None
            updates += 1
            share = 1 / float(updates) if norm.momentum is None else norm.momentum
            mean += share * (moments.mean - mean)
            variance += share * (moments.squares / max(1, moments.count - 1) - variance)

    @torch.no_grad()
    def _count(self, norm: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._window is None or not norm.training:
            return
        assert isinstance(norm, _BatchNorm) and norm.running_mean is not None
        values = arguments[0].detach().to(norm.running_mean.dtype)
        count = values.numel() // values.shape[1]
        others = [dimension for dimension in range(values.dim()) if dimension != 1]
        variance, mean = torch.var_mean(values, others, correction=0)
        moments, seen = _Moments(count, mean, variance * count), self._seen[self._window]
        seen[norm] = seen[norm] + moments if norm in seen else moments
