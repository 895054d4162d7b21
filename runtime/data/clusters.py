"""The teaching data: labelled points around corners of a hypercube, 10 clusters a class.

Made as Guyon's "Design of experiments of the NIPS 2003 variable selection benchmark" makes them:
half of the features carry information, two are mixtures of these, the others are noise, and one
label in a hundred is wrong. With so few samples in so many dimensions it can be memorised but
hardly learned: it serves to compare training losses, not qualities.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import torch
from torch import Tensor

from .task import Task

SAMPLES = 10_000
CLASSES = 32
_CLUSTERS = 10
_REDUNDANT = 2
_WRONG_LABELS = 0.01
_EVALUATION_SHARE = 0.1
_SEED = 2003


class Clusters:
    """10,000 points `f32[features]` and their classes; a tenth of them is for evaluation.

    Labels alone cost nothing: the points are made when they are first asked for.
    """

    def __init__(self, task: Task, features: int, *, evaluation: bool, dtype: torch.dtype) -> None:
        self._task = task
        self._features = features
        self._classes = task.classes or CLASSES
        self._dtype = dtype
        held_out = int(SAMPLES * _EVALUATION_SHARE)
        self._first, self._length = (
            (SAMPLES - held_out, held_out) if evaluation else (0, SAMPLES - held_out)
        )

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in (self._task.sample, self._task.label) if name)

    def __len__(self) -> int:
        return self._length

    def get(self, indices: Sequence[int], fields: Collection[str]) -> dict[str, Tensor]:
        chosen = torch.tensor(indices) + self._first
        found = {}
        if self._task.sample in fields:
            found[self._task.sample] = self._points[chosen].to(self._dtype)
        if self._task.label in fields:
            found[str(self._task.label)] = self._labels[chosen]
        return found

    @cached_property
    def _cluster_of_sample(self) -> Tensor:
        order = torch.randperm(SAMPLES, generator=_generator("order"))
        return order % (self._classes * _CLUSTERS)

    @cached_property
    def _labels(self) -> Tensor:
        generator = _generator("labels")
        wrong = torch.rand(SAMPLES, generator=generator) < _WRONG_LABELS
        drawn = torch.randint(self._classes, (SAMPLES,), generator=generator)
        return torch.where(wrong, drawn, self._cluster_of_sample % self._classes)

    @cached_property
    def _points(self) -> Tensor:
        generator = _generator("points")
        informative = max(1, self._features // 2)
        points = torch.randn(SAMPLES, self._features, generator=generator)
        for cluster in range(self._classes * _CLUSTERS):
            corner = torch.randint(2, (informative,), generator=generator) * 2.0 - 1.0
            mixing = torch.rand(informative, informative, generator=generator) * 2 - 1
            members = self._cluster_of_sample == cluster
            points[members, :informative] = points[members, :informative] @ mixing + corner
        redundant = min(_REDUNDANT, self._features - informative)
        weights = torch.rand(informative, redundant, generator=generator) * 2 - 1
        mixtures = points[:, :informative] @ weights
        points[:, informative : informative + redundant] = mixtures
        return points


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(_SEED + sum(map(ord, name)))
