"""A plan -> the pipeline in SVG: stages in a row, skips as arcs above, tied parameters below."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...runtime.formatting import write_bytes, write_ms
from ...runtime.plan.forecast import spec_bytes
from ...runtime.plan.plan import Plan, StageSpec

_WIDTH, _HEIGHT, _GAP = 158, 92, 64
_LEVEL = 24  # between two arcs one above the other
_STEP = _WIDTH + _GAP
_LETTERS = 23  # that fit into a box


@dataclass(frozen=True, slots=True)
class StageBox:
    """One stage; `lines` stand below its name, the last of them in bold."""

    x: int
    middle: int
    name: str
    lines: tuple[str, ...]
    title: str
    is_slowest: bool


@dataclass(frozen=True, slots=True)
class Arc:
    """A connection of two stages; `kind` is "next", "skip" or "tied"."""

    path: str
    x: float
    y: float
    label: str
    title: str
    kind: str


@dataclass(frozen=True, slots=True)
class StageDrawing:
    width: int
    height: int
    top: int
    box_width: int
    box_height: int
    boxes: tuple[StageBox, ...]
    arcs: tuple[Arc, ...]


def stage_graph(plan: Plan) -> StageDrawing:
    """Boxes from left to right with their contents, edges with the bytes of one micro-batch."""
    sent = _sent(plan)
    tied = _tied(plan)
    skips = _levels(pair for pair in sent if pair[1] - pair[0] > 1)
    below = _levels(tied)
    top = 8 + _LEVEL * (1 + max(skips.values(), default=-1))
    bottom = top + _HEIGHT
    arcs = [
        _next_arc(pair, top, *texts) if pair not in skips else _arc(pair, skips[pair], top, *texts)
        for pair, texts in sent.items()
    ]
    arcs += [_arc(pair, below[pair], bottom, *texts, below=True) for pair, texts in tied.items()]
    slowest = max(plan.stages, key=lambda stage: stage.load_ms).index
    return StageDrawing(
        width=len(plan.stages) * _STEP - _GAP + 4,
        height=bottom + 8 + _LEVEL * (1 + max(below.values(), default=-1)),
        top=top,
        box_width=_WIDTH,
        box_height=_HEIGHT,
        boxes=tuple(_box(plan, stage, is_slowest=stage.index == slowest) for stage in plan.stages),
        arcs=tuple(arcs),
    )


def _left(stage: int) -> int:
    return 2 + stage * _STEP


def _box(plan: Plan, stage: StageSpec, *, is_slowest: bool) -> StageBox:
    modules = ", ".join(stage.modules) or "operations only"
    ranks = ", ".join(map(str, stage.ranks))
    is_plain = stage.ranks in ((), (stage.index,))
    where = f" on rank {ranks}" if len(stage.ranks) == 1 else f" × {len(stage.ranks)} ranks"
    name = f"stage {stage.index}" + ("" if is_plain else where)
    slowest = " · slowest" if is_slowest and len(plan.stages) > 1 else ""
    return StageBox(
        x=_left(stage.index),
        middle=_left(stage.index) + _WIDTH // 2,
        name=name,
        lines=(
            _short(_without_common_prefix(stage.modules) or modules),
            f"{write_bytes(stage.param_bytes)} of parameters",
            f"{write_ms(stage.load_ms)}{slowest}",
        ),
        title=f"{name}: {modules}" if is_plain else f"stage {stage.index} on {ranks}: {modules}",
        is_slowest=is_slowest,
    )


def _without_common_prefix(modules: tuple[str, ...]) -> str:
    """`wte, h.0-3` for `transformer.wte, transformer.h.0-3`."""
    heads = {module.split(".")[0] for module in modules if "." in module}
    head = f"{heads.pop()}." if len(heads) == 1 else ""
    return ", ".join(module.removeprefix(head) for module in modules)


def _short(text: str) -> str:
    return text if len(text) <= _LETTERS else text[: _LETTERS - 1].rstrip(", ") + "…"


def _sent(plan: Plan) -> dict[tuple[int, int], tuple[str, str, str]]:
    """For every two stages that exchange tensors: label, hover text and kind."""
    pairs: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for boundary in plan.boundaries:
        size = spec_bytes(boundary.tensor, plan.sizes)
        text = f"{boundary.tensor.name} {boundary.tensor}, {write_bytes(size)}"
        for target in boundary.targets:
            pairs.setdefault((boundary.source, target), []).append((size, text))
    return {
        (source, target): (
            write_bytes(sum(size for size, _ in found)),
            f"stage {source} to {target}: " + "; ".join(text for _, text in found),
            "skip" if target - source > 1 else "next",
        )
        for (source, target), found in sorted(pairs.items())
    }


def _tied(plan: Plan) -> dict[tuple[int, int], tuple[str, str, str]]:
    """For every two stages that hold the same parameter: label, hover text and kind."""
    names: dict[tuple[int, int], list[str]] = {}
    for shared in plan.shared:
        first, *others = dict.fromkeys(shared.stages)
        for other in others:
            names.setdefault((first, other), []).append(" = ".join(shared.names))
    return {
        pair: (
            "tied weights" if len(found) == 1 else f"{len(found)} tied weights",
            f"held by stages {pair[0]} and {pair[1]}, gradients are summed: " + "; ".join(found),
            "tied",
        )
        for pair, found in sorted(names.items())
    }


def _levels(pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Assigns different levels to arcs that would overlap; short arcs are nearest to the boxes."""
    levels: dict[tuple[int, int], int] = {}
    for source, target in sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair)):
        taken = {
            level for (first, last), level in levels.items() if first < target and source < last
        }
        levels[source, target] = min(set(range(len(levels) + 1)) - taken)
    return levels


def _next_arc(pair: tuple[int, int], top: int, label: str, title: str, kind: str) -> Arc:
    start, end, middle = _left(pair[0]) + _WIDTH, _left(pair[1]), top + _HEIGHT // 2
    return Arc(f"M{start} {middle}H{end - 3}", (start + end) / 2, middle - 7, label, title, kind)


def _arc(
    pair: tuple[int, int],
    level: int,
    edge: int,
    label: str,
    title: str,
    kind: str,
    *,
    below: bool = False,
) -> Arc:
    """An arc from the right third of one box over the others to the left third of another; arcs of
    higher levels stand further inside."""
    away = 1 if below else -1
    inset = 12 + 9 * level
    start = _left(pair[0]) + _WIDTH - inset
    end = _left(pair[1]) + inset
    height = edge + away * _LEVEL * (level + 1) - away * 6
    path = f"M{start} {edge}V{height}H{end}V{edge + away * (0 if below else 3)}"
    label_y = height + (-4 if below else -3)
    return Arc(path, (start + end) / 2, label_y, label, title, kind)
