"""Where every thread of this process stands, for the log of a rank that hangs."""

from __future__ import annotations

import sys
import threading
import traceback


def thread_stacks() -> str:
    """The stack of every thread, innermost call last, under its name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
