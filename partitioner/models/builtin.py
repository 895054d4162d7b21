"""The models that `--model` knows by name, without a network.

`BUILTIN` has small models written here: the teaching MLP, ResNet and wide ResNet for images.
`PRESETS` has published configurations: a transformers model class and the fields of its
configuration that differ from the defaults. Their sizes are those of the papers and of the
checkpoints of that name.

`configuration_arguments` turns a transformers configuration back into the keyword arguments that
make an equal one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """The teaching example: linear layers without bias, tanh between them."""

    def __init__(
        self, num_layers: int = 4, dim_in: int = 1024, dim_hidden: int = 256, num_classes: int = 32
    ) -> None:
        super().__init__()
        dims = [dim_in, *[dim_hidden] * (num_layers - 1), num_classes]
        layers = [
            nn.Linear(before, after, bias=False)
            for before, after in zip(dims, dims[1:], strict=False)
        ]
        for layer in layers:
            nn.init.kaiming_uniform_(layer.weight)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        logits: Tensor = self.layers[-1](x)
        return logits


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a skip (He et al. 2016, figure 5 right)."""

    expansion = 4

    def __init__(self, planes_in: int, planes: int, stride: int, width: int) -> None:
        super().__init__()
        inner = planes * width
        planes_out = planes * self.expansion
        self.conv1 = nn.Conv2d(planes_in, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, planes_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(planes_in, planes_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        activated: Tensor = self.relu(out)
        return activated


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a skip (He et al. 2016, figure 5 left)."""

    expansion = 1

    def __init__(self, planes_in: int, planes: int, stride: int, width: int) -> None:
        super().__init__()
        planes_out = planes * width
        self.conv1 = nn.Conv2d(planes_in, planes_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes_out)
        self.conv2 = nn.Conv2d(planes_out, planes_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(planes_in, planes_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        activated: Tensor = self.relu(out)
        return activated


class ResNet(nn.Module):
    """Residual network for images; returns the loss and the logits.

    `width` widens the inner convolutions (Zagoruyko & Komodakis 2016). `stem="image"` halves the
    picture twice before the blocks (ImageNet), `stem="small"` keeps its size (CIFAR, digits).
    """

    def __init__(
        self,
        blocks: tuple[int, ...] = (3, 4, 6, 3),
        planes: tuple[int, ...] = (64, 128, 256, 512),
        block: str = "bottleneck",
        width: int = 1,
        stem: str = "image",
        num_classes: int = 1000,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        kind: type[Bottleneck] | type[BasicBlock] = BasicBlock if block == "basic" else Bottleneck
        first = planes[0] if stem == "image" else 16
        self.conv1 = (
            nn.Conv2d(in_channels, first, 7, stride=2, padding=3, bias=False)
            if stem == "image"
            else nn.Conv2d(in_channels, first, 3, padding=1, bias=False)
        )
        self.bn1 = nn.BatchNorm2d(first)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stem == "image" else None
        layers = []
        planes_in = first
        for index, (count, size) in enumerate(zip(blocks, planes, strict=True)):
            layer = []
            for number in range(count):
                stride = 2 if number == 0 and index > 0 else 1
                layer.append(kind(planes_in, size, stride, width))
                planes_in = size * (kind.expansion if block == "bottleneck" else width)
            layers.append(nn.Sequential(*layer))
        self.layers = nn.ModuleList(layers)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(planes_in, num_classes)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.relu(self.bn1(self.conv1(pixel_values)))
        if self.maxpool is not None:
            x = self.maxpool(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.fc(torch.flatten(self.avgpool(x), 1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _downsample(planes_in: int, planes_out: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and planes_in == planes_out:
        return None
    return nn.Sequential(
        nn.Conv2d(planes_in, planes_out, 1, stride=stride, bias=False),
        nn.BatchNorm2d(planes_out),
    )


def resnet18(**fields: object) -> ResNet:
    return ResNet(**({"blocks": (2, 2, 2, 2), "block": "basic"} | fields))  # type: ignore[arg-type]


def resnet50(**fields: object) -> ResNet:
    return ResNet(**fields)  # type: ignore[arg-type]


def wide_resnet50(**fields: object) -> ResNet:
    return ResNet(**({"width": 2} | fields))  # type: ignore[arg-type]


def wide_resnet28(**fields: object) -> ResNet:
    """WRN-28-10 for 32x32 pictures (Zagoruyko & Komodakis 2016, table 4)."""
    sizes = {"blocks": (4, 4, 4), "planes": (16, 32, 64), "block": "basic", "width": 10}
    return ResNet(**(sizes | {"stem": "small", "num_classes": 10} | fields))  # type: ignore[arg-type]


BUILTIN: Mapping[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "wide-resnet50": wide_resnet50,
    "wide-resnet28-10": wide_resnet28,
}


@dataclass(frozen=True, slots=True)
class Preset:
    """A published model of transformers.

    model_class: name of the model's class
    config_class: name of its configuration's class
    fields: the fields of the configuration that differ from the defaults
    """

    model_class: str
    config_class: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def _gpt2(layers: int, width: int, heads: int) -> Preset:
    fields = {"n_layer": layers, "n_embd": width, "n_head": heads}
    return Preset("GPT2LMHeadModel", "GPT2Config", fields)


def _encoder(family: str, layers: int, width: int, heads: int, **fields: Any) -> Preset:
    head = "ForMaskedLM"
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    return Preset(family + head, family + "Config", sizes | fields)


def _t5(layers: int, width: int, heads: int, hidden: int, key: int = 64) -> Preset:
    fields = {
        "num_layers": layers,
        "num_decoder_layers": layers,
        "d_model": width,
        "num_heads": heads,
        "d_ff": hidden,
        "d_kv": key,
        "decoder_start_token_id": 0,
    }
    return Preset("T5ForConditionalGeneration", "T5Config", fields)


def _vit(layers: int, width: int, heads: int) -> Preset:
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "num_labels": 1000,
    }
    return Preset("ViTForImageClassification", "ViTConfig", fields)


def _llama(
    layers: int, width: int, heads: int, key_value_heads: int, hidden: int, vocabulary: int = 32000
) -> Preset:
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "intermediate_size": hidden,
        "vocab_size": vocabulary,
    }
    return Preset("LlamaForCausalLM", "LlamaConfig", fields)


_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}

PRESETS: Mapping[str, Preset] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "bert-base-uncased": _encoder("Bert", 12, 768, 12),
    "bert-large-uncased": _encoder("Bert", 24, 1024, 16),
    "roberta-base": _encoder("Roberta", 12, 768, 12, **_ROBERTA),
    "roberta-large": _encoder("Roberta", 24, 1024, 16, **_ROBERTA),
    "t5-small": _t5(6, 512, 8, 2048),
    "t5-base": _t5(12, 768, 12, 3072),
    "t5-large": _t5(24, 1024, 16, 4096),
    "t5-3b": _t5(24, 1024, 32, 16384, 128),
    "t5-11b": _t5(24, 1024, 128, 65536, 128),
    "vit-base": _vit(12, 768, 12),
    "vit-large": _vit(24, 1024, 16),
    "llama-1b": _llama(22, 2048, 32, 4, 5632),
    "llama-7b": _llama(32, 4096, 32, 32, 11008),
    "llama-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-13b": _llama(40, 5120, 40, 40, 13824),
    "llama-70b": _llama(80, 8192, 64, 8, 28672, 128256),
}


# Fields that describe the whole model and that no layer reads.
_OF_THE_MODEL = frozenset(
    {"architectures", "transformers_version", "name_or_path", "id2label", "label2id", "dtype"}
    | {"problem_type", "tokenizer_class", "use_cache", "return_dict", "finetuning_task"}
)
_SWITCHES = {
    "_attn_implementation_internal": "attn_implementation",
    "_experts_implementation_internal": "experts_implementation",
}


def is_configuration(value: Any) -> bool:
    """True if a value is a transformers configuration; works without importing transformers."""
    return hasattr(value, "to_diff_dict") and not isinstance(value, (type, nn.Module))


def configuration_arguments(configuration: Any) -> dict[str, Any] | None:
    """The fields that differ from the class's defaults; None if the class makes another
    configuration from them."""
    kind = type(configuration)
    wanted = _fields(configuration)
    try:
        plain = _fields(kind())
        known = {name: value for name, value in wanted.items() if name in plain}
        for fields in (wanted, known):
            # A field that the class does not define may be an older name of one that it does.
            changed = {
                name: value
                for name, value in fields.items()
                if name not in plain or not _is_same(plain[name], value)
            }
            rebuilt = _fields(kind(**changed))
            if all(name in rebuilt and _is_same(rebuilt[name], fields[name]) for name in fields):
                return changed
    except Exception:
        # Any error of a constructor only means that these arguments do not work.
        return None
    return None


def configurations_around(model: nn.Module, path: str) -> Iterator[Any]:
    """The configurations that a module may have been made from.

    They are the attributes of the module and of the modules around it, the innermost first, each
    followed by the configurations inside it.
    """
    names = path.split(".")
    seen: set[int] = set()
    waiting: list[Any] = []
    for length in range(len(names), -1, -1):
        around = model.get_submodule(".".join(names[:length]))
        waiting += [value for value in vars(around).values() if is_configuration(value)]
        while waiting:
            candidate = waiting.pop(0)
            if id(candidate) not in seen:
                seen.add(id(candidate))
                yield candidate
                waiting += [value for value in vars(candidate).values() if is_configuration(value)]


def is_asked_for(parameter: inspect.Parameter) -> bool:
    """True if the name or annotation of a constructor's parameter is that of a configuration."""
    return "config" in parameter.name.lower() or "Config" in str(parameter.annotation)


def _fields(configuration: Any) -> Mapping[str, Any]:
    return {
        _SWITCHES.get(name, name): value
        for name, value in vars(configuration).items()
        if (name in _SWITCHES or not name.startswith("_")) and name not in _OF_THE_MODEL
    }


def _is_same(first: Any, other: Any) -> bool:
    if is_configuration(first) and is_configuration(other):
        return type(first) is type(other) and _fields(first) == _fields(other)
    return type(first) is type(other) and bool(first == other)
