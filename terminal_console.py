"""A terminal that shows names and texts of others as what they are."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from .runtime.hidden_text import visible


class SafeConsole(Console):
    """Spells out what would hide a text, or steer the terminal: only styles may do so."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            if style is not None and style.link:  # a text may not lead anywhere else
                style = style.update_link(None)
            yield segment if control else Segment(visible(text), style)
