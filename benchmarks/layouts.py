"""The layouts that the planner chooses for published hardware, beside those of Megatron-LM and
nnScaler.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(SC 2021): table 1 gives for GPTs of 1.7 B and 3.6 B parameters the tensor ranks and stages that the
authors chose, the GPUs (A100 of 80 GB, 8 on a host with NVLink), the samples of a step and the
reached TFLOP/s of a GPU, counted with recomputation; the time of a step follows from their formula,

    F = 96 B s l h^2 (1 + s / 6h + V / 16 l h)        step = F / (GPUs x TFLOP/s)

with 51,200 tokens in the vocabulary and sequences of 2,048. Section 5.4.1 names the best of several
layouts of 162.2 B parameters on 64 GPUs: 8 tensor ranks and 8 stages. For the other shapes no
layout is published for these numbers of GPUs: there the rows show what the planner chooses.

nnScaler (examples/llama/README.rst of its repository) trains Llama-3-8B with sequences of 131,072
tokens on 8 H100 of one host, 4 samples a step, in 41.12 s, measured by its authors. It searches how
to split the model over the 8 GPUs, without a pipeline; each layer is recomputed, as here
(`gradient_checkpointing_enable`), and the loss is computed in chunks of 1,024 tokens, which it is
not here. With whole sequences no layout fits into 80 GB, so the step of 8 tensor ranks is predicted
without a limit of the memory.

Each GPU is described by its data sheet (`--device a100-80g` or `h100`, bfloat16), links within a
host by NVLink's 300 or 450 GB/s in one direction, of which 80% are reached, and links between hosts
by a network card of 200 Gbit/s for each GPU. Nothing here is measured on a GPU.

python benchmarks/layouts.py
python benchmarks/layouts.py --only "3.6 B"      replaces this row of the results
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from machine import RESULTS, write_result

from asyncpipe.partitioner.capture_and_profile import load
from asyncpipe.partitioner.compile import partition_source
from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.rank_model import Device
from asyncpipe.partitioner.planning.cluster import ANY_HOST, Cluster
from asyncpipe.partitioner.planning.options import PartitionOptions
from asyncpipe.partitioner.profile.roofline import device_spec
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.plan.findings import BestLayout
from asyncpipe.runtime.plan.forecast import forecast_step
from asyncpipe.runtime.plan.plan import Plan

SEQUENCE, VOCABULARY, A_HOST = 2048, 51200, 8
NVLINK = {
    "a100-80g": Link(latency_ms=0.01, bytes_per_s=240e9, duplex=2.0),
    "h100": Link(latency_ms=0.01, bytes_per_s=360e9, duplex=2.0),
}
NETWORK = Link(latency_ms=0.02, bytes_per_s=23e9, duplex=2.0)


@dataclass(frozen=True)
class Shape:
    """A published model on a number of GPUs.

    samples: of a step
    micro_batch: samples of a micro-batch
    published: the layout that its authors chose, and where
    teraflops: what they reached on each GPU
    seconds: the step that they measured, if they give that
    gpu: the GPUs
    sequence: tokens of a sample
    recomputes: the model recomputes each of its layers
    ranks: one stage with so many tensor ranks is planned, without a limit of the memory
    """

    name: str
    model: str
    arguments: dict[str, int]
    gpus: int
    samples: int
    micro_batch: int
    published: str = ""
    teraflops: float | None = None
    seconds: float | None = None
    gpu: str = "a100-80g"
    sequence: int = SEQUENCE
    recomputes: bool = False
    ranks: int | None = None

    @property
    def published_s(self) -> float | None:
        """Seconds of a step, by the formula if only the rate is published."""
        if self.teraflops is None:
            return self.seconds
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
    Shape(
        *("Llama-3 8 B", "llama-8b", {"max_position_embeddings": 131072}, 8, 4, 1),
        published="nnScaler: 1 stage, split over 8 GPUs",
        seconds=41.12,
        gpu="h100",
        sequence=131072,
        recomputes=True,
        ranks=8,
    ),
)


def cluster(shape: Shape) -> Cluster:
    memory = math.inf if shape.ranks else device_spec(shape.gpu).memory_bytes
    devices = (
        Device(shape.gpu, memory_bytes=memory, host=f"h{at // A_HOST}") for at in range(shape.gpus)
    )
    return Cluster(tuple(devices), {ANY_HOST: NVLINK[shape.gpu]}, {(ANY_HOST, ANY_HOST): NETWORK})


def only_layout(shape: Shape, plan: Plan) -> BestLayout:
    """The given layout as a row of its table."""
    step_ms = forecast_step(plan, "1f1b", micro_batches=shape.samples // shape.micro_batch).step_ms
    peak_bytes = max(stage.peak_bytes for stage in plan.stages)
    name = f"1 stage x {shape.ranks} tensor ranks"
    return BestLayout(shape.gpus, name, step_ms, step_ms, peak_bytes, "no other is tried")


def row(shape: Shape) -> dict[str, Any]:
    options = PartitionOptions(
        model_args=shape.arguments,
        meta=True,
        seq=shape.sequence,
        micro_batch_size=shape.micro_batch,
        micro_batches=shape.samples // shape.micro_batch,
        devices=cluster(shape),
        device=shape.gpu,
        dtype="bfloat16",
        schedule="1f1b",
        recompute="auto",
        tensor_parallel=shape.ranks or "auto",
        stages=1 if shape.ranks else None,
        stop_after="plan",
    )
    started, used = time.perf_counter(), time.process_time()
    source = load(shape.model, options, None)
    if shape.recomputes:
        source.model.gradient_checkpointing_enable()
    try:
        plan = partition_source(source, options)
    except PlanError as error:
        return {"name": shape.name, "gpus": shape.gpus, "refused": str(error)}
    return {
        "name": shape.name,
        "gpus": shape.gpus,
        "gpu": shape.gpu,
        "samples": shape.samples,
        "published": shape.published,
        "published_s": shape.published_s,
        "layouts": [
            asdict(layout)
            for layout in ([only_layout(shape, plan)] if shape.ranks else plan.layouts)
        ],
        "others": [asdict(replace(other, seconds=0.0)) for other in plan.candidates],
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - used,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose names contain this")
    parser.add_argument("--output", default="layouts", help="name of the results")
    chosen = parser.parse_args()
    path = RESULTS / f"{chosen.output}.json"
    known = json.loads(path.read_text())["shapes"] if chosen.only and path.exists() else []
    rows = {result["name"]: result for result in known}
    for shape in SHAPES:
        if chosen.only not in shape.name:
            continue
        rows[shape.name] = result = row(shape)
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
        in_order = [rows[shape.name] for shape in SHAPES if shape.name in rows]
        write_result(chosen.output, {"shapes": in_order})


if __name__ == "__main__":
    main()
