"""`--model SPEC`: the specs that are found, those that are not, and the messages."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncpipe.partitioner.models.builtin import PRESETS
from asyncpipe.partitioner.models.hub import known_names
from asyncpipe.partitioner.models.load import load_model, parse_input
from asyncpipe.runtime.errors import ModelError

TINY = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}


def test_a_published_name_builds_its_configuration_without_a_network() -> None:
    source = load_model("gpt2", meta=True)
    assert sum(parameter.numel() for parameter in source.model.parameters()) == 124_439_808
    assert source.name == "gpt2"
    assert "config.json" in source.files


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2-xl", 1558), ("t5-3b", 2852), ("t5-11b", 11307), ("bert-large-uncased", 335)]
    + [("roberta-base", 125), ("vit-large", 304), ("llama-7b", 6738), ("llama-8b", 8030)],
)
def test_a_published_name_has_the_published_number_of_parameters(name: str, millions: int) -> None:
    model = load_model(name, meta=True).model
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(
        millions * 1e6, rel=0.005
    )


def test_a_model_argument_overrides_a_field_and_the_seed_fixes_the_weights() -> None:
    first, second = (load_model("gpt2", model_args=TINY, seed=3).model for _ in range(2))
    assert first.config.n_layer == 2
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


def test_an_unknown_field_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ModelError, match="no field 'n_layers'. Did you mean n_layer?"):
        load_model("gpt2", model_args={"n_layers": 2})


def test_e1_an_unknown_name_suggests_the_nearest_one() -> None:
    with pytest.raises(ModelError) as caught:
        load_model("gtp2")
    assert caught.value.what == (
        'no model "gtp2": not a folder, not importable, not on the hub. Did you mean gpt2?'
    )
    assert caught.value.cure == "Your own model: --model my_pkg.file:build"


def test_e2_a_missing_extra_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError) as caught:
        load_model("gpt2")
    assert str(caught.value) == (
        "--model gpt2 needs transformers, which is not installed.\npip install 'transformers>=5'"
    )


def test_a_factory_in_a_file_gives_the_model_and_its_inputs() -> None:
    example = Path(__file__).parents[3] / "examples" / "residual_mlp.py"
    source = load_model(f"{example}:build", model_args={"depth": 2})
    assert source.name == "residual_mlp"
    assert source.example_inputs["x"].shape == (8, 16)
    with pytest.raises(ModelError, match="takes no argument 'deep'"):
        load_model(f"{example}:build", model_args={"deep": 2})
    with pytest.raises(ModelError, match="has no biuld. Did you mean build?"):
        load_model(f"{example}:biuld")


def test_a_factory_that_returns_a_model_alone_needs_inputs(tmp_path: Path) -> None:
    file = tmp_path / "alone.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 2)\n")
    with pytest.raises(ModelError, match="the inputs of its forward are unknown"):
        load_model(f"{file}:build")
    source = load_model(f"{file}:build", inputs={"input": "f32[8, 4]"})
    assert source.example_inputs["input"].shape == (8, 4)


def test_an_exception_in_a_factory_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def build():\n    return 1 / 0\n")
    with pytest.raises(ModelError, match=r"broken.py:2: ZeroDivisionError: division by zero"):
        load_model(f"{file}:build")


def test_a_local_folder_is_read_with_its_weights(tmp_path: Path) -> None:
    original = load_model("gpt2", model_args=TINY).model
    original.save_pretrained(tmp_path / "mine")
    source = load_model(str(tmp_path / "mine"))
    assert source.name == "mine"
    assert source.weights == "read from mine"
    for name, value in original.state_dict().items():
        assert torch.equal(value, source.model.state_dict()[name])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Makes a repository in a cache of the hub, which cannot be reached."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def make(name: str) -> Path:
        commit = "0" * 40
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        return repository / "snapshots" / commit

    yield make


@pytest.mark.parametrize("name", ["gpt2", "someone/small"])
def test_published_weights_and_tokenizers_are_read_from_the_cache_of_the_hub(
    name: str, hub: Callable[[str], Path]
) -> None:
    original = load_model("gpt2", model_args=TINY, seed=1).model
    cached = hub(name)
    original.save_pretrained(cached)
    (cached / "tokenizer_config.json").write_text('{"a": 1}')
    source = load_model(name, pretrained=True)
    assert source.weights == f"read from {name} on the hub"
    assert source.files["tokenizer_config.json"] == '{"a": 1}'
    for key, value in original.state_dict().items():
        assert torch.equal(value, source.model.state_dict()[key])


def test_a_head_without_published_weights_is_named(hub: Callable[[str], Path]) -> None:
    model = load_model("gpt2", model_args=TINY | {"tie_word_embeddings": False}).model
    cached = hub("someone/small")
    model.save_pretrained(cached)
    weights = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, cached / "model.safetensors", metadata={"format": "pt"})
    source = load_model("someone/small", pretrained=True)
    assert source.weights.endswith("on the hub, but random for 1 tensor: lm_head.weight")


def test_weights_as_pickles_are_not_read(hub: Callable[[str], Path]) -> None:
    cached = hub("someone/old")
    load_model("gpt2", model_args=TINY).model.save_pretrained(cached)
    (cached / "model.safetensors").rename(cached / "pytorch_model.bin")
    with pytest.raises(ModelError, match="has no weights as safetensors, and pickled ones"):
        load_model("someone/old", pretrained=True)


def test_weights_of_another_width_are_refused(hub: Callable[[str], Path]) -> None:
    load_model("gpt2", model_args=TINY).model.save_pretrained(hub("someone/small"))
    with pytest.raises(ModelError, match="other shapes than its configuration"):
        load_model("someone/small", pretrained=True, model_args={"n_embd": 64})


@pytest.mark.parametrize("name", ["gpt2", "someone/absent"])
def test_weights_that_are_not_in_the_cache_need_a_network(
    name: str, hub: Callable[[str], Path]
) -> None:
    with pytest.raises(ModelError, match=f"cannot download .*{name}: no network"):
        load_model(name, pretrained=True)


@pytest.mark.parametrize(
    ("spec", "meta", "message"),
    [("mlp", False, "not to mlp"), ("a.py:build", False, "not to a.py"), ("gpt2", True, "--meta")],
)
def test_models_without_published_weights_are_not_pretrained(
    spec: str, meta: bool, message: str
) -> None:
    with pytest.raises(ModelError, match=f"--pretrained .*{message}"):
        load_model(spec, pretrained=True, meta=meta)


def test_an_input_is_written_as_dtype_and_shape() -> None:
    assert parse_input("x", "f32[4, 64]").shape == (4, 64)
    assert parse_input("ids", "i64[2]").dtype == torch.int64
    assert len(parse_input("x", "f32[4, 64]").unique()) > 200
    assert set(parse_input("ids", "i32[4, 64]").flatten().tolist()) == {0, 1}
    assert not torch.equal(parse_input("x", "f32[4]"), parse_input("y", "f32[4]"))
    with pytest.raises(ModelError, match="is not a dtype and a shape"):
        parse_input("x", "float[4")


def test_the_known_names_are_distinct() -> None:
    assert len(set(known_names())) == len(known_names()) > len(PRESETS)
