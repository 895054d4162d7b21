"""The options of asyncpipe-partition, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group

from ..partitioner.options import LIMITS
from ..runtime.limits import Several, Text
from .parameters import flag, option, with_limits

_MODEL = Group.create_ordered("What to cut")
_PLAN = Group.create_ordered("Where to cut")
_DEVICES = Group.create_ordered("What it is to run on")
_COSTS = Group.create_ordered("What it costs")
_OUTPUT = Group.create_ordered("What to write and print")


_DIMENSIONS = Several(Text("a dimension, none or INPUT=DIMENSION", "1"))
"""In Python these are numbers and mappings."""


@with_limits({**LIMITS, "batch_dim": _DIMENSIONS, "sequence_dim": _DIMENSIONS})
@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """The options of asyncpipe-partition."""

    model: Annotated[
        str | None,
        option(
            _MODEL,
            "A published configuration (gpt2 .. gpt2-xl, bert-base-uncased, t5-small .., "
            "vit-base, llama-7b ..), a built-in (mlp, resnet50, ..), a folder or hub name of "
            "transformers, or your own: package.module:factory or path/file.py:factory.",
        ),
    ] = None
    graph: Annotated[
        Path | None,
        option(
            _MODEL,
            "Instead of a model: plan a cost graph (our JSON, dnn-partitioning's, PipeDream's "
            "graph.txt).",
        ),
    ] = None
    model_arg: Annotated[
        list[str] | None,
        option(
            _MODEL,
            "key=value: overrides a field of the configuration, or an argument of your factory.",
        ),
    ] = None
    input: Annotated[
        list[str] | None,
        option(
            _MODEL, "name=f32[4,64]: an input of forward, when your factory returns a model alone."
        ),
    ] = None
    micro_batch_size: Annotated[
        int | None,
        option(
            _MODEL,
            "Samples of a micro-batch, for costs and for training; by default 8, or 1 for a "
            "model of over 50 M parameters.",
        ),
    ] = None
    seq: Annotated[int, option(_MODEL, "Tokens of a sequence, for models of text.")] = 128
    batch_dim: Annotated[
        list[str] | None,
        option(
            _MODEL,
            "The dimension of an input that counts samples, as INPUT=1 or INPUT=none, or as 1 or "
            "none for all inputs; none for all is a model without a batch. By default it is found "
            "out: dimension 0, where a part of the samples has the results of the whole.",
        ),
    ] = None
    sequence_dim: Annotated[
        list[str] | None,
        option(
            _MODEL,
            "The dimension of an input that counts tokens and stays free, as INPUT=1 or "
            "INPUT=none, or as 1 or none for all inputs; by default dimension 1 of "
            "two-dimensional inputs of integers.",
        ),
    ] = None
    loss: Annotated[
        str | None,
        option(
            _MODEL,
            "The loss, when the model does not return one: cross_entropy, mse or "
            "path/file.py:function.",
        ),
    ] = None
    seed: Annotated[int, option(_MODEL, "Seed of the random weights.")] = 0
    meta: Annotated[
        bool, flag(_MODEL, "Allocate no weights: plan a model that does not fit here.")
    ] = False
    capture: Annotated[
        Literal["auto", "tracer", "dynamo"],
        option(
            _MODEL,
            "How forward is read: auto is the tracer, and TorchDynamo where the tracer cannot see.",
        ),
    ] = "auto"
    mode: Annotated[
        Literal["both", "train"],
        option(
            _MODEL,
            "Capture forward in training and evaluation mode (both, the default), or for training "
            "alone (train): for a model that returns another structure in evaluation.",
        ),
    ] = "both"
    leaf: Annotated[
        list[str] | None,
        option(_MODEL, "The name of a module class that is kept as one operation."),
    ] = None
    stages: Annotated[
        int | None,
        option(
            _PLAN,
            "How many stages to cut it into; not needed with --stop-after capture or profile, "
            "and chosen when it is left out with --devices or --hosts.",
        ),
    ] = None
    method: Annotated[
        str,
        option(
            _PLAN,
            "How to place the cuts: auto (the optimum, with its proof), chain, uniform, metis, "
            "acyclic, mpipe and 2dbin (several stages a rank), pipedream (replicated stages), "
            "or all: the best of these that trains as planned, with a table of them.",
        ),
    ] = "auto"
    granularity: Annotated[
        Literal["op", "module"],
        option(
            _PLAN, "Where a cut may be: between any two operations, or only between whole blocks."
        ),
    ] = "op"
    prefer_modules: Annotated[
        float | None,
        option(
            _PLAN,
            "The share of the slowest stage's time that is given up so that cuts fall between "
            "blocks: by default 0.02, and 0 for a graph.",
        ),
    ] = None
    cut_at: Annotated[
        list[str] | None,
        option(
            _PLAN, "A boundary: right before this module (transformer.h.6), operation or file:line."
        ),
    ] = None
    keep_together: Annotated[
        list[str] | None,
        option(_PLAN, "The path or class of modules whose operations stay in one stage."),
    ] = None
    schedule: Annotated[
        str | None,
        option(
            _PLAN,
            "The schedule to balance the stages for: async-1f1b (when none is named), 1f1b, "
            "gpipe, zb-h1, zb-h2, seq; of several stages a rank interleaved, looped-bfs, zb-v.",
        ),
    ] = None
    ranks: Annotated[
        int | None,
        option(
            _PLAN,
            "Processes that share the stages, by default as many as the schedule has for them. "
            "Without --stages the number of stages is chosen.",
        ),
    ] = None
    micro_batches: Annotated[int, option(_PLAN, "Micro-batches of one optimizer step.")] = 8
    staleness: Annotated[
        str,
        option(
            _PLAN,
            "Methods of an asynchronous run, joined by +, whose copies of weights are counted.",
        ),
    ] = "none"
    optimizer: Annotated[
        str,
        option(
            _PLAN,
            "Whose copies of the weights are counted: adamw, adam, nadam, muon, soap, sutskever, "
            "momentum (of sgd), sgd.",
        ),
    ] = "adamw"
    recompute: Annotated[
        str,
        option(
            _PLAN,
            "Which stages run forward again instead of keeping activations: auto (those that do "
            "not fit otherwise), all, none.",
        ),
    ] = "auto"
    memory_limit: Annotated[
        str | None, option(_PLAN, "The most that a rank may need, such as 11GiB or 500MB.")
    ] = None
    explain: Annotated[
        bool,
        flag(
            _PLAN,
            "Say why each cut is where it is, what bounds the plan, and what one more device, a "
            "faster link, recomputation or other numbers of micro-batches would give.",
        ),
    ] = False
    devices: Annotated[
        Path | None, option(_DEVICES, "A TOML file of the devices, hosts and links to plan for.")
    ] = None
    hosts: Annotated[
        str | None,
        option(
            _DEVICES, "Equal devices in short: h1:4,h2:2 are four ranks on host h1 and two on h2."
        ),
    ] = None
    profile: Annotated[
        Literal["measured", "analytic"] | None,
        option(
            _COSTS,
            "Costs measured on this machine, or predicted from FLOPs and bytes (the default on "
            "meta).",
        ),
    ] = None
    device: Annotated[
        str | None,
        option(
            _COSTS,
            "Whose costs: cpu or cuda of this machine, or a device that is not here (a100-80g, "
            "h100, rtx2080ti, v100-16g, .., or a file.toml that describes it), which is "
            "predicted.",
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        option(_COSTS, "Of the profile: float32, or bfloat16 under torch's autocast."),
    ] = "float32"
    threads: Annotated[
        int | None, option(_COSTS, "Threads while measuring; by default what each rank will have.")
    ] = None
    calibrate: Annotated[
        bool, flag(_COSTS, "Fit a predicted profile to a few operations measured here.")
    ] = False
    no_cache: Annotated[
        bool, flag(_COSTS, "Measure anew what was measured before on this machine.")
    ] = False
    output: Annotated[
        Path | None,
        option(_OUTPUT, "The folder to write; by default generated_models/NAME_STAGESp."),
    ] = None
    code: Annotated[
        Literal["structured", "flat"],
        option(
            _OUTPUT, "Classes and loops as in the original, or flat: one statement an operation."
        ),
    ] = "structured"
    no_weights: Annotated[bool, flag(_OUTPUT, "Do not store the weights in the folder.")] = False
    force: Annotated[
        bool, flag(_OUTPUT, "Write over stages edited by hand, or made from another model.")
    ] = False
    stop_after: Annotated[
        Literal["capture", "profile", "plan"] | None,
        option(
            _OUTPUT,
            "Print the graph by module (capture), with costs (profile), or the plan, and write "
            "nothing.",
        ),
    ] = None
    json: Annotated[
        bool, flag(_OUTPUT, "Print the plan (or the graph, with --stop-after) as JSON.")
    ] = False
    quiet: Annotated[bool, flag(_OUTPUT, "Print only the folder.", "--quiet", "-q")] = False
    verbose: Annotated[
        bool, flag(_OUTPUT, "Show the traceback of an error.", "--verbose", "-v")
    ] = False

    @property
    def placing(self) -> dict[str, Any]:
        """Those that a plan depends on, of a model or of a graph alone."""
        names = (
            "method", "granularity", "schedule", "ranks", "micro_batches", "staleness",
            "optimizer", "recompute", "memory_limit",
        )  # fmt: skip
        given = {} if self.prefer_modules is None else {"prefer_modules": self.prefer_modules}
        return {name: getattr(self, name) for name in names} | given

    @property
    def of_models_alone(self) -> tuple[str, ...]:
        """The flags that were given and mean nothing for a graph alone."""
        names = (
            "output", "model_arg", "input", "micro_batch_size", "loss", "profile", "threads",
            "device", "calibrate", "no_cache", "leaf", "batch_dim", "sequence_dim",
            "keep_together", "stop_after", "meta", "no_weights", "force",
        )  # fmt: skip
        return tuple(f"--{name.replace('_', '-')}" for name in names if getattr(self, name))
