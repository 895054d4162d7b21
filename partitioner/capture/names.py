"""Variables of the user's code -> a hint of a name for each node."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, fx

from .frames import assigned_names, is_good_name, user_frames


class _Entry(Protocol):
    node: fx.Node


class Names:
    """Gives `node.meta["hint"]` to nodes, the first good name of a value winning.

    A name counts only in a frame that was on the stack when the value was made, so that a value
    is called what its maker called it, not as a callee's parameter.
    """

    def __init__(self, top: FrameType) -> None:
        self._top = top
        # Frames are kept, so that an id cannot come to mean another frame.
        self._frames: dict[int, FrameType] = {}
        self._made_in: dict[fx.Node, frozenset[int]] = {}

    def assign(
        self, node: fx.Node, value: Any, frames: list[FrameType], values: Mapping[int, _Entry]
    ) -> None:
        """Names a value that was just made from the assignment it is in."""
        self._frames.update((id(frame), frame) for frame in frames)
        home = frozenset(id(frame) for frame in frames)
        parts = value if isinstance(value, (tuple, list)) else (value,)
        nodes = [_node_of(part, values) for part in parts]
        for made in (node, *nodes):
            if made is not None:
                self._made_in[made] = home
        names = assigned_names(frames[0]) if frames else ()
        if isinstance(value, Tensor):
            if len(names) == 1:
                self._hint(node, names[0])
        elif len(names) == len(nodes) > 1:
            for made, name in zip(nodes, names, strict=True):
                if made is not None:
                    self._hint(made, name)
        elif len(names) == 1:
            self._hint(node, names[0])

    def look(self, values: Mapping[int, _Entry], frames: list[FrameType] | None = None) -> None:
        """Names values that a variable has come to hold since they were made."""
        for frame in user_frames(self._top) if frames is None else frames:
            for name, value in frame.f_locals.items():
                if not is_good_name(name):
                    continue
                node = _node_of(value, values)
                if node is not None and "hint" not in node.meta:
                    if id(frame) in self._made_in.get(node, ()):
                        node.meta["hint"] = name

    def _hint(self, node: fx.Node, name: str) -> None:
        if is_good_name(name):
            node.meta.setdefault("hint", name)


def _node_of(value: Any, values: Mapping[int, _Entry]) -> fx.Node | None:
    if not isinstance(value, Tensor):
        return None
    entry = values.get(id(value))
    return entry.node if entry is not None else None
