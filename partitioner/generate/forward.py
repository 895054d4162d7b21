"""A function body -> the lines of a forward that a person would have written.

A value that the user never named and that only what follows reads stands inside the expression
that reads it. Order is program order: what mutates or draws random numbers is never moved, nor
anything over it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..capture import Capture, LocalDevice, Region
from ..capture.guards import is_guard, other_way
from ..effects import AUGMENTED, is_mutating
from . import layout
from .canonical import Place
from .choices import EVALUATION, TRAINING, Choices, modes_of, sides_of
from .expressions import write_guard, write_mutation, write_operation
from .items import (
    Body,
    Call,
    Conflict,
    Item,
    Loop,
    Op,
    inputs_of,
    is_effectful,
    own_name,
    regions_of,
    symbols_of,
)
from .layout import Code, call, lay_out
from .members import Scope
from .size_expressions import write_size
from .sizes import LENGTH, Source, find_sources
from .statements import Opener, Origin, Statement, write_lines
from .variables import Variables, candidates, is_good, item_name


@dataclass(frozen=True, slots=True)
class Folded:
    """The expression of a value that has no variable, to stand where the value is read;
    `statement` writes it as one after all."""

    code: Code
    names: frozenset[str]
    is_effectful: bool
    statement: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Forward:
    """The text of a method, and the names of its arguments and results."""

    signature: str
    lines: tuple[str, ...]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    used_arguments: frozenset[str]
    imports: frozenset[tuple[str, str]]


def write_forward(
    capture: Capture,
    body: Body,
    scope: Scope,
    argument_of: Mapping[Place, str] | None = None,
    *,
    is_stage: bool = False,
    output_names: Mapping[fx.Node, str] | None = None,
) -> Forward:
    """The method that computes a body. A stage's lines also tell shapes and sources."""
    return _Writer(capture, body, scope, argument_of or {}, is_stage, output_names or {}).forward()


class _Writer:
    def __init__(
        self,
        capture: Capture,
        body: Body,
        scope: Scope,
        argument_of: Mapping[Place, str],
        is_stage: bool,
        output_names: Mapping[fx.Node, str],
    ) -> None:
        self._capture = capture
        self._body = body
        self._scope = scope
        self._argument_of = argument_of
        self._is_stage = is_stage
        self._output_names = output_names
        self._statements: list[Statement] = []
        self._folded: dict[fx.Node, Folded] = {}
        self._consumed: list[fx.Node] = []
        self._attributes: dict[fx.Node, Code] = {}
        self._handles: dict[str, str] = {}
        self._used_arguments: set[str] = set()
        self._imports: set[tuple[str, str]] = set()
        self._here = -1
        self._blocks: tuple[Opener, ...] = ()

        self._reads: dict[fx.Node, list[int]] = defaultdict(list)
        for position, item in enumerate(body.items):
            for node in inputs_of(item):
                self._reads[node].append(position)
        for node in body.results:
            self._reads[node].append(len(body.items))
        needed = [symbol for item in body.items for symbol in symbols_of(item)]
        self._sources = find_sources(needed, body.inputs, body.items)
        symbols = {source.symbol for source in self._sources.found} | set(body.symbols)
        last_read = {node: positions[-1] for node, positions in self._reads.items()}
        self._variables = Variables(last_read, frozenset(symbols))
        self._choices = Choices(body.items, self._reads)
        self._decided = {
            item.node.meta["decision"]: item.node
            for item in body.items
            if isinstance(item, Op) and "decision" in item.node.meta
        }

    def forward(self) -> Forward:
        names: list[str] = []
        arguments: list[Code] = []
        for node, wanted in zip(self._body.inputs, self._body.input_names, strict=True):
            name = self._free_name([wanted, node.name], -1, names)
            names.append(name)
            self._variables.bind(node, name)
            arguments.append(Code(f"{name}: {_type_of(node)}"))
        arguments += [Code(f"{symbol}: int") for symbol in self._body.symbols]
        self._read_sizes(self._body.inputs)
        for position, item in enumerate(self._body.items):
            self._here = position
            self._item(item)
        results = self._return()
        kinds = [_type_of(node) for node in self._body.results]
        result = kinds[0] if len(kinds) == 1 else f"tuple[{', '.join(kinds)}]"
        result = result if kinds else "None"
        signature = call("def forward", (Code("self"), *arguments))
        return Forward(
            signature=lay_out("", signature, f" -> {result}:", indent=4),
            lines=tuple(write_lines(self._statements, headings=self._is_stage)),
            arguments=tuple(names),
            results=results,
            used_arguments=frozenset(self._used_arguments),
            imports=frozenset(self._imports),
        )

    # --- what expressions.Names asks --------------------------------------------------------

    def value(self, node: fx.Node) -> Code:
        if node in self._folded:
            self._consumed.append(node)
            return self._folded[node].code
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
        for ancestor, part in self._scope.cut_items(path):
            if ancestor not in self._handles:
                self._name_module(ancestor, part)
        return self._scope.access(path, self._handles)

    def literal(self, node: fx.Node, position: int, value: Any) -> Code | None:
        name = self._argument_of.get(Place(position, node))
        if name is None:
            return None
        self._used_arguments.add(name)
        return Code(f"self.{name}")

    def require(self, module: str, name: str) -> None:
        self._imports.add((module, name.partition(".")[0]))

    # --- items ------------------------------------------------------------------------------

    def _item(self, item: Item) -> None:
        self._enter_blocks(item)
        inputs = set(inputs_of(item))
        for node in [node for node, folded in self._folded.items() if folded.is_effectful]:
            if node not in inputs:
                self._unfold(node)
        if isinstance(item, Loop):
            self._loop(item)
        elif isinstance(item, Op) and is_guard(item.node):
            self._guard(item)
        elif isinstance(item, Op) and item.node in self._choices.name_of:
            self._choose(item)
        elif isinstance(item, Op) and _is_statement(item.node):
            self._mutation(item)
        else:
            self._computation(item)
        self._read_sizes(item.results)

    def _enter_blocks(self, item: Item) -> None:
        regions = regions_of(item)[len(self._body.regions) :]
        if tuple(block.key for block in self._blocks) == regions:
            return
        self._unfold_all()
        self._blocks = tuple(map(self._opener, regions))

    def _opener(self, region: Region) -> Opener:
        if region == TRAINING:
            return Opener(region, "if self.training:", EVALUATION)
        if region == EVALUATION:
            return Opener(region, "if not self.training:", TRAINING)
        if region.kind in ("unless", "if"):
            decided = f"self.training and {self.value(self._decided[region.decision])}"
            if region.kind == "unless":
                return Opener(region, f"if not ({decided}):")
            return Opener(region, f"if {decided}:", Region("unless", decision=region.decision))
        return Opener(region, self._with(region))

    def _with(self, region: Region) -> str:
        if region.kind != "autocast":
            return f"with torch.{region.kind}():"
        device = region.device_type
        kind = f"{self.device()}.type" if isinstance(device, LocalDevice) else f'"{device}"'
        items = [Code(kind)]
        if region.dtype is not None and region.enabled:
            items.append(Code(f"dtype={region.dtype}"))
        if not region.enabled:
            items.append(Code("enabled=False"))
        if not region.cache_enabled:
            items.append(Code("cache_enabled=False"))
        return f"with {call('torch.autocast', tuple(items))}:"

    def _mutation(self, op: Op) -> None:
        node = op.node
        receiver = node.args[0]
        assert isinstance(receiver, fx.Node)
        # A receiver without a variable may stay so if the result is not read: y[0].add_(1).
        if receiver in self._folded and (self._reads[node] or node.op != "call_method"):
            self._unfold(receiver)
        self._unfold_all(but=set(node.all_input_nodes))
        prefix, code = self._mutating_expression(node)
        if self._too_long(prefix, code):
            self._unfold_all()
            prefix, code = self._mutating_expression(node)
        for used in self._consumed:
            self._folded.pop(used, None)
        self._write(prefix, code, op)
        if receiver in self._variables.name_of:
            self._variables.alias(node, self._variables.name_of[receiver])
        elif self._reads[node]:
            self._attributes[node] = self.value(receiver)

    def _mutating_expression(self, node: fx.Node) -> tuple[str, Code]:
        self._consumed = []
        return write_mutation(node, self) or ("", write_operation(node, self))

    def _guard(self, op: Op) -> None:
        self._unfold_all(but=set(op.node.all_input_nodes))
        self._consumed = []
        condition = write_guard(op.node, self)
        if self._too_long("if :", condition):
            self._unfold_all()
            condition = write_guard(op.node, self)
        for used in self._consumed:
            self._folded.pop(used, None)
        header = Opener((self._here,), f"if {condition}:")
        message = Code(f'"{other_way(str(op.node.args[1]))}"')
        self._write("raise ", call("RuntimeError", (message,)), op, (*self._blocks, header))

    def _computation(self, item: Op | Call) -> None:
        code = self._expression(item)
        while self._too_long("", code) and self._consumed:
            self._unfold_longest(self._consumed)
            code = self._expression(item)
        consumed = tuple(self._consumed)
        names = frozenset().union(*(self._folded[node].names for node in consumed))
        names |= {self._variables.name_of.get(node, "") for node in inputs_of(item)} - {""}
        effectful = is_effectful(item)
        if effectful:
            self._unfold_all(but=set(consumed))
        for node in consumed:
            del self._folded[node]
        if not self._can_fold(item, code):
            self._assign(item, code, self._here, self._blocks)
            return
        position, blocks = self._here, self._blocks

        def statement() -> None:
            self._assign(item, code, position, blocks)

        (result,) = item.results
        self._folded[result] = Folded(code, names, effectful, statement)

    def _expression(self, item: Op | Call) -> Code:
        self._consumed = []
        if isinstance(item, Op):
            return write_operation(item.node, self)
        arguments = [self.value(node) for node in item.body.inputs]
        arguments += [self.size(symbol) for symbol in item.body.symbols]
        return call(self.module(item.call.path), tuple(arguments))

    def _assign(
        self, item: Op | Call, code: Code, position: int, blocks: tuple[Opener, ...]
    ) -> None:
        """Writes the statement that computes an item and names its results."""
        results: Sequence[fx.Node | None] = item.results
        if isinstance(item, Op) and item.items:
            results = item.items
        if not any(node is not None and self._reads[node] for node in results):
            self._write("", code, item, blocks)
            return
        names: list[str] = []
        for node in results:
            if node is None or not self._reads[node]:
                names.append("_")
            elif node in self._choices.choice_of:
                names.append(self._name_of_choice(node, position))
            else:
                names.append(self._free_name(self._candidates(node, item), position, names))
        self._write(f"{', '.join(names)} = ", code, item, blocks)
        for node, name in zip(results, names, strict=True):
            if node is not None and node in self._choices.choice_of:
                self._variables.alias(node, name)
            elif node is not None and name != "_":
                self._variables.bind(node, name)

    def _name_of_choice(self, node: fx.Node, position: int) -> str:
        """The variable that holds a value of one mode and, after, that of whichever mode it is."""
        choice = self._choices.choice_of[node]
        if choice not in self._choices.name_of:
            older = [self._variables.name_of.get(side, "") for side in sides_of(choice)]
            hint = [str(choice.meta["hint"])] if "hint" in choice.meta else []
            names = [*hint, *older, *self._candidates(choice, Op(choice))]
            wanted = [name for name in names if is_good(name)]
            free = [
                name
                for name in wanted
                if not self._is_taken(name, position, ())
                or self._choices.may_hold(self._variables.holds.get(name, ()), node, position)
            ]
            name = free[0] if free else self._free_name(wanted, position, ())
            self._choices.name_of[choice] = name
        return self._choices.name_of[choice]

    def _choose(self, op: Op) -> None:
        """Ends a branch: its variable gets the value of a mode that did not make one of its own."""
        self._unfold_all()
        name = self._choices.name_of[op.node]
        for node, mode in zip(sides_of(op.node), modes_of(op.node), strict=True):
            value = self.value(node)
            if value.flat != name:
                blocks = (*self._blocks, self._opener(mode))
                self._write(f"{name} = ", value, op, blocks)
        self._variables.bind(op.node, name)

    def _loop(self, loop: Loop) -> None:
        self._unfold_all()
        first, body = loop.calls[0], loop.calls[0].body
        names = ["_"] * len(body.results)
        argument_names: dict[int, str] = {}
        for argument, result in loop.carried:
            initial, final = body.inputs[argument], loop.results[result]
            name = self._variables.name_of.get(initial)
            if name is None or self._variables.is_live(name, self._here) or name in names:
                name = self._free_name(self._candidates(final, first), self._here, names)
                self._write(f"{name} = ", self.value(initial), loop)
            argument_names[argument] = names[result] = name
        for place, node in enumerate(loop.results):
            if names[place] == "_" and self._reads[node]:
                names[place] = self._free_name(self._candidates(node, first), self._here, names)
        arguments = [
            Code(argument_names[place]) if place in argument_names else self.value(node)
            for place, node in enumerate(body.inputs)
        ]
        arguments += [self.size(symbol) for symbol in body.symbols]
        paths = [item.call.path for item in loop.calls]
        iterable, each = self._scope.iterate(paths, self.module(paths[0].rpartition(".")[0]))
        stem = item_name(paths[0], body.type_name)
        variable = "index" if each else self._free_name([stem], self._here, names)
        header = Opener((self._here,), f"for {variable} in {iterable}:")
        code = call(each or variable, tuple(arguments))
        self._write(f"{', '.join(names)} = ", code, loop, (*self._blocks, header))
        for node, name in zip(loop.results, names, strict=True):
            if name != "_":
                self._variables.bind(node, name)

    def _return(self) -> tuple[str, ...]:
        self._here = len(self._body.items)
        results = self._body.results
        self._unfold_all()
        if not results:
            return ()
        codes = [self.value(node) for node in results]
        names = tuple(code.flat for code in codes)
        last = self._statements[-1] if self._statements else None
        if len(results) == 1 and last is not None and last.prefix == f"{names[0]} = ":
            if not any(block.text.startswith(("for ", "if ")) for block in last.blocks):
                # What was just named is returned at once.
                self._statements[-1] = replace(last, prefix="return ")
                return names
        self._blocks = ()
        code = codes[0] if len(codes) == 1 else Code(", ".join(names))
        self._statements.append(Statement("return ", code))
        return names

    # --- folding ----------------------------------------------------------------------------

    def _can_fold(self, item: Op | Call, code: Code) -> bool:
        """Whether the one reader of an item's one result may hold its expression."""
        if len(item.results) != 1 or (isinstance(item, Op) and item.items):
            return False
        (result,) = item.results
        reader = self._reader(result)
        if reader is None or isinstance(reader, Loop) or len(code.flat) > layout.WIDTH - 24:
            return False
        if regions_of(reader) != regions_of(item):
            return False
        hint = result.meta.get("hint")
        is_next = self._reads[result] == [self._here + 1]
        if hint is None or not is_good(hint):
            return is_next or _line_of(result) == _line_of(reader.nodes[-1])
        return is_next and self._is_taken(hint, self._here, ())

    def _reader(self, node: fx.Node) -> Item | None:
        """The item that alone, and once, reads a value."""
        reads = self._reads[node]
        return self._body.items[reads[0]] if len(reads) == 1 and self._is_item(reads[0]) else None

    def _is_item(self, position: int) -> bool:
        return position < len(self._body.items)

    def _unfold(self, node: fx.Node) -> None:
        self._folded.pop(node).statement()

    def _unfold_all(self, but: set[fx.Node] | frozenset[fx.Node] = frozenset()) -> None:
        for node in [node for node in self._folded if node not in but]:
            self._unfold(node)

    def _unfold_longest(self, nodes: Sequence[fx.Node]) -> None:
        """Gives a variable to the longest of some expressions; to all if their order matters."""
        if any(self._folded[node].is_effectful for node in nodes):
            self._unfold_all()
        else:
            self._unfold(max(nodes, key=lambda node: len(self._folded[node].code.flat)))

    def _too_long(self, prefix: str, code: Code) -> bool:
        """Whether a statement would not fit on a line, with a name of middling length."""
        room = layout.WIDTH - 8 - 4 * len(self._blocks) - (len(prefix) or 16)
        return len(code.flat) > room

    # --- names ------------------------------------------------------------------------------

    def _candidates(self, node: fx.Node, item: Item) -> list[str]:
        names = candidates(node, item, self._reader(node), self._output_names.get(node, ""))
        return [name for name in names if self._variables.fits(name, node)]

    def _free_name(self, wanted: Sequence[str], position: int, others: Sequence[str]) -> str:
        # A value that was folded until now is named late: what has been read since is dead.
        after = max(position, self._here - 1)
        good = [name for name in wanted if is_good(name)] or ["value"]
        for name in good:
            if not self._is_taken(name, after, others):
                return name
        count = 1
        while self._is_taken(f"{good[-1]}_{count}", after, others):
            count += 1
        return f"{good[-1]}_{count}"

    def _is_taken(self, name: str, after: int, others: Sequence[str]) -> bool:
        folded = any(name in folded.names for folded in self._folded.values())
        return folded or name in others or self._variables.is_taken(name, after)

    def _name_module(self, path: str, part: str) -> None:
        """Writes a variable for a module that a boundary cuts."""
        stem = item_name(path, self._scope.type_name(path))
        if stem in self._variables.modules or self._is_taken(stem, -1, ()):
            stem = f"{stem}_{path.rpartition('.')[2]}"
        name = stem
        count = 1
        while name in self._variables.modules or self._is_taken(name, -1, ()):
            count += 1
            name = f"{stem}_{count}"
        code = call("cast", (Code(part), Code(self._scope.access(path, self._handles))))
        self._imports.add(("typing", "cast"))
        self._statements.append(Statement(f"{name} = ", code, "", self._blocks))
        self._handles[path] = name
        self._variables.modules.add(name)

    # --- sizes ------------------------------------------------------------------------------

    def _read_sizes(self, nodes: Sequence[fx.Node]) -> None:
        """Writes the sizes that are read off these values."""
        by_node: dict[fx.Node, list[Source]] = defaultdict(list)
        for source in self._sources.found:
            if source.node in nodes:
                by_node[source.node].append(source)
        for node, sources in by_node.items():
            if node in self._folded:
                self._unfold(node)
            tensor = self.value(node)
            plain = {s.dimension: s.symbol for s in sources if s.expression is None}
            if len(plain) > 1:
                shape = node.meta["shape"]
                names = [plain.get(dimension, "_") for dimension in range(len(shape))]
                self._write_size(", ".join(names), Code(f"{tensor}.shape"))
            elif plain:
                ((dimension, symbol),) = plain.items()
                self._write_size(symbol, Code(f"{tensor}.size({dimension})"))
            for source in sources:
                if source.expression is not None:
                    length = Code(f"{tensor}.size({source.dimension})")

                    def name_size(symbol: str, length: Code = length) -> Code:
                        return length if symbol == LENGTH.name else Code(symbol)

                    self._write_size(source.symbol, write_size(source.expression, name_size))

    def _write_size(self, name: str, code: Code) -> None:
        self._statements.append(Statement(f"{name} = ", code, "", self._blocks))

    # --- text -------------------------------------------------------------------------------

    def _write(
        self,
        prefix: str,
        code: Code,
        item: Item,
        blocks: tuple[Opener, ...] | None = None,
    ) -> None:
        where = self._blocks if blocks is None else blocks
        comment, origin = ("", None) if not self._is_stage else (self._shape(item), _origin(item))
        self._statements.append(Statement(prefix, code, comment, where, origin))

    def _shape(self, item: Item) -> str:
        results = [node for node in item.results if isinstance(node.meta.get("val"), Tensor)]
        shapes = dict.fromkeys(str(self._capture.tensor_spec(node)) for node in results)
        return next(iter(shapes)) if len(shapes) == 1 else ""


def _is_statement(node: fx.Node) -> bool:
    """Whether a node is written as a statement on its first argument."""
    if node.op == "call_method":
        return is_mutating(node) and str(node.target).endswith("_")
    return node.op == "call_function" and (
        node.target in AUGMENTED or node.target in (operator.setitem, setattr)
    )


def _origin(item: Item) -> Origin:
    calls = item.nodes[0].meta.get("calls", ())
    match item:
        case Op(node):
            file, line = _line_of(node) or ("", 0)
            return Origin(calls[-1].path if calls else "", file, line)
        case Call(call):
            around = calls[: calls.index(call)]
        case Loop(run):
            around = calls[: calls.index(run[0].call)]
    return Origin(around[-1].path if around else "")


def _line_of(node: fx.Node) -> tuple[str, int] | None:
    return node.meta.get("source")


def _type_of(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, list):
        return "list[Tensor]"
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return "int" if isinstance(value, torch.SymInt) else "float"
    return "tuple[Tensor, ...]" if isinstance(value, tuple) else "Tensor"
