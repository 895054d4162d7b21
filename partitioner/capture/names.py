"""Variables of the user's code -> a hint of a name for each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, fx

from .bindings import Bound
from .frames import assigned_names, is_good_name, user_frames

# Longer sequences are no set of values that somebody would name one by one.
_PARTS = 16


class Names:
    """Gives `node.meta["hint"]` to nodes, the first good name of a value winning.

    A name counts only in a frame that was on the stack when the value was made, so that a value
    is called what its maker called it, not as a callee's parameter.
    """

    def __init__(self, top: FrameType, bound: Mapping[int, Bound]) -> None:
        self._top, self._bound = top, bound
        # Frames are kept, so that an id cannot come to mean another frame.
        self._frames: dict[int, FrameType] = {}
        self._made_in: dict[fx.Node, frozenset[int]] = {}

    def assign(self, node: fx.Node, value: Any, frames: Sequence[FrameType]) -> None:
        """Names a value that was just made after the assignment it is in."""
        self._frames.update((id(frame), frame) for frame in frames)
        parts = [self._node_of(part) for part in value] if _is_sequence(value) else []
        for made in (node, *parts):
            if made is not None:
                self._made_in[made] = frozenset(map(id, frames))
        names = assigned_names(frames[0]) if frames else ()
        if len(names) == 1 and parts != [node]:
            self._hint(node, names[0])
        elif len(names) == len(parts):
            for made, name in zip(parts, names, strict=True):
                self._hint(made, name)

    def look(self, frames: Sequence[FrameType] | None = None) -> None:
        """Names values that a variable has come to hold since they were made."""
        for frame in user_frames(self._top) if frames is None else frames:
            for name, value in frame.f_locals.items():
                if isinstance(value, Tensor):
                    self._found(frame, name, value)
                elif _is_sequence(value):
                    for position, part in enumerate(value[:_PARTS]):
                        if isinstance(part, Tensor):
                            self._found(frame, f"{name}_{position}", part)

    def _found(self, frame: FrameType, name: str, value: Tensor) -> None:
        node = self._node_of(value)
        if node is not None and id(frame) in self._made_in.get(node, ()):
            self._hint(node, name)

    def _hint(self, node: fx.Node | None, name: str) -> None:
        if node is not None and is_good_name(name):
            node.meta.setdefault("hint", name)

    def _node_of(self, value: Any) -> fx.Node | None:
        if not isinstance(value, Tensor):
            return None
        bound = self._bound.get(id(value))
        return bound.node if bound is not None else None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (tuple, list))
