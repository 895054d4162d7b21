"""A model with the shapes of Llama: rotary positions, grouped queries, RMSNorm and SwiGLU.

It needs no other package.
"""

import gpt
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        size = width // heads
        self.norm_1 = nn.RMSNorm(width, eps=1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * size, bias=False)
        self.value = nn.Linear(width, key_heads * size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        size, groups = width // self.heads, self.heads // self.key_heads
        normed = self.norm_1(x)
        query = rotated(self.query(normed).view(batch, tokens, self.heads, size))
        key = rotated(self.key(normed).view(batch, tokens, self.key_heads, size))
        value = self.value(normed).view(batch, tokens, self.key_heads, size)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.repeat_interleave(groups, 2).transpose(1, 2),
            value.repeat_interleave(groups, 2).transpose(1, 2),
            is_causal=True,
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotated(x: Tensor) -> Tensor:
    """Queries or keys [batch, tokens, heads, size], rotated by their positions."""
    half = x.shape[3] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, 10000.0**-exponents)
    cos, sin = angles.cos()[:, None, :].to(x.dtype), angles.sin()[:, None, :].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=3)


class Llama(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, key_heads: int, hidden: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, key_heads, hidden) for _ in range(layers))
        self.ln_f = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tok(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def units(self) -> list[nn.Module]:
        """As those of `gpt.GPT`."""
        return [self.tok, *self.blocks, nn.Sequential(self.ln_f, self.head)]


def build(
    layers: int = 8,
    width: int = 256,
    heads: int = 8,
    key_heads: int = 2,
    hidden: int = 688,
    tokens: int = 128,
    vocabulary: int = 8192,
    micro_batch_size: int = 4,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and one micro-batch of random tokens."""
    model = Llama(layers, width, heads, key_heads, hidden, vocabulary)
    return model, gpt.tokens_of(micro_batch_size, tokens, vocabulary)
