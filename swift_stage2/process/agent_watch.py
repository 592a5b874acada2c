"""Ends a rank whose torchrun has gone: killed, it cannot end its ranks, and they would train on, seen by nobody.

The rank gets the SIGTERM that torchrun would have sent, saves at the next step boundary, and is killed after its grace.
A process that torchrun did not start is left alone: its parent may be a shell that it is meant to outlive.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

from swift_stage2.errors import UserError

logger = logging.getLogger(__name__)

_STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
_JOIN_TIMEOUT_S = 10.0
_LONGEST_WAIT_S = 3600.0


class AgentWatch:
    """A thread that waits for the end of this process's parent, for as long as it is entered: as early as may be."""

    def __init__(self, environment: Mapping[str, str], grace_s: float = 0.0) -> None:
        """``grace_s``: seconds from SIGTERM to SIGKILL. Set later, once there is something to save."""
        self.grace_s = grace_s
        self._thread: threading.Thread | None = None
        if _STARTED_BY_TORCHRUN in environment:
            self._thread = threading.Thread(target=self._watch, name="agent-watch", daemon=True)

    def __enter__(self) -> AgentWatch:
        """Raises UserError: the parent has gone while it was looked for."""
        if self._thread is not None:
            self._agent = _open_parent()
            self._ended = os.eventfd(0)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            os.eventfd_write(self._ended, 1)
            self._thread.join(timeout=_JOIN_TIMEOUT_S)
            os.close(self._agent)
            os.close(self._ended)

    def _watch(self) -> None:
        while not (ready := select.select([self._ended, self._agent], [], [], _LONGEST_WAIT_S)[0]):
            continue
        if self._ended in ready:
            return
        logger.error("torchrun has gone; this rank saves and ends within %g s", self.grace_s)
        os.kill(os.getpid(), signal.SIGTERM)
        if not select.select([self._ended], [], [], self.grace_s)[0]:
            os.kill(os.getpid(), signal.SIGKILL)


def _open_parent() -> int:
    parent = os.getppid()
    with suppress(ProcessLookupError):
        agent = os.pidfd_open(parent)
        if os.getppid() == parent:  # else the number may be another process's by now
            return agent
        os.close(agent)
    raise UserError(f"a rank ends with its torchrun, which has gone (process {parent}); start the run again")
