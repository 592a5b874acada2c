"""Holds packs between the pipeline that makes them and the step that trains them.

Bounded, versioned, oldest first. A reservation takes packs out of reach of expiry, overflow and version
changes until it is taken or released, so all ranks can first agree and then train. Nothing here waits:
the pipeline paces itself and the learner never blocks. Every drop is reported once, outside the lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from itertools import islice

from swift_stage2.errors import QueueClosed, ReservationSpent
from swift_stage2.records import Pack
from swift_stage2.scheduling.version_clock import is_fresh


class DropReason(StrEnum):
    """Why a pack left the queue untrained."""

    STALE = "dropped_stale"
    """Its version fell out of the window."""
    OLDEST = "dropped_oldest"
    """The queue was over its limit and this was the oldest pack."""


_Drops = list[tuple[Pack, DropReason]]


class ReadyQueue:
    """A bounded queue of packs, consumed by atomic reservations. Safe for any number of threads."""

    def __init__(
        self, limit: int, version_window: int, on_drop: Callable[[Pack, DropReason], None] | None = None
    ) -> None:
        """``limit`` is the most packs it holds, without reserved ones.

        ``on_drop`` is called for every pack dropped, on the thread whose call dropped it and outside the lock.

        Raises:
            ValueError: ``limit`` < 1 or ``version_window`` < 0.
        """
        if limit < 1:
            raise ValueError(f"queue_limit is at least 1, got limit={limit}; 8 is the default")
        if version_window < 0:
            raise ValueError(
                f"version_window is at least 0, got version_window={version_window}; 2 is the default"
            )
        self._limit = limit
        self._version_window = version_window
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._ready: deque[Pack] = deque()
        self._num_reserved = 0
        self._closed = False

    @property
    def version_window(self) -> int:
        """A step trains no pack that is more versions old than this."""
        return self._version_window

    def offer(self, pack: Pack, *, current_version: int) -> None:
        """Add ``pack`` as the youngest. Stale packs go first (this one too), then the oldest over the limit.

        Raises:
            QueueClosed: after `close`.
        """
        with self._lock:
            self._require_open()
            self._ready.append(pack)
            drops = self._purge_stale(current_version) + self._trim_to_limit()
        self._report(drops)

    def reserve(self, n: int, *, current_version: int, min_tokens: int = 0) -> Reservation | None:
        """Purge all stale packs, then take the ``n`` oldest, or nothing.

        Returns None, and takes nothing, when fewer than ``n`` fresh packs are ready, or when those ``n``
        together hold fewer than ``min_tokens`` supervised tokens.

        Raises:
            QueueClosed: after `close`.
            ValueError: ``n`` is negative.
        """
        if n < 0:
            raise ValueError(
                f"a reservation takes at least 0 packs, got n={n}; pass the step's number of batches"
            )
        with self._lock:
            self._require_open()
            drops = self._purge_stale(current_version)
            reservation = self._take_oldest(n, min_tokens)
        self._report(drops)
        return reservation

    def peek_versions(self) -> tuple[int, ...]:
        """Return the versions of the ready packs, oldest first, stale ones that nobody purged yet included."""
        with self._lock:
            return tuple(pack.version for pack in self._ready)

    def num_fresh(self, current_version: int) -> int:
        """Return how many ready packs a reservation at ``current_version`` would find."""
        return sum(
            is_fresh(version, current=current_version, window=self._version_window)
            for version in self.peek_versions()
        )

    def has_room(self, oldest: int) -> bool:
        """Return whether fewer packs than the limit are of version ``oldest`` or younger.

        Reserved packs count: they may be released. Then one more pushes out none of these, unless one of them was
        offered before an older one, which late rollouts may bring.
        """
        with self._lock:
            num_kept = sum(pack.version >= oldest for pack in self._ready) + self._num_reserved
            return num_kept < self._limit

    @property
    def depth(self) -> int:
        with self._lock:
            return len(self._ready)

    def close(self) -> None:
        """Refuse offers and reservations from now on; idempotent. Open reservations stay valid."""
        with self._lock:
            self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise QueueClosed(
                "the ready queue takes and gives nothing after close(); stop its pipeline first"
            )

    def _take_oldest(self, n: int, min_tokens: int) -> Reservation | None:
        if len(self._ready) < n:
            return None
        oldest = list(islice(self._ready, n))
        if min_tokens > 0 and sum(pack.num_supervised_tokens for pack in oldest) < min_tokens:
            return None
        for _ in oldest:
            self._ready.popleft()
        self._num_reserved += n
        return Reservation(self, oldest)

    def _let_go(self, num_packs: int) -> None:
        with self._lock:
            self._num_reserved -= num_packs

    def _put_back(self, packs: list[Pack]) -> None:
        with self._lock:
            self._num_reserved -= len(packs)
            self._ready.extendleft(reversed(packs))
            drops = self._trim_to_limit()
        self._report(drops)

    def _purge_stale(self, current_version: int) -> _Drops:
        ready, self._ready = self._ready, deque()
        drops: _Drops = []
        for pack in ready:
            if is_fresh(pack.version, current=current_version, window=self._version_window):
                self._ready.append(pack)
            else:
                drops.append((pack, DropReason.STALE))
        return drops

    def _trim_to_limit(self) -> _Drops:
        drops: _Drops = []
        while len(self._ready) > self._limit:
            drops.append((self._ready.popleft(), DropReason.OLDEST))
        return drops

    def _report(self, drops: _Drops) -> None:
        if self._on_drop is not None:
            for pack, reason in drops:
                self._on_drop(pack, reason)


class Reservation:
    """Packs set aside for one step: `take` them, or `release` them. One owner, the learner's main thread."""

    def __init__(self, queue: ReadyQueue, packs: list[Pack]) -> None:
        self._queue = queue
        self._packs = packs
        self._spent_by = ""

    def take(self) -> list[Pack]:
        """Return the packs, oldest first; they are the caller's from now on.

        Raises:
            ReservationSpent: it was taken or released before.
        """
        packs = self._spend("take()")
        self._queue._let_go(len(packs))
        return packs

    def release(self) -> None:
        """Put the packs back in front in their old order; over the limit, the front drops. Twice is once.

        Raises:
            ReservationSpent: it was taken before.
        """
        if self._spent_by != "release()":
            self._queue._put_back(self._spend("release()"))

    def _spend(self, call: str) -> list[Pack]:
        if self._spent_by:
            raise ReservationSpent(
                f"a reservation is taken or released once, got {call} after {self._spent_by}; reserve again for the "
                "next step"
            )
        self._spent_by = call
        packs, self._packs = self._packs, []
        return packs
