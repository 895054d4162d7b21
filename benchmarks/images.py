"""Models of images with the shapes of ResNet and of ViT; they need no other package."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, SIZE = 100, 64


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outside)
        self.conv_2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outside)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            shorter = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.around = nn.Sequential(shorter, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        within = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(within)) + self.around(x))


class ResNet(nn.Module):
    """ResNet-18 (He et al., CVPR 2016, table 1) with a stem for small images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU())
        shapes = [(width << max(0, n - 1), width << n, 1 + (n > 0)) for n in range(4)]
        self.blocks = nn.ModuleList()
        for inside, outside, stride in shapes:
            self.blocks.append(Residual(inside, outside, stride))
            self.blocks.append(Residual(outside, outside, 1))
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(pool, nn.Linear(width << 3, CLASSES))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def units(self) -> list[nn.Module]:
        """As those of `gpt.GPT`."""
        return [self.stem, *self.blocks, self.head]


class Patches(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 1 + (SIZE // patch) ** 2, width))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv(images).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(patches), -1, -1), patches], dim=1) + self.pos


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(x[:, 0]))
        return logits


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al., ICLR 2021) of torch's encoder layers."""

    def __init__(self, layers: int, width: int, heads: int, patch: int) -> None:
        super().__init__()
        self.patches = Patches(width, patch)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = Head(width)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.patches(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def units(self) -> list[nn.Module]:
        """As those of `gpt.GPT`."""
        return [self.patches, *self.blocks, self.head]


def images_of(samples: int) -> dict[str, Tensor]:
    """Random images [samples, 3, SIZE, SIZE] and classes."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 3, SIZE, SIZE, generator=generator)
    return {"input_ids": images, "labels": torch.randint(CLASSES, (samples,), generator=generator)}


def resnet(width: int = 32, micro_batch_size: int = 4) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and one micro-batch."""
    return ResNet(width), images_of(micro_batch_size)


def vit(
    layers: int = 8, width: int = 256, heads: int = 8, patch: int = 8, micro_batch_size: int = 4
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and one micro-batch."""
    return ViT(layers, width, heads, patch), images_of(micro_batch_size)
