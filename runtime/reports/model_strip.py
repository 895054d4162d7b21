"""A plan -> the model as a strip of its modules, in SVG units.

The width of a module is its share of the time of one micro-batch, forward and backward. Stages
differ in color, and each second one is hatched. Dashed lines are the cuts, with the bytes of one
micro-batch; skips over stages are arcs above, tied parameters arcs below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..formatting import counted, write_bytes, write_large_count, write_ms, write_share
from ..plan.forecast import spec_bytes
from ..plan.plan import Plan, StagePart, StageSpec

STRIP_WIDTH = 1060
_LEFT, _RIGHT = 4, 1056
_STRIP = 54  # the height of the modules
_HEADER = 34  # two lines above them
_LEVEL = 24  # between two arcs one above the other
_LINE = 15  # between two labels of cuts
_LETTER, _SMALL_LETTER = 6.9, 6.1  # the width of a letter with a font of 12 and of 11
_LEAST = 1.5  # the width of a module without time
_COLORS = 6
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModuleBox:
    """A module of a stage; its label is its name, or as many of its last parts as there is room
    for. A vertical label reads upwards."""

    x: float
    width: float
    label: str
    is_vertical: bool
    title: str


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A stage of the strip.

    color: the number of its color
    is_hatched, is_slowest: how it is drawn
    lines: two lines above it, shortened to its width
    """

    x: float
    width: float
    color: int
    is_hatched: bool
    is_slowest: bool
    lines: tuple[str, str]
    title: str
    modules: tuple[ModuleBox, ...]


@dataclass(frozen=True, slots=True)
class CutMark:
    """The line between two stages, and the bytes that cross it from one to the next."""

    x: float
    label_x: float
    label_y: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Arc:
    """A connection of two stages; `kind` is "skip" or "tied"."""

    path: str
    x: float
    y: float
    label: str
    title: str
    kind: str


@dataclass(frozen=True, slots=True)
class ModelStrip:
    """The strip; modules are from `top` to `bottom`."""

    height: int
    top: int
    bottom: int
    stages: tuple[StageSpan, ...]
    cuts: tuple[CutMark, ...]
    arcs: tuple[Arc, ...]
    width: ClassVar[int] = STRIP_WIDTH

    @property
    def has_skips(self) -> bool:
        return any(arc.kind == "skip" for arc in self.arcs)

    @property
    def has_ties(self) -> bool:
        return any(arc.kind == "tied" for arc in self.arcs)


@dataclass(frozen=True, slots=True)
class _Link:
    """The tensors that join two stages, in words."""

    label: str
    title: str


def model_strip(plan: Plan) -> ModelStrip:
    """The stages from left to right, with their modules in the order of forward."""
    sent, tied = _sent(plan), _tied(plan)
    skips = _levels(pair for pair in sent if pair[1] - pair[0] > 1)
    below = _levels(tied)
    top = 4 + _LEVEL * (1 + max(skips.values(), default=-1)) + _HEADER
    bottom = top + _STRIP
    stages = _spans(plan)
    cuts = _cuts(stages, sent, bottom)
    edge = max((cut.label_y for cut in cuts), default=bottom) + 2
    arcs = [_skip(stages, pair, level, top - _HEADER, sent[pair]) for pair, level in skips.items()]
    arcs += [_tie(stages, pair, level, bottom, edge, tied[pair]) for pair, level in below.items()]
    return ModelStrip(
        height=round(edge + 6 + _LEVEL * (1 + max(below.values(), default=-1))),
        top=top,
        bottom=bottom,
        stages=stages,
        cuts=cuts,
        arcs=tuple(arcs),
    )


# --- stages and modules ---------------------------------------------------------------------------


def _spans(plan: Plan) -> tuple[StageSpan, ...]:
    parts = [_parts_of(stage) for stage in plan.stages]
    total_ms = sum(_time_ms(part) for own in parts for part in own) or 1.0
    count = sum(map(len, parts))
    least = min(_LEAST, (_RIGHT - _LEFT) / 4 / count)
    scale = (_RIGHT - _LEFT - count * least) / total_ms
    if not any(_time_ms(part) for own in parts for part in own):
        least = (_RIGHT - _LEFT) / count
    prefix = _common_prefix([part.name for own in parts for part in own])
    slowest = max(plan.stages, key=lambda stage: stage.load_ms).index
    spans, x = [], float(_LEFT)
    for stage, own in zip(plan.stages, parts, strict=True):
        modules, start = [], x
        for part in own:
            width = least + scale * _time_ms(part)
            modules.append(_module(stage, part, prefix, x, width, _time_ms(part) / total_ms))
            x += width
        is_slowest = len(plan.stages) > 1 and stage.index == slowest
        spans.append(_span(plan, stage, tuple(modules), start, x - start, is_slowest=is_slowest))
    return tuple(spans)


def _parts_of(stage: StageSpec) -> tuple[StagePart, ...]:
    whole = StagePart(", ".join(stage.modules), stage.forward_ms, stage.backward_ms)
    return stage.parts or (whole,)


def _time_ms(part: StagePart) -> float:
    return part.forward_ms + part.backward_ms


def _span(
    plan: Plan,
    stage: StageSpec,
    modules: tuple[ModuleBox, ...],
    x: float,
    width: float,
    *,
    is_slowest: bool,
) -> StageSpan:
    name, ranks = f"stage {stage.index}", ", ".join(map(str, stage.ranks))
    if stage.ranks not in ((), (stage.index,)):
        name += f" on rank {ranks}" if len(stage.ranks) == 1 else f" × {len(stage.ranks)} ranks"
    size, slowest = parameter_count(stage), ", slowest" if is_slowest else ""
    load = write_ms(stage.load_ms)
    loads = (f"{load}{slowest}, {size} parameters", f"{load}{slowest}", load)
    return StageSpan(
        x=round(x, 2),
        width=round(width, 2),
        color=stage.index % _COLORS,
        is_hatched=stage.index % 2 == 1,
        is_slowest=is_slowest,
        lines=(
            _fitting(width - 4, (name, f"stage {stage.index}", str(stage.index)), _LETTER),
            _fitting(width - 4, (*loads, f"{stage.load_ms:.0f}"), _SMALL_LETTER),
        ),
        title=(
            f"{name}: {', '.join(stage.modules) or 'operations only'}; {load} per micro-batch with "
            f"transfers{slowest}, {size} parameters"
        ),
        modules=modules,
    )


def _fitting(width: float, texts: Iterable[str], letter: float) -> str:
    """The first text that fits, or ""."""
    return next((text for text in texts if letter * len(text) + 4 <= width), "")


def parameter_count(stage: StageSpec) -> str:
    """The number of a stage's parameters, as `53.6 M`."""
    return write_large_count(stage.param_bytes // _FLOAT_BYTES)


def _module(
    stage: StageSpec, part: StagePart, prefix: str, x: float, width: float, share: float
) -> ModuleBox:
    short = part.name.removeprefix(prefix)
    names = (part.name, short, *_ends(short))
    label = _fitting(width, names, _LETTER)
    vertical = _fitting(_STRIP, names, _LETTER) if not label and width >= _LINE else ""
    return ModuleBox(
        x=round(x, 2),
        width=round(width, 2),
        label=label or vertical,
        is_vertical=bool(vertical),
        title=f"{part.name} in stage {stage.index}: " + "; ".join(_described(part, share)),
    )


def _ends(name: str) -> Iterator[str]:
    """The last parts of a name of at least a word, the longest first.

    >>> list(_ends("decoder.block.0")), list(_ends("lm_head"))
    (['block.0'], [])
    """
    while "." in name:
        name = name.partition(".")[2]
        if not name.isdecimal():
            yield name


def _described(part: StagePart, share: float) -> Iterator[str]:
    """Times of a module, and its slowest operation with its line."""
    yield (
        f"forward {write_ms(part.forward_ms)}, backward {write_ms(part.backward_ms)}, "
        f"{write_share(share)} of the model"
    )
    if part.operations == 1:
        yield part.slowest
    elif part.operations:
        yield f"{counted(part.operations, 'operation')}, the slowest {part.slowest}"


def _common_prefix(names: Sequence[str]) -> str:
    """`transformer.` for the modules `transformer.wte`, `transformer.h.0` and an operation.

    >>> _common_prefix(["transformer.wte", "transformer.h.0", "lm_head"])
    'transformer.'
    >>> _common_prefix(["encoder.0", "decoder.0"])
    ''
    """
    heads = {name.partition(".")[0] for name in names if "." in name}
    return f"{heads.pop()}." if len(heads) == 1 else ""


# --- cuts and arcs --------------------------------------------------------------------------------


def _cuts(
    stages: Sequence[StageSpan], sent: dict[tuple[int, int], _Link], bottom: int
) -> tuple[CutMark, ...]:
    """A line at the end of each stage but the last; labels that would overlap are in rows."""
    cuts: list[CutMark] = []
    ends: list[float] = []  # of the last label of each row
    for stage in range(len(stages) - 1):
        x = stages[stage + 1].x
        link = sent.get((stage, stage + 1), _Link("", f"nothing from stage {stage} to the next"))
        half = _SMALL_LETTER * len(link.label) / 2
        label_x = min(max(x, _LEFT + half), _RIGHT - half)
        row = next((at for at, end in enumerate(ends) if end < label_x - half), len(ends))
        ends[row : row + 1] = [label_x + half + 8]
        label_y = bottom + 17 + _LINE * row
        cuts.append(CutMark(x, round(label_x, 2), label_y, link.label, link.title))
    return tuple(cuts)


def _skip(
    stages: Sequence[StageSpan], pair: tuple[int, int], level: int, edge: int, link: _Link
) -> Arc:
    start, end = _anchor(stages[pair[0]], 0.7), _anchor(stages[pair[1]], 0.3)
    y = edge - _LEVEL * level - 10
    path = f"M{start} {edge}V{y}H{end}V{edge - 3}"
    return Arc(path, round((start + end) / 2, 2), y - 3, link.label, link.title, "skip")


def _tie(
    stages: Sequence[StageSpan],
    pair: tuple[int, int],
    level: int,
    bottom: int,
    edge: float,
    link: _Link,
) -> Arc:
    start, end = _anchor(stages[pair[0]], 0.5), _anchor(stages[pair[1]], 0.5)
    y = edge + _LEVEL * (level + 1) - 6
    path = f"M{start} {bottom}V{y}H{end}V{bottom}"
    return Arc(path, round((start + end) / 2, 2), y - 4, link.label, link.title, "tied")


def _anchor(stage: StageSpan, part: float) -> float:
    return round(stage.x + part * stage.width, 2)


def _sent(plan: Plan) -> dict[tuple[int, int], _Link]:
    """For every two stages that exchange tensors, the bytes of one micro-batch."""
    pairs: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for boundary in plan.boundaries:
        size = spec_bytes(boundary.tensor, plan.sizes)
        text = f"{boundary.tensor.name} {boundary.tensor}, {write_bytes(size)}"
        for target in boundary.targets:
            pairs.setdefault((boundary.source, target), []).append((size, text))
    return {
        (source, target): _Link(
            write_bytes(sum(size for size, _ in transfers)),
            f"stage {source} to {target}: " + "; ".join(text for _, text in transfers),
        )
        for (source, target), transfers in sorted(pairs.items())
    }


def _tied(plan: Plan) -> dict[tuple[int, int], _Link]:
    """For every two stages that hold the same parameter, its names."""
    names: dict[tuple[int, int], list[str]] = {}
    for shared in plan.shared:
        first, *others = dict.fromkeys(shared.stages)
        for other in others:
            names.setdefault((first, other), []).append(" = ".join(shared.names))
    return {
        pair: _Link(
            "tied weights" if len(texts) == 1 else f"{len(texts)} tied weights",
            f"held by stages {pair[0]} and {pair[1]}, gradients are summed: " + "; ".join(texts),
        )
        for pair, texts in sorted(names.items())
    }


def _levels(pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Assigns different levels to arcs that would overlap; short arcs are nearest to the strip."""
    levels: dict[tuple[int, int], int] = {}
    for source, target in sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair)):
        used = {
            level for (first, last), level in levels.items() if first < target and source < last
        }
        levels[source, target] = min(set(range(len(levels) + 1)) - used)
    return levels
