"""The model of the runtime benchmarks: a GPT of 8 blocks, width 256 and 10.5 M parameters.

Its untied vocabulary of 8192 makes the head heavy, so that an even split is not balanced.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.ln_1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Embedding(nn.Module):
    def __init__(self, tok: nn.Embedding, pos: nn.Embedding) -> None:
        super().__init__()
        self.tok, self.pos = tok, pos

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        embedded: Tensor = self.tok(input_ids) + self.pos(positions)
        return embedded


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.pos = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tok(input_ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def units(self) -> list[nn.Module]:
        """Modules in a row, the first of the tokens, the last to the logits: one may cut between
        them."""
        first = Embedding(self.tok, self.pos)
        return [first, *self.blocks, nn.Sequential(self.ln_f, self.head)]


def build(
    layers: int = 8,
    width: int = 256,
    heads: int = 8,
    tokens: int = 128,
    vocabulary: int = 8192,
    micro_batch_size: int = 4,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and one micro-batch of random tokens."""
    model = GPT(layers, width, heads, tokens, vocabulary)
    return model, tokens_of(micro_batch_size, tokens, vocabulary)


def tokens_of(samples: int, tokens: int = 128, vocabulary: int = 8192) -> dict[str, Tensor]:
    """Random tokens, and the next token of each as labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (samples, tokens + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
