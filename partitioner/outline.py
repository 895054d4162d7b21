"""Capture -> the graph by module: a tree for people, and a list for programs.

The tree has the modules of the original, and under each the operations of its own forward with
shapes and the author's line. Equal blocks in a row are one line. `--cut-at` takes the names on the
left, `--keep-together` and `--leaf` take the paths and classes.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Unpack

from torch import Tensor, fx, nn

from .capture import Capture, ModuleCall
from .capture_and_profile import capture_source, load
from .models.load import ModelSource, given_source
from .output import OnPhase, PhaseTimer, describe_capture
from .planning.keywords import OutlineKeywords
from .planning.options import PartitionOptions
from .planning.signatures import options_for, shows_options
from .profile.operation_costs import NodeCost, OnProgress
from .profiling import profile_capture
from .stage_parts import operation_name, source_of


@dataclass(frozen=True, slots=True)
class OutlineOperation:
    """One node of the graph.

    name: its name
    does: a short description of the operation
    value: the dtype and shape of its result
    source: the file and line of the original
    module: the module that calls it
    ms: forward and backward of one micro-batch, if they are known
    """

    name: str
    does: str
    value: str
    source: str
    module: str
    ms: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class OutlineModule:
    """One call of a module that is not a leaf, and the operations and calls in it.

    path, type_name: the path and the class of the module
    call: the number of the call, if forward calls the module several times
    items: its operations and calls, in the order of the program
    """

    path: str
    type_name: str
    call: int
    items: tuple[OutlineOperation | OutlineModule, ...]

    @property
    def operations(self) -> Iterator[OutlineOperation]:
        """All operations in it, also those of inner calls."""
        for item in self.items:
            if isinstance(item, OutlineModule):
                yield from item.operations
            else:
                yield item


_INDENT = "  "


def write_tree(root: OutlineModule, name: str, inputs: Sequence[str]) -> list[str]:
    """The lines of a tree, under the model's name and inputs."""
    rows = list(_rows(root, 0))
    cells = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    number = sum(1 for _ in root.operations)
    first = f"{name} ({root.type_name}) · {number} operations{_time(root)}"
    lines = [first, *(f"{_INDENT}{given}" for given in inputs)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=False) if width)
        lines.append("  ".join(padded).rstrip())
    return lines


def _rows(part: OutlineModule, depth: int) -> Iterator[tuple[str, ...]]:
    """One row of five cells for an operation, one row of one cell for the heading of a module."""
    margin = _INDENT * depth
    for first, others in _folded(part.items):
        if isinstance(first, OutlineOperation):
            ms = " + ".join(f"{ms:.3f}" for ms in first.ms or ())
            yield f"{margin}{first.name}", first.does, first.value, ms and f"{ms} ms", first.source
            continue
        number = sum(1 for _ in first.operations)
        heading = f"{margin}{_called(first)} ({first.type_name}) · {number} operations"
        yield (heading + _time(first),)
        yield from _rows(first, depth + 1)
        if others:
            last = others[-1]
            until = f" .. {_called(last)}" if len(others) > 1 else ""
            yield (
                f"{margin}{_called(others[0])}{until} as {_called(first)} · "
                f"{len(others) * number} operations{_time(*others)}",
            )


def _called(part: OutlineModule) -> str:
    return f"{part.path}, call {part.call + 1}" if part.call else part.path


def _time(*parts: OutlineModule) -> str:
    costs = [operation.ms for part in parts for operation in part.operations if operation.ms]
    if not costs:
        return ""
    return f" · {sum(ms for ms, _ in costs):.2f} + {sum(ms for _, ms in costs):.2f} ms"


def _folded(
    items: Sequence[OutlineOperation | OutlineModule],
) -> Iterator[tuple[OutlineOperation | OutlineModule, list[OutlineModule]]]:
    """Groups each module with the equal modules that follow it: the next of a list, or the next
    call of the same module."""
    waiting: tuple[OutlineModule, list[OutlineModule]] | None = None
    for item in items:
        if waiting and isinstance(item, OutlineModule) and _is_like(waiting[0], item):
            waiting[1].append(item)
            continue
        if waiting:
            yield waiting
        waiting = (item, []) if isinstance(item, OutlineModule) else None
        if isinstance(item, OutlineOperation):
            yield item, []
    if waiting:
        yield waiting


def _is_like(first: OutlineModule, other: OutlineModule) -> bool:
    siblings = first.path.rpartition(".")[0] == other.path.rpartition(".")[0]
    numbered = other.path.rpartition(".")[2].isdigit()
    return (siblings and numbered or first.path == other.path) and _shape(first) == _shape(other)


def _shape(part: OutlineModule) -> Hashable:
    return part.type_name, tuple(
        (item.does, item.value, item.source) if isinstance(item, OutlineOperation) else _shape(item)
        for item in part.items
    )


@dataclass(frozen=True, slots=True)
class Outline:
    """A captured graph by module; `str` is the tree.

    name: the name of the model
    root: the call of the model itself
    inputs: the model's inputs, each with its dtype and shape
    sizes: the sizes of the example inputs by symbol
    notes: remarks of the capture
    """

    name: str
    root: OutlineModule
    inputs: tuple[str, ...]
    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            [
                *write_tree(self.root, self.name, self.inputs),
                *(f"note  {note}" for note in self.notes),
            ]
        )

    def to_json(self) -> str:
        """Every operation in the order of the program, without folding."""
        text: str = json.dumps(
            {
                "name": self.name,
                "class": self.root.type_name,
                "inputs": list(self.inputs),
                "sizes": dict(self.sizes),
                "operations": [_as_dict(operation) for operation in self.root.operations],
                "notes": list(self.notes),
            },
            indent=2,
        )
        return text + "\n"


@shows_options("outline")
def outline(
    model: nn.Module,
    example_inputs: Tensor | Mapping[str, Any] | tuple[Any, ...],
    *,
    name: str | None = None,
    on_phase: OnPhase | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[OutlineKeywords],
) -> Outline:
    """Captures a model and shows its graph by module.

    - `model`, `example_inputs`, `name`: as for `partition`.
    - `on_phase`, `on_progress`: as for `partition`.
    - `options`: those of `PartitionOptions` that capture and profile a model. With `profile`,
      "measured" or "analytic", operations have milliseconds.

    Raises CaptureError when the model cannot be captured as a graph, ModelError when
    `example_inputs` do not fit its forward, PlanError for an illegal value of an option, TypeError
    for an unknown option.
    """
    chosen = options_for("outline", options)
    source = given_source(model, example_inputs, name)
    return outline_source(
        source,
        chosen,
        with_profile=chosen.profile is not None,
        on_phase=on_phase,
        on_progress=on_progress,
    )


def outline_spec(
    spec: str,
    options: PartitionOptions,
    *,
    with_profile: bool,
    on_phase: OnPhase | None = None,
    on_progress: OnProgress | None = None,
) -> Outline:
    """Loads the model that `spec` names, then `outline_source`."""
    source = load(spec, options, on_phase)
    return outline_source(
        source, options, with_profile=with_profile, on_phase=on_phase, on_progress=on_progress
    )


def outline_source(
    source: ModelSource,
    options: PartitionOptions,
    *,
    with_profile: bool,
    on_phase: OnPhase | None = None,
    on_progress: OnProgress | None = None,
) -> Outline:
    """Captures the model, profiles it if `with_profile`, and writes nothing."""
    end_phase = PhaseTimer(on_phase)
    captured = capture_source(source, options)
    end_phase("capture", describe_capture(captured), "profile" if with_profile else "")
    costs: Mapping[str, NodeCost] = {}
    if with_profile:
        profile = profile_capture(captured, options, stages=1, on_progress=on_progress)
        end_phase("profile", profile.summary, "")
        costs = profile.nodes
    return outline_of(captured, source.name, costs)


def outline_of(
    captured: Capture, name: str, costs: Mapping[str, NodeCost] | None = None
) -> Outline:
    """The outline of a capture; `costs` maps the names of nodes to their costs."""
    nodes = [node for node in captured.graph.nodes if node.op.startswith("call")]
    root = _part(captured, ModuleCall("", 0), nodes, 0, costs or {})
    inputs = tuple(f"{spec.name} {spec}" for spec in captured.inputs)
    return Outline(name, root, inputs, captured.sizes, captured.notes)


# --- from nodes to a tree -------------------------------------------------------------------


def _part(
    captured: Capture,
    call: ModuleCall,
    nodes: Sequence[fx.Node],
    depth: int,
    costs: Mapping[str, NodeCost],
) -> OutlineModule:
    def inner(node: fx.Node) -> ModuleCall | None:
        calls = node.meta.get("calls", ())
        return calls[depth] if len(calls) > depth else None

    items: list[OutlineOperation | OutlineModule] = []
    for child, members in groupby(nodes, inner):
        if child is None:
            items += [_operation(captured, node, call.path, costs) for node in members]
        else:
            items.append(_part(captured, child, list(members), depth + 1, costs))
    kind = type(captured.model.get_submodule(call.path)).__name__
    return OutlineModule(call.path, kind, call.index, tuple(items))


def _operation(
    captured: Capture, node: fx.Node, module: str, costs: Mapping[str, NodeCost]
) -> OutlineOperation:
    cost = costs.get(node.name)
    return OutlineOperation(
        name=node.name,
        does=operation_name(captured, node, module),
        value=_value(captured, node),
        source=source_of(node),
        module=module,
        ms=(cost.forward_ms, cost.backward_ms) if cost else None,
    )


def _value(captured: Capture, node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return str(captured.tensor_spec(node))
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    return type(value).__name__


def _as_dict(operation: OutlineOperation) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": operation.name,
        "module": operation.module,
        "does": operation.does,
        "value": operation.value,
        "source": operation.source,
    }
    if operation.ms is not None:
        facts["forward_ms"], facts["backward_ms"] = (round(ms, 4) for ms in operation.ms)
    return facts
