"""Settings -> a finished run: starts the ranks, or joins those that a launcher started.

Run by itself the command starts a process a rank through torch's elastic launcher, which ends
all when one fails. Under torchrun, srun or mpirun it is one of the ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ..checkpoint.resuming import nothing_left_to_do
from ..errors import AsyncPipeError, root_of
from ..replication.grid import grid_of
from ..replication.replicas import as_started, check_ranks
from ..run_report.writing import reported
from ..schedule_text import to_text
from ..signals import Interrupted
from ..training.facts import announce, forecast_run
from ..training.half import find_boundary_dtypes
from ..training.segments import make_segment
from ..training.settings import Settings, SettingsError
from ..training.setup import Job
from ..training.stopping import Stopped
from ..training.transport import expect_transport
from ..trust import is_trusted, remember, untrusted
from ..watching.metrics import Reporter
from .beforehand import check_job, check_unstarted
from .disk import disk_error
from .failure import RankError, RankFolder, failure_of, with_way_on
from .jobs import make_folder, make_job, reopen_folder, reporter_factory, run_rank
from .launchers import Place, find_place
from .max_run import ended_after
from .own_ranks import interruption, stages_of_ranks, start_ranks
from .seats import find_machine, own_seat
from .world import World, join, leave, stay_alone

_SHARED_FOLDER_S = 10.0
"""How long a file system of the network may take to show a folder to another host."""


def run(settings: Settings, reporter: str) -> int:
    """Trains a generated model to the end; 0.

    `reporter` is the `module:function` that makes a Reporter of settings, in the process of rank
    0. Raises TrustError when the folder came from elsewhere and nobody trusts it; AsyncPipeError
    with the first cause when a rank fails, when all ranks have ended; KeyboardInterrupt, with the
    step, after Ctrl-C.
    """
    place = find_place(
        os.environ, master_addr=settings.master_addr, master_port=settings.master_port
    )
    job = make_job(settings if place is None else as_started(settings, place.ranks))
    check_job(job)
    if settings.trust:
        remember(settings.folder)
    has_one_rank = job.settings.schedule == "single" or job.settings.ranks == 1
    alone = has_one_rank and job.settings.replicas == 1
    if settings.dry_run:
        _show(job, reporter_factory(reporter)(job.settings))
        return 0
    if finished := nothing_left_to_do(job.settings, job.folder):
        if place is None or place.rank == 0:
            reporter_factory(reporter)(job.settings).on_note("finished", finished)
        return 0
    # What ends one rank ends all.
    limit_s = settings.max_run_s if place is None or place.rank == 0 else None
    with ended_after(limit_s), job.lock:
        if place is not None and (place.ranks > 1 or not alone):
            _join(job, place, reporter)  # any rank's trust is enough there
        else:
            _check_trust(settings)
            in_this_process = alone and not job.settings.restarts
            (_run_alone if in_this_process else start_ranks)(job, reporter)
    return 0


def schedule_text(settings: Settings) -> str:
    """The schedule of a run, for the plan and sizes that the settings name, as a text file."""
    job = make_job(settings)
    return to_text(make_segment(job.plan, job.settings, steps=1).compute)


def _check_trust(settings: Settings) -> None:
    """Raises TrustError where the folder's code is not to be run yet."""
    if not settings.trust and not is_trusted(settings.folder):
        raise untrusted(settings.folder)


def _show(job: Job, reporter: Reporter) -> None:
    """A dry run: everything is checked and said, nothing is started or written."""
    settings, plan = job.settings, job.plan
    if settings.precision != "full":  # what crosses then is known from the stages' code alone
        _check_trust(settings)
    check_unstarted(job)
    schedule = make_segment(plan, settings, steps=1)
    grid = grid_of(schedule, settings.replicas)
    seats = (own_seat(settings, plan),) * grid.processes
    machine = find_machine(settings, plan, seats, 0)
    dtypes = find_boundary_dtypes(settings, plan)
    forecast = forecast_run(plan, job.planned, settings, machine.cores, schedule, dtypes)
    data = f"{settings.data} ({settings.tokenizer})" if settings.tokenizer else str(settings.data)
    announce(
        reporter,
        job,
        schedule,
        machine,
        transport=expect_transport(settings, plan, grid.ranks),
        data=data,
        forecast=forecast,
        dtypes=dtypes,
    )


def _run_alone(job: Job, reporter: str) -> None:
    world = stay_alone(job.settings, job.plan)
    job = make_folder(job)
    ranks = RankFolder(job.folder)
    with reported(job.folder):
        try:
            run_rank(job, world, reporter)
        except Stopped:
            shutil.rmtree(ranks.path)
            raise
        except AsyncPipeError as error:
            known = root_of(error)
            assert isinstance(known, AsyncPipeError)
            raise with_way_on(known, job.folder) from None
        except OSError as error:
            raise disk_error(error, job.folder) or error from None
        except KeyboardInterrupt:
            raise Interrupted(interruption(ranks)) from None
    shutil.rmtree(ranks.path)


def _join(job: Job, place: Place, reporter: str) -> None:
    schedule = make_segment(job.plan, job.settings, steps=1)
    check_ranks(job.planned, schedule, place.ranks, job.settings.replicas or 1)
    _check_restarts(job.settings, place)
    left: RankFolder | None = None
    try:
        world = join(place, job.settings, job.plan)
        job = _in_one_folder(job, world)
        left = RankFolder(job.folder)
        stopped: Stopped | None = None
        try:
            with reported(job.folder) if place.rank == 0 else nullcontext():
                run_rank(job, world, reporter)
        except Stopped as asked:
            stopped = asked
        world.meet()
        if place.rank == 0:
            shutil.rmtree(left.path)
        leave()
    except Exception as error:
        stages = stages_of_ranks(schedule, job.settings.replicas)[place.rank]
        raise _told(error, place.rank, stages, left) from error
    if stopped is not None:
        raise stopped


def _check_restarts(settings: Settings, place: Place) -> None:
    if settings.restarts:
        again = f"torchrun --max-restarts {settings.restarts}, with --output FOLDER"
        raise SettingsError(
            f"--restarts {settings.restarts} is for ranks that asyncpipe-train starts itself, and "
            f"{place.launcher} started these.",
            again if place.launcher == "torchrun" else "Start the job again.",
        )
    if place.restarts and settings.output is None:
        raise SettingsError(
            f"torchrun --max-restarts {place.restarts} begins this run again, and nothing says in "
            "which folder.",
            "--output FOLDER",
        )


def _in_one_folder(job: Job, world: World) -> Job:
    """The job with the folder that rank 0 makes for all; what keeps it from that, all raise."""
    answer: dict[str, str] = {}
    # The agents of several hosts count their attempts each for itself.
    again = world.sums([float(world.place.attempt)]) != [0.0]
    if world.rank == 0:
        try:
            answer = {"folder": str((reopen_folder if again else make_folder)(job).folder)}
        except AsyncPipeError as refusal:
            answer = {"what": refusal.what, "cure": refusal.cure}
    answer = json.loads(world.text_of_first(json.dumps(answer)))
    if "what" in answer:
        raise SettingsError(**answer)
    job = replace(job, folder=Path(answer["folder"]))
    end_s = time.monotonic() + _SHARED_FOLDER_S
    while not (seen := RankFolder(job.folder).path.is_dir()) and time.monotonic() < end_s:
        time.sleep(0.1)
    if b"0" in (answers := world.gathered(b"1" if seen else b"0")):
        rank, hosts = answers.index(b"0"), world.machine.host_of_rank
        raise SettingsError(
            f"rank {rank} on {hosts[rank]} does not see {job.folder}, the run's folder, which rank "
            f"0 made on {hosts[0]}.",
            "--output with a folder that all hosts share, and start all in the same folder.",
        )
    return job


def _told(error: Exception, rank: int, stages: str, left: RankFolder | None) -> AsyncPipeError:
    """What this rank says of its end, and leaves for the others. One that ends for want of
    another waits first, for the launcher to end it when it sees the first cause, and names what
    was left before."""
    folder = left.path.parent if left else None
    failure = failure_of(error, rank, stages, left.step_of(rank) if left else 0, folder)
    if left is not None:
        left.write(failure)
    if failure.consequence:
        if left is not None:
            left.wait_for_cause()
        left_by_all = left.failures() if left else []
        causes = [each for each in left_by_all if not each.consequence]
        first = next(iter(causes or left_by_all), failure)
        if first.rank != rank:
            return RankError(
                f"rank {rank}{stages} ends for want of rank {first.rank}: {first.what}"
            )
    told = RankError(failure.what, failure.cure)
    return with_way_on(told, folder) if folder is not None else told
