"""The contract between compiler and runtime: each stage with its inputs, outputs and costs.

A plan is plain data. It is written to `plan.json` in the generated folder and is all that the
runtime knows about a model; nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import PlanError
from ..schedule.asynchronous import ASYNCHRONOUS
from ..serialization import Origin, parse_json, read_text, shaped
from .structure import evaluate_size
from .validate import COMMAND, contradiction, is_command

SCHEMA = 5

_SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of a tensor; a size is a number or an expression of the plan's symbols,
    such as `"batch"` or `"batch*sequence"`."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    requires_grad: bool = False

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with numbers in place of the symbols.

        >>> TensorSpec("h", "float32", ("batch", "2*sequence", 8)).resolve(
        ...     {"batch": 4, "sequence": 16})
        (4, 32, 8)
        """
        return tuple(
            size if isinstance(size, int) else evaluate_size(size, sizes) for size in self.shape
        )

    @property
    def batch_dim(self) -> int | None:
        """The dimension that counts samples; None for a tensor without one."""
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
    """Bytes of a rank at its peak, by purpose; activations are those of all micro-batches in
    flight."""

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
    """A rank as the plan assumes it."""

    device: str
    memory_bytes: int | None = None
    """The memory of the device; None for no limit."""
    host: str = ""
    """The host of the rank; "" if all ranks are on one."""


@dataclass(frozen=True, slots=True)
class PlanSetting:
    """The configuration of the run that the plan's costs and cuts were computed for."""

    schedule: str = "async-1f1b"
    micro_batches: int = 8
    recompute: str = "none"
    staleness: str = "none"
    optimizer: str = "adamw"
    memory_limit: int | None = None
    ranks: tuple[RankSpec, ...] = ()
    transfer_ms: tuple[tuple[int, int, float], ...] = ()
    """(source, target, milliseconds) of transfers that overlap with computation."""
    latency_ms: float = 0.0
    """The part of every transfer's time that is independent of its bytes."""
    step_ms: float = 0.0
    """The time of a step of `micro_batches` under the schedule."""
    step_bound_ms: float = 0.0
    """A proved lower bound of `step_ms` for all plans."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Another plan that was considered, and why it was not chosen."""

    name: str
    stages: int
    bottleneck_ms: float
    step_ms: float
    peak_bytes: int
    crossing_bytes: int
    gap: float
    seconds: float = 0.0
    """The duration of the search for it; not written to plan.json."""
    note: str = ""


TOPICS = {
    "cut": "Why each cut is where it is",
    "bound": "What bounds the plan",
    "change": "What would change it",
}
"""The topics of an explanation, with their headings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of the explanation: a sentence with its numbers."""

    topic: str
    """A key of `TOPICS`."""
    about: str
    """The name of the cut, bound or change."""
    text: str
    bottleneck_ms: float | None = None
    """The slowest stage of the plan that the sentence describes, or the bound if it describes
    one."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """A module of a stage, or its other operations together, with the times of a micro-batch."""

    name: str
    forward_ms: float
    backward_ms: float


ON_META = "none, made with --meta"
NOT_STORED = "not stored"
NO_WEIGHTS: Mapping[str, str] = MappingProxyType({ON_META: "--meta", NOT_STORED: "--no-weights"})
"""`Plan.weights` of a plan without weights -> the option that it was made with."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One generated stage: its file, its forward's arguments and results in order, its costs.

    Costs are for one micro-batch of the sizes in `Plan.sizes`; times in milliseconds.
    """

    index: int
    file: str
    class_name: str
    modules: tuple[str, ...]
    inputs: tuple[str, ...]
    """The positional arguments of forward, each the name of a model input or of a boundary
    tensor."""
    outputs: tuple[str, ...]
    """The values that forward returns (one: the value itself, several: a tuple, none: None), each
    the name of a boundary tensor or of a model output."""
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    draws_random: bool
    forward_ms: float
    backward_ms: float
    """With the recomputed forward if the stage has `recompute`."""
    param_bytes: int
    activation_bytes: int
    peak_bytes: int
    """The sum of `memory`."""
    sends: tuple[Boundary, ...]
    receives: tuple[Boundary, ...]
    memory: StageMemory
    """The memory with `in_flight` micro-batches."""
    in_flight: int
    load_ms: float
    forward_talk_ms: float = 0.0
    """The time that the rank spends on transfers of a forward, in addition to `forward_ms`."""
    backward_talk_ms: float = 0.0
    """The same of a backward."""
    exchange_ms: float = 0.0
    """The time of exchanging gradients of shared parameters, once a step."""
    weight_ms: float = 0.0
    """The part of `backward_ms` that makes weight gradients, which a schedule may delay."""
    update_ms: float = 0.0
    """The time of the optimizer, once a step, if the load counts it."""
    recompute: bool = False
    ranks: tuple[int, ...] = ()
    """Several if the stage is replicated; several stages may have the same rank."""
    parts: tuple[StagePart, ...] = ()
    """The parts of the stage; their times add up to those of the stage."""
    sha256: str = ""
    draws_numbers: bool = False
    """The stage draws from the global generator of Python or NumPy; then `draws_random` is true as
    well."""
    changes: tuple[str, ...] = ()
    """The parameters that forward writes to."""
    changes_trained: tuple[str, ...] = ()
    """Those of `changes` that need a gradient."""

    def named_outputs(self, result: Any) -> dict[str, Any]:
        """The result of forward, by name."""
        results = (result,) if len(self.outputs) == 1 else result or ()
        return dict(zip(self.outputs, results, strict=True))


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter of the original with several names or on several stages."""

    names: tuple[str, ...]
    """All names of the parameter, the owner's first."""
    holders: tuple[tuple[int, str], ...]
    """Each stage that holds it, with its name there."""

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, _ in self.holders)


@dataclass(frozen=True, slots=True)
class Plan:
    """The partition of a model, with everything that the runtime needs to run it."""

    name: str
    model: str
    model_args: Mapping[str, Any]
    command: str
    sizes: Mapping[str, int]
    inputs: tuple[TensorSpec, ...]
    values: tuple[TensorSpec, ...]
    outputs: Any
    """The structure of the original's output, as `structure.py` writes it: a tensor's name, a list,
    or an object that keeps the original's keys; constants stand for themselves."""
    loss: str | None
    """The name of the output value that is the loss; None if a criterion outside the model computes
    it."""
    criterion: str | None
    """The criterion outside the model."""
    stages: tuple[StageSpec, ...]
    shared: tuple[SharedParameter, ...]
    method: str
    bottleneck_ms: float
    lower_bound_ms: float
    even_split_ms: float
    optimal: bool
    setting: PlanSetting
    profile: Mapping[str, Any]
    hashes: Mapping[str, str]
    weights: str
    state_keys: tuple[str, ...] = ()
    """The keys of the original's state_dict, in its order."""
    unused: tuple[str, ...] = ()
    """Those of `state_keys` that no stage needs, because forward never reads them."""
    notes: tuple[str, ...] = ()
    explanation: tuple[str, ...] = ()
    """Why the cuts are where they are, in a few clauses."""
    findings: tuple[Finding, ...] = ()
    """The long explanation, with possible changes."""
    even_split: tuple[tuple[float, float], ...] = ()
    """Forward and backward milliseconds of the stages of an even split by blocks."""
    candidates: tuple[Candidate, ...] = ()
    """Other plans that were considered."""
    if_sent: tuple[Boundary, ...] = ()
    """The boundaries if no stage recomputed a value of an earlier one; empty if they are the
    same."""
    arguments: Mapping[str, Any] | None = None
    """The structure of forward's arguments, as in `outputs`; None if they are just the inputs."""
    constants: tuple[str, ...] = ()
    """Tensors outside the state_dict, stored with the weights."""
    mode: str = "both"
    """"both", or "train" for stages without an evaluation mode."""
    schema: int = field(default=SCHEMA)

    @property
    def gap(self) -> float:
        """The share by which the objective is above its proved lower bound (0.02 is 2 %). The
        objective is the bottleneck, or the step of a synchronous schedule."""
        if self.setting.schedule in ASYNCHRONOUS:
            return self.bottleneck_ms / self.lower_bound_ms - 1 if self.lower_bound_ms else 0.0
        bound_ms = self.setting.step_bound_ms
        return self.setting.step_ms / bound_ms - 1 if bound_ms else 0.0

    @property
    def device_of_stage(self) -> tuple[int, ...]:
        """The rank of each stage; the first one of a replicated stage."""
        return tuple(stage.ranks[0] for stage in self.stages)

    @property
    def stages_of_rank(self) -> Mapping[int, tuple[int, ...]]:
        """The stages of each rank, one or several."""
        ranks = sorted({rank for stage in self.stages for rank in stage.ranks})
        return {
            rank: tuple(stage.index for stage in self.stages if rank in stage.ranks)
            for rank in ranks
        }

    @property
    def stage_replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage if the stages have different numbers of ranks; otherwise ()."""
        ranks = tuple(stage.ranks for stage in self.stages)
        return ranks if len(set(map(len, ranks))) > 1 else ()

    @property
    def slowest(self) -> str:
        """The unit of the bottleneck: a stage, or a rank if some rank has several stages."""
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
            for name in ("draws_numbers", "changes", "changes_trained"):
                if not stage[name]:
                    del stage[name]  # few models do
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def read_plan(folder: str | Path) -> Plan:
    """Reads `plan.json` of a generated folder.

    Raises PlanError if the folder or the file is missing, if this version cannot read it, or if the
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
    """Raises PlanError for stages that were made for training only."""
    if plan.mode == "train":
        raise PlanError(
            f"{plan.name} was partitioned for training alone (--mode train), so its stages cannot "
            "run in evaluation mode.",
            "Evaluate the original model with the trained weights: "
            "model.load_state_dict(pipe.state_dict()).",
        )


def portable(text: str) -> str:
    """A path or `file.py:function` without the folders of this machine.

    >>> portable("/home/me/nets.py:build"), portable("nets/mine.py:build"), portable("gpt2")
    ('nets.py:build', 'nets/mine.py:build', 'gpt2')
    """
    path, colon, function = text.partition(":")
    return Path(path).name + colon + function if Path(path).is_absolute() else text


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, as in `StageSpec.sha256`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
