"""A command -> its ranks as processes of this machine, watched by torch's elastic agent.

The agent ends all ranks when one fails, and starts them again unless `on_failure` raises.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from .loopback import Loopback

_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals at which the agent ends all ranks."""


class RankAgent(LocalElasticAgent):
    """Starts `ranks` processes of this interpreter with `arguments`; what they print goes to
    `logs`, but for what rank 0 prints on standard output.

    `on_failure` is called with the exit codes of the ranks that failed, when all have ended;
    `unfinished` tells which of those that ended with code 0 had more to do.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        ranks: int,
        logs: Path,
        *,
        restarts: int,
        on_failure: Callable[[Mapping[int, int]], None],
        unfinished: Callable[[], Mapping[int, int]],
    ) -> None:
        redirects = {rank: Std.ERR if rank == 0 else Std.ALL for rank in range(ranks)}
        self._meeting = Loopback("ranks")
        spec = WorkerSpec(
            role="ranks",
            local_world_size=ranks,
            rdzv_handler=self._meeting,
            entrypoint=sys.executable,
            args=tuple(arguments),
            max_restarts=restarts,
            local_addr="127.0.0.1",
        )
        super().__init__(spec, DefaultLogsSpecs(str(logs), redirects=redirects))
        self._on_failure, self._unfinished = on_failure, unfinished

    @property
    def processes(self) -> list[int]:
        """Those of the ranks that have been started."""
        return [each.id for each in self.get_worker_group().workers if isinstance(each.id, int)]

    def finish(self) -> None:
        """Returns when all ranks have ended well. Raises what `on_failure` raises, and
        SignalException for a signal that ends the run."""
        try:
            with _quiet():
                self.run()
        finally:
            self._meeting.shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Looks before torch's agent does: that would end the others by SIGTERM, which asks a rank
        to stop where all are, and would take what they end with then for failures of their own."""
        ranks = self._pcontext
        assert isinstance(ranks, SubprocessContext)
        codes = {rank: each.proc.poll() for rank, each in ranks.subprocess_handlers.items()}
        failed = {rank: code for rank, code in codes.items() if code}
        if 0 in codes.values():
            failed |= {rank: 0 for rank in self._unfinished() if codes[rank] == 0}
        if failed:
            ranks.close(signal.SIGKILL)
            self._on_failure(failed)
        elif None in codes.values():
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result


@contextmanager
def _quiet() -> Iterator[None]:
    """The agent's own log is silent; it handles the signals at which ranks are ended, and its
    handlers are gone afterwards."""
    loggers = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed.elastic")
    ]
    levels = [logger.level for logger in loggers]
    handlers: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _ENDING}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    before = os.environ.get(_SIGNALS)
    os.environ[_SIGNALS] = ",".join(number.name for number in _ENDING)
    try:
        yield
    finally:
        os.environ.pop(_SIGNALS)
        if before is not None:
            os.environ[_SIGNALS] = before
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
