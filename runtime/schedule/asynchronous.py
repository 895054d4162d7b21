"""Schedules without a flush, and their staleness in closed form.

Stage j runs W_j forwards ahead, then alternates a forward and a backward, and steps after every
k-th backward while other stages continue. W_j and k alone determine how stale its weights are:

    async-1f1b             W_j = p-1-j, or as `--ahead` says
    virtual-stages-1f1b    W_j = max(0, min(p-1, S k) - j): no delay above S
    2bw                    as async-1f1b, with k >= p: no delay above 1

`Delays` has the versions that a micro-batch meets at a stage. The forward of micro-batch t comes
after the backward of t-W-1 and before that of t-W, so it sees the steps of max(0, t-W)
micro-batches, and its backward those of t:

    forward   floor(max(0, t-W) / k)
    backward  floor(t / k)
    delay     their difference: W/k in the mean, ceil(W/k) at most
    tau       of a step: the mean delay of its k micro-batches, W/k once the ramp is over
    2bw       forward floor(t / k) - 1 or 0, over all segments, whatever W < k is: delay 1

t counts from the start of a segment, which begins with all stages at one version and no micro-batch
in flight. Each segment begins with a new ramp: in a segment of one step no gradient is late.

The gradient of a parameter that several stages share is used D = ceil(W/k) steps after its window,
where W is that of the holder that runs furthest ahead. Its tau is D more than the mean over its
holders, the same at all of them. Tests compare these forms with the versions that schedules count,
and with the ledgers of runs.

`weight_copies` predicts how many copies of a stage's weights its staleness methods keep. Weights
that passes read and that are not live lie in leaves (`weight_versions.py`): one set for each
older version or prediction in flight if they are kept until the backward; otherwise one set that is
refilled for each pass. A method may keep other tensors as well. Tests compare these numbers with
the peaks of runs.

Sources: Narayanan et al., PipeDream, SOSP 2019, section 3.3; "Memory-efficient pipeline-parallel
DNN training" (PipeDream-2BW), ICML 2021, section 3.1; Eliad et al., FTPipe, ATC 2021, whose virtual
stages are one stage of the pipeline short of the delay that they allow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from ..errors import ScheduleError
from .schedule import Schedule, alternating

DEFAULT_CAP = 1
"""The default limit of the delay under virtual-stages-1f1b."""


def async_1f1b(
    stages: int,
    micro_batches: int,
    step_every: int,
    warmup: Sequence[int] | None = None,
    *,
    name: str = "async-1f1b",
) -> Schedule:
    """1f1b without a flush: every stage steps after each `step_every`-th backward and continues.

    The whole segment has `micro_batches`, and is drained at its end. `warmup` has the forwards that
    each stage runs ahead, by default p-1-j; a deeper warm-up hides slow links and makes the weights
    staler, a shallower one the reverse. PipeDream (SOSP 2019) is `step_every` 1 with stashed
    weights.

    >>> print(async_1f1b(2, 4, step_every=2))
    rank 0: 0F0@v0 0F1@v0 0B0@v0 0F2@v0 0B1@v0 0S1 0F3@v1 0B2@v1 0B3@v1 0S2
    rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1S1 1F2@v1 1B2@v1 1F3@v1 1B3@v1 1S2
    """
    ahead = list(depths(stages) if warmup is None else warmup)
    if len(ahead) != stages or sorted(ahead, reverse=True) != ahead or min(ahead) < 0:
        raise ScheduleError(
            f"warmup {ahead} does not fit {stages} stages: it needs one number for each, "
            "and no stage can run further ahead than the one before it.",
            "--ahead 2x, --ahead 1, or a number for each stage: --ahead 3,2,1,0",
        )
    if micro_batches % step_every:
        raise ScheduleError(
            f"a segment of {micro_batches} micro-batches cannot have a step every {step_every}: "
            f"the last {micro_batches % step_every} would be lost.",
            f"Use {micro_batches - micro_batches % step_every + step_every} micro-batches.",
        )
    return alternating(name, micro_batches, ahead=ahead, step_every=step_every)


def virtual_stages_1f1b(
    stages: int, micro_batches: int, step_every: int, warmup: Sequence[int] | None = None
) -> Schedule:
    """async_1f1b with a limit on staleness: `warmup` is by default `capped` at DEFAULT_CAP.

    The last p - W_0 stages then have one micro-batch at a time, as if they were one stage: all
    ranks are idle for 1 - 1/(p - W_0) of the time.

    >>> virtual_stages_1f1b(4, 4, step_every=1).in_flight
    (2, 1, 1, 1)
    """
    if warmup is None:
        warmup = capped(depths(stages), step_every, DEFAULT_CAP)
    return async_1f1b(stages, micro_batches, step_every, warmup, name="virtual-stages-1f1b")


def two_bw(
    stages: int, micro_batches: int, step_every: int, warmup: Sequence[int] | None = None
) -> Schedule:
    """async_1f1b whose steps have enough micro-batches that every stage needs only two versions of
    the weights (PipeDream-2BW, section 3.1). Raises ScheduleError if they have fewer.

    >>> two_bw(2, 4, step_every=2).name
    '2bw'
    """
    furthest = max(warmup or depths(stages))
    if step_every < max(stages, furthest):
        needs = f"{stages} stages" if stages >= furthest else f"{furthest} forwards ahead"
        raise ScheduleError(
            f"2bw keeps two versions of the weights, which are enough for {needs} when a step has "
            f"{max(stages, furthest)} micro-batches or more, not {step_every}.",
            f"--micro-batches {max(stages, furthest)}, or --schedule async-1f1b --staleness stash",
        )
    return async_1f1b(stages, micro_batches, step_every, warmup, name="2bw")


ASYNCHRONOUS: Mapping[str, Callable[..., Schedule]] = {
    "async-1f1b": async_1f1b,
    "virtual-stages-1f1b": virtual_stages_1f1b,
    "2bw": two_bw,
}
"""Name -> function of the stages, the micro-batches, the micro-batches of a step, and the forwards
that each stage runs ahead (None for the default)."""


def depths(stages: int, ahead: str | None = None) -> tuple[int, ...]:
    """The forwards that each stage runs ahead: p-1-j at stage j, or as the text `ahead` says.

    `2x` doubles the default, and each further multiple gives a link the time of one more forward
    and backward; `1` is the default, but at most 1; `5,3,1,0` has a number a stage. Raises
    ScheduleError for another text, or if a stage would run further ahead than the one before it.

    >>> depths(4), depths(4, "2x"), depths(4, "1"), depths(4, "5,3,1,0")
    ((3, 2, 1, 0), (6, 4, 2, 0), (1, 1, 1, 0), (5, 3, 1, 0))
    """
    usual = tuple(range(stages - 1, -1, -1))
    if ahead is None:
        return usual
    text = ahead.replace(" ", "")
    if times := re.fullmatch(r"(\d{1,6})x", text):
        return tuple(int(times[1]) * forwards for forwards in usual)
    if re.fullmatch(r"\d{1,9}", text):
        return tuple(min(int(text), forwards) for forwards in usual)
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})+", text):
        raise ScheduleError(
            f"--ahead {ahead} is not a valid number of forwards.",
            "--ahead 2x doubles them, --ahead 1 allows 1 at most, "
            f"--ahead {','.join(map(str, usual))} is the default for {stages} stages.",
        )
    given = tuple(map(int, text.split(",")))
    if len(given) != stages:
        raise ScheduleError(
            f"--ahead {ahead} has {len(given)} numbers for {stages} stages.",
            f"--ahead {','.join(map(str, usual))} is the default.",
        )
    for stage, (before, forwards) in enumerate(zip(given, given[1:], strict=False)):
        if forwards > before:
            raise ScheduleError(
                f"--ahead {ahead}: stage {stage + 1} would run {forwards} forwards ahead, but "
                f"stage {stage} before it gives it no more than {before}.",
                "Let the numbers fall from stage to stage.",
            )
    return given


def capped(ahead: Sequence[int], step_every: int, cap: int) -> tuple[int, ...]:
    """Reduces every stage's forwards ahead by the same number, so that no delay is above `cap`
    steps.

    The first stage's delay is then exactly `cap`, if it was above. Later stages could be allowed as
    many forwards as the first: they would be staler, hold more, and be no faster, since the first
    stage limits the rate of micro-batches.

    >>> capped((7, 6, 5, 4, 3, 2, 1, 0), step_every=2, cap=2)
    (4, 3, 2, 1, 0, 0, 0, 0)
    """
    excess = max(0, ahead[0] - cap * step_every)
    return tuple(max(0, forwards - excess) for forwards in ahead)


@dataclass(frozen=True, slots=True)
class Delays:
    """The weight versions in a segment; micro-batches and versions are counted over the run.

    >>> two = Delays((3, 0), step_every=2)
    >>> [(two.forward(0, t), two.backward(t)) for t in range(6)]
    [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (1, 2)]
    >>> two.mean(0), two.most(0), two.most(1)
    (Fraction(3, 2), 2, 0)
    >>> [Delays((3, 0), 2, two_from=0).forward(1, t) for t in range(6)]
    [0, 0, 0, 0, 1, 1]
    """

    ahead: tuple[int, ...]
    """The forwards that each stage runs ahead."""
    step_every: int
    """The micro-batches of a step."""
    first_micro_batch: int = 0
    """The first micro-batch of the segment."""
    first_version: int = 0
    """The version at the start of the segment."""
    two_from: int | None = None
    """The version with which 2bw began; since then all stages compute with the version before the
    newest."""

    def forward(self, stage: int, micro_batch: int) -> int:
        """The version that the forward of a micro-batch reads."""
        if self.two_from is not None:
            return max(self.two_from, self.backward(micro_batch) - 1)
        before = max(0, micro_batch - self.first_micro_batch - self.ahead[stage])
        return self.first_version + before // self.step_every

    def backward(self, micro_batch: int) -> int:
        """The live version at the backward of a micro-batch, at every stage."""
        return self.first_version + (micro_batch - self.first_micro_batch) // self.step_every

    def delay(self, stage: int, micro_batch: int) -> int:
        """The steps between the two."""
        return self.backward(micro_batch) - self.forward(stage, micro_batch)

    def mean(self, stage: int) -> Fraction:
        """The mean delay after the ramp."""
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
        delays = [self.of_step(stage, version) for stage in stages]
        return late + sum(delays, Fraction(0)) / len(delays)

    def has(self, stage: int, micro_batch: int, forward: int, backward: int) -> bool:
        """True if a ledger entry equals the closed form."""
        expected = self.forward(stage, micro_batch), self.backward(micro_batch)
        return (forward, backward) == expected

    def ledger(self, micro_batches: int) -> Iterator[tuple[int, int, int, int]]:
        """Stage, micro-batch, and version at its forward and backward, for the whole segment."""
        for micro_batch in range(self.first_micro_batch, self.first_micro_batch + micro_batches):
            for stage in range(len(self.ahead)):
                met = self.forward(stage, micro_batch), self.backward(micro_batch)
                yield stage, micro_batch, *met


@dataclass(frozen=True, slots=True)
class Keeps:
    """The weights that a staleness method keeps."""

    predicted: bool = False
    """Forwards read predicted weights."""
    kept: bool = False
    """The weights of a forward are kept until its backward."""
    refilled: bool = False
    """The leaves of a forward are refilled with other weights for its backward."""
    beside: int = 0
    """Other copies in every late stage."""
    everywhere: int = 0
    """Other copies in every stage, late or not."""
    gathered: bool = False
    """A prediction uses the gradients gathered for the next step."""
    always: bool = False
    """Passes read a prediction even if no step lies between forward and backward."""
    twice: bool = False
    """A backward reads another prediction than its forward."""
    of_state: bool = False
    """The optimizer's state of all weights of a stage is read within a step."""


KEEPS: Mapping[str, Keeps] = {
    "none": Keeps(),
    "stash": Keeps(kept=True),
    # The version before the live one.
    "2bw": Keeps(everywhere=1),
    # The mean step, and the weights before a step while it is made.
    "pipemare": Keeps(refilled=True, beside=2),
    "pipemare-rate": Keeps(),
    "delay-rate": Keeps(),
    "hidden-delay-rate": Keeps(),
    "delay-momentum": Keeps(),
    # Squares of steps, and what the decay of the window loses.
    "gap-aware": Keeps(beside=2, of_state=True),
    "gap-aware-activations": Keeps(beside=1, of_state=True),
    "gap-aware-loss": Keeps(kept=True, refilled=True, beside=2, of_state=True),
    "dc-asgd": Keeps(),
    "dc-asgd-adaptive": Keeps(beside=1),
    # The last step, and the weights before one while it is made.
    "error-feedback": Keeps(beside=2, of_state=True),
    "spike-compensation": Keeps(beside=2, of_state=True),
    "msnag": Keeps(predicted=True),
    "aggmsnag": Keeps(predicted=True, gathered=True),
    "partial-gradient": Keeps(predicted=True, gathered=True),
    "nag": Keeps(predicted=True, always=True),
    "lwp": Keeps(predicted=True),
    "lwp-w": Keeps(predicted=True, beside=1),
    "spectrain": Keeps(predicted=True, refilled=True, always=True, twice=True),
    "xpipe": Keeps(predicted=True, refilled=True, always=True, twice=True, everywhere=1),
    "pipeoptim": Keeps(predicted=True, refilled=True),
    "nesterov-last": Keeps(),
    "schedule-aware": Keeps(),
}
"""Name of a staleness method -> the weights that it keeps."""


def weight_copies(names: str, ahead: int, step_every: int, *, recomputes: bool = False) -> int:
    """The most copies of a stage's weights, besides the live ones, under methods joined by +, if
    the stage runs `ahead` forwards ahead and steps after every `step_every`-th backward.

    >>> weight_copies("none", 3, 1), weight_copies("stash", 3, 1), weight_copies("stash", 3, 8)
    (0, 3, 1)
    >>> weight_copies("2bw", 3, 4), weight_copies("2bw", 0, 4)
    (1, 1)
    """
    methods = [KEEPS[name] for name in names.split("+")]
    beside = sum(method.everywhere + (method.beside if ahead else 0) for method in methods)
    predicted = any(method.predicted for method in methods)
    gathered = any(method.gathered for method in methods)
    always = any(method.always for method in methods)
    refilled = any(method.refilled for method in methods)
    keeps = any(method.kept for method in methods)
    if not (ahead or always):
        return beside
    if not keeps and refilled:
        return beside + 1 + (recomputes and any(method.twice for method in methods))
    if not keeps and recomputes:
        return beside + (1 + always if predicted else 0)
    if not predicted:
        # After a step, the ahead micro-batches in flight read the versions before the live one.
        return beside + (-(-ahead // step_every) if keeps else 0)
    return beside + predictions_in_flight(ahead, step_every, gathered=gathered, always=always)


@lru_cache
def predictions_in_flight(
    ahead: int, step_every: int, *, gathered: bool = False, always: bool = False
) -> int:
    """The most different predictions that the forwards of micro-batches in flight read, of those
    with a step between forward and backward.

    They differ by version, by how far they look ahead, and with `gathered` by the gradients
    gathered for the next step. With `always` the other micro-batches read a prediction of one step.

    >>> [predictions_in_flight(ahead, 2) for ahead in range(5)]
    [0, 1, 2, 4, 3]
    """

    def read(micro_batch: int) -> tuple[int, int, int] | None:
        version, done = divmod(max(0, micro_batch - ahead), step_every)
        horizon = micro_batch // step_every - version
        if not (horizon or always):
            return None
        return version, max(1, horizon), done if gathered else 0

    # The micro-batches in flight at a forward are a window that slides over all of them.
    views = [read(t) for t in range(2 * step_every + 2 * ahead + 1)]
    in_flight = Counter(views[:ahead])
    most = 0
    for first, entering in enumerate(views[ahead:]):
        in_flight[entering] += 1
        most = max(most, len(in_flight) - (None in in_flight))
        in_flight[views[first]] -= 1
        if not in_flight[views[first]]:
            del in_flight[views[first]]
    return most
