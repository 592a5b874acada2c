"""Requests on their way through an engine, and the book that lets each end exactly once.

A job may be ended by an encoder thread, the engine's thread, an abort or the shutdown; the book decides who was
first. Called by the engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swift_stage2.servers.protocol import Completion

if TYPE_CHECKING:  # importing ms-swift takes seconds; the engine's thread does it
    from swift_stage2.rollout_server.swift_generator import EncodedRow

_GIVEN_UP_POLL_S = 0.25


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


class JobAborted(Exception):
    """A job was aborted while it was encoded; the rest of the work is left undone."""


@dataclass(eq=False, slots=True)
class GenerationJob:
    """One submitted request; its caller holds ``future``. ``alone`` keeps it out of other jobs' batches."""

    request: GenerationRequest
    future: Future[Completion] = field(default_factory=Future)
    row: EncodedRow | None = None
    aborted: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # only the engine ends it

    @property
    def key(self) -> tuple[Sampling, bool, int | None]:
        """Jobs with equal keys may share a batch."""
        return self.request.sampling, self.request.with_log_probs, id(self) if self.alone else None

    def abort(self) -> None:
        """Asks for an early end; does nothing once the job has ended."""
        self.aborted = True

    def completion(
        self,
        stamp: WeightStamp,
        *,
        finish_reason: str = "abort",
        text: str = "",
        token_ids: tuple[int, ...] = (),
        log_probs: tuple[float, ...] | None = None,
    ) -> Completion:
        """The answer under the weights that ``stamp`` names; without more, that of a job that never started."""
        return Completion(
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            prompt_token_ids=self.row.prompt_token_ids if self.row else (),
            images_size=self.row.images_size if self.row else (),
            log_probs=log_probs,
            weight_version=stamp.version,
            run_id=stamp.run_id,
        )


class JobBook:
    """All jobs that have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[GenerationJob] = set()
        self.completions_made = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, jobs: Iterable[GenerationJob]) -> None:
        with self._lock:
            self._open.update(jobs)

    def open_jobs(self) -> list[GenerationJob]:
        with self._lock:
            return list(self._open)

    def finish(self, job: GenerationJob, completion: Completion) -> None:
        """Answers the job, unless it has ended."""
        if self._strike(job, completed=True):
            job.future.set_result(completion)

    def fail(self, job: GenerationJob, error: Exception) -> None:
        """Fails the job, unless it has ended."""
        if self._strike(job):
            _let_go_of_frames(error)
            job.future.set_exception(error)

    def settle(self, timeout_s: float, given_up: threading.Event) -> bool:
        """Waits for the jobs that are open now; False when they did not all end in time, or nobody waits any more."""
        end = time.monotonic() + timeout_s
        waiting = {job.future for job in self.open_jobs()}
        while waiting and not given_up.is_set() and (left_s := end - time.monotonic()) > 0:
            waiting = wait(waiting, min(left_s, _GIVEN_UP_POLL_S)).not_done
        return not waiting

    def _strike(self, job: GenerationJob, *, completed: bool = False) -> bool:
        with self._lock:
            was_open = job in self._open
            self._open.discard(job)
            self.completions_made += was_open and completed
            return was_open


def _let_go_of_frames(error: BaseException | None) -> None:
    """A failure's frames hold pictures, and the job that holds the failure: a ring that only the collector opens."""
    seen: set[int] = set()  # an exception may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
