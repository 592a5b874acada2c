"""One server to run: what the command line asks for, and what ``serve`` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from swift_stage2.rollout_server.engine import Engine
from swift_stage2.servers.request_checks import RequestLimits


class LoadingEngine(Engine, Protocol):
    """An engine that loads in the background from the moment it is made."""

    def wait_loaded(self, timeout_s: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Where to listen, and with which engine. ``start_engine`` begins to load and returns at once."""

    host: str
    port: int  # 0 takes any free one
    api_key: str | None
    has_children: bool  # the engine starts processes of its own
    start_engine: Callable[[], LoadingEngine]
    group_bind: str | None = None  # address for weights; None is ``host``
    limits: RequestLimits = field(default_factory=RequestLimits)
