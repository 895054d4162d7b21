"""Targets that do not count, as those of padding: the loss of a step is that of the whole batch,
however it is split into micro-batches, replicas and ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, cross_entropy, log_softmax, nll_loss, pad
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import asyncpipe
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.plan.targets import CountedTargets
from asyncpipe.runtime.plan.validate import contradiction
from asyncpipe.tests.runtime.training.test_replicas import assert_same_training
from asyncpipe.tests.runtime.training.test_stage_replicas import replicate
from asyncpipe.tests.support.models.hand_folders import PlainMlp, exact_settings, write_mlp
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

WORDS = 40


class NextTokens(nn.Module):
    """As nanoGPT: the targets are the next tokens, and -1 does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.inner(self.embed(idx).cumsum(1))))
        return logits, cross_entropy(logits.view(-1, WORDS), targets.view(-1), ignore_index=-1)


class TimeFirst(nn.Module):
    """Moves its labels in dimension 0, and its loss is a module that ignores 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(WORDS, 8), nn.GRU(8, 8)
        self.head, self.loss = nn.Linear(8, WORDS), nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.inner(self.embed(x))[0])
        return {"loss": self.loss(logits[:-1].flatten(0, 1), y[1:].flatten()), "logits": logits}


class ClassWeights(TimeFirst):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(torch.linspace(0.1, 1, WORDS), ignore_index=0)


def transformer(kind: Any, config: Any, **sizes: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = kind(config(vocab_size=WORDS, **sizes))
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def gpt2() -> nn.Module:
    config = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16, "bos_token_id": 0}
    return transformer(GPT2LMHeadModel, GPT2Config, eos_token_id=0, attn_pdrop=0, **config)


def bert() -> nn.Module:
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return transformer(
        BertForMaskedLM,
        BertConfig,
        hidden_size=8,
        intermediate_size=8,
        attention_probs_dropout_prob=0,
        **heads,
    )


def t5() -> nn.Module:
    sizes = {"num_layers": 1, "num_heads": 2, "d_model": 8, "d_ff": 8, "d_kv": 4}
    return transformer(
        T5ForConditionalGeneration, T5Config, dropout_rate=0, decoder_start_token_id=0, **sizes
    )


MODELS: Mapping[str, tuple[Callable[[], nn.Module], str, CountedTargets]] = {
    "gpt2": (gpt2, "input_ids", CountedTargets("labels", -100, 1)),
    "bert": (bert, "input_ids", CountedTargets("labels", -100)),
    "t5": (t5, "input_ids", CountedTargets("labels", -100)),
    "next_tokens": (NextTokens, "idx", CountedTargets("targets", -1)),
    "time_first": (TimeFirst, "x", CountedTargets("y", 0, 0)),
    "class_weights": (ClassWeights, "x", CountedTargets("y", 0, 0, "loss.weight")),
}


def batch_of(tokens: str, counted: CountedTargets) -> dict[str, Tensor]:
    """Eight samples with very different numbers of targets; those of the last two have none."""
    torch.manual_seed(1)
    ids = torch.randint(1, WORDS, (8, 6))
    labels = ids.clone()
    for sample, number in enumerate((6, 5, 1, 2, 2, 3, 0, 0)):
        labels[sample, number:] = counted.ignored
    if counted.moved == 0:
        ids, labels = ids.t().contiguous(), labels.t().contiguous()
    return {tokens: ids, counted.input: labels}


def plain(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the model for the whole batch."""
    model.train().zero_grad()
    result = model(**batch)
    loss = result[1] if isinstance(result, tuple) else result["loss"]
    loss.backward()
    return loss.item(), {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }


def assert_gradients(pipe: asyncpipe.Pipeline, expected: Mapping[str, Tensor]) -> None:
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=2e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_its_loss_has_the_loss_and_gradients_of_the_whole_batch(
    name: str, tmp_path: Path
) -> None:
    build, tokens, counted = MODELS[name]
    torch.manual_seed(0)
    model, batch = build(), batch_of(tokens, counted)
    options: dict[str, Any] = {"stages": 2, "profile": "analytic", "output": tmp_path / name}
    assert asyncpipe.partition(model, batch, **options).targets == counted
    loss, gradients = plain(model, batch)
    for schedule in ("gpipe", "zb-h1"):
        pipe = asyncpipe.Pipeline(tmp_path / name, schedule=schedule, micro_batches=4)
        result = pipe.step(dict(batch), outputs=True)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        outputs = result.outputs
        own = outputs[1] if isinstance(outputs, tuple) else outputs["loss"]
        assert float(own) == pytest.approx(loss, rel=1e-6)
        assert_gradients(pipe, gradients)
        assert pipe.evaluate([batch]).loss == pytest.approx(loss, rel=1e-6)
        (predicted,) = pipe.predict([batch])
        own = predicted[1] if isinstance(predicted, tuple) else predicted["loss"]
        assert float(own) == pytest.approx(loss, rel=1e-6)


class MadeTwice(NextTokens):
    def forward(self, idx: Tensor, targets: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        _, loss = super().forward(idx, targets)
        return {"loss": (loss + loss) / 2}


class EverySecond(NextTokens):
    def forward(self, idx: Tensor, targets: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(torch.tanh(self.inner(self.embed(idx))))
        kept = targets[:, ::2].flatten()
        return {"loss": cross_entropy(logits[:, ::2].flatten(0, 1), kept, ignore_index=-1)}


class Chosen(NextTokens):
    def forward(self, idx: Tensor, targets: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(torch.tanh(self.inner(self.embed(idx))))
        kept = torch.where(idx > 3, targets, -1).flatten()
        return {"loss": cross_entropy(logits.flatten(0, 1), kept, ignore_index=-1)}


class PadsFirst(NextTokens):
    def forward(self, idx: Tensor, targets: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(torch.tanh(self.inner(self.embed(idx))))
        kept = pad(targets, (1, 0), value=-1)[:, 1:].flatten()
        return {"loss": cross_entropy(logits.flatten(0, 1), kept, ignore_index=-1)}


@pytest.mark.parametrize("kind", [MadeTwice, EverySecond, Chosen, PadsFirst])
def test_targets_that_cannot_be_counted_from_an_input_are_not_guessed(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    batch = batch_of("idx", CountedTargets("targets", -1))
    plan = asyncpipe.partition(
        kind(), batch, stages=2, profile="analytic", output=tmp_path / "stages"
    )
    assert plan.loss is not None and plan.targets is None


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.inner(self.embed(ids).cumsum(1))))
        return logits


CLASS_WEIGHTS = torch.linspace(0.1, 1, WORDS)


def of_rows(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


CRITERIA: dict[str, Any] = {
    "a name": "cross_entropy",
    "rows": of_rows,
    "moved": lambda o, t: of_rows(o[:, :-1], t[:, 1:]),
    "logarithms": lambda o, t: nll_loss(log_softmax(o, -1).transpose(1, 2), t),
    "smoothed": lambda o, t: cross_entropy(o.transpose(1, 2), t, label_smoothing=0.1),
    "class weights": lambda o, t: cross_entropy(o.transpose(1, 2), t, CLASS_WEIGHTS),
    "compiled": torch.compile(of_rows, backend="eager"),
}


@pytest.fixture(scope="module")
def logits_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model, folder = Logits(), tmp_path_factory.mktemp("logits") / "stages"
    ids = {"ids": torch.randint(WORDS, (2, 6))}
    asyncpipe.partition(model, ids, stages=2, profile="analytic", output=folder)
    return model, folder


def masked() -> tuple[Tensor, Tensor]:
    batch = batch_of("ids", CountedTargets("target", -100))
    return batch["ids"], batch["target"]


@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_that_is_one_cross_entropy_has_those_of_the_whole_batch_too(
    name: str, logits_folder: tuple[nn.Module, Path]
) -> None:
    model, folder = logits_folder
    criterion, (ids, target) = CRITERIA[name], masked()
    own = of_rows if isinstance(criterion, str) else criterion
    model.zero_grad()
    loss = own(model(ids), target)
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    pipe = asyncpipe.Pipeline(folder, loss=criterion, micro_batches=4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*targets of -100")
        assert pipe.step((ids, target)).loss == pytest.approx(loss.item(), rel=1e-6)
    assert_gradients(pipe, {key: each for key, each in gradients.items() if each is not None})
    # The second batch has no target that counts.
    evaluated = pipe.evaluate([(ids, target), (ids[:4], torch.full_like(target[:4], -100))])
    assert evaluated.loss == pytest.approx(loss.item(), rel=1e-6)
    assert pipe.step((ids, target)).loss == pytest.approx(loss.item(), rel=1e-6)


def test_a_micro_batch_whose_classes_have_no_weight_changes_nothing(
    logits_folder: tuple[nn.Module, Path],
) -> None:
    # Its own loss and gradients are not numbers: no weight divided by none.
    model, folder = logits_folder
    ids, target = masked()
    target[:2], weights = 5, CLASS_WEIGHTS.clone().index_fill(0, torch.tensor([5]), 0.0)

    def weighted(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits.mT, target, weights)

    model.zero_grad()
    loss = weighted(model(ids), target)
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    pipe = asyncpipe.Pipeline(folder, loss=weighted, micro_batches=4)
    assert pipe.step((ids, target)).loss == pytest.approx(loss.item(), rel=1e-6)
    assert_gradients(pipe, {key: each for key, each in gradients.items() if each is not None})


def test_a_smoothed_loss_that_no_weight_divides_is_refused(
    logits_folder: tuple[nn.Module, Path],
) -> None:
    ids, target = masked()
    target[:2], weights = 5, CLASS_WEIGHTS.clone().index_fill(0, torch.tensor([5]), 0.0)

    def smoothed(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits.mT, target, weights, label_smoothing=0.1)

    pipe = asyncpipe.Pipeline(logits_folder[1], loss=smoothed, micro_batches=4)
    with pytest.raises(AsyncPipeError, match="target of a micro-batch has only classes of weight"):
        pipe.step((ids, target))
    pipe = asyncpipe.Pipeline(logits_folder[1], loss=smoothed, micro_batches=2)
    loss = smoothed(logits_folder[0](ids), target)
    assert pipe.step((ids, target)).loss == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    "criterion",
    [
        lambda o, t: of_rows(o, t) + 1e-3 * o.square().mean(),
        lambda o, t: (of_rows(o, t) + of_rows(o, t)) / 2,
        lambda o, t: of_rows(o[:, ::2], t[:, ::2]),
    ],
)
def test_another_loss_with_ignored_targets_warns(
    criterion: Any, logits_folder: tuple[nn.Module, Path]
) -> None:
    ids, target = masked()
    pipe = asyncpipe.Pipeline(logits_folder[1], loss=criterion, micro_batches=2)
    with pytest.warns(UserWarning, match="target has targets of -100, but the loss is not known"):
        pipe.step((ids[:4], target[:4]))


def test_of_a_whole_batch_in_one_micro_batch_nothing_is_said(
    logits_folder: tuple[nn.Module, Path],
) -> None:
    ids, target = masked()
    pipe = asyncpipe.Pipeline(
        logits_folder[1], loss=lambda o, t: of_rows(o, t) * 2, micro_batches=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step((ids, target))


def test_late_gradients_are_weighted_alike(logits_folder: tuple[nn.Module, Path]) -> None:
    # Every step has 19 targets, so that their sum over 19 / 4 is the same loss.
    ids, target = masked()
    batches = [(ids.roll(shift, 0), target.roll(shift, 0)) for shift in range(6)]

    def summed(logits: Tensor, target: Tensor) -> Tensor:
        whole = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return whole / (19 / 4)

    losses = []
    for criterion in (of_rows, summed):
        options: dict[str, Any] = {"schedule": "async-1f1b", "staleness": "stash"}
        pipe = asyncpipe.Pipeline(logits_folder[1], loss=criterion, micro_batches=4, **options)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append([result.loss for result in pipe.stream(batches, optimizer=optimizer)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(set(losses[0])) == 6


class Autoencoder(nn.Module):
    """Its loss is a sum over samples, as of most variational autoencoders."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(8, 6)
        self.kind, self.loss = kind, nn.MSELoss(reduction="sum")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.encode(x))
        made = torch.sigmoid(self.decode(hidden))
        kept = -0.5 * torch.sum(1 + hidden - hidden.pow(2) - hidden.exp())
        match self.kind:
            case "sum":
                return {"loss": binary_cross_entropy(made, x, reduction="sum") + kept}
            case "multiple":
                return {"loss": (self.loss(made, x) + 4 * kept) / 10}
            case "mean":
                return {"loss": (self.loss(made, x) + kept) / len(x)}
            case "per number":
                return {"loss": ((made - x) ** 2).sum() / x.numel()}
        return {"loss": self.loss(made, x).float() + self.encode.weight.pow(2).sum()}


@pytest.mark.parametrize(
    ("kind", "is_sum"), [("sum", True), ("multiple", True), ("mean", False), ("per number", False)]
)
def test_a_sum_over_samples_is_that_of_the_whole_batch(
    kind: str, is_sum: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, batch = Autoencoder(kind), {"x": torch.rand(8, 6)}
    options: dict[str, Any] = {"stages": 2, "profile": "analytic", "output": tmp_path / "stages"}
    plan = asyncpipe.partition(model, batch, **options)
    assert plan.loss_is_sum == is_sum and not plan.notes
    loss, gradients = plain(model, batch)
    for micro_batches in (4, 3):
        pipe = asyncpipe.Pipeline(tmp_path / "stages", micro_batches=micro_batches)
        result = pipe.step(batch, outputs=True)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert float(result.outputs["loss"]) == pytest.approx(loss, rel=1e-6)
        assert_gradients(pipe, gradients)
        evaluated = pipe.evaluate([batch]).loss * (8 if is_sum else 1)
        assert evaluated == pytest.approx(loss, rel=1e-6)
        (predicted,) = pipe.predict([batch])
        assert float(predicted["loss"]) == pytest.approx(loss, rel=1e-6)


def test_a_loss_with_a_sum_and_other_terms_is_noted(tmp_path: Path) -> None:
    x = {"x": torch.rand(8, 6)}
    options: dict[str, Any] = {"stages": 2, "profile": "analytic", "output": tmp_path / "stages"}
    plan = asyncpipe.partition(Autoencoder("with weights"), x, **options)
    assert not plan.loss_is_sum
    assert plan.notes[0].startswith("the loss adds up over samples in a part of its terms")


def test_a_criterion_that_adds_up_does_so_over_the_batch(
    logits_folder: tuple[nn.Module, Path],
) -> None:
    model, folder = logits_folder
    ids, target = masked()
    model.zero_grad()
    loss = cross_entropy(model(ids).mT, target, reduction="sum")
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    pipe = asyncpipe.Pipeline(
        folder, loss=lambda o, t: cross_entropy(o.mT, t, reduction="sum"), micro_batches=3
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*targets of -100")
        assert pipe.step((ids, target)).loss == pytest.approx(loss.item(), rel=1e-6)
    assert_gradients(pipe, {key: each for key, each in gradients.items() if each is not None})
    assert pipe.evaluate([(ids, target)]).loss * 8 == pytest.approx(loss.item(), rel=1e-6)


OWN = """
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(5)
X, Y = torch.randn(60, {width}), torch.randint({classes}, (60,))
Y[torch.rand(60) < torch.arange(60) / 60] = -100
Y[8:12] = -100


class Stream(IterableDataset):
    def __iter__(self):
        return ({"x": x, "target": y} for x, y in zip(X, Y))


def data():
    return DataLoader(list(zip(X, Y)), shuffle=False), (X[:17], Y[:17])


def stream():
    return Stream(), (X[:17], Y[:17])


def own(outputs, target):
    return cross_entropy(outputs, target)


def total(outputs, target):
    return cross_entropy(outputs, target, reduction="sum")


def mean_of_all(outputs, target):
    return (outputs.sum(1) * 0.01 + target).mean()


def by_hand(outputs, target):
    kept = target != -100
    return (cross_entropy(outputs, target, reduction="none") * kept).sum() / (kept.sum() + 1)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    plan = write_mlp(folder / "mlp")
    replicate(folder / "last", write_mlp(folder / "last"), 1, 2)
    sizes = {spec.name: spec.shape for spec in (*plan.inputs, *plan.values)}
    width, classes = (shape[-1] for shape in (sizes["x"], list(sizes.values())[-1]))
    text = OWN.replace("{width}", str(width)).replace("{classes}", str(classes))
    (folder / "own.py").write_text(text)
    return folder


def settings(folder: Path, output: Path, **given: Any) -> Settings:
    own = folder.parent / "own.py"
    options = {"data": f"{own}:data", "criterion": f"{own}:own", "micro_batch_size": 4}
    return exact_settings(folder, output, **(options | given))


UNEVEN: dict[str, Any] = {"samples": 38, "remainder": "proportional"}
"""Two whole steps of 16 samples and one of 6, in which a replica has none of its own."""


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("mlp", {"schedule": "1f1b", "micro_batches": 4}),
        ("mlp", {"replicas": 2, "micro_batches": 2, "check_replicas": 1}),
        ("mlp", {"replicas": 2, "micro_batches": 2, "criterion": "own.py:total"}),
        ("mlp", {"replicas": 2, "micro_batches": 2, "workers": 1, "criterion": "cross_entropy"}),
        ("last", {"schedule": "1f1b", "micro_batches": 4}),
    ],
)
def test_all_ranks_together_train_as_one_process(
    folders: Path, tmp_path: Path, name: str, given: dict[str, Any]
) -> None:
    if (own := given.get("criterion", "own.py:own")).startswith("own.py"):
        given = given | {"criterion": f"{folders}/{own}"}
    one = {"schedule": "single", "micro_batches": 4, "criterion": given["criterion"]}
    run(settings(folders / "mlp", tmp_path / "one", **UNEVEN, **one), FACTORY)
    run(settings(folders / name, tmp_path / "more", **UNEVEN, **given), FACTORY)
    assert_same_training(tmp_path / "one", tmp_path / "more", PlainMlp())


@pytest.mark.parametrize("data", ["stream", "data"])
def test_one_process_trains_as_the_plain_loop(folders: Path, tmp_path: Path, data: str) -> None:
    given = {"schedule": "single", "micro_batches": 4, "clip": 0.0, "decay": "none"}
    given |= {"optimizer": "sgd", "momentum": 0.0, "lr": 0.1} | (UNEVEN if data == "data" else {})
    own = folders / "own.py"
    run(settings(folders / "mlp", tmp_path / "run", data=f"{own}:{data}", **given), FACTORY)
    scope: dict[str, Any] = {}
    exec(own.read_text(), scope)  # the text above
    x, y = scope["X"].double(), scope["Y"]
    model = asyncpipe.load(folders / "mlp").double()
    losses = []
    for step, samples in enumerate((16, 16, 6 if data == "data" else 16)):
        rows = slice(16 * step, 16 * step + samples)
        loss = cross_entropy(model(x[rows]), y[rows])
        model.zero_grad()
        loss.backward()
        # Of a smaller step the gradient and the learning rate count in proportion.
        torch.optim.SGD(model.parameters(), lr=0.1 * (samples / 16) ** 2).step()
        losses.append(loss.item())
    found = [line["loss"] for line in events_of(tmp_path / "run", "step")]
    assert found == pytest.approx(losses, rel=1e-9)
    (evaluated,) = events_of(tmp_path / "run", "eval")
    with torch.no_grad():
        expected = cross_entropy(model(x[:17]), y[:17]).item()
    assert evaluated["loss"] == pytest.approx(expected, rel=1e-9)


def test_replicas_whose_loss_counts_no_targets_ask_each_other_once(
    folders: Path, tmp_path: Path
) -> None:
    given = {"criterion": f"{folders / 'own.py'}:mean_of_all", **UNEVEN}
    for output, more in (
        ("one", {"schedule": "single", "micro_batches": 4}),
        ("two", {"replicas": 2, "micro_batches": 2}),
    ):
        run(settings(folders / "mlp", tmp_path / output, **given, **more), FACTORY)
    assert_same_training(tmp_path / "one", tmp_path / "two", PlainMlp())


def test_a_run_warns_of_a_loss_that_is_not_known_to_count_its_targets(
    folders: Path, tmp_path: Path
) -> None:
    own = folders / "own.py"
    run(settings(folders / "mlp", tmp_path / "run", criterion=f"{own}:by_hand"), FACTORY)
    warned = [text for text in events_of(tmp_path / "run", "warning") if "-100" in text]
    assert len(warned) == 1 and warned[0].startswith("target has targets of -100, but the loss is")


def test_the_weights_of_classes_are_in_the_stage_of_the_loss(tmp_path: Path) -> None:
    _, tokens, counted = MODELS["class_weights"]
    options: dict[str, Any] = {"stages": 2, "profile": "analytic", "output": tmp_path / "stages"}
    plan = asyncpipe.partition(ClassWeights(), batch_of(tokens, counted), **options)
    first, last = plan.stages
    elsewhere = replace(first, buffers=last.buffers), replace(last, buffers=())
    wrong = contradiction(replace(plan, stages=elsewhere))
    assert wrong == "its loss has the weights loss.weight, which does not exist"


@pytest.mark.parametrize(
    ("targets", "wrong"),
    [
        (CountedTargets("y", -100), "its loss counts y, which does not exist"),
        (CountedTargets("x", -100, 2), "its loss moves x in dimension 2"),
        (CountedTargets("x", -100, -1), "its loss moves x in dimension -1"),
        (CountedTargets("x", -100, None, "w"), "its loss has the weights w, which does not exist"),
    ],
)
def test_a_plan_whose_targets_are_not_there_contradicts_itself(
    folders: Path, targets: CountedTargets, wrong: str
) -> None:
    plan: Plan = read_plan(folders / "mlp")
    assert contradiction(replace(plan, targets=targets)) == wrong
