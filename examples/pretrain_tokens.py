"""A small GPT from random weights on your own tokens, without a pipeline flush between the steps.

python examples/pretrain_tokens.py README.md --steps 100

A `.bin` file holds tokens as unsigned 16-bit numbers; any other file is text, a token a byte.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import asyncpipe


def tokens_of(file: Path) -> np.ndarray:
    """The tokens of a file, which are read from disk when they are needed."""
    return np.memmap(file, dtype=np.uint16 if file.suffix == ".bin" else np.uint8, mode="r")


def batches(tokens: np.ndarray, samples: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Windows at random places, without end; a GPT of transformers shifts the labels itself."""
    draw = np.random.default_rng(0)  # alike on all ranks, which read the same batches
    while True:
        starts = draw.integers(len(tokens) - length, size=samples)
        windows = np.stack([tokens[start : start + length] for start in starts])
        ids = torch.from_numpy(windows.astype(np.int64))
        yield {"input_ids": ids, "labels": ids}


def partition(options: argparse.Namespace) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        bos_token_id=None,
        eos_token_id=None,
        vocab_size=options.vocabulary,
        n_positions=options.length,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=4,
    )
    one = torch.zeros(2, options.length, dtype=torch.int64)
    asyncpipe.partition(
        GPT2LMHeadModel(config),
        {"input_ids": one, "labels": one},
        stages=options.ranks,
        schedule="async-1f1b",
        output=options.folder,
        force=True,
    )


def train(options: argparse.Namespace) -> list[float]:
    """The loss of each step; every rank runs this function."""
    pipe = asyncpipe.Pipeline(
        options.folder, schedule="async-1f1b", staleness="stash", micro_batches=4
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.lr)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    stream = batches(tokens_of(options.file), options.samples, options.length)
    losses = []
    for result in pipe.stream(
        stream, optimizer=optimizer, scheduler=scheduler, steps=options.steps
    ):
        losses.append(result.loss)
        if pipe.rank == 0 and result.step % 10 == 0:
            print(f"step {result.step}/{options.steps}  loss {losses[-1]:.4f}", flush=True)
    pipe.save(options.save)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--folder", default="generated_models/tokens")
    parser.add_argument("--save", default="trained_tokens")
    for name, default in {"ranks": 2, "steps": 200, "samples": 16, "length": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {"vocabulary": 256, "width": 128, "layers": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    chosen = parser.parse_args()
    partition(chosen)
    first, *_, last = asyncpipe.launch(train, chosen, ranks=chosen.ranks)[0]
    print(f"loss {first:.4f} -> {last:.4f}; weights in {chosen.save}/weights")
