"""Pages that follow runs -> a server on this machine's loopback.

`/TOKEN/` is the page; of several runs, `/TOKEN/0/` is the page of the first one. `events` below a
page is its stream of server-sent events: each has the parts of the page that have changed since the
one before. No address names a file, every request is read-only, and the token is compared in
constant time. Requests for another host's name are refused, so that no site can reach the server
under its own name (DNS rebinding).
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from markupsafe import Markup

from ..errors import AsyncPipeError
from ..monitoring.run_files import CONFIG, METRICS, not_a_run
from ..reports.rendering import render
from .pages import RunPage, SeveralPage

LOOPBACK = "127.0.0.1"
_HOSTS = frozenset((LOOPBACK, "localhost"))
_MOST_STREAMS = 16
_BEAT_S, _SILENT_S = 1.0, 10.0
"""Seconds between two looks at the runs, and those after which a stream says that it lives."""
_SHARE = 200
"""Between two looks there is so much more time than a look has cost: at most 0.5% of a core."""
_REQUEST_S = 30.0
_SINCE = re.compile(r"since=([0-9]{1,15})\Z")

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ViewError(AsyncPipeError):
    """A page cannot be served."""


def check_runs(folders: Sequence[Path]) -> None:
    """Raises DataError for a folder without a run."""
    for folder in folders:
        if not any((folder / name).is_file() for name in (METRICS, CONFIG)):
            raise not_a_run(folder)


def make_token() -> str:
    """A new secret part of an address."""
    return secrets.token_urlsafe(24)


def open_socket(port: int = 0) -> socket.socket:
    """A listening socket on loopback; port 0 is any free one. Raises ViewError."""
    try:
        return socket.create_server((LOOPBACK, port), backlog=_MOST_STREAMS)
    except OSError as error:
        raise ViewError(
            f"--port {port} cannot be used: {(error.strerror or str(error)).lower()}.",
            "Choose another port, or leave it out for a free one.",
        ) from error


def address_of(listening: socket.socket, token: str) -> str:
    """The address of the first page."""
    return f"http://{LOOPBACK}:{listening.getsockname()[1]}/{token}/"


@dataclass(slots=True)
class _Followed:
    """A page, its parts as they are, and the number of the look at which each last changed."""

    page: RunPage | SeveralPage
    parts: dict[str, str] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    streams: int = 0

    def refresh(self, number: int) -> bool:
        """Renders the parts again; True if one of them has changed."""
        parts = self.page.refresh().items()
        new = {name: html for name, html in parts if html != self.parts.get(name)}
        self.parts |= new
        self.changed |= dict.fromkeys(new, number)
        return bool(new)

    def since(self, number: int) -> dict[str, str]:
        """The parts that have changed after a look."""
        return {name: html for name, html in self.parts.items() if self.changed[name] > number}


class Viewer:
    """Serves the pages of some runs until `end`, or until they are over and nobody looks."""

    def __init__(self, folders: Sequence[Path], listening: socket.socket, token: str) -> None:
        self._runs = [RunPage(folder) for folder in folders]
        several = {str(place): _Followed(run) for place, run in enumerate(self._runs)}
        self._pages: Mapping[str, _Followed] = (
            {"": _Followed(self._runs[0])}
            if len(self._runs) == 1
            else {"": _Followed(SeveralPage(self._runs)), **several}
        )
        self._token = token.encode()
        self._number = 0
        self._looks = threading.Condition()
        self._ended = threading.Event()
        self._last_s = time.monotonic()
        self._server = _Server(self, listening)

    def serve(self, *, idle_s: float | None = None) -> None:
        """Serves until `end`; with `idle_s`, also ends when the runs are over and nobody has
        looked for so many seconds."""
        thread = threading.Thread(target=self._server.serve_forever, name="pages", daemon=True)
        thread.start()
        try:
            cost_s = 0.0  # the first look compiles templates, when a page is opened
            while not self._ended.wait(max(_BEAT_S, _SHARE * cost_s)):
                began_s = time.thread_time()
                if any(page.streams for page in self._pages.values()):
                    self._look([page for page in self._pages.values() if page.streams])
                    cost_s = time.thread_time() - began_s
                elif idle_s is not None and time.monotonic() - self._last_s > idle_s:
                    self._look([])
                    if all(run.is_over for run in self._runs):
                        return
        finally:
            self.end()
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def end(self) -> None:
        """Lets `serve` and all streams end."""
        self._ended.set()
        with self._looks:
            self._looks.notify_all()

    def _look(self, pages: Sequence[_Followed]) -> None:
        """Looks at the runs, renders these pages again, and wakes their streams."""
        with self._looks:
            self._last_s = time.monotonic()
            self._number += 1
            for run in self._runs:
                run.look()
            if any([page.refresh(self._number) for page in pages]):
                self._looks.notify_all()

    def page_of(self, path: str) -> tuple[_Followed, str] | None:
        """The page that a path asks for, and what of it; None for any other path."""
        token, slash, rest = path.removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(token.encode(errors="replace"), self._token):
            return None
        place, _, part = rest.rpartition("/")
        page = self._pages.get(place)
        return (page, part) if page is not None and part in ("", "events") else None

    def html_of(self, followed: _Followed, nonce: str) -> str:
        """The whole page as it is now."""
        self._look([followed])
        with self._looks:
            return render(
                "watch.html.j2",
                title=followed.page.title,
                # Templates made them, which have escaped what is not theirs.
                parts={name: Markup(followed.parts[name]) for name in followed.page.names},
                nonce=nonce,
                since=self._number,
            )

    def stream(self, followed: _Followed, since: int, write: Callable[[str], None]) -> None:
        """Writes the parts of a page as they change, until `write` fails or the server ends."""
        with self._looks:
            if sum(page.streams for page in self._pages.values()) >= _MOST_STREAMS:
                return
            followed.streams += 1
        try:
            while not self._ended.is_set():
                with self._looks:
                    if not followed.since(since):
                        self._looks.wait(_SILENT_S)
                    parts, number = followed.since(since), self._number
                # What is not ASCII, and a line break, is escaped in JSON.
                data = f"id: {number}\nevent: parts\ndata: {json.dumps(parts)}"
                write(f"{data if parts else ': nothing new'}\n\n")
                since = number
        finally:
            with self._looks:
                followed.streams -= 1
                self._last_s = time.monotonic()


class _Server(ThreadingHTTPServer):
    """A server on a socket that is listening already."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, viewer: Viewer, listening: socket.socket) -> None:
        super().__init__((LOOPBACK, 0), _Requests, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.viewer = viewer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A closed page is not an error; other errors have no reader."""


class _Requests(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "asyncpipe", ""
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        """Answers with a page or its stream."""
        host, _, _ = self.headers.get("Host", "").partition(":")
        if host not in _HOSTS:
            return self._refuse(HTTPStatus.FORBIDDEN)
        address = urlsplit(self.path)
        followed_part = self.server.viewer.page_of(address.path)
        if followed_part is None:
            return self._refuse(HTTPStatus.NOT_FOUND)
        followed, part = followed_part
        if part == "events":
            self._begin("text/event-stream", {})
            since_match = _SINCE.search(f"since={self.headers.get('Last-Event-ID', '')}")
            since_match = since_match or _SINCE.search(address.query)
            since = int(since_match[1]) if since_match else 0
            return self.server.viewer.stream(followed, since, self._write)
        nonce = secrets.token_urlsafe(16)
        page = self.server.viewer.html_of(followed, nonce)
        self._begin(
            "text/html; charset=utf-8",
            {
                "Content-Security-Policy": "default-src 'none'; connect-src 'self'; "
                f"script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; base-uri 'none'; "
                "form-action 'none'; frame-ancestors 'none'"
            },
        )
        self._write(page)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: addresses have the token in them."""

    def _refuse(self, status: HTTPStatus) -> None:
        self._begin("text/plain; charset=utf-8", {}, status)
        self._write(f"{status.phrase}\n")

    def _begin(
        self, kind: str, headers: Mapping[str, str], status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode(errors="replace"))
        self.wfile.flush()
