"""The parameters of a stage -> the replica that owns each of them, by the size of its state.

Whole tensors have owners, because Muon and SOAP step whole matrices, and because a checkpoint then
has the same names and shapes for any number of replicas. The largest parameters are placed first,
each with the replica that has least so far (Graham, "Bounds on multiprocessing timing anomalies",
1969: at most 4/3 of the best maximum). Every rank computes the same owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..optimizers.facts import OPTIMIZERS, facts_of
from ..optimizers.soap import LARGEST

_NUMBERS = frozenset({"step", "mu_product"})
_SHORT = frozenset({"row_var", "col_var"})


def state_numbers(
    optimizer: str, shape: Sequence[int], *, is_hidden: bool, momentum: float = 0.0
) -> int:
    """The numbers of an optimizer's state of a parameter of a shape; `is_hidden` says that it is
    one of the hidden matrices, which Muon and SOAP step.

    >>> state_numbers("adamw", (30, 20), is_hidden=True)
    1200
    >>> state_numbers("muon", (30, 20), is_hidden=True)
    600
    >>> state_numbers("soap", (30, 20), is_hidden=True)
    3800
    >>> state_numbers("adafactor", (30, 20), is_hidden=True)
    50
    """
    facts = facts_of(optimizer)
    if facts.hidden_matrices_only and not is_hidden:
        facts = OPTIMIZERS["adamw"]
    numbers, is_vector = prod(shape), len(shape) < 2
    names = set(facts.state_of_vectors if is_vector and facts.state_of_vectors else facts.state)
    if facts.has_momentum and facts.plain_sgd and not momentum:
        names.discard("momentum_buffer")
    total = numbers * len(names - _NUMBERS - _SHORT)
    if names & _SHORT:
        total += prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
    if facts.rotates:
        total += 2 * sum(side * side for side in shape if side <= LARGEST)
    return total


def owners_of(sizes: Sequence[int], copies: int) -> tuple[int, ...]:
    """The owner of each of the sizes among so many copies.

    >>> owners_of([5, 9, 4, 1, 4], 2)
    (1, 0, 1, 1, 0)
    """
    owners, loads = [0] * len(sizes), [0] * copies
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owners[place] = min(range(copies), key=lambda copy: (loads[copy], copy))
        loads[owners[place]] += sizes[place]
    return tuple(owners)
