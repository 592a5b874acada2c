"""Decides by numbers alone: which server gets the next share, which requests the next POST asks, under which seed.

Placement: a share goes where it would end first, by what a server has in hand and by its pace. Servers that are about
as fast as the best count alike and take turns, because ranks that all ran after the fastest would meet there.

Plan: a request is quarantined only if it failed alone and another one succeeded on the same server afterwards;
otherwise the server is at fault and nothing is condemned. Every request ends answered, quarantined or unresolved. Our
server names the requests that failed; its word only chooses the next POSTs: who is named is asked once more, alone, and
the rest together, so that a wrong name costs a POST and condemns nobody.

Seeds: engines give a POST's i-th request ``seed + i``. Each rank owns one interval of the 31-bit seeds, whole POSTs
included, so that two ranks can never sample with a common seed. Where a merger joins POSTs, the joint one takes its
first part's seed and has room for 4096 requests behind it: the others' own go unused, and no two requests get one.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.records import SampleKey

_NEWEST = 0.3  # weight of the latest share in the pace
_FORGET_AFTER = 32  # shares: a server that was left out for so long is tried again
_ABOUT_AS_FAST = 1.5
# A larger batch makes an engine look faster, which in full proportion would feed itself; 5 % off at twice the pace.
_CAUTION = 0.9

_LARGEST_SEED = 2**31 - 1
_TURNS_PER_POSITION = 16
_GOLDEN = (math.sqrt(5) - 1) / 2


class PostEnd(StrEnum):
    ANSWERED = "answered"
    ERROR_ANSWER = "error_answer"  # an answer, but no usable one: perhaps the request's fault
    BUSY = "busy"  # the server has no room at the moment: nobody's fault, and nothing was begun
    UNREACHABLE = "unreachable"  # no connection, so nothing was sent
    TIMED_OUT = "timed_out"  # abandoned: the server may still be computing it
    LOST = "lost"  # the connection broke after something was sent
    REFUSED = "refused"  # the server answers nobody like us: key, open round, unproven weights
    DISTRUSTED = "distrusted"  # an answer of other weights or of another server process
    STOPPED = "stopped"  # this process is shutting down


@dataclass(frozen=True, slots=True)
class Piece:
    """Request numbers that go into one POST; none of them for the probe, which tests the server itself."""

    indices: tuple[int, ...]
    is_retry: bool = False

    @property
    def is_probe(self) -> bool:
        """Whether this asks a request that is known to be good."""
        return not self.indices


class RequestPlan:
    """One share on one server: retry once, then bisect; probe the server before a request is condemned.

    Requests that the server names are asked apart instead.
    """

    def __init__(self, num_requests: int, *, probe_early: bool = True) -> None:
        """With ``probe_early`` a request outside the share is known to be good, so a probe may come before the rest."""
        self._probe_early = probe_early
        self._num_requests = num_requests
        whole = Piece(tuple(range(num_requests)))
        self._waiting = [whole] if num_requests else []  # a stack, so that halves are asked in order
        self._probe = Piece(())
        self._num_unprobed = 0  # accusations that need no early probe: the rest of the share comes next
        self._any_success = False
        self.has_ended = False
        """True once the client sends no further request, although samples may lack an answer."""
        self.accused: dict[int, str] = {}
        """Request number → how it failed alone; the server has not succeeded since."""
        self.quarantined: dict[int, str] = {}
        """Request number → why it is poisonous."""
        self.timed_out: list[int] = []
        """Requests that were asked alone and did not answer in time; they are unresolved."""
        self.server_fault: str | None = None
        """Why the server must not be asked again, once that is known."""

    def next_piece(self) -> Piece | None:
        """The next POST; None when nothing is left or the server is at fault."""
        if self.has_ended:
            return None
        # A server that has answered nothing of this share is probed at once if it can be: if it is dead,
        # bisecting the rest of it would only ask it in vain.
        if self.accused and (not self._waiting or self._needs_early_probe()):
            return self._probe
        return self._waiting.pop() if self._waiting else None

    def record(self, piece: Piece, end: PostEnd, reason: str = "", named: Sequence[int] = ()) -> None:
        """Takes note of how the POST of ``piece`` ended; ``named`` are the places in it that the server says failed."""
        match end:
            case PostEnd.ANSWERED:
                self._record_answer()
            case PostEnd.ERROR_ANSWER:
                self._record_error(piece, reason, named)
            case PostEnd.BUSY:
                if not piece.is_probe:
                    self._waiting.append(piece)
            case PostEnd.UNREACHABLE if not piece.is_retry:
                self._ask_again(piece)
            case PostEnd.TIMED_OUT:
                self._record_timeout(piece)
            case PostEnd.STOPPED:
                self.end()
            case _:
                self.blame_server(reason)

    def end(self) -> None:
        """Asks nothing more; what is unresolved stays so."""
        self.has_ended = True

    def blame_server(self, reason: str) -> None:
        """Asks nothing more, because the server must not be asked."""
        self.server_fault = reason
        self.has_ended = True

    def _record_answer(self) -> None:
        self.quarantined.update(self.accused)
        self.accused.clear()
        self._any_success = True
        self._probe = Piece(())

    def _needs_early_probe(self) -> bool:
        return self._probe_early and not self._any_success and len(self.accused) > self._num_unprobed

    def _record_error(self, piece: Piece, reason: str, named: Sequence[int]) -> None:
        if named and len(piece.indices) > 1:
            self._take_apart(piece, named)
            return
        # Halves get no retry of their own: bisecting them further is one already.
        whole_or_single = len(piece.indices) in (self._num_requests, 1)
        if not piece.is_retry and (whole_or_single or piece.is_probe):
            self._ask_again(piece)
        elif piece.is_probe:
            self.blame_server(f"a request that is known to be good failed as well: {reason}")
        elif len(piece.indices) == 1:
            self.accused[piece.indices[0]] = reason
        else:
            self._bisect(piece)

    def _record_timeout(self, piece: Piece) -> None:
        if piece.is_probe:
            self.end()  # nothing is proven either way
        elif len(piece.indices) > 1:
            self._bisect(piece)
        else:
            self.timed_out.extend(piece.indices)

    def _ask_again(self, piece: Piece) -> None:
        retry = replace(piece, is_retry=True)
        if piece.is_probe:
            self._probe = retry
        else:
            self._waiting.append(retry)

    def _take_apart(self, piece: Piece, named: Sequence[int]) -> None:
        """Each named request alone, for the second time, then the others together."""
        blamed = [piece.indices[place] for place in sorted(set(named))]
        others = tuple(index for index in piece.indices if index not in blamed)
        if others:
            self._waiting.append(Piece(others))
        self._waiting.extend(Piece((index,), is_retry=True) for index in reversed(blamed))
        # One and no more: a dead server that names its requests must be found out as fast as any.
        self._num_unprobed = 1

    def _bisect(self, piece: Piece) -> None:
        middle = (len(piece.indices) + 1) // 2
        self._waiting.append(Piece(piece.indices[middle:]))
        self._waiting.append(Piece(piece.indices[:middle]))


def request_seed(
    *, run_seed: int, rank: int, world_size: int, epoch: int, position: int, attempt: int, draw: int
) -> int:
    """Seed for the POST that is led by the sample at (``epoch``, ``position``) of ``rank``'s stream.

    ``attempt`` counts the sample's rollouts, ``draw`` the POSTs that it led within this attempt. The seed and the
    4095 that follow it lie in 1..2**31-1 and in no other rank's interval, whatever the other arguments are. Within a
    rank and epoch, positions and the first 15 (attempt, draw) pairs map to seeds one to one, until
    16 × position exceeds the interval (1.3e8 positions / ``world_size``).

    Raises:
        ValueError: a rank outside the world, a negative count, or a world too large for 31 bits.
    """
    if not 0 <= rank < world_size or min(epoch, position, attempt, draw) < 0:
        raise ValueError(
            f"a seed needs 0 <= rank < world_size and counts of at least 0, got rank={rank} world_size={world_size} "
            f"epoch={epoch} position={position} attempt={attempt} draw={draw}"
        )
    interval, num_starts, stride = _layout(world_size)
    block, turn = divmod(_pair(attempt, draw), _TURNS_PER_POSITION)
    serial = _offset(run_seed, epoch, block) + position * _TURNS_PER_POSITION + turn
    return 1 + rank * interval + serial * stride % num_starts


class SeedLedger:
    """Counts the POSTs that each unresolved sample has led, so that none of them repeats a seed."""

    def __init__(self, *, run_seed: int, rank: int, world_size: int) -> None:
        _layout(world_size)
        self._run_seed = run_seed
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.Lock()
        self._draws: dict[tuple[int, int, int], int] = {}

    def next_seed(self, key: SampleKey) -> int:
        """A seed that no earlier POST led by this sample has had."""
        place = (key.epoch, key.position, key.attempt)
        with self._lock:
            draw = self._draws.get(place, 0)
            self._draws[place] = draw + 1
        return request_seed(
            run_seed=self._run_seed,
            rank=self._rank,
            world_size=self._world_size,
            epoch=key.epoch,
            position=key.position,
            attempt=key.attempt,
            draw=draw,
        )

    def forget(self, key: SampleKey) -> None:
        """Ends the count of a sample that has its rollout or is quarantined."""
        with self._lock:
            self._draws.pop((key.epoch, key.position, key.attempt), None)


@lru_cache(maxsize=8)
def _layout(world_size: int) -> tuple[int, int, int]:
    """(seeds per rank, first seeds among them that leave room for a whole POST, stride between two serials)."""
    interval = _LARGEST_SEED // world_size if world_size > 0 else 0
    num_starts = interval - MAX_REQUESTS_PER_POST + 1
    if num_starts < _TURNS_PER_POSITION:
        raise ValueError(
            f"every rank needs room for one POST of {MAX_REQUESTS_PER_POST} requests in 31 bits, got "
            f"world_size={world_size}"
        )
    # Coprime to num_starts, so serials map to starts one to one; near the golden ratio, so that
    # neighbours in the stream land far apart and their POSTs do not overlap.
    stride = int(num_starts * _GOLDEN)
    while math.gcd(stride, num_starts) != 1:
        stride += 1
    return interval, num_starts, stride


def _pair(attempt: int, draw: int) -> int:
    """Cantor's pairing: one integer per (attempt, draw), small ones for small pairs."""
    diagonal = attempt + draw
    return diagonal * (diagonal + 1) // 2 + draw


@lru_cache(maxsize=64)
def _offset(run_seed: int, epoch: int, block: int) -> int:
    digest = hashlib.blake2b(f"{run_seed}:{epoch}:{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True, slots=True)
class ServerPace:
    """Prompts per second of one server as this rank has seen it; without history None."""

    prompts_per_s: float | None = None
    last_share: int = 0  # number of the share that it got last

    def after(self, num_prompts: int, seconds: float) -> ServerPace:
        """With one more share: ``num_prompts`` answered in ``seconds`` of POSTs; an empty one shows nothing."""
        if num_prompts < 1 or seconds <= 0:
            return self
        pace = num_prompts / seconds
        if self.prompts_per_s is not None:
            pace = (1 - _NEWEST) * self.prompts_per_s + _NEWEST * pace
        return replace(self, prompts_per_s=pace)


def choose(
    paces: Sequence[ServerPace], in_hand: Sequence[int], sizes: Sequence[int], *, share: int, turn: int
) -> int:
    """Which server gets the share of number ``share``; the n-th would get ``sizes[n]`` prompts.

    It has ``in_hand[n]`` prompts of this rank that it computes or that wait for it. ``turn`` says with which of the
    equally good ones to begin. A server without history counts as fast as the fastest.

    Raises:
        ValueError: there is no server.
    """
    if not paces:
        raise ValueError("a share needs a server, got num_servers=0")
    known = [pace.prompts_per_s if share - pace.last_share <= _FORGET_AFTER else None for pace in paces]
    fast_enough = max((pace for pace in known if pace is not None), default=1.0) / _ABOUT_AS_FAST
    ends = [
        (held + size) / (fast_enough if pace is None else min(pace, fast_enough)) ** _CAUTION
        for held, size, pace in zip(in_hand, sizes, known, strict=True)
    ]
    return min(range(len(paces)), key=lambda n: (ends[n], (n - turn) % len(paces)))


class PlaceLimit:
    """The POSTs that a server gets at once: one more per full set answered, half when it had no room or time.

    Safe from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of whoever observes
        self._limit = math.inf
        self._cut_s = -math.inf

    def within(self, most: int) -> int:
        """The limit now, between 1 and ``most``."""
        return max(1, int(min(most, self._limit)))

    def observe(self, end: PostEnd, *, began_s: float, ended_s: float, most: int) -> None:
        """One POST ended. One that left before the last cut says nothing new of the server."""
        with self._lock:
            if end is PostEnd.ANSWERED:
                self._limit += 1 / self.within(most)
            elif end in (PostEnd.BUSY, PostEnd.TIMED_OUT) and began_s >= self._cut_s:
                self._limit = self.within(most) / 2
                self._cut_s = ended_s
