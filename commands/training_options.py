"""The fields of Settings -> options of asyncpipe-train, and those of asyncpipe-compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from cyclopts import Parameter

from ..runtime.limits import Choice, limits_of
from ..runtime.training.settings import Settings
from .parameters import limited

_HELP = {
    "schedule": "Synchronous: gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, seq, "
    "single (one process), auto (computed from measured costs), ddp (the whole model in each "
    "process); asynchronous: async-1f1b, virtual-stages-1f1b, 2bw; or a text file.",
    "ranks": "Processes that share the stages; by default as the schedule or the plan has it.",
    "replicas": "Copies of the whole pipeline, each with micro-batches of its own; gradients are "
    "averaged. [default: the plan's, those of single stages too; of ddp one a process]",
    "check_replicas": "Steps between comparisons of all replicas' weights; 0: only at the start.",
    "staleness": "Methods of an asynchronous schedule, joined by +: stash (the default), none, .. "
    "(docs/asynchronous.md has all), or auto: what is recommended for the optimizer and delay.",
    "ahead": "Forwards that stages run ahead: 2x the usual, at most 1, or of each: 5,3,1,0.",
    "staleness_cap": "The most steps that weights may be stale; stages run less far ahead for it.",
    "flush_every": "Steps between drains of an asynchronous pipeline; 0: at evaluations only.",
    "sync_start": "The first steps that are synchronous 1f1b: 20, or 5% of all.",
    "annealing_steps": "Steps over which pipemare-rate returns to the learning rate. [default: "
    "five warm-ups, or a quarter of the steps]",
    "micro_batches": "Micro-batches of one optimizer step, in each replica (ddp: in all).",
    "micro_batch_size": "Samples of a micro-batch; by default the plan's.",
    "global_batch_size": "Samples of one step, instead of one of the two above.",
    "seq": "Tokens of a sequence; by default the plan's.",
    "data": "shakespeare, python-docs, digits, clusters, a file or folder, or file.py:function.",
    "tokenizer": "Of text: bytes, bpe:4096 (trained on it) or a tokenizer.json.",
    "steps": "Optimizer steps.",
    "samples": "Samples to train on, instead of --steps; epochs follow each other without a drain.",
    "remainder": "Of --samples that are not enough for a step: drop them, or make a short last "
    "step with as much less weight (proportional).",
    "optimizer": "The optimizer of every stage. [default: adamw; sgd for the mlp of the docs]",
    "lr": "Learning rate. [default: 3e-4 for text and 1e-3 for other data; 0.1 with sgd]",
    "momentum": "Of sgd and sutskever (0.9), and of muon (0.95).",
    "betas": "Of adam, adamw, nadam and soap, and of what muon leaves to adamw.",
    "refresh_every": "Steps between new bases of soap; asynchronous: of the stages on average. "
    "[default: 10]",
    "weight_decay": "Not applied to biases and norms.",
    "warmup": "Steps of linear warm-up. [default: a tenth of the steps; 0 for the mlp]",
    "decay": "How the learning rate falls after the warm-up. [default: cosine for text, none for "
    "other data; linear for the mlp]",
    "final_lr_ratio": "The last learning rate as a share of the first. [default: 0.1 for text, 0 "
    "for other data; 0.3 for the mlp]",
    "clip": "Bound of the gradient norm; 0 is off. [default: 1 for text, 0 for other data]",
    "clip_by": "Of an asynchronous run, the norm that is bounded: stage (its own, by the whole "
    "bound), proportion (its own, by its part of the bound), global (of all; each step waits for "
    "all stages) or known (of all, with the other stages' last known). [default: stage]",
    "criterion": "The loss, when the plan has none: cross_entropy, mse or file.py:function.",
    "batch_norm": "When running statistics are updated: micro-batch, or once a mini-batch as if it "
    "were one batch.",
    "recompute": "Stages that run their forward again for the backward, to hold less: auto (the "
    "plan's), all, none, or numbers such as 0,2.",
    "seed": "Of the data order and of dropout.",
    "init_from": "Weights to start from, with a new optimizer: a safetensors file or folder, a "
    "checkpoint, a run's or a generated folder.",
    "resume": "Go on where a run ended: a run's folder, one of its checkpoints, or auto: the "
    "newest good checkpoint of --output, else of this model's last run; a new run where there is "
    "none.",
    "save_every": "Steps between checkpoints; 0: only when a signal ends the run.",
    "keep_last": "The newest checkpoints, which are kept.",
    "keep_best": "Checkpoints with the lowest evaluation loss, which are kept too.",
    "save_to": "Copy checkpoints to this place too, s3://bucket/run or what fsspec knows; --resume "
    "and --init-from take such URLs.",
    "trust": "Run the code of a folder that was not made on this machine, and that which a file of "
    "options names, from now on.",
    "export_hf": "Write the trained model to this folder, for from_pretrained.",
    "output": "The run's folder; by default a new one in runs/<name>.",
    "eval_every": "Steps between evaluations; 0: only at the end.",
    "eval_batches": "Micro-batches of an evaluation; 0: none.",
    "log_every": "Steps between lines of the log.",
    "log": "Where else the run is told of, joined by commas: tensorboard, wandb, mlflow, trackio, "
    "or your own package.module:factory or path/file.py:factory.",
    "trace": "Record steps as a timeline for ui.perfetto.dev: 3 the last three (of an asynchronous "
    "run, before the pipeline drains), 10-12 those.",
    "debug": "Ranks that wait for a debugger (debugpy): 1, 0,2 or all.",
    "device": "Where the stages compute.",
    "ranks_per_gpu": "Ranks that share each GPU, with --device cuda.",
    "threads": "Threads of each rank; by default the cores shared out.",
    "pin": "Keep each rank of a host on cores of its own, on its NUMA node, or none.",
    "timeout_s": "Seconds after which a rank that waits gives up, saying for whom.",
    "stall_s": "Seconds without progress after which is told who waits for whom; 0: never.",
    "restarts": "How often the run begins again by itself when a rank dies or hangs.",
    "dtype": "Of the weights.",
    "precision": "Of computing: that of the weights (full), or less under torch's autocast.",
    "loss_scale": "The first loss scale of float16; it changes with overflows, as GradScaler's.",
    "boundary_dtype": "Cast wider tensors to this on their way between ranks.",
    "transport": "How boundary tensors travel; auto: the fastest that works here.",
    "interface": "The network between hosts; by default that towards rank 0.",
    "master_addr": "Where rank 0 is, if the launcher does not say (mpirun on several hosts).",
    "max_run": "The longest that the command may take, such as 3h50m or 90s: then it ends as after "
    "SIGTERM.",
    "master_port": "Its port; by default the launcher's, or one made of the job's number.",
    "print_sbatch": "Print a batch script for Slurm that trains so, and stop.",
    "nodes": "Of --print-sbatch: hosts; by default the plan's.",
    "time_limit": "Of --print-sbatch: the longest that the job may take.",
    "print_schedule": "Print the schedule, as text that --schedule FILE reads, and stop.",
    "dry_run": "Check everything, say what would run, and stop.",
    "json": "Print every event as a JSON line.",
    "quiet": "Print nothing but errors.",
}

_COMPARED = (
    *("micro_batches", "micro_batch_size", "seq", "data", "tokenizer", "steps", "momentum"),
    *(
        "betas",
        "refresh_every",
        "weight_decay",
        "warmup",
        "decay",
        "final_lr_ratio",
        "clip",
        "clip_by",
    ),
    *("criterion", "batch_norm", "recompute", "init_from", "trust"),
    *("output", "eval_every", "eval_batches"),
    *("dtype", "json", "quiet"),
)
"""The options of Settings that are the same in all runs of a comparison."""


def given(options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {
        option.name: value
        for option in fields(options)
        if (value := getattr(options, option.name)) is not None
    }


def _options_of(name: str, chosen: Iterable[str], help: Mapping[str, str]) -> type[Any]:
    """Options of Settings as cyclopts reads them; None means not given."""
    hints = get_type_hints(Settings)
    options = []
    names = set(chosen)
    for option in fields(Settings):
        if option.name not in names:
            continue
        limit = limits_of(Settings)[option.name].limit
        kind: Any = Literal[limit.names] if isinstance(limit, Choice) else hints[option.name]
        default = "" if option.default in (None, False) else f" [default: {option.default}]"
        parameter = Parameter(
            name=("--quiet", "-q") if option.name == "quiet" else None,
            help=help[option.name] + default,
            show_default=False,
        )
        annotated = Annotated[kind, parameter, limited(limit, option.name)]
        options.append((option.name, annotated, field(default=None)))
    made = make_dataclass(name, options, frozen=True, kw_only=True)
    made.__module__ = __name__  # cyclopts resolves the annotations there
    return made


if TYPE_CHECKING:
    TrainOptions = Any
    ComparedOptions = Any
else:
    TrainOptions = _options_of(
        "TrainOptions", (option.name for option in fields(Settings)[1:]), _HELP
    )
    ComparedOptions = _options_of(
        "ComparedOptions",
        _COMPARED,
        {
            **_HELP,
            "output": "The folder of the comparison; by default runs/<name>/comparison.",
            "json": "Print every run as a JSON line.",
        },
    )
