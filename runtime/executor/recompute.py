"""Recompute: a stage's second forward, equal to the first one to the last bit.

Instead of the activations, only the arguments of a forward are kept, the state of its random
generator, and its module's buffers if they change: a second forward begins with the values that the
first one found, and its changes to them are discarded, so running statistics are updated once. Chen
et al., "Training Deep Nets with Sublinear Memory Cost" (2016).

`MiniBatchNorm` updates the running statistics of batch norms as if a mini-batch were one batch.
Each micro-batch is still normalized by its own mean and variance; the running statistics are
updated once a mini-batch, with the mean and variance of all its samples. (torchgpipe, Kim et al.
2020, section 4.3, calls it deferred batch normalization.) Means and sums of squared deviations are
combined by the formula of Chan, Golub and LeVeque (1979).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm


class Buffers:
    """The buffers of one module, some of which forwards change.

    A batch norm writes to its statistics without a change of version, but in every forward:
    comparing values before and after the first forward finds these, versions find all others.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: set[str] = set()
        self._is_first = True

    @contextmanager
    def remembered(self, earlier: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Wraps a forward; yields the values that it found in the buffers that forwards change.

        When a buffer changes for the first time, `earlier` forwards found the same value.
        """
        with torch.no_grad():
            begin = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        before = self._versions()
        values = dict(begin)
        yield values
        changed = {name for name, version in self._versions().items() if version != before[name]}
        if self._is_first:
            now = dict(self._module.named_buffers())
            changed |= {name for name in begin if not torch.equal(begin[name], now[name])}
            self._is_first = False
        for name in changed - self._changing:
            for other in earlier:
                other.setdefault(name, begin[name])
        self._changing |= changed
        for name in values.keys() - self._changing:
            del values[name]

    def _versions(self) -> dict[str, tuple[int, int]]:
        """The identity of each buffer, and how often it was written to."""
        return {
            name: (id(buffer), buffer._version) for name, buffer in self._module.named_buffers()
        }


class ChangedTensors:
    """The parameters and buffers that a module's forward writes to. Other micro-batches are in
    flight, and each must find the values that its own forward read."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        parameters = dict(module.named_parameters())
        self._parameters = [parameters[name] for name in names if name in parameters]
        self._buffers = [name for name in names if name not in parameters]
        self._module = module

    def values(self) -> list[Tensor]:
        """Copies of the current values of the parameters."""
        return [parameter.detach().clone() for parameter in self._parameters]

    @contextmanager
    def holding(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Wraps a second forward: the parameters have the values that the first one found, and
        afterwards the current ones."""
        now = self.values()
        self._write(values)
        try:
            yield
        finally:
            self._write(now)

    @contextmanager
    def saved_apart(self) -> Iterator[None]:
        """Wraps a forward: values that its backward needs of them are saved as copies."""
        changed = [*self._parameters, *map(self._module.get_buffer, self._buffers)]
        if not changed:
            yield
            return
        memory = {tensor.untyped_storage()._cdata for tensor in changed}

        def saved(tensor: Tensor) -> Tensor:
            is_theirs = tensor.untyped_storage()._cdata in memory
            return tensor.detach().clone() if is_theirs else tensor

        with saved_tensors_hooks(saved, lambda tensor: tensor):
            yield

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)


class WrittenArguments:
    """The arguments that a module's forward writes to in place.

    Arguments also belong to the stage that made them, to other readers and to a second forward, and
    a leaf cannot be written to. So the forward gets copies of arguments that it writes to, and in
    the first forward, which finds out which these are, copies of all.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._written: set[int] | None = None

    @contextmanager
    def guarded(self, arguments: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Wraps a forward; yields its arguments. Raises RuntimeError for an argument that was
        written to now, but not in the first forward."""
        known = self._written
        given = tuple(
            argument.clone() if known is None or number in known else argument
            for number, argument in enumerate(arguments)
        )
        before = [argument._version for argument in given]
        yield given
        written = {
            number for number, argument in enumerate(given) if argument._version != before[number]
        }
        if known is None:
            self._written = written
        elif not written <= known:
            name = self._names[min(written - known)]
            raise RuntimeError(
                f"{name} is written to in place, which it was not in the first forward; "
                "write to a copy of it"
            )


@contextmanager
def nothing_saved() -> Iterator[None]:
    """A forward inside is that of a training run, kernel for kernel, but keeps nothing for a
    backward."""

    def forget(_: Tensor) -> None:
        return None

    def never(_: Any) -> Tensor:
        raise AssertionError("a forward that saved nothing was asked for a backward")

    with saved_tensors_hooks(forget, never):
        yield


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
