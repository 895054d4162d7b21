"""A plan -> bars: the time of every stage beside an even split, the memory of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ...runtime.pages.bars import Bar, segment
from ...runtime.plan import Plan
from ...runtime.wording import write_bytes, write_ms, write_share

_FAR = 2.5  # a limit so many times above the fullest rank would make all bars short

KINDS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "versions": "V",
    "buffers": "B",
    "activations": "A",
    "transport": "R",
    "transient": "T",
}
"""What memory is for, with the letter that stands in the bars."""

MEANINGS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "versions": "older or predicted weights",
    "buffers": "buffers",
    "activations": "activations of all micro-batches in flight",
    "transport": "boundary tensors sent, or to be received",
    "transient": "the most that one operation needs beside",
}


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars on one scale; `line` is where a line crosses all of them, in percent."""

    rows: tuple[Bar, ...]
    comparison: tuple[Bar, ...] = ()
    line: float | None = None
    line_title: str = ""
    legend: tuple[tuple[str, str, str], ...] = ()
    note: str = ""


# --- time -----------------------------------------------------------------------------------------


def cost_bars(plan: Plan) -> Bars:
    """Forward, backward and transfers of every stage, the even split below, the proved bound; the
    replicas of a stage share its time."""
    shares = [max(1, len(stage.ranks)) for stage in plan.stages]
    times = [
        (stage.forward_ms / share, stage.backward_ms / share)
        for stage, share in zip(plan.stages, shares, strict=True)
    ]
    even = [
        (forward_ms / share, backward_ms / share)
        for (forward_ms, backward_ms), share in zip(plan.even_split, shares, strict=False)
    ]
    scale = max(
        (
            *(stage.load_ms for stage in plan.stages),
            *(sum(pair) for pair in (*times, *even)),
            plan.lower_bound_ms,
            plan.even_split_ms,
        )
    )
    scale = scale or 1.0
    rows = []
    for stage, pair in zip(plan.stages, times, strict=True):
        rest_ms = max(0.0, stage.load_ms - sum(pair))
        is_slowest = len(plan.stages) > 1 and stage.load_ms >= plan.bottleneck_ms * (1 - 1e-9)
        rows.append(
            _time_bar(
                f"stage {stage.index}",
                (*pair, rest_ms),
                stage.load_ms,
                scale,
                is_slowest=is_slowest,
            )
        )
    worst = max((sum(pair) for pair in even), default=0.0)
    comparison = [
        _time_bar(
            f"even {index}", pair, sum(pair), scale, is_slowest=len(even) > 1 and sum(pair) == worst
        )
        for index, pair in enumerate(even)
    ]
    return Bars(
        rows=tuple(rows),
        comparison=tuple(comparison),
        line=100 * plan.lower_bound_ms / scale,
        line_title=f"proved: no plan has a slowest stage below {write_ms(plan.lower_bound_ms)}",
    )


def _time_bar(
    label: str, times_ms: Sequence[float], load_ms: float, scale: float, *, is_slowest: bool
) -> Bar:
    kinds = ("forward", "backward", "transfers")
    segments = tuple(
        segment(kind, kind[0].upper(), time_ms / scale, f"{label}: {kind} {write_ms(time_ms)}")
        for kind, time_ms in zip(kinds, times_ms, strict=False)
        if time_ms > 0
    )
    parts = " + ".join(write_ms(time_ms).removesuffix(" ms") for time_ms in times_ms[:2])
    return Bar(label, segments, write_ms(load_ms), f"{parts} ms", is_slowest)


# --- memory ---------------------------------------------------------------------------------------


def memory_bars(plan: Plan) -> Bars:
    """The peak of every rank by what it is for, against what its device has."""
    ranks = _memory_of_ranks(plan)
    limits = [rank.memory_bytes for rank in plan.setting.ranks] or [None] * len(ranks)
    most = max(sum(parts.values()) for parts in ranks) or 1
    near = [limit for limit in limits if limit is not None and limit <= _FAR * most]
    scale = max((most, *near))
    rows = []
    for rank, (parts, limit) in enumerate(zip(ranks, limits, strict=True)):
        total = sum(parts.values())
        over = limit is not None and total > limit
        rows.append(
            Bar(
                label=f"rank {rank}",
                segments=tuple(
                    segment(
                        kind,
                        KINDS[kind],
                        size / scale,
                        f"rank {rank}: {MEANINGS[kind]} {write_bytes(size)}",
                    )
                    for kind, size in parts.items()
                    if size
                ),
                value=write_bytes(total),
                title=_against(total, limit),
                over_from=100 * limit / scale if limit is not None and over else None,
                over_percent=100 * (total - limit) / scale if limit is not None and over else 0.0,
                limit=100 * limit / scale if limit is not None and limit <= scale else None,
            )
        )
    seen = {kind for parts in ranks for kind, size in parts.items() if size}
    return Bars(
        rows=tuple(rows),
        legend=tuple((kind, KINDS[kind], MEANINGS[kind]) for kind in KINDS if kind in seen),
        note=_limits_note(limits, scale),
    )


def _memory_of_ranks(plan: Plan) -> list[dict[str, int]]:
    """What each rank holds at its peak; its stages share the room that one operation needs."""
    count = len(plan.setting.ranks) or 1 + max(
        max(stage.ranks, default=stage.index) for stage in plan.stages
    )
    ranks = [dict.fromkeys(KINDS, 0) for _ in range(count)]
    for stage in plan.stages:
        for rank in stage.ranks or (stage.index,):
            for kind, size in asdict(stage.memory).items():
                before = ranks[rank][kind]
                ranks[rank][kind] = max(before, size) if kind == "transient" else before + size
    return ranks


def _against(total: int, limit: int | None) -> str:
    if limit is None:
        return "no limit given"
    if total > limit:
        return f"{write_bytes(total - limit)} over {write_bytes(limit)}"
    return f"{write_share(total / limit)} of {write_bytes(limit)}"


def _limits_note(limits: Sequence[int | None], scale: float) -> str:
    far = {limit for limit in limits if limit is not None and limit > scale}
    if all(limit is None for limit in limits):
        return "No memory limit was given: --memory-limit draws it here and is kept by every plan."
    if far:
        names = " and ".join(write_bytes(limit) for limit in sorted(far))
        return f"The limit of {names} is beyond the scale."
    return "The line is what the device has; what is beyond it would run out of memory."
