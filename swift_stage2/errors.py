"""Every exception the package raises on purpose, as one tree.

A mistake of the user's has the rule, what was got (``name=value``) and the remedy as fields, and is written out here
alone. Foreign exceptions are translated once, where they enter, with ``raise ... from exc``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

EXIT_USER_MISTAKE = 2
"""Exit status of every command that a UserError ends."""
EXIT_STARVED = 3
"""Exit status of a run that ChannelBStarved ends: trained by supervision alone where channel B was wanted."""


class Stage2Error(Exception):
    """Base of every exception that swift_stage2 raises on purpose."""


class Refusal(Stage2Error):
    """Something is not as it must be, written out here alone.

    ``rule`` says what must be (a whole sentence where nothing else is given), ``got`` what was found in its place,
    ``remedy`` what to write or do. ``key`` is the place: a file, a line, a section or a key of the configuration.
    """

    def __init__(self, rule: str, *, got: str = "", remedy: str = "", key: str = "") -> None:
        super().__init__(rule)
        self.rule, self.got, self.remedy, self.key = rule, got, remedy, key

    @property
    def found(self) -> str:
        """All but the remedy."""
        place = f"{self.key}: " if self.key else ""
        return f"{place}{self.rule}{f', got {self.got}' if self.got else ''}"

    def __str__(self) -> str:
        return f"{self.found}; {self.remedy}" if self.remedy else self.found


class UserError(Refusal):
    """A mistake the user can mend; commands print it as one line and exit with status 2."""

    def at(self, place: str) -> Self:
        """The same mistake with the place that is around it, as a new exception."""
        key = f"{place}: {self.key}" if self.key else place
        return type(self)(self.rule, got=self.got, remedy=self.remedy, key=key)


class ConfigError(UserError, ValueError):
    """A key, value or combination of the YAML configuration is refused."""


class DatasetError(UserError):
    """The data set as a whole cannot be used (missing file, malformed line, no boxes)."""


class TaskError(UserError):
    """A task of the user's breaks, or hands back a target that cannot be trained; only its author can mend it."""


class StorageFull(UserError):
    """A disk does not take what a run must write: it is full, over its quota, read-only or broken."""


class ServerUnavailable(UserError):
    """A rollout server did not answer when a run started or resumed."""


class SampleError(Refusal):
    """One sample cannot be used. It is quarantined with this message and training goes on."""


class PromptMismatch(SampleError):
    """An answer to another prompt than the sample's, whose token ids are ``expected``."""

    def __init__(self, rule: str, *, got: str = "", remedy: str = "", expected: tuple[int, ...] = ()) -> None:
        super().__init__(rule, got=got, remedy=remedy)
        self.expected = expected


class PackingError(Stage2Error):
    """Segment lengths that no pack can hold."""


class MatchingError(Stage2Error):
    """Boxes or settings that cannot be matched."""


class StaleSample(Stage2Error):
    """A sample older than the version window was about to be trained; only a bug lets it come so far."""


class QueueClosed(Stage2Error):
    """The ready queue was closed by its owner."""


class ReservationSpent(Stage2Error):
    """A reservation was already taken or released."""


class FenceShutDown(Stage2Error):
    """The fence was shut down; no ticket will be issued again."""


class ProtocolError(Stage2Error):
    """A rollout server's reply does not have the shape that the wire protocol requires."""


class RequestTooLarge(ProtocolError):
    """A call is larger than a server of ours takes; its sender may halve it."""


class FaultKind(StrEnum):
    """How a call to a server ended without a good answer."""

    UNREACHABLE = "unreachable"  # no connection, so nothing was sent
    LOST = "lost"  # the connection broke after something was sent
    LATE = "late"  # no whole answer by the deadline; the server may still be at it
    STATUS = "status"  # an answer that says that the server did not do it
    UNUSABLE = "unusable"  # an answer that the wire does not allow


class ServerFault(Stage2Error):
    """One rollout server failed, lied or was lost; in a sync round it becomes suspect.

    ``kind`` says how a call ended, None for what is wrong beyond a single call; ``status`` and ``record`` are the HTTP
    status of an answer that was none, and its body if that is JSON; ``refuses_key`` whether the server wants another
    API key, which no waiting mends.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: FaultKind | None = None,
        status: int | None = None,
        record: Any = None,
        refuses_key: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.record = record
        self.refuses_key = refuses_key

    @property
    def knows_no_such_call(self) -> bool:
        """True if the server answered that it does not have the route that was called."""
        return self.status in (301, 302, 307, 308, 404, 405, 501)  # vLLM redirects from a slash at the end

    @property
    def is_foreign(self) -> bool:
        """True if the answer may be another program's: it lacks the route, or its answer breaks our protocol."""
        return self.knows_no_such_call or self.kind is FaultKind.UNUSABLE

    @property
    def reason(self) -> str | None:
        """Our server's own word for a refusal (``wire.RefusalReason``), if it gave one."""
        reason = self.record.get("reason") if isinstance(self.record, Mapping) else None
        return reason if isinstance(reason, str) else None


class WeightSyncError(Stage2Error):
    """The learner's own weights cannot be exported; every rank raises the same error."""


class WeightSyncHang(Stage2Error):
    """A rank is lost to the others while all of them take part in a round: in a gather, a canary or a copy.

    It cannot be taken back: every rank exits with 70.
    """


class WeightsRefused(Stage2Error):
    """Our server will not do this in its present state; ``reason`` is the wire's ``RefusalReason``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InstallFailed(Stage2Error):
    """Offered weights did not all arrive, or could not be installed; the message names the cause.

    ``torn``: the model may hold a part of them.
    """

    def __init__(self, message: str, *, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn


class EngineUnavailable(Stage2Error):
    """Our server's engine cannot answer: still loading, broken, or shut down."""


class UpstreamLost(Stage2Error):
    """The server behind a merger broke the connection or cannot be reached, or has had no weights since it did."""


class UpstreamTimeout(Stage2Error):
    """The server behind a merger did not answer in time; it may still be computing what it was asked."""


class PipelineFailed(Stage2Error):
    """A background pipeline died on some rank; every rank raises this at the same step."""


class PreprocessorLost(Stage2Error):
    """A rank's preprocessing process failed, ended or does not answer."""


class ReplayDiffers(Stage2Error):
    """A replay came to another loss than the record of its run."""


class ChannelBStarved(Stage2Error):
    """Channel B was wanted and no server was left for it until the end, or it ran far too little and
    the configuration asks to fail."""


class ChildFailed(Stage2Error):
    """A process that a demo or a bench started failed or did not end; the message names cause and log."""


def exit_status_of(error: Exception) -> int:
    """Of a command or rank that the error ends."""
    if isinstance(error, ChannelBStarved):
        return EXIT_STARVED
    return EXIT_USER_MISTAKE if isinstance(error, UserError) else 1


_NEAR = 0.75  # below that, what is alike is an ending (`_type`, `_steps`), and the hint names another setting
_LISTED = re.compile(r"'([^']*)' not in \[(.*)\]")


def closest(word: str, words: tuple[str, ...]) -> str | None:
    """The word nearest to ``word``, or None when none is near."""
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=_NEAR)), None)


def without_list(message: str) -> str:
    """``message`` of ms-swift that lists every choice, with the nearest three in place of the list."""

    def nearest(found: re.Match[str]) -> str:
        words = re.findall(r"'([^']*)'", found[2])
        near = difflib.get_close_matches(found[1], words, cutoff=_NEAR)
        hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
        return f"{found[1]!r} is none of the {len(words)} that there are{hint}"

    return _LISTED.sub(nearest, message)
