"""A function body -> the lines of a forward method in the style of a human author."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ..capture import Capture, Recompute, Region
from ..capture.graph import is_guard
from . import layout
from .canonical import NumberPlace
from .constants import find_sources, write_constant, write_sources
from .expressions import (
    write_arguments,
    write_guard,
    write_mutation,
    write_operation,
    write_refusal,
)
from .init_method import Scope
from .items import (
    Body,
    Item,
    Loop,
    Op,
    RecomputedSegment,
    SubmoduleCall,
    ValueReads,
    conditions_in,
    inputs_of,
    is_effectful,
    regions_of,
    symbols_of,
)
from .layout import Code, call, lay_out, prefixed
from .names import Choices, FunctionNames, helper_name, is_branch, modes_of, open_block, sides_of
from .statements import (
    Folded,
    Folds,
    Opener,
    Statement,
    Variables,
    can_fold,
    candidates,
    is_statement,
    item_name,
    origin_of,
    shape_of,
    type_of,
    write_lines,
)


@dataclass(frozen=True, slots=True)
class Forward:
    """A method as text: `signature` and `lines`, the names of `arguments` and `results`, the
    constructor arguments and imports that it needs, and the methods that it calls, `helpers`."""

    signature: str
    lines: tuple[str, ...]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    used_arguments: frozenset[str]
    imports: frozenset[tuple[str, str]]
    helpers: tuple[Forward, ...] = ()


def write_forward(
    capture: Capture,
    body: Body,
    scope: Scope,
    argument_of: Mapping[NumberPlace, str] | None = None,
    *,
    is_stage: bool = False,
    is_flat: bool = False,
    output_names: Mapping[fx.Node, str] | None = None,
) -> Forward:
    """The method that computes a body. The comments of a stage also give shapes and source lines.
    In flat code every operation is one statement and every value has the name of its node."""
    return _Writer(
        capture, body, scope, argument_of or {}, is_stage, is_flat, output_names or {}
    ).forward()


class _Writer:
    def __init__(
        self,
        capture: Capture,
        body: Body,
        scope: Scope,
        argument_of: Mapping[NumberPlace, str],
        is_stage: bool,
        is_flat: bool,
        output_names: Mapping[fx.Node, str],
        helpers: dict[str, Forward | None] | None = None,
    ) -> None:
        self._capture = capture
        self._body = body
        self._scope = scope
        self._argument_of = argument_of
        self._is_stage = is_stage
        self._is_flat = is_flat
        self._output_names = output_names
        self._helpers = {} if helpers is None else helpers
        self._helper_of: dict[Body, str] = {}
        self._statements: list[Statement] = []
        self._here = -1
        self._blocks: tuple[Opener, ...] = ()
        self._folds = Folds()
        self._reads = ValueReads(body)
        needed = [symbol for item in body.items for symbol in symbols_of(item)]
        self._sources = find_sources(needed, body.inputs, body.items).known
        symbols = {source.symbol for source in self._sources} | set(body.symbols)
        self._variables = Variables(self._reads.last, frozenset(symbols))
        self._names = FunctionNames(
            capture,
            body,
            scope,
            argument_of,
            self._reads,
            self._variables,
            self._folds,
            self._write_module,
        )
        self._choices = Choices(body.items, self._reads)
        self._decided = conditions_in(body.items)

    def forward(self, method: str = "forward") -> Forward:
        names: list[str] = []
        arguments: list[Code] = []
        for node, wanted in zip(self._body.inputs, self._body.input_names, strict=True):
            name = self._names.free([wanted, node.name], -1, names)
            names.append(name)
            self._variables.bind(node, name)
            arguments.append(Code(f"{name}: {type_of(node)}"))
        arguments += [Code(f"{symbol}: int") for symbol in self._body.symbols]
        self._read_sizes(self._body.inputs)
        for position, item in enumerate(self._body.items):
            self._here = position
            self._item(item)
        results = self._return()
        kinds = [type_of(node) for node in self._body.results]
        result = f"tuple[{', '.join(kinds)}]" if len(kinds) > 1 else (kinds or ["None"])[0]
        signature = call(f"def {method}", (Code("self"), *arguments))
        return Forward(
            signature=lay_out("", signature, f" -> {result}:", indent=4),
            lines=tuple(write_lines(self._statements, headings=self._is_stage)),
            arguments=tuple(names),
            results=results,
            used_arguments=frozenset(self._names.used_arguments),
            imports=frozenset(self._names.imports),
            helpers=tuple(filter(None, self._helpers.values())) if method == "forward" else (),
        )

    # --- items ------------------------------------------------------------------------------

    def _item(self, item: Item) -> None:
        self._enter_blocks(item)
        self._folds.unfold_effectful(but=inputs_of(item))
        if isinstance(item, Loop):
            self._loop(item)
        elif isinstance(item, Op) and is_guard(item.node):
            self._guard(item)
        elif isinstance(item, Op) and item.node in self._choices.name_of:
            self._choose(item)
        elif isinstance(item, Op) and is_statement(item.node):
            self._mutation(item)
        else:
            self._computation(item)
        self._read_sizes(item.results)

    def _enter_blocks(self, item: Item) -> None:
        self._names.regions = regions_of(item)
        regions = self._names.regions[len(self._body.regions) :]
        if tuple(block.key for block in self._blocks) == regions:
            return
        self._folds.unfold_all()
        self._blocks = tuple(map(self._opener, regions))

    def _opener(self, region: Region) -> Opener:
        return open_block(region, self._names, self._decided)

    def _mutation(self, op: Op) -> None:
        node = op.node
        receiver = node.args[0]
        assert isinstance(receiver, fx.Node)
        is_read = bool(self._reads.of(node))
        # A receiver needs no variable if nothing reads the result: y[0].add_(1).
        if receiver in self._folds and (is_read or node.op != "call_method"):
            self._folds.unfold(receiver)
        self._folds.unfold_all(but=node.all_input_nodes)
        prefix, code = self._mutating_expression(node)
        if self._too_long(prefix, code):
            self._folds.unfold_all()
            prefix, code = self._mutating_expression(node)
        self._folds.drop(self._folds.used)
        self._write(prefix, code, op)
        if receiver in self._variables.name_of:
            self._variables.alias(node, self._variables.name_of[receiver])
        elif is_read:
            self._names.call_attribute(node, self._names.value(receiver))

    def _mutating_expression(self, node: fx.Node) -> tuple[str, Code]:
        self._folds.begin_expression()
        return write_mutation(node, self._names) or ("", write_operation(node, self._names))

    def _guard(self, op: Op) -> None:
        node = op.node
        self._folds.unfold_all(but=node.all_input_nodes)
        condition = self._condition(node)
        if self._too_long("if :", condition):
            self._folds.unfold_all()
            condition = self._condition(node)
        self._folds.drop(self._folds.used)
        header = Opener((self._here,), f"if {condition}:")
        refusal = call("RuntimeError", (write_refusal(node, self._names),))
        self._write("raise ", refusal, op, (*self._blocks, header))

    def _condition(self, node: fx.Node) -> Code:
        self._folds.begin_expression()
        return write_guard(node, self._names)

    def _computation(self, item: Op | SubmoduleCall | RecomputedSegment) -> None:
        code = self._expression(item)
        while self._too_long("", code) and self._folds.used:
            self._folds.unfold_longest()
            code = self._expression(item)
        used = tuple(self._folds.used)
        names = self._folds.names_in(used)
        names |= {self._variables.name_of.get(node, "") for node in inputs_of(item)} - {""}
        effectful = is_effectful(item)
        if effectful:
            self._folds.unfold_all(but=used)
        self._folds.drop(used)
        position, blocks = self._here, self._blocks
        if self._is_flat or not can_fold(item, code, position, self._reads, self._is_live):
            self._assign(item, code, position, blocks)
            return

        def statement() -> None:
            self._assign(item, code, position, blocks)

        (result,) = item.results
        self._folds.fold(result, Folded(code, names, effectful, statement))

    def _is_live(self, name: str) -> bool:
        return self._names.is_taken(name, self._here)

    def _expression(self, item: Op | SubmoduleCall | RecomputedSegment) -> Code:
        self._folds.begin_expression()
        if isinstance(item, Op):
            if item.recompute is None:
                return write_operation(item.node, self._names)
            module = self._names.module(str(item.node.target))
            return self._called(module, write_arguments(item.node, self._names), item.recompute)
        arguments = [self._names.value(node) for node in item.body.inputs]
        arguments += [self._names.size(symbol) for symbol in item.body.symbols]
        if isinstance(item, RecomputedSegment):
            return self._called(f"self.{self._helper(item)}", arguments, item.recompute)
        return self._called(self._names.module(item.call.path), arguments, item.recompute)

    def _called(
        self, function: str, arguments: Sequence[Code], recompute: Recompute | None
    ) -> Code:
        if recompute is None:
            return call(function, tuple(arguments))
        self._names.require("torch.utils.checkpoint", "checkpoint")
        options = [prefixed(f"{name}=", write_constant(value)) for name, value in recompute.options]
        return call("checkpoint", (Code(function), *arguments, *options))

    def _helper(self, segment: RecomputedSegment) -> str:
        """The method for a recomputed segment, called as the author's function is."""
        body = segment.body
        if body not in self._helper_of:
            name = helper_name(segment.recompute, self._helpers, self._scope)
            self._helpers[name] = None
            writer = _Writer(
                self._capture, body, self._scope, self._argument_of, self._is_stage, self._is_flat,
                {}, self._helpers,
            )  # fmt: skip
            method = self._helpers[name] = writer.forward(name)
            self._names.imports |= method.imports
            self._names.used_arguments |= method.used_arguments
            self._helper_of[body] = name
        return self._helper_of[body]

    def _assign(
        self,
        item: Op | SubmoduleCall | RecomputedSegment,
        code: Code,
        position: int,
        blocks: tuple[Opener, ...],
    ) -> None:
        """Writes the statement that computes an item and names its results."""
        results: Sequence[fx.Node | None] = item.results
        if isinstance(item, Op) and item.items:
            results = item.items
        if not any(node is not None and self._reads.of(node) for node in results):
            self._write("", code, item, blocks)
            return
        # A value that was folded until now gets its name late: values read in between are dead.
        after = max(position, self._here - 1)
        names: list[str] = []
        for node in results:
            if node is None or not self._reads.of(node):
                names.append("_")
            elif node in self._choices.choice_of:
                names.append(self._name_of_choice(node, position))
            else:
                names.append(self._names.free(self._candidates(node, item), after, names))
        self._write(f"{', '.join(names)} = ", code, item, blocks)
        for node, name in zip(results, names, strict=True):
            if node is not None and node in self._choices.choice_of:
                self._variables.alias(node, name)
            elif node is not None and name != "_":
                self._variables.bind(node, name)

    def _name_of_choice(self, node: fx.Node, position: int) -> str:
        choice = self._choices.choice_of[node]
        if choice not in self._choices.name_of:
            wanted = self._candidates(choice, Op(choice))
            name = self._choices.name(node, wanted, position, self._variables, self._names)
            self._choices.name_of[choice] = name
        self._folds.unfold_readers(self._choices.name_of[choice])
        return self._choices.name_of[choice]

    def _choose(self, op: Op) -> None:
        """Ends a branch: its variable gets the value of a mode that did not make one of its own."""
        self._folds.unfold_all()
        name = self._choices.name_of[op.node]
        for node, mode in zip(sides_of(op.node), modes_of(op.node), strict=True):
            value = self._names.value(node)
            if value.flat != name:
                blocks = (*self._blocks, self._opener(mode))
                self._write(f"{name} = ", value, op, blocks)
        # In the mode of a side the variable still holds that side; later statements may read it.
        sides = [node for node in sides_of(op.node) if self._variables.name_of.get(node) == name]
        self._variables.bind(op.node, name)
        for node in sides:
            self._variables.alias(node, name)

    def _loop(self, loop: Loop) -> None:
        self._folds.unfold_all()
        first, body = loop.calls[0], loop.calls[0].body
        names = ["_"] * len(body.results)
        argument_names: dict[int, str] = {}
        for argument, result in loop.carried:
            initial, final = body.inputs[argument], loop.results[result]
            name = self._variables.name_of.get(initial)
            if name is None or self._variables.is_live(name, self._here) or name in names:
                name = self._names.free(self._candidates(final, first), self._here, names)
                self._write(f"{name} = ", self._names.value(initial), loop)
            argument_names[argument] = names[result] = name
        for place, node in enumerate(loop.results):
            if names[place] == "_" and self._reads.of(node):
                names[place] = self._names.free(self._candidates(node, first), self._here, names)
        arguments = [
            Code(argument_names[place]) if place in argument_names else self._names.value(node)
            for place, node in enumerate(body.inputs)
        ]
        arguments += [self._names.size(symbol) for symbol in body.symbols]
        paths = [item.call.path for item in loop.calls]
        siblings = self._names.siblings(paths[0].rpartition(".")[0])
        iterable, element = self._scope.iterate(paths, siblings)
        stem = item_name(paths[0], body.type_name)
        variable = "index" if element else self._names.free([stem], self._here, names)
        header = Opener((self._here,), f"for {variable} in {iterable}:")
        code = self._called(element or variable, arguments, first.recompute)
        self._write(f"{', '.join(names)} = ", code, loop, (*self._blocks, header))
        for node, name in zip(loop.results, names, strict=True):
            if name != "_":
                self._variables.bind(node, name)

    def _return(self) -> tuple[str, ...]:
        self._here = len(self._body.items)
        results = self._body.results
        self._folds.unfold_all()
        codes = [self._names.value(node) for node in results]
        names = tuple(code.flat for code in codes)
        if not results:  # Run for its random draws, or for what it changes.
            return names
        last = self._statements[-1] if self._statements else None
        is_one = len(results) == 1 and not self._is_flat
        if is_one and last is not None and last.prefix == f"{names[0]} = ":
            if not any(block.text.startswith(("for ", "if ")) for block in last.blocks):
                # A value that was just named is returned immediately.
                self._statements[-1] = replace(last, prefix="return ")
                return names
        self._blocks = ()
        code = codes[0] if len(codes) == 1 else Code(", ".join(names))
        self._statements.append(Statement("return ", code))
        return names

    def _candidates(self, node: fx.Node, item: Item) -> list[str]:
        if self._is_flat:
            return [node.name]
        output = self._output_names.get(node, "")
        names = candidates(node, item, self._reads.reader(node), output)
        return [name for name in names if self._variables.fits(name, node)]

    # --- text -------------------------------------------------------------------------------

    def _read_sizes(self, nodes: Sequence[fx.Node]) -> None:
        """Writes the sizes that are read off these values."""
        read_off = dict.fromkeys(source.node for source in self._sources if source.node in nodes)
        for node in read_off:
            if node in self._folds:
                self._folds.unfold(node)
            sources = [source for source in self._sources if source.node is node]
            for name, code in write_sources(sources, node, self._names.value(node)):
                self._write_plain(name, code)

    def _too_long(self, prefix: str, code: Code) -> bool:
        """Returns whether a statement with a name of medium length would not fit on a line."""
        room = layout.WIDTH - 8 - 4 * len(self._blocks) - (len(prefix) or 16)
        return len(code.flat) > room

    def _write(
        self,
        prefix: str,
        code: Code,
        item: Item,
        blocks: tuple[Opener, ...] | None = None,
    ) -> None:
        where = self._blocks if blocks is None else blocks
        comment, origin = "", None
        if self._is_stage:
            comment, origin = shape_of(item, self._capture), origin_of(item)
        self._statements.append(Statement(prefix, code, comment, where, origin))

    def _write_plain(self, name: str, code: Code) -> None:
        """Writes a statement that belongs to no item: a size."""
        self._statements.append(Statement(f"{name} = ", code, "", self._blocks))

    def _write_module(self, name: str, code: Code) -> None:
        """Names a module, before the branch that uses it, because later code may use it too."""
        if not any(map(is_branch, self._blocks)):
            self._write_plain(name, code)
            return
        place = len(self._statements)
        while place and any(map(is_branch, self._statements[place - 1].blocks)):
            place -= 1
        self._statements.insert(place, Statement(f"{name} = ", code))
