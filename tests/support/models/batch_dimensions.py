"""Models with inputs whose samples are in other dimensions than 0, and their example inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GraphConvolution(nn.Module):
    """Messages along edges, as in torch_geometric's GCNConv: gathered, weighted, scattered."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if edge_index.size(0) != 2:
            raise ValueError(f"edges are pairs, not {edge_index.size(0)}")
        loops = torch.arange(x.size(0), device=x.device)
        edges = torch.cat([edge_index, torch.stack([loops, loops])], dim=1)
        row, col = edges
        degree = x.new_zeros(x.size(0)).index_add(0, col, x.new_ones(col.size(0)))
        norm = degree.pow(-0.5)
        messages = self.linear(x)[row] * (norm[row] * norm[col]).unsqueeze(-1)
        return x.new_zeros(x.size(0), messages.size(1)).index_add(0, col, messages)


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = GraphConvolution(5, 8), GraphConvolution(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(torch.relu(self.first(x, edge_index)), 0.5, self.training)
        return self.last(x, edge_index)


class DenseGraphAttention(nn.Module):
    """As pyGAT: a softmax over an adjacency of all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.score = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        hidden = self.first(x)
        scores = self.score(hidden) + self.score(hidden).T
        attention = torch.where(adjacency > 0, scores, -9e15 * torch.ones_like(scores))
        return self.last(F.elu(F.softmax(attention, dim=1) @ hidden))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.rnn = kind(8, 6, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, hidden: Any) -> Any:
        out, hidden = self.rnn(self.embed(x), hidden)
        return self.head(out), hidden


class WordModel(nn.Module):
    """As torch's word_language_model: tokens time first, and a hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.rnn = nn.LSTM(8, 6, 2)
        self.decoder = nn.Linear(6, 31)

    def forward(self, tokens: Tensor, hidden: tuple[Tensor, Tensor]) -> Any:
        out, hidden = self.rnn(self.embed(tokens), hidden)
        return F.log_softmax(self.decoder(out).view(-1, 31), dim=1), hidden


class TimeFirst(nn.Module):
    """A transformer of torch, whose default is time first, and a causal mask made from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1) for _ in range(2)]
        )
        self.head = nn.Linear(8, 3)

    def forward(self, src: Tensor) -> Tensor:
        hidden = self.embed(src)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class OneState(nn.Module):
    """One state at a time, as in reinforcement learning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, state: Tensor) -> Tensor:
        return F.softmax(self.net(state), dim=-1)


class Bags(nn.Module):
    """Flat text with offsets, which are sorted and below its length."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(29, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(text, offsets))


class Tagger(nn.Module):
    """A loop over the tokens, as in a CRF: scores are floats, tags and mask are not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.moves = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        emissions = self.scale(emissions)
        score = emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for step in range(1, emissions.size(1)):
            move = self.moves[tags[:, step - 1], tags[:, step]]
            here = emissions[:, step].gather(1, tags[:, step : step + 1]).squeeze(1)
            score = score + (move + here) * mask[:, step]
        return score


class Shared(nn.Module):
    """Features of sensors, and one graph of them for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        hidden = torch.einsum("nm,bmf->bnf", adjacency, self.first(x))
        return self.last(torch.relu(hidden))


def edges(nodes: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(nodes, (2, count), generator=generator)


def example(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    hidden = torch.randn(2, 4, 6)
    match name:
        case "graph":
            return GraphNetwork(), {"x": torch.randn(9, 5), "edge_index": edges(9, 20)}
        case "dense_graph":
            adjacency = (torch.rand(9, 9) > 0.5).float()
            return DenseGraphAttention(), {"x": torch.randn(9, 5), "adjacency": adjacency}
        case "gru_batch_first":
            return Recurrent(nn.GRU, True), {"x": torch.randn(4, 3, 5), "hidden": hidden}
        case "gru_time_first":
            return Recurrent(nn.GRU, False), {"x": torch.randn(3, 4, 5), "hidden": hidden}
        case "gru_equal_sizes":
            return Recurrent(nn.GRU, True), {"x": torch.randn(2, 3, 5), "hidden": hidden[:, :2]}
        case "lstm_batch_first":
            x = torch.randn(4, 3, 5)
            return Recurrent(nn.LSTM, True), {"x": x, "hidden": (hidden, hidden + 1)}
        case "word_model":
            tokens = torch.randint(31, (3, 4))
            return WordModel(), {"tokens": tokens, "hidden": (hidden, hidden + 1)}
        case "time_first":
            return TimeFirst(), {"src": torch.randn(7, 4, 5)}
        case "one_state":
            return OneState(), {"state": torch.randn(12)}
        case "bags":
            offsets = torch.tensor([0, 4, 9, 12])
            return Bags(), {"text": torch.arange(15) % 29, "offsets": offsets}
        case "tagger":
            ids, mask = torch.randint(8, (4, 7)), torch.rand(4, 7) > 0.3
            return Tagger(), {"emissions": torch.randn(4, 7, 8), "tags": ids, "mask": mask}
        case "shared":
            return Shared(), {"x": torch.randn(4, 6, 5), "adjacency": torch.randn(6, 6)}
    raise KeyError(name)
