"""Holds packs between the pipeline that makes them and the step that trains them.

Bounded, versioned, oldest first. A reservation takes packs out of reach of expiry, overflow and version
changes until it is taken or released, so all ranks can first agree and then train. Nothing here waits:
the pipeline paces itself and the learner never blocks. Every drop is reported once, outside the lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Generic, Protocol, TypeVar, cast

from swift_stage2.errors import QueueClosed, ReservationSpent
from swift_stage2.scheduling.version_clock import is_fresh


class Versioned(Protocol):
    """All that the queue asks of a pack."""

    @property
    def version(self) -> int:
        """The version of the pack's oldest segment."""


class Weighed(Versioned, Protocol):
    """All that ``reserve(min_tokens=…)`` asks of a pack."""

    @property
    def num_supervised_tokens(self) -> int:
        """How many tokens of the pack carry a loss."""


class DropReason(StrEnum):
    """Why a pack left the queue untrained."""

    STALE = "dropped_stale"
    """Its version fell out of the window."""
    OLDEST = "dropped_oldest"
    """The queue was over its limit and this was the oldest pack."""


PackT = TypeVar("PackT", bound=Versioned)
Drops = list[tuple[PackT, DropReason]]
OnDrop = Callable[[PackT, DropReason], None]


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Counts since the queue was made, read under one lock."""

    depth: int
    peak_depth: int
    dropped_stale: int
    dropped_oldest: int


class ReadyQueue(Generic[PackT]):
    """A bounded queue of packs, consumed by atomic reservations. Safe for any number of threads."""

    def __init__(self, limit: int, version_window: int, on_drop: OnDrop[PackT] | None = None) -> None:
        """Make an empty queue.

        Args:
            limit: the most packs it holds; reserved packs do not count.
            version_window: a pack is fresh iff its version >= current version - this.
            on_drop: called with (pack, reason) for every pack dropped, on the thread whose call
                dropped it and outside the lock.

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
        self._ready: deque[PackT] = deque()
        self._num_reserved = 0
        self._closed = False
        self._peak_depth = 0
        self._num_dropped = dict.fromkeys(DropReason, 0)

    @property
    def version_window(self) -> int:
        """A step trains no pack that is more versions old than this."""
        return self._version_window

    def offer(self, pack: PackT, *, current_version: int) -> None:
        """Add ``pack`` as the youngest. Stale packs go first (this one too), then the oldest over the limit.

        Raises:
            QueueClosed: after `close`.
        """
        with self._lock:
            self._require_open()
            self._ready.append(pack)
            drops = self._purge_stale(current_version) + self._trim_to_limit()
        self._report(drops)

    def reserve(self, n: int, *, current_version: int, min_tokens: int = 0) -> Reservation[PackT] | None:
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

    def statistics(self) -> QueueStatistics:
        """Return depth, peak depth and drops, consistent with each other."""
        with self._lock:
            return QueueStatistics(
                depth=len(self._ready),
                peak_depth=self._peak_depth,
                dropped_stale=self._num_dropped[DropReason.STALE],
                dropped_oldest=self._num_dropped[DropReason.OLDEST],
            )

    def close(self) -> None:
        """Refuse offers and reservations from now on; idempotent. Open reservations stay valid."""
        with self._lock:
            self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise QueueClosed(
                "the ready queue takes and gives nothing after close(); stop its pipeline first"
            )

    def _take_oldest(self, n: int, min_tokens: int) -> Reservation[PackT] | None:
        if len(self._ready) < n:
            return None
        oldest = list(islice(self._ready, n))
        if min_tokens > 0 and sum(cast(Weighed, pack).num_supervised_tokens for pack in oldest) < min_tokens:
            return None
        for _ in oldest:
            self._ready.popleft()
        self._num_reserved += n
        return Reservation(self, oldest)

    def _let_go(self, num_packs: int) -> None:
        with self._lock:
            self._num_reserved -= num_packs

    def _put_back(self, packs: list[PackT]) -> None:
        with self._lock:
            self._num_reserved -= len(packs)
            self._ready.extendleft(reversed(packs))
            drops = self._trim_to_limit()
        self._report(drops)

    def _purge_stale(self, current_version: int) -> Drops[PackT]:
        ready, self._ready = self._ready, deque()
        drops: Drops[PackT] = []
        for pack in ready:
            if is_fresh(pack.version, current=current_version, window=self._version_window):
                self._ready.append(pack)
            else:
                drops.append((pack, DropReason.STALE))
        self._num_dropped[DropReason.STALE] += len(drops)
        return drops

    def _trim_to_limit(self) -> Drops[PackT]:
        drops: Drops[PackT] = []
        while len(self._ready) > self._limit:
            drops.append((self._ready.popleft(), DropReason.OLDEST))
        self._num_dropped[DropReason.OLDEST] += len(drops)
        self._peak_depth = max(self._peak_depth, len(self._ready))
        return drops

    def _report(self, drops: Drops[PackT]) -> None:
        if self._on_drop is not None:
            for pack, reason in drops:
                self._on_drop(pack, reason)


class Reservation(Generic[PackT]):
    """Packs set aside for one step: `take` them, or `release` them. One owner, the learner's main thread."""

    def __init__(self, queue: ReadyQueue[PackT], packs: list[PackT]) -> None:
        self._queue = queue
        self._packs = packs
        self._spent_by = ""

    def take(self) -> list[PackT]:
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

    def _spend(self, call: str) -> list[PackT]:
        if self._spent_by:
            raise ReservationSpent(
                f"a reservation is taken or released once, got {call} after {self._spent_by}; reserve again for the "
                "next step"
            )
        self._spent_by = call
        packs, self._packs = self._packs, []
        return packs
