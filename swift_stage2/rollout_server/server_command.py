"""One server to run. Apart from ``app``, which reads it, because that imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swift_stage2.rollout_server.engine import Engine
from swift_stage2.servers.request_checks import RequestLimits


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Where to listen, and with which engine. ``start_engine`` begins to load and returns at once."""

    host: str
    port: int  # 0 takes any free one
    api_key: str | None
    has_children: bool  # the engine starts processes of its own
    start_engine: Callable[[], Engine]
    group_bind: str | None = None  # address for weights; None is ``host``
    limits: RequestLimits = field(default_factory=RequestLimits)
