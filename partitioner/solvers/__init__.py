"""Planning methods by name, behind one interface: a problem -> a placement."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..graph.problem import PlanningMethod
from . import baselines, chain, exact, mpipe, multilevel
from . import chain as pipedream

METHODS: Mapping[str, PlanningMethod] = MappingProxyType(
    {
        "auto": exact.place,
        "exact": exact.place,
        "chain": chain.place,
        "uniform": baselines.place_uniform,
        "metis": baselines.place_metis,
        "acyclic": multilevel.place,
        "mpipe": mpipe.place,
        "2dbin": baselines.place_two_d_bin,
        "pipedream": pipedream.place_pipedream,
    }
)

# Methods that cut the given order and accept demanded cuts.
SUPPORTS_CUTS = frozenset({METHODS["auto"], METHODS["chain"], METHODS["pipedream"]})

# Methods that cut for given ranks of the stages and do not choose the ranks themselves.
SUPPORTS_RANKS = frozenset(METHODS.values()) - {
    METHODS["mpipe"],
    METHODS["2dbin"],
    METHODS["pipedream"],
}

__all__ = ["SUPPORTS_CUTS", "SUPPORTS_RANKS", "METHODS", "PlanningMethod"]
