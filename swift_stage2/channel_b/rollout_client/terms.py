"""On which terms a batch is asked: how answers are decoded, under which version, and who hears of its POSTs.

The client has terms for training; an evaluation brings its own. Read by lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_stage2.channel_b.sample_events import PostEvents
from swift_stage2.config import DecodingConfig


@dataclass(frozen=True, slots=True)
class Terms:
    """What the POSTs of one batch have in common."""

    decoding: DecodingConfig
    events: PostEvents
    only_version: int | None = None
    """Nothing is asked under another version; the samples return instead. None: any version will do."""
