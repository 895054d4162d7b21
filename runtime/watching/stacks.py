"""Every thread of this process -> where it is in Python, as text."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Collection


def format_stacks(*, without: Collection[int] = ()) -> str:
    """The stacks of all threads, the main one's first, but for those of some thread ids."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    parts = []
    for thread in sorted(frames, key=lambda thread: thread != main):
        if thread not in without:
            # A frame may go on while it is read; the line is then that of a moment later.
            stack = "".join(traceback.format_stack(frames[thread]))
            parts.append(f"thread {names.get(thread, thread)}, the innermost call last:\n{stack}")
    return "\n".join(parts)
