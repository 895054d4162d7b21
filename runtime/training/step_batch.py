"""Resolved settings -> how the samples of one optimizer step lie in its micro-batches.

All micro-batches have one size; where that does not divide the samples, the last has what is left.
Of several replicas the first has the first micro-batches of every step, and so on, so that a step
is the same as one pipeline's with all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .settings import Settings


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The samples of each micro-batch of a step, in all replicas. A run that is resumed after
    `first_step` steps begins at `first_sample`, whatever the batch was before.

    >>> batch = StepBatch((8, 8, 8, 6), replicas=2)
    >>> batch.samples, batch.is_even, batch.place(5)
    (30, False, (38, 8))
    >>> batch.sizes_of(replica=1), batch.first_of(step=2, replica=1)
    ((8, 6), 10)
    """

    sizes: tuple[int, ...]
    replicas: int = 1
    first_step: int = 0
    first_sample: int = 0

    @classmethod
    def of(cls, settings: Settings, *, first_step: int = 0, first_sample: int = 0) -> StepBatch:
        replicas = settings.replicas or 1
        count, size = replicas * (settings.micro_batches or 1), settings.micro_batch_size or 1
        total = settings.global_batch_size or count * size
        sizes = (*(size for _ in range(count - 1)), total - (count - 1) * size)
        return cls(sizes, replicas, first_step, first_sample)

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    @property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    @property
    def in_replica(self) -> int:
        """The micro-batches of a step in each replica."""
        return len(self.sizes) // self.replicas

    def sizes_of(self, replica: int) -> tuple[int, ...]:
        first = replica * self.in_replica
        return self.sizes[first : first + self.in_replica]

    def first_of(self, step: int, replica: int) -> int:
        """The number of a replica's first micro-batch of a step, both counted from 0."""
        return step * len(self.sizes) + replica * self.in_replica

    def place(self, micro_batch: int) -> tuple[int, int]:
        """The position of the first sample of a micro-batch, counted over all steps, and how many
        it has."""
        step, index = divmod(micro_batch, len(self.sizes))
        return self.position(step) + sum(self.sizes[:index]), self.sizes[index]

    def position(self, step: int) -> int:
        """The samples that were consumed when so many steps were made."""
        return self.first_sample + (step - self.first_step) * self.samples


def consumed(settings: Settings, batch: StepBatch, step: int) -> int:
    """The samples of the first steps of a run, whose last may be a short one.

    >>> settings = Settings(folder="x", samples=30, remainder="proportional", steps=2,
    ...     micro_batches=4, micro_batch_size=4)
    >>> consumed(settings, StepBatch.of(settings), 1), consumed(settings, StepBatch.of(settings), 2)
    (16, 28)
    """
    if settings.left_over and step == settings.steps:
        return batch.position(step - 1) + settings.left_over * (settings.micro_batch_size or 1)
    return batch.position(step)
