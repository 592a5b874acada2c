"""Warns while nothing listens at the upstream's address, a few times and ever more rarely.

Looks at the port only: the merger makes no call of its own. Ends with the first connection, after the last warning,
or when it is closed; started by ``app``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from swift_stage2.process.route import why_deaf

_LOOK_INTERVAL_S = 1.0
_CONNECT_TIMEOUT_S = 2.0


class SilenceWatch:
    """One thread. ``moments_s``: how long after the start each warning is due."""

    def __init__(
        self, base_url: str, warn: Callable[[str], None], *, moments_s: Sequence[float] = (10, 60, 300, 1800)
    ) -> None:
        self._base_url = base_url
        self._warn = warn
        self._moments_s = moments_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="silence-watch", daemon=True)

    def __enter__(self) -> SilenceWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self.wait(2 * _CONNECT_TIMEOUT_S)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        begun = time.monotonic()
        for moment_s in self._moments_s:
            while reason := why_deaf(self._base_url, _CONNECT_TIMEOUT_S):
                left_s = begun + moment_s - time.monotonic()
                if left_s <= 0:
                    self._warn(
                        f"nothing listens at {self._base_url} after {moment_s:g} s ({reason}); start the server there, "
                        "or correct --upstream; callers get 502 until then"
                    )
                    break
                if self._closing.wait(min(left_s, _LOOK_INTERVAL_S)):
                    return
            else:
                return
