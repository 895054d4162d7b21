"""Capture -> the graph by module: a tree that a person reads, and a list that a program reads.

Modules stand as in the original, under each the operations of its own forward with shapes and the
author's line. A block that does the same as the one before is one line. The names on the left are
those that `--cut-at` takes, the paths and classes those of `--keep-together` and `--leaf`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor, fx, nn

from .capture import Capture, ModuleCall, Said
from .capture import capture as capture_model
from .compile import (
    Clock,
    OnTick,
    describe_capture,
    given_source,
    load_ticked,
)
from .models import Source
from .module_tree import Operation, Part, write_tree
from .options import checked
from .profiling import ProfileOptions, profile_capture
from .walk import NodeCost, OnProgress


@dataclass(frozen=True, slots=True)
class Outline:
    """A captured graph by module; `str` is the tree."""

    name: str
    root: Part
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


@checked
def outline(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    name: str | None = None,
    profile: str | None = None,
    **options: Any,
) -> Outline:
    """Captures a model and shows its graph by module; with `profile`, "measured" or "analytic",
    the milliseconds too. `options` are those of `outline_source`."""
    source = given_source(model, example_inputs, name)
    return outline_source(source, profile=profile, with_profile=profile is not None, **options)


@checked
def outline_spec(
    spec: str,
    *,
    with_profile: bool,
    model_args: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    micro_batch_size: int | None = None,
    seq: int = 128,
    seed: int = 0,
    meta: bool = False,
    on_tick: OnTick | None = None,
    **options: Any,
) -> Outline:
    """`asyncpipe-partition --stop-after capture`, or `profile`."""
    source = load_ticked(
        spec,
        on_tick,
        model_args=model_args,
        inputs=inputs,
        micro_batch_size=micro_batch_size,
        seq=seq,
        seed=seed,
        meta=meta,
    )
    return outline_source(source, with_profile=with_profile, on_tick=on_tick, **options)


@checked
def outline_source(
    source: Source,
    *,
    with_profile: bool,
    profile: str | None = None,
    threads: int | None = None,
    device: str | None = None,
    dtype: str = "float32",
    calibrate: bool = False,
    no_cache: bool = False,
    leaves: Sequence[str] = (),
    batch_dim: Said = "auto",
    sequence_dim: Said = "auto",
    capture: str = "auto",
    mode: str = "both",
    on_tick: OnTick | None = None,
    on_progress: OnProgress | None = None,
) -> Outline:
    """Captures, profiles if asked to, and writes nothing."""
    tick = Clock(on_tick)
    captured = capture_model(
        source.model,
        source.example_inputs,
        batch_dim=batch_dim,
        sequence_dim=sequence_dim,
        leaves=leaves,
        check=False,
        method=capture,
        mode=mode,
    )
    tick("capture", describe_capture(captured), "profile" if with_profile else "")
    costs: Mapping[str, NodeCost] = {}
    if with_profile:
        how = ProfileOptions(profile, device, dtype, threads, calibrate, no_cache, on_progress)
        measured = profile_capture(captured, how, stages=1)
        tick("profile", measured.summary, "")
        costs = measured.nodes
    return outline_of(captured, source.name, costs)


def outline_of(
    captured: Capture, name: str, costs: Mapping[str, NodeCost] | None = None
) -> Outline:
    """The outline of a capture; `costs` by the names of its nodes."""
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
) -> Part:
    def inner(node: fx.Node) -> ModuleCall | None:
        calls = node.meta.get("calls", ())
        return calls[depth] if len(calls) > depth else None

    items: list[Operation | Part] = []
    for found, members in groupby(nodes, inner):
        if found is None:
            items += [_operation(captured, node, call.path, costs) for node in members]
        else:
            items.append(_part(captured, found, list(members), depth + 1, costs))
    kind = type(captured.model.get_submodule(call.path)).__name__
    return Part(call.path, kind, call.index, tuple(items))


def _operation(
    captured: Capture, node: fx.Node, module: str, costs: Mapping[str, NodeCost]
) -> Operation:
    file, line = node.meta.get("source") or ("", 0)
    cost = costs.get(node.name)
    return Operation(
        name=node.name,
        does=_does(captured, node, module),
        value=_value(captured, node),
        source=f"{file.rpartition('/')[2]}:{line}" if file else "",
        module=module,
        ms=(cost.forward_ms, cost.backward_ms) if cost else None,
    )


def _does(captured: Capture, node: fx.Node, module: str) -> str:
    """`LayerNorm ln_1` for a leaf, `.view` for a method, `softmax` for a function."""
    if node.op == "call_module":
        path = str(node.target)
        own = path.removeprefix(f"{module}.") if module else path
        return f"{type(captured.model.get_submodule(path)).__name__} {own}"
    if node.op == "call_method":
        return f".{node.target}"
    return getattr(node.target, "__name__", str(node.target))


def _value(captured: Capture, node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return str(captured.tensor_spec(node))
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    return type(value).__name__


def _as_dict(operation: Operation) -> dict[str, Any]:
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
