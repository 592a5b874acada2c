"""One HTTP call that another thread can end: httpx limits each read, this limits the whole call.

Learns the call's socket from httpx's ``trace`` extension and shuts it down when the call is cut, whatever the
reading thread waits for. Used by the rollout client and by the control calls.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

CauseT = TypeVar("CauseT")


class CuttableCall(Generic[CauseT]):
    """A call in progress. The first cause it is cut for is kept; a finished call is left alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cause: CauseT | None = None
        self._finished = False

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """For httpx's ``extensions={"trace": ...}``."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
                self._shut_if_cut()

    def cut(self, cause: CauseT) -> None:
        """Ends the call; may come from any thread."""
        with self._lock:
            if not self._finished and self._cause is None:
                self._cause = cause
                self._shut_if_cut()

    def finish(self) -> CauseT | None:
        """Marks the call as over and says what it was cut for, if it was."""
        with self._lock:
            self._finished = True
            return self._cause

    def _shut_if_cut(self) -> None:
        if self._cause is not None and self._socket is not None:
            with suppress(OSError):  # the peer may have closed it already
                self._socket.shutdown(socket.SHUT_RDWR)
