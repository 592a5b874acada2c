"""Hands what one producer makes, in order, to several consumers: the buckets of a sync round to its pushes.

A consumer holds at most one item that it has not taken, so the producer waits for the slowest, but not for
ever: who keeps consumers waiting that have nothing left to do for longer than the patience is left behind.
Every wait ends at the deadline. The producer is the round's main thread, each consumer one push thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from swift_stage2.errors import ServerFault, WeightSyncError
from swift_stage2.servers.session import Deadline

ItemT = TypeVar("ItemT")


class BucketHandover(Generic[ItemT]):
    """One producer calls ``offer`` and at last ``finish`` or ``fail``; each consumer calls ``take`` until None.

    ``patience_s`` is for a whole round and counts only while another consumer waits for its next item.
    """

    def __init__(
        self,
        consumers: Iterable[int],
        deadline: Deadline,
        *,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline = deadline
        self._patience_s = patience_s
        self._clock = clock
        self._changed = threading.Condition()
        self._live = set(consumers)
        self._held: dict[int, ItemT] = {}  # handed over, not yet taken
        self._idle: set[int] = set()  # in ``take``, with nothing to take
        self._held_up_s = dict.fromkeys(self._live, 0.0)  # for how long each has kept others waiting
        self._left_behind: dict[int, str] = {}
        self._finished = False
        self._failure: str | None = None

    def offer(self, item: ItemT) -> bool:
        """Hands ``item`` to every consumer that is still there, each as soon as it has room.

        Returns when all of them hold it; False when no consumer is left, so that nothing more need be made.
        """
        with self._changed:
            waiting = set(self._live)
            while True:
                waiting &= self._live
                for consumer in sorted(waiting - self._held.keys()):
                    self._held[consumer] = item
                    waiting.discard(consumer)
                    self._changed.notify_all()
                if not waiting:
                    return bool(self._live)
                self._wait_for(waiting)

    def finish(self) -> None:
        """Nothing more comes; consumers still take what they hold."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """The producer cannot go on; every consumer's next ``take`` raises."""
        with self._changed:
            self._failure = reason
            self._held.clear()
            self._changed.notify_all()

    def take(self, consumer: int) -> ItemT | None:
        """The next item, or None after the last.

        Raises:
            WeightSyncError: the producer failed.
            ServerFault: this consumer was left behind, or nothing came by the deadline.
        """
        with self._changed:
            self._idle.add(consumer)
            self._changed.notify_all()
            try:
                while self._has_nothing_for(consumer):
                    if self._deadline.expired:
                        raise ServerFault(
                            "the deadline of the round's calls passed before the last bucket came"
                        )
                    self._changed.wait(self._deadline.remaining_s())
            finally:
                self._idle.discard(consumer)
            if self._failure is not None:
                raise WeightSyncError(self._failure)
            if consumer not in self._live:
                raise ServerFault(self._left_behind.get(consumer, "this push has ended"))
            item = self._held.pop(consumer, None)
            self._changed.notify_all()
            return item

    def leave(self, consumer: int) -> None:
        """This consumer takes nothing more, for whatever reason; the producer no longer waits for it."""
        with self._changed:
            self._remove(consumer)

    def _has_nothing_for(self, consumer: int) -> bool:
        ended = self._finished or self._failure is not None or consumer not in self._live
        return not ended and consumer not in self._held

    def _wait_for(self, late: set[int]) -> None:
        """One wait for the consumers that have no room; removes those whose time is up."""
        others_wait = bool((self._idle - self._held.keys()) & self._live)
        limit_s = self._deadline.remaining_s()
        if others_wait:
            limit_s = min(limit_s, *(self._patience_s - self._held_up_s[consumer] for consumer in late))
        started = self._clock()
        self._changed.wait(max(0.0, limit_s))
        waited_s = self._clock() - started
        for consumer in sorted(late & self._live):
            if others_wait:
                self._held_up_s[consumer] += waited_s
            if self._deadline.expired:
                self._remove(consumer, "it had not taken every bucket by the deadline of the round's calls")
            elif others_wait and self._held_up_s[consumer] >= self._patience_s:
                self._remove(
                    consumer,
                    f"it kept faster servers waiting for {self._patience_s:.1f} s and was left behind",
                )

    def _remove(self, consumer: int, reason: str | None = None) -> None:
        self._live.discard(consumer)
        self._held.pop(consumer, None)
        if reason is not None:
            self._left_behind[consumer] = reason
        self._changed.notify_all()
