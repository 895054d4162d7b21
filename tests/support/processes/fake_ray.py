"""A stand-in for a Ray cluster: actors are objects of this process, and their calls are threads."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from types import ModuleType, SimpleNamespace
from typing import Any

_CALLS = ThreadPoolExecutor(32)


class _Actor:
    def __init__(self, made: Any, node: str) -> None:
        self.made, self.node = made, node

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self.made, name)
        return SimpleNamespace(remote=lambda *given: _CALLS.submit(method, *given))


class _Class:
    """An actor class; the n-th of its actors is on the n-th of the nodes."""

    def __init__(self, kind: type, nodes: Sequence[str]) -> None:
        self._kind, self._nodes = kind, nodes

    def options(self, *, scheduling_strategy: int, **given: Any) -> Any:
        node = self._nodes[scheduling_strategy]
        return SimpleNamespace(remote=lambda: _Actor(self._kind(node), node))


def _kill(actor: _Actor) -> None:
    process = actor.made._process
    if isinstance(process, subprocess.Popen) and process.poll() is None:
        process.kill()


def _wait(
    futures: list[Future[Any]], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Future[Any]], list[Future[Any]]]:
    done, waiting = wait_for(futures, timeout, return_when=FIRST_COMPLETED)
    return [*done], [*waiting]


def _get(futures: Any, timeout: float | None = None) -> Any:
    is_list = isinstance(futures, list)
    return [each.result() for each in futures] if is_list else futures.result()


def fake_ray(nodes: Sequence[str], *, has_room: bool = True) -> ModuleType:
    """The module `ray` for a cluster with one actor on each of these nodes, in their order."""
    ray: Any = ModuleType("ray")
    ray.remote = lambda kind: _Class(kind, nodes)
    ray.get, ray.wait, ray.kill = _get, _wait, _kill
    strategies = SimpleNamespace(
        PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
            placement_group_bundle_index
        )
    )
    ray.util = SimpleNamespace(
        placement_group=lambda bundles, strategy: SimpleNamespace(wait=lambda seconds: has_room),
        remove_placement_group=lambda group: None,
        scheduling_strategies=strategies,
    )
    ray.exceptions = SimpleNamespace(RayError=RuntimeError)
    module: ModuleType = ray
    return module
