"""A model from a file: the sizes of its example inputs, its optional inputs, its loss."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncpipe
from asyncpipe.partitioner.capture_and_profile import load
from asyncpipe.partitioner.planning.options import PartitionOptions
from asyncpipe.runtime.errors import CaptureError, ModelError, PlanError
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.processes.in_process import command, error_of

MODELS = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss


class Language(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.embed, self.recurrent = nn.Embedding(256, 8), nn.GRU(8, 8, batch_first=batch_first)
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 256)

    def forward(self, ids, labels):
        hidden, _ = self.recurrent(self.embed(ids))
        return cross_entropy(self.head(self.middle(hidden)).flatten(0, 1), labels.flatten())


def ids(*shape):
    return {name: torch.randint(256, shape) for name in ("ids", "labels")}


def batch_first():
    return Language(True), ids(6, 10)


def time_first():
    return Language(False), ids(10, 6)


class Shifting(Language):
    def forward(self, ids, labels):
        return super().forward(ids[:, :-1], labels[:, 1:])


def shifting():
    return Shifting(True), ids(6, 10)


class Beginning(Language):
    def forward(self, ids, labels):
        return super().forward(torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1), labels)


def beginning():
    return Beginning(True), ids(6, 10)


class MaskFirst(Language):
    def forward(self, attention_mask, input_ids, labels):
        return super().forward(input_ids, labels)


def mask_first():
    given = ids(6, 10)
    tokens = {"input_ids": given["ids"], "labels": given["labels"]}
    return MaskFirst(True), {"attention_mask": torch.ones(6, 10, dtype=torch.long), **tokens}


class Gpt(nn.Module):
    # As nanoGPT: forward takes the next tokens, and returns logits and the loss.

    def __init__(self, returns):
        super().__init__()
        self.wte, self.ln, self.head = nn.Embedding(256, 8), nn.LayerNorm(8), nn.Linear(8, 256)
        self.returns = returns

    def forward(self, idx, targets=None):
        logits = self.head(self.ln(self.wte(idx)))
        if targets is None:
            return logits
        loss = cross_entropy(logits.view(-1, 256), targets.view(-1), ignore_index=-1)
        if self.returns == "more":
            return logits, logits.square().mean()
        if self.returns == "part":
            return logits, mse_loss(self.wte(idx), self.wte(idx).detach() * 0.5)
        if self.returns == "sum":
            return logits, sum([loss * 0.5, (loss + 0.1 * logits.square().mean()) / 2])
        return (logits, loss) if self.returns == "tuple" else {"loss": loss, "logits": logits}


def pairs():
    given = ids(6, 10)
    return {"idx": given["ids"], "targets": given["labels"]}


def as_tuple():
    return Gpt("tuple"), pairs()


def as_dict():
    return Gpt("dict"), pairs()


def as_more():
    return Gpt("more"), pairs()


def as_sum():
    return Gpt("sum"), pairs()


def as_part():
    return Gpt("part"), pairs()


def without_targets():
    return Gpt("logits"), {"idx": pairs()["idx"]}


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.language = Language(True)

    def forward(self, given, mask=None, scale=1.0):
        return {"loss": self.language(given["ids"], given["labels"])}


def nested():
    return Nested(), {"given": ids(6, 10)}


def samples(**more):
    return [{"given": {name: row[0] for name, row in ids(1, 10).items()}, **more}] * 8


def masked():
    return samples(mask=torch.ones(10))


def without():
    return samples(mask=None, number=1)


def whole():
    return [(torch.arange(4, dtype=torch.uint8), torch.zeros(2))] * 8


def picture():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), {"input": torch.randn(6, 4)}
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(MODELS)
    return tmp_path


def shapes_of(models: Path, factory: str, **options: Any) -> dict[str, tuple[int, ...]]:
    source = load(f"{models / 'own.py'}:{factory}", PartitionOptions(**options), None)
    values = source.example_inputs.get("given", source.example_inputs)
    return {name: tuple(tensor.shape) for name, tensor in values.items()}


@pytest.mark.parametrize(
    ("factory", "options", "shape"),
    [
        ("batch_first", {}, (6, 10)),
        ("batch_first", {"micro_batch_size": 3}, (3, 10)),
        ("batch_first", {"seq": 17}, (6, 17)),
        ("batch_first", {"seq": 4, "micro_batch_size": 10}, (10, 4)),
        ("batch_first", {"seq": 4, "sequence_dim": None}, (6, 4)),
        ("time_first", {"micro_batch_size": 3}, (10, 3)),
        ("time_first", {"seq": 17}, (17, 6)),
        ("time_first", {"seq": 17, "batch_dim": 0}, (10, 17)),
        ("nested", {"seq": 17, "micro_batch_size": 9}, (9, 17)),
    ],
)
def test_inputs_of_ones_own_model_have_the_sizes_that_are_asked(
    models: Path, factory: str, options: dict[str, Any], shape: tuple[int, int]
) -> None:
    assert shapes_of(models, factory, **options) == {"ids": shape, "labels": shape}


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (
            "picture",
            {"seq": 5},
            r"--seq 5, but no input of Sequential has a sequence dimension: input f32\[6, 4\].\n"
            "Leave --seq out, or name the dimension: --sequence-dim INPUT=DIMENSION",
        ),
        (
            "batch_first",
            {"micro_batch_size": 5, "batch_dim": None},
            "--micro-batch-size 5, but no input of Language has a batch dimension",
        ),
    ],
)
def test_a_size_that_no_input_has_is_refused(
    models: Path, factory: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        shapes_of(models, factory, **options)


@pytest.mark.parametrize("name", ["mlp", "vit-base"])
def test_a_length_for_a_model_by_name_without_one_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="--seq 5, but no input of .* has a sequence dimension"):
        load(name, PartitionOptions(seq=5, meta=True), None)


def test_inputs_of_a_model_by_name_are_not_described() -> None:
    with pytest.raises(ModelError, match="--input describes the inputs of a factory's model, and"):
        load("mlp", PartitionOptions(inputs={"x": "f32[4, 1024]"}), None)


def made(folder: Path, *words: str) -> None:
    command(folder, "partition", *words, "--profile", "analytic", "--quiet")


def test_the_command_for_a_longer_sequence_makes_a_plan_for_it(models: Path) -> None:
    made(models, "--model", "own.py:batch_first", "--stages", "2", "--output", "g")
    longer = ("train", "g", "--seq", "32", "--data", "shakespeare", "--steps", "1", "--dry-run")
    refused, cure = error_of(models, *longer).splitlines()
    assert refused == "error: --seq 32, but the plan was made for 10 tokens."
    command(models, "partition", *shlex.split(cure)[1:])
    assert json.loads((models / "g" / "plan.json").read_text())["sizes"]["sequence"] == 32
    assert "output" in command(models, *longer).out


def losses_of(models: Path, factory: str, *options: str) -> list[float]:
    made(models, "--model", f"own.py:{factory}", "--stages", "2", "--output", factory, *options)
    run = ("train", factory, "--data", "shakespeare", "--output", f"run_{factory}")
    command(models, *run, *"--schedule single --steps 3 --micro-batches 2 --lr 0.1".split())
    lines = (models / f"run_{factory}" / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def test_a_model_that_takes_the_next_tokens_is_given_them_in_text(models: Path) -> None:
    plain = losses_of(models, "without_targets", "--loss", "cross_entropy")
    assert losses_of(models, "as_tuple") == losses_of(models, "as_dict") == pytest.approx(plain)
    assert read_plan(models / "as_tuple").next_labels == "targets"


@pytest.mark.parametrize(
    ("factory", "label"),
    [
        ("shifting", None),
        ("beginning", None),
        ("batch_first", "labels"),
        ("time_first", "labels"),
        ("mask_first", "labels"),
    ],
)
def test_a_model_that_moves_its_labels_or_inputs_is_given_the_tokens_as_labels(
    models: Path, factory: str, label: str | None
) -> None:
    losses_of(models, factory)
    assert read_plan(models / factory).next_labels == label


@pytest.mark.parametrize("factory", ["as_more", "as_part"])
def test_a_number_that_no_loss_function_made_or_that_trains_a_part_is_not_taken_for_the_loss(
    models: Path, factory: str
) -> None:
    made(models, "--model", f"own.py:{factory}", "--stages", "2", "--output", "g")
    assert read_plan(models / "g").loss is None
    assert "returns no loss and names no criterion" in error_of(models, "train", "g")


def test_a_sum_of_losses_and_penalties_is_the_loss(models: Path) -> None:
    made(models, "--model", "own.py:as_sum", "--stages", "2", "--output", "g")
    plan = read_plan(models / "g")
    assert plan.loss == plan.outputs[1]


def test_time_first_trains_as_batch_first_on_a_loss_alone(models: Path) -> None:
    of_batch_first = losses_of(models, "batch_first")
    assert losses_of(models, "time_first") == pytest.approx(of_batch_first, rel=1e-6)


def test_a_single_number_is_the_loss_unless_a_criterion_reads_it(models: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(MODELS, namespace)
    given: dict[str, Any] = {"stages": 2, "profile": "analytic"}
    for loss, name in ((None, True), ("mse", False)):
        output = models / f"loss_{loss}"
        plan = asyncpipe.partition(*namespace["batch_first"](), output=output, loss=loss, **given)
        assert (plan.loss is not None) is name
    with pytest.raises(PlanError, match=r"a loss is given \(mse\), but Nested makes its own."):
        asyncpipe.partition(*namespace["nested"](), output=models / "x", loss="mse", **given)
    assert not (models / "x").exists()


def test_samples_with_an_argument_that_the_plan_was_made_without_are_refused(models: Path) -> None:
    made(models, "--model", "own.py:nested", "--stages", "2", "--output", "g")
    run = ("train", "g", "--schedule", "single", "--steps", "1", "--data")
    told = error_of(models, *run, "own.py:masked")
    assert "a sample of own.py:masked has mask, which forward takes, but the model was" in told
    assert "1 steps" in command(models, *run, "own.py:without").out


def test_data_of_another_kind_of_number_are_told_with_both_kinds(models: Path) -> None:
    made(models, "--model", "own.py:picture", "--stages", "2", "--output", "g", "--loss", "mse")
    told = error_of(models, "train", "g", "--schedule", "single", "--data", "own.py:whole")
    assert told.endswith(
        "input of the data is uint8, but the model was partitioned with float32: convert it in the "
        "dataset.\n"
    )


def test_an_input_without_values_is_refused() -> None:
    model, given = torch.nn.Linear(4, 2), torch.empty(3, 4, device="meta")
    with pytest.raises(CaptureError, match="the input input is on meta, without values, but the"):
        asyncpipe.partition(model, given, stages=1)


class Weighted(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.first, self.head, self.loss = nn.Linear(4, 4), nn.Linear(4, 3), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(self.head(torch.tanh(self.first(x))).sigmoid(), y)}


WEIGHTS = torch.tensor([0.2, 0.5, 3.0])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(WEIGHTS),
        nn.NLLLoss(WEIGHTS, ignore_index=2),
        nn.MultiMarginLoss(weight=WEIGHTS),
        nn.BCELoss(WEIGHTS),
        nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
        nn.MultiLabelSoftMarginLoss(WEIGHTS),
    ],
)
def test_a_loss_with_the_weights_of_classes_is_captured(loss: nn.Module, tmp_path: Path) -> None:
    classes = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss | nn.MultiMarginLoss)
    y = torch.tensor([0, 2, 1, 2]) if classes else torch.rand(4, 3).round()
    plan = asyncpipe.partition(
        Weighted(loss), {"x": torch.randn(4, 4), "y": y}, stages=2, output=tmp_path / "stages"
    )
    assert plan.loss is not None
    counted = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    assert (plan.targets is not None and plan.targets.class_weights == "loss.weight") == counted


def eager(model: nn.Module) -> nn.Module:
    """The model as torch.compile wraps it, without waiting for a compiler."""
    wrapped: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return wrapped


@pytest.mark.parametrize(
    "wrapped", [eager, nn.DataParallel, lambda model: eager(nn.DataParallel(model))]
)
def test_a_wrapped_model_is_partitioned_as_the_module_in_it(
    wrapped: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model = Weighted(nn.CrossEntropyLoss())
    given = torch.randn(4, 4), torch.tensor([0, 2, 1, 2])
    plan = asyncpipe.partition(wrapped(model), given, stages=2, output=tmp_path / "stages")
    assert [spec.name for spec in plan.inputs] == ["x", "y"]
    assert plan.name == "weighted" and list(plan.state_keys) == list(model.state_dict())


def test_a_compiled_part_hides_no_batch(tmp_path: Path) -> None:
    model = Weighted(nn.CrossEntropyLoss())
    model.first = eager(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))  # type: ignore[assignment]
    given = torch.randn(4, 4), torch.tensor([0, 2, 1, 2])
    plan = asyncpipe.partition(model, given, stages=2, output=tmp_path / "stages")
    assert [spec.shape[0] for spec in plan.inputs] == ["batch", "batch"] and not plan.notes
