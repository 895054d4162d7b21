"""Modules and tensors that have several names -> the name by which each reader knows them.

A model may hold one module or parameter in several places. The graph calls it by its first name;
code that is written as a class again must call it by its name below that class. So every node
reaches what it uses by the name below the innermost module call around it that has one.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from .capture import Capture, ModuleCall


class LocalNames:
    """Names of modules, calls and tensors as seen from each node of a captured graph."""

    def __init__(self, capture: Capture) -> None:
        model = capture.model
        self._modules: dict[int, list[str]] = defaultdict(list)
        self._module_ids: dict[str, int] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._modules[id(module)].append(path)
            self._module_ids[path] = id(module)
        self._tensors: dict[int, list[str]] = defaultdict(list)
        self._tensor_ids: dict[str, int] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            self._tensors[id(tensor)].append(name)
            self._tensor_ids[name] = id(tensor)

    def calls(self, node: fx.Node) -> tuple[ModuleCall, ...]:
        """The module calls around a node, each path below that of the call around it if it has
        a name there."""
        calls: tuple[ModuleCall, ...] = ()
        for call in node.meta.get("calls", ()):
            names = self._modules.get(self._module_ids.get(call.path, -1), [])
            calls += (ModuleCall(_innermost(call.path, names, calls), call.index),)
        return calls

    def module(self, node: fx.Node) -> str:
        """The path of the leaf module that a `call_module` node calls."""
        path = str(node.target)
        names = self._modules.get(self._module_ids.get(path, -1), [])
        return _innermost(path, names, self.calls(node))

    def tensor(self, reader: fx.Node, node: fx.Node) -> str:
        """The name of a `get_attr` node's tensor for the node that reads it."""
        name = str(node.target)
        names = self._tensors.get(self._tensor_ids.get(name, -1), [])
        return _innermost(name, names, self.calls(reader))


def _innermost(name: str, names: list[str], calls: tuple[ModuleCall, ...]) -> str:
    if len(names) > 1:
        for call in reversed(calls):
            below = [other for other in (name, *names) if other.startswith(f"{call.path}.")]
            if below:
                return below[0]
    return name
