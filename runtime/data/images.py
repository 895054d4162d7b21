"""Real labelled images: scikit-learn's 1,797 handwritten digits, at the size a model reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import DataError
from .task import Task

CLASSES = 10
_TRAIN_DIGITS = 1437


class Digits:
    """8 x 8 grey digits, interpolated to `f32[channels, height, width]` when they are asked for.

    The last 360 digits, written by other people than most of the first, are for evaluation.
    """

    def __init__(
        self, task: Task, shape: tuple[int, ...], *, evaluation: bool, dtype: torch.dtype
    ) -> None:
        if task.classes is not None and task.classes < CLASSES:
            raise DataError(
                f"digits has {CLASSES} classes, the model tells {task.classes} apart.",
                "Partition the model again with 10 labels, or give --data my_file.py:function",
            )
        images, labels = _load_digits()
        part = slice(_TRAIN_DIGITS, None) if evaluation else slice(_TRAIN_DIGITS)
        self._images, self._labels = images[part], labels[part]
        self._task = task
        self._channels, self._size = shape[0], shape[1:]
        self._dtype = dtype

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in (self._task.sample, self._task.label) if name)

    def __len__(self) -> int:
        return len(self._labels)

    def get(self, indices: Sequence[int], fields: Collection[str]) -> dict[str, Tensor]:
        chosen = torch.tensor(indices)
        found = {}
        if self._task.sample in fields:
            grey = self._images[chosen].unsqueeze(1)
            large = F.interpolate(grey, self._size, mode="bilinear", align_corners=False)
            found[self._task.sample] = large.repeat(1, self._channels, 1, 1).to(self._dtype)
        if self._task.label in fields:
            found[str(self._task.label)] = self._labels[chosen]
        return found


def _load_digits() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "--data digits needs scikit-learn, which is not installed.",
            'pip install "asyncpipe[data]"',
        ) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float() / 16
    return (images - images.mean()) / images.std(), torch.from_numpy(digits.target).long()
