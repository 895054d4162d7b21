"""A job on Kubernetes: a Job on one host, or a PyTorchJob of the training operator on several."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ..config.execution_options import seconds_of
from .docker import builds_image
from .job_file import JobDescription, JobError
from .steps import JobFolder, local_path
from .written import (
    STOP_S,
    WORK,
    WrittenJob,
    check_container_code,
    check_kept,
    label_of,
    passed_by_name,
    set_variables,
    to_yaml,
    urls_of,
    words_in_container,
)

MANIFEST = "kubernetes.yaml"
_FILE, _FOLDER = "job-file", "job-folder"
_SIZE = "100Gi"


def for_kubernetes(folder: JobFolder, *, trust: bool) -> WrittenJob:
    """The manifest, and the commands of kubectl. Raises JobError for a job that cannot run in
    pods."""
    job, name = folder.job, label_of(folder.job)
    _check(job, trust)
    text = Path(job.file).read_text(encoding="utf-8")
    file = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-file"},
        "data": {f"{name}.toml": text},
    }
    documents = [file, _job(folder, trust)]
    if job.hosts > 1:
        documents = [file, _claim(name), _pytorch_job(folder, trust)]
    commands = []
    if names := passed_by_name(job):
        literals = " ".join(f'--from-literal={each}="${each}"' for each in names)
        commands.append(f"kubectl create secret generic {name}-env {literals}")
    if builds_image(job):
        image = shlex.quote(job.container.image)
        commands.insert(0, f"docker push {image}  # after --on docker has built it")
    path = shlex.quote(str(folder.path / MANIFEST))
    commands.append(f"kubectl apply --filename {path}")
    return WrittenJob({MANIFEST: "---\n".join(map(to_yaml, documents))}, tuple(commands))


def _check(job: JobDescription, trust: bool) -> None:
    check_kept(job)
    check_container_code(job, trust=trust)
    if not job.container.network:
        raise JobError(
            f"{job.file}: [container] network is false, but pods have the network of their "
            "cluster.",
            "Use network = true, and a NetworkPolicy of the cluster.",
        )
    for key, url in urls_of(job).items():
        if local_path(url) is not None:
            raise JobError(
                f"{job.file}: {key} is {url}, which a pod cannot reach.",
                "Use a URL such as s3://bucket/folder.",
            )


def _job(folder: JobFolder, trust: bool) -> dict[str, Any]:
    job, name = folder.job, label_of(folder.job)
    own: dict[str, Any] = {
        "backoffLimit": 6,
        # A pod that made room is started again; one whose time is over is not.
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [143]}},
            ]
        },
        "template": {
            "spec": {
                **_pod(job, {"emptyDir": {}}),
                "containers": [_container(job, words_in_container(folder, trust=trust))],
            }
        },
    }
    if job.resources.max_run is not None:
        own["activeDeadlineSeconds"] = (seconds_of(job.resources.max_run) or 0) + 10 * STOP_S
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": own}


def _pytorch_job(folder: JobFolder, trust: bool) -> dict[str, Any]:
    job, name = folder.job, label_of(folder.job)
    each = _ranks_of_host(job)
    train = ["torchrun", "--no-python", *words_in_container(folder, "--only", "train", trust=trust)]
    prepare = words_in_container(folder, "--only", "prepare", trust=trust)
    upload = words_in_container(folder, "--only", "upload", trust=trust)
    first = ["sh", "-c", f"{shlex.join(train)} && {shlex.join(upload)}"]
    pod = _pod(job, {"persistentVolumeClaim": {"claimName": name}})
    before = {**_container(job, prepare), "name": "prepare"}
    del pod["restartPolicy"]  # the operator's own
    master = {**pod, "initContainers": [before], "containers": [_container(job, first)]}
    worker = {**pod, "containers": [_container(job, train)]}
    replica = {"restartPolicy": "OnFailure"}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": str(each),
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, **replica, "template": {"spec": master}},
                "Worker": {"replicas": job.hosts - 1, **replica, "template": {"spec": worker}},
            },
        },
    }


def _ranks_of_host(job: JobDescription) -> int:
    ranks = job.distribution.processes
    if ranks is None:
        raise JobError(
            f"{job.file}: the processes of {job.hosts} hosts are not known.",
            "[distribution] pipeline = 4, and replicas if there are several pipelines.",
        )
    if ranks % job.hosts:
        raise JobError(
            f"{job.file}: {ranks} processes cannot be divided evenly among {job.hosts} hosts.",
            "Change [distribution] or the number of hosts.",
        )
    return ranks // job.hosts


def _pod(job: JobDescription, volume: dict[str, Any]) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_S,
        "volumes": [
            {"name": _FILE, "configMap": {"name": f"{label_of(job)}-file"}},
            {"name": _FOLDER, **volume},
        ],
    }


def _container(job: JobDescription, words: list[str]) -> dict[str, Any]:
    name, gpus = label_of(job), job.resources.gpus
    secret, file, state = f"{name}-env", f"{name}.toml", f"{WORK}/jobs/{name}/state"
    variables = [
        *(
            {"name": each, "valueFrom": {"secretKeyRef": {"name": secret, "key": each}}}
            for each in passed_by_name(job)
        ),
        *({"name": key, "value": value} for key, value in set_variables(job, state).items()),
    ]
    return {
        "name": "pytorch",
        "image": job.container.image,
        "workingDir": WORK,
        "command": words,
        "env": variables,
        **({"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}),
        "volumeMounts": [
            {"name": _FILE, "mountPath": f"{WORK}/{file}", "subPath": file},
            {"name": _FOLDER, "mountPath": f"{WORK}/jobs"},
        ],
    }


def _claim(name: str) -> dict[str, Any]:
    """The folder that all hosts share: the ranks of a run have one folder."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": _SIZE}},
        },
    }
