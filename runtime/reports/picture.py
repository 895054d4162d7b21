"""A plan -> one SVG file: the modules with their cuts, one simulated step, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan.plan import Plan
from .model_strip import STRIP_WIDTH, model_strip
from .planned_steps import planned_steps
from .rendering import render

_MARGIN, _CAPTION, _KEY = 14, 22, 20
_SQUARE, _LETTER, _APART = 20, 5.9, 14  # a square of the key, a letter and the space behind a text
_ACTIONS = (("F", "forward"), ("B", "backward"), ("S", "optimizer step"), ("lane", "idle"))


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A square of a style and its meaning, in the key of a drawing."""

    kind: str
    x: float
    text: str


def picture(plan: Plan) -> str:
    """The SVG. It stands alone, follows the light or dark mode of its page, and is the same text
    for the same plan. The step is one of the plan's own schedule."""
    strip = model_strip(plan)
    (step,) = planned_steps(plan, (plan.setting.schedule,))
    uses = [(kind, f"{letter} {kind}") for kind, letter, _ in step.memory.legend]
    keys = ((), _key(_ACTIONS), _key(uses))
    heights = (strip.height, step.drawing.height, step.memory.height)
    tops = []
    y = _MARGIN
    for key, height in zip(keys, heights, strict=True):
        y += _CAPTION + _KEY * bool(key)
        tops.append(y)
        y += height + _MARGIN
    return render(
        "picture.svg.j2",
        plan=plan,
        strip=strip,
        step=step,
        width=STRIP_WIDTH,
        height=y,
        tops=tops,
        keys=keys,
    )


def _key(entries: Sequence[tuple[str, str]]) -> tuple[KeyEntry, ...]:
    key, x = [], 4.0
    for kind, text in entries:
        key.append(KeyEntry(kind, round(x, 1), text))
        x += _SQUARE + _LETTER * len(text) + _APART
    return tuple(key)
