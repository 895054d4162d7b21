"""The exchanges of a stage's optimizer steps with the other ranks that hold its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from .matrices import NO_MATRICES, WholeMatrices
from .shards import Shards


class OwnedSteps:
    """The part of a stage's optimizer steps that its replicas and tensor ranks share.

    shards: the owners of its parameters among the replicas.
    matrices: the owners of weights that are stepped as wholes, among the tensor ranks.
    """

    moves_weights = False

    def __init__(self, shards: Shards, matrices: WholeMatrices = NO_MATRICES) -> None:
        self.shards, self.matrices = shards, matrices
        self._followers: list[Callable[[], None]] = []

    def spread(self, tensors: Mapping[Tensor, Tensor]) -> None:
        """Gives tensors, by their parameter, the values that they have at its owner."""
        self.shards.spread(tensors)

    def follow(self, act: Callable[[], None]) -> None:
        """Calls `act` after every step, when all weights of the stage are new."""
        self._followers.append(act)

    def finish_step(self) -> None:
        """Exchanges the new weights. Collective among replicas that own different parameters."""
        self.shards.spread({each: each for each in self.shards.owners if each.requires_grad})
        for act in self._followers:
            act()
