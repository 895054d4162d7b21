"""Headless Chromium, driven through a pipe by the DevTools protocol: no port and no driver."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class Browser:
    """A browser with one page, as a context manager. Raises RuntimeError for an error of the page's
    scripts or policy, and where no Chromium is installed."""

    def __init__(self) -> None:
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
        if found is None:
            raise RuntimeError("Chromium is not installed")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def take_pipes() -> None:  # Chromium reads from 3 and writes to 4
            first, second = os.dup(to_read), os.dup(to_write)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [
                *(found, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"),
                "about:blank",
            ],
            preexec_fn=take_pipes,
            pass_fds=(3, 4, to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest, self._numbers = b"", itertools.count(1)
        self.errors: list[str] = []
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()
        if error is None and self.errors:
            raise RuntimeError("; ".join(self.errors))

    def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Sets the size of the window, and the user's preference of colors."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> float:
        """Waits until an expression is true; returns the seconds. Raises TimeoutError."""
        began = time.monotonic()
        while not self.value(expression):
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"{expression} is not true after {seconds:g} s")
            time.sleep(0.1)
        return time.monotonic() - began

    def move(self, x: float, y: float, kind: str = "mouseMoved", buttons: int = 0) -> None:
        """A movement, `mousePressed` or `mouseReleased` of the pointer in the window."""
        button = "none" if kind == "mouseMoved" and not buttons else "left"
        at = {"x": x, "y": y, "button": button, "buttons": buttons, "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type=kind, **at)

    def shoot(self, file: Path, *, whole: bool = False, quality: int = 70) -> Path:
        """Writes a picture of the window, or of the whole page, as WebP."""
        found = self._call(
            "Page.captureScreenshot", format="webp", quality=quality, captureBeyondViewport=whole
        )
        file.write_bytes(base64.b64decode(found["data"]))
        return file

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            content = os.read(self._read, 1 << 20)
            if not content:
                raise RuntimeError("Chromium has ended")
            self._rest += content
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        """Keeps errors of scripts and of the page's policy."""
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))
        entry = event.get("params", {}).get("entry", {})
        if entry.get("source") in ("security", "javascript") or "Refused" in entry.get("text", ""):
            self.errors.append(str(entry["text"]))
