"""The keywords of the Python functions: typed as the options are declared, and named if wrong."""

import inspect
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn

import asyncpipe
from asyncpipe.partitioner.models.load import given_source
from asyncpipe.partitioner.planning.keywords import OutlineKeywords, PartitionKeywords, PlanConfig
from asyncpipe.partitioner.planning.options import OPTIONS, PLANNED, PartitionOptions
from asyncpipe.partitioner.planning.signatures import options_for
from asyncpipe.runtime.errors import ModelError, PlanError

TYPES = {field.name: field.type for field in fields(PartitionOptions)}


def typed(keywords: Any) -> dict[str, str]:
    """The keys of a TypedDict with their types as written."""
    return {name: hint.__forward_arg__ for name, hint in keywords.__annotations__.items()}


@pytest.mark.parametrize(
    ("keywords", "call"), [(PartitionKeywords, "model"), (OutlineKeywords, "outline")]
)
def test_the_typed_keywords_are_the_declared_options(keywords: Any, call: str) -> None:
    assert typed(keywords) == {
        name: TYPES[name] for name, option in OPTIONS.items() if call in option.read_by
    }
    assert not keywords.__required_keys__


def test_the_keywords_of_the_planner_are_declared_options_with_their_types() -> None:
    assert typed(PlanConfig).items() <= TYPES.items()
    assert all(OPTIONS[name].read_by == PLANNED for name in typed(PlanConfig))


@pytest.mark.parametrize(
    ("function", "keywords"),
    [(asyncpipe.partition, PartitionKeywords), (asyncpipe.outline, OutlineKeywords)],
)
def test_functions_take_their_typed_keywords(function: Any, keywords: Any) -> None:
    assert function.__annotations__["options"] == f"Unpack[{keywords.__name__}]"
    shown = {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert shown == {*typed(keywords), "name", "on_phase", "on_progress"}
    assert typing.is_typeddict(keywords)


def own_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().mean()


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (torch.nn.functional.cross_entropy, "cross_entropy"),
        (nn.CrossEntropyLoss(), "cross_entropy"),
        (nn.MSELoss, "mse"),
        (own_loss, f"{__file__}:own_loss"),
        ("mse", "mse"),
    ],
)
def test_a_loss_may_be_a_function(loss: Any, name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert options_for("model", {"loss": loss}).loss == name


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(label_smoothing=0.1), lambda output, target: output.mean()]
)
def test_a_loss_that_other_processes_cannot_import_is_refused(loss: Any) -> None:
    with pytest.raises(PlanError, match="which other processes cannot import") as refused:
        options_for("model", {"loss": loss})
    assert refused.value.cure == 'Write it as a function in a file: loss="my_file.py:function"'


def graph() -> nx.DiGraph:
    made = nx.DiGraph(name="one")
    made.add_node("a", forward_ms=1, backward_ms=1)
    return made


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"num_stages": 2}, "partition has no option num_stages: Did you mean stages?"),
        ({"n_microbatches": 2}, "partition has no option n_microbatches: Did you mean micro_bat"),
        ({"stges": 2}, "partition has no option stges: Did you mean stages?"),
        ({"micro_batch_size": 2}, "has no option micro_batch_size: it is for a model that asyncp"),
        ({"foo": 2}, "partition has no option foo: Options: model_args, "),
    ],
)
def test_a_wrong_keyword_is_named_with_the_right_one(call: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError) as raised:
        asyncpipe.partition(nn.Linear(2, 2), torch.ones(1, 2), **call)
    assert words in str(raised.value)


def test_a_keyword_of_another_function_is_named_with_that_function() -> None:
    with pytest.raises(TypeError, match="outline has no option stages: it is an option of part"):
        asyncpipe.outline(nn.Linear(2, 2), torch.ones(1, 2), stages=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="plan_graph has no option num_stages: Did you mean stages"):
        asyncpipe.plan_graph(graph(), num_stages=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="plan_graph has no option output: it is an option of part"):
        asyncpipe.plan_graph(graph(), 1, output="x")  # type: ignore[call-arg]


def test_a_tensor_is_the_input_of_a_model_that_takes_one() -> None:
    given = torch.ones(3, 2)
    assert given_source(nn.Linear(2, 2), given).example_inputs == {"input": given}
    assert given_source(nn.Linear(2, 2), (given,)).example_inputs == {"input": given}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.ones(1, 2), "but example_inputs is 1 value: missing a required argument: 'input2'."),
        ((torch.ones(1, 2),) * 3, "example_inputs has 3 values: too many positional arguments."),
    ],
)
def test_example_inputs_that_do_not_fit_forward_are_refused_in_one_sentence(
    inputs: Any, words: str
) -> None:
    with pytest.raises(ModelError) as raised:
        given_source(nn.Bilinear(2, 2, 2), inputs)
    assert raised.value.what.startswith("Bilinear.forward takes (input1: ")
    assert words in raised.value.what
    assert raised.value.cure.startswith("Give a dict with the name of each argument")


def test_tab_completion_shows_the_public_names_alone() -> None:
    shown = [name for name in dir(asyncpipe) if not name.startswith("_")]
    assert shown == sorted(asyncpipe.__all__)


def test_a_name_instead_of_a_model_is_refused() -> None:
    with pytest.raises(ModelError, match="model is 'gpt2', not a torch.nn.Module"):
        asyncpipe.partition("gpt2", torch.ones(2, 4), stages=2)  # type: ignore[arg-type]
