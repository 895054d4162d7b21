"""The other systems that a job can be written for, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from .batch import for_slurm
from .docker import for_docker
from .kubernetes import for_kubernetes
from .sagemaker import for_sagemaker
from .steps import JobFolder
from .written import WrittenJob


class Writer(Protocol):
    """Writes a job for one system."""

    def __call__(self, folder: JobFolder, *, trust: bool) -> WrittenJob: ...


WRITERS: Mapping[str, Writer] = {
    "docker": for_docker,
    "slurm": for_slurm,
    "kubernetes": for_kubernetes,
    "sagemaker": for_sagemaker,
}
