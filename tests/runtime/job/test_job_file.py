"""Job files: values from texts, near names, no secrets, and code only on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncpipe.partitioner.planning.cluster_file import read_cluster
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.job.job_file import JobError, check_code_of, read_job
from asyncpipe.runtime.job.steps import JobFolder, partition_words, train_words
from asyncpipe.runtime.job.tables import ESTIMATOR, TABLES
from asyncpipe.runtime.options import options_of
from asyncpipe.runtime.plan.trust import TrustError
from asyncpipe.tests.support.processes.in_process import command, error_of

DOCUMENT = Path(__file__).parents[3] / "docs" / "job-files.md"
MODEL = '[model]\nmodel = "mlp"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MODEL)
    return path


def refusal(file: Path, *values: str) -> str:
    with pytest.raises(AsyncPipeError) as refused:
        read_job(file, values)
    return str(refused.value)


def test_numbers_may_be_texts_and_the_command_line_wins(file: Path) -> None:
    file.write_text(f'{MODEL}[train]\nsteps = "7"\nlr = "1e-2"\nbetas = "0.8/0.9"\nseed = "???"\n')
    job = read_job(file, ["train.seed=3", "train.lr=0.5", "plan.stages=2", "container.env=A=1"])
    assert job.train == {"steps": 7, "lr": 0.5, "betas": (0.8, 0.9), "seed": 3}
    assert (job.name, job.plan, job.container.env) == ("mine", {"stages": 2}, ("A=1",))
    assert "train.seed is ??? in" in refusal(file)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("trian.lr=1", "trian is not a table of a job file.\nDid you mean train?"),
        ("train.lrr=1", "lrr is not an option of asyncpipe-train.\nDid you mean lr?"),
        ("train.lr=fast", 'lr = "fast" is not a number'),
        ("train.max_run=3h", "max_run is not an option of a job.\nUse [resources] max_run."),
        ("train.dry_run=true", "It applies to a single call: leave it out."),
        ("data.mode=pip", 'mode = "pip" is not one of file, pipe.\nDid you mean mode = "pipe"?'),
        ("data.url=s3://b/x", "[data] has no url.\nDid you mean uri?"),
        ("data.mode=pipe", 'mode = "pipe" needs a uri'),
        ("plan.output=x", "output is not an option of a job's plan"),
        ("model.model=3", "[model] names no model"),
        ("lr=1", "lr=1 is not TABLE.KEY=VALUE"),
        ("distribution.sequence=2", "[distribution] tensor, pipeline and replicas"),
        ("hyperparameters.lr=1", "Use [train], where numbers may be texts."),
        ("container.image=a b", 'image = "a b" is not the name of an image'),
        ('container.dependencies=["x --index-url y"]', "is not a requirement of pip"),
    ],
)
def test_a_mistake_is_answered_with_the_right_name(file: Path, value: str, message: str) -> None:
    assert message in refusal(file, value)


def test_an_unknown_option_of_the_plan_is_refused_before_anything_runs(file: Path) -> None:
    told = error_of(file.parent, "job", "run", str(file), "plan.stags=2", code=2)
    assert "asyncpipe-partition: Unknown option: --stags. Did you mean --stages?" in told
    told = error_of(file.parent, "job", "run", str(file), "plan.stages=many", code=2)
    assert "--stages many is not a whole number" in told
    assert not (file.parent / "jobs").exists()


@pytest.mark.parametrize(
    "value",
    [
        'container.env=["AWS_SECRET_ACCESS_KEY=mine"]',
        'container.env=["PLACE=https://me:mine@host"]',
        "data.uri=s3://me:mine@bucket/x",
        "train.init_from=hf_minemineminemineminemine",
    ],
)
def test_a_secret_is_refused_and_not_shown(file: Path, value: str) -> None:
    told = refusal(file, value)
    assert "looks like a" in told and "env = [" in told and "mine@" not in told
    assert "=mine" not in told and "hf_" not in told


def test_code_that_a_file_names_runs_when_a_command_line_has_named_it(file: Path) -> None:
    file.write_text('[model]\nmodel = "nets.py:build"\n[train]\ndata = "mine.py:load"\n')
    with pytest.raises(TrustError, match=r"named: model.model = nets.py:build.\n.*--trust"):
        check_code_of(read_job(file), "x", trust=False)
    named = ["model.model=nets.py:build"]
    with pytest.raises(TrustError, match=r"\[train\] of .*named: --data mine.py:load"):
        check_code_of(read_job(file, named), "x", trust=False)
    check_code_of(read_job(file, [*named, "train.data=mine.py:load"]), "x", trust=False)
    check_code_of(read_job(file), "x", trust=True)


def test_the_commands_are_those_that_a_user_would_type(file: Path) -> None:
    file.write_text(
        f"""{MODEL}model_arg = {{ depth = 3 }}
[plan]
leaf = ["A", "B"]
meta = true
[train]
steps = 5
[storage]
checkpoints_uri = "s3://b/c"
[distribution]
pipeline = 2
replicas = 2
launcher = "torchrun"
"""
    )
    folder = JobFolder(Path("jobs/mine"), read_job(file))
    assert " ".join(partition_words(folder)) == (
        "asyncpipe-partition --model mlp --model-arg depth=3 --leaf A --leaf B --meta --stages 2 "
        "--output jobs/mine/plan"
    )
    assert " ".join(train_words(folder)) == (
        "torchrun --standalone --nproc-per-node 4 --no-python asyncpipe-train jobs/mine/plan "
        "--replicas 2 --steps 5 --save-to s3://b/c --output jobs/mine/run --resume auto"
    )
    values = ("--print", "train.steps=5", "distribution.replicas=2")
    shown = command(file.parent, "job", "run", "mine.toml", *values).out
    assert [line for line in shown.splitlines() if line.startswith("$")] == [
        f"$ {' '.join(words(folder))}" for words in (partition_words, train_words)
    ]
    more = JobFolder(Path("x"), read_job(file, ["plan.stages=4"]))
    assert "--stages 4 --ranks 2" in " ".join(partition_words(more))
    split = JobFolder(Path("x"), read_job(file, ["distribution.tensor=2"]))
    assert "--stages 2 --tensor-parallel 2" in " ".join(partition_words(split))
    assert "--nproc-per-node 8" in " ".join(train_words(split))
    with pytest.raises(JobError, match="ranks is 3, but .* pipeline is 2"):
        partition_words(JobFolder(Path("x"), read_job(file, ["plan.stages=4", "plan.ranks=3"])))


def test_a_plan_is_made_for_the_devices_of_known_instances(file: Path) -> None:
    values = ['resources.instances={type = "ml.p3.8xlarge", count = 2}']
    folder = JobFolder(file.parent, read_job(file, values))
    assert partition_words(folder)[3:5] == ["--devices", f"{file.parent}/devices.toml"]
    assert folder.devices_text is not None
    folder.devices.write_text(folder.devices_text)
    cluster = read_cluster(folder.devices)
    assert [device.host for device in cluster.devices] == 4 * ["instance-0"] + 4 * ["instance-1"]
    unknown = ["resources.instances.type=z9.small"]
    for given in ([*values, "plan.hosts=h1:2"], [*values, "distribution.pipeline=2"], unknown):
        assert JobFolder(file.parent, read_job(file, given)).devices_text is None


def test_every_key_and_every_name_of_an_estimator_is_documented() -> None:
    text = DOCUMENT.read_text()
    for table, kind in TABLES.items():
        assert f"`[{table}]`" in text
        for key, option in options_of(kind).items():
            assert f"\n| `{key}` | {option.help}{option.shown_default} |\n" in text, (table, key)
    for name, answer in ESTIMATOR.items():
        assert f"\n| `{name}` | {answer} |\n" in text, name
