"""asyncpipe: from a PyTorch model to balanced, readable pipeline stages, and their training.

>>> import asyncpipe
>>> plan = asyncpipe.partition(model, example_inputs, stages=4)     # doctest: +SKIP
>>> pipe = asyncpipe.load("generated_models/gpt2_4p")               # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .runtime import __version__ as __version__

if TYPE_CHECKING:
    from .commands.in_python import train as train
    from .partitioner.compile import partition as partition
    from .partitioner.graph.formats import read_graph as read_graph
    from .partitioner.outline import outline as outline
    from .partitioner.planning.planner import plan_graph as plan_graph
    from .runtime.control.callbacks import Request as Request
    from .runtime.errors import AsyncPipeError as AsyncPipeError
    from .runtime.executor.loading import load as load
    from .runtime.launch.functions import launch as launch
    from .runtime.monitoring.records import Reporter as Reporter
    from .runtime.plan.plan import Plan as Plan
    from .runtime.schedule.schedule import Schedule as Schedule
    from .runtime.training.pipeline import Pipeline as Pipeline

_PUBLIC = {
    "AsyncPipeError": ".runtime.errors",
    "partition": ".partitioner.compile",
    "plan_graph": ".partitioner.planning.planner",
    "outline": ".partitioner.outline",
    "read_graph": ".partitioner.graph.formats",
    "load": ".runtime.executor.loading",
    "train": ".commands.in_python",
    "launch": ".runtime.launch.functions",
    "Pipeline": ".runtime.training.pipeline",
    "Plan": ".runtime.plan.plan",
    "Reporter": ".runtime.monitoring.records",
    "Request": ".runtime.control.callbacks",
    "Schedule": ".runtime.schedule.schedule",
}
__all__ = [
    "AsyncPipeError",
    "Pipeline",
    "Plan",
    "Reporter",
    "Request",
    "Schedule",
    "launch",
    "load",
    "outline",
    "partition",
    "plan_graph",
    "read_graph",
    "train",
]


def __dir__() -> list[str]:
    """The public names, which are imported on first use."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `import asyncpipe` is light."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name], __name__), name)
