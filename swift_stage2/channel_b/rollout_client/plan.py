"""Decides which requests of one batch go into the next POST, given how the earlier ones ended.

Pure bookkeeping over request numbers. A request is quarantined only if it failed alone and another one
succeeded on the same server afterwards; otherwise the server is at fault and nothing is condemned.
Every request ends answered, quarantined or unresolved. Driven by a lane.

Our server names the requests that failed. Its word only chooses the next POSTs: who is named is asked once more,
alone, and the rest together, so that a wrong name costs a POST and condemns nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class PostEnd(StrEnum):
    """How one POST ended."""

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
    """One batch on one server: retry once, then bisect; probe the server before a request is condemned.

    What the server names is asked apart instead.
    """

    def __init__(self, num_requests: int, *, probe_early: bool = True) -> None:
        """With ``probe_early`` a request outside the batch is known to be good, so a probe may come before the rest."""
        self._probe_early = probe_early
        self._num_requests = num_requests
        whole = Piece(tuple(range(num_requests)))
        self._waiting = [whole] if num_requests else []  # a stack, so that halves are asked in order
        self._probe = Piece(())
        self._accused: dict[int, str] = {}
        self._num_unprobed = 0  # accusations that need no early probe: the rest of the batch comes next
        self._quarantined: dict[int, str] = {}
        self._timed_out: list[int] = []
        self._any_success = False
        self._ended = False
        self._server_fault: str | None = None

    @property
    def accused(self) -> tuple[int, ...]:
        """Requests that failed alone while the server has not succeeded since."""
        return tuple(self._accused)

    @property
    def quarantined(self) -> dict[int, str]:
        """Request number → why it is poisonous."""
        return dict(self._quarantined)

    @property
    def timed_out(self) -> tuple[int, ...]:
        """Requests that were asked alone and did not answer in time; they are unresolved."""
        return tuple(self._timed_out)

    @property
    def server_fault(self) -> str | None:
        """Why the server must not be asked again, once that is known."""
        return self._server_fault

    def next_piece(self) -> Piece | None:
        """What to POST next; None when nothing is left or the server is at fault."""
        if self._ended:
            return None
        # A server that has answered nothing of this batch is probed at once if it can be: if it is dead,
        # bisecting the rest of the batch would only ask it in vain.
        if self._accused and (not self._waiting or self._needs_early_probe()):
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
        self._ended = True

    def blame_server(self, reason: str) -> None:
        """Asks nothing more, because the server must not be asked."""
        self._server_fault = reason
        self._ended = True

    def _record_answer(self) -> None:
        self._quarantined.update(self._accused)
        self._accused.clear()
        self._any_success = True
        self._probe = Piece(())

    def _needs_early_probe(self) -> bool:
        return self._probe_early and not self._any_success and len(self._accused) > self._num_unprobed

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
            self._accused[piece.indices[0]] = reason
        else:
            self._bisect(piece)

    def _record_timeout(self, piece: Piece) -> None:
        if piece.is_probe:
            self.end()  # nothing is proven either way
        elif len(piece.indices) > 1:
            self._bisect(piece)
        else:
            self._timed_out.extend(piece.indices)

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
