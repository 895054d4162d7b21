"""A vision transformer on images from a DataLoader, with augmentation.

pip install scikit-learn
python examples/vit_dataloader.py --epochs 8 --workers 1
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

import asyncpipe


class ViT(nn.Module):
    """Images [batch, 1, 8, 8] -> logits [batch, 10], over 16 patches of 2 x 2 pixels."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.places = nn.Parameter(torch.randn(1, 16, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, 4, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True
                )
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class Digits(Dataset):
    """Handwritten digits; those for training are shifted and get noise, other ones each epoch."""

    def __init__(self, *, is_training: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        chosen = (torch.arange(len(labels)) % 5 != 0) == is_training
        self.images = torch.tensor(images, dtype=torch.float32)[chosen].reshape(-1, 1, 8, 8) / 8 - 1
        self.labels = torch.tensor(labels)[chosen]
        self.is_training, self.epoch = is_training, 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.is_training:
            # Of the sample alone: ranks and workers whose own generators differ augment alike.
            draw = torch.Generator().manual_seed(self.epoch * len(self) + index)
            down, right = torch.randint(-1, 2, (2,), generator=draw).tolist()
            image = image.roll((down, right), (1, 2))
            image = image + 0.1 * torch.randn(image.shape, generator=draw)
        return image, self.labels[index]


def train(folder: str, epochs: int, lr: float, workers: int) -> float | None:
    """The accuracy after training, on the rank that makes the logits."""
    data, held_out = Digits(is_training=True), Digits(is_training=False)
    order = torch.Generator().manual_seed(0)  # alike on all ranks
    loader = DataLoader(
        data, 32, shuffle=True, drop_last=True, generator=order, num_workers=workers
    )
    test_loader = DataLoader(held_out, 128)
    pipe = asyncpipe.Pipeline(folder, loss="cross_entropy", micro_batches=4, clip=1.0)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=lr)
    scheduler = OneCycleLR(optimizer, lr, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        data.epoch = epoch
        for images, labels in loader:
            result = pipe.step((images, labels), optimizer=optimizer)
            scheduler.step()
        found = pipe.evaluate(test_loader)
        if pipe.rank == 0:
            print(f"epoch {epoch + 1}  loss {result.loss:.4f}  evaluation {found.loss:.4f}")
    right = [
        (logits.argmax(1) == labels).sum().item()
        for (_, labels), logits in zip(test_loader, pipe.predict(test_loader), strict=True)
        if logits is not None
    ]
    return sum(right) / len(held_out) if right else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="generated_models/vit")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=0)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    model = ViT(chosen.width, chosen.depth)
    images = torch.zeros(16, 1, 8, 8)
    asyncpipe.partition(model, images, stages=2, output=chosen.folder, force=True)
    options = (chosen.folder, chosen.epochs, chosen.lr, chosen.workers)
    _, accuracy = asyncpipe.launch(train, *options, ranks=2)
    print(f"accuracy {accuracy:.1%}")
