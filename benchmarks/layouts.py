"""The layouts that the planner chooses for published hardware, beside those of Megatron-LM.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(SC 2021): table 1 gives for GPTs of 1.7 B and 3.6 B parameters the tensor ranks and stages that the
authors chose, the GPUs (A100 of 80 GB, 8 on a host with NVLink), the samples of a step and the
reached TFLOP/s of a GPU, counted with recomputation; the time of a step follows from their formula,

    F = 96 B s l h^2 (1 + s / 6h + V / 16 l h)        step = F / (GPUs x TFLOP/s)

with 51,200 tokens in the vocabulary and sequences of 2,048. Section 5.4.1 names the best of several
layouts of 162.2 B parameters on 64 GPUs: 8 tensor ranks and 8 stages. For the other shapes no
layout is published for these numbers of GPUs: there the rows show what the planner chooses.

Each GPU is described by its data sheet (`--device a100-80g`, bfloat16), links within a host by
NVLink's 300 GB/s in one direction, of which 80% are reached, and links between hosts by a network
card of 200 Gbit/s for each GPU. Nothing here is measured on a GPU.

python benchmarks/layouts.py
"""

import argparse
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from machine import write_result

from asyncpipe.partitioner.compile import partition_spec
from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.rank_model import Device
from asyncpipe.partitioner.planning.cluster import ANY_HOST, Cluster
from asyncpipe.partitioner.planning.options import PartitionOptions
from asyncpipe.partitioner.profile.roofline import device_spec
from asyncpipe.runtime.errors import PlanError

SEQUENCE, VOCABULARY, A_HOST = 2048, 51200, 8
GPU = "a100-80g"
NVLINK = Link(latency_ms=0.01, bytes_per_s=240e9, duplex=2.0)
NETWORK = Link(latency_ms=0.02, bytes_per_s=23e9, duplex=2.0)


@dataclass(frozen=True)
class Shape:
    """A published model on a number of GPUs.

    samples: of a step
    micro_batch: samples of a micro-batch
    published: the layout that its authors chose, and where
    teraflops: what they reached on each GPU
    """

    name: str
    model: str
    arguments: dict[str, int]
    gpus: int
    samples: int
    micro_batch: int
    published: str = ""
    teraflops: float | None = None

    @property
    def published_s(self) -> float | None:
        """Seconds of a step by the formula."""
        if self.teraflops is None:
            return None
        layers, width = self.arguments["n_layer"], self.arguments["n_embd"]
        once = 96 * self.samples * SEQUENCE * layers * width**2
        flops = once * (1 + SEQUENCE / (6 * width) + VOCABULARY / (16 * layers * width))
        return flops / (self.gpus * self.teraflops * 1e12)


def gpt(layers: int, width: int, heads: int) -> dict[str, int]:
    return {
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_positions": SEQUENCE,
        "vocab_size": VOCABULARY,
    }


SHAPES = (
    Shape("GPT 1.7 B", "gpt2", gpt(24, 2304, 24), 32, 512, 4, "1 stage x 1 tensor rank", 137),
    Shape("GPT 3.6 B", "gpt2", gpt(30, 3072, 32), 64, 512, 4, "1 stage x 2 tensor ranks", 138),
    Shape("GPT-3 6.7 B", "gpt2", gpt(32, 4096, 32), 8, 128, 1),
    Shape("Llama 7 B", "llama-7b", {"vocab_size": 32000}, 8, 128, 1),
    Shape("GPT 162.2 B", "gpt2", gpt(32, 20480, 128), 64, 128, 1, "8 stages x 8 tensor ranks"),
    Shape("GPT-3 175 B", "gpt2", gpt(96, 12288, 96), 64, 128, 1),
)


def cluster(gpus: int) -> Cluster:
    memory = device_spec(GPU).memory_bytes
    devices = (Device("A100", memory_bytes=memory, host=f"h{gpu // A_HOST}") for gpu in range(gpus))
    return Cluster(tuple(devices), {ANY_HOST: NVLINK}, {(ANY_HOST, ANY_HOST): NETWORK})


def row(shape: Shape) -> dict[str, Any]:
    options = PartitionOptions(
        model_args=shape.arguments,
        meta=True,
        seq=SEQUENCE,
        micro_batch_size=shape.micro_batch,
        micro_batches=shape.samples // shape.micro_batch,
        devices=cluster(shape.gpus),
        device=GPU,
        dtype="bfloat16",
        schedule="1f1b",
        recompute="auto",
        tensor_parallel="auto",
        stop_after="plan",
    )
    started = time.perf_counter()
    try:
        plan = partition_spec(shape.model, options)
    except PlanError as error:
        return {"name": shape.name, "gpus": shape.gpus, "refused": str(error)}
    return {
        "name": shape.name,
        "gpus": shape.gpus,
        "samples": shape.samples,
        "published": shape.published,
        "published_s": shape.published_s,
        "layouts": [asdict(layout) for layout in plan.layouts],
        "others": [asdict(replace(other, seconds=0.0)) for other in plan.candidates],
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose names contain this")
    parser.add_argument("--output", default="layouts", help="name of the results")
    chosen = parser.parse_args()
    rows = []
    for shape in SHAPES:
        if chosen.only not in shape.name:
            continue
        result = row(shape)
        rows.append(result)
        print(f"{shape.name} on {shape.gpus} GPUs; published: {shape.published or 'nothing'}")
        if shape.published_s:
            print(f"  published step {shape.published_s:.2f} s")
        for layout in result.get("layouts", ()):
            step_s, bound_s = layout["step_ms"] / 1e3, layout["step_bound_ms"] / 1e3
            print(f"  {layout['devices']:3} GPUs: {layout['layout']}: {step_s:.2f} s ", end="")
            print(
                f"(bound {bound_s:.2f} s), {layout['peak_bytes'] / 2**30:.0f} GiB; {layout['why']}"
            )
        print(result.get("refused", ""), flush=True)
        write_result(chosen.output, {"shapes": rows})


if __name__ == "__main__":
    main()
