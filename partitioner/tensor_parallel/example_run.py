"""One run of a captured model at small sizes, for the values of its nodes.

Operations of the same kind run once, and weights on meta are drawn where they are read: so a model
of 96 equal blocks costs one of them, whatever memory all of its weights would take.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from ..capture import Capture
from ..capture.check import real
from ..capture.graph import Reader, refused_sizes, run, run_node
from ..capture.model_state import seed_all
from ..capture.sizes import BATCH, dynamic_of, nearby_sizes, resized, smaller_sizes
from .kinds import Kinds
from .model_tensors import ModelTensors

_SAMPLES = 5


class Samples(int):
    """The number of samples as that of the blocks of a dimension that are divided each, where heads
    and samples are one dimension."""


class ExampleRun:
    """The values of the nodes of a captured graph in one run, at sizes that differ from each other
    and that `size` ranks cannot divide, if the model takes such.

    first: for each node that runs the first one of its kind, which is run in its place
    tensors: the parameters, buffers and constants
    sizes: the sizes by symbol
    """

    def __init__(
        self, capture: Capture, inputs: Mapping[str, Any], size: int, *, divides: bool = False
    ) -> None:
        self.capture = capture
        self.training = False not in capture.modes
        self.tensors = ModelTensors(capture)
        self._changed = {s for node in capture.graph.nodes for s in node.meta["mutates"]}
        self._given = {
            name: real(value, torch.device("cpu")).clone() if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        self._size, self._divides = size, divides

    def start(self) -> None:
        """Runs the model at the first sizes that it accepts."""
        captured, dims = self.capture.sizes, dynamic_of(self.capture.inputs)
        small = smaller_sizes(captured)
        if BATCH in captured:
            # No usual number of blocks of a fused projection.
            small[BATCH] = _SAMPLES
        for choice in (small, smaller_sizes(captured), nearby_sizes(captured)):
            self.sizes = {name: self._as_wanted(name, n) for name, n in choice.items()}
            if not refused_sizes(self.capture.graph, self.sizes):
                try:
                    self._compute_all(resized(self._given, dims, self.sizes))
                    return
                except Exception:  # The model has rules for its inputs.
                    continue
        self.sizes = dict(captured)
        self._compute_all(self._given)

    def _as_wanted(self, name: str, number: int) -> int:
        """The next number that the ranks divide, if lengths are to be divided; otherwise, and for
        the samples, the next one that they cannot divide."""
        rest = number % self._size
        if self._divides and name != BATCH:
            return number + (self._size - rest) % self._size
        return number + (rest == 0)

    @property
    def samples(self) -> Samples | None:
        """The samples, if the number of blocks of no other division is the same."""
        number = self.sizes.get(BATCH, 0)
        return Samples(number) if number >= _SAMPLES and number % self._size else None

    def whole(self, node: fx.Node) -> Any:
        """The value of a node when it was computed."""
        if node.op == "placeholder":
            return self._of_node.get(node, self._inputs[str(node.target)])
        if node.op == "get_attr" and node not in self._of_node:
            return self.tensors.of_node(node)
        return self._of_node.get(node)

    def at(self, node: fx.Node, source: fx.Node) -> Any:
        """The value of `source` when `node` is computed."""
        key = (node, source)
        return self._later[key] if key in self._later else self.whole(source)

    def after(self, node: fx.Node) -> Mapping[fx.Node, Any]:
        """The values of a node's inputs after it, where it changed their memory."""
        return self._after.get(node, {})

    def like(self, node: fx.Node) -> Any:
        """A value of the shape and dtype of a node's, without drawing weights."""
        return self.tensors.like(node) if node.op == "get_attr" else self.whole(node)

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls."""
        if node.op != "call_module":
            return None
        return self.capture.model.get_submodule(str(node.target))

    def call(
        self,
        node: fx.Node,
        given: dict[fx.Node, Any],
        state: Mapping[str, Tensor] | None = None,
        layer: nn.Module | None = None,
    ) -> Any:
        """The result of a node for some values of its inputs, with other tensors in the module that
        it calls, or in a `layer` in place of it."""
        reader = Reader(self.capture, self._inputs, given, self.training)
        module, own = self.module(node), dict(state or {})
        if layer is not None:
            args, kwargs = reader.value((node.args, node.kwargs))
            return functional_call(layer, own, args, kwargs)
        if module is not None and self.tensors.are_drawn:
            own = self.tensors.of_module(str(node.target)) | own
        with _reparametrize_module(module, own) if module and own else nullcontext():
            return run_node(self.capture, reader, node)

    def _compute_all(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        self._of_node: dict[fx.Node, Any] = {}
        self._later: dict[tuple[fx.Node, fx.Node], Any] = {}
        self._after: dict[fx.Node, dict[fx.Node, Any]] = {}
        kinds = Kinds(self.capture, self.tensors, self._changed)
        self.first = kinds.first
        live: dict[fx.Node, Any] = {}
        changed: set[int] = set()

        def around(node: fx.Node, _: Any) -> Any:
            likes = {
                source: self.like(source) if source.op == "get_attr" else live[source]
                for source in node.all_input_nodes
            }
            first = kinds.add(node, likes)
            if first is not node:
                self._of_node[node] = self._of_node[first]
                return self._of_node[node]
            given = {source: self._read(source, live) for source in likes}
            for source, value in given.items():
                if source.meta["storages"] & changed:
                    self._later[node, source] = cloned(value)
            result = self.call(node, given)
            self._of_node[node] = self._kept(node, result)
            if node.meta["mutates"]:
                changed.update(node.meta["mutates"])
                self._after[node] = {
                    source: cloned(value)
                    for source, value in given.items()
                    if source.meta["storages"] & node.meta["mutates"]
                }
            return result

        seed_all(0)
        run(self.capture, inputs, training=self.training, env=live, around=around)

    def _read(self, source: fx.Node, live: dict[fx.Node, Any]) -> Any:
        """The value of a node now."""
        value = self.tensors.of_node(source) if source.op == "get_attr" else live[source]
        if source not in self._of_node and source.meta["storages"] & self._changed:
            self._of_node[source] = cloned(value)
        return value

    def _kept(self, node: fx.Node, value: Any) -> Any:
        return cloned(value) if node.meta["storages"] & self._changed else value


def cloned(value: Any) -> Any:
    """Copies of the tensors of a value."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        items = [cloned(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
