"""What a thread is at, and since when: what a watch needs to know of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Standing:
    """Replaced by another whenever the thread goes on to the next thing, which is what counts as progress."""

    what: str
    """Who does what, as a sentence without its end."""
    since_s: float = field(default_factory=time.monotonic)
