"""Small models of every kind that a user may bring, each with inputs that it takes.

A function of no arguments makes a model of random weights and its example inputs; `ZOO` has all
of them by name. Models are made from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Example = tuple[nn.Module, dict[str, Any]]
BATCH, SEQUENCE, WORDS = 4, 11, 97


def _tokens(length: int = SEQUENCE) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, WORDS, (BATCH, length), generator=generator)


def _images(size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size, generator=torch.Generator().manual_seed(2))


def _classes(count: int) -> Tensor:
    return torch.arange(BATCH) % count


def gpt2() -> Example:
    """Tied embeddings, a loss from labels, dropout in attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=3, n_head=4)
    tokens = _tokens()
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def gpt2_eager() -> Example:
    """GPT-2 with attention written out."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=4,
        attn_implementation="eager",
    )  # fmt: skip
    tokens = _tokens()
    return GPT2LMHeadModel(config), {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens,
    }  # fmt: skip


def bert() -> Example:
    """Classification of sequences with a mask that hides padding."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    mask[1, 8:] = 0
    return BertForSequenceClassification(config), {
        "input_ids": _tokens(), "attention_mask": mask, "labels": _classes(3),
    }  # fmt: skip


def t5(decoder_layers: int = 2, encoder_layers: int = 2) -> Example:
    """Encoder and decoder, one embedding for three places, labels of another length."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=encoder_layers,
        num_decoder_layers=decoder_layers, num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), {"input_ids": _tokens(), "labels": _tokens(7)}


def llama() -> Example:
    """Rotary positions under no_grad and a switched-off autocast; grouped key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        attention_dropout=0.1,
    )  # fmt: skip
    tokens = _tokens()
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def mixtral() -> Example:
    """A mixture of experts: a router, tokens sorted by expert, one product for all experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=64,
    )  # fmt: skip
    tokens = _tokens()
    return MixtralForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def vit() -> Example:
    """Patches of images, a class token."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=4, num_labels=5,
    )  # fmt: skip
    return ViTForImageClassification(config), {"pixel_values": _images(), "labels": _classes(5)}


def hf_resnet() -> Example:
    """BatchNorm and in-place ReLU as transformers writes them."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5
    )
    return ResNetForImageClassification(config), {
        "pixel_values": _images(32), "labels": _classes(5),
    }  # fmt: skip


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(h))


class ResidualMLP(nn.Module):
    """A multi-layer perceptron with residual blocks in an nn.Sequential."""

    def __init__(self, width: int = 24, depth: int = 3, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(12, width)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.embed(x))))


def mlp() -> Example:
    torch.manual_seed(0)
    return ResidualMLP(), {"x": torch.randn(BATCH, 12)}


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """The residual network of torchvision in small: in-place ReLU, `out += identity`, BatchNorm."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet() -> Example:
    torch.manual_seed(0)
    return ResNet(), {"x": _images()}


class Branches(nn.Module):
    """A dict of outputs, skips over blocks, buffers that are read and changed, changed views, a
    tuple between modules, functional dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.split = TwoWays(width)
        self.leave = nn.Linear(width, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("mean", torch.zeros(width), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.table = torch.linspace(-1, 1, width)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        early = self.enter(x) * self.scale
        hidden = F.dropout(torch.tanh(self.left(early)), 0.2, self.training)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        low, high = self.split(hidden - self.mean)
        joined = torch.cat([low, high], dim=-1) + self.table
        head = joined[:, :4]
        head.mul_(2)
        joined[:, 5] = 0
        hidden = self.right(joined) + early
        logits = self.leave(hidden)
        return {"loss": F.cross_entropy(logits, target), "logits": logits, "hidden": hidden}


class TwoWays(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.gate(x).chunk(2, dim=-1)
        return low.sigmoid(), high.relu()


def branches() -> Example:
    torch.manual_seed(0)
    return Branches(), {"x": torch.randn(BATCH, 8), "target": _classes(3)}


ZOO: dict[str, Callable[[], Example]] = {
    "gpt2": gpt2, "gpt2_eager": gpt2_eager, "bert": bert, "t5": t5, "llama": llama, "vit": vit,
    "hf_resnet": hf_resnet, "mlp": mlp, "resnet": resnet, "branches": branches,
}  # fmt: skip
