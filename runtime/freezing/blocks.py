"""A plan -> the repeated blocks of its model, which freeze from the first one on.

The blocks are the entries of a numbered list of the model, such as `transformer.h.0` to `.11`: the
list with the most parameters, and lists of the same name elsewhere (`encoder.block` and
`decoder.block`, or `layer1` to `layer4`), in the order of the model. Parameters between two blocks,
or before the first one, such as embeddings, freeze with the block that follows them. The head,
everything after the last block, always trains. All of this follows from names, so it is the same
for every cut.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from ..errors import AsyncPipeError
from ..plan.plan import Plan

_ENTRY = re.compile(r"(?P<list>.+?)\.(?P<number>\d+)\.")
_DIGITS = re.compile(r"\d+")


class FreezeError(AsyncPipeError):
    """A rule or a model whose blocks cannot be frozen."""


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model.

    paths: the module of each block, in the order of the model
    parameters: the parameters of each block
    before: the parameters that freeze with each block: those between it and the block before it
    head: the parameters after the last block
    other_names: the other names of a parameter with several, which is named above by its first one
    feeding: the modules without parameters outside the blocks that a block depends on, each with
        the number of the first such block; None as long as they are not known
    """

    paths: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]
    before: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]
    other_names: Mapping[str, tuple[str, ...]]
    feeding: Mapping[str, int] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def most(self) -> int:
        """The most blocks that can be frozen: one less than all if nothing else trains."""
        return len(self.paths) if self.head else len(self.paths) - 1

    def first_names(self, depth: int) -> frozenset[str]:
        """The frozen parameters when `depth` blocks are frozen, by their first names."""
        groups = (*self.parameters[:depth], *self.before[:depth])
        return frozenset(name for group in groups for name in group)

    def frozen(self, depth: int) -> frozenset[str]:
        """The same parameters, by all their names."""
        first = self.first_names(depth)
        return first.union(*(self.other_names.get(name, ()) for name in first))


def blocks_of(plan: Plan) -> Blocks:
    """The blocks of a plan's model. Raises FreezeError for a model without repeated blocks.

    A parameter with several names is frozen with the first of them: it is one tensor.
    """
    names = _parameters_in_order(plan)
    lists = _lists_of(names)
    paths = list(dict.fromkeys(path for name in names if (path := _block_of(name, lists))))
    if len(paths) < 2:
        raise FreezeError(
            f"{plan.name} has no list of repeated blocks, so there is nothing to freeze in order.",
            "Leave --freeze out, or set requires_grad=False in the model before partitioning it.",
        )
    own: dict[str, list[str]] = {path: [] for path in paths}
    before: dict[str, list[str]] = {path: [] for path in paths}
    head: list[str] = []
    all_names = {name: shared.names for shared in plan.shared for name in shared.names}
    left, seen = list(reversed(paths)), set[str]()
    for name in names:
        path = _block_of(name, lists)
        while path in left:
            left.pop()
        if name not in seen:
            group = own[path] if path else before[left[-1]] if left else head
            group.append(name)
            seen.update(all_names.get(name, ()))
    first = {*chain(head, *own.values(), *before.values())}
    return Blocks(
        tuple(paths),
        tuple(tuple(own[path]) for path in paths),
        tuple(tuple(before[path]) for path in paths),
        tuple(head),
        {name: of_one for name, of_one in all_names.items() if name in first},
    )


def _parameters_in_order(plan: Plan) -> list[str]:
    """The names of all parameters that a stage holds, in the order of the model's state_dict."""
    known = {name for stage in plan.stages for name in stage.parameters}
    known |= {name for shared in plan.shared for name in shared.names}
    return [name for name in plan.state_keys if name in known]


def _lists_of(names: Iterable[str]) -> frozenset[str]:
    """The paths of the numbered lists whose entries are the blocks."""
    sizes = Counter(entry["list"] for name in names if (entry := _ENTRY.match(name)))
    if not sizes:
        return frozenset()
    largest = max(sizes, key=lambda path: sizes[path])  # the first of several
    return frozenset(path for path in sizes if _stem(path) == _stem(largest))


def _stem(path: str) -> str:
    """The last name of a path without its digits."""
    return _DIGITS.sub("", path.rpartition(".")[2])


def _block_of(name: str, lists: frozenset[str]) -> str:
    """The path of the block that a parameter belongs to; "" for none."""
    entry = _ENTRY.match(name)
    return entry[0][:-1] if entry and entry["list"] in lists else ""
