"""A loop of your own with an optimizer, a schedule and a loss that asyncpipe does not have.

asyncpipe-partition --model examples/residual_mlp.py:build --stages 2
torchrun --standalone --nproc-per-node 2 examples/own_loop.py generated_models/residual_mlp_2p
"""

import sys

import torch
from residual_mlp import data
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

import asyncpipe


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output, target, label_smoothing=0.1)


def main(folder: str, steps: int = 60) -> None:
    train, held_out = data()
    order = torch.Generator().manual_seed(0)  # alike on all ranks, which read the same batches
    with asyncpipe.Pipeline(folder, loss=loss, micro_batches=4) as pipe:
        optimizer = torch.optim.RMSprop(pipe.parameters(), lr=1e-3)
        scheduler = OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps)
        for step in range(1, steps + 1):
            chosen = torch.randint(len(train["target"]), (64,), generator=order)
            batch = {name: column[chosen] for name, column in train.items()}
            result = pipe.step(batch, optimizer=optimizer)
            scheduler.step()
            if pipe.rank == 0 and step % 20 == 0:
                print(f"step {step}  loss {result.loss:.4f}  lr {scheduler.get_last_lr()[0]:.1e}")
        found = pipe.evaluate([held_out])
        if pipe.rank == 0:
            print(f"evaluation  loss {found.loss:.4f}  {found.samples} samples")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
