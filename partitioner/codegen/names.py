"""The names of values, modules, sizes and the device in one function: the `Names` of expressions.

The module also names the methods for recomputed parts, writes the lines that open blocks, and finds
the variable of a value that each mode computes in its own way:

    if self.training:
        hidden = hidden + noise
    else:
        hidden = (hidden + x) / 2

In the graph each branch computes a value of its own, and a node chooses between the two.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from ..capture import Capture, IfTraining, LocalDevice, Recompute, Region
from ..capture.mode_merge import is_of_training, unless
from ..capture.model_state import local_device
from . import layout
from .canonical import NumberPlace
from .init_method import Scope
from .items import Body, Conflict, Item, Loop, Op, ValueReads, own_name, regions_of
from .layout import Code, call, quoted
from .methods import decided, decided_around
from .statements import Folds, Opener, Variables, is_good, item_name


class FunctionNames:
    """The names of one function body.

    `write` adds a statement that names a module.

    used_arguments: the constructor arguments that the function uses
    imports: the imports that it needs
    regions: the regions around the current statement
    """

    def __init__(
        self,
        capture: Capture,
        body: Body,
        scope: Scope,
        argument_of: Mapping[NumberPlace, str],
        reads: ValueReads,
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
        self.regions = body.regions
        self.used_arguments: set[str] = set()
        self.imports: set[tuple[str, str]] = set()

    # --- the protocol expressions.Names -----------------------------------------------------

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
        local = local_device(self._capture.model)
        for name, nodes in self._variables.holds.items():
            if any(
                isinstance(val := node.meta.get("val"), Tensor)
                and val.device == local
                and self._is_made(node)
                for node in nodes
            ):
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

    def _is_made(self, node: fx.Node) -> bool:
        """Returns whether the current statement runs only where the value has been computed."""
        return decided_around(node) <= decided(self.regions)

    def module(self, path: str) -> str:
        return self._reach(path, is_opened=False)

    def siblings(self, path: str) -> str:
        """A list of modules whose items are accessed one by one."""
        return self._reach(path, is_opened=True)

    def _reach(self, path: str, *, is_opened: bool) -> str:
        for item, type_name in self._scope.opened_items(path, is_opened=is_opened):
            if item not in self._handles:
                self._name_module(item, type_name)
        return self._scope.access(path, self._handles)

    def literal(self, node: fx.Node, position: int, value: Any) -> Code | None:
        name = self._argument_of.get(NumberPlace(position, node))
        if name is None:
            return None
        self.used_arguments.add(name)
        return Code(f"self.{name}")

    def require(self, module: str, name: str) -> None:
        self.imports.add((module, name.partition(".")[0]))

    # --- new names --------------------------------------------------------------------------

    def call_attribute(self, node: fx.Node, code: Code) -> None:
        """Sets the expression of a value without a variable, such as `self.scale`."""
        self._attributes[node] = code

    def free(self, wanted: Sequence[str], after: int, others: Sequence[str]) -> str:
        """The first of some names that is not in `others` and holds no value that is read after the
        item at position `after`."""
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

    def is_only_held(self, name: str) -> bool:
        """Returns whether only the values of the variable can forbid the name."""
        return not (self._folds.is_name_used(name) or self._variables.is_reserved(name))

    def _name_module(self, path: str, type_name: str) -> None:
        """Writes a variable for an item of a list of which the function uses parts."""
        stem = item_name(path, self._scope.type_name(path))
        numbered = f"{stem}_{path.rpartition('.')[2]}"
        if is_good(numbered) and (stem in self._variables.modules or self.is_taken(stem, -1)):
            stem = numbered
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


TRAINING, EVALUATION = Region("training"), Region("evaluation")


def sides_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The two values of a choice, that of training first; empty for another node."""
    if node.target is unless:
        _, computed, former = node.args
        assert isinstance(computed, fx.Node) and isinstance(former, fx.Node)
        return computed, former
    sides: Any = node.args[0] if node.args else ()
    if node.target is operator.getitem and node.args[1] == IfTraining(0, 1):
        return sides if isinstance(sides, tuple) else ()
    return ()


def modes_of(node: fx.Node) -> tuple[Region, Region]:
    """The blocks in which the two sides of a choice are computed."""
    if node.target is unless:
        decision = node.all_input_nodes[0].meta["decision"]
        return Region("unless", decision=decision), Region("if", decision=decision)
    return TRAINING, EVALUATION


class Choices:
    """The choices in a body that need no expression: a branch computes a side only for them.

    choice_of: the choice for each such side
    name_of: the variables of the choices that have one already
    """

    def __init__(self, items: Sequence[Item], reads: ValueReads) -> None:
        self.choice_of: dict[fx.Node, fx.Node] = {}
        self.name_of: dict[fx.Node, str] = {}
        self._items, self._reads = items, reads
        self._choosing = {
            position for position, item in enumerate(items) if sides_of(item.nodes[-1])
        }
        regions_of_node = {
            node: regions_of(item)
            for item in items
            if not isinstance(item, Loop)
            for node in item.results
        }
        for position in sorted(self._choosing):
            choice = items[position].nodes[-1]
            if not isinstance(items[position], Op):
                continue
            for side, mode in zip(sides_of(choice), modes_of(choice), strict=True):
                others = [read for read in reads.of(side) if read != position]
                if mode in regions_of_node.get(side, ()) and all(
                    read < position and self._is_in(mode, read) for read in others
                ):
                    self.choice_of[side] = choice

    def name(
        self,
        side: fx.Node,
        wanted: Sequence[str],
        position: int,
        variables: Variables,
        names: FunctionNames,
    ) -> str:
        """The variable that holds the value of one mode and, after it, that of the current mode."""
        choice = self.choice_of[side]
        older = [variables.name_of.get(value, "") for value in sides_of(choice)]
        hint = [str(choice.meta["hint"])] if "hint" in choice.meta else []
        good = [name for name in (*hint, *older, *wanted) if is_good(name)]
        for name in good:
            values = variables.holds.get(name, ())
            if not names.is_taken(name, position):
                return name
            if names.is_only_held(name) and self._may_hold(values, side, position):
                return name
        return names.free(good, position, ())

    def _may_hold(self, values: Iterable[fx.Node], side: fx.Node, position: int) -> bool:
        """Returns whether a variable with these values may take that of a side: after that position
        only the other mode and the choice read them, the other mode only until it has its side."""
        choice = self.choice_of[side]
        sides, modes = sides_of(choice), modes_of(choice)
        place = 1 - sides.index(side)
        other, mode = sides[place], modes[place]
        maker = other if other in self.choice_of else choice
        end = next((p for p, item in enumerate(self._items) if maker in item.results), position)
        return all(
            self._is_in(mode, read) and (node is other or read <= end)
            for node in values
            for read in self._reads.of(node)
            if read > position and not (node is other and self._is_choice(choice, read))
        )

    def _is_choice(self, choice: fx.Node, position: int) -> bool:
        return position < len(self._items) and self._items[position].nodes[-1] is choice

    def _is_in(self, mode: Region, position: int) -> bool:
        return position < len(self._items) and mode in regions_of(self._items[position])


def open_block(region: Region, names: FunctionNames, decided: Mapping[int, fx.Node]) -> Opener:
    """The line that opens a region; `decided` has the value that controls each decision."""
    if region == TRAINING:
        return Opener(region, "if self.training:", EVALUATION)
    if region == EVALUATION:
        return Opener(region, "if not self.training:", TRAINING)
    if region.kind in ("unless", "if"):
        node = decided[region.decision]
        other = Region("if" if region.kind == "unless" else "unless", decision=region.decision)
        condition = names.value(node).within(layout.NOT)
        if is_of_training(node):
            condition = f"self.training and {condition}"
        if region.kind == "if":
            return Opener(region, f"if {condition}:", other)
        inside = f"({condition})" if is_of_training(node) else condition
        return Opener(region, f"if not {inside}:", other)
    return Opener(region, _with(region, names))


def is_branch(block: Opener) -> bool:
    """Returns whether the block runs only sometimes."""
    return isinstance(block.key, Region) and block.key.is_decided


def _with(region: Region, names: FunctionNames) -> str:
    if region.kind != "autocast":
        return f"with torch.{region.kind}():"
    is_local = isinstance(region.device_type, LocalDevice)
    items = [Code(f"{names.device()}.type" if is_local else quoted(str(region.device_type)))]
    if region.dtype is not None and region.enabled:
        items.append(Code(f"dtype={region.dtype}"))
    if not region.enabled:
        items.append(Code("enabled=False"))
    if not region.cache_enabled:
        items.append(Code("cache_enabled=False"))
    return f"with {call('torch.autocast', tuple(items))}:"


def helper_name(recompute: Recompute, used: Container[str], scope: Scope) -> str:
    """The name of the method for a recomputed part: that of the author's function, if possible."""
    stem = recompute.function
    if not is_good(stem) or stem in ("forward", "checkpoint"):
        stem = "recomputed"
    name, count = stem, 1
    while name in used or hasattr(nn.Module, name) or scope.has(name):
        count += 1
        name = f"{stem}_{count}"
    return name
