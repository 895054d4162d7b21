"""Optimizers of disjoint parameters -> one, with all their groups and states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class Joint(Optimizer):
    """Steps `parts` in turn. Its `param_groups` are theirs in order, and its `state` holds theirs:
    the same objects, so that a learning rate set here is the part's, and a state dict is whole."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch ends the loading of a state dict here too, with new groups and states.
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every part."""
        for part in self.parts:
            part.step()
