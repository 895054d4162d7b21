"""A problem that no plan fits -> a message with the missing memory and with changes that help.

The recurrence of `chain.py` with memory in place of time finds the plan whose fullest rank needs
the least,

    best[s][b] = min over a < b of max(best[s - 1][a], memory_s(a, b) / room_s)

over the cuts of the given order. Every suggestion was tried: there is a plan that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from ...runtime.errors import PlanError
from ...runtime.formatting import counted
from ...runtime.optimizers.facts import PLANNED
from ...runtime.plan.sharing import GRADIENTS, OPTIMIZER_STATE
from ...runtime.schedule.asynchronous import KEEPS
from ..graph.costs import Costs, Floats, StageSums
from ..graph.problem import DoesNotFit, Evaluation, Placement, Problem, evaluate
from ..graph.rank_model import Device, RankConfig
from ..solvers.chain import interval_sums

_MOST_SAID = 4
_MANY_GROUPS = 3_000  # from this number on only cuts between blocks are tried
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


class NothingFits(DoesNotFit):
    """The plan of a method, if it found any, exceeds the memory of the ranks."""

    def __init__(self, problem: Problem, method: str) -> None:
        self.problem, self.method = problem, method
        super().__init__(
            f"--method {method} finds no {problem.stages}-stage plan that fits "
            f"{_limits(problem.setting.devices)}.",
            "--method auto searches all cuts.",
        )


@contextmanager
def explained() -> Iterator[None]:
    """Turns a `NothingFits` inside into a PlanError that reports the missing memory and changes
    that help.
    """
    try:
        yield
    except NothingFits as error:
        placement = least_memory(error.problem)
        if placement is None or evaluate(error.problem, placement).fits:
            raise
        raise PlanError(
            _what_is_needed(error.problem, placement), suggestions(error.problem)
        ) from error


def least_memory(problem: Problem) -> Placement | None:
    """The cut of the given order whose fullest rank, as a share of its memory, is the least full;
    None if the rules allow no cut into that many stages.
    """
    costs, rules, setting = problem.costs, problem.rules, problem.setting
    num_groups, stages = len(costs.groups), problem.stages
    may_cut = rules.may_cut.copy()
    if num_groups > _MANY_GROUPS:
        may_cut &= costs.cut_depth == 0
    may_cut[[0, num_groups, *rules.must_cut]] = True
    demanded = np.array([0, *rules.must_cut])
    best = np.full((stages + 1, num_groups + 1), np.inf)
    previous = np.zeros((stages + 1, num_groups + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for end, sums in interval_sums(costs):
        if not may_cut[end]:
            continue
        first = int(demanded[np.searchsorted(demanded, end) - 1])
        starts = first + np.flatnonzero(may_cut[first:end])
        sums_of_stage = sums[starts]
        for stage in range(stages):
            full = np.maximum(best[stage, starts], _share(setting, stage, sums_of_stage))
            chosen = int(full.argmin())
            best[stage + 1, end] = full[chosen]
            previous[stage + 1, end] = starts[chosen]
    if best[stages, num_groups] == np.inf:
        return None
    cuts = [num_groups]
    for stage in range(stages, 0, -1):
        cuts.append(int(previous[stage, cuts[-1]]))
    where = np.searchsorted(cuts[-2:0:-1], np.arange(num_groups), side="right")
    return Placement(tuple(where.tolist()))


def suggestions(problem: Problem) -> str:
    """Changes that make a plan fit: changes of one option, or else the first combination of
    several.
    """
    fitting = [words for words, changed in _changes(problem) if _fits(changed)]
    if fitting:
        return "Fits with: " + " · or ".join(fitting[:_MOST_SAID])
    words: list[str] = []
    all_changed = problem
    for change in (_recomputed, _scheduled, _optimized, _smaller, _more_stages):
        tried = list(change(all_changed))
        for option, changed in tried:
            if _fits(changed):
                return "Fits with: " + " ".join([*words, option])
        if tried and change is not _more_stages:
            words.append(tried[-1][0])
            all_changed = tried[-1][1]
    placement = least_memory(problem)
    if placement is None:
        return ""
    return f"Nothing tried fits. --memory-limit {_limit_for(evaluate(problem, placement))} would."


def _fits(problem: Problem) -> bool:
    placement = least_memory(problem)
    return placement is not None and evaluate(problem, placement).fits


def _share(setting: RankConfig, position: int, sums: StageSums) -> Floats:
    again = setting.recomputes(position, sums)
    peak_bytes = np.where(
        again,
        setting.memory_bytes(position, sums, recompute=True),
        setting.memory_bytes(position, sums, recompute=False),
    )
    share: Floats = peak_bytes / setting.devices[position].memory_bytes
    return share


# --- changes that may help, each with the words of the command --------------------------------

_Change = Iterator[tuple[str, Problem]]


def _changes(problem: Problem) -> _Change:
    """The first change of each kind that helps."""
    kinds: Sequence[Callable[[Problem], _Change]] = (
        _more_stages,
        _recomputed,
        _smaller,
        _scheduled,
        _fewer,
        _shared,
        _optimized,
        _unstashed,
    )
    for kind in kinds:
        helping = (change for change in kind(problem) if _fits(change[1]))
        yield from (change for change, _ in zip(helping, range(1), strict=False))


def _more_stages(problem: Problem) -> _Change:
    setting, stages = problem.setting, problem.stages
    if len(set(setting.devices)) > 1 or setting.links or setting.replicas:
        return
    most = 1 + int(problem.rules.may_cut[1:-1].sum())
    for more in sorted({*range(stages + 1, stages + 5), 2 * stages, 3 * stages, 4 * stages}):
        if more <= most:
            devices = setting.devices[:1] * more
            yield f"--stages {more}", _with(problem, replace(setting, devices=devices))


def _recomputed(problem: Problem) -> _Change:
    if problem.setting.recompute == "none":
        yield "--recompute auto", _with(problem, replace(problem.setting, recompute="auto"))


def _smaller(problem: Problem) -> _Change:
    size = problem.costs.micro_batch_size
    while size and size > 1:
        size //= 2
        share = size / (problem.costs.micro_batch_size or size)
        costs = _scaled(problem.costs, share)
        yield f"--micro-batch-size {size}", Problem(costs, problem.setting, problem.rules)


def _scheduled(problem: Problem) -> _Change:
    if problem.setting.schedule == "gpipe":
        yield "--schedule 1f1b", _with(problem, replace(problem.setting, schedule="1f1b"))


def _fewer(problem: Problem) -> _Change:
    """Fewer micro-batches for gpipe, which keeps all of them in flight."""
    number = problem.setting.micro_batches
    while problem.setting.schedule == "gpipe" and number > 1:
        number //= 2
        setting = replace(problem.setting, micro_batches=number)
        yield f"--micro-batches {number}", _with(problem, setting)


def _shared(problem: Problem) -> _Change:
    setting = problem.setting
    most = OPTIMIZER_STATE if len(set(setting.replicas)) > 1 else GRADIENTS
    reads_state = any(KEEPS[name].of_state for name in setting.staleness.split("+"))
    if max(setting.replicas, default=1) > 1 and not reads_state:
        for zero in range(setting.zero + 1, most + 1):
            yield f"--zero {zero}", _with(problem, replace(setting, zero=zero))


def _optimized(problem: Problem) -> _Change:
    for name in PLANNED[problem.setting.optimizer].smaller:
        yield f"--optimizer {name}", _with(problem, replace(problem.setting, optimizer=name))


def _unstashed(problem: Problem) -> _Change:
    if problem.setting.staleness != "none":
        yield "--staleness none", _with(problem, replace(problem.setting, staleness="none"))


def _with(problem: Problem, setting: RankConfig) -> Problem:
    return Problem(problem.costs, setting, problem.rules)


def _scaled(costs: Costs, share: float) -> Costs:
    """The costs of smaller micro-batches: memory that grows with them shrinks to that share."""
    return replace(
        costs,
        saved=tuple(replace(shared, num_bytes=share * shared.num_bytes) for shared in costs.saved),
        values=tuple(
            replace(value, forward_bytes=share * value.forward_bytes) for value in costs.values
        ),
        transient_bytes=share * costs.transient_bytes,
        live_bytes=share * costs.live_bytes,
    )


# --- words ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Unit:
    name: str
    size: int

    @classmethod
    def of(cls, num_bytes: float) -> _Unit:
        return next(cls(name, size) for name, size in _UNITS if num_bytes >= size or size == 1)

    def write(self, num_bytes: float, unlike: str = "") -> str:
        """With one decimal, or as many as a difference from `unlike` needs."""
        for digits in range(1, 6):
            text = f"{num_bytes / self.size:.{digits}f}".removesuffix(".0")
            if text != unlike:
                break
        return text


def _what_is_needed(problem: Problem, placement: Placement) -> str:
    evaluation, devices = evaluate(problem, placement), problem.setting.devices
    shares = [
        peak / device.memory_bytes
        for peak, device in zip(evaluation.rank_bytes, devices, strict=True)
    ]
    worst = int(np.argmax(shares))
    load = evaluation.stages[worst]
    unit = _Unit.of(load.peak_bytes)
    part = unit.write(load.memory.activations)
    flying = counted(load.in_flight, "micro-batch", "micro-batches")
    needed = unit.write(load.peak_bytes, unlike=unit.write(devices[worst].memory_bytes))
    return (
        f"no {problem.stages}-stage plan fits {_limits(devices)}: the best needs "
        f"{needed} {unit.name} on stage {worst} ({part} of it activations of "
        f"{flying} in flight)."
    )


def _limits(devices: Sequence[Device]) -> str:
    rooms = sorted({device.memory_bytes for device in devices if device.memory_bytes < math.inf})
    words = [f"{_Unit.of(room).write(room)} {_Unit.of(room).name}" for room in rooms]
    if len(words) == 1 and all(device.memory_bytes < math.inf for device in devices):
        return f"{words[0]} per device"
    return f"devices of {' and '.join(words)}"


def _limit_for(evaluation: Evaluation) -> str:
    """A memory limit that the plan meets, in the form of the option."""
    peak = max(evaluation.rank_bytes)
    unit = _Unit.of(peak)
    return f"{math.ceil(10 * peak / unit.size) / 10:g}{unit.name.replace('bytes', '')}"
