"""Holds packs between the pipeline that makes them and the step that trains them.

Bounded, versioned, oldest first. A reservation takes packs out of reach of expiry, overflow and version
changes until it is taken or released, so all ranks can first agree and then train. Nothing here waits:
the pipeline paces itself and the learner never blocks. Every drop is reported once, outside the lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


class ReadyQueue:
    """A bounded queue of packs, consumed by atomic reservations. Safe for any number of threads."""

    def __init__(
        self, limit: int, version_window: int, on_drop: Callable[[Pack, DropReason], None] | None = None
    ) -> None:
        """``limit`` is the most packs it holds, without reserved ones.

        ``on_drop`` is called for every pack dropped, on the thread whose call dropped it and outside the lock.
        """
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
        with self._changing() as drops:
            self._require_open()
            self._ready.append(pack)
            self._purge_stale(current_version, drops)

    def reserve(self, n: int, *, current_version: int, min_tokens: int = 0) -> Reservation | None:
        """Purge all stale packs, then take the ``n`` oldest, or nothing.

        Returns None, and takes nothing, when fewer than ``n`` fresh packs are ready, or when those ``n``
        together hold fewer than ``min_tokens`` supervised tokens.

        Raises:
            QueueClosed: after `close`.
        """
        with self._changing() as drops:
            self._require_open()
            self._purge_stale(current_version, drops)
            oldest = list(islice(self._ready, n))
            has_tokens = not min_tokens or sum(pack.num_supervised_tokens for pack in oldest) >= min_tokens
            if len(oldest) < n or not has_tokens:
                return None
            for _ in oldest:
                self._ready.popleft()
            self._num_reserved += n
            return Reservation(self, oldest)

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
        return len(self.peek_versions())

    def close(self) -> None:
        """Refuse offers and reservations from now on; idempotent. Open reservations stay valid."""
        with self._lock:
            self._closed = True

    def end_reservation(self, num_packs: int, put_back: Sequence[Pack] = ()) -> None:
        """Called by ``Reservation`` alone."""
        with self._changing():
            self._num_reserved -= num_packs
            self._ready.extendleft(reversed(put_back))

    @contextmanager
    def _changing(self) -> Iterator[list[tuple[Pack, DropReason]]]:
        """Holds the lock and trims to the limit behind the change; then tells of every drop, also of those given."""
        drops: list[tuple[Pack, DropReason]] = []
        with self._lock:
            yield drops
            while len(self._ready) > self._limit:
                drops.append((self._ready.popleft(), DropReason.OLDEST))
        if self._on_drop is not None:
            for pack, reason in drops:
                self._on_drop(pack, reason)

    def _require_open(self) -> None:
        if self._closed:
            raise QueueClosed(
                "the ready queue takes and gives nothing after close(); stop its pipeline first"
            )

    def _purge_stale(self, current_version: int, drops: list[tuple[Pack, DropReason]]) -> None:
        ready, self._ready = self._ready, deque()
        for pack in ready:
            if is_fresh(pack.version, current=current_version, window=self._version_window):
                self._ready.append(pack)
            else:
                drops.append((pack, DropReason.STALE))


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
        self._queue.end_reservation(len(packs))
        return packs

    def release(self) -> None:
        """Put the packs back in front in their old order; over the limit, the front drops. Twice is once.

        Raises:
            ReservationSpent: it was taken before.
        """
        if self._spent_by != "release()":
            packs = self._spend("release()")
            self._queue.end_reservation(len(packs), put_back=packs)

    def _spend(self, call: str) -> list[Pack]:
        if self._spent_by:
            raise ReservationSpent(
                f"a reservation is taken or released once, got {call} after {self._spent_by}; reserve again for the "
                "next step"
            )
        self._spent_by = call
        packs, self._packs = self._packs, []
        return packs
