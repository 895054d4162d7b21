"""`--debug`: a rank waits for a debugger, stops at its breakpoints, and continues on request."""

from __future__ import annotations

import importlib.util
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.launch.launch import run
from asyncpipe.runtime.monitoring.diagnostics import check_debugger
from asyncpipe.tests.runtime.launch.test_training_launch import REAL, finish, losses, options, start
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of


class Debugger:
    """As much of the Debug Adapter Protocol as an editor needs to stop at a line."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._stream = self._socket.makefile("rwb")
        self._number = 0

    def ask(self, command: str, **arguments: Any) -> int:
        self._number += 1
        request = {"seq": self._number, "type": "request", "command": command}
        content = json.dumps(request | {"arguments": arguments}).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        self._stream.flush()
        return self._number

    def until(self, **wanted: Any) -> dict[str, Any]:
        """The next message that has these fields."""
        while True:
            header = self._stream.readline()
            assert header, f"the debugger is gone before {wanted}"
            length = int(header.partition(b":")[2])
            assert self._stream.readline() == b"\r\n"
            message: dict[str, Any] = json.loads(self._stream.read(length))
            assert message.get("success", True), message
            if wanted.items() <= message.items():
                return message

    def attach(self, breakpoints: dict[Path, int]) -> None:
        self.ask("initialize", adapterID="python", clientID="test", pathFormat="path")
        self.until(command="initialize", type="response")
        attached = self.ask("attach", justMyCode=False)
        self.until(event="initialized")
        for file, line in breakpoints.items():
            asked = self.ask(
                "setBreakpoints", source={"path": str(file)}, breakpoints=[{"line": line}]
            )
            found = self.until(request_seq=asked)["body"]["breakpoints"]
            assert [one["verified"] for one in found] == [True]
        self.ask("configurationDone")
        self.until(request_seq=attached)

    def value_at_stop(self, expression: str) -> tuple[str, str]:
        """Where the rank stands, and what an expression is there."""
        thread = self.until(event="stopped")["body"]["threadId"]
        asked = self.ask("stackTrace", threadId=thread)
        frame = self.until(request_seq=asked)["body"]["stackFrames"][0]
        asked = self.ask("evaluate", expression=expression, frameId=frame["id"])
        value = self.until(request_seq=asked)["body"]["result"]
        return f"{Path(frame['source']['path']).name}:{frame['line']}", value

    def leave(self) -> None:
        """Goes on without a debugger."""
        self.until(request_seq=self.ask("disconnect", terminateDebuggee=False))
        self._stream.close()
        self._socket.close()


def ports_of(output: Path, count: int) -> dict[int, int]:
    """Where the ranks said that they wait, by rank."""
    end_s = time.monotonic() + 60
    while True:
        try:
            texts = [text for about, text in events_of(output, "note") if about == "debugger"]
        except FileNotFoundError:
            texts = []
        found = {int(text.split()[1]): int(text.rpartition(":")[2]) for text in texts if text}
        if len(found) == count:
            return found
        assert time.monotonic() < end_s, texts
        time.sleep(0.1)


def test_a_rank_stops_at_a_line_of_its_stage_and_nobody_times_out(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    output = tmp_path / "run"
    limits: dict[str, Any] = {"timeout_s": 1.0, "stall_s": 0.5, "steps": 2}
    process = start(options(tmp_path / "mlp", output, debug="1", **limits), python=REAL)
    ((rank, port),) = ports_of(output, 1).items()
    assert rank == 1
    file = tmp_path / "mlp" / "stage_1.py"
    line = 1 + file.read_text().splitlines().index("        return h")
    debugger = Debugger(port)
    debugger.attach({file: line})
    assert debugger.value_at_stop("tuple(h.shape)") == (f"stage_1.py:{line}", "(4, 4)")
    time.sleep(3)  # longer than --timeout-s
    debugger.leave()
    code, _, error = finish(process)
    assert (code, error) == (0, "")
    assert len(losses(output)) == 2 and not events_of(output, "warning")


def test_all_ranks_wait_each_at_a_port_of_its_own(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    output = tmp_path / "run"
    process = start(options(tmp_path / "mlp", output, debug="all", steps=2))
    ports = ports_of(output, 2)
    assert sorted(ports) == [0, 1] and ports[0] != ports[1]
    assert not events_of(output, "step")
    for port in ports.values():
        debugger = Debugger(port)
        debugger.attach({})
        debugger.leave()
    code, _, error = finish(process)
    assert (code, error) == (0, "")


def test_a_missing_debugpy_is_told_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="--debug 1 needs debugpy") as refused:
        check_debugger(Settings(folder="x", debug="1"), 2)
    assert refused.value.cure == "pip install 'debugpy>=1.8'"


def test_a_rank_that_there_is_not_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    given = options(tmp_path / "mlp", tmp_path / "run", debug="0,2")
    with pytest.raises(SettingsError, match="--debug 0,2, but the run has ranks 0 to 1"):
        run(Settings(**given), FACTORY)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ranks", ["", "one", "1,", "all,1", "-1"])
def test_what_names_no_ranks_is_refused(ranks: str) -> None:
    with pytest.raises(SettingsError, match="is not all or numbers of ranks"):
        Settings(folder="x", debug=ranks)


def test_ranks_are_named_one_by_one_or_all() -> None:
    chosen = Settings(folder="x", debug="0,2")
    assert [chosen.is_debugged(rank) for rank in range(4)] == [True, False, True, False]
    assert Settings(folder="x", debug="all").is_debugged(3)
    assert not Settings(folder="x").is_debugged(0)
    assert chosen.patience_s > 86_400 and Settings(folder="x").patience_s == 300
