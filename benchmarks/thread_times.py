"""What a process's threads have used up to now; read on the main thread at the end of every step.

``end_ns`` is the moment, ``main_ns`` the calling thread's time on a core, ``others_ns`` that of all other threads,
``queued_ns`` how long the calling thread was ready to run and had no core. The rest of an interval it was blocked: by
the interpreter's lock, files, sockets.
"""

from __future__ import annotations

import time
from pathlib import Path

CLOCK_NAME = "stage2_thread_clock"
"""Of the callback that reads this in a learner."""
CLOCK_FILE = "clock.json"
DIRECTORY_VARIABLE = "SWIFT_STAGE2_THREAD_CLOCK"
"""Names the directory that gets the file."""
WAITS_FILE = "waits.jsonl"
"""There too: how long each B step of an inline run waited for its packs."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def read_times() -> dict[str, int]:
    """Nanoseconds by name, of the calling thread and its process."""
    main_ns = time.thread_time_ns()
    return {
        "end_ns": time.perf_counter_ns(),
        "main_ns": main_ns,
        "others_ns": time.process_time_ns() - main_ns,
        "queued_ns": _queued_ns(),
    }


def _queued_ns() -> int:
    """0 on a kernel that does not tell."""
    try:
        return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
