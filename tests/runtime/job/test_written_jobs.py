"""Jobs for other systems: each text is what its reader accepts, and holds no value of a secret."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.job.job_file import read_job
from asyncpipe.runtime.job.steps import JobFolder
from asyncpipe.runtime.job.targets import WRITERS
from asyncpipe.runtime.job.written import WrittenJob
from asyncpipe.tests.support.models.hand_folders import write_mlp

JOB = """
[model]
model = "mlp"
[train]
steps = 20
[data]
uri = "s3://bucket/corpus"
[storage]
checkpoints_uri = "s3://bucket/it's/checkpoints"
output = "s3://bucket/output"
[resources]
gpus = 4
max_run = "3h50m"
[container]
image = "registry.example/mine:1"
base = "asyncpipe-cuda"
source = "my code"
dependencies = ["datasets>=4"]
env = ["HF_TOKEN", "GREETING=it's me"]
[distribution]
pipeline = 2
replicas = 2
"""
SECRET = "hf_of_this_machine"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my job.toml").write_text(JOB)
    return Path("my job.toml")


def written(file: Path, system: str, *values: str) -> WrittenJob:
    folder = JobFolder(Path("jobs/my job"), read_job(file, values))
    job = WRITERS[system](folder, trust=False)
    assert SECRET not in str(job)
    return job


def checked(script: str) -> str:
    result = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (result.returncode, result.stderr) == (0, ""), script
    return script


def refusal(file: Path, system: str, *values: str) -> str:
    with pytest.raises(AsyncPipeError) as refused:
        written(file, system, *values)
    return str(refused.value)


def test_docker_builds_the_image_and_runs_the_job_in_it(file: Path) -> None:
    job = written(file, "docker", "train.lr=0.5")
    assert job.files["Containerfile"].splitlines()[1:] == [
        "FROM asyncpipe-cuda",
        "WORKDIR /work",
        'RUN ["pip", "install", "--no-cache-dir", "datasets>=4"]',
        'COPY ["my code/", "/work/"]',
    ]
    build, run = (shlex.split(checked(command)) for command in job.commands)
    assert build == [
        *("docker", "build", "--file", "jobs/my job/Containerfile"),
        *("--tag", "registry.example/mine:1", "."),
    ]
    place = run.index("registry.example/mine:1")
    assert run[place + 1 :] == [
        *("asyncpipe-job", "run", "my-job.toml", "train.lr=0.5", "--folder", "jobs/my-job"),
    ]
    options = list(zip(run[:place], run[1:place], strict=False))
    assert {("--env", "HF_TOKEN"), ("--env", "GREETING=it's me"), ("--gpus", "4")} <= {*options}
    volumes = [value for name, value in options if name == "--volume"]
    assert volumes == [
        "$PWD/my job.toml:/work/my-job.toml:ro",
        "$PWD/jobs/my job:/work/jobs/my-job",
    ]
    assert "network is false, but [data] uri is s3" in refusal(
        file, "docker", "container.network=false"
    )
    own = [f"{name}=file:///data" for name in ("data.uri", "storage.checkpoints_uri")]
    alone = written(file, "docker", "container.network=false", "storage.output=file:///o", *own)
    assert "--network none" in alone.commands[1] and "--volume /data:/data" in alone.commands[1]


REQUIRED = {
    "ConfigMap": ("data",),
    "Job": ("spec", "template", "spec"),
    "PyTorchJob": ("spec", "pytorchReplicaSpecs"),
    "PersistentVolumeClaim": ("spec", "accessModes"),
}


def documents(job: WrittenJob) -> dict[str, dict[str, Any]]:
    """The documents of a manifest by kind, each with what its schema requires."""
    found = {each["kind"]: each for each in yaml.safe_load_all(job.files["kubernetes.yaml"])}
    for kind, document in found.items():
        inner: Any = document
        for key in REQUIRED[kind]:
            inner = inner[key]
        assert document["metadata"]["name"].startswith("my-job") and "apiVersion" in document
    return found


def check_pod(pod: dict[str, Any], image: str) -> dict[str, Any]:
    """The container of a pod that has what it requires."""
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert container["image"] == image and container["name"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert all(type(word) is str for word in container["command"])
        for variable in container["env"]:
            assert len(variable.keys() & {"value", "valueFrom"}) == 1
    own: dict[str, Any] = pod["containers"][0]
    return own


def test_one_host_on_kubernetes_is_a_job(file: Path) -> None:
    job = written(file, "kubernetes")
    found = documents(job)
    assert set(found) == {"ConfigMap", "Job"}
    assert found["ConfigMap"]["data"] == {"my-job.toml": JOB}
    spec = found["Job"]["spec"]
    assert spec["activeDeadlineSeconds"] > 13_800
    container = check_pod(spec["template"]["spec"], "registry.example/mine:1")
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    (secret, *others) = container["env"]
    assert secret["valueFrom"] == {"secretKeyRef": {"name": "my-job-env", "key": "HF_TOKEN"}}
    assert {"name": "GREETING", "value": "it's me"} in others
    assert 'kubectl create secret generic my-job-env --from-literal=HF_TOKEN="$HF_TOKEN"' in (
        job.commands
    )
    checked("\n".join(job.commands))


def test_several_hosts_on_kubernetes_are_a_pytorch_job(file: Path) -> None:
    found = documents(written(file, "kubernetes", "resources.hosts=2"))
    assert set(found) == {"ConfigMap", "PersistentVolumeClaim", "PyTorchJob"}
    spec = found["PyTorchJob"]["spec"]
    assert spec["nprocPerNode"] == "2"
    master, worker = (spec["pytorchReplicaSpecs"][name] for name in ("Master", "Worker"))
    assert (master["replicas"], worker["replicas"]) == (1, 1)
    first, other = (
        check_pod(each["template"]["spec"], "registry.example/mine:1") for each in (master, worker)
    )
    assert first["name"] == other["name"] == "pytorch"
    assert other["command"][:3] == ["torchrun", "--no-python", "asyncpipe-job"]
    assert other["command"][-2:] == ["--only", "train"]
    assert first["command"][:2] == ["sh", "-c"]
    assert checked(first["command"][2]).startswith(f"{shlex.join(other['command'])} && ")
    assert master["template"]["spec"]["initContainers"][0]["command"][-1] == "prepare"
    assert "4 processes cannot be divided evenly among 3 hosts" in refusal(
        file, "kubernetes", "resources.hosts=3"
    )
    assert "which a pod cannot reach" in refusal(file, "kubernetes", "data.uri=file:///data")


INSTANCES = 'resources.instances={type = "ml.g5.12xlarge"}'


def test_sagemaker_gets_an_estimator_whose_hyperparameters_are_the_job(
    file: Path, tmp_path: Path
) -> None:
    job = written(file, "sagemaker", INSTANCES, "train.betas=[0.8, 0.9]", "model.seq=7")
    tree = ast.parse(job.files["sagemaker_job.py"])
    (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call)
               and getattr(node.func, "id", "") == "Estimator")  # fmt: skip
    texts = {keyword.arg: keyword.value for keyword in call.keywords}
    environment = ast.unparse(texts.pop("environment"))
    assert environment == "{'HF_TOKEN': os.environ['HF_TOKEN'], 'GREETING': \"it's me\"}"
    assert ast.unparse(texts.pop("role")) == "os.environ['SAGEMAKER_ROLE']"
    values = {name: ast.literal_eval(value) for name, value in texts.items()}
    assert (values["instance_type"], values["instance_count"]) == ("ml.g5.12xlarge", 1)
    assert values["checkpoint_s3_uri"] == "s3://bucket/it's/checkpoints"
    assert values["max_run"] > 13_800 and values["input_mode"] == "File"
    given = values["hyperparameters"]
    assert all(type(text) is str for text in given.values())
    again = tmp_path / "hyperparameters.json"
    again.write_text(json.dumps(given))
    read, first = read_job(again), read_job(file, ["train.betas=[0.8, 0.9]", "model.seq=7"])
    assert (read.model, read.train, read.distribution) == (
        first.model, first.train, first.distribution,
    )  # fmt: skip
    assert read.data.uri == "file:///opt/ml/input/data/training"
    streamed = written(file, "sagemaker", INSTANCES, "data.mode=pipe").files["sagemaker_job.py"]
    assert "input_mode='FastFile'" in streamed


def test_sagemaker_refuses_what_it_cannot_run(file: Path) -> None:
    assert "[resources] names no instances" in refusal(file, "sagemaker")
    two = refusal(file, "sagemaker", INSTANCES, "resources.instances.count=2")
    assert "there are 2 instances, but instances share no folder" in two
    assert "not in S3" in refusal(file, "sagemaker", INSTANCES, "storage.output=gs://b/x")


def test_slurm_runs_the_other_steps_around_the_ranks(file: Path) -> None:
    assert "--only prepare makes it" in refusal(file, "slurm")
    folder = JobFolder(Path("jobs/my job"), read_job(file))
    write_mlp(folder.plan)
    job = written(file, "slurm", "resources.hosts=2")
    script = checked(job.files["job.sbatch"])
    assert "#SBATCH --time=03:50:00" in script and "#SBATCH --nodes=2" in script
    steps = [line for line in script.splitlines() if "asyncpipe-" in line]
    assert steps[0].startswith("asyncpipe-job run 'my job.toml'")
    assert steps[0].endswith("--only prepare") and "asyncpipe-train" in steps[1]
    assert 'if [ "${code:-0}" -eq 0 ]; then asyncpipe-job run' in steps[2]
    assert job.commands == ("sbatch 'jobs/my job/job.sbatch'",)


@pytest.mark.parametrize("system", ["docker", "kubernetes", "sagemaker"])
def test_code_needs_trust_on_a_new_machine(file: Path, system: str) -> None:
    values = ("model.model=nets.py:build", INSTANCES)
    assert "code that its new machine cannot recognize: nets.py:build" in refusal(
        file, system, *values
    )
    job = WRITERS[system](JobFolder(Path("x"), read_job(file, values)), trust=True)
    assert "--trust" in str(job)
