"""A plan -> what one of its samples is: text, an image or a vector of features, and its label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..arguments import arguments_of
from ..errors import PlanError
from ..plan import Plan, TensorSpec
from ..reading import Origin, parse_json, read_text

TARGET = "target"
"""The field of a micro-batch that a criterion outside the model reads."""

Kind = Literal["text", "image", "features", "other"]
Objective = Literal["causal", "masked", "seq2seq", "classify"]

_UNITS: dict[Kind, str] = {
    "text": "sequences",
    "image": "images",
    "features": "samples",
    "other": "samples",
}


@dataclass(frozen=True, slots=True)
class Task:
    """What a sample is and which of its fields the model and the criterion read.

    `sample` is the input that holds the sample itself, `label` the field that holds the answer
    (a model input, `target` for a criterion, or None); `classes` is the width of the logits of
    a classifier, when the plan tells it. `objective` says how text makes its own labels.
    `arguments` are the structures of forward's arguments.
    """

    kind: Kind
    sample: str
    label: str | None
    fields: tuple[str, ...]
    objective: Objective = "causal"
    classes: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        return _UNITS[self.kind]


def find_task(plan: Plan, *, criterion: str | None, architecture: str = "") -> Task:
    """Reads the task off the names, dtypes and shapes of a plan's inputs and outputs.

    `architecture` is the class name that a Hugging Face configuration gives, if there is one.
    """
    sample = _sample_input(plan)
    names = tuple(spec.name for spec in plan.inputs)
    label = "labels" if "labels" in names else TARGET if criterion else None
    fields = (*names, TARGET) if label == TARGET else names
    kind = _kind(sample)
    objective = _objective(plan, architecture) if kind == "text" else "causal"
    return Task(kind, sample.name, label, fields, objective, _classes(plan), arguments_of(plan))


def architecture_of(folder: str | Path) -> str:
    """The class name in `hf/config.json` of a generated folder, or an empty text.

    Raises PlanError when the file is damaged."""
    path = Path(folder) / "hf" / "config.json"
    if not path.is_file():
        return ""
    origin = Origin(str(path), PlanError, "Partition the model again.")
    raw = parse_json(read_text(path, origin), origin, finite=False)
    names = raw.get("architectures") if isinstance(raw, dict) else None
    return str(names[0]) if isinstance(names, list) and names else ""


def _sample_input(plan: Plan) -> TensorSpec:
    for name in ("input_ids", "pixel_values"):
        for spec in plan.inputs:
            if spec.name == name:
                return spec
    return plan.inputs[0]


def _kind(sample: TensorSpec) -> Kind:
    dimensions = len(sample.shape)
    if any(isinstance(size, str) for size in sample.shape) and sample.batch_dim is None:
        return "other"
    if sample.dtype.startswith("int"):
        return "text" if dimensions == 2 else "other"
    if not sample.dtype.startswith(("float", "bfloat")):
        return "other"
    return "image" if dimensions == 4 else "features" if dimensions == 2 else "other"


def _objective(plan: Plan, architecture: str) -> Objective:
    labels = next((spec for spec in plan.inputs if spec.name == "labels"), None)
    hint = (architecture or plan.name).lower()
    if labels is not None and len(labels.shape) == 1:
        return "classify"
    if any(spec.name == "decoder_input_ids" for spec in plan.inputs):
        return "seq2seq"
    if "conditionalgeneration" in hint or hint.startswith(("t5", "bart", "mbart", "flan")):
        return "seq2seq"
    if "maskedlm" in hint or hint.startswith(("bert", "roberta", "distilbert", "electra")):
        return "masked"
    return "causal"


def _classes(plan: Plan) -> int | None:
    """The last size of the logits when they are one vector a sample."""
    outputs = plan.outputs
    name = outputs.get("logits") if isinstance(outputs, dict) else outputs
    for value in plan.values:
        if value.name == name and len(value.shape) == 2 and isinstance(value.shape[1], int):
            return value.shape[1]
    return None
