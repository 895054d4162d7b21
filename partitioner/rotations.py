"""A graph + the name of an optimizer -> costs with what SOAP keeps beside two moments.

Every other optimizer keeps copies of the parameters (`setting.OPTIMIZER_COPIES`). SOAP keeps of a
matrix of m rows and n columns two moments, and of either side a covariance and a basis: 2 (m^2 +
n^2) elements more, which depends on the shape. A search sums it as it does buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import networkx as nx
import numpy as np
from torch import Tensor

from .cost import Costs

LARGEST = 8192
"""SOAP leaves sides alone that are larger (`runtime/optimizers/soap.py`)."""


def rotation_bytes(matrices: Iterable[Tensor]) -> int:
    """Bytes of the covariances and bases of these matrices; of what is no matrix there are none."""
    return sum(
        2 * matrix.element_size() * sum(size**2 for size in matrix.shape if size <= LARGEST)
        for matrix in matrices
        if matrix.ndim == 2
    )


def with_rotations(costs: Costs, graph: nx.DiGraph, optimizer: str) -> Costs:
    """The costs of the graph, with its `rotation_bytes` among the buffers if it is for SOAP."""
    if optimizer != "soap":
        return costs
    kept = {str(group): node.get("rotation_bytes", 0) for group, node in graph.nodes.items()}
    found = np.array([kept[group] for group in costs.groups], dtype=np.float64)
    return replace(costs, buffer_bytes=costs.buffer_bytes + found)
