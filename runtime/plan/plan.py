"""The contract between compiler and runtime: each stage with its inputs, outputs and costs.

A plan is plain data. It is written to `plan.json` in the generated folder and is all that the
runtime knows about a model; nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import PlanError
from ..schedule.asynchronous import ASYNCHRONOUS
from ..serialization import Origin, parse_json, read_text, shaped
from .findings import BestLayout, Candidate, Finding
from .setting import PlanSetting
from .structure import evaluate_size
from .targets import CountedTargets
from .validate import COMMAND, contradiction, is_command

SCHEMA = 5

_SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the model at a boundary, an input or an output.

    name: its name in the generated forwards
    dtype: without `torch.`, such as "float32"
    shape: each size is a number or an expression of symbols, such as `"2*batch*sequence"`
    requires_grad: a gradient comes back for it
    """

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
    """A tensor that crosses stages.

    tensor: its name, dtype and shape
    source, targets: the stage that makes it, and the later stages that read it
    """

    tensor: TensorSpec
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a stage at its peak, by purpose.

    parameters, gradients: of the stage's parameters
    optimizer: the optimizer's state
    versions: older or predicted weights of an asynchronous run
    buffers: the stage's buffers
    activations: those of all micro-batches in flight
    transport: boundary tensors that are sent or about to be received
    transient: the most that one operation needs in addition
    """

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
        """The sum of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, slots=True)
class StagePart:
    """A module of a stage, or its other operations together.

    name: the path of the module
    forward_ms, backward_ms: its times for one micro-batch
    operations, slowest: their number, and the slowest with its line; 0 and "" if unknown
    """

    name: str
    forward_ms: float
    backward_ms: float
    operations: int = 0
    slowest: str = ""


READ_FROM = "read from "  # the start of `Plan.weights` for weights that were trained before
ON_META = "none (--meta)"
NOT_STORED = "not stored"
NO_WEIGHTS: Mapping[str, str] = MappingProxyType({ON_META: "--meta", NOT_STORED: "--no-weights"})
"""`Plan.weights` of a plan without weights -> the option that it was made with."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One generated stage: its file, its forward's arguments and results in order, its costs.

    Costs are for one micro-batch of the sizes in `Plan.sizes`; times in milliseconds.

    index: the number of the stage, from 0
    file, class_name: the stage's file in the folder, and the class in it
    modules: the modules of the original in it, rows of equal ones as one
    inputs: the positional arguments of forward, each the name of a model input or boundary tensor
    outputs: the boundary tensors and model outputs that forward returns, several as a tuple
    parameters, buffers: their names in the original
    draws_random: it draws random numbers, as dropout does
    forward_ms, backward_ms: times; a backward includes a recomputed forward
    param_bytes: bytes of the parameters
    activation_bytes: bytes kept for the backward of one micro-batch
    peak_bytes: the sum of `memory`
    sends, receives: the boundary tensors that it makes and that it reads
    memory: its memory with `in_flight` micro-batches
    in_flight: the most micro-batches between their forward and backward
    load_ms: its whole time, with transfers and, if asynchronous, its share of the optimizer
    forward_talk_ms, backward_talk_ms: additional time of the rank for transfers
    exchange_ms: the time of exchanging gradients of shared parameters, once per step
    weight_ms: the part of `backward_ms` that makes weight gradients, which a schedule may delay
    update_ms: the time of the optimizer, once per step, if the load counts it
    recompute: the backward runs the forward again
    ranks: several if the stage is replicated; several stages may have the same rank
    parts: its parts in the order of forward; their times add up to those of the stage
    sha256: the hash of the generated file
    draws_numbers: it draws from Python's or NumPy's generator; `draws_random` is true as well
    changes, changes_trained: the parameters and buffers that forward writes to in place, and the
        parameters among them with a gradient
    summing_ms: the time in which its replicas sum their gradients, once per step
    tensor_sums_ms: the part of `forward_ms` and `backward_ms` in which tensor ranks sum
    unshared: its memory without `zero`, if its replicas share memory out; otherwise None
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
    parts: tuple[StagePart, ...] = ()
    sha256: str = ""
    draws_numbers: bool = False
    changes: tuple[str, ...] = ()
    changes_trained: tuple[str, ...] = ()
    summing_ms: float = 0.0
    tensor_sums_ms: float = 0.0
    unshared: StageMemory | None = None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients, also where a replica keeps a part of them."""
        return (self.unshared or self.memory).gradients

    def without_sharing(self) -> StageSpec:
        """The stage with the memory of a replica that shares out nothing."""
        if self.unshared is None:
            return self
        gradients, optimizer = self.unshared.gradients, self.unshared.optimizer
        memory = replace(self.memory, gradients=gradients, optimizer=optimizer)
        return replace(self, memory=memory, peak_bytes=memory.total, unshared=None)

    def named_outputs(self, result: Any) -> dict[str, Any]:
        """The result of forward, by name."""
        results = (result,) if len(self.outputs) == 1 else result or ()
        return dict(zip(self.outputs, results, strict=True))


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter of the original with several names or on several stages.

    names: all names of the parameter, the owner's first
    holders: each stage that holds it, with its name there
    trains: False if it needs no gradient, so that its holders exchange nothing
    """

    names: tuple[str, ...]
    holders: tuple[tuple[int, str], ...]
    trains: bool = True

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that hold it."""
        return tuple(stage for stage, _ in self.holders)


_USUAL: Mapping[str, Any] = MappingProxyType(
    {"default_dtype": "float32", "mode": "both", "tensor_parallel": 1, "trains": True}
    | dict.fromkeys(("draws_numbers", "loss_is_sum"), False)
    | dict.fromkeys(("number", "unshared", "next_labels", "targets"), None)
    | dict.fromkeys(("left_out", "layouts", "changes", "changes_trained"), ())
    | dict.fromkeys(("summing_ms", "tensor_sums_ms", "spread", "zero"), 0)
)
"""Values that plan.json leaves out, because few plans have others."""


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The partition of a model, with everything that the runtime needs to run it.

    name: the name of the model, as in the name of the folder
    model, model_args: the model as the command or the caller named it, and its arguments
    command: the command that makes the folder again
    sizes: the sizes of the example inputs by symbol: `batch`, `sequence`
    inputs: the inputs of the model
    values: all boundary tensors and outputs
    outputs: the structure of the original's output with the names of tensors (`structure.py`)
    loss: the name of the output value that is the loss; None with a criterion outside the model
    next_labels: the input whose label at a position has to be the next token; None without one
    targets: the targets over which the loss is the mean; None if it is over samples
    loss_is_sum: the loss is a sum over samples instead
    criterion: the criterion outside the model
    stages: the stages in order
    shared: the parameters with several names or on several stages
    method: the planning method
    bottleneck_ms: the slowest stage or rank, for one micro-batch
    lower_bound_ms: a proven lower bound of `bottleneck_ms` for all plans
    even_split_ms: the slowest stage of an even split by blocks
    optimal: the objective reaches its lower bound
    setting: the run that the plan is for
    profile: facts about the profile, such as its device and dtype
    hashes: SHA-256 of the graph
    weights: the origin of the weights
    state_keys: the keys of the original's state_dict, in its order
    unused: those of `state_keys` that no stage needs, because forward never reads them
    notes: remarks of the capture and about the loss
    explanation: why the cuts are where they are, in a few clauses
    findings: the long explanation, with possible changes
    even_split: forward and backward milliseconds of the stages of an even split by blocks
    candidates: other plans that were considered
    if_sent: the boundaries if no stage recomputed an earlier one's value; empty if equal
    arguments: the structure of forward's arguments, as in `outputs`; None if these are the inputs
    left_out: the arguments of forward that the example left at their defaults
    constants: tensors outside the state_dict, stored with the weights
    default_dtype: torch's default dtype at the capture, in which stages run everywhere
    mode: "both", or "train" for stages without an evaluation mode
    tensor_parallel: the tensor ranks of each stage, as planned; 1 for stages that nothing splits
    layouts: the fastest layout of each number of devices, if it was chosen
    schema: the version of the format of plan.json
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
    setting: PlanSetting
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
    left_out: tuple[str, ...] = ()
    next_labels: str | None = None
    targets: CountedTargets | None = None
    loss_is_sum: bool = False
    constants: tuple[str, ...] = ()
    default_dtype: str = "float32"
    mode: str = "both"
    tensor_parallel: int = 1
    layouts: tuple[BestLayout, ...] = ()
    schema: int = field(default=SCHEMA)

    @property
    def gap(self) -> float:
        """The share by which the bottleneck or the synchronous step is above its proven bound."""
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
        return "rank" if max(map(len, self.stages_of_rank.values()), default=0) > 1 else "stage"

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        """All tensors that cross stages, by the stage that makes them."""
        return tuple(boundary for stage in self.stages for boundary in stage.sends)

    def input_stages(self, name: str) -> tuple[int, ...]:
        """The stages whose forward reads the model input `name`."""
        return tuple(stage.index for stage in self.stages if name in stage.inputs)

    def __repr__(self) -> str:
        ms = f"{self.bottleneck_ms:.4g} ms"
        return f"<Plan {self.name}: {len(self.stages)} stages, bottleneck {self.slowest} {ms}>"

    def __str__(self) -> str:
        from .stage_table import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from .stage_table import as_html

        return as_html(self)

    def to_json(self) -> str:
        """The text of plan.json; the same plan is the same text."""
        document = asdict(self)
        for candidate in document["candidates"]:
            del candidate["seconds"]
        setting = document["setting"]
        parts = (*document["stages"], setting, *setting["ranks"], *document["shared"])
        for part in (document, *parts):
            for name, value in _USUAL.items():
                if part.get(name, ...) == value:
                    del part[name]
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def read_plan(folder: str | Path) -> Plan:
    """Reads `plan.json` of a generated folder. Raises PlanError if the folder or the file is
    missing, if this version cannot read it, or if the plan contradicts itself."""
    path = Path(folder) / "plan.json"
    if not path.is_file():
        problem = "has no plan.json" if path.parent.is_dir() else "does not exist"
        raise PlanError(
            f"{folder} {problem}: not a generated model.",
            "asyncpipe-partition --model gpt2 --stages 4 makes one.",
        )
    origin = Origin(str(path), PlanError, "Partition the model again.")
    raw = parse_json(read_text(path, origin), origin)
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if isinstance(raw, dict) and schema != SCHEMA:
        given = str(raw.get("command", ""))
        raise PlanError(
            f"{path} has schema {schema!r:.20}, this version of asyncpipe reads {SCHEMA}.",
            f"{given if is_command(given) else f'{COMMAND} ...'} --force",
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
