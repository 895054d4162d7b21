"""The contract between compiler and runtime: what each stage is, receives, sends and costs.

A plan is plain data. It is written to `plan.json` in the generated folder and is all that the
runtime needs to know about a model; nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import PlanError
from .plan_check import COMMAND, contradiction, is_command
from .reading import Origin, parse_json, read_text, shaped
from .schedules import ASYNCHRONOUS
from .sizes import evaluate_size

SCHEMA = 5

_SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor; a size is a number or an expression of the plan's
    symbols, such as `"batch"` or `"batch*sequence"`."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    requires_grad: bool = False

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with numbers put in for the symbols.

        >>> TensorSpec("h", "float32", ("batch", "2*sequence", 8)).resolve(
        ...     {"batch": 4, "sequence": 16})
        (4, 32, 8)
        """
        return tuple(
            size if isinstance(size, int) else evaluate_size(size, sizes) for size in self.shape
        )

    @property
    def batch_dim(self) -> int | None:
        """The dimension that counts samples; None for a tensor that has none."""
        return self.shape.index("batch") if "batch" in self.shape else None

    def sample_sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of one sample: without the dimension that counts them, by default the first."""
        dim, shape = self.batch_dim or 0, self.resolve(sizes)
        return (*shape[:dim], *shape[dim + 1 :])

    def __str__(self) -> str:
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{_SHORT_DTYPES.get(self.dtype, self.dtype)}[{sizes}]"


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor made by stage `source` and read by the later stages `targets`."""

    tensor: TensorSpec
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a rank at its peak, by what they are for; activations of all that is in flight."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    versions: int = 0
    buffers: int = 0
    activations: int = 0
    transport: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What the plan takes a rank to be: its device, with how much memory (None: no limit), and
    the host that it is on ("" when all are on one)."""

    device: str
    memory_bytes: int | None = None
    host: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """How the plan was meant to run: what its costs and its choice of cuts rest on.

    `transfer_ms` are (source, target, milliseconds) of transfers that go on while ranks compute;
    `latency_ms` is the part of every transfer that does not depend on its bytes.
    `step_ms` is what a step of `micro_batches` takes under the schedule, and `step_bound_ms` what
    is proved that no plan can be below.
    """

    schedule: str = "async-1f1b"
    micro_batches: int = 8
    recompute: str = "none"
    staleness: str = "none"
    optimizer: str = "adamw"
    memory_limit: int | None = None
    ranks: tuple[RankSpec, ...] = ()
    transfer_ms: tuple[tuple[int, int, float], ...] = ()
    latency_ms: float = 0.0
    step_ms: float = 0.0
    step_bound_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """Another plan that was looked at: what would have been, and why it was not taken.

    `seconds` is how long the search for it took, which is not written down.
    """

    name: str
    stages: int
    bottleneck_ms: float
    step_ms: float
    peak_bytes: int
    crossing_bytes: int
    gap: float
    seconds: float = 0.0
    note: str = ""


TOPICS = {
    "cut": "Why each cut is where it is",
    "bound": "What bounds the plan",
    "change": "What would change it",
}
"""What an explanation speaks of, with the headings above it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of the explanation: a sentence with its numbers.

    `topic` is one of `TOPICS`; `about` names the cut, bound or change. `bottleneck_ms` is the
    slowest stage of the plan that the sentence speaks of, or the bound, if it speaks of one.
    """

    topic: str
    about: str
    text: str
    bottleneck_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A module of a stage, or its other operations together, with the times of a micro-batch."""

    name: str
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One generated stage: its file, its forward's arguments and results in order, its costs.

    `inputs` are positional arguments of the stage's forward, each the name of a model input or
    of a boundary tensor. `outputs` are the values that forward returns (one: the value itself,
    several: a tuple, none: None), each the name of a boundary tensor or of a model output.
    Costs are for one micro-batch of the sizes in `Plan.sizes`; times in milliseconds.
    `backward_ms` has the second forward in it where the stage `recompute`s; `weight_ms` is the part
    of it that makes gradients of weights, which a schedule may put off; the `talk_ms` are what
    the rank spends on transfers beside either. Once a step, `exchange_ms` are spent on gradients of
    shared parameters, and `update_ms` by the optimizer, where the load counts that. `peak_bytes` is
    the sum of `memory`, with `in_flight` micro-batches. `ranks` has several where the stage is
    replicated, and several stages may have the same. `parts` are what the stage consists of, and
    their times add up to its own. A stage that `draws_numbers` draws from the global generator of
    Python or NumPy; its `draws_random` is true as well.
    """

    index: int
    file: str
    class_name: str
    modules: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    draws_random: bool
    forward_ms: float
    backward_ms: float
    param_bytes: int
    activation_bytes: int
    peak_bytes: int
    sends: tuple[Boundary, ...]
    receives: tuple[Boundary, ...]
    memory: StageMemory
    in_flight: int
    load_ms: float
    forward_talk_ms: float = 0.0
    backward_talk_ms: float = 0.0
    exchange_ms: float = 0.0
    weight_ms: float = 0.0
    update_ms: float = 0.0
    recompute: bool = False
    ranks: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    sha256: str = ""
    draws_numbers: bool = False

    def named_outputs(self, result: Any) -> dict[str, Any]:
        """What forward returned, by name."""
        results = (result,) if len(self.outputs) == 1 else result or ()
        return dict(zip(self.outputs, results, strict=True))


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """One parameter of the original that several names or stages hold.

    `names` are all names of it, the owner's first; `holders` gives for each stage that holds it
    the name it has there.
    """

    names: tuple[str, ...]
    holders: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, _ in self.holders)


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided about a model, and what the runtime needs to run it.

    `outputs` is the structure of the original's output and `arguments` that of forward's
    arguments (None when they are just the inputs), as `structure.py` writes them: a tensor's
    name, a list, or an object that keeps the original's keys; constants stand for themselves.
    `state_keys` are the keys of the original's state_dict, in its order.
    `unused` are those keys that no stage needs: the forward never reads them. `constants` are
    tensors outside the state_dict that lie beside the weights.
    `if_sent` are the boundaries that there would be if no stage computed anything again that an
    earlier one has made; it is empty where that would be the same.
    `explanation` says in a few clauses why the cuts are where they are, `findings` says it at
    length, with what would change; `even_split` are forward and backward
    milliseconds of the stages that counting blocks would give, and `candidates` other plans.
    `loss` names the output value that is the loss, or is None when a criterion outside the
    model makes it (`criterion`). `mode` is "both", or "train" for stages that have no evaluation
    mode.
    """

    name: str
    model: str
    model_args: Mapping[str, Any]
    command: str
    sizes: Mapping[str, int]
    inputs: tuple[TensorSpec, ...]
    values: tuple[TensorSpec, ...]
    outputs: Any
    loss: str | None
    criterion: str | None
    stages: tuple[StageSpec, ...]
    shared: tuple[SharedParameter, ...]
    method: str
    bottleneck_ms: float
    lower_bound_ms: float
    even_split_ms: float
    optimal: bool
    setting: Setting
    profile: Mapping[str, Any]
    hashes: Mapping[str, str]
    weights: str
    state_keys: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    explanation: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    even_split: tuple[tuple[float, float], ...] = ()
    candidates: tuple[Candidate, ...] = ()
    if_sent: tuple[Boundary, ...] = ()
    arguments: Mapping[str, Any] | None = None
    constants: tuple[str, ...] = ()
    mode: str = "both"
    schema: int = field(default=SCHEMA)

    @property
    def gap(self) -> float:
        """How far the objective is above its proved lower bound, as a share (0.02 is 2 %): the
        bottleneck, or the step of a synchronous schedule."""
        if self.setting.schedule in ASYNCHRONOUS:
            return self.bottleneck_ms / self.lower_bound_ms - 1 if self.lower_bound_ms else 0.0
        bound_ms = self.setting.step_bound_ms
        return self.setting.step_ms / bound_ms - 1 if bound_ms else 0.0

    @property
    def device_of_stage(self) -> tuple[int, ...]:
        """The rank of each stage, its first one if it is replicated."""
        return tuple(stage.ranks[0] for stage in self.stages)

    @property
    def stages_of_rank(self) -> Mapping[int, tuple[int, ...]]:
        """The stages that each rank has, one or several."""
        ranks = sorted({rank for stage in self.stages for rank in stage.ranks})
        return {
            rank: tuple(stage.index for stage in self.stages if rank in stage.ranks)
            for rank in ranks
        }

    @property
    def stage_replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage where single stages are on several; () where all are on as many,
        one or the same number of whole pipelines."""
        ranks = tuple(stage.ranks for stage in self.stages)
        return ranks if len(set(map(len, ranks))) > 1 else ()

    @property
    def slowest(self) -> str:
        """What the bottleneck is of: a stage, or a rank where some have several."""
        several = any(len(stages) > 1 for stages in self.stages_of_rank.values())
        return "rank" if several else "stage"

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        return tuple(boundary for stage in self.stages for boundary in stage.sends)

    def input_stages(self, name: str) -> tuple[int, ...]:
        """The stages whose forward reads the model input `name`."""
        return tuple(stage.index for stage in self.stages if name in stage.inputs)

    def to_json(self) -> str:
        document = asdict(self)
        for candidate in document["candidates"]:
            del candidate["seconds"]  # the same plan is the same text
        if self.mode == "both":
            del document["mode"]
        for stage in document["stages"]:
            if not stage["draws_numbers"]:
                del stage["draws_numbers"]  # few models do
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def read_plan(folder: str | Path) -> Plan:
    """Reads `plan.json` of a generated folder.

    Raises PlanError when the folder, the file or the schema is not what this version writes, or the
    plan contradicts itself.
    """
    path = Path(folder) / "plan.json"
    if not path.is_file():
        what = "has no plan.json" if path.parent.is_dir() else "does not exist"
        raise PlanError(
            f"{folder} {what}: not a generated model.",
            "asyncpipe-partition --model gpt2 --stages 4 makes one.",
        )
    origin = Origin(str(path), PlanError, "Partition the model again.")
    raw = parse_json(read_text(path, origin), origin)
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if isinstance(raw, dict) and schema != SCHEMA:
        command = str(raw.get("command", ""))
        command = command if is_command(command) else f"{COMMAND} ..."
        raise PlanError(
            f"{path} has schema {schema!r:.20}, this version of asyncpipe reads {SCHEMA}.",
            f"{command} --force",
        )
    plan = shaped(Plan, raw, origin)
    if wrong := contradiction(plan):
        raise origin.refused(f" contradicts itself: {wrong}.")
    return plan


def verify_evaluates(plan: Plan) -> None:
    """Raises PlanError for stages that were made for training alone."""
    if plan.mode == "train":
        raise PlanError(
            f"{plan.name} was partitioned for training alone (--mode train), so its stages cannot "
            "run in evaluation mode.",
            "Evaluate the original model with the trained weights: "
            "model.load_state_dict(pipe.state_dict()).",
        )


def portable(text: str) -> str:
    """A path or `file.py:function` without the folders of this machine, for what is written down.

    >>> portable("/home/me/nets.py:build"), portable("nets/mine.py:build"), portable("gpt2")
    ('nets.py:build', 'nets/mine.py:build', 'gpt2')
    """
    path, colon, function = text.partition(":")
    return Path(path).name + colon + function if Path(path).is_absolute() else text


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, as `StageSpec.sha256` holds it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
