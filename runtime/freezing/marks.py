"""Marks of tensors, which operations pass on from what they read to what they make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

INPUT = -1
"""The block number of a leaf that belongs to no block, such as a stage's input."""


@dataclass(frozen=True, slots=True, order=True)
class Leaf:
    """A tensor that a frozen block returns, or that the stage does.

    block: the number of the block; that of all blocks stands for the stage as a whole
    number: its place among what that returns
    """

    block: int
    number: int


TRAINED, DRAWN = Leaf(INPUT, -1), Leaf(INPUT, -2)
"""The marks of what depends on something that trains, and on random numbers."""


class Marks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes the marks of what operations read on to what they make; memory has marks, so views of
    a tensor share them.

    steering: the marks of tensors whose values were read by the program
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steering: set[Leaf] = set()
        self._of: dict[int, set[Leaf]] = {}
        self._alive: list[Tensor] = []  # memory that is freed would give its identity away

    def add(self, value: Any, leaves: Iterable[Leaf]) -> None:
        """Marks a tensor."""
        self._alive.append(value)
        self._of.setdefault(value.untyped_storage()._cdata, set()).update(leaves)

    def of(self, value: Tensor) -> set[Leaf]:
        """The marks of a tensor."""
        return self._of.get(value.untyped_storage()._cdata, set())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = tree_leaves((args, kwargs))
        read = set[Leaf]().union(*(self.of(each) for each in given if isinstance(each, Tensor)))
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):  # its functions may draw
            for value in tree_leaves(result):
                if isinstance(value, Tensor):
                    self.add(value, read | {DRAWN})
            return result
        name = func.overloadpacket.__name__
        if name.endswith("_like") or name.startswith("new_"):  # which read shapes alone
            read = set()
        if _draws(func, args, kwargs or {}):
            read |= {DRAWN}
        if not read:
            return result
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for value in tree_leaves((result, written)):
            if isinstance(value, Tensor):
                self.add(value, read)
            elif isinstance(value, int | float):
                self.steering |= read
        return result


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for an operation that draws random numbers with these arguments."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = func._schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= {each.name: value for each, value in zip(arguments, args, strict=False)}
    given |= kwargs
    is_on = given.get("train", True) is not False and given.get("training", True) is not False
    return is_on and given.get("dropout_p", 1.0) != 0
