"""Names that others chose stay names: in generated Python, scripts, pages and on the terminal.

What must hold of any text is tried with texts that are markup or code somewhere. Each is built so
that it leaves a mark if any part of it is run.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import io
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import asyncpipe
from asyncpipe.commands.console import SafeConsole, print_comparison
from asyncpipe.partitioner.codegen import layout
from asyncpipe.partitioner.codegen.layout import Code, call, lay_out, named
from asyncpipe.partitioner.models.load import load_model
from asyncpipe.runtime.checkpoint import trained
from asyncpipe.runtime.config.batch_layout import check_ranks
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.executor.loading import stage_builder
from asyncpipe.runtime.experiments.compare import MethodComparison
from asyncpipe.runtime.formatting import hiding_in, in_markdown, one_line, visible
from asyncpipe.runtime.launch import prediction
from asyncpipe.runtime.launch.slurm import sbatch_script
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.plan.trust import code_hashes, untrusted
from asyncpipe.runtime.reports.rendering import _NO_CHARACTERS, render
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.oracles.html_pages import all_of, check_alone, parsed, text_of
from asyncpipe.tests.support.processes.in_process import command, error_of

CANARY = "asyncpipe_canary"
RUNS = f"{CANARY}()"
PARTS = [
    *(
        "'",
        '"',
        '"""',
        "'''",
        "\\",
        "\n",
        "\r",
        "\t",
        "{",
        "}",
        "{{ 7*7 }}",
        "{% raw %}",
        "#",
        "$(",
    ),
    *(f'"+str({RUNS})+"', f"'+str({RUNS})+'", f'""" + {RUNS} + """', f"\n{RUNS}\n", f"){RUNS}("),
    *("`touch ran`", "; touch ran", "\ntouch ran\n", "$(touch ran)", "--wrap=x", " ", "-"),
    *(
        "<script>",
        "</script>",
        "&",
        "]]>",
        "<!--",
        "|",
        "[x](y)",
        "[red]",
        "[/]",
        "[link=x]",
    ),
    *("\x1b[2J", "\x1b]0;x\x07", "\x00", "\x7f", "\x9b2J", "\u202e", "\u2066", "\u200b", "\u200d"),
    *("\u2028", "\ufeff", "\U000e0041", "\u3164", "\ufb01", "\U0001f600", "é", "a" * 300, "\ud800"),
    *("class", "None", "self", "x", "_", "__x", "__x__", "0", "forward", "training", "\u0660"),
]
texts = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=5).map("".join)
shown = st.lists(
    st.sampled_from([part for part in PARTS if one_line(part) == part and "." not in part]),
    min_size=1,
    max_size=4,
).map("".join)  # of which nearly all can be the name of a module
many = settings(max_examples=150, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def canary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ran: list[int] = []
    monkeypatch.setattr(builtins, CANARY, lambda: ran.append(1), raising=False)
    yield
    assert not ran, "a name was run"


# --- Python


@many
@given(texts)
def test_a_text_in_generated_python_is_that_text(text: str) -> None:
    assert ast.literal_eval(layout.quoted(text)) == text
    assert hiding_in(layout.quoted(text)) == ""
    (statement,) = ast.parse(f"r'''1'''\nr\"\"\"{layout.in_docstring(text)}\n\"\"\"").body[1:]
    assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if layout.fits_docstring(text):
        assert ast.literal_eval(f'"""{text}"""') == text
    line = lay_out("x = ", Code("1"), indent=0, comment=text[:20])
    assert line == "x = 1" or ast.unparse(ast.parse(line)) == "x = 1"
    argument = ast.parse(call("f", (named(text, Code("1")),)).flat, mode="eval").body
    assert isinstance(argument, ast.Call) and len(argument.keywords) == 1
    given = argument.keywords[0]
    if given.arg is None:
        assert isinstance(given.value, ast.Dict) and given.value.keys[0].value == text
    else:
        assert given.arg == text


@many
@given(texts)
def test_what_may_be_a_name_is_that_name(text: str) -> None:
    if layout.is_name(text):
        scope: dict[str, Any] = {}
        exec(f"class C:\n    def f(self): self.{text} = 1\nc = C()\nc.f()", scope)
        assert vars(scope["c"]) == {text: 1}
    assert layout.is_name(layout.class_name(text))


# --- pages, scripts, terminals


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(texts)
def test_a_text_in_a_page_is_that_text(text: str) -> None:
    page = render(
        "page.html.j2",
        title=text, is_good=True, status=text, why=text, command=text, facts=[(text, text)],
        cards=[{"heading": text, "number": text, "detail": text}],
    )  # fmt: skip
    check_alone(page, scripts=0)
    assert hiding_in(page) == ""
    plain = visible(_NO_CHARACTERS.sub("\ufffd", text))
    (value,) = all_of(parsed(page), "dd")
    assert text_of(value) == re.sub(r"\s+", " ", plain).strip()


@many
@given(texts)
def test_a_text_in_markdown_makes_no_markup(text: str) -> None:
    cell = in_markdown(text)
    assert "\n" not in cell and "<" not in cell and not re.search(r"(?<!\\)(\\\\)*[|`\[]", cell)


@many
@given(texts)
def test_a_text_on_the_terminal_steers_nothing(text: str) -> None:
    table = Table(title=escape(text))
    table.add_column(escape(text))
    table.add_column("")
    table.add_row(escape(text), Text(text))
    for is_terminal in (False, True):
        file = io.StringIO()
        console = SafeConsole(file=file, force_terminal=is_terminal, width=400, highlight=False)
        console.print(Text(text, style="bold"), table)
        console.print(text, markup=False, soft_wrap=True)
        console.print(Text(text, style="link http://x"))
        plain = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
        assert visible(plain) == plain
    assert hiding_in(visible(text)) == "" and "\n" not in one_line(text)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(name=texts, output=texts)
@example(name="x\ntouch ran\n#", output="y\ntouch ran")
@example(name="x --wrap=touch", output="$(touch ran)")
def test_a_name_in_a_batch_script_is_no_option_and_no_command(
    plan_of_mlp: Plan, tmp_path: Path, name: str, output: str
) -> None:
    output = output.replace("\x00", "").encode(errors="replace").decode()
    try:
        options = Settings(folder="made", output=f"x{output}")
    except AsyncPipeError:  # no such path
        options = Settings(folder="made", output=f"x{(output := one_line(output))}")
    script = sbatch_script(options, replace(plan_of_mlp, name=name), 2)
    lines = script.split("\nset -euo pipefail\n")[0].split("\n")
    assert all(line.startswith("#") for line in lines)
    given = [line for line in lines if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=[\w.+:%@-]+)?", line) for line in given)
    assert len(given) == len({line.partition("=")[0] for line in given})
    (tmp_path / "script.sh").write_text(script, encoding="utf-8")
    stubs = 'mapfile() { hosts=(a); }; scontrol() { :; }; srun() { printf "%s\\0" "$@" > words; }\n'
    ran = subprocess.run(
        ["bash", "-c", f"{stubs}. ./script.sh"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "1"},
        capture_output=True,
    )
    assert ran.returncode == 0, ran
    assert {path.name for path in tmp_path.iterdir()} == {"script.sh", "words"}
    assert f"x{output}".encode() in (tmp_path / "words").read_bytes().split(b"\0")


@pytest.mark.parametrize("name", ["a b", "x; touch ran", "$(touch ran)", "`touch ran`", "it's"])
def test_a_name_in_a_command_that_is_shown_is_one_word(
    plan_of_mlp: Plan, tmp_path: Path, name: str
) -> None:
    """Such a command is there to be typed again."""
    told = [untrusted(tmp_path / name)]
    with pytest.raises(AsyncPipeError) as refused:
        plan = replace(plan_of_mlp, model=name)
        check_ranks(plan, make_schedule("1f1b", stages=2, micro_batches=2), 3)
    told.append(refused.value)
    for error, word in zip(told, (str(tmp_path / name), name), strict=True):
        commands = re.findall(r"asyncpipe-\w+ .+?(?= --trust| --stage)", error.cure)
        assert commands and all(shlex.split(each)[-1] == word for each in commands), error.cure


@pytest.fixture(scope="module")
def plan_of_mlp(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return write_mlp(tmp_path_factory.mktemp("plan") / "mlp")


# --- a model from end to end


class Hostile(nn.Module):
    """Modules, parameters, buffers and classes of any name, put where no check of torch's looks."""

    def __init__(self, names: list[str], type_name: str) -> None:
        super().__init__()
        self.names, self.keys = names, [names[0], f"{names[1]}_"]
        kind = type("Inner", (Inner,), {"__name__": type_name})
        kind.__name__ = kind.__qualname__ = type_name
        self._modules[names[0]] = nn.Linear(4, 4)
        self._modules[names[1]] = kind(names[2])
        self.table = nn.ModuleDict()
        self.table._modules[names[3]] = nn.Linear(4, 4)
        self._parameters[names[4]] = nn.Parameter(torch.ones(4))
        self._buffers[names[5]] = torch.full((4,), 0.5)

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        names = self.names
        h = self._modules[names[0]](x[names[0]])
        h = self._modules[names[1]](h) * self._parameters[names[4]]
        h = self.table._modules[names[3]](h) + self._buffers[names[5]]
        return {names[1]: h, names[2]: h.tanh()}


class Inner(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._modules[name] = nn.Linear(4, 4)
        self._parameters[f"{name}_"] = nn.Parameter(torch.ones(4))

    def forward(self, h: Tensor) -> Tensor:
        return self._modules[self.name](h).relu() * self._parameters[f"{self.name}_"]


def partitioned(names: list[str], type_name: str, folder: Path, code: str = "structured") -> bool:
    """Whether the model is exact in two stages, and all that is shown of it harmless; False where
    it is refused in a sentence."""
    torch.manual_seed(0)
    model = Hostile(names, type_name)
    inputs = {"x": {names[0]: torch.randn(3, 4)}}
    try:
        asyncpipe.partition(model, inputs, stages=2, output=folder, profile="analytic", code=code)
    except AsyncPipeError as refusal:
        assert "Traceback" not in str(refusal) and len(refusal.what) < 600, refusal
        assert not folder.exists()
        return False
    plan = read_plan(folder)
    pipe = asyncpipe.load(folder)
    assert list(pipe.state_dict()) == list(model.state_dict())
    mine, theirs = pipe(**inputs), model(**inputs)
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    sum(value.sum() for value in mine.values()).backward()
    for options in ((), ("--stage", "0"), ("--stage", "1")):
        shown = command(folder.parent, "inspect", str(folder), *options)
        assert shown.code == 0 and visible(shown.out) == shown.out
    files = frozenset(stage.file for stage in plan.stages)
    check_alone((folder / "report.html").read_text(), scripts=2, files=files)
    for file in folder.glob("*.py"):
        assert hiding_in(file.read_text(encoding="utf-8")) == ""
    return True


def distinct(names: list[str]) -> list[str]:
    return [
        name if name not in names[:place] else f"{name}{place}" for place, name in enumerate(names)
    ]


COUNT = itertools.count()


@settings(
    max_examples=6,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # to make one smaller would take minutes
)
@given(
    names=st.one_of(*(st.lists(each, min_size=6, max_size=6) for each in (shown, shown, texts))),
    type_name=texts,
    code=st.sampled_from(["structured", "flat"]),
)
def test_a_model_with_any_names_is_exact_or_refused(
    tmp_path: Path, names: list[str], type_name: str, code: str
) -> None:
    type_name = type_name.replace("\0", "").encode(errors="replace").decode()  # Python's own limits
    partitioned(distinct(names), type_name, tmp_path / f"made{next(COUNT)}", code)


@pytest.mark.parametrize("code", ["structured", "flat"])
def test_names_that_are_code_are_names(tmp_path: Path, code: str) -> None:
    names = [
        't"+str(RUN)+"',
        "t'+str(RUN)+'",
        'a""" + RUN + """',
        "\\",
        "class",
        "{{ 7*7 }} é\U0001f600",
    ]
    names = [name.replace("RUN", RUNS) for name in names]
    assert partitioned(names, f"Odd({RUNS})", tmp_path / "made", code)
    assert partitioned(names[::-1], "for", tmp_path / "other", code)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("forward", '"forward", as an attribute that every module has: forward of nn.Module'),
        ("__class__", '"__class__", as an attribute that every module has'),
        ("training", '"training", as an attribute that every module has'),
        ("", '"", which cannot be distinguished from a path'),
        ("a.b", '"a.b", which cannot be distinguished from a path'),
        ("a\nb", '"a\\nb", which contains an invisible character'),
        ("\u202e", '"\\u202e", which contains an invisible character'),
    ],
)
def test_a_name_that_no_attribute_can_have_is_refused(tmp_path: Path, name: str, told: str) -> None:
    model = nn.Sequential()
    model._modules[name] = nn.Linear(4, 4)
    with pytest.raises(AsyncPipeError) as refused:
        asyncpipe.partition(model, {"input": torch.ones(2, 4)}, stages=1, output=tmp_path / "made")
    assert f"a module of the model is called {told}" in str(refused.value)


# --- a folder of a stranger


def test_a_stage_is_shown_as_what_it_is_and_runs_as_it_is_shown(tmp_path: Path) -> None:
    """A declared encoding could make code of a comment, and control characters hide lines."""
    write_mlp(tmp_path / "made")
    stage = tmp_path / "made" / "stage_0.py"
    hidden = "# \x1b[1A\x1b[2K \u202e \x9b2J\x08\r# x"
    text = f"# coding: unicode_escape\n# \\x0a{RUNS}\n{hidden}\n{stage.read_text()}"
    stage.write_bytes(text.encode())
    ran: list[int] = []
    code = compile(stage.read_bytes(), "stage", "exec")  # as Python reads it
    exec(code, {CANARY: lambda: ran.append(1)})
    assert ran
    shown = command(tmp_path, "inspect", "made", "--stage", "0")
    assert shown.code == 0 and visible(shown.out) == shown.out
    assert f"# \\x0a{RUNS}" in shown.out
    assert r"# \x1b[1A\x1b[2K \u202e \x9b2J\x08\r" in shown.out
    asyncpipe.load(tmp_path / "made")
    stage.write_bytes(b"\xff" + text.encode())
    told = error_of(tmp_path, "inspect", "made", "--stage", "0")
    assert told.startswith("error: made/stage_0.py is not UTF-8 text: invalid start byte at byte 0")


@pytest.mark.parametrize(
    "odd",
    [
        *("# hidden\rRUN()", "# hidden\r\nRUN()", "if 1:\n  \x0cRUN()", "\tRUN()", "#\\\nRUN()"),
        *(
            "\ufeffRUN()",
            "# \x00\nRUN()",
            "# \x00RUN()",
            "#\x0bRUN()",
            "#\x85RUN()",
            "#\u2028RUN()",
        ),
        *("# coding: utf-7\n#+AAo-RUN()", "# -*- coding: utf-7 -*-\r#+AAo-RUN()", "#\x1aRUN()"),
        *("# coding: rot13\nEHA()", "# vim: set fileencoding=cp037 :\nRUN()", '"""\\"""RUN()"""'),
    ],
)
def test_a_stage_runs_what_inspect_shows(tmp_path: Path, odd: str) -> None:
    """A person who reads the lines that are shown sees each that runs, and Python the same bytes
    that were hashed."""
    plan = write_mlp(tmp_path / "made")
    stage = tmp_path / "made" / plan.stages[0].file
    content = (
        odd.replace("RUN", f"import builtins; builtins.{CANARY}").encode()
        + b"\n"
        + stage.read_bytes()
    )
    stage.write_bytes(content)
    ran: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(builtins, CANARY, lambda: ran.append(1))
        try:
            stage_builder(tmp_path / "made", plan.stages[0], code_hashes(tmp_path / "made"))
        except AsyncPipeError as refusal:
            assert "cannot be imported: " in str(refusal) and "Traceback" not in str(refusal)
    shown = command(tmp_path, "inspect", "made", "--stage", "0").out
    lines = [re.sub(r"^(\\\w+|\s)*", "", each) for each in shown.split("\n")]
    assert bool(ran) <= any(
        line.startswith(f"import builtins; builtins.{CANARY}") for line in lines
    )
    assert code_hashes(tmp_path / "made")[stage.name] == hashlib.sha256(content).hexdigest()
    assert visible(shown) == shown


@pytest.mark.parametrize("character", [*"\n\t\x1b\u202e\u2066\u200b\U000e0041"])
@pytest.mark.parametrize("place", ["name", "model", "command"])
def test_a_plan_with_what_does_not_show_in_a_name_is_refused(
    tmp_path: Path, character: str, place: str
) -> None:
    write_mlp(tmp_path / "made")
    path = tmp_path / "made" / "plan.json"
    document = json.loads(path.read_text())
    document[place] = f"{document[place]}a{character}touch ran\n"
    path.write_text(json.dumps(document))
    for name, *options in (("inspect",), ("train", "--print-sbatch"), ("train", "--dry-run")):
        told = error_of(tmp_path, name, "made", *options)
        assert told.startswith("error: made/plan.json") and visible(told) == told
        assert told.count("\n") <= 2


def test_an_option_in_a_file_is_refused_with_what_does_not_show(tmp_path: Path) -> None:
    write_mlp(tmp_path / "made")
    (tmp_path / "job.toml").write_text('folder = "made"\noutput = "a\\u202eb"\n')
    told = error_of(tmp_path, "train", "--config", "job.toml", "--dry-run")
    assert "has control or hidden characters" in told


def test_an_option_of_a_command_is_refused_with_what_does_not_show(tmp_path: Path) -> None:
    write_mlp(tmp_path / "made")
    ended = command(tmp_path, "train", "made", "--output", "a\u202eb", "--dry-run")
    assert ended.code == 2 and "has a control or hidden character" in ended.err


def test_an_error_shows_markup_as_it_is(tmp_path: Path) -> None:
    for name in ("[red]x[/]", "[link=x]y[/link]", "[/nothing]", "[bold"):
        told = error_of(tmp_path, "inspect", name)
        assert told.startswith(f"error: {name} does not exist")


def test_a_path_in_the_result_of_a_command_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that looks like markup would lose a part, or end a command that has succeeded."""
    name = "[red]a[/b]"
    write_mlp(tmp_path / "made")
    with (tmp_path / "made" / "stage_1.py").open("a") as file:
        file.write("# edited\n")
    path = Path(name)
    monkeypatch.setattr(trained, "export", lambda *_, **__: trained.Exported(path, path, 1, 2))
    made = prediction.Predicted(path, path, 1, {name: ("F32", (1,))}, (name,))
    monkeypatch.setattr(prediction, "predict", lambda *_, **__: made)
    for arguments, times in (
        (("train", "made", *SHORT, "--output", name), 3),
        (("inspect", "made", "--svg", f"{name}.svg"), 1),
        (("train", "export", "run", "new"), 2),
        (("train", "predict", "run"), 4),
    ):
        ended = command(tmp_path, *arguments)
        assert ended.code == 0 and ended.out.replace("\n", "").count(name) == times, ended
    console = SafeConsole(file=io.StringIO(), width=400)
    print_comparison(console, MethodComparison((), path, 1, 0))
    assert console.file.getvalue().count(name) == 4  # type: ignore[attr-defined]


# --- options, weights and configurations of a stranger

HOSTILE = ("\x1b[2J\x1b[1A", "\u202e# x", "[red]x[/]", "$(touch ran)", "../../ran", "\ud800")
SHORT = ("--steps", "1", "--micro-batches", "1", "--eval-batches", "0", "--schedule", "single")


def harmless(folder: Path, *arguments: str) -> str:
    """The output of a command; asserts that it steers no terminal and contains no traceback."""
    ended = command(folder, *arguments)
    told = ended.out + ended.err
    assert visible(told) == told and "Traceback" not in told, told
    outside = [folder.parent / "ran", folder.parent.parent / "ran"]
    assert not [*folder.rglob("ran"), *filter(Path.exists, outside)]
    return told


@pytest.mark.parametrize("name", HOSTILE)
def test_names_in_a_file_of_options_are_names(tmp_path: Path, name: str) -> None:
    write_mlp(tmp_path / "made")
    text = json.dumps(name)
    options = ("data", "tokenizer", "schedule", "criterion", "log")
    keys = [f"{text} = 1", f"[sweep]\n{text} = [1]", f"[sweep]\nlr = [{text}]"]
    for line in [*keys, *(f"{option} = {text}" for option in options)]:
        (tmp_path / "job.toml").write_text(line)
        told = harmless(tmp_path, "train", "made", *SHORT, "--config", "job.toml", "--dry-run")
        assert told.startswith("error: ") or line not in keys


@pytest.mark.parametrize("name", HOSTILE[:-1])
def test_names_of_tensors_are_names(tmp_path: Path, name: str) -> None:
    write_mlp(tmp_path / "made")
    (file,) = (tmp_path / "made" / "weights").glob("*.safetensors")
    tensors = load_file(file)
    first = min(tensors)
    for found in ({**tensors, name: torch.ones(2)}, {name: tensors.pop(first), **tensors}):
        save_file(found, tmp_path / "w.safetensors", metadata={name: name})
        told = harmless(tmp_path, "train", "made", *SHORT, "-q", "--init-from", "w.safetensors")
        assert told.startswith("error: ") == (first not in found)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_configuration_of_transformers_is_data(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / "theirs").mkdir()
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\n"
    (folder / "modeling.py").write_text(code)
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16}
    named = {"architectures": ["GPT2LMHeadModel"], **small}
    own = {"auto_map": {"AutoConfig": "modeling.Model", "AutoModelForCausalLM": "modeling.Model"}}
    for odd in (
        {"model_type": name},
        {**small, "architectures": [name]},
        {**small, "architectures": ["AutoModelForCausalLM"]},
        {**named, "torch_dtype": name},
        {**named, "activation_function": name},
        {**named, "_attn_implementation": name},
        {"model_type": "theirs", **own, "trust_remote_code": True, "architectures": ["Model"]},
        {**small, **own, "trust_remote_code": True, "architectures": ["Model"]},
    ):
        (folder / "config.json").write_text(json.dumps(odd))
        model = ("--model", "theirs", "--stages", "2", "--profile", "analytic", "--meta")
        told = harmless(tmp_path, "partition", *model, "--seq", "4", "--output", "made")
        assert told.startswith("error: "), told


def test_a_configuration_without_an_architecture_is_a_language_model(tmp_path: Path) -> None:
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(small))
    model = load_model(str(tmp_path), meta=True).model
    assert type(model).__name__ == "GPT2LMHeadModel"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(AsyncPipeError, match="is a clip without architectures, which is missing"):
        load_model(str(tmp_path), meta=True)
