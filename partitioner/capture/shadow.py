"""The graph recorded so far and the example's real numbers -> real values of its nodes.

A forward that asks for the value of a tensor gets the answer that the model would give. The nodes
are run on the model itself, each once, when the first of them is asked for; also at other sizes,
so that an answer that holds for the example's sizes only is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from ...runtime.number_generators import number_state, set_number_state
from .arguments import Arguments
from .fakes import FakeWorld
from .graph import Capture, tensor_spec
from .interpret import run
from .restore import seed_all, unchanged


class Shadow:
    """Real runs of one trace, the first on the example itself."""

    def __init__(
        self,
        world: FakeWorld,
        given: Arguments,
        others: Sequence[Mapping[str, Tensor]],
        training: bool,
    ) -> None:
        self._world, self._given, self._training = world, given, training
        samples = [given.tensors, *others]
        runs = [_Run(sample, seed) for seed, sample in enumerate(samples)]
        self._runs = [] if world.is_on_meta else runs

    def read(
        self,
        node: fx.Node,
        constants: Mapping[str, Tensor],
        changed: tuple[str, ...],
        read: Callable[[Any], Any],
    ) -> list[Any]:
        """What `read` makes of the node's value at each sample that runs; nothing for a model
        without numbers, or when the example itself does not run. `changed` are the parameters that
        forward has changed so far."""
        capture = Capture(
            graph=node.graph,
            model=self._world.model,
            inputs=tuple(tensor_spec(given) for given in node.graph.find_nodes(op="placeholder")),
            arguments=self._given,
            sizes=dict(self._world.hints),
            calls={},
            constants=constants,
            changed=changed,
        )
        found = []
        with _disable_current_modes(), self._world.outside(), torch.no_grad():
            for sample in self._runs:
                try:
                    found.append(read(sample.value(capture, node, self._training)))
                except Exception:  # The model does not take these sizes.
                    self._runs = self._runs[: self._runs.index(sample)]
                    break
        return found


class _Run:
    def __init__(self, inputs: Mapping[str, Tensor], seed: int) -> None:
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        self._seed = seed
        self._values: dict[fx.Node, Any] = {}
        self._state: dict[str, Tensor] = {}
        self._random: tuple[Tensor, Tensor] | None = None

    def value(self, capture: Capture, node: fx.Node, training: bool) -> Any:
        """The node's value, after a run of what has been recorded since the last question."""
        pending = [each for each in capture.graph.nodes if each not in self._values]
        model = capture.model
        with unchanged(model, capture.changed):
            parameters = {name: model.get_parameter(name) for name in capture.changed}
            state = dict(model.named_buffers()) | parameters
            for name, value in self._state.items():
                state[name].copy_(value)
            if self._random is None:
                seed_all(self._seed)
            else:
                torch.set_rng_state(self._random[0])
                set_number_state(self._random[1])
            run(capture, self._inputs, training=training, nodes=pending, env=self._values)
            self._values.update((each, None) for each in pending if each not in self._values)
            self._random = torch.get_rng_state(), number_state()
            self._state = {name: value.clone() for name, value in state.items()}
        return self._values[node]
