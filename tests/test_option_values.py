"""Every option of every command and function with nonsense: one sentence that names the option, the
value, the legal values and one of them. An option without a declared limit fails here."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App, CycloptsError, Token

from asyncpipe.commands.options import Reader
from asyncpipe.partitioner import capture, codegen, solvers
from asyncpipe.partitioner.compile import partition, partition_source, partition_spec
from asyncpipe.partitioner.outline import outline, outline_source, outline_spec
from asyncpipe.partitioner.planning.cluster import make_setting
from asyncpipe.partitioner.planning.options import (
    METHODS,
    OPTIONS,
    PartitionOptions,
    check_options,
)
from asyncpipe.partitioner.planning.planner import plan_graph
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.profile import cache
from asyncpipe.runtime.config.option_files import checked, read_config
from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.experiments.variants import lists_from_texts
from asyncpipe.runtime.limits import Choice, Either, Flag, Limit, ListOf, Number, Whole
from asyncpipe.runtime.options import options_of
from asyncpipe.tests.support.processes.in_process import command

# What options need beside them to be read: they are refused before any of it is looked at.
NEEDED = {
    "partition": (),
    "train": ("nowhere",),
    "train report": ("nowhere",),
    "compare": ("nowhere",),
    "inspect": ("nowhere",),
    "info": (),
    "view": ("nowhere",),
    "comm bench": (),
}
NO_NUMBERS = (
    "", " ", "none", "null", "nan", "inf", "-inf", "1e400", "9" * 70, "9" * 5000, "true", "0x10",
    "1_0", "٣", "８", "8 8", "[4]", "4,4", "+-1", "1.2.3", "x", "\x1b[2J",
)  # fmt: skip
NO_TEXTS = ("", "\x1b[2J", "a\nb", "a" * 70_000)
ODD = (
    True, -1, 2.5, 10**30, -(10**30), 1e300, float("nan"), float("inf"), "", "8", "none", "\x1b[2J",
    "a" * 70_000, [], [8], [8, 8], ["x", "x"], {}, {"x": 1}, [[]], b"8", object(),
)  # fmt: skip


def apps() -> Iterator[tuple[str, App]]:
    for name in ("partition", "train", "compare", "inspect", "info", "view"):
        app = importlib.import_module(f"asyncpipe.commands.{name}").app
        yield name, app
        if name == "train":
            yield "train report", app["report"]
    comm = importlib.import_module("asyncpipe.commands.comm").app
    yield "comm bench", comm["bench"]


def options() -> Iterator[tuple[str, str, Reader | None]]:
    """The command, flag and reader of each option; the reader is None for a boolean flag."""
    for name, app in apps():
        for argument in app.assemble_argument_collection():
            if argument.name.startswith("--"):
                converter = argument.parameter.converter
                assert isinstance(converter, Reader) or argument.hint in (bool, bool | None), (
                    f"asyncpipe-{name} {argument.name} declares no limit (runtime/limits.py)"
                )
                yield name, argument.name, converter if isinstance(converter, Reader) else None


def nonsense(limit: Limit) -> Iterator[str]:
    """Words that the limit must refuse."""
    match limit:
        case ListOf(item, _):
            yield from nonsense(item)
        case Either(first, _):
            yield from nonsense(first)
        case Whole(least, most, _):
            yield from (*NO_NUMBERS, "2.5", "2.0", "1e3", str(least - 1), str(most + 1))
        case Number(least, most, _, _):
            yield from (*NO_NUMBERS, f"{least - 1:g}", f"{2 * most:g}")
        case Choice(names):
            yield from (*NO_TEXTS, names[0].upper() + "x", f"{names[0]} ", "8")
            yield from () if "none" in names else ("none", "null", "None")
        case _:
            yield from NO_TEXTS


def is_one_sentence(text: str, flag: str, word: str) -> None:
    assert text.startswith(f"{flag} "), (flag, word, text)
    assert "Use for example" in text or "Did you mean" in text, text
    assert (word[:50] if word and word.isprintable() else "'") in text, text
    assert len(text) < 1000, text


READ = [option for option in options() if option[2] is not None]


@pytest.mark.parametrize(
    ("name", "flag", "reader"), READ, ids=[f"{name} {flag}" for name, flag, _ in READ]
)
def test_an_option_refuses_nonsense_in_one_sentence(
    name: str, flag: str, reader: Reader, tmp_path: Path
) -> None:
    count = (isinstance(reader.limit, ListOf) and reader.limit.count) or 1
    for word in nonsense(reader.limit):
        with pytest.raises(CycloptsError) as raised:
            reader(str, [Token(keyword=flag, value=word)] * count)
        is_one_sentence(str(raised.value), flag, word)
    place, *inner = name.split()
    given = [f"{flag}={word}"] if count == 1 else [flag, *[word] * count]
    outcome = command(tmp_path, place, *inner, *NEEDED[name], *given)
    assert outcome.code == 2 and "\x1b" not in outcome.err, outcome
    is_one_sentence(outcome.err.removeprefix("error: "), flag, word)


def test_a_flag_takes_no_value_but_true_or_false(tmp_path: Path) -> None:
    for name, flag, reader in options():
        if reader is None:
            for word in ("none", "2", "maybe", ""):
                place, _, inner = name.partition(" ")
                given = [*inner.split(), *NEEDED[name], f"{flag}={word}"]
                outcome = command(tmp_path, place, *given)
                assert outcome.code == 2 and flag in outcome.err, (given, outcome)


@pytest.mark.parametrize("flag", ["--seeds", "--lr", "--optimizers", "--methods"])
def test_a_value_of_a_list_is_given_once(flag: str, tmp_path: Path) -> None:
    word = {"--optimizers": "sgd", "--methods": "sync"}.get(flag, "1")
    outcome = command(tmp_path, "compare", "nowhere", flag, word, word)
    assert outcome.code == 2
    assert f"{flag} {word} is given twice" in outcome.err
    assert command(tmp_path, "compare", "nowhere", flag).code == 2


def test_a_key_is_given_once_and_an_option_too(tmp_path: Path) -> None:
    twice = ["--model-arg", "n_layer=4", "--model-arg", "n-layer=5"]
    outcome = command(tmp_path, "partition", "--model", "gpt2", "--stages", "2", *twice)
    assert outcome.code == 2 and "n_layer is given twice" in outcome.err
    outcome = command(tmp_path, "partition", "--model", "gpt2", "--stages", "2", "--stages", "3")
    assert outcome.code == 2 and "--stages" in outcome.err


@pytest.mark.parametrize("name", options_of(Settings))
def test_an_option_of_training_is_checked_in_toml_python_and_sweeps(
    name: str, tmp_path: Path
) -> None:
    option = options_of(Settings)[name]
    limit = option.limit
    for value in ODD:
        if limit.has(value):
            continue
        if name != "trust":  # is never taken from a file
            with pytest.raises(SettingsError, match=f"^run.toml: {name} = ") as raised:
                checked(name, value, "run.toml")
            assert raised.value.cure and len(raised.value.what) < 1000
            if isinstance(value, bool | int) or value in ("", "8", "none"):
                file = tmp_path / "run.toml"
                file.write_text(f"{name} = {json.dumps(value)}\n")
                with pytest.raises(SettingsError, match=f"{name} = "):
                    read_config(file)
        with pytest.raises(SettingsError, match=f"^--{name.replace('_', '-')}"):
            Settings(**{"folder": "x", name: value})
    if not option.optional:
        with pytest.raises(SettingsError, match=f"^--{name.replace('_', '-')} None is not"):
            Settings(**{"folder": "x", name: None})
    if isinstance(limit, Whole | Number | Choice) and option.scope == "run":
        for word in ("nan", "-1", "none", "2.5x", ""):
            if not limit.has(limit.read(word)):
                with pytest.raises(SettingsError, match=f"{name} = "):
                    lists_from_texts([f"{name}={word}"])


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if not option.is_words])
def test_an_option_of_partition_is_checked_in_python(name: str) -> None:
    for value in ODD:
        if not OPTIONS[name].limit.has(value):
            for check in (check_options, lambda given: PartitionOptions(**given)):
                with pytest.raises(PlanError, match=f"^--{name.replace('_', '-')}"):
                    check({name: value})


@pytest.mark.parametrize(
    "call",
    [
        lambda **given: partition(None, {}, **given),
        lambda **given: partition_source(None, PartitionOptions(**given)),
        lambda **given: partition_spec("mlp", PartitionOptions(**given)),
        lambda **given: outline(None, {}, **given),
        lambda **given: outline_spec("mlp", PartitionOptions(**given), with_profile=False),
        lambda **given: plan_graph(None, **given),
        lambda **given: make_setting(2, **given),
        lambda **given: solve(None, stages=2, **given),
    ],
)
@pytest.mark.parametrize("given", [{"micro_batches": True}, {"schedule": ["1f1b"]}])
def test_a_function_checks_its_arguments_before_anything_else(
    call: Any, given: dict[str, Any]
) -> None:
    if "link" not in str(inspect.signature(call)):
        with pytest.raises((PlanError, TypeError, AttributeError)) as raised:
            call(**given)
        assert isinstance(raised.value, PlanError), raised.value


def test_every_argument_of_a_function_has_a_limit() -> None:
    objects = {
        *("model", "example_inputs", "source", "spec", "graph", "name", "options", "running"),
        *("model_args", "inputs", "devices", "link", "setting", "cut_before", "command"),
        *("on_phase", "on_progress", "overlap", "with_profile"),
    }
    functions = (partition, partition_source, partition_spec, plan_graph, outline, outline_spec)
    for function in (*functions, outline_source, make_setting, solve):
        for name in inspect.signature(function).parameters:
            assert name in OPTIONS or name in objects, f"{function.__name__}({name}=) has no limit"


def test_defaults_and_examples_are_legal() -> None:
    declared = [
        *((name, option.limit) for name, option in OPTIONS.items() if not option.is_words),
        *((name, each.limit) for name, each in options_of(Settings).items()),
    ]
    declared += [(flag, reader.limit) for _, flag, reader in options() if reader]
    for name, limit in declared:
        assert limit.has(limit.example), name
        if not isinstance(limit, ListOf | Flag):
            assert limit.read(str(limit.example)) == limit.example, name
    Settings(folder="x")
    PartitionOptions()


def test_names_are_those_that_there_are() -> None:
    """The table of options imports neither torch nor numpy, so it has names of its own."""
    assert set(METHODS) == {*solvers.METHODS, "all"}
    assert OPTIONS["code"].limit == Choice(codegen.CODES)
    assert OPTIONS["capture"].limit == Choice(capture.METHODS)
    assert OPTIONS["dtype"].limit == Choice(tuple(cache.DTYPES))


@pytest.mark.parametrize("loss", ["mse_loss", "MSE", "file.py:"])
def test_an_unknown_loss_is_refused_before_the_model_is_cut(loss: str) -> None:
    with pytest.raises(PlanError, match=f"--loss {re.escape(loss)} is not cross_entropy, mse"):
        check_options({"loss": loss})
