"""What happens to samples, told in words that a ledger can keep: reasons, and the seams through which they are told.

The source tells under its own lock, so that the order of what was told is the order of what happened; lanes tell
of their POSTs. Implemented by the telemetry side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from swift_stage2.records import Rollout, SampleKey, Target


class ReturnReason(StrEnum):
    """Why a drawn sample came back untrained, to be drawn again."""

    STALE = "stale"
    """Its rollout fell out of the version window."""
    OVERFLOW = "overflow"
    """Its pack was the oldest of a queue over its limit."""
    TIMED_OUT = "timed_out"
    """It was asked alone and did not answer in time."""
    ABORTED = "aborted"
    """Its server ended it early for a pending round."""
    FAILED = "failed"
    """No server answered it: none was proven, the one asked was lost or refused, or the batch's time was over."""
    STOPPED = "stopped"
    """The run ended while it was asked."""

    @property
    def counts_attempt(self) -> bool:
        """Whether a rollout was used up; a server's fault uses up none."""
        return self in (ReturnReason.STALE, ReturnReason.OVERFLOW, ReturnReason.TIMED_OUT)


class SampleEvents(Protocol):
    """Every change of what a rank's stream holds. Called under the source's lock: brief, and never raising."""

    def drawn(self, keys: Sequence[SampleKey]) -> None: ...

    def returned(self, keys: Sequence[SampleKey], reason: ReturnReason) -> None: ...

    def trained(self, keys: Sequence[SampleKey], *, pack_id: str, step: int, version: int) -> None: ...

    def quarantined(self, key: SampleKey, reason: str, message: str) -> None: ...

    def checkpoint(self, *, step: int, save_id: str, state: Mapping[str, Any]) -> None: ...


class PostEvents(Protocol):
    """Every POST that asks for samples, on the thread of its lane."""

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None: ...

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None: ...


class Unrecorded:
    """Keeps nothing: for a source or a client whose samples nobody will train."""

    def drawn(self, keys: Sequence[SampleKey]) -> None: ...

    def returned(self, keys: Sequence[SampleKey], reason: ReturnReason) -> None: ...

    def trained(self, keys: Sequence[SampleKey], *, pack_id: str, step: int, version: int) -> None: ...

    def quarantined(self, key: SampleKey, reason: str, message: str) -> None: ...

    def checkpoint(self, *, step: int, save_id: str, state: Mapping[str, Any]) -> None: ...

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None: ...

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None: ...

    def matched(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None: ...
