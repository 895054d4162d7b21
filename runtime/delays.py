"""The closed forms of staleness: which weight versions a micro-batch meets at a stage.

A stage runs W forwards ahead (`asynchronous.depths`) and steps after every k-th backward. The
forward of micro-batch t comes after the backward of t-W-1 and before that of t-W, so that it finds
the steps of max(0, t-W) micro-batches, and its backward those of t:

    forward   floor(max(0, t-W) / k)
    backward  floor(t / k)
    delay     their difference: W/k in the mean, ceil(W/k) at most
    tau       of a step: the mean delay of its k micro-batches, W/k once the ramp is over
    2bw       forward floor(t / k) - 1 or 0, over all segments, whatever W < k is: delay 1

t counts from the start of a segment, which begins with all stages at one version and no micro-batch
in flight. Where segments end, the ramp begins again: in a segment of one step nothing is late.

The gradient of a parameter that several stages share is used D = ceil(W/k) steps after its window,
W being that of the holder that runs furthest ahead. Its tau is D more than the mean over its
holders, the same at all of them. The tests compare these forms with the versions
that schedules count, and runs with the ledgers of their ranks.

Sources: Narayanan et al., PipeDream, SOSP 2019, section 3.3, and PipeDream-2BW, ICML 2021, section
3.1; Eliad et al., FTPipe, ATC 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Delays:
    """The versions at stages that run `ahead` forwards ahead, in a segment that begins with
    `first_micro_batch` at `first_version`; micro-batches and versions are counted over the run.
    Under 2bw, which began with version `two_from`, all stages compute with the one before the
    newest.

    >>> two = Delays((3, 0), step_every=2)
    >>> [(two.forward(0, t), two.backward(t)) for t in range(6)]
    [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (1, 2)]
    >>> two.mean(0), two.most(0), two.most(1)
    (Fraction(3, 2), 2, 0)
    >>> [Delays((3, 0), 2, two_from=0).forward(1, t) for t in range(6)]
    [0, 0, 0, 0, 1, 1]
    """

    ahead: tuple[int, ...]
    step_every: int
    first_micro_batch: int = 0
    first_version: int = 0
    two_from: int | None = None

    def forward(self, stage: int, micro_batch: int) -> int:
        """The version that the forward of a micro-batch reads."""
        if self.two_from is not None:
            return max(self.two_from, self.backward(micro_batch) - 1)
        before = max(0, micro_batch - self.first_micro_batch - self.ahead[stage])
        return self.first_version + before // self.step_every

    def backward(self, micro_batch: int) -> int:
        """The version that its backward finds, at every stage."""
        return self.first_version + (micro_batch - self.first_micro_batch) // self.step_every

    def delay(self, stage: int, micro_batch: int) -> int:
        """Steps between the two."""
        return self.backward(micro_batch) - self.forward(stage, micro_batch)

    def mean(self, stage: int) -> Fraction:
        """The mean delay once the ramp is over."""
        if self.two_from is not None:
            return Fraction(1)
        return Fraction(self.ahead[stage], self.step_every)

    def most(self, stage: int) -> int:
        """The largest delay."""
        if self.two_from is not None:
            return 1
        return -(-self.ahead[stage] // self.step_every)

    def of_step(self, stage: int, version: int) -> Fraction:
        """Tau of the step that makes `version`: the mean delay of the gradients that it uses.

        >>> [str(Delays((3, 0), 2).of_step(0, version)) for version in (1, 2, 3, 9)]
        ['0', '1', '3/2', '3/2']
        """
        if self.two_from is not None:
            return Fraction(min(1, version - 1 - self.two_from))
        every = self.step_every
        begun = (version - 1 - self.first_version) * every
        if begun >= self.ahead[stage]:
            return self.mean(stage)
        first = self.first_micro_batch + begun
        delays = (self.delay(stage, micro_batch) for micro_batch in range(first, first + every))
        return Fraction(sum(delays), every)

    def of_shared_step(self, stages: Sequence[int], version: int) -> Fraction:
        """Tau of the same step for a parameter that these stages share.

        >>> str(Delays((3, 2, 0), 2).of_shared_step([0, 2], version=9))
        '11/4'
        """
        late = -(-max(self.ahead[stage] for stage in stages) // self.step_every)
        each = [self.of_step(stage, version) for stage in stages]
        return late + sum(each, Fraction(0)) / len(each)

    def has(self, stage: int, micro_batch: int, forward: int, backward: int) -> bool:
        """Whether a ledger's entry is that of the closed form."""
        expected = self.forward(stage, micro_batch), self.backward(micro_batch)
        return (forward, backward) == expected

    def ledger(self, micro_batches: int) -> Iterator[tuple[int, int, int, int]]:
        """Stage, micro-batch, version at its forward and at its backward, of the whole segment."""
        for micro_batch in range(self.first_micro_batch, self.first_micro_batch + micro_batches):
            for stage in range(len(self.ahead)):
                met = self.forward(stage, micro_batch), self.backward(micro_batch)
                yield stage, micro_batch, *met
