"""Generated text -> stages run as in a pipeline: files imported, boundaries detached, gradients
handed back. Parameters are copies, so that a tied one is summed as ranks would sum it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from asyncpipe.partitioner.capture import Capture, colocated, in_order
from asyncpipe.partitioner.codegen import Header, extra_tensors, generate
from asyncpipe.partitioner.split.split import StageGraph, split
from asyncpipe.partitioner.split.ssa import separated

HEADER = Header(model="model", command="asyncpipe-partition --model model", version="0.1.0")


def cut(
    capture: Capture, stage_of: Mapping[fx.Node, int]
) -> tuple[Capture, tuple[StageGraph, ...]]:
    """The stages of a capture, and the capture that their nodes are of."""
    capture, stage_of = separated(capture, stage_of)
    return capture, split(capture, stage_of)


def computed(capture: Capture) -> list[fx.Node]:
    """The nodes that have a stage."""
    return [n for n in capture.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def stages_cut_before(capture: Capture, places: Sequence[int]) -> dict[fx.Node, int] | None:
    """The stage of every node for cuts before just these positions of the program; None if that
    would part what must stay together."""
    nodes = computed(capture)
    stage = {node: sum(i >= place for place in places) for i, node in enumerate(nodes)}
    if any(len({stage[node] for node in group}) > 1 for group in colocated(capture)):
        return None
    return stage


def stages_at(capture: Capture, cuts: Sequence[float]) -> dict[fx.Node, int]:
    """The stage of every node for cuts at these shares of the program; groups that must stay
    together move to the stage of their last node, and what reads them along with them."""
    nodes = computed(capture)
    stage = {node: sum(i >= int(c * len(nodes)) for c in cuts) for i, node in enumerate(nodes)}
    groups, pairs = colocated(capture), in_order(capture)
    before: dict[fx.Node, int] = {}
    while before != stage:
        before = dict(stage)
        for group in groups:
            stage |= dict.fromkeys(group, max(stage[node] for node in group))
        for node in nodes:
            sources = [stage[source] for source in node.all_input_nodes if source in stage]
            stage[node] = max([stage[node], *sources])
        for node, later in pairs:
            stage[later] = max(stage[node], stage[later])
    numbers = {old: new for new, old in enumerate(sorted(set(stage.values())))}
    return {node: numbers[old] for node, old in stage.items()}


@dataclass
class Chain:
    """The stages of a model in one process."""

    capture: Capture
    graphs: tuple[StageGraph, ...]
    files: Mapping[str, str]
    classes: list[type[nn.Module]]
    stages: list[nn.Module] = field(default_factory=list)

    @classmethod
    def build(
        cls, capture: Capture, cuts: Sequence[float], folder: Path, code: str = "structured"
    ) -> Chain:
        return cls.of(capture, stages_at(capture, cuts), folder, code)

    @classmethod
    def of(
        cls,
        capture: Capture,
        stage_of: Mapping[fx.Node, int],
        folder: Path,
        code: str = "structured",
    ) -> Chain:
        capture, graphs = cut(capture, stage_of)
        files = generate(capture, graphs, HEADER, code=code)
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        classes = [_load(folder / f"stage_{graph.index}.py") for graph in graphs]
        chain = cls(capture, graphs, files, classes)
        chain.fill()
        return chain

    @torch.no_grad()
    def fill(self) -> None:
        """Makes new stages with the model's values, as the runtime reads them from files."""
        self.stages = [stage_class() for stage_class in self.classes]
        saved = self.capture.model.state_dict()
        extra = extra_tensors(self.capture, self.graphs)
        for stage in self.stages:
            stage.train(self.capture.model.training)
            named = (*stage.named_parameters(), *stage.named_buffers())
            for name, tensor in named:
                if name in saved or name in extra:
                    tensor.copy_(saved[name] if name in saved else extra[name])

    def run(self, inputs: Mapping[str, Tensor], *, by_value: bool = False) -> list[Tensor]:
        """The model's outputs; afterwards `backward` may be called. With `by_value`, stages receive
        contiguous copies, as from another process."""
        self._values: dict[fx.Node, Tensor] = {}
        self._received: list[tuple[int, fx.Node, Tensor]] = []
        self._by_value = by_value
        for stage, graph in zip(self.stages, self.graphs, strict=True):
            arguments = [self._argument(graph, node, inputs) for node in graph.inputs]
            result = stage(*arguments)
            results = (result,) if len(graph.outputs) == 1 else result or ()
            self._values |= zip(graph.outputs, results, strict=True)
        for node in self._outputs():
            if node.op == "placeholder":
                self._values[node] = inputs[str(node.target)]
        return [self._values[node] for node in self._outputs()]

    def _argument(self, graph: StageGraph, node: fx.Node, inputs: Mapping[str, Tensor]) -> Tensor:
        if node.op == "placeholder":
            return inputs[str(node.target)]
        value = self._values[node]
        received = value.detach()
        if self._by_value:
            received = received.clone(memory_format=torch.contiguous_format)
        received.requires_grad_(value.requires_grad)
        self._received.append((graph.index, node, received))
        return received

    def _outputs(self) -> list[fx.Node]:
        (output,) = self.capture.graph.find_nodes(op="output")
        found: list[fx.Node] = []
        fx.map_arg(output.args[0], found.append)
        return found

    def backward(self, gradient: float) -> None:
        """Backward from every output, each with this gradient, stage by stage."""
        gradients: dict[fx.Node, Any] = {}
        for node in self._outputs():
            gradients[node] = gradients.get(node, 0) + torch.full_like(self._values[node], gradient)
        for graph in reversed(self.graphs):
            pairs = [
                (self._values[node], gradients[node])
                for node in graph.outputs
                if node in gradients and self._values[node].requires_grad
            ]
            if not pairs:
                continue
            torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])
            for index, node, received in self._received:
                if index == graph.index and received.grad is not None:
                    gradients[node] = gradients.get(node, 0) + received.grad


def _load(path: Path) -> type[nn.Module]:
    spec = importlib.util.spec_from_file_location(f"generated_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stage_class: type[nn.Module] = getattr(module, path.stem.title().replace("_", ""))
    return stage_class


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a model's output, in its order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value
    return [tensor for item in items or () for tensor in tensors_in(item)]


def larger(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs with another batch, and another sequence where they have one."""
    made = {}
    for name, value in inputs.items():
        value = torch.cat([value, value[:2]])
        if value.dim() == 2 and not value.is_floating_point():
            value = torch.cat([value, value[:, :3]], 1)
        made[name] = value
    return made
