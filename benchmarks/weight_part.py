"""The part of a backward that can be deferred: by the planner, and as measured in a run.

    python benchmarks/weight_part.py

A model of one stage trains with every backward split into B and W. The share of W is compared with
the planner's: measured with each operation, and by the rule that half of a product's backward
belongs to its weight.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import gpt
import torch
from machine import write_result
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.models.builtin import ResNet
from asyncpipe.partitioner.profile.operation_costs import weight_ms
from asyncpipe.partitioner.profile.profiler import profile
from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.training.remeasure import with_split_backwards
from asyncpipe.runtime.transports.protocol import LocalHub

MICRO_BATCHES, ROUNDS = 4, 4
Built = tuple[nn.Module, dict[str, Tensor]]


def pictures() -> Built:
    net = ResNet(blocks=(1, 1, 1, 1), planes=(16, 32, 64, 128), block="basic", num_classes=10)
    return net, {"pixel_values": torch.randn(8, 3, 96, 96), "labels": torch.arange(8)}


MODELS: dict[str, Callable[[], Built]] = {
    "gpt, 8 blocks": gpt.build,
    "gpt, 2 blocks 512 wide": lambda: gpt.build(layers=2, width=512, vocabulary=1024),
    "resnet": pictures,
}


def planned_shares(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, float]:
    """The share of W in the backward of all operations: measured, and by the rule."""
    captured = capture(model, inputs)
    costs = profile(captured, inputs, threads=1).nodes
    nodes = [node for node in captured.graph.nodes if node.name in costs]
    whole_ms = sum(costs[node.name].backward_ms for node in nodes)
    measured_ms = sum(weight_ms(node, model, costs[node.name]) for node in nodes)
    rule_ms = sum(
        weight_ms(node, model, replace(costs[node.name], weight_share=None)) for node in nodes
    )
    return measured_ms / whole_ms, rule_ms / whole_ms


def true_share(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    """The share of the W actions of a run, medians of several rounds."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "made"
        asyncpipe.partition(model, inputs, stages=1, output=folder, profile="analytic")
        plan = read_plan(folder)
        stages = {0: load_stage(folder, plan, 0).train()}
    pipe = Executor(plan, stages, LocalHub(1).transport(0), rank_of_stage=(0,))
    made = with_split_backwards(make_schedule("single", stages=1, micro_batches=MICRO_BATCHES))
    schedule = lower(made, forward_edges(plan), grad_edges=gradient_edges(plan))
    taken: dict[str, list[float]] = defaultdict(list)
    pipe.run(schedule, lambda _: inputs)
    for _ in range(ROUNDS):
        for action, start_s, end_s in pipe.run(schedule, lambda _: inputs, record=True).events:
            taken[action.kind].append(end_s - start_s)
    pipe.close()
    inputs_s, weights_s = median(taken["B"]), median(taken["W"])
    return weights_s / (inputs_s + weights_s)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    print(f"{'':24}  W of a run   measured    rule")
    for name, build in MODELS.items():
        model, inputs = build()
        true, (measured, rule) = true_share(model, inputs), planned_shares(model, inputs)
        rows.append({"model": name, "true": true, "measured": measured, "rule": rule})
        print(f"{name:24}  {true:10.1%} {measured:10.1%} {rule:7.1%}", flush=True)
    write_result("weight_part", {"rows": rows})


if __name__ == "__main__":
    main()
