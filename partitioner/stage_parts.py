"""The modules of each stage, with their costs and their slowest operations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from torch import fx

from ..runtime.plan.plan import StagePart
from .capture import Capture, ModuleCall
from .profile.operation_costs import NodeCost
from .split.split import StageGraph

_NO_MODULE = "other operations"


def stage_parts(
    capture: Capture,
    nodes: Sequence[fx.Node],
    labels: Sequence[str | None],
    costs: Sequence[NodeCost],
    *,
    again: bool,
) -> tuple[StagePart, ...]:
    """The nodes of a stage by their labels, in the order of forward; nodes without a label that
    follow one another are a part. With `again`, backward runs forward once more."""
    parts: dict[str | int, list[tuple[fx.Node, NodeCost]]] = {}
    runs = count()
    run, before = next(runs), ""
    for node, label, cost in zip(nodes, labels, costs, strict=True):
        if not label and before:
            run = next(runs)
        before = label or ""
        parts.setdefault(label or run, []).append((node, cost))
    return tuple(
        _part(capture, label if isinstance(label, str) else _NO_MODULE, members, again=again)
        for label, members in parts.items()
    )


def _part(
    capture: Capture, name: str, members: Sequence[tuple[fx.Node, NodeCost]], *, again: bool
) -> StagePart:
    forward_ms = sum(cost.forward_ms for _, cost in members)
    slowest, _ = max(members, key=lambda member: member[1].forward_ms + member[1].backward_ms)
    source = source_of(slowest)
    return StagePart(
        name=name,
        forward_ms=forward_ms,
        backward_ms=sum(cost.backward_ms for _, cost in members) + forward_ms * again,
        operations=len(members),
        slowest=operation_name(capture, slowest, name) + (f" ({source})" if source else ""),
    )


def operation_name(captured: Capture, node: fx.Node, module: str) -> str:
    """`LayerNorm ln_1` for a leaf, `.view` for a method, `softmax` for a function."""
    if node.op == "call_module":
        path = str(node.target)
        own = path.removeprefix(f"{module}.") if module else path
        return f"{type(captured.model.get_submodule(path)).__name__} {own}"
    if node.op == "call_method":
        return f".{node.target}"
    return getattr(node.target, "__name__", str(node.target))


def source_of(node: fx.Node) -> str:
    """The name of the file and the line that made a node; "" if it is unknown."""
    file, line = node.meta.get("source") or ("", 0)
    return f"{file.rpartition('/')[2]}:{line}" if file else ""


@dataclass(frozen=True, slots=True)
class _Whole:
    """The module calls that lie in one stage entirely, and their stages."""

    stage_of_call: Mapping[ModuleCall, int]

    def label(self, node: fx.Node, stage: int) -> str | None:
        """The outermost whole module around a node, or the node's own leaf module."""
        for call in node.meta.get("calls", ()):
            if self.stage_of_call.get(call) == stage:
                return str(call.path)
        return str(node.target) if node.op == "call_module" else None


def node_labels(stages: Sequence[StageGraph]) -> list[list[str | None]]:
    """The module that each node of each stage counts under; None without a whole module."""
    stages_of: dict[fx.Node, list[int]] = {}
    for stage in stages:
        for node in stage.nodes:
            stages_of.setdefault(node, []).append(stage.index)
    homes: dict[ModuleCall, set[int]] = {}
    for node, indices in stages_of.items():
        # A module stays whole where several stages compute parts of it for themselves.
        if len(indices) == 1:
            for call in node.meta.get("calls", ()):
                homes.setdefault(call, set()).update(indices)
    whole = _Whole(
        {
            call: min(stages_of_call)
            for call, stages_of_call in homes.items()
            if len(stages_of_call) == 1
        }
    )
    return [
        [
            whole.label(node, stage.index) if len(stages_of[node]) == 1 else None
            for node in stage.nodes
        ]
        for stage in stages
    ]


def in_rows(labels: Iterable[str]) -> tuple[str, ...]:
    """Writes `a.0, a.1, a.2, b` as `a.0-2, b`."""
    rows: list[tuple[str, int, int] | str] = []
    for label in labels:
        match = re.fullmatch(r"(.*\.)?(\d+)", label)
        if not match:
            rows.append(label)
            continue
        prefix, number = match[1] or "", int(match[2])
        if rows and isinstance(rows[-1], tuple) and rows[-1][0] == prefix:
            if rows[-1][2] == number - 1:
                rows[-1] = prefix, rows[-1][1], number
                continue
        rows.append((prefix, number, number))
    return tuple(
        row if isinstance(row, str) else f"{row[0]}{row[1]}" + f"-{row[2]}" * (row[2] > row[1])
        for row in rows
    )
