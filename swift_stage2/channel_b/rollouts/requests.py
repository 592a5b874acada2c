"""The request of a rollout: with what settings it is asked, how a POST of it ended, and who is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from swift_stage2.columns import Column
from swift_stage2.config import DecodingConfig
from swift_stage2.records import SampleKey
from swift_stage2.servers.infer_wire import Completion


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
    """The end of a POST; ``completions`` iff an ``/infer/`` call was answered."""

    end: PostEnd
    reason: str = ""
    completions: tuple[Completion, ...] = ()


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
    only_version: int | None = None
    """Nothing is asked of a server with another version; the samples return instead. None: any version will do."""
