"""Runs real code on strands (greenlets), one at a time; at every yield point a chooser says which strand goes on.

Time is virtual: it passes only when nobody can run, or when the chooser stalls everybody who can. The choices alone
decide what happens, so a chooser made from a seed is a schedule. A state in which nobody can run and no time limit is
pending is a deadlock; it is reported with the stack of every strand.
"""

from __future__ import annotations

import heapq
import math
import random
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

_SHOWN_FRAMES = 6
_LONGEST_STALL_S = 1.0
_MOST_STALLS = 3
_MOST_POINTS = 100_000
_SHORTEST_WAIT_S = 1e-6  # as on a real clock: in every wait some time passes


class Violation(AssertionError):
    """A run broke an invariant."""


class Chooser(Protocol):
    """Picks who goes on. Strands are in the order in which they became able to run."""

    notices_wakes: bool
    """Whether it must be asked as soon as another strand can run."""

    def choose(self, ready: Sequence[Strand], current: Strand | None) -> Strand: ...

    def stay(self) -> int:
        """How many of the next yield points need no choice, because whoever runs goes on."""

    def stalls(self) -> bool: ...


class Strand:
    """A virtual thread."""

    __slots__ = (
        "ended", "greenlet", "joiners", "name", "on_resume", "owner", "priority", "ready", "serial", "turn", "what",
        "woken",
    )  # fmt: skip

    def __init__(self, owner: str, name: str, serial: int) -> None:
        self.owner = owner
        self.name = f"{owner} {name}".strip()
        self.serial = serial
        self.ready = True
        self.ended = False
        self.woken = False
        self.turn = 0  # tells a time limit that is still meant from one of an earlier wait
        self.what = "start"
        self.priority = 0.0
        self.joiners: list[Strand] = []
        self.greenlet: Any = None
        self.on_resume: Callable[[], object] | None = None


class Alarm:
    """Something to call, on a strand of its own, at a moment."""

    __slots__ = ("cancelled", "name", "owner", "work")

    def __init__(self, owner: str, work: Callable[[], None], name: str) -> None:
        self.owner = owner
        self.work = work
        self.name = name
        self.cancelled = False


class Scheduler:
    """One run. ``run`` starts the first strand and returns when all have ended, or raises ``Violation``."""

    def __init__(self, chooser: Chooser, *, horizon_s: float, traced: bool = False) -> None:
        self.now = 0.0
        self.current: Strand | None = None
        self.strands: list[Strand] = []
        self.trace: list[tuple[float, str, str]] | None = [] if traced else None
        self.num_points = 0
        self._chooser = chooser
        self._horizon_s = horizon_s
        self._ready: list[Strand] = []
        self._due: list[tuple[float, int, Strand | Alarm, int]] = []
        self._serial = 0
        self._num_live = 0
        self._stay = 0
        self._failure: str | None = None
        self._over = False
        self._hub: Any = None

    def run(self, work: Callable[[], None], name: str = "main") -> None:
        self._hub = getcurrent()
        self.spawn(work, name)
        while not self._over:
            strand = self._next(None)
            if strand is None:
                break
            self.current = strand
            strand.greenlet.switch()  # comes back when a strand has ended, or the run is over
        self._over = True
        stacks = self.stacks() if self._failure else ""
        self._abandon()
        if self._failure is not None:
            raise Violation(f"{self._failure}\n{stacks}")

    def spawn(self, work: Callable[[], None], name: str, owner: str | None = None) -> Strand:
        """A new strand that can run from now on, of the owner of the strand that starts it."""
        if owner is None:
            owner = self.current.owner if self.current is not None else ""
        strand = Strand(owner, name, len(self.strands))
        strand.greenlet = greenlet(lambda: self._live(strand, work), self._hub)
        self.strands.append(strand)
        self._num_live += 1
        self._make_ready(strand)
        return strand

    def at(self, moment: float, work: Callable[[], None], name: str) -> Alarm:
        """Calls ``work`` on a new strand at ``moment``, unless the alarm is cancelled first."""
        alarm = Alarm(self.current.owner if self.current is not None else "", work, name)
        self._serial += 1
        heapq.heappush(self._due, (moment, self._serial, alarm, 0))
        return alarm

    def point(self, what: str) -> None:
        """A yield point: any strand that can run may be the next."""
        if self._over:
            return
        current = self.current
        current.what = what  # type: ignore[union-attr]
        self.num_points += 1
        if self.num_points > _MOST_POINTS:
            self.fail(f"somebody spins: {_MOST_POINTS} yield points have not brought the run to its end")
        if self._stay and self.trace is None:
            self._stay -= 1
            return
        self._go_on(self._next(current))

    def block(self, what: str, until: float | None = None) -> bool:
        """The current strand cannot run before ``wake``, or the moment ``until``; False if that came first."""
        if self._over:
            raise GreenletExit
        current = self.current
        assert current is not None
        current.what = what
        current.ready = False
        current.woken = False
        current.turn += 1
        self._ready.remove(current)
        if until is not None:
            until = max(until, self.now + _SHORTEST_WAIT_S)
            self._serial += 1
            heapq.heappush(self._due, (until, self._serial, current, current.turn))
        self._go_on(self._next(current))
        return current.woken

    def wake(self, strand: Strand) -> None:
        """``strand`` can run again, if it was blocked."""
        if not strand.ready and not strand.ended:
            strand.woken = True
            self._make_ready(strand)

    def fail(self, message: str) -> None:
        """Ends the run; for the strand that found the violation this call does not return."""
        if self._failure is None:
            self._failure = (
                f"{message} (at {self.now:.3f} s, on {self.current.name if self.current else '-'})"
            )
        if not self._over and getcurrent() is not self._hub:
            self._over = True
            self._hub.switch()

    def stop(self) -> None:
        """Ends the run as the end of a process would: whoever still runs or waits is cut off."""
        self._over = True
        self._hub.switch()

    def stacks(self) -> str:
        """Where every strand stands that has not ended."""
        lines = []
        for strand in self.strands:
            if strand.ended:
                continue
            lines.append(
                f"--- {strand.name}: {'could run' if strand.ready else 'waits'}, last at {strand.what}"
            )
            frame = strand.greenlet.gr_frame
            if frame is not None:
                inner = [
                    entry
                    for entry in traceback.extract_stack(frame)
                    if "/interleaving/" not in entry.filename
                ]
                lines += [f"    {e.filename}:{e.lineno} {e.name}" for e in inner[-_SHOWN_FRAMES:]]
        return "\n".join(lines)

    def _live(self, strand: Strand, work: Callable[[], None]) -> None:
        try:
            work()
        except GreenletExit:
            return
        except BaseException as error:
            if self._over:
                return
            text = "".join(traceback.format_exception(error)[-_SHOWN_FRAMES:])
            self.fail(f"{strand.name} raised {type(error).__name__}: {error}\n{text}")
        if self._over:
            return
        strand.ended = True
        self._num_live -= 1
        self._ready.remove(strand)
        for joiner in strand.joiners:
            self.wake(joiner)

    def _make_ready(self, strand: Strand) -> None:
        strand.ready = True
        self._ready.append(strand)
        if self._chooser.notices_wakes:
            self._stay = 0

    def _next(self, current: Strand | None) -> Strand | None:
        """Who goes on; None when all have ended or the run has failed."""
        ready = self._ready
        if not self._stay and ready and self._due and self._chooser.stalls():
            self._let_time_pass(self.now + _LONGEST_STALL_S)
        while not ready:
            if not self._num_live:
                return None
            if not self._due:
                self._failure = f"deadlock: nobody can run (at {self.now:.3f} s)"
                return None
            self._let_time_pass()
            if self.now > self._horizon_s:
                self._failure = f"somebody waits for ever: not over at {self._horizon_s:.0f} s"
                return None
        if self._stay and current is not None and current.ready:  # traced, so that no point is skipped
            self._stay -= 1
            chosen = current
        elif len(ready) == 1:
            chosen = ready[0]
        else:
            chosen = self._chooser.choose(ready, current if current is not None and current.ready else None)
            self._stay = self._chooser.stay()
        if self.trace is not None:
            self.trace.append((self.now, chosen.name, chosen.what))
        return chosen

    def _let_time_pass(self, latest: float = math.inf) -> None:
        """To the next moment, up to ``latest``, at which something is due; all that is due then can run."""
        due = self._due
        moment = None
        while due and due[0][0] <= (latest if moment is None else moment):
            when, _, item, turn = heapq.heappop(due)
            if isinstance(item, Alarm):
                if item.cancelled:
                    continue
                self.spawn(item.work, item.name, item.owner)
            elif item.ready or item.ended or item.turn != turn:
                continue
            else:
                self._make_ready(item)
            moment = when
            self.now = max(self.now, when)

    def _go_on(self, strand: Strand | None) -> None:
        if strand is None:
            self._over = True
            self._hub.switch()
        elif strand is not self.current:
            self.current = strand
            strand.greenlet.switch()
            if self.current is not None and self.current.on_resume is not None:
                self.current.on_resume()

    def _abandon(self) -> None:
        """Ends the strands of a run that failed, so that nothing of it lives on."""
        for strand in self.strands:
            if strand.greenlet:
                with suppress(BaseException):  # what its clean-up runs into says nothing any more
                    strand.greenlet.throw(GreenletExit)


class Stalls:
    """Whether everybody who could run is held up until something falls due; a few times in a run."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._random = rng.random
        self._share = share
        self._num_left = _MOST_STALLS if share else 0

    def next(self) -> bool:
        if self._num_left == 0 or self._random() >= self._share:
            return False
        self._num_left -= 1
        return True


class RandomChooser:
    """Anybody, but with probability ``stay`` whoever runs goes on: few or many switches."""

    notices_wakes = False

    def __init__(self, rng: random.Random, stay: float, stall: float = 0.0) -> None:
        self._random = rng.random
        self._log_stay = math.log(stay)
        self.stalls = Stalls(rng, stall).next

    def choose(self, ready: Sequence[Strand], current: Strand | None) -> Strand:
        return ready[int(self._random() * len(ready))]

    def stay(self) -> int:
        return int(math.log(1.0 - self._random()) / self._log_stay)


class PriorityChooser:
    """The strand of the highest priority; priorities are random and fall at random moments.

    After Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010.
    """

    notices_wakes = True

    def __init__(self, rng: random.Random, change: float, stall: float = 0.0) -> None:
        self._random = rng.random
        self._log_keep = math.log(1.0 - change)
        self._until_change = self._draw()
        self.stalls = Stalls(rng, stall).next

    def choose(self, ready: Sequence[Strand], current: Strand | None) -> Strand:
        for strand in ready:
            if strand.priority == 0.0:
                strand.priority = 1.0 + self._random()
        self._until_change -= 1
        if self._until_change <= 0:
            self._until_change = self._draw()
            if current is not None:
                current.priority = self._random()
        return max(ready, key=_priority_of)

    def stay(self) -> int:
        return self._until_change

    def _draw(self) -> int:
        return int(math.log(1.0 - self._random()) / self._log_keep)


def _priority_of(strand: Strand) -> float:
    return strand.priority


def seeded_chooser(rng: random.Random, *, stall: float = 0.0) -> Chooser:
    """One of several kinds of chooser: each finds bugs that the others seldom meet."""
    kind = rng.randrange(4)
    if kind == 3:
        return PriorityChooser(rng, rng.choice((0.01, 0.05, 0.2)), stall)
    return RandomChooser(rng, (0.1, 0.7, 0.95)[kind], stall)
