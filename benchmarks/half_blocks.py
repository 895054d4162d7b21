"""The models of the convergence benchmark: small, with many places to cut.

A GPT whose residual half-blocks, alternately attention and MLP, are modules of one list, so that
each can be a stage; and a residual MLP on images of digits. Neither ties weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """x + attention(norm(x)), causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    """x + mlp(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class HalfBlocks(nn.Module):
    """A byte-level GPT, pre-LN, with an untied head."""

    def __init__(self, halves: int, width: int, heads: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.halves = nn.ModuleList(
            Mlp(width) if half % 2 else Attention(width, heads) for half in range(halves)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token(input_ids) + self.position(positions)
        for half in self.halves:
            x = half(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def text(
    halves: int = 8,
    width: int = 32,
    heads: int = 4,
    tokens: int = 64,
    vocabulary: int = 128,
    seed: int = 0,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The GPT, and one sequence."""
    torch.manual_seed(seed)
    model = HalfBlocks(halves, width, heads, tokens, vocabulary)
    ids = torch.randint(vocabulary, (2, tokens))
    return model, {"input_ids": ids, "labels": ids}


def large(halves: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    """The GPT with 1.3 M parameters."""
    return text(halves, width=160)


class Digits(nn.Module):
    """A residual MLP of images."""

    def __init__(self, halves: int, width: int) -> None:
        super().__init__()
        self.embedded = nn.Linear(64, width)
        self.halves = nn.ModuleList(Mlp(width) for _ in range(halves))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedded(pixel_values.flatten(1))
        for half in self.halves:
            x = half(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def digits(halves: int = 8, width: int = 48, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """The residual MLP, and two images."""
    torch.manual_seed(seed)
    images = torch.randn(2, 1, 8, 8)
    return Digits(halves, width), {"pixel_values": images, "labels": torch.tensor([0, 1])}
