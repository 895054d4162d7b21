"""`--model SPEC`: the specs that are found, those that are not, and the messages."""

import sys
from pathlib import Path

import pytest
import torch

from asyncpipe.partitioner.models.builtin import PRESETS
from asyncpipe.partitioner.models.load import known_names, load_model, parse_input
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


def test_inputs_of_ones_own_model_take_the_micro_batch_size_that_is_asked() -> None:
    example = Path(__file__).parents[3] / "examples" / "residual_mlp.py"
    for size in (3, 20):
        source = load_model(f"{example}:build", micro_batch_size=size)
        assert source.example_inputs["x"].shape == (size, 16)


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


def test_an_input_is_written_as_dtype_and_shape() -> None:
    assert parse_input("x", "f32[4, 64]").shape == (4, 64)
    assert parse_input("ids", "i64[2]").dtype == torch.int64
    with pytest.raises(ModelError, match="is not a dtype and a shape"):
        parse_input("x", "float[4")


def test_the_known_names_are_distinct() -> None:
    assert len(set(known_names())) == len(known_names()) > len(PRESETS)
