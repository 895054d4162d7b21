"""The schedules: each a function from a few numbers to the actions of every rank.

To add one, write such a function and enter it in one of the tables. `docs/schedules.md` shows how,
with the idle share, memory and staleness of those that are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TypedDict, Unpack

from .alternating import alternating
from .asynchronous import ASYNCHRONOUS, DEFAULT_CAP, async_1f1b, capped, depths
from .dependencies import Edge
from .errors import ScheduleError
from .folding import fold
from .interleaving import interleaved, looped_bfs
from .schedule import Action, Schedule, one_step
from .scheduler.blocks import blocks_of
from .scheduler.fit import Fit, fit_schedule
from .scheduler.tasks import Tasks
from .simulate import Costs
from .zero_bubble import zb_h1, zb_h2, zb_v

__all__ = ["ASYNCHRONOUS", "SCHEDULES", "SYNCHRONOUS", "VIRTUAL", "alternating", "async_1f1b"]


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., NeurIPS 2019).

    >>> print(gpipe(2, 2))
    rank 0: 0F0@v0 0F1@v0 0B0@v0 0B1@v0 0S1
    rank 1: 1F0@v0 1F1@v0 1B0@v0 1B1@v0 1S1
    """
    return alternating("gpipe", micro_batches, ahead=[micro_batches - 1] * stages)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Stage j runs p-1-j forwards ahead, then a forward and a backward in turn, then drains
    (PipeDream-Flush; Narayanan et al., ICML 2021).

    >>> print(one_f_one_b(2, 3))
    rank 0: 0F0@v0 0F1@v0 0B0@v0 0F2@v0 0B1@v0 0B2@v0 0S1
    rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1F2@v0 1B2@v0 1S1
    """
    ahead = [min(micro_batches, stages - stage) - 1 for stage in range(stages)]
    return alternating("1f1b", micro_batches, ahead=ahead)


def seq(stages: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time goes through all ranks and back: a pipeline without overlap.

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
"""Of stages and micro-batches: one stage a rank, but for `single`."""

VIRTUAL: Mapping[str, Callable[[int, int, int], Schedule]] = {
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-v": zb_v,
}
"""Synchronous too, of stages, micro-batches and ranks: several stages a rank."""

SCHEDULES: tuple[str, ...] = (*SYNCHRONOUS, *VIRTUAL, *ASYNCHRONOUS)

AUTO = "auto"
"""Not in a table: a schedule computed for given costs, by `fit_auto`."""


def spelled(name: str) -> str:
    """The name as it is in the tables, where words are joined by hyphens.

    >>> spelled("virtual_stages_1f1b")
    'virtual-stages-1f1b'
    """
    return name.replace("_", "-")


def natural_ranks(name: str, stages: int) -> int:
    """How many ranks the schedule of that name uses when nobody says.

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
    costs: Costs | None = None,
) -> Schedule:
    """The schedule of that name over one segment of `micro_batches`.

    A synchronous schedule steps once, at the end, so `step_every` is `micro_batches` or left
    out; an asynchronous one needs it. `ranks` share the stages, by default `natural_ranks`; of an
    asynchronous schedule they may be any number, and `rank_of_stage` says which have which, by
    default in turn. Its stages run as far ahead as `depths` makes of `ahead`, and no weights
    are staler than `staleness_cap` steps. `costs` are what `auto` and the order of several stages
    on a rank go by, by default equal ones. Raises ScheduleError for an unknown name or numbers that
    do not fit.

    >>> make_schedule("1f1b", stages=4, micro_batches=8).in_flight
    (4, 3, 2, 1)
    >>> make_schedule("interleaved", stages=6, micro_batches=8, ranks=2).rank_of_stage
    (0, 1, 0, 1, 0, 1)
    """
    name = spelled(name)
    if name not in (*SCHEDULES, AUTO):
        near = get_close_matches(name, (*SCHEDULES, AUTO), n=1)
        raise ScheduleError(
            f"unknown schedule {name!r}: there are {', '.join(SCHEDULES)}, {AUTO}.",
            f"Did you mean --schedule {near[0]}?" if near else "",
        )
    for value, words in ((stages, "stages"), (micro_batches, "micro-batches")):
        if value < 1:
            raise ScheduleError(f"{value} {words} make no schedule: use 1 or more.")
    if ranks is None:
        ranks = natural_ranks(name, stages)
    if not 1 <= ranks <= stages:
        raise ScheduleError(
            f"{stages} stages cannot be shared by {ranks} ranks.", f"--ranks 1 to {stages}"
        )
    _check_ranks(name, stages, ranks)
    if name in ASYNCHRONOUS:
        if step_every is None or step_every < 1:
            raise ScheduleError(
                f"{name} needs the number of micro-batches of one optimizer step, got {step_every}."
            )
        warmup = warmup_of(name, stages, step_every, ahead, staleness_cap)
        made = ASYNCHRONOUS[name](stages, micro_batches, step_every, warmup)
        if ranks == stages and rank_of_stage is None:
            return made
        return fold(made, rank_of_stage or [stage % ranks for stage in range(stages)], costs)
    if step_every not in (None, micro_batches):
        raise ScheduleError(
            f"{name} makes one optimizer step over all {micro_batches} micro-batches, "
            f"not one every {step_every}.",
            "Use --schedule async-1f1b for steps in between.",
        )
    if name == AUTO:
        return fit_auto(costs or Costs.equal(stages), micro_batches, ranks=ranks).schedule
    if name in VIRTUAL:
        return VIRTUAL[name](stages, micro_batches, ranks)
    return SYNCHRONOUS[name](stages, micro_batches)


def warmup_of(
    name: str, stages: int, step_every: int, ahead: str | None, staleness_cap: int | None
) -> tuple[int, ...] | None:
    """The forwards that each stage of an asynchronous schedule runs ahead; None: as it has them."""
    if name == "virtual-stages-1f1b" and staleness_cap is None and ahead is not None:
        staleness_cap = DEFAULT_CAP
    if ahead is None and staleness_cap is None:
        return None
    found = depths(stages, ahead)
    return found if staleness_cap is None else capped(found, step_every, staleness_cap)


def _check_ranks(name: str, stages: int, ranks: int) -> None:
    are = "1 stage is" if stages == 1 else f"{stages} stages are"
    are += f" on {ranks} rank{'s' if ranks > 1 else ''}"
    if name == "zb-v":
        if stages != 2 * ranks:
            here = f"--ranks {stages // 2}, or partition" if stages % 2 == 0 else "Partition"
            raise ScheduleError(
                f"zb-v has two stages on every rank, but {are}.",
                f"{here} again with --stages {2 * ranks}.",
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
    """What of a model `fit_auto` takes into account beside its costs, as for `Rule`; `limit`, the
    live activations that each rank has room for, in units of `weights`, which are those of one
    micro-batch at each stage (1); and whether a backward may be in two parts (True)."""

    edges: Iterable[Edge] | None
    grad_edges: Iterable[Edge] | None
    shared_stages: Iterable[Sequence[int]]
    limit: Sequence[float]
    weights: Sequence[float]
    may_split: bool


def fit_auto(
    costs: Costs,
    micro_batches: int,
    *,
    ranks: int,
    rank_of_stage: Sequence[int] | None = None,
    **model: Unpack[Model],
) -> Fit:
    """The schedule with the shortest steps that was found for these costs, `auto` by name.

    Without `rank_of_stage` stages are dealt out to the ranks in turn, or where there are two a rank
    down the ranks and up again, whichever is better. Raises ScheduleError where the limit is too
    low for a single micro-batch.

    >>> fit_auto(Costs.equal(4, forward_ms=1, backward_ms=2), 8, ranks=4).period_ms
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


def computed(tasks: Tasks, known: Iterable[Schedule] = (), *, effort: float = 1.0) -> Fit:
    """The schedule computed for the tasks, no longer than those `known` or with a name, nor than
    one computed for the blocks that their stages make on the ranks."""
    starts = [*known, *named_for(tasks.rank_of_stage, tasks.micro_batches)]
    if blocks := blocks_of(tasks):
        starts.append(blocks.expanded(computed(blocks.tasks, effort=effort).schedule))
    return fit_schedule(tasks, starts, effort=effort)


def named_for(rank_of_stage: Sequence[int], micro_batches: int) -> Iterator[Schedule]:
    """The synchronous schedules that put the stages on the same ranks."""
    stages, ranks = len(rank_of_stage), len(set(rank_of_stage))
    for name in (*SYNCHRONOUS, *VIRTUAL):
        try:
            made = make_schedule(name, stages=stages, micro_batches=micro_batches, ranks=ranks)
        except ScheduleError:
            continue
        if made.rank_of_stage == tuple(rank_of_stage):
            yield made
