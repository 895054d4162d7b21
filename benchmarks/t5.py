"""A model with the shapes of T5: an encoder and a decoder that reads it, relative positions.

It needs no other package. Both stacks travel together from stage to stage, since the decoder's
tokens are embedded where the encoder's are.
"""

import gpt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BUCKETS = 32


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.bias = nn.Embedding(2 * BUCKETS, heads)

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        size = width // self.heads
        query = self.query(x).view(batch, tokens, self.heads, size).transpose(1, 2)
        pair = self.key_value(read).view(batch, read.shape[1], 2, self.heads, size)
        key, value = pair.permute(2, 0, 3, 1, 4).unbind(0)
        places = torch.arange(read.shape[1], device=x.device)
        apart = places[None, :] - torch.arange(tokens, device=x.device)[:, None]
        bias = self.bias(apart.clamp(-BUCKETS, BUCKETS - 1) + BUCKETS).permute(2, 0, 1)
        if self.causal:
            bias = bias.masked_fill(apart > 0, float("-inf"))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    """Attention to itself, and to what another stack has made if `reads`, and a feed-forward
    part."""

    def __init__(self, width: int, heads: int, *, reads: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(2 + reads))
        self.own = Attention(width, heads, causal=reads)
        self.cross = Attention(width, heads, causal=False) if reads else None
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.own(normed, normed)
        if self.cross is not None and encoded is not None:
            x = x + self.cross(self.norms[2](x), encoded)
        return x + self.down(F.relu(self.up(self.norms[1](x))))


class T5(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(Layer(width, heads, reads=False) for _ in range(layers))
        self.encoder_norm = nn.RMSNorm(width, eps=1e-6)
        self.decoder = nn.ModuleList(Layer(width, heads, reads=True) for _ in range(layers))
        self.decoder_norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = y = self.tok(input_ids)
        for layer in self.encoder:
            x = layer(x)
        x = self.encoder_norm(x)
        for layer in self.decoder:
            y = layer(y, x)
        logits = self.head(self.decoder_norm(y))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def units(self) -> list[nn.Module]:
        """As those of `gpt.GPT`, with both stacks between them."""
        encoding = [Encoding(layer) for layer in self.encoder]
        decoding = [Decoding(layer) for layer in self.decoder]
        head = Ending(self.decoder_norm, self.head)
        return [Beginning(self.tok), *encoding, Encoding(self.encoder_norm), *decoding, head]


class Beginning(nn.Module):
    def __init__(self, tok: nn.Embedding) -> None:
        super().__init__()
        self.tok = tok

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tok(input_ids)
        return x, x.clone()


class Encoding(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), y


class Decoding(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.layer(y, x)


class Ending(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(y))
        return logits


def build(
    layers: int = 4,
    width: int = 256,
    heads: int = 8,
    tokens: int = 128,
    vocabulary: int = 8192,
    micro_batch_size: int = 4,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and one micro-batch of random tokens."""
    model = T5(layers, width, heads, vocabulary)
    return model, gpt.tokens_of(micro_batch_size, tokens, vocabulary)
