"""The request of a rollout: with what settings and seed it is asked, how a POST of it ended, and who is told."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from swift_stage2.columns import Column
from swift_stage2.config import DecodingConfig
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.records import SampleKey, VersionSpan
from swift_stage2.servers.infer_wire import Completion

_NUM_SEEDS = 2**31 - 1


class PostEnd(StrEnum):
    """The end of one POST."""

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
class PostResult:
    """The end of a POST; ``completions`` iff an ``/infer/`` call was answered. Who asked adds what it knows of it."""

    end: PostEnd
    reason: str = ""
    completions: tuple[Completion, ...] = ()
    spans: tuple[tuple[VersionSpan, ...], ...] = ()  # of each completion
    seed: int = 0
    seconds: float = 0.0
    is_meant: bool = True
    """False if its server was withdrawn or suspected meanwhile: an error says nothing of it, proven anew perhaps."""


class RequestObserver(Protocol):
    """Is told of every POST that asks for samples, on the client's thread."""

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None: ...

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """The settings of what was submitted together. Whose outcome it is, too."""

    decoding: DecodingConfig
    observer: RequestObserver | None = None
    columns: tuple[Column, ...] = ()
    """Every answer must bring their values."""
    wished: tuple[Column, ...] = ()
    """Are asked for as well; an answer may lack them."""
    only_version: int | None = None
    """Nothing is asked of a server with another version; the samples return instead. None: any version will do."""


class SeedLedger:
    """The seeds of one rank's POSTs: hashes of the sample that leads a POST, of its attempt and its POSTs so far.

    Engines give a POST's i-th request ``seed + i``. Each rank owns one interval of the 31-bit seeds, whole POSTs
    included, so that two ranks never sample with a common seed; 0 is none.
    """

    def __init__(self, *, run_seed: int, rank: int, world_size: int) -> None:
        interval = _NUM_SEEDS // world_size
        self._run_seed, self._first = run_seed, 1 + rank * interval
        self._num_starts = interval - MAX_REQUESTS_PER_POST + 1
        self._draws: Counter[SampleKey] = Counter()

    def next_seed(self, key: SampleKey) -> int:
        """A seed for another POST that is led by this sample."""
        self._draws[key] += 1
        place = f"{self._run_seed}:{key.epoch}:{key.position}:{key.attempt}:{self._draws[key]}"
        digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
        return self._first + int.from_bytes(digest) % self._num_starts

    def forget(self, key: SampleKey) -> None:
        """Ends the count of a sample that has its rollout or is quarantined."""
        self._draws.pop(key, None)
