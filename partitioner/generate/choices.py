"""Values that one mode makes -> the variable that holds the value of whichever mode it is.

    if self.training:
        hidden = hidden + noise
    else:
        hidden = (hidden + x) / 2

In the graph each branch makes a value of its own, and a node chooses between the two.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from ..capture import IfTraining, Region
from ..capture.skips import unless
from .function_names import FunctionNames
from .items import Item, Loop, Op, regions_of
from .reads import Reads
from .variables import Variables, is_good

TRAINING, EVALUATION = Region("training"), Region("evaluation")


def sides_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values that a choice is between, that of training first; nothing for another node."""
    if node.target is unless:
        _, made, former = node.args
        assert isinstance(made, fx.Node) and isinstance(former, fx.Node)
        return made, former
    sides: Any = node.args[0] if node.args else ()
    if node.target is operator.getitem and node.args[1] == IfTraining(0, 1):
        return sides if isinstance(sides, tuple) else ()
    return ()


def modes_of(node: fx.Node) -> tuple[Region, Region]:
    """The blocks in which the sides of a choice are made."""
    if node.target is unless:
        decision = node.all_input_nodes[0].meta["decision"]
        return Region("unless", decision=decision), Region("if", decision=decision)
    return TRAINING, EVALUATION


class Choices:
    """The choices in a body that need no expression: a side is made in a branch, for them alone.

    `choice_of` has the choice for each such side, `name_of` the variables that were found.
    """

    def __init__(self, items: Sequence[Item], reads: Reads) -> None:
        self.choice_of: dict[fx.Node, fx.Node] = {}
        self.name_of: dict[fx.Node, str] = {}
        self._items, self._reads = items, reads
        self._choosing = {
            position for position, item in enumerate(items) if sides_of(item.nodes[-1])
        }
        made = {
            node: regions_of(item)
            for item in items
            if not isinstance(item, Loop)
            for node in item.results
        }
        for position in sorted(self._choosing):
            choice = items[position].nodes[-1]
            if not isinstance(items[position], Op):
                continue
            for side, mode in zip(sides_of(choice), modes_of(choice), strict=True):
                others = [read for read in reads.of(side) if read != position]
                if mode in made.get(side, ()) and all(
                    read < position and self._is_in(mode, read) for read in others
                ):
                    self.choice_of[side] = choice

    def name(
        self,
        side: fx.Node,
        wanted: Sequence[str],
        position: int,
        variables: Variables,
        names: FunctionNames,
    ) -> str:
        """The variable that holds a value of one mode and, after, that of whichever mode it is."""
        choice = self.choice_of[side]
        older = [variables.name_of.get(each, "") for each in sides_of(choice)]
        hint = [str(choice.meta["hint"])] if "hint" in choice.meta else []
        good = [name for name in (*hint, *older, *wanted) if is_good(name)]
        for name in good:
            held = variables.holds.get(name, ())
            if not names.is_taken(name, position) or self.may_hold(held, side, position):
                return name
        return names.free(good, position, ())

    def may_hold(self, held: Iterable[fx.Node], side: fx.Node, position: int) -> bool:
        """Whether a variable with these values may get that of a side: after that position only
        the other mode and the choice read them."""
        choice = self.choice_of[side]
        first, second = modes_of(choice)
        mode = second if sides_of(choice)[0] is side else first
        later = [read for node in held for read in self._reads.of(node) if read > position]
        return all(
            self._is_in(mode, read) or self._items[read].nodes[-1] is choice
            if read < len(self._items)
            else False
            for read in later
        )

    def _is_in(self, mode: Region, position: int) -> bool:
        return position < len(self._items) and mode in regions_of(self._items[position])
