"""The same model trained with torch's own tools: plain, with DDP, and with its pipeline schedules.

torch leaves the cuts to the user, so it gets the best ones between blocks by measured costs
(`cut_units`), for each placement of stages on ranks; it also gets the loss as a function outside
the model, as its schedules require.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], Any]
Batch = Sequence[dict[str, Tensor]]

TORCH = {
    # name: class, stages per rank, whether stages are placed in a V
    "torch GPipe": ("GPipe", 1, False),
    "torch 1F1B": ("1F1B", 1, False),
    "torch ZB-H1": ("InterleavedZeroBubble", 1, False),
    "torch Interleaved1F1B": ("Interleaved1F1B", 2, False),
    "torch LoopedBFS": ("LoopedBFS", 2, False),
    "torch InterleavedZeroBubble": ("InterleavedZeroBubble", 2, False),
    "torch ZBVZeroBubble": ("ZBVZeroBubble", 2, True),
    "torch DualPipeV": ("DualPipeV", 2, True),
}


class Row(nn.Module):
    """Units one after the other; what lies between two of them may be several tensors."""

    def __init__(self, units: Sequence[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, *given: Tensor) -> Any:
        for unit in self.units:
            made = unit(*given)
            given = made if isinstance(made, tuple) else (made,)
        return made


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def plain(model: Any, batch: Batch, step_every: int | None = None) -> Step:
    """The plain model, one micro-batch after the other, with a step at the end or `step_every`."""
    optimizer = optimizer_of(model.parameters())
    every = step_every or len(batch)

    def step() -> None:
        for first in range(0, len(batch), every):
            optimizer.zero_grad(set_to_none=True)
            for inputs in batch[first : first + every]:
                (model(**inputs)["loss"] / every).backward()
            optimizer.step()

    return step


def data_parallel(model: Any, batch: Batch, rank: int, ranks: int) -> Step:
    """torch's DistributedDataParallel: each rank takes its share of the micro-batches."""
    replica = DistributedDataParallel(model)
    optimizer = optimizer_of(replica.parameters())
    mine = batch[rank::ranks]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for number, inputs in enumerate(mine):
            replica.require_backward_grad_sync = number == len(mine) - 1
            (replica(**inputs)["loss"] / len(mine)).backward()
        optimizer.step()

    return step


def unit_costs(model: Any, inputs: dict[str, Tensor], rounds: int = 5) -> list[float]:
    """Seconds of forward and backward of each unit for one micro-batch: the minimum of several
    runs."""
    units = model.units()
    least = [float("inf")] * len(units)
    for _ in range(rounds):
        values: tuple[Tensor, ...] = (inputs["input_ids"],)
        for number, unit in enumerate(units):
            finish(values[0].device)
            start = time.perf_counter()
            made = unit(*(value.detach().requires_grad_(number > 0) for value in values))
            results = made if isinstance(made, tuple) else (made,)
            if number == len(units) - 1:
                loss_of(made, inputs["labels"]).backward()
            else:
                torch.autograd.backward(results, [*map(torch.ones_like, results)])
            finish(values[0].device)
            least[number] = min(least[number], time.perf_counter() - start)
            values = tuple(result.detach() for result in results)
    model.zero_grad(set_to_none=True)
    return least


def finish(device: torch.device) -> None:
    """Waits for a GPU's work, so that a clock counts it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cut_units(costs: Sequence[float], ranks: int, each: int, v_shaped: bool) -> list[int]:
    """The cuts that minimize the busiest rank, then the slowest stage."""
    stages = ranks * each
    best: tuple[tuple[float, float], list[int]] | None = None
    for inner in itertools.combinations(range(1, len(costs)), stages - 1):
        edges = [0, *inner, len(costs)]
        of_stage = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
        of_rank = [0.0] * ranks
        for stage, cost in enumerate(of_stage):
            of_rank[rank_of(stage, ranks, v_shaped)] += cost
        score = (round(max(of_rank), 4), max(of_stage))
        if best is None or score < best[0]:
            best = (score, edges)
    assert best is not None
    return best[1]


def names_cut_before(edges: Sequence[int], units: int) -> list[str]:
    """The `--cut-at` names that give our planner the same cuts."""
    return ["ln_f" if edge == units - 1 else f"blocks.{edge - 1}" for edge in edges[1:-1]]


def rank_of(stage: int, ranks: int, v_shaped: bool) -> int:
    """The rank of each stage: round-robin, or down the ranks and up again."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if v_shaped and turn % 2 else place


def pipelined(
    model: Any, batch: Batch, rank: int, ranks: int, name: str, costs: Sequence[float]
) -> Step:
    """One of torch's schedules over the best cuts between units."""
    kind, each, v_shaped = TORCH[name]
    edges = cut_units(costs, ranks, each, v_shaped)
    units, count = model.units(), ranks * each
    mine = [stage for stage in range(count) if rank_of(stage, ranks, v_shaped) == rank]
    stages = [
        PipelineStage(
            Row(units[edges[stage] : edges[stage + 1]]),
            stage,
            count,
            batch[0]["input_ids"].device,
        )
        for stage in mine
    ]
    optimizer = optimizer_of([p for stage in stages for p in stage.submod.parameters()])
    make = schedules.get_schedule_class(kind)
    multiple = issubclass(make, schedules.PipelineScheduleMulti)
    schedule = make(stages if multiple else stages[0], len(batch), loss_fn=loss_of)
    ids = torch.cat([inputs["input_ids"] for inputs in batch])
    labels = torch.cat([inputs["labels"] for inputs in batch])
    arguments = (ids,) if 0 in mine else ()
    target = {"target": labels} if count - 1 in mine else {}

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        schedule.step(*arguments, **target, return_outputs=False)
        optimizer.step()

    return step


def is_possible(name: str, ranks: int, micro_batches: int, units: int) -> bool:
    """True if torch has the schedule for these ranks and micro-batches, and the model has so many
    units."""
    kind, each, _ = TORCH[name]
    least = 2 * ranks if kind == "DualPipeV" else ranks
    return micro_batches >= least and ranks * each <= units
