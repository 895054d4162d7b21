"""Which values between split layers each rank can have a part of the positions of: found by trying.

Behind the sum that ends one pair of split products, norms, dropouts and residual additions work on
each position by itself, up to the input of the next pair (Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4.2.2). The sum then leaves each rank
the positions of its part, and the next split layer gathers them: as many bytes on the links, and
the values between take 1/t.

The positions are a dimension of the sums that is neither that of the samples nor the last one.
Operations behind a sum are tried on parts of it in the same way as those of split layers. The
positions are gathered before one that cannot run on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
from torch import Tensor, fx, nn

from ...runtime.errors import PlanError
from ...runtime.tensor_parallel.ranks import Split
from ..capture import Capture
from ..capture.graph import tensor_spec
from ..capture.sizes import BATCH
from ..capture.values import Size, viewed
from .decisions import Decision, Positions, layer_for
from .derive import Derivation, operation_name
from .kinds import requires_gradient
from .probe import Placement, Probe, Unplaced
from .trials import Trials

_SUMMED = (nn.Linear, nn.Embedding)
"""The modules whose split layers can sum in parts of positions."""


def with_positions(
    capture: Capture, inputs: Mapping[str, Any], derivation: Derivation
) -> Derivation:
    """The derivation with parts of the positions between its split layers.

    Raises PlanError if no operation there runs on them.
    """
    probe = Probe(capture, inputs, derivation.size, divides=True)
    with probe.ready():
        search = _Search(probe, derivation.decisions)
        positions = search.settled(search.best())
    if not positions.values:
        raise PlanError(
            "no operation between the split layers runs on parts of the positions: "
            f"{next(iter(search.notes(search.obstacles)), 'their sums have no such dimension')}.",
            "Leave out --sequence-parallel.",
        )
    order = {node: place for place, node in enumerate(capture.graph.nodes)}
    divided = {
        node: replace(derivation.decisions[node], sequence=positions.values[value].dim)
        for node, value in positions.sums.items()
    }
    decisions = {**derivation.decisions, **positions.decisions, **divided}
    in_order = sorted(decisions, key=order.__getitem__)
    return replace(
        derivation, decisions={node: decisions[node] for node in in_order}, positions=positions
    )


@dataclass
class _Found:
    """What runs on parts if some sums are in parts.

    values, decisions: as in `Positions`
    gathered: values that operations read whole
    failed: why these operations cannot run on parts
    """

    values: dict[fx.Node, Split] = field(default_factory=dict)
    decisions: dict[fx.Node, Decision] = field(default_factory=dict)
    gathered: set[fx.Node] = field(default_factory=set)
    failed: dict[fx.Node, str] = field(default_factory=dict)


class _Search:
    """Tries which sums can be left in parts.

    obstacles: why operations cannot run on parts
    """

    def __init__(self, probe: Probe, split: Mapping[fx.Node, Decision]) -> None:
        self._probe, self._split, self._trials = probe, split, Trials(probe)
        self._nodes: list[fx.Node] = list(probe.capture.graph.nodes)
        self._changed = {storage for node in self._nodes for storage in node.meta["mutates"]}
        self._refused: dict[fx.Node, str] = {}
        self._reasons: dict[str, None] = {}
        self.obstacles: dict[fx.Node, str] = {}
        self._summand: dict[fx.Node, fx.Node] = {}
        self._dims: dict[fx.Node, dict[Any, int]] = {}
        for node, decision in split.items():
            if decision.sums and (value := self._sum_of(node)) is not None:
                self._summand[value] = node

    def _sum_of(self, node: fx.Node) -> fx.Node | None:
        """The value with positions that can be the sum of the summands of a node: its own, or a
        view that alone reads it."""
        module = self._probe.run.module(node)
        if module is not None and type(module) not in _SUMMED:
            return None
        while not self._dims.setdefault(node, self._dims_of(node)):
            readers = list(node.users)
            if module is not None or len(readers) != 1:
                return None
            if viewed(readers[0]) is not node or readers[0] in self._split:
                return None
            node = readers[0]
        return node

    def _dims_of(self, node: fx.Node) -> dict[Any, int]:
        """The dimensions of a value that may be its positions, by their length."""
        found: dict[Any, int] = {}
        whole, size = self._probe.run.whole(node), self._probe.size
        if not isinstance(whole, Tensor) or node.meta["storages"] & self._changed:
            return found
        for dim, length in enumerate(node.meta["shape"][:-1]):
            if isinstance(length, Size) and BATCH in length.symbols:
                continue
            if whole.shape[dim] % size == 0 and whole.shape[dim] > 0:
                found.setdefault(length, dim)
            elif whole.shape[dim] > 1:
                why = f"{size} ranks cannot share out {whole.shape[dim]} positions"
                self._reasons[why] = None
        return found

    # --- which sums -------------------------------------------------------------------------

    def best(self) -> dict[fx.Node, int]:
        """For each sum the dimension with which most memory is saved."""
        lengths = dict.fromkeys(length for dims in self._dims.values() for length in dims)
        by_length = {
            length: {
                value: self._dims[value][length]
                for value in self._summand
                if length in self._dims[value]
            }
            for length in lengths
        }
        saved = {length: self._saved(self._propagated(sums)) for length, sums in by_length.items()}
        chosen: dict[fx.Node, int] = {}
        for length in sorted(lengths, key=lambda length: -saved[length]):
            if saved[length]:
                chosen = {**by_length[length], **chosen}
        return chosen

    def _saved(self, found: _Found) -> float:
        """The bytes of the results that operations compute in parts."""
        return sum(self._num_bytes(node) for node in found.decisions if viewed(node) is None)

    def _num_bytes(self, node: fx.Node) -> float:
        shape = tensor_spec(node).resolve(self._probe.capture.sizes)
        number = float(node.meta["val"].element_size())
        for length in shape:
            number *= length
        return number

    def settled(self, sums: dict[fx.Node, int]) -> Positions:
        """What runs on parts, without sums in parts from which nothing is gained."""
        while True:
            found = self._propagated(sums)
            kept = self._kept(sums, found)
            if not self._refuse_unequal_calls(found, kept) and len(kept) == len(sums):
                break
            sums = kept
        inputs = {user for value in found.values for user in value.users if self._is_input(user)}
        return Positions(
            found.values,
            found.decisions,
            {self._summand[value]: value for value in sums},
            frozenset(inputs - found.decisions.keys()),
            tuple(self.notes(found.failed)),
        )

    def notes(self, failed: Mapping[fx.Node, str]) -> dict[str, None]:
        """A sentence for each operation that needs all positions, those of equal blocks once."""
        gathered = (
            f"positions are gathered before {operation_name(node)}, because {reason}"
            for node, reason in failed.items()
        )
        return dict.fromkeys((*gathered, *self._reasons))

    def _is_input(self, node: fx.Node) -> bool:
        """True for a view that split layers alone read, as a whole value with a gradient."""
        return viewed(node) is not None and all(
            user in self._split and node not in self._split[user].places and requires_gradient(user)
            for user in node.users
        )

    def _kept(self, sums: Mapping[fx.Node, int], found: _Found) -> dict[fx.Node, int]:
        """The sums behind which operations run on parts, and positions are not gathered more often
        than their sums are left in parts."""
        graph = nx.Graph()
        graph.add_nodes_from(sums)
        graph.add_edges_from(
            (source, node)
            for node in found.decisions
            for source in node.all_input_nodes
            if source in found.values
        )
        kept: dict[fx.Node, int] = {}
        for region in nx.connected_components(graph):
            gathered = sum(
                any(user not in found.decisions and user.op != "output" for user in node.users)
                for node in region
            )
            own = {value: dim for value, dim in sums.items() if value in region}
            if gathered > len(own) + 1:
                why = f"{len(own)} sums would be left in parts and gathered in {gathered} places"
                self._reasons[why] = None
                continue
            kept |= {
                value: dim
                for value, dim in own.items()
                if any(user in found.decisions for user in value.users)
            }
        return {value: sums[value] for value in sums if value in kept}

    def _refuse_unequal_calls(self, found: _Found, sums: Mapping[fx.Node, int]) -> bool:
        """Refuses parts where a module that becomes another one for them is also called otherwise;
        returns whether there are such."""
        calls: dict[int, list[fx.Node]] = {}
        for node in self._nodes:
            if (module := self._probe.run.module(node)) is not None:
                calls.setdefault(id(module), []).append(node)
        before = len(self._refused)
        values = {self._summand[value]: dim for value, dim in sums.items()}
        for nodes in calls.values():
            ways = {self._way(node, found, values) for node in nodes}
            if len(ways) > 1:
                why = "its module is also called with all positions"
                own = [node for node in nodes if node in found.decisions or node in values]
                self._refused |= dict.fromkeys(own, why)
        return len(self._refused) > before

    def _way(self, node: fx.Node, found: _Found, sums: Mapping[fx.Node, int]) -> Any:
        """The replacement of the module that a node calls; None if it stays as it is."""
        decision = found.decisions.get(node) or self._split.get(node)
        if decision is None:
            return None
        module = self._probe.run.module(node)
        assert module is not None
        layer = layer_for(module, decision)
        if layer is not None and layer.module is module and not (layer.split or layer.is_shared):
            return None
        return str(decision.result), str(decision.state), sums.get(node)

    # --- parts ------------------------------------------------------------------------------

    def _propagated(self, sums: Mapping[fx.Node, int]) -> _Found:
        """What runs on parts if these sums are in parts. Operations that read nothing but values
        which others read whole run on the whole, too."""
        found = _Found()
        while (node := self._first_failure(sums, found)) is not None:
            found.gathered.update(n for n in node.all_input_nodes if n in found.values)
        found.failed = {
            node: reason
            for node, reason in found.failed.items()
            if any(source in found.values for source in node.all_input_nodes)
        }
        self.obstacles |= found.failed
        return found

    def _first_failure(self, sums: Mapping[fx.Node, int], found: _Found) -> fx.Node | None:
        """Finds the operations that run on parts, and returns the first one that must but
        cannot."""
        found.values, found.decisions = {}, {}
        for node in self._nodes:
            if node in sums and self._summand[node] not in self._refused:
                found.values[node] = Split(sums[node])
                continue
            own: dict[fx.Node, Placement] = {
                n: found.values[n] for n in node.all_input_nodes if n in found.values
            }
            if own.keys() <= found.gathered or node.op == "output" or node in self._split:
                continue
            decision = self._on_parts(node, own)
            if isinstance(decision, Decision):
                assert isinstance(decision.result, Split)
                found.decisions[node], found.values[node] = decision, decision.result
            elif not self._is_input(node):
                found.failed[node] = decision
                return node
        return None

    def _on_parts(self, node: fx.Node, places: dict[fx.Node, Placement]) -> Decision | str:
        """How a node runs on parts of positions, or why it cannot."""
        if node in self._refused:
            return self._refused[node]
        if node not in self._probe.run.first:
            return "it runs in one mode only"
        if (node.meta["storages"] | node.meta["mutates"]) & self._changed:
            return "its memory is changed in place"
        decision = self._trials.found(node, places)
        if isinstance(decision, Unplaced) or decision.sums or decision.function is not None:
            return "it reads all of them"
        result, state = decision.result, decision.state
        if not isinstance(result, Split) or result != Split(result.dim) or any(state.values()):
            return "its result has no such parts"
        if sum(weight.nbytes for weight in self._weights(node)) > self._num_bytes(node):
            return "its weights are larger than its result"
        return decision

    def _weights(self, node: fx.Node) -> Iterator[Tensor]:
        """The whole parameters that a node reads, whose gradients the ranks sum."""
        module = self._probe.run.module(node)
        if module is not None:
            yield from module.parameters()
        for source in node.all_input_nodes:
            if self._probe.run.tensors.is_parameter(source):
                yield self._probe.run.tensors.like(source)
