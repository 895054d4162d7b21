"""The options that decide what a run computes: schedule, batch, data, optimizer and loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from ..freezing.elastic import CACHES, GROWS, NO_CACHE, REPLICAS
from ..freezing.rules import EPOCH
from ..freezing.rules import FORM as FREEZING_FORM
from ..freezing.rules import WORDS as FREEZING_RULES
from ..limits import Choice, Either, Flag, ListOf, Number, Text, Whole, form, path
from ..optimizers.facts import OPTIMIZERS, defaults_in_words, in_words, that_take
from ..options import option, required
from ..schedule.asynchronous import DEFAULT_CAP

SCALES = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
"""The values of `--scale-lr`: the power of the growth of a step that scales the learning rate."""
DDP = "ddp"
"""A schedule: whole models that share the micro-batches, that is replicas of `single`."""

PANELS = (
    *("Schedule and ranks", "Asynchronous training", "Data and batches", "Optimizer and loss"),
    *("Checkpoints and folders", "Evaluation and logging", "Devices and precision", "Launch"),
)
"""The headings of the options in --help."""
SCHEDULE, ASYNCHRONOUS, DATA, OPTIMIZER, CHECKPOINTS, LOGGING, DEVICES, LAUNCH = PANELS

_schedules = partial(option, group=SCHEDULE)
_asynchronous = partial(option, group=ASYNCHRONOUS)
_data = partial(option, group=DATA)
_learns = partial(option, group=OPTIMIZER)

CODE = Text("FILE.py:FUNCTION", "mine.py:make", form(r"(?s).+:[A-Za-z_]\w*"))
_SCHEDULE = replace(
    CODE,
    words="FILE.py:FUNCTION (linear, cosine and wsd are values of --decay)",
    example="schedules.py:inverse_root",
)
_SYNCHRONOUS = Text(
    "a number of steps or a share of them", "5%", form(r"[0-9]{1,15}|[0-9]{1,9}(\.[0-9]{1,9})?%")
)
STEPS = Whole(0, 10**12, 100)
POSITIVE_STEPS = Whole(1, 10**12, 10)


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """The options that decide what a run computes."""

    folder: str = field(
        metadata=required(
            path("generated_models/gpt2_4p"), "Generated folder to train.", on_resume="ignored"
        )
    )

    schedule: str = _schedules(
        "1f1b",
        Text("a schedule or a .txt file that has one", "1f1b"),
        "Pipeline schedule. Synchronous: gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, "
        "seq, single (one process), auto (computed from measured costs) or ddp (data parallel, the "
        "whole model in each process). Asynchronous: async-1f1b, virtual-stages-1f1b or 2bw. Or a "
        "text file.",
    )
    ranks: int | None = _schedules(
        None,
        Whole(1, 2**16, 4),
        "Processes that share the stages. [default: the number in the schedule or the plan]",
        changes_losses=False,
    )
    replicas: int | None = _schedules(
        None,
        Whole(1, 2**16, 2),
        "Copies of the whole pipeline; each trains on its own micro-batches, and gradients are "
        "averaged. [default: those of the plan, including replicated stages; with ddp one for each "
        "process]",
    )
    tensor_parallel: int | None = _schedules(
        None,
        Whole(1, 2**16, 2),
        "Processes that share out the layers of each stage, in a folder that was made with "
        "asyncpipe-partition --tensor-parallel. [default: the plan's; 1 with single and ddp]",
    )
    check_replicas: int = _schedules(
        0,
        STEPS,
        "Steps between checks that replicas have equal weights, and that tensor ranks agree on the "
        "weights that each of them holds whole; 0 checks only at the start.",
        on_resume="ignored",
    )
    zero: int | None = _schedules(
        None,
        Whole(0, 2, 1),
        "Level of ZeRO, the memory that the replicas of a stage share out: 0 none, 1 the optimizer "
        "state, 2 also the gradients, which are then summed after every micro-batch. "
        "[default: that of the plan if there are replicas]",
        on_resume="ignored",
    )
    staleness: str | None = _asynchronous(
        None,
        Text("names of methods, joined by +", "stash", form(r"[A-Za-z0-9_+-]+")),
        "Staleness mitigation for asynchronous schedules, joined by +: stash, none, .. (see "
        "docs/asynchronous-methods.md), or auto: the recommended method for the optimizer and "
        "delay. [default: stash]",
        applies_to="asynchronous",
    )
    annealing_steps: int | None = _asynchronous(
        None,
        POSITIVE_STEPS,
        "Steps over which pipemare-rate raises the learning rate back to the scheduled one. "
        "[default: five times --warmup, or a quarter of the steps]",
        applies_to="asynchronous",
        of_method=True,
    )
    ahead: str | None = _asynchronous(
        None,
        Text(
            "a factor, a number, or one number for each stage",
            "2x",
            form(r"[0-9]{1,6}x|[0-9]{1,9}( *, *[0-9]{1,9})*"),
        ),
        "Forwards that stages run ahead of their backwards: a multiple of the usual number (2x), a "
        "cap (1), or one number for each stage (5,3,1,0). [default: for async-1f1b the multiple "
        "that the plan's measured times ask for, if it makes no gradient later by a step and fits "
        "into memory; otherwise 1x]",
        applies_to="asynchronous",
        of_method=True,
    )
    staleness_cap: int | None = _asynchronous(
        None,
        STEPS,
        "Largest staleness of weights, in optimizer steps; stages run fewer forwards ahead to keep "
        f"it. [default: none; {DEFAULT_CAP} for virtual-stages-1f1b]",
        applies_to="asynchronous",
        of_method=True,
    )
    flush_every: int = _asynchronous(
        0,
        STEPS,
        "Steps between flushes of an asynchronous pipeline; 0 flushes only for evaluations.",
        applies_to="asynchronous",
        of_method=True,
    )
    sync_start: str | None = _asynchronous(
        None,
        _SYNCHRONOUS,
        "Length of a synchronous 1f1b start before asynchronous training, in steps (20) or as a "
        "share of all steps (5%).",
        applies_to="asynchronous",
        of_method=True,
    )
    sync_end: str | None = _asynchronous(
        None,
        _SYNCHRONOUS,
        "Length of a synchronous 1f1b end after asynchronous training, in steps (100) or as a "
        "share of all steps (10%).",
        applies_to="asynchronous",
        of_method=True,
    )
    # With ddp, until it is resolved to replicas of `single`, this counts all replicas together.
    micro_batches: int | None = _data(
        None,
        Whole(1, 2**16, 8),
        "Micro-batches of an optimizer step in each replica, or with ddp in all replicas together. "
        "[default: 8, or the number that --global-batch-size and --micro-batch-size give]",
        compared=True,
    )
    micro_batch_size: int | None = _data(
        None,
        Whole(1, 2**24, 8),
        "Samples of a micro-batch. [default: the plan's]",
        compared=True,
    )
    # Once resolved, this is None unless the last micro-batch is smaller than the others.
    global_batch_size: int | None = _data(
        None,
        Whole(1, 2**40, 64),
        "Samples of an optimizer step, in place of --micro-batches or --micro-batch-size. "
        "[default: their product, in all replicas]",
    )
    seq: int | None = _data(
        None,
        Whole(1, 2**24, 128),
        "Sequence length in tokens. [default: the plan's]",
        compared=True,
    )

    data: str | None = _data(
        None,
        Text("a data set, a file or folder, a URL, or FILE.py:FUNCTION", "shakespeare"),
        "Training data: shakespeare, python-docs, digits, clusters, a file or folder, the URL of "
        "text to stream, or file.py:function. [default: by the inputs of the model]",
        compared=True,
        names_code=True,
    )
    tokenizer: str | None = _data(
        None,
        Text("bytes, bpe:SIZE or a file", "bpe:4096"),
        "Tokenizer for text: bytes, bpe:4096 (trained on the data) or a tokenizer.json file. "
        "[default: the tokenizer of the model's folder, otherwise bytes]",
        compared=True,
    )

    steps: int = _data(100, STEPS, "Optimizer steps to train for.", compared=True)
    samples: int | None = _data(
        None,
        Whole(1, 10**15, 10_000),
        "Samples to train on, in place of --steps; the pipeline is not flushed between epochs.",
    )
    epochs: float | None = _data(
        None,
        Number(1e-6, 1e6, 3),
        "Passes over the training data, in place of --steps or --samples: exactly that many times "
        "its samples, with a smaller last step if whole steps leave some samples over.",
    )
    remainder: str | None = _data(
        None,
        Choice(("drop", "proportional")),
        "Use of the samples of --samples or --epochs that are left over after the last whole step: "
        "drop them, or train a smaller last step whose gradient counts in proportion "
        "(proportional). [default: proportional with --epochs, otherwise drop]",
    )
    optimizer: str | None = _learns(
        None,
        Either(Choice(tuple(OPTIMIZERS)), CODE),
        f"Optimizer of every stage: {in_words(OPTIMIZERS)}, or file.py:make, whose "
        "make(named_parameters, lr) returns a torch.optim.Optimizer. [default: adamw; sgd for the "
        "built-in mlp]",
        names_code=True,
    )
    lr: float | None = _learns(
        None,
        Number(0, 1e6, 0.001),
        "Learning rate. [default: 3e-4 for text and 1e-3 for other data; "
        f"{defaults_in_words('lr', '{value:g} with {names}')}]",
        of_method=True,
    )
    momentum: float | None = _learns(
        None,
        Number(0, 1, 0.9, below=1),
        f"Momentum for {defaults_in_words('momentum', '{names} (default {value:g})')}.",
        applies_to="some optimizers",
        compared=True,
        of_method=True,
    )
    nesterov: bool = _learns(
        False,
        Flag(),
        f"Nesterov momentum for {in_words(that_take('nesterov'))}.",
        applies_to="some optimizers",
        compared=True,
        of_method=True,
    )
    betas: tuple[float, float] = _learns(
        (0.9, 0.999),
        ListOf(Number(0, 1, 0.9, below=1), count=2),
        f"Adam betas for {in_words(that_take('betas'))}; for muon, those of the AdamW for other "
        "parameters.",
        applies_to="some optimizers",
        compared=True,
        of_method=True,
    )
    eps: float = _learns(
        1e-8,
        Number(0, 1, 1e-8),
        f"Adam epsilon for {in_words(that_take('eps'))}; for muon, that of the AdamW for other "
        "parameters.",
        applies_to="some optimizers",
        compared=True,
        of_method=True,
    )
    refresh_every: int | None = _learns(
        None,
        POSITIVE_STEPS,
        f"Steps between updates of the eigenbases of {in_words(that_take('refresh_every'))}; in an "
        f"asynchronous run, the mean over stages. [default: "
        f"{defaults_in_words('refresh_every', '{value} for {names}')}]",
        applies_to="some optimizers",
        compared=True,
        of_method=True,
    )
    weight_decay: float | None = _learns(
        None,
        Number(0, 1e6, 0.01),
        "Weight decay of matrices; biases and norms have none. [default: "
        f"{defaults_in_words('weight_decay', '{value:g} for {names}')}; 0 for others]",
        compared=True,
        of_method=True,
    )
    warmup: int | None = _learns(
        None,
        STEPS,
        "Steps of linear learning rate warm-up. [default: a tenth of the steps; 0 for the mlp of "
        "the docs]",
        compared=True,
        of_method=True,
    )
    decay: str | None = _learns(
        None,
        Choice(("linear", "cosine", "wsd", "none")),
        "Learning rate decay after the warm-up: linear, cosine, wsd (constant, then linear over "
        "the last fifth of the steps) or none. [default: cosine for text, none for other data; "
        "linear for the built-in mlp]",
        compared=True,
    )
    lr_schedule: str | None = _learns(
        None,
        _SCHEDULE,
        "Learning rate schedule in place of --warmup and --decay: file.py:function, whose "
        "function(step, steps) returns the factor of --lr at a step, counted from 0.",
        compared=True,
        names_code=True,
    )
    final_lr_ratio: float | None = _learns(
        None,
        Number(0, 1000, 0.1),
        "Final learning rate as a share of --lr. [default: 0.1 for text, 0 for other data; 0.3 for "
        "the built-in mlp]",
        compared=True,
        of_method=True,
    )
    freeze: str | None = _learns(
        None,
        Text(f"{FREEZING_RULES}", "schedule:1/3", form(FREEZING_FORM)),
        f"Rule by which the model's blocks stop training, from the first one on: {FREEZING_RULES} "
        "(see docs/freezing.md). [default: none]",
    )
    freeze_every: int | str | None = _learns(
        None,
        Either(POSITIVE_STEPS, Choice((EPOCH,))),
        "Distance between two events of --freeze: epoch, or a number of steps. [default: epoch; a "
        "loop of your own gives a number]",
    )
    freeze_most: int | None = _learns(
        None,
        Whole(0, 10**6, 8),
        "Most blocks that --freeze may freeze. [default: all, or all but the last if nothing "
        "follows the blocks]",
    )
    cache: str = _learns(
        NO_CACHE,
        CACHES,
        "Size of the cache for the outputs of frozen blocks, which then run once for each sample: "
        "a size on each host (2GiB), or auto for half of the free disk and only while loading "
        "takes less time than computing (see docs/cache.md).",
        changes_losses=False,
    )
    elastic: bool = _learns(
        False,
        Flag(),
        "Continue with a shorter pipeline and more replicas when blocks freeze, as "
        "asyncpipe-partition --elastic has planned.",
    )
    grow: str = _learns(
        REPLICAS,
        GROWS,
        "Use of the processes that a shorter pipeline of --elastic frees: replicas that share out "
        "the samples of a step (replicas), replicas with as many samples each as in the first "
        "phase (batch), or none: the processes stay idle (off).",
    )
    scale_lr: str = _learns(
        "none",
        Choice(tuple(SCALES)),
        "Factor on the learning rate of steps that have N times the samples, with --grow batch: "
        "none, linear (N) or sqrt (its root).",
    )
    ema: float | None = _learns(
        None,
        Number(0, 1, 0.999, below=1),
        "Decay of an exponential moving average of the weights, which is evaluated and saved in "
        "their place.",
    )
    clip: float | None = _learns(
        None,
        Number(0, 1e30, 1.0),
        "Maximum gradient norm over all stages; 0 disables clipping. [default: 1 for text, 0 for "
        "other data]",
        compared=True,
        of_method=True,
    )
    clip_by: str | None = _learns(
        None,
        Choice(("stage", "proportion", "global", "known")),
        "Gradient norm that an asynchronous run clips by: stage (each stage's own norm, bounded by "
        "--clip), proportion (its own norm, bounded by its share of --clip), global (the norm of "
        "all stages; each step waits for all) or known (the global norm, using the latest value "
        "received from other stages). [default: stage]",
        applies_to="asynchronous",
        compared=True,
        of_method=True,
    )
    criterion: str | None = _learns(
        None,
        Text("cross_entropy, mse or FILE.py:FUNCTION", "cross_entropy"),
        "Loss function when the plan has none: cross_entropy, mse or file.py:function. [default: "
        "the plan's]",
        compared=True,
        names_code=True,
    )
    batch_norm: str = _learns(
        "micro-batch",
        Choice(("micro-batch", "mini-batch")),
        "Update of batch norm's running statistics: after every micro-batch, or once for each step "
        "as if it were one batch (mini-batch).",
        compared=True,
    )
    recompute: str = _schedules(
        "auto",
        Text(
            "auto, all, none or numbers of stages",
            "0,2",
            form(r"auto|all|none|[0-9]{1,9}( *, *[0-9]{1,9})*"),
        ),
        "Stages that recompute activations in the backward to save memory: auto (the plan's), all, "
        "none, or stage numbers such as 0,2.",
        compared=True,
    )
    seed: int = _data(1, Whole(0, 2**53, 1), "Random seed for data order and dropout.")
