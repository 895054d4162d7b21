"""What one function calls its values, modules, sizes and device: the `Names` of its expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from ..capture import Capture
from .canonical import Place
from .folding import Folds
from .items import Body, Conflict, Op, own_name
from .layout import Code, call
from .members import Scope
from .reads import Reads
from .variables import Variables, is_good, item_name


class FunctionNames:
    """The names of one function body. `write` adds a statement that names a module; imports and
    constructor arguments that were asked for are in `imports` and `used_arguments`."""

    def __init__(
        self,
        capture: Capture,
        body: Body,
        scope: Scope,
        argument_of: Mapping[Place, str],
        reads: Reads,
        variables: Variables,
        folds: Folds,
        write: Callable[[str, Code], None],
    ) -> None:
        self._capture, self._body, self._scope = capture, body, scope
        self._argument_of = argument_of
        self._reads, self._variables, self._folds = reads, variables, folds
        self._write = write
        self._attributes: dict[fx.Node, Code] = {}
        self._handles: dict[str, str] = {}
        self.used_arguments: set[str] = set()
        self.imports: set[tuple[str, str]] = set()

    # --- what expressions.Names asks --------------------------------------------------------

    def value(self, node: fx.Node) -> Code:
        if node in self._folds:
            return self._folds.use(node)
        if node in self._attributes:
            return self._attributes[node]
        if node in self._variables.name_of:
            return Code(self._variables.name_of[node])
        assert node.op == "get_attr", f"{node} has no name in {self._body.path or 'the stage'}"
        name = own_name(node, self._body.path)
        assert name is not None, node
        return Code(self.module(name))

    def size(self, symbol: str) -> Code:
        return Code(symbol)

    def device(self) -> Code:
        for name, nodes in self._variables.holds.items():
            if any(isinstance(node.meta.get("val"), Tensor) for node in nodes):
                return Code(f"{name}.device")
        for node in self._reads:
            if node.op == "get_attr":
                return Code(f"{self.value(node)}.device")
        for item in self._body.items:
            if isinstance(item, Op) and item.node.op == "call_module":
                path = str(item.node.target)
                for name, _ in self._capture.model.get_submodule(path).named_parameters():
                    return Code(f"{self.module(path)}.{name}.device")
        raise Conflict([self._body.path])

    def module(self, path: str) -> str:
        return self._reach(path, is_opened=False)

    def siblings(self, path: str) -> str:
        """A list of modules whose items are reached one by one."""
        return self._reach(path, is_opened=True)

    def _reach(self, path: str, *, is_opened: bool) -> str:
        for item, type_name in self._scope.opened_items(path, is_opened=is_opened):
            if item not in self._handles:
                self._name_module(item, type_name)
        return self._scope.access(path, self._handles)

    def literal(self, node: fx.Node, position: int, value: Any) -> Code | None:
        name = self._argument_of.get(Place(position, node))
        if name is None:
            return None
        self.used_arguments.add(name)
        return Code(f"self.{name}")

    def require(self, module: str, name: str) -> None:
        self.imports.add((module, name.partition(".")[0]))

    # --- new names --------------------------------------------------------------------------

    def call_attribute(self, node: fx.Node, code: Code) -> None:
        """What a value that is no variable is called from now on, such as `self.scale`."""
        self._attributes[node] = code

    def free(self, wanted: Sequence[str], after: int, others: Sequence[str]) -> str:
        """The first of some names that holds nothing which is read after the item at position
        `after`, and is none of `others`."""
        good = [name for name in wanted if is_good(name)] or ["value"]
        for name in good:
            if not self.is_taken(name, after, others):
                return name
        count = 1
        while self.is_taken(f"{good[-1]}_{count}", after, others):
            count += 1
        return f"{good[-1]}_{count}"

    def is_taken(self, name: str, after: int, others: Sequence[str] = ()) -> bool:
        is_used = self._folds.is_name_used(name) or name in others
        return is_used or self._variables.is_taken(name, after)

    def _name_module(self, path: str, type_name: str) -> None:
        """Writes a variable for an item of a list of which parts are used here."""
        stem = item_name(path, self._scope.type_name(path))
        if stem in self._variables.modules or self.is_taken(stem, -1):
            stem = f"{stem}_{path.rpartition('.')[2]}"
        name = stem
        count = 1
        while name in self._variables.modules or self.is_taken(name, -1):
            count += 1
            name = f"{stem}_{count}"
        code = call("cast", (Code(type_name), Code(self._scope.access(path, self._handles))))
        self.imports.add(("typing", "cast"))
        self._write(name, code)
        self._handles[path] = name
        self._variables.modules.add(name)
