"""On which terms a batch is asked: how answers are decoded, under which version, and who hears of its POSTs.

The client has terms for training; an evaluation brings its own. Read by lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swift_stage2.config import DecodingConfig
from swift_stage2.records import SampleKey


class PostEvents(Protocol):
    """Hears of every POST that asks for samples, on the thread of its lane."""

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None: ...

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What the POSTs of one batch have in common."""

    decoding: DecodingConfig
    events: PostEvents | None = None
    only_version: int | None = None
    """Nothing is asked under another version; the samples return instead. None: any version will do."""
