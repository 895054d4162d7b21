"""The commands as a user types them: exit codes, messages, and what is left on disk.

Their processes are forks with the imports done, but for one of each command.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes.quick_python import bin_folder

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(sys.executable).parent
MLP = ["--model", f"{ROOT / 'examples' / 'residual_mlp.py'}:build", "--loss", "cross_entropy"]
DATA = ["--data", f"{ROOT / 'examples' / 'residual_mlp.py'}:data"]


def run(
    folder: Path,
    command: str,
    *arguments: str,
    timeout: float = 120,
    scripts: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [(scripts or bin_folder()) / f"asyncpipe-{command}", *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def error(result: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The message of a failed command: one `error:` sentence, no traceback."""
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example model has been cut in two."""
    folder = tmp_path_factory.mktemp("made")
    result = run(folder, "partition", *MLP, "--stages", "2")
    assert result.returncode == 0, result.stderr
    return folder


def test_partition_reports_each_phase_and_says_what_to_do_next(tmp_path: Path) -> None:
    result = run(tmp_path, "partition", *MLP, "--stages", "2", scripts=SCRIPTS)
    phases = re.findall(r"^✓ (\w+)", result.stdout, re.MULTILINE)
    assert phases == ["load", "capture", "profile", "plan", "generate", "verify", "write"]
    assert "weights: from build() (seed 0)" in result.stdout
    assert "an even split of the blocks " in result.stdout
    assert "asyncpipe-train generated_models/residual_mlp_2p" in result.stdout
    files = {path.name for path in (tmp_path / "generated_models/residual_mlp_2p").iterdir()}
    code = {"stage_0.py", "stage_1.py", "__init__.py"}
    assert files == code | {"README.md", "report.html", "plan.json", "weights"}


def test_partition_calls_what_the_code_of_a_model_has_registered_for_its_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.py").write_text(
        "import atexit, tempfile, torch\n"
        "held = tempfile.TemporaryDirectory(dir='.', prefix='held-')\n"
        "def build():\n"
        "    atexit.register(print, 'ended')\n"
        "    return torch.nn.Linear(2, 2), {'input': torch.ones(1, 2)}\n"
    )
    words = ("--model", "model.py:build", "--stages", "1", "--stop-after", "plan")
    result = run(tmp_path, "partition", *words, scripts=SCRIPTS)
    assert result.returncode == 0 and result.stdout.endswith("ended\n"), result.stderr
    assert not list(tmp_path.glob("held-*"))


def test_partition_prints_json_or_only_the_folder(tmp_path: Path) -> None:
    plan = json.loads(run(tmp_path, "partition", *MLP, "--stages", "2", "--json").stdout)
    assert len(plan["stages"]) == 2
    quiet = run(tmp_path, "partition", *MLP, "--stages", "2", "-q", "--output", "there")
    assert quiet.stdout == "there\n"


def test_help_answers_at_once_and_imports_neither_torch_nor_transformers() -> None:
    check = (
        "import contextlib, sys, asyncpipe.cli as cli; sys.argv = ['x', '--help']\n"
        "with contextlib.suppress(SystemExit): cli.{0}()\n"
        "assert not {{'torch', 'transformers', 'networkx'}} & set(sys.modules)"
    )
    for command in ("partition", "train", "inspect", "compare", "info", "view", "comm"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(
            [sys.executable, "-c", check.format(command)], capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert result.returncode == 0, result.stderr
        assert "Usage:" in result.stdout
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_torch_is_imported_without_collections_of_garbage(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    check = (
        "import gc, sys, asyncpipe.cli as cli\n"
        "from os import _exit as end\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            end(7 if gc.isenabled() else 5)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "cli.{0}()"
    )
    for command, *words in (
        ("partition", "--model", "mlp", "--stages", "2"),
        ("partition", "--model", "mlp", "--hosts", "a:2"),
        ("train", "mlp"),
        ("compare", "mlp", "--methods", "sync"),
    ):
        python = [sys.executable, "-c", check.format(command), *words]
        assert subprocess.run(python, cwd=tmp_path).returncode == 5, (command, *words)


def test_a_misspelled_option_names_the_right_one(tmp_path: Path) -> None:
    assert "Did you mean --seed?" in error(
        run(tmp_path, "partition", "--model", "mlp", "--stages", "2", "--sedd", "2"), 2
    )
    assert "Did you mean --schedule?" in error(run(tmp_path, "train", "x", "--shedule", "1f1b"), 2)


def test_compare_prints_a_line_a_run_and_the_table(made: Path, tmp_path: Path) -> None:
    folder = "generated_models/residual_mlp_2p"
    options = ["--steps", "3", "--micro-batches", "1", "--output", str(tmp_path / "out"), *DATA]
    methods = ["--methods", "sync", "stash:sgd", "--optimizers", "sgd", "adamw", "--lr", "0.1"]
    result = run(made, "compare", folder, *methods, *options)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["1/3", "2/3", "3/3"]
    assert lines[4].split()[:5] == ["method", "optimizer", "lr", "seeds", "loss"]
    assert [line.split()[0] for line in lines[5:8]] == ["sync", "sync", "stash"]
    assert "3 runs made, 0 known from before" in result.stdout
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"comparison.html", "curves.svg", "table.md", "runs.jsonl"}
    again = run(made, "compare", folder, *methods, *options, "--json")
    assert [json.loads(line)["optimizer"] for line in again.stdout.splitlines()] == [
        "sgd",
        "adamw",
        "sgd",
    ]


def test_compare_names_what_a_method_cannot_be(made: Path) -> None:
    folder = "generated_models/residual_mlp_2p"
    assert "Did you mean stash?" in error(run(made, "compare", folder, "--methods", "stsh"))
    assert "Did you mean lr" in error(run(made, "compare", folder, "--methods", "stash,lrr=1"))


def test_e1_an_unknown_model_suggests_the_nearest(tmp_path: Path) -> None:
    text = error(run(tmp_path, "partition", "--model", "gtp2", "--stages", "2"))
    assert 'no model "gtp2"' in text and "Did you mean gpt2?" in text
    assert not (tmp_path / "generated_models").exists()


def test_e4_more_stages_than_places_to_cut(tmp_path: Path) -> None:
    text = error(run(tmp_path, "partition", *MLP, "--stages", "99"))
    assert "99 stages asked" in text
    assert not list(tmp_path.rglob("stage_*.py"))


def test_e6_a_plan_of_another_model_is_not_overwritten_without_force(
    made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made / "generated_models", tmp_path / "generated_models")
    deeper = [*MLP, "--model-arg", "depth=6", "--stages", "2"]
    text = error(run(tmp_path, "partition", *deeper))
    assert "was made from another model: depth was the default, is now 6" in text
    assert "--force" in text
    assert run(tmp_path, "partition", *deeper, "--force").returncode == 0


def test_a_folder_of_another_version_is_written_over_with_force(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "generated_models", tmp_path / "generated_models")
    plan = tmp_path / "generated_models/residual_mlp_2p/plan.json"
    schema = json.loads(plan.read_text())["schema"]
    plan.write_text(json.dumps({"schema": schema - 1, "command": "asyncpipe-partition x"}))
    text = error(run(tmp_path, "partition", *MLP, "--stages", "2"))
    assert f"has schema {schema - 1}" in text and "asyncpipe-partition x --force" in text
    assert run(tmp_path, "partition", *MLP, "--stages", "2", "--force").returncode == 0
    assert json.loads(plan.read_text())["schema"] == schema


def test_e7_a_folder_with_foreign_files_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "generated_models" / "residual_mlp_2p"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    text = error(run(tmp_path, "partition", *MLP, "--stages", "2", "--force"))
    assert "files that this tool did not write (notes.txt). Nothing was changed." in text
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_full_disk_is_named_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    command = [str(SCRIPTS / "asyncpipe-partition"), *MLP, "--stages", "2", "--output", "here"]
    # The texts fit into files of 120 KiB, the weights do not.
    limited = ["bash", "-c", 'ulimit -f 120; exec "$@"', "bash", *command]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True)
    assert error(done).startswith("error: here cannot be written: file too large (")
    assert not list(tmp_path.iterdir())


def test_output_to_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [bin_folder() / "asyncpipe-info"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: no space left on device.\n"


def test_a_stage_edited_by_hand_is_used_and_not_overwritten(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "generated_models", tmp_path / "generated_models")
    stage = tmp_path / "generated_models/residual_mlp_2p/stage_1.py"
    stage.write_text(stage.read_text().replace("return ", "return 2.0 * ", 1))
    text = error(run(tmp_path, "partition", *MLP, "--stages", "2"))
    assert "stage_1.py was edited by hand" in text and "--force" in text
    assert "edited  stage_1.py" in run(tmp_path, "inspect", str(stage.parent)).stdout
    assert "return 2.0 * " in stage.read_text()
    assert run(tmp_path, "partition", *MLP, "--stages", "2", "--force").returncode == 0
    assert "return 2.0 * " not in stage.read_text()


def test_inspect_shows_the_table_the_boundaries_and_the_code(made: Path) -> None:
    folder = "generated_models/residual_mlp_2p"
    table = run(made, "inspect", folder, scripts=SCRIPTS).stdout
    assert "boundary" in table and "f32[batch, 64]" in table
    assert "class Stage1(nn.Module):" in run(made, "inspect", folder, "--stage", "1").stdout
    assert "has no stage 7" in error(run(made, "inspect", folder, "--stage", "7"))
    assert "nowhere does not exist" in error(run(made, "inspect", "nowhere"))


@pytest.mark.parametrize("flag", ["-q", "--quiet"])
def test_a_quiet_run_prints_nothing(made: Path, tmp_path: Path, flag: str) -> None:
    short = ["--steps", "2", "--schedule", "single", "--output", str(tmp_path / "run")]
    result = run(made, "train", "generated_models/residual_mlp_2p", *DATA, *short, flag)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_train_runs_its_own_ranks_and_the_loss_falls(made: Path) -> None:
    folder = "generated_models/residual_mlp_2p"
    short = ["--steps", "30", "--micro-batches", "4", "--lr", "0.01"]
    result = run(made, "train", folder, *DATA, *short, scripts=SCRIPTS)
    assert result.returncode == 0, result.stderr
    assert "32 samples per step = 4 micro-batches × 8 samples × 1 replica" in result.stdout
    (metrics,) = made.glob("runs/*/*/metrics.jsonl")
    losses = [
        record["loss"]
        for record in map(json.loads, metrics.read_text().splitlines())
        if "loss" in record and "step" in record
    ]
    assert losses[-1] < losses[0]
    assert "\n  predicted  " in result.stdout


def test_a_config_file_is_read_and_flags_win(made: Path, tmp_path: Path) -> None:
    folder = str(made / "generated_models/residual_mlp_2p")
    config = tmp_path / "run.toml"
    config.write_text('steps = 3\nmicro_batches = 2\nschedule = "gpipe"\n')
    result = run(
        tmp_path, "train", folder, *DATA, "--config", str(config), "--steps", "2", "--json"
    )
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["steps"] for event in events if "steps" in event][-1] == 2
    config.write_text("stepz = 3\n")
    assert "steps" in error(run(tmp_path, "train", folder, "--config", str(config)))


def step_losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["event"] == "step"]


def test_the_teaching_example_in_two_stages_has_the_losses_of_one_process(tmp_path: Path) -> None:
    assert run(tmp_path, "partition", "--model", "mlp", "--stages", "2").returncode == 0
    options = ["generated_models/mlp_2p", "--steps", "20", "--eval-every", "10", "--log-every", "1"]
    for schedule in ("single", "1f1b", "gpipe"):
        result = run(tmp_path, "train", *options, "--schedule", schedule)
        assert result.returncode == 0, result.stderr
        assert "64 samples per step = 8 micro-batches × 8 samples × 1 replica" in result.stdout
        assert "SGD(lr=0.1) · linear decay to 30%" in result.stdout
        assert "eval at step 10" in result.stdout
    single, piped, filled = (
        step_losses(tmp_path / f"runs/mlp_2p/{number}") for number in (1, 2, 3)
    )
    assert len(single) == 20
    assert piped == pytest.approx(single, rel=1e-6)
    assert filled == pytest.approx(single, rel=1e-6)


def test_training_from_exported_weights_goes_on_where_it_ended(made: Path) -> None:
    folder = "generated_models/residual_mlp_2p"
    options = [folder, *DATA, "--log-every", "1"]
    first = run(made, "train", *options, "--steps", "40", "--lr", "0.01", "--output", "one")
    assert first.returncode == 0, first.stderr
    second = run(
        made, "train", *options, "--steps", "1", "--init-from", "one/weights", "--output", "two"
    )
    assert second.returncode == 0, second.stderr
    (*_, ended), (began, *_) = (step_losses(made / name) for name in ("one", "two"))
    assert began < 2 * ended + 0.1


def test_torchrun_joins_and_a_wrong_number_of_ranks_is_told(made: Path) -> None:
    train = ["generated_models/residual_mlp_2p", *DATA, "--steps", "3"]

    def start(ranks: int) -> subprocess.CompletedProcess[str]:
        scripts = bin_folder()
        agent = [scripts / "torchrun", "--standalone", "--no-python", f"--nproc-per-node={ranks}"]
        return subprocess.run(
            [*agent, scripts / "asyncpipe-train", *train],
            cwd=made,
            capture_output=True,
            text=True,
            timeout=120,
        )

    joined = start(2)
    assert joined.returncode == 0, joined.stderr
    assert "✓ 3 steps" in joined.stdout
    refused = start(3)
    assert refused.returncode != 0
    assert "the plan has 2 stages, 3 ranks were started" in refused.stderr


def test_stop_after_prints_the_graph_or_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    graph = run(tmp_path, "partition", *MLP[:2], "--stop-after", "capture")
    assert graph.returncode == 0, graph.stderr
    assert "blocks.1 .. blocks.3 as blocks.0 · 15 operations" in graph.stdout
    costs = run(tmp_path, "partition", *MLP[:2], "--stop-after", "profile", "--json")
    first = json.loads(costs.stdout)["operations"][0]
    assert (first["name"], first["forward_ms"] > 0) == ("embedded", True)
    plan = run(tmp_path, "partition", *MLP, "--stages", "3", "--stop-after", "plan")
    assert "bottleneck stage" in plan.stdout and "next" not in plan.stdout
    assert not list(tmp_path.iterdir())


def test_stages_are_needed_for_a_plan(tmp_path: Path) -> None:
    assert "--stages is needed" in error(run(tmp_path, "partition", *MLP), 2)


def test_the_plan_is_steered_by_name_and_records_it(tmp_path: Path) -> None:
    steered = [*MLP, "--stages", "2", "--cut-at", "blocks.1", "--keep-together", "Block"]
    result = run(tmp_path, "partition", *steered, "--code", "flat")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "generated_models/residual_mlp_2p"
    plan = json.loads((folder / "plan.json").read_text())
    assert [stage["modules"] for stage in plan["stages"]] == [
        ["embed", "blocks.0"],
        ["blocks.1-3", "head"],
    ]
    assert "--cut-at blocks.1 --keep-together Block --code flat" in plan["command"]
    text = (folder / "stage_1.py").read_text()
    assert "--cut-at blocks.1" in text and "relu_2 = torch.relu(up_2)  # f32[batch, 128]" in text
    message = error(run(tmp_path, "partition", *MLP, "--stages", "2", "--cut-at", "block.1"))
    assert "Did you mean blocks.1" in message and "--stop-after capture" in message


def test_a_cost_graph_alone_is_planned(tmp_path: Path) -> None:
    nodes = [{"name": f"n{index}", "forward_ms": work} for index, work in enumerate((3, 4, 3))]
    edges = [{"source": f"n{index}", "target": f"n{index + 1}"} for index in range(2)]
    graph = {"format": "asyncpipe cost graph", "schema": 1, "nodes": nodes, "edges": edges}
    (tmp_path / "toy.json").write_text(json.dumps(graph))
    arguments = ["--graph", "toy.json", "--stages", "2"]
    table = run(tmp_path, "partition", *arguments)
    assert table.returncode == 0, table.stderr
    assert "bottleneck rank 7.00 ms" in table.stdout and "proven optimal" in table.stdout
    compared = run(tmp_path, "partition", *arguments, "--method", "all", "--json")
    plan = json.loads(compared.stdout)
    assert plan["method"] == "mpipe" and plan["ranks_of_stage"] == [[0], [1], [0]]
    assert {one["name"]: one["bottleneck_ms"] for one in plan["candidates"]}["mpipe"] == 6
    assert not list(tmp_path.glob("generated_models"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "2"], "Give either --model or --graph"),
        (
            ["--graph", "toy.json", "--model", "gpt2", "--stages", "2"],
            "Give either --model or --graph",
        ),
        (["--graph", "toy.json"], "--stages is needed"),
        (["--graph", "toy.json", "--stages", "2", "--meta"], "--meta requires --model"),
    ],
)
def test_a_graph_is_planned_instead_of_a_model(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in error(run(tmp_path, "partition", *arguments), code=2)


def test_two_stages_of_one_rank_train_as_the_plain_model(tmp_path: Path) -> None:
    """Mixed-pipe puts the outer layers on one rank: three processes, two devices of the plan."""
    (tmp_path / "uneven.py").write_text(
        "import torch\n"
        "from torch import nn\n\n\n"
        "def build():\n"
        "    layers = nn.Sequential(nn.Linear(768, 1024), nn.Linear(1024, 1024), "
        "nn.Linear(1024, 768))\n"
        "    return layers, {'input': torch.randn(64, 768)}\n\n\n"
        "def data():\n"
        "    generator = torch.Generator().manual_seed(3)\n"
        "    pairs = torch.randn(256, 2, 768, generator=generator)\n"
        "    return [{'input': x, 'target': y} for x, y in pairs]\n"
    )
    options = ["--model", "uneven.py:build", "--loss", "mse", "--output", "made", "--json"]
    made = run(
        tmp_path, "partition", *options, "--stages", "2", "--method", "mpipe", "--profile=analytic"
    )
    assert made.returncode == 0, made.stderr
    assert [stage["ranks"] for stage in json.loads(made.stdout)["stages"]] == [[0], [1], [0]]
    losses = {}
    for schedule in ("1f1b", "single"):
        trained = run(
            tmp_path, "train", "made", "--schedule", schedule, "--data", "uneven.py:data",
            "--steps", "3", "--micro-batches", "4", "--lr", "0.001", "--json",
            "--eval-batches", "0", "--output", schedule,
        )  # fmt: skip
        assert trained.returncode == 0, trained.stderr
        events = [json.loads(line) for line in trained.stdout.splitlines()]
        losses[schedule] = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses["1f1b"]) == 3
    assert losses["1f1b"] == pytest.approx(losses["single"], rel=1e-5)


def test_report_makes_a_page_again_and_compares_runs(made: Path, tmp_path: Path) -> None:
    folder = str(made / "generated_models/residual_mlp_2p")
    short = ["--steps", "4", "--schedule", "single", "--log-every", "1", "-q"]
    for name, lr in (("slow", "0.001"), ("fast", "0.01")):
        options = [*DATA, *short, "--lr", lr, "--output", name]
        assert run(tmp_path, "train", folder, *options).returncode == 0
    page = tmp_path / "slow" / "report.html"
    before = page.read_text()
    page.unlink()
    again = run(tmp_path, "train", "report", "slow")
    assert again.stdout.strip() == "✓ slow/report.html" and page.read_text() == before
    both = run(tmp_path, "train", "report", "slow", "fast")
    assert both.returncode == 0, both.stderr
    rows = [line.split("  ")[0] for line in both.stdout.splitlines()]
    assert {"loss after 4 steps", "idle", "lr"} <= set(rows)
    assert (tmp_path / "comparison.html").is_file()
    told = json.loads(run(tmp_path, "train", "report", "slow", "fast", "--json").stdout)
    assert told["differences"]["lr"] == ["0.001", "0.01"]
    alone = json.loads(run(tmp_path, "train", "report", "slow", "--json").stdout)
    assert alone["last_step"] == 4 and alone["config"]["lr"] == 0.001
    assert "does not contain a run" in error(run(tmp_path, "train", "report", "nowhere"))


def test_a_generated_folder_may_be_called_report(made: Path, tmp_path: Path) -> None:
    (tmp_path / "report").symlink_to(made / "generated_models/residual_mlp_2p")
    dry = run(tmp_path, "train", "./report", *DATA, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "residual_mlp" in dry.stdout


@pytest.mark.parametrize(
    "command",
    [
        "info",
        "train --help",
        "train {model} --data {data} --steps 3",
        "train {model} --data {data} --steps 3 --json",
    ],
)
def test_a_command_whose_reader_is_gone_goes_on_without_printing(
    command: str, tmp_path: Path
) -> None:
    """As after `| head -1`, which leaves as soon as it has a line."""
    model = ROOT / "generated_models" / "residual_mlp_2p"
    data = f"{ROOT / 'examples' / 'residual_mlp.py'}:data"
    name, *arguments = command.format(model=model, data=data).split()
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [bin_folder() / f"asyncpipe-{name}", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    if "--steps" in arguments:
        (metrics,) = tmp_path.rglob("metrics.jsonl")
        assert json.loads(metrics.read_text().splitlines()[-1])["event"] == "end"
