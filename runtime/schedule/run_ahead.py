"""Costs and their spread -> how far the stages of an asynchronous pipeline run ahead.

With the usual W = p-1-j forwards ahead, stages wait for one another at every micro-batch: whenever
an action is late, or a link takes time, a neighbor is idle. With a multiple of W variations average
out and transfers hide behind computation. Each forward ahead keeps the activations of one more
micro-batch, and makes weights staler where a step has fewer micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .asynchronous import async_1f1b
from .dependencies import Edge
from .simulate import ActionCosts, simulate

_MOST = 8
_ENOUGH = 0.005
_MICRO_BATCHES = 160
LEAST_SPREAD = 0.05
"""Of a run's actions, whose ranks wait for each other's caches, memory and messages; stages that
are timed alone vary less."""


def times_ahead(
    costs: ActionCosts,
    step_every: int,
    spread: float,
    *,
    edges: Iterable[Edge] | None = None,
    grad_edges: Iterable[Edge] | None = None,
    fits: Callable[[Sequence[int]], bool] = lambda warmup: True,
) -> int:
    """The least multiple of the usual number of forwards ahead with which ranks are idle at most
    half a percent longer than with any other multiple that is allowed.

    A multiple is allowed if no gradient becomes later by a whole step, stage 0 runs fewer
    micro-batches ahead than a step has (unless the usual number is as many), and `fits` holds for
    the forwards that each stage runs ahead. The rest is by simulation with this spread, or
    LEAST_SPREAD.

    >>> times_ahead(ActionCosts.equal(2), step_every=8, spread=0.05)
    2
    >>> times_ahead(ActionCosts.equal(2), step_every=1, spread=0.05)
    1
    """
    stages = len(costs.forward_ms)
    usual = range(stages - 1, -1, -1)
    edges, grad_edges = (None if given is None else [*given] for given in (edges, grad_edges))

    def idle(times: int) -> float:
        warmup = [times * forwards for forwards in usual]
        count = -(-_MICRO_BATCHES // step_every) * step_every
        made = async_1f1b(stages, count, step_every, warmup)
        timeline = simulate(
            made, costs, edges, grad_edges=grad_edges, spread=max(spread, LEAST_SPREAD)
        )
        return timeline.steady_idle_share

    allowed = [1]
    for times in range(2, _MOST + 1):
        warmup = [times * forwards for forwards in usual]
        if warmup[0] >= step_every or not fits(warmup):
            break
        allowed.append(times)
    if len(allowed) == 1:
        return 1
    idle_shares = [*map(idle, allowed)]
    enough = min(idle_shares) + _ENOUGH
    return next(times for times, share in zip(allowed, idle_shares, strict=True) if share <= enough)
