"""Resolved settings -> how the samples of one optimizer step lie in its micro-batches.

All micro-batches have one size; where that does not divide the samples, the last has what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from .settings import Settings


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The samples of each micro-batch of a step.

    >>> batch = StepBatch((8, 8, 8, 6))
    >>> batch.samples, batch.is_even, batch.place(5)
    (30, False, (38, 8))
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, settings: Settings) -> StepBatch:
        count, size = settings.micro_batches or 1, settings.micro_batch_size or 1
        total = settings.global_batch_size or count * size
        return cls((*(size for _ in range(count - 1)), total - (count - 1) * size))

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    @property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    def place(self, micro_batch: int) -> tuple[int, int]:
        """The position of the first sample of a micro-batch, counted over all steps, and how many
        it has."""
        step, index = divmod(micro_batch, len(self.sizes))
        return step * self.samples + sum(self.sizes[:index]), self.sizes[index]
