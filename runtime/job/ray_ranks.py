"""The ranks of a job as actors of a Ray cluster, each with the environment that torchrun gives.

The command runs on a host of the cluster. All hosts share the folder of the job, and have our
commands at the same place. An actor starts its rank as a process and ends with it; ranks join each
other as under torchrun.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.settings import Settings
from ..distributed.rendezvous import free_port
from ..extras import install
from ..process import die_with_parent
from .job_file import JobDescription, JobError

_START_S = 120
"""How long actors may take to start."""
_BEAT_S = 0.5


@dataclass(frozen=True)
class Seat:
    """Where an actor is.

    node: the identity of its host.
    address: the address of its host.
    port: a free port there.
    gpus: the GPUs that Ray gave it.
    """

    node: str
    address: str
    port: int
    gpus: tuple[str, ...] = ()


class RankActor:
    """Runs one rank: an actor of Ray, or an object of this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def seat(self) -> Seat:
        import ray

        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        node = ray.get_runtime_context().get_node_id()
        return Seat(node, ray.util.get_node_ip_address(), free_port(""), gpus)

    def run(self, words: Sequence[str], folder: str, environment: Mapping[str, str]) -> int:
        """Runs the command of the rank to its end; returns its exit code."""
        program = shutil.which(words[0], path=environment["PATH"]) or words[0]
        self._process = subprocess.Popen(
            [program, *words[1:]],
            cwd=folder,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


def environments(seats: Sequence[Seat]) -> list[dict[str, str]]:
    """The environment of each rank: as torchrun sets it, with rank 0 in the first seat.

    >>> seats = [Seat("a", "10.0.0.1", 4000), Seat("b", "10.0.0.2", 4001), Seat("b", "10.0.0.2", 4)]
    >>> [each["LOCAL_RANK"] + "/" + each["LOCAL_WORLD_SIZE"] for each in environments(seats)]
    ['0/1', '0/2', '1/2']
    """
    found = []
    for rank, seat in enumerate(seats):
        own = [other for other, each in enumerate(seats) if each.node == seat.node]
        gpus = dict.fromkeys(gpu for other in own for gpu in seats[other].gpus)
        found.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(seats)),
                "LOCAL_RANK": str(own.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(own)),
                "MASTER_ADDR": seats[0].address,
                "MASTER_PORT": str(seats[0].port),
                **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            }
        )
    return found


def connect_to_ray(job: JobDescription) -> None:
    """Joins the Ray cluster of this host, or that of RAY_ADDRESS. Raises JobError if there is none,
    and for a job with a launcher."""
    if job.distribution.launcher is not None:
        raise JobError(
            f"{job.file}: [distribution] launcher is {job.distribution.launcher}, but Ray starts "
            "the processes.",
            "Leave it out.",
        )
    try:
        import ray
    except ImportError as error:
        raise JobError("--on ray needs ray, which is not installed.", install("ray")) from error
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level="warning")
    except ConnectionError as error:
        raise JobError(
            f"no Ray cluster was found: {' '.join(str(error).split())[:200]}",
            "ray start --head on this host, or set RAY_ADDRESS.",
        ) from error


class RayRanks:
    """The ranks of a run on the cluster, like a process: it is waited for, and gets signals."""

    def __init__(
        self, words: Sequence[str], settings: Settings, ranks: int, environment: Mapping[str, str]
    ) -> None:
        import ray

        on_gpu = settings.device == "cuda"
        resources = {"CPU": 1.0, **({"GPU": 1 / settings.ranks_per_gpu} if on_gpu else {})}
        self._group = ray.util.placement_group([resources] * ranks, strategy="PACK")
        if not self._group.wait(_START_S):
            ray.util.remove_placement_group(self._group)
            raise JobError(
                f"the Ray cluster did not provide {ranks} × {resources} within {_START_S} s.",
                "ray status shows what it has; add hosts, or use fewer processes.",
            )
        at = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor = ray.remote(RankActor)
        actors = [
            actor.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_concurrency=2,
                scheduling_strategy=at(self._group, placement_group_bundle_index=rank),
            ).remote()
            for rank in range(ranks)
        ]
        seats = ray.get([each.seat.remote() for each in actors], timeout=_START_S)
        # Ranks of a host are neighbors, as under torchrun.
        order = sorted(range(ranks), key=lambda place: (seats[place].node, place))
        self._actors = [actors[place] for place in order]
        of_ranks = environments([seats[place] for place in order])
        self._codes: list[Any] = [
            each.run.remote(list(words), os.getcwd(), {**environment, **own})
            for each, own in zip(self._actors, of_ranks, strict=True)
        ]
        self._asked: signal.Signals | None = None

    def send_signal(self, number: signal.Signals) -> None:
        """Lets `wait` send a signal to all ranks."""
        self._asked = number

    def wait(self) -> int:
        """Waits for all ranks; returns the first exit code that is not 0, after which the other
        ranks end."""
        import ray

        waiting, first = [*self._codes], 0
        try:
            while waiting and not first:
                if self._asked is not None:
                    number, self._asked = self._asked, None
                    ray.get([each.send_signal.remote(int(number)) for each in self._actors])
                ended, waiting = ray.wait(waiting, timeout=_BEAT_S)
                first = next(filter(None, map(_code, ended)), 0)
            if first and waiting:
                ray.wait(waiting, num_returns=len(waiting), timeout=10 * _BEAT_S)
        finally:
            for each in self._actors:
                ray.kill(each)
            ray.util.remove_placement_group(self._group)
        return first


def _code(ended: Any) -> int:
    """The exit code of a rank; 1 if its actor was lost."""
    import ray

    try:
        code: int = ray.get(ended)
    except ray.exceptions.RayError:
        return 1
    return code
