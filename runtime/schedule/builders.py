"""A schedule's name and a few numbers -> the actions of every rank.

To add a schedule, write such a function and enter it in one of the tables. `docs/schedules.md`
shows how, and lists the idle share, memory and staleness of each schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TypedDict, Unpack

from ..errors import ScheduleError
from .asynchronous import ASYNCHRONOUS, DEFAULT_CAP, async_1f1b, capped, depths
from .dependencies import Edge
from .fit import Fit, blocks_of, fit_schedule
from .interleaved import fold, interleaved, looped_bfs, zb_h1, zb_h2, zb_v
from .schedule import Action, Schedule, alternating, one_step
from .simulate import ActionCosts
from .tasks import ActivationLimit, Tasks

__all__ = ["ASYNCHRONOUS", "SCHEDULES", "SYNCHRONOUS", "VIRTUAL", "alternating", "async_1f1b"]


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., NeurIPS 2019).

    >>> print(gpipe(2, 2))
    rank 0: 0F0@v0 0F1@v0 0B0@v0 0B1@v0 0S1
    rank 1: 1F0@v0 1F1@v0 1B0@v0 1B1@v0 1S1
    """
    return alternating("gpipe", micro_batches, ahead=[micro_batches - 1] * stages)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Stage j runs p-1-j forwards ahead, then alternates a forward and a backward, then drains
    (PipeDream-Flush; Narayanan et al., ICML 2021).

    >>> print(one_f_one_b(2, 3))
    rank 0: 0F0@v0 0F1@v0 0B0@v0 0F2@v0 0B1@v0 0B2@v0 0S1
    rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1F2@v0 1B2@v0 1S1
    """
    ahead = [min(micro_batches, stages - stage) - 1 for stage in range(stages)]
    return alternating("1f1b", micro_batches, ahead=ahead)


def seq(stages: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time through all ranks and back: a pipeline without overlap.

    >>> print(seq(2, 2))
    rank 0: 0F0@v0 0B0@v0 0F1@v0 0B1@v0 0S1
    rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1S1
    """
    return alternating("seq", micro_batches, ahead=[0] * stages)


def single(stages: int, micro_batches: int) -> Schedule:
    """All stages on rank 0, one micro-batch at a time: the plain model's loop.

    >>> print(single(2, 1))
    rank 0: 0F0@v0 1F0@v0 1B0@v0 0B0@v0 0S1 1S1
    """
    row: list[Action] = []
    for index in range(micro_batches):
        row += [Action(stage, "F", index) for stage in range(stages)]
        row += [Action(stage, "B", index) for stage in reversed(range(stages))]
    return one_step("single", [row], [0] * stages)


SYNCHRONOUS: Mapping[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "seq": seq,
    "single": single,
}
"""Name -> function of the numbers of stages and micro-batches; one stage per rank, except
`single`."""

VIRTUAL: Mapping[str, Callable[[int, int, int], Schedule]] = {
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-v": zb_v,
}
"""Name -> function of the numbers of stages, micro-batches and ranks; synchronous, with several
stages per rank."""

SCHEDULES: tuple[str, ...] = (*SYNCHRONOUS, *VIRTUAL, *ASYNCHRONOUS)

AUTO = "auto"
"""A schedule that `fit_auto` computes for given costs."""


def spelled(name: str) -> str:
    """The name as the tables spell it, with hyphens.

    >>> spelled("virtual_stages_1f1b")
    'virtual-stages-1f1b'
    """
    return name.replace("_", "-")


def natural_ranks(name: str, stages: int) -> int:
    """The default number of ranks of a schedule.

    >>> [natural_ranks(name, 8) for name in ("1f1b", "interleaved", "zb-v", "single")]
    [8, 4, 4, 1]
    """
    if name == "single":
        return 1
    return max(1, stages // 2) if name in VIRTUAL else stages


def make_schedule(
    name: str,
    *,
    stages: int,
    micro_batches: int,
    step_every: int | None = None,
    ranks: int | None = None,
    rank_of_stage: Sequence[int] | None = None,
    ahead: str | None = None,
    staleness_cap: int | None = None,
    costs: ActionCosts | None = None,
) -> Schedule:
    """The schedule of that name over one segment of `micro_batches`.

    - `step_every`: micro-batches of a step, required for asynchronous schedules; a synchronous one
      steps once, at the end.
    - `ranks`: ranks that share the stages, by default `natural_ranks`; any number for an
      asynchronous schedule.
    - `rank_of_stage`: the rank of each stage of an asynchronous schedule, by default round-robin.
    - `ahead`: forwards that stages of an asynchronous schedule run ahead, as text for `depths`.
    - `staleness_cap`: the most steps by which weights may be stale.
    - `costs`: costs for `auto` and for the order of several stages on a rank, by default equal
      ones.

    Raises ScheduleError for an unknown name or numbers that do not fit.

    >>> make_schedule("1f1b", stages=4, micro_batches=8).in_flight
    (4, 3, 2, 1)
    >>> make_schedule("interleaved", stages=6, micro_batches=8, ranks=2).rank_of_stage
    (0, 1, 0, 1, 0, 1)
    """
    name = _known(name)
    for value, words in ((stages, "stages"), (micro_batches, "micro-batches")):
        if value < 1:
            raise ScheduleError(f"a schedule cannot have {value} {words}: use 1 or more.")
    if ranks is None:
        ranks = natural_ranks(name, stages)
    if not 1 <= ranks <= stages:
        raise ScheduleError(
            f"{stages} stages cannot be shared by {ranks} ranks.", f"--ranks 1 to {stages}"
        )
    _check_ranks(name, stages, ranks)
    _check_step_every(name, micro_batches, step_every)
    if name in ASYNCHRONOUS:
        assert step_every is not None
        warmup = warmup_of(name, stages, step_every, ahead, staleness_cap)
        schedule = ASYNCHRONOUS[name](stages, micro_batches, step_every, warmup)
        if ranks == stages and rank_of_stage is None:
            return schedule
        return fold(schedule, rank_of_stage or [stage % ranks for stage in range(stages)], costs)
    if name == AUTO:
        return fit_auto(costs or ActionCosts.equal(stages), micro_batches, ranks=ranks).schedule
    if name in VIRTUAL:
        return VIRTUAL[name](stages, micro_batches, ranks)
    return SYNCHRONOUS[name](stages, micro_batches)


def warmup_of(
    name: str, stages: int, step_every: int, ahead: str | None, staleness_cap: int | None
) -> tuple[int, ...] | None:
    """The forwards that each stage of an asynchronous schedule runs ahead; None for the default."""
    if name == "virtual-stages-1f1b" and staleness_cap is None and ahead is not None:
        staleness_cap = DEFAULT_CAP
    if ahead is None and staleness_cap is None:
        return None
    warmup = depths(stages, ahead)
    return warmup if staleness_cap is None else capped(warmup, step_every, staleness_cap)


def _known(name: str) -> str:
    """The spelled name. Raises ScheduleError for an unknown one."""
    name = spelled(name)
    if name not in (*SCHEDULES, AUTO):
        near = get_close_matches(name, (*SCHEDULES, AUTO), n=1)
        raise ScheduleError(
            f"unknown schedule {name!r}: there are {', '.join(SCHEDULES)}, {AUTO}.",
            f"Did you mean --schedule {near[0]}?" if near else "",
        )
    return name


def _check_step_every(name: str, micro_batches: int, step_every: int | None) -> None:
    if name in ASYNCHRONOUS:
        if step_every is None or step_every < 1:
            raise ScheduleError(
                f"{name} needs the number of micro-batches of one optimizer step, got {step_every}."
            )
    elif step_every not in (None, micro_batches):
        raise ScheduleError(
            f"{name} makes one optimizer step over all {micro_batches} micro-batches, "
            f"not one every {step_every}.",
            "Use --schedule async-1f1b for steps in between.",
        )


def _check_ranks(name: str, stages: int, ranks: int) -> None:
    are = "1 stage is" if stages == 1 else f"{stages} stages are"
    are += f" on {ranks} rank{'s' if ranks > 1 else ''}"
    if name == "zb-v":
        if stages != 2 * ranks:
            change = f"--ranks {stages // 2}, or partition" if stages % 2 == 0 else "Partition"
            raise ScheduleError(
                f"zb-v has two stages on every rank, but {are}.",
                f"{change} again with --stages {2 * ranks}.",
            )
    elif name in VIRTUAL:
        if stages % ranks:
            fitting = [str(number) for number in range(1, stages + 1) if stages % number == 0]
            raise ScheduleError(
                f"{name} has equally many stages on every rank, but {are}.",
                f"--ranks {' or '.join(fitting)}, or --schedule auto",
            )
    elif name not in (*ASYNCHRONOUS, AUTO) and ranks != (natural := natural_ranks(name, stages)):
        has = "all stages on one rank" if name == "single" else "one stage on every rank"
        raise ScheduleError(
            f"{name} has {has}, but {are}.",
            f"--ranks {natural}, or --schedule auto",
        )


class Model(TypedDict, total=False):
    """The properties of a model that `fit_auto` uses besides its costs."""

    edges: Iterable[Edge] | None
    """The (source, target) stages of boundary tensors, as for `DependencyRule`."""
    grad_edges: Iterable[Edge] | None
    """The edges whose tensors get a gradient."""
    shared_stages: Iterable[Sequence[int]]
    """The groups of stages that share a parameter."""
    limit: ActivationLimit
    """The most live activations of each rank."""
    may_split: bool
    """Allow split backwards (default True)."""


def fit_auto(
    costs: ActionCosts,
    micro_batches: int,
    *,
    ranks: int,
    rank_of_stage: Sequence[int] | None = None,
    **model: Unpack[Model],
) -> Fit:
    """The schedule with the shortest steps that was found for these costs, `auto` by name.

    Without `rank_of_stage` stages are distributed to the ranks round-robin; with two on a rank
    also down the ranks and up again, whichever is better. Raises ScheduleError if the limit is too
    low for a single micro-batch.

    >>> fit_auto(ActionCosts.equal(4, forward_ms=1, backward_ms=2), 8, ranks=4).period_ms
    24.0
    """
    stages = len(costs.forward_ms)
    turns = tuple(stage % ranks for stage in range(stages))
    placements = [turns] if rank_of_stage is None else [tuple(rank_of_stage)]
    if rank_of_stage is None and stages == 2 * ranks and ranks > 1:
        placements.append((*range(ranks), *reversed(range(ranks))))
    fits = []
    for placed in placements:
        tasks = Tasks(costs, placed, micro_batches, **model)
        fits.append(computed(tasks))
    return min(fits, key=lambda fit: fit.period_ms)


def computed(
    tasks: Tasks, known: Iterable[Schedule] = (), *, effort: float = 1.0, spread: float = 0.0
) -> Fit:
    """The schedule computed for the tasks, as by `fit_schedule`: no longer than the `known` and the
    named ones, nor than one computed for merged stages (`blocks_of`)."""
    starts = [*known, *named_for(tasks.rank_of_stage, tasks.micro_batches)]
    if blocks := blocks_of(tasks):
        starts.append(blocks.expanded(computed(blocks.tasks, effort=effort).schedule))
    return fit_schedule(tasks, starts, effort=effort, spread=spread)


def named_for(rank_of_stage: Sequence[int], micro_batches: int) -> Iterator[Schedule]:
    """The named synchronous schedules that put the stages on the same ranks."""
    stages, ranks = len(rank_of_stage), len(set(rank_of_stage))
    for name in (*SYNCHRONOUS, *VIRTUAL):
        try:
            schedule = make_schedule(name, stages=stages, micro_batches=micro_batches, ranks=ranks)
        except ScheduleError:
            continue
        if schedule.rank_of_stage == tuple(rank_of_stage):
            yield schedule
