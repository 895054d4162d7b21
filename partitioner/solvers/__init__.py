"""Planning methods by name, behind one interface: a problem -> a placement."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import acyclic, chain, exact, metis, mpipe, pipedream, two_d_bin, uniform
from .method import Method

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "auto": exact.place,
        "exact": exact.place,
        "chain": chain.place,
        "uniform": uniform.place,
        "metis": metis.place,
        "acyclic": acyclic.place,
        "mpipe": mpipe.place,
        "2dbin": two_d_bin.place,
        "pipedream": pipedream.place,
    }
)

# Methods that cut the order given, and can be told where they have to.
HEEDS_CUTS = frozenset({METHODS["auto"], METHODS["chain"], METHODS["pipedream"]})

# Methods that cut for the ranks that stages are on, and choose none themselves.
HEEDS_RANKS = frozenset(METHODS.values()) - {
    METHODS["mpipe"],
    METHODS["2dbin"],
    METHODS["pipedream"],
}

__all__ = ["HEEDS_CUTS", "HEEDS_RANKS", "METHODS", "Method"]
