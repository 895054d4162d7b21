"""Names that other tools have for our options, each accepted as ours or answered with ours.

An option of another tool that means exactly the same stands for ours: `--learning-rate 1e-3` is
`--lr 1e-3`, and `--bf16` is `--precision bfloat16`. One that means nearly the same is answered with
a sentence. Only what no table knows is compared by its letters, and only close words are suggested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

_CLOSE = 0.72
"""The similarity from which a word is suggested that begins with the same letter."""


def _by_name(same: Mapping[str, str]) -> dict[str, str]:
    """Our words -> names of others, as their names -> our words."""
    return {name: ours for ours, names in same.items() for name in names.split()}


@dataclass(frozen=True)
class KnownNames:
    """Names of other tools for the options of a command.

    same: a name -> the words of ours that mean the same, such as `--precision bfloat16`
    answers: a name -> the sentence that names the option to use
    """

    same: Mapping[str, str]
    answers: Mapping[str, str]

    def in_ours(self, words: Sequence[str], has: Callable[[str], bool]) -> list[str]:
        """The words of a command line with our options in place of accepted names; `has` is true
        for an option of the command.

        >>> own = {"--lr", "--precision"}
        >>> TRAIN.in_ours(["DIR", "--learning_rate=1e-3", "--bf16"], own.__contains__)
        ['DIR', '--lr', '1e-3', '--precision', 'bfloat16']
        """
        translated: list[str] = []
        for position, word in enumerate(words):
            if word == "--":
                return [*translated, *words[position:]]
            flag, is_assigned, value = word.partition("=")
            ours = self.same.get(_bare(flag), "").split() if flag.startswith("--") else []
            if ours and has(ours[0]):
                translated += [*ours, *([value] if is_assigned else [])]
            else:
                translated.append(word)
        return translated

    def meant(self, name: str, own: Collection[str], otherwise: str = "") -> str:
        """The answer to an option that a command does not have: the right one, if it is known.

        - `name`, `own`: the unknown option and those of the command, as flags or as keywords; the
          answer names a keyword or a flag as they do

        >>> TRAIN.meant("--shedule", ["--schedule", "--steps"])
        'Did you mean --schedule?'
        >>> TRAIN.meant("learning_rate", ["lr", "steps"]), TRAIN.meant("eps", ["lr", "steps"])
        ('Did you mean lr?', '')
        """
        bare = _bare(name)
        if answer := self.answers.get(bare):
            return answer
        near = {_bare(name): name for name in own}
        option, _, value = self.same.get(bare, "").removeprefix("--").partition(" ")
        if option in near:
            ours = near[option]
            if value:
                ours += f" {value}" if ours.startswith("--") else f' = "{value}"'
            return f"Did you mean {ours}?"
        alike = [name for name in near if name[:1] == bare[:1]]
        close = get_close_matches(bare, alike, n=1, cutoff=_CLOSE)
        return f"Did you mean {near[close[0]]}?" if close else otherwise


def _bare(name: str) -> str:
    return name.removeprefix("--").replace("_", "-").lower()


_SIZES = (
    "Use --micro-batch-size for the samples of a micro-batch, or --global-batch-size for those of "
    "an optimizer step."
)
_RECOMPUTE = "Use --recompute all to recompute the activations of every stage."

_OTHER_SHARDING = (
    "asyncpipe shards layers with --tensor-parallel, optimizer states and gradients of --replicas "
    "with --zero 1 or 2, and the model by its stages."
)

TRAIN = KnownNames(
    same=_by_name(
        {
            "--lr": "learning-rate max-lr",
            "--steps": "max-steps train-steps num-steps num-train-steps total-steps max-iters "
            "train-iters",
            "--samples": "train-samples max-samples",
            "--global-batch-size": "train-batch-size",
            "--micro-batch-size": "per-device-train-batch-size train-micro-batch-size-per-gpu "
            "micro-bs mbs",
            "--micro-batches": "grad-accum grad-accumulation grad-accum-steps "
            "grad-accumulation-steps gradient-accumulation gradient-accumulation-steps "
            "accumulate-grad-batches n-microbatches num-microbatches num-micro-batches "
            "microbatches chunks",
            "--seq": "seq-len seq-length sequence-length max-seq-len max-seq-length block-size "
            "context-length",
            "--clip": "grad-clip clip-grad clip-grad-norm max-grad-norm max-norm gradient-clip "
            "gradient-clip-val gradient-clipping",
            "--warmup": "warmup-steps num-warmup-steps lr-warmup-steps lr-warmup-iters "
            "warmup-iters",
            "--weight-decay": "wd",
            "--optimizer": "optim opt",
            "--criterion": "loss loss-fn",
            "--precision": "mixed-precision",
            "--precision bfloat16": "bf16",
            "--precision float16": "fp16",
            "--device cpu": "cpu use-cpu no-cuda",
            "--device cuda": "cuda use-cuda",
            "--replicas": "dp data-parallel-size num-replicas dp-size",
            "--tensor-parallel": "tp tp-size tensor-parallel-size tensor-model-parallel-size "
            "tensor-parallel-degree",
            "--zero": "zero-stage",
            "--schedule": "pipeline-schedule pp-schedule pipeline-parallel-schedule",
            "--transport": "backend",
            "--seed": "random-seed manual-seed",
            "--epochs": "num-epochs num-train-epochs max-epochs train-epochs",
            "--eps": "epsilon adam-eps adam-epsilon optimizer-eps",
            "--compile": "torch-compile",
            "--early-stop": "early-stopping early-stopping-patience patience",
            "--ema": "ema-decay",
            "--metric": "metrics compute-metrics",
            "--save-every": "save-steps save-interval checkpoint-interval checkpoint-every "
            "ckpt-every save-freq",
            "--keep-last": "save-total-limit",
            "--eval-every": "eval-steps eval-interval eval-freq val-interval",
            "--log-every": "logging-steps log-interval log-freq log-every-n-steps log-steps",
            "--log": "report-to logger",
            "--log wandb": "wandb use-wandb",
            "--log tensorboard": "tensorboard use-tensorboard",
            "--data": "dataset dataset-path data-path train-data train-file data-dir dataset-name",
            "--tokenizer": "tokenizer-name tokenizer-path tokenizer-name-or-path",
            "--workers": "num-workers dataloader-num-workers",
            "--prefetch": "prefetch-factor",
            "--output": "output-dir out-dir out save-dir",
            "--resume": "resume-from resume-from-checkpoint ckpt-path",
            "--init-from": "load-weights weights init-weights",
        }
    ),
    answers={
        "adam-beta1": "Use --betas BETA1 BETA2.",
        "adam-beta2": "Use --betas BETA1 BETA2.",
        "beta1": "Use --betas BETA1 BETA2.",
        "beta2": "Use --betas BETA1 BETA2.",
        "activation-checkpointing": _RECOMPUTE,
        "checkpoint-activations": _RECOMPUTE,
        "gradient-checkpointing": _RECOMPUTE,
        "amp": "Use --precision bfloat16 or --precision float16.",
        "batch-size": _SIZES,
        "bs": _SIZES,
        "checkpoint": "Use --resume to continue a run, or --init-from to start from its weights.",
        "checkpoint-dir": "Checkpoints are in the folder of the run: use --output.",
        "ckpt-dir": "Checkpoints are in the folder of the run: use --output.",
        "eval-iters": "Use --eval-batches: the micro-batches of an evaluation.",
        "eval-batch-size": "An evaluation has micro-batches of --micro-batch-size samples.",
        "gpu": "Use --device cuda.",
        "gpus": "Use --device cuda, and --ranks for the number of processes.",
        "lr-decay-style": "Use --decay linear, cosine, wsd or none, with --warmup.",
        "lr-scheduler": "Use --decay linear, cosine, wsd or none, with --warmup, or --lr-schedule.",
        "lr-scheduler-type": "Use --decay linear, cosine, wsd or none, with --warmup.",
        "min-lr": "Use --final-lr-ratio: the final learning rate as a share of --lr.",
        "model": "Name the generated folder: asyncpipe-train generated_models/gpt2_4p. "
        "asyncpipe-partition --model makes it.",
        **dict.fromkeys(("fsdp", "deepspeed", "cp", "ep"), _OTHER_SHARDING),
        "predict": "Use the command asyncpipe-train predict RUN.",
        "export": "Use the command asyncpipe-train export RUN DIR, or --export-hf DIR.",
        "report": "Use the command asyncpipe-train report RUN.",
        "nnodes": "Start the ranks with torchrun or srun; --print-sbatch --nodes writes a job.",
        "nproc": "Use --ranks: the processes that share the stages.",
        "nproc-per-node": "Use --ranks: the processes that share the stages.",
        "num-gpus": "Use --ranks: the processes that share the stages.",
        "num-stages": "The stages are those of the folder: asyncpipe-partition --stages.",
        "pipeline-parallel-size": "Use --ranks: the processes that share the stages.",
        "pp": "Use --ranks: the processes that share the stages.",
        "stages": "The stages are those of the folder: asyncpipe-partition --stages.",
        "val-batches": "Use --eval-batches: the micro-batches of an evaluation.",
        "warmup-ratio": "Use --warmup: a number of steps. The default is a tenth of all steps.",
    },
)
"""The options of asyncpipe-train and asyncpipe-compare."""

_MICRO_BATCH = "Use --micro-batch-size: the samples of a micro-batch."

PARTITION = KnownNames(
    same=_by_name(
        {
            "--model": "model-name model-name-or-path arch",
            "--stages": "num-stages n-stages nstages num-partitions pp pipeline-parallel-size "
            "pipeline-model-parallel-size",
            "--ranks": "world-size num-ranks",
            "--micro-batch-size": "mbs micro-bs per-device-train-batch-size",
            "--micro-batches": "grad-accum gradient-accumulation-steps n-microbatches "
            "num-microbatches num-micro-batches microbatches chunks",
            "--seq": "seq-len seq-length sequence-length max-seq-len max-seq-length block-size",
            "--loss": "criterion loss-fn",
            "--optimizer": "optim opt",
            "--schedule": "pipeline-schedule pp-schedule pipeline-parallel-schedule",
            "--dtype bfloat16": "bf16",
            "--device cuda": "cuda use-cuda",
            "--memory-limit": "max-memory memory max-mem",
            "--seed": "random-seed manual-seed",
            "--output": "output-dir out-dir out save-dir",
            "--force": "overwrite",
        }
    ),
    answers={
        "activation-checkpointing": _RECOMPUTE,
        "gradient-checkpointing": _RECOMPUTE,
        "batch-size": _MICRO_BATCH,
        "bs": _MICRO_BATCH,
        "fp16": "Costs are profiled in float32 or bfloat16: use --dtype bfloat16.",
        "gpu": "Use --device cuda.",
        "num-gpus": "Use --stages or --ranks, and --devices FILE for the devices to plan for.",
        "precision": "Use --dtype float32 or bfloat16.",
        "split-points": "Use --cut-at MODULE, once for each cut.",
        "example-args": "Give the inputs as example_inputs, the second argument.",
    },
)
"""The options of asyncpipe-partition, `asyncpipe.partition` and `asyncpipe.outline`."""

VALUES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "bf16-mixed": "bfloat16",
    "fp16": "float16",
    "16-mixed": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "gpu": "cuda",
}
"""Names of others for values of our options."""


def value_in_ours(word: str, names: Collection[str]) -> str:
    """One of our names for a value that is written in another case or in another tool's words; the
    word itself if there is none.

    >>> value_in_ours("AdamW", ["sgd", "adamw"]), value_in_ours("gpu", ["cpu", "cuda"])
    ('adamw', 'cuda')
    """
    lower = word.lower()
    return next(
        (candidate for candidate in (word, lower, VALUES.get(lower, "")) if candidate in names),
        word,
    )
