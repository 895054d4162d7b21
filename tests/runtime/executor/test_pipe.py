"""A generated folder read back: the original's state_dict, outputs and weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.models.load import load_model
from asyncpipe.runtime.errors import DataError, PlanError
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.tensor_files import read_tensors, write_index, write_shard
from asyncpipe.tests.support.models.generated import CASES, cut


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut(CASES["gpt2"], 3, tmp_path_factory.mktemp("gpt2") / "3p")


@pytest.mark.parametrize("name", CASES)
def test_the_state_dict_has_exactly_the_originals_keys_values_and_order(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    pipe = asyncpipe.load(cut(case, 2, tmp_path / "2p"))
    expected = case.build().state_dict()
    actual = pipe.state_dict()
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


def test_the_output_has_the_originals_structure(folder: Path) -> None:
    pipe = asyncpipe.load(folder).eval()
    model = CASES["gpt2"].build().eval()
    inputs = CASES["gpt2"].micro_batch(3)
    expected, actual = model(**inputs), pipe(**inputs)
    assert list(actual) == ["loss", "logits"]
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name])
    with pytest.raises(DataError, match="case takes input_ids, labels; got input_ids"):
        pipe(input_ids=inputs["input_ids"])


class _OfTwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(self.first(x).mean(1) + y)


def test_sizes_of_the_data_are_compared_before_anything_runs(tmp_path: Path) -> None:
    example = {"x": torch.randn(4, 3, 6), "y": torch.randn(4, 5)}
    folder = tmp_path / "2p"
    asyncpipe.partition(_OfTwoInputs(), example, stages=2, output=folder, profile="analytic")
    pipe = asyncpipe.load(folder)
    assert pipe(x=torch.randn(7, 3, 6), y=torch.randn(7, 5)).shape == (7, 2)
    ran: list[nn.Module] = []
    pipe.stages[0].register_forward_pre_hook(lambda stage, given: ran.append(stage))
    for x, y, words in [
        ((4, 8, 6), (4, 5), r"dimension 1 of x is 8 \(in \[4, 8, 6\]\), .* captured for 3 only"),
        ((4, 8, 6), (4, 5), "if the model takes every size there, with --sequence-dim x=1"),
        ((4, 3, 6), (4, 1), r"dimension 1 of y is 1 \(in \[4, 1\]\), but .* captured for 5 only"),
        ((4, 3, 6), (5,), r"y has the shape \[5\], but .* captured with \[batch, 5\]"),
        ((4, 3, 6), (5, 5), "the batch size is 4 in dimension 0 of x, but 5 in dimension 0 of y"),
    ]:
        with pytest.raises(DataError, match=words):
            pipe(x=torch.randn(x), y=torch.randn(y))
    assert not ran


def test_tied_weights_are_one_parameter(folder: Path) -> None:
    pipe = asyncpipe.load(folder)
    first, last = pipe.stages[0], pipe.stages[-1]
    assert first.get_parameter("transformer.wte.weight") is last.get_parameter("lm_head.weight")
    model = CASES["gpt2"].build()
    assert len(list(pipe.parameters())) == len(list(model.parameters()))


def test_a_state_dict_of_the_original_is_read(folder: Path) -> None:
    pipe = asyncpipe.load(folder)
    state = {key: value + 1 for key, value in pipe.state_dict().items()}
    pipe.load_state_dict(state)
    assert torch.equal(pipe.state_dict()["transformer.ln_f.bias"], state["transformer.ln_f.bias"])
    with pytest.raises(DataError, match="lacks 1 of"):
        pipe.load_state_dict({key: value for key, value in state.items() if "ln_f.bias" not in key})


@pytest.mark.parametrize("name", CASES)
def test_parameters_have_the_originals_names_each_once_or_under_all_names(
    name: str, tmp_path: Path
) -> None:
    pipe, model = asyncpipe.load(cut(CASES[name], 2, tmp_path / "2p")), CASES[name].build()
    for once in (True, False):
        own = {key: value.shape for key, value in pipe.named_parameters(remove_duplicate=once)}
        assert own == {
            key: value.shape for key, value in model.named_parameters(remove_duplicate=once)
        }
    assert {f"pipe.{key}" for key, _ in model.named_parameters()} == {
        key for key, _ in pipe.named_parameters("pipe")
    }


def test_a_pipe_is_a_module_in_all_that_torch_offers(folder: Path) -> None:
    pipe, model = asyncpipe.load(folder), CASES["gpt2"].build()
    assert isinstance(pipe, nn.Module) and list(pipe.children()) == [pipe.stages]
    assert {type(part).__name__ for part in pipe.modules()} >= {"Stage0", "LayerNorm", "GPT2Block"}
    assert {key for key, _ in pipe.named_buffers()} == {key for key, _ in model.named_buffers()}
    assert not pipe.eval().training and not any(part.training for part in pipe.modules())
    assert pipe.train().training and all(part.training for part in pipe.modules())

    pipe(**CASES["gpt2"].micro_batch(2))["loss"].backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    pipe.zero_grad()
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe.requires_grad_(False)
    assert not any(value.requires_grad for stage in pipe.stages for value in stage.parameters())
    seen: list[str] = []
    pipe.register_forward_hook(lambda module, given, result: seen.append(type(module).__name__))
    pipe(**CASES["gpt2"].micro_batch(1))
    assert seen == ["Pipe"]


@pytest.mark.parametrize("move", [lambda pipe: pipe.to("meta"), lambda pipe: pipe.double()])
def test_tied_weights_stay_one_parameter_in_a_pipe_that_is_moved(
    move: Callable[[nn.Module], nn.Module], folder: Path
) -> None:
    pipe = asyncpipe.load(folder)
    assert move(pipe) is pipe
    first, last = pipe.stages[0], pipe.stages[-1]
    assert first.get_parameter("transformer.wte.weight") is last.get_parameter("lm_head.weight")


def test_a_state_dict_with_other_keys_is_read_where_that_is_asked_for(folder: Path) -> None:
    pipe = asyncpipe.load(folder)
    before = {key: value.clone() for key, value in pipe.state_dict().items()}
    ones = torch.ones_like(before["transformer.ln_f.bias"])
    keys = pipe.load_state_dict({"transformer.ln_f.bias": ones, "other": ones}, strict=False)
    assert keys.unexpected_keys == ["other"]
    assert set(keys.missing_keys) == before.keys() - {"transformer.ln_f.bias"}
    after = pipe.state_dict(prefix="model.", keep_vars=True)
    assert torch.equal(after["model.transformer.ln_f.bias"], ones)
    assert isinstance(after["model.lm_head.weight"], nn.Parameter)
    assert all(
        torch.equal(after[f"model.{key}"], value)
        for key, value in before.items()
        if key != "transformer.ln_f.bias"
    )


def test_a_stage_reads_only_its_tensors_from_what_transformers_wrote(
    folder: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    model = CASES["gpt2"].build()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    model.transformer.save_pretrained(tmp_path / "base")  # names without "transformer."
    for place in ("whole", "shards", "base"):
        pipe = asyncpipe.load(folder, weights=tmp_path / place)
        for key, value in model.state_dict().items():
            assert torch.equal(pipe.state_dict()[key], value), (place, key)


def test_weights_of_another_shape_are_refused_with_their_number(
    folder: Path, tmp_path: Path
) -> None:
    wider = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 61}
    load_model("gpt2", model_args=wider).model.save_pretrained(tmp_path / "wider")
    with pytest.raises(DataError, match=r"\d+ of \d+ tensors differ in shape, the first is"):
        load_stage(folder, read_plan(folder), 1, weights=tmp_path / "wider")


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(DataError, match=r"lacks \d+ of the \d+ tensors needed here"):
        load_stage(folder, read_plan(folder), 0, weights=tmp_path / "other.safetensors")
    (tmp_path / "no.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match="is not a safetensors file"):
        load_stage(folder, read_plan(folder), 0, weights=tmp_path / "no.safetensors")
    with pytest.raises(DataError, match="does not exist"):
        load_stage(folder, read_plan(folder), 0, weights=tmp_path / "nowhere")


def test_a_plan_made_on_meta_asks_for_weights(tmp_path: Path) -> None:
    model = load_model("mlp", meta=True)
    made = tmp_path / "meta_2p"
    asyncpipe.partition(model.model, model.example_inputs, stages=2, output=made)
    with pytest.raises(PlanError, match="holds no weights: its plan was made with --meta"):
        asyncpipe.load(made)
    save_file(load_model("mlp").model.state_dict(), tmp_path / "mlp.safetensors")
    asyncpipe.load(made, weights=tmp_path / "mlp.safetensors")


def test_a_folder_without_weights_says_why(folder: Path, tmp_path: Path) -> None:
    source = load_model("mlp")
    made = asyncpipe.partition(
        source.model, source.example_inputs, stages=2, output=tmp_path / "2p", save_weights=False
    )
    assert made.weights == "not stored"
    with pytest.raises(PlanError, match="its plan was made with --no-weights") as caught:
        asyncpipe.load(tmp_path / "2p")
    assert "without --no-weights" in caught.value.cure
    save_file(source.model.state_dict(), tmp_path / "mlp.safetensors")
    asyncpipe.load(tmp_path / "2p", weights=tmp_path / "mlp.safetensors")
    copied = shutil.copytree(folder, tmp_path / "copied", ignore=shutil.ignore_patterns("weights"))
    with pytest.raises(PlanError, match="holds no weights: its folder weights is missing"):
        asyncpipe.load(copied)


def test_constants_that_a_plan_made_on_meta_lacks_are_named(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    source = load_model("bert-base-uncased", model_args=small, meta=True)
    asyncpipe.partition(source.model, source.example_inputs, stages=2, output=tmp_path / "meta")
    real = load_model("bert-base-uncased", model_args=small).model
    save_model(real, str(tmp_path / "real.safetensors"))
    with pytest.raises(PlanError, match="lacks the values of bert.embeddings.position_ids"):
        asyncpipe.load(tmp_path / "meta", weights=tmp_path / "real.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text("{"), "is not JSON"),
        (lambda path: path.write_text('{"schema": 99}'), "has schema 99"),
        (lambda path: path.write_text("[]"), r"is \[\], not an object"),
        (lambda path: path.unlink(), "has no plan.json"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8 text"),
    ],
)
def test_a_damaged_plan_is_one_sentence(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    made = cut(CASES["mlp"], 2, tmp_path / "2p")
    damage(made / "plan.json")
    with pytest.raises(PlanError, match=message):
        asyncpipe.load(made)


def test_a_plan_is_the_same_after_writing_and_reading(folder: Path) -> None:
    plan = read_plan(folder)
    assert json.loads(plan.to_json()) == json.loads((folder / "plan.json").read_text())
    assert plan.stages[0].sends[0].targets == (1,)
    assert plan.gap >= 0


def test_an_edit_that_does_not_parse_is_told_with_the_file(tmp_path: Path) -> None:
    made = cut(CASES["mlp"], 2, tmp_path / "2p")
    (made / "stage_0.py").write_text("def broken(:")
    with pytest.raises(PlanError, match=r"stage_0.py cannot be imported: SyntaxError"):
        asyncpipe.load(made)


def test_shards_are_read_back_by_name(tmp_path: Path) -> None:
    shards = [{"a": torch.arange(3)}, {"b": torch.ones(2), "c": torch.zeros(0)}]
    for index, shard in enumerate(shards):
        write_shard(tmp_path, shard, index, 2)
    write_index(tmp_path, shards, 20)
    read = read_tensors(tmp_path, ["a", "c", "d"], {"d": ("b",)})
    assert read["a"].tolist() == [0, 1, 2]
    assert read["c"].shape == (0,)
    assert read["d"].tolist() == [1, 1]
    assert set(load_file(tmp_path / "model-00002-of-00002.safetensors")) == {"b", "c"}
