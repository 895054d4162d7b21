"""Nesterov's momentum where nothing is late, beside a prediction where it is.

A prediction by momentum is Nesterov's look-ahead over several steps, and a stage without delay
looks no step ahead. FTPipe (USENIX ATC 2021) has two ways to treat all stages alike: to predict one
step there, or to step by the optimizer's own Nesterov.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..versions import View, WeightVersions
from .msnag import Msnag
from .protocol import Passage, Staleness


class Nag(Msnag):
    """`nag`: as `msnag`, and one step ahead where no step lies in between, forward and backward.

    So it is not the plain optimizer at delay 0, but Nesterov's. At delay n it looks n steps ahead,
    as its origin does, not n + 1.
    """

    def forward_view(self, weights: WeightVersions, passage: Passage) -> View | None:
        steps = 0 if self.situation.synchronous else max(1, passage.horizon)
        return self.look_ahead(weights, steps)


class LastStageNesterov(Staleness):
    """`nesterov-last`: the last stage steps its own weights by the Nesterov momentum of torch's
    SGD."""

    decides = frozenset({"step"})
    needs = frozenset({"nesterov"})

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        is_last = self.situation.stage == self.situation.stages - 1
        optimizer = self.steps.optimizer if self.steps else None
        # Weights that other stages hold too are stepped as there.
        shared = {id(weights.live[name]) for name in self.situation.shared if name in weights.live}
        groups = [
            group
            for group in (optimizer.param_groups if optimizer and is_last else ())
            if not any(id(weight) in shared for weight in group["params"])
        ]
        plain = [group["nesterov"] for group in groups]
        for group in groups:
            group["nesterov"] = not self.situation.synchronous
        yield
        for group, nesterov in zip(groups, plain, strict=True):
            group["nesterov"] = nesterov
