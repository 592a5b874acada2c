"""What a rollout engine is to the server: the records that go in and come out, and the seam itself.

An engine owns the model. Everything that touches it is ordered by the engine; callers hold futures.
The routes, the weight rounds and every engine share these records; nothing here knows HTTP or torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from swift_stage2.servers.protocol import Completion, TensorSpec


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; requests with equal sampling may share a batch. None: the model's default."""

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None  # -1 is off
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One conversation to continue. ``conversation`` holds ms-swift's request fields, media as base64."""

    conversation: Mapping[str, Any]
    sampling: Sampling
    max_new_tokens: int | None = None  # None: as many as the model's length allows
    seed: int | None = None  # None: another one at every call
    with_log_probs: bool = False
    may_abort: bool = True  # whether /stage2/abort/ may end it


@dataclass(frozen=True, slots=True)
class WeightStamp:
    """Which weights the model holds. ``version`` is None for the checkpoint it was started with."""

    version: int | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class InstalledWeights:
    """What an engine can say after loading: names it took, checksums of what it holds now."""

    loaded: tuple[str, ...]
    resident: Mapping[str, str]


class InstallFault(StrEnum):
    """Faults of the load that tests switch on, to see whether a proof shows them."""

    NONE = "none"
    SKIP_COPY = "skip_copy"
    FLIP_ELEMENT = "flip_element"


class CacheKind(StrEnum):
    """What an engine may keep of the weights it computed with: the stock server has a route for each."""

    PREFIX = "prefix"
    ENCODER = "encoder"
    MM = "mm"


class EngineState(StrEnum):
    """Whether an engine can be asked."""

    LOADING = "loading"
    READY = "ready"
    BROKEN = "broken"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot that never waits for the engine."""

    state: EngineState
    detail: str = ""
    num_waiting: int = 0
    num_running: int = 0
    batches_run: int = 0
    completions_made: int = 0


class Ticket(Protocol):
    """One submitted request."""

    future: Future[Completion]

    def abort(self) -> None: ...


class Engine(Protocol):
    """One model that answers requests and takes weights. Methods may be called from any thread."""

    name: str
    model: str
    can_abort: bool

    @property
    def stamp(self) -> WeightStamp: ...

    def status(self) -> EngineStatus: ...

    def manifest(self) -> tuple[TensorSpec, ...]: ...

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Ticket]: ...

    def abort(self, tickets: Sequence[Ticket] | None = None) -> int:
        """Ends these, or everything waiting or running; their completions say ``abort``. Returns how many."""
        ...

    def reset_cache(self, kind: CacheKind, timeout_s: float, given_up: threading.Event) -> bool:
        """Empties one cache, after all that was submitted before has ended; False when it could not in time.

        Ends soon after ``given_up`` is set, too: its caller has gone.
        """
        ...

    def install(self, weights: Mapping[str, Any], stamp: WeightStamp, timeout_s: float) -> InstalledWeights:
        """Copies all tensors into the model while it computes nothing; later completions carry ``stamp``.

        Raises:
            RoundFailed: not loaded; ``torn`` says whether the model may hold a part of the weights.
        """
        ...

    def close(self, timeout_s: float) -> None: ...
