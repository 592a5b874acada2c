"""Asks servers that can abort, in the background and only on rank 0, to end what is in flight for a pending round.

Nothing depends on the answer: the round waits until every rank is drained, and an abort that is late or lost only
makes it wait as if nobody had asked. Owned by the learner, used with ``sync.on_pending: abort`` and ``resume``.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from swift_stage2 import wire
from swift_stage2.errors import ServerFault
from swift_stage2.runtime.background import BackgroundFailures
from swift_stage2.servers.session import Deadline, ServerSession

logger = logging.getLogger(__name__)

_DEADLINE_S = 5.0


@dataclass(eq=False, kw_only=True)
class PendingAbort:
    """One ask at a time; on other ranks than 0, or when not ``enabled``, it does nothing."""

    enabled: bool
    rank: int
    api_key: str | None = field(repr=False)
    run_id: str
    ours: Container[str] = ()  # servers that must not answer as stock ones do
    failures: BackgroundFailures = field(default_factory=BackgroundFailures)  # takes what goes wrong here

    def __post_init__(self) -> None:
        self._active = self.enabled and self.rank == 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pending-abort")
        self._asking: Future[None] | None = None
        self._cannot_abort: set[str] = set()  # of the thread alone

    def ask(self, base_urls: Sequence[str], version: int) -> None:
        """Asks these servers to end what they compute under ``version``; does not wait.

        Called at every step while a round is pending: a POST that was on its way at the first ask is met by the next.
        """
        if not self._active or (self._asking is not None and not self._asking.done()):
            return
        self._asking = self._thread.submit(self._run, tuple(base_urls), version)

    def stop(self) -> None:
        """Asks nothing more. Does not wait: a call in progress ends by its own deadline."""
        self._active = False
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, base_urls: Sequence[str], version: int) -> None:
        try:
            self._ask_all(base_urls, version)
        except Exception as error:  # top of the thread: nobody looks at its future
            self.failures.note("pending-abort", error)

    def _ask_all(self, base_urls: Sequence[str], version: int) -> None:
        body = wire.AbortRequest(self.run_id, version).to_json()
        for base_url in base_urls:
            if not self._active:
                return
            if base_url in self._cannot_abort:
                continue
            deadline = Deadline(_DEADLINE_S)
            try:
                with ServerSession(base_url, self.api_key, must_be_ours=base_url in self.ours) as session:
                    if not session.info(deadline).can_abort:
                        self._cannot_abort.add(base_url)
                        logger.info("%s cannot abort; a pending round waits for its rollouts", base_url)
                        continue
                    session.post(wire.ABORT, body, deadline)
            except ServerFault as fault:
                logger.warning("rollouts could not be aborted for a pending round: %s", fault)
