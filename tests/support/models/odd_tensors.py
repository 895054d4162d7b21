"""Tensors whose numbers differ from the bytes in their memory."""

from __future__ import annotations

import torch
from torch import Tensor


def put_off(base: Tensor) -> list[Tensor]:
    """A column, whose flat form is strided too, and tensors whose conjugation or change of sign
    torch has put off."""
    pairs = torch.complex(base, base)
    return [base[:, 0], pairs.conj(), pairs.conj().imag, torch._neg_view(base)]
