"""Compares split layers with torch's DTensor: losses, gradients and the time of a step.

An MLP with two products runs on two processes over gloo, once with ColumnLinear and RowLinear and
once as torch.distributed.tensor.parallel makes it of the plain model. Both have the plain model's
weights; steps of both alternate, and medians are compared.

python benchmarks/dtensor.py --rounds 40
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from machine import write_result
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from asyncpipe.runtime.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    TensorRanks,
    parallel_input,
    splits_of,
    using,
)
from asyncpipe.runtime.transports.reductions import GroupCollectives

RANKS = 2
SIZES = ((64, 256, 16), (512, 2048, 64), (1024, 4096, 256))
"""Width, inner width and samples."""


class Plain(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Split(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = ColumnLinear(width, inner), RowLinear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(parallel_input(x))))


def measured(rounds: int) -> list[dict[str, Any]]:
    """The rows of this rank's process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (RANKS,))
    ranks = TensorRanks(rank, RANKS, GroupCollectives())
    rows = []
    for width, inner, samples in SIZES:
        torch.manual_seed(0)
        plain, x = Plain(width, inner), torch.randn(samples, width)
        with using(ranks):
            ours = Split(width, inner)
            splits = splits_of(ours)
            ours.load_state_dict(
                {
                    name: splits[name].part(tensor, rank, RANKS) if name in splits else tensor
                    for name, tensor in plain.state_dict().items()
                }
            )
            theirs = Plain(width, inner)
            theirs.load_state_dict(plain.state_dict())
            parallelize_module(theirs, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            steps: dict[str, Callable[[], Tensor]] = {
                "ours": lambda model=ours, x=x: step(model, x),
                "dtensor": lambda model=theirs, x=x: step(model, x),
            }
            losses = {name: float(run()) for name, run in steps.items()}
            difference = largest_difference(ours, theirs, splits, rank)
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(rounds):
                for name, run in steps.items():
                    dist.barrier()
                    start = time.perf_counter()
                    run()
                    times[name].append(1000 * (time.perf_counter() - start))
        plain_loss = float(step(plain, x))
        medians = {f"{name}_ms": statistics.median(own) for name, own in times.items()}
        rows.append(
            {
                "width": width,
                "inner": inner,
                "samples": samples,
                "loss_differences": [abs(own - plain_loss) for own in losses.values()],
                "gradient_difference": difference,
                **medians,
                "ratio": medians["ours_ms"] / medians["dtensor_ms"],
            }
        )
    dist.destroy_process_group()
    return rows


def step(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def largest_difference(ours: nn.Module, theirs: nn.Module, splits: Any, rank: int) -> float:
    """The largest difference of our gradients from DTensor's, relative to the largest gradient."""
    found = []
    for (name, own), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        whole = other.grad.full_tensor() if isinstance(other.grad, DTensor) else other.grad
        part = splits[name].part(whole, rank, RANKS) if name in splits else whole
        found.append(float((own.grad - part).abs().max() / whole.abs().max()))
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        print(json.dumps(measured(given.rounds)), flush=True)
        return
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    words += ["--local-ranks-filter", "0", __file__, "--rank", "--rounds", str(given.rounds)]
    done = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True)
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    for row in rows:
        print(row)
    write_result("dtensor", {"rows": rows})


if __name__ == "__main__":
    main()
