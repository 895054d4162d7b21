"""Valid input -> input that is not quite: for readers, which must give a result or one sentence.

How many examples each test takes is in `$ASYNCPIPE_FUZZ`; without it they are few, and the same
ones each time:

    ASYNCPIPE_FUZZ=2000 pytest tests/test_fuzzed_input.py -n 4
"""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_EXAMPLES = os.environ.get("ASYNCPIPE_FUZZ")
fuzzed = settings(
    max_examples=int(_EXAMPLES or 15),
    derandomize=_EXAMPLES is None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
many = settings(fuzzed, max_examples=int(_EXAMPLES or 80))

ODD = (
    None, True, False, 0, -1, 1, 7, 2.5, -0.5, 10**12, 10**30, -(2**63), 1e300, float("nan"),
    float("inf"), "", "x", "9**9**9**9", "batch*batch//0", "../../etc/passwd", "[/red]", "\x1b[2J",
    "a b", "é" * 400, "$(touch x)", [], {}, [1], ["x"], {"x": 1}, {"$named": ["x", 3]},
    {"$items": [[[], 1]]}, {"$size": "9**999999"}, [[[[]]]],
)  # fmt: skip
"""What JSON can have where something else should be."""

WORDS = (
    "", "0", "-1", "1", "2", "1.5", "nan", "inf", "-inf", "1e400", "9" * 20, "9" * 5000, "x", "x,y",
    ":", "=", "..", "/", "/dev/null", ".", "a" * 5000, "none", "auto", "all", "true", "\x1b[2J",
    "é", "0-", "3-1", "1,,2", "*", "%", "x:y", "nowhere.py:x", "[/red]", "--", "\n",
)  # fmt: skip
"""Texts that a shell can pass to an option."""


@st.composite
def changed_documents(draw: st.DrawFn, document: Any) -> str:
    """The JSON text of a document with one to three changes: values of other types, parts left out
    or twice, unknown fields, keys twice, depth."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        document = _changed(draw, document)
    text = json.dumps(document)
    match draw(st.sampled_from(("as it is",) * 6 + ("twice", "deep", "cut"))):
        case "twice":
            return text.replace("{", '{"name": 1, "name": 2, ', 1)
        case "deep":
            return text.replace(": 1", ": " + "[" * 5000 + "]" * 5000, 1)
        case "cut":
            return text[: draw(st.integers(0, len(text)))]
    return text


def _changed(draw: st.DrawFn, document: Any) -> Any:
    """Goes down to some part of a document and changes that."""
    is_inner = isinstance(document, (dict, list)) and bool(document)
    if not is_inner or draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(ODD))
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    key = draw(st.sampled_from(keys))
    match draw(st.integers(0, 9)):
        case 0:
            del document[key]
        case 1 if isinstance(document, dict):
            document["unheard_of"] = draw(st.sampled_from(ODD))
        case 1:
            document.append(copy.deepcopy(document[key]))
        case _:
            document[key] = _changed(draw, document[key])
    return document


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with some changed, left out or put in, or cut off somewhere."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(made) - 1)))
        match draw(st.integers(0, 3)):
            case 0:
                made[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                del made[place : place + draw(st.integers(1, 40))]
            case 2:
                made[place:place] = draw(st.binary(min_size=1, max_size=20))
            case 3:
                del made[place:]
    return bytes(made)


@st.composite
def changed_lines(draw: st.DrawFn, text: str, odd: tuple[str, ...]) -> str:
    """A text whose words are exchanged, left out or replaced by odd ones, line by line."""
    lines = text.split("\n")
    for _ in range(draw(st.integers(1, 4))):
        number = draw(st.integers(0, len(lines) - 1))
        words = lines[number].split(" ")
        place = draw(st.integers(0, len(words) - 1))
        match draw(st.integers(0, 3)):
            case 0:
                words[place] = draw(st.sampled_from(odd))
            case 1:
                del words[place]
            case 2:
                words.insert(place, draw(st.sampled_from(words)))
            case 3:
                words = draw(st.sampled_from(lines)).split(" ")
        lines[number] = " ".join(words)
    return "\n".join(lines)


@contextmanager
def bounded(*, seconds: float = 20.0, mebibytes: int = 2048) -> Iterator[None]:
    """Ends code that takes more processor time or memory than any reader should."""

    def end(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + (mebibytes << 20)
    before = signal.signal(signal.SIGVTALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
