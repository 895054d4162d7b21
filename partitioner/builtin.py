"""Small models of our own: the teaching MLP, ResNet and wide ResNet for images."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    """Residual network for images; with labels it returns its loss too.

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
