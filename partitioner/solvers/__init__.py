"""Planning methods by name, behind one interface: a problem -> a placement."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import acyclic, chain, metis, mpipe, pipedream, two_d_bin, uniform
from .method import Method

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "auto": chain.place,
        "chain": chain.place,
        "uniform": uniform.place,
        "metis": metis.place,
        "acyclic": acyclic.place,
        "mpipe": mpipe.place,
        "2dbin": two_d_bin.place,
        "pipedream": pipedream.place,
    }
)

__all__ = ["METHODS", "Method"]
