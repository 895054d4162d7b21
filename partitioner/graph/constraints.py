"""Names that a user gives, and a captured graph -> the constraints of the plan.

`--cut-at` names a boundary by what comes right after it: a module (`transformer.h.6`), an
operation (`add_3`), or a line of the source (`nets.py:31`). `--keep-together` names modules by
path, or every module of a class, whose operations stay in one stage.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import networkx as nx
from torch import fx

from ...runtime.errors import PlanError
from ..capture import Capture

Nodes = tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Demands:
    """The demands of the user.

    cuts: each name of `--cut-at` and its nodes, in program order
    together: each module that is kept whole and its nodes
    """

    cuts: tuple[tuple[str, Nodes], ...] = ()
    together: tuple[tuple[str, Nodes], ...] = ()


def find_demands(
    capture: Capture, cut_at: Sequence[str], keep_together: Sequence[str], stages: int
) -> Demands:
    """The nodes that the names stand for. Raises PlanError for an unknown name, a line that runs
    in several places, and more cuts than `stages` have boundaries."""
    names = _Names(capture)
    cuts = tuple((name, names.place(name)) for name in dict.fromkeys(cut_at))
    boundaries = len({nodes[0] for _, nodes in cuts})
    if boundaries >= stages:
        raise PlanError(
            f"{boundaries} cuts demanded ({', '.join(name for name, _ in cuts)}), but with "
            f"--stages {stages} there are {max(stages - 1, 0)}.",
            f"--stages {boundaries + 1}, or fewer --cut-at",
        )
    together = [module for name in dict.fromkeys(keep_together) for module in names.modules(name)]
    return Demands(cuts, tuple(together))


def groups_to_cut_before(demands: Demands, graph: nx.DiGraph) -> tuple[str, ...]:
    """The group of the cost graph that each demanded cut is right before.

    Raises PlanError when what comes before a cut has to be with what comes after it.
    """
    members = {name: names for _, names in graph.nodes(data="names") for name in names}
    groups = {name: group for group, names in graph.nodes(data="names") for name in names}
    first = next(iter(graph))
    cut_before = []
    for name, nodes in demands.cuts:
        # Nodes in no group are computed wherever they are read.
        placed = [node for node in nodes if node.name in groups] or _after(nodes, groups)
        starts = [node for node in placed if members[node.name][0] == node.name]
        if not placed or (starts and groups[starts[0].name] == first):
            raise PlanError(
                f"--cut-at {name} leaves stage 0 with nothing to compute.",
                "Name what the second stage begins with.",
            )
        if not starts or any(not _is_view(node) for node in placed[: placed.index(starts[0])]):
            raise _inseparable(name, placed[0], members[placed[0].name], demands)
        cut_before.append(groups[starts[0].name])
    return tuple(dict.fromkeys(cut_before))


def _after(nodes: Nodes, groups: Collection[str]) -> list[fx.Node]:
    """The first node in a group that follows: the cut is right before it as well."""
    following = nodes[-1].next
    while following.op != "root" and following.name not in groups:
        following = following.next
    return [] if following.op == "root" else [following]


def _is_view(node: fx.Node) -> bool:
    """The node has no memory of its own, so it may stay with its base."""
    own = node.meta.get("storages", frozenset())
    sources = [source.meta.get("storages", frozenset()) for source in node.all_input_nodes]
    is_change = bool(node.meta.get("mutates"))
    return bool(own) and not is_change and any(own <= source for source in sources)


def _inseparable(name: str, node: fx.Node, members: Sequence[str], demands: Demands) -> PlanError:
    graph = node.graph
    earlier = next(other for other in graph.nodes if other.name == members[0])
    reason = next(
        (
            f"--keep-together {module}"
            for module, nodes in demands.together
            if {earlier, node} <= set(nodes)
        ),
        "one changes or reads in place what the other made, or is a part of its result",
    )
    return PlanError(
        f"--cut-at {name} is not possible: {_described(earlier)} and {_described(node)} must stay "
        f"together ({reason}).",
        f"Cut before or after both: --cut-at {earlier.name}",
    )


def _described(node: fx.Node) -> str:
    file, line = node.meta.get("source") or ("", 0)
    return f"{node.name} ({file.rpartition('/')[2]}:{line})" if file else node.name


class _Names:
    """The modules, lines and operations of a captured graph that options can name."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._nodes = [node for node in capture.graph.nodes if node.op.startswith("call")]
        self._inside: dict[str, list[fx.Node]] = {}
        for node in self._nodes:
            calls = node.meta.get("calls", ())
            paths = [call.path for call in calls]
            paths += [str(node.target)] if node.op == "call_module" else []
            for path in dict.fromkeys(_with_parents(paths)):
                self._inside.setdefault(path, []).append(node)

    def place(self, name: str) -> Nodes:
        """The nodes before the first of which a cut named `name` is."""
        if name in self._inside:
            return tuple(self._inside[name])
        for node in self._nodes:
            if node.name == name:
                return (node,)
        if re.search(r":\d+$", name):
            return self._line(name)
        raise self._unknown(name, "--cut-at", [*self._inside, *(n.name for n in self._nodes)])

    def modules(self, name: str) -> list[tuple[str, Nodes]]:
        """The nodes of the module of that path, or of each module of that class."""
        if name in self._inside:
            return [(name, tuple(self._inside[name]))]
        kinds = {
            path: type(module)
            for path, module in self._capture.model.named_modules()
            if path in self._inside
        }
        modules = [
            (path, tuple(self._inside[path]))
            for path, kind in kinds.items()
            if name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        ]
        if not modules:
            known = [*self._inside, *dict.fromkeys(kind.__name__ for kind in kinds.values())]
            raise self._unknown(name, "--keep-together", known)
        return modules

    def _line(self, name: str) -> Nodes:
        """The nodes of a line of the source that runs at one place of the program."""
        file, _, line = name.rpartition(":")
        lines: dict[str, list[list[fx.Node]]] = {}
        last: object = None
        for node in self._nodes:
            where = node.meta.get("source") or ("", 0)
            if where[1] == int(line) and f"/{where[0]}".endswith(f"/{file}"):
                runs = lines.setdefault(where[0], [])
                call = (where, node.meta.get("calls", ()))
                if not runs or last != call:
                    runs.append([])
                runs[-1].append(node)
                last = call
            else:
                last = None
        runs = [run for runs_of_line in lines.values() for run in runs_of_line]
        if not runs:
            sources = {node.meta["source"] for node in self._nodes if node.meta.get("source")}
            known = sorted(f"{path.rpartition('/')[2]}:{number}" for path, number in sources)
            raise self._unknown(name, "--cut-at", known)
        if len(runs) > 1:
            shown = ", ".join(run[0].name for run in runs[:3]) + (", .." if len(runs) > 3 else "")
            raise PlanError(
                f"--cut-at {name} names {len(runs)} places ({shown}).",
                f"Name one of them: --cut-at {runs[1][0].name}",
            )
        return tuple(runs[0])

    def _unknown(self, name: str, flag: str, known: Iterable[str]) -> PlanError:
        kind = type(self._capture.model).__name__
        near = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3, cutoff=0.5)
        return PlanError(
            f"{flag} {name}: the forward of {kind} has nothing of that name.",
            f"Did you mean {' or '.join(near)}? All names: --stop-after capture"
            if near
            else "All names: --stop-after capture",
        )


def _with_parents(paths: Iterable[str]) -> Iterable[str]:
    """Paths and those of the containers around them: `h.0` is a call, its container `h` is not."""
    for path in paths:
        parts = path.split(".")
        yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))
