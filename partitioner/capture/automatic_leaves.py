"""A trace that fails inside a module -> another trace that keeps the module as one node.

What `--leaf` does by hand is done here for modules that decide by values or do what the tracer
cannot see: the innermost module around the failing line first, then those around it. The root is
never kept, nor a module of modules that holds more than half of the model, nor one for which no
constructor can be written.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...runtime.errors import CaptureError, PlanError
from ..constructors import construct
from .leaves import LeafRule, is_torch_leaf


class FailedTrace(Exception):
    """A forward that could not be traced, and the paths of the modules within which it failed."""

    def __init__(self, error: CaptureError, paths: Sequence[str]) -> None:
        super().__init__(error.what)
        self.error, self.paths = error, paths


class AutomaticLeaves:
    """The rule of `leaf_rule` and the classes kept on the way."""

    def __init__(self, model: nn.Module, rule: LeafRule) -> None:
        self._model, self._rule = model, rule
        self._kept: dict[type[nn.Module], str] = {}
        self._tried: set[type[nn.Module]] = set()

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        return type(module) in self._kept or self._rule(module, path)

    def keep(self, paths: Sequence[str], error: CaptureError) -> bool:
        """Keeps one more class, because forward failed within the modules at these paths, the
        outermost first; False if there is none left to keep."""
        for path in reversed(paths):
            module = self._model.get_submodule(path)
            kind = type(module)
            if kind in self._tried or kind.__module__.startswith("torch.nn"):
                continue
            self._tried.add(kind)
            if self._is_small(module) and _is_constructible(module, path, self._model):
                self._kept[kind] = f"{kind.__name__} is kept as one operation: {error.what}"
                return True
        return False

    def notes(self, called: set[str]) -> list[str]:
        """Why each class among the modules called in the graph was kept."""
        kinds = dict.fromkeys(type(self._model.get_submodule(path)) for path in sorted(called))
        return [self._kept[kind] for kind in kinds if kind in self._kept]

    def _is_small(self, module: nn.Module) -> bool:
        """Whether it holds at most half of the model, or nothing that could be cut."""
        inside = [each for each in module.modules() if each is not module]
        if all(is_torch_leaf(each) or not list(each.parameters()) for each in inside):
            return True
        own, all_ = (
            sum(parameter.numel() for parameter in tree.parameters())
            for tree in (module, self._model)
        )
        return 2 * own <= all_


def _is_constructible(module: nn.Module, path: str, model: nn.Module) -> bool:
    try:
        construct(module, path, model)
    except PlanError:
        return False
    return True
