"""The base of every rollout engine: its thread, its state, its open jobs, and the records that it takes and gives.

An engine owns the model and orders whatever touches it; callers hold futures. A job may be ended by an encoder thread,
the engine's thread or the shutdown: the first decides. Nothing here knows HTTP or torch. An
engine of another kind is one subclass in a file of its own and an entry in ``command_line.ENGINES``.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from swift_stage2.errors import EngineUnavailable, UserError
from swift_stage2.servers.infer_wire import Completion, SamplingOptions
from swift_stage2.wire import TensorSpec

if TYPE_CHECKING:
    from swift_stage2.rollout_server.swift_generator import EncodedRow, GeneratedRow
    from swift_stage2.rollout_server.weight_source import WeightSource

_log = logging.getLogger(__name__)
_GIVEN_UP_POLL_S = 0.25
_IDLE_SLICE_S = 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One conversation to continue. ``conversation`` holds ms-swift's request fields, media as base64.

    Requests with equal ``sampling`` may share a batch: it holds no limit and no seed. None: the model's default.
    """

    conversation: Mapping[str, Any]
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_new_tokens: int | None = None  # None: as many as the model's length allows
    seed: int | None = None  # None: another one at every call
    request_id: str | None = None  # its caller's, which the answer names


@dataclass(frozen=True, slots=True)
class WeightStamp:
    """Which weights the model holds. ``version`` is None for the checkpoint it was started with."""

    version: int | None = None
    run_id: str | None = None


def weights_of(spans: Sequence[tuple[WeightStamp, int]]) -> dict[str, Any]:
    """The fields of a ``Completion`` that name its weights: so many tokens of each stamp, in order, the newest last.

    One that began under weights of another run is of none.
    """
    (first, _), newest = spans[0], spans[-1][0]
    versions = tuple((stamp.version, num_tokens) for stamp, num_tokens in spans)
    return {
        "weight_version": newest.version,
        "run_id": newest.run_id if first.run_id == newest.run_id else None,
        "spans": versions if len(versions) > 1 else (),
    }


class JobAborted(Exception):
    """A job's caller has gone; the rest of the work is left undone."""


@dataclass(eq=False, slots=True)
class GenerationJob:
    """One submitted request; its caller holds ``future``."""

    request: GenerationRequest
    future: Future[Completion] = field(default_factory=Future)
    row: EncodedRow | None = None
    aborted: bool = False

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # only the engine ends it

    @property
    def key(self) -> SamplingOptions:
        """Jobs with equal keys may share a batch."""
        return self.request.sampling

    def abort(self) -> None:
        """Its caller has gone: asks for an early end. Does nothing once the job has ended."""
        self.aborted = True

    def completion(self, made: GeneratedRow, spans: Sequence[tuple[WeightStamp, int]]) -> Completion:
        """The answer; ``spans`` are those of ``weights_of``."""
        assert self.row is not None
        return Completion(
            text=made.text,
            token_ids=made.token_ids,
            finish_reason=made.end.name.lower(),
            prompt_token_ids=self.row.prompt_token_ids,
            images_size=self.row.images_size,
            log_probs=made.log_probs,
            **weights_of(spans),
        )


def clear_traceback(error: BaseException | None) -> None:
    """A failure's frames hold pictures or weights, and what holds the failure: a ring that only the collector opens."""
    seen: set[int] = set()  # an exception may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@dataclass(frozen=True, slots=True)
class InstalledWeights:
    """Names of the tensors that an engine took, checksums of what it read, and of what it holds now.

    One that the model holds in another dtype is resident as it arrived if the model holds what a cast makes of it.
    """

    loaded: tuple[str, ...]
    arrived: Mapping[str, str]
    resident: Mapping[str, str]


class SleepMode(NamedTuple):
    """Whether an engine gives its memory back between installs, and from the start."""

    level: int = 0
    """0: never; 1: the weights go to main memory; 2: they are dropped. Above 0 it sleeps as soon as it has loaded."""
    loads_when_asked: bool = False
    """It does not load before ``load_now``."""


AWAKE = SleepMode()


class EngineState(StrEnum):
    """Whether an engine can be asked."""

    UNLOADED = "unloaded"
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


class Engine(ABC):
    """One model that answers requests and takes weights. Methods may be called from any thread.

    A subclass sets ``name``, loads and works in ``_run`` on the engine's thread, and starts that at the end of its
    ``__init__`` by ``_thread.start()``. ``BROKEN`` is for good, whatever is said later.
    """

    name: str
    installs_beside = True
    """True: the slot calls ``install`` while jobs are open. False: it waits until all jobs have ended."""
    takes_turns = False
    """True: a scheduler of ms-swift's carries a conversation on; known once it is ready."""

    def __init__(self, model: str, sleep_mode: SleepMode = AWAKE) -> None:
        self.model = model
        self.sleep_mode = sleep_mode
        self.is_asleep = sleep_mode.level > 0 or sleep_mode.loads_when_asked
        """True until the first install, and from ``sleep`` to the next one: it can answer nothing."""
        self.stamp = WeightStamp()
        self._open: set[GenerationJob] = set()
        self._manifest: tuple[TensorSpec, ...] = ()
        self._state, self._detail = EngineState.UNLOADED, ""
        self._may_load, self._loaded = threading.Event(), threading.Event()
        if not sleep_mode.loads_when_asked:
            self._state = EngineState.LOADING
            self._may_load.set()
        self._thread = threading.Thread(target=self._run_to_the_end, name="rollout-engine", daemon=True)

    def wait_loaded(self, timeout_s: float) -> bool:
        """True when the model is loaded, or could not be, within the time; see ``status``."""
        return self._loaded.wait(timeout_s)

    def load_now(self, timeout_s: float) -> None:
        """Has an engine that waits to be asked load its model; does nothing to others.

        Raises EngineUnavailable: it is not loaded within the time.
        """
        if self.sleep_mode.loads_when_asked:
            self._may_load.set()
            self.wait_loaded(timeout_s)
            self._require_ready()

    def status(self) -> EngineStatus:
        """State, its reason, and counts; never waits."""
        state, detail = self._state, self._detail
        if state not in (EngineState.BROKEN, EngineState.CLOSED) and (ailment := self._ailment()):
            state, detail = EngineState.BROKEN, ailment
        num_open = len(self._open)
        num_running = min(num_open, self._num_running())
        return EngineStatus(
            state,
            detail,
            num_waiting=num_open - num_running,
            num_running=num_running,
        )

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Name, shape and dtype of every parameter of the checkpoint, tied weights once; empty until it is loaded."""
        return self._manifest

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> list[GenerationJob]:
        """Begins to answer them. Raises EngineUnavailable unless the engine is ready."""

    def settle(self, timeout_s: float, given_up: threading.Event) -> int:
        """Waits for the jobs that are open now; how many are left, in time or when their caller has ``given_up``."""
        end = time.monotonic() + timeout_s
        waiting = {job.future for job in tuple(self._open)}
        while waiting and not given_up.is_set() and (left_s := end - time.monotonic()) > 0:
            waiting = wait(waiting, min(left_s, _GIVEN_UP_POLL_S)).not_done
        return len(waiting)

    def sum_arrived(self, weights: WeightSource) -> None:  # noqa: B027
        """Sums what arrived, while requests still run; does nothing where the install reads the weights itself.

        Raises InstallFailed: the sums are not those that the file says.
        """

    @property
    def may_read(self) -> bool:
        """Whether somebody may still read the weights of an install that has ended."""
        return False

    @abstractmethod
    def install(self, weights: WeightSource, stamp: WeightStamp, timeout_s: float) -> InstalledWeights:
        """Copies all tensors into the model, in its own dtypes, between two tokens of whatever is open.

        ``sum_arrived`` has been called. Whatever is sampled later carries ``stamp``, also if the copy fails half way.
        What was computed of a running answer is kept; no later request reuses it. Installs are made one after another,
        also behind one that outlived its time.

        Raises:
            InstallFailed: not loaded; ``torn`` says whether the model may hold a part of the weights.
        """

    def sleep(self, timeout_s: float) -> None:
        """Ends what is open and gives the memory of weights and caches back, until ``install`` takes it again.

        Not called beside an install, and nothing is submitted meanwhile. May be called of an engine that sleeps.

        Raises:
            EngineUnavailable: not within the time, or the engine is broken or closed.
        """
        end = time.monotonic() + timeout_s
        if self._may_load.is_set():  # else it holds nothing
            self.wait_loaded(timeout_s)
            self._require_ready()
        if self.is_asleep:
            return
        self.end_open("the server falls asleep")
        asleep = self._fall_asleep()
        try:
            asleep.result(max(0.0, end - time.monotonic()))
        except Exception as error:  # whatever an engine raises, or it did not come to it
            asleep.cancel()
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise EngineUnavailable(f"the engine did not sleep: {reason}") from error

    def end_open(self, why: str) -> None:
        """Fails what is open."""
        for job in tuple(self._open):
            self._fail(job, EngineUnavailable(why))
            job.abort()

    def close(self, timeout_s: float) -> None:
        """Fails what is open and ends the thread within the time. May be called again.

        A load cannot be interrupted and is not waited for.
        """
        self._stop(EngineState.CLOSED, "the server is shutting down")
        self._may_load.set()
        self._thread.join(timeout_s if self._loaded.is_set() else 0.0)

    # --- for subclasses -------------------------------------------------------------------------
    @abstractmethod
    def _run(self) -> None:
        """Loads the model, calls ``_become_ready`` and works until the engine is stopped. On the engine's thread."""

    @abstractmethod
    def _fall_asleep(self) -> Future[None]:
        """Its end: behind whatever is open, which is aborted, ``is_asleep`` is set and the memory is given back.

        One that is cancelled before it begins changes nothing.
        """

    def _ailment(self) -> str:
        """Why an engine that was not stopped cannot work; empty while it can."""
        return "" if self._thread.is_alive() else "the engine's thread has died"

    @abstractmethod
    def _num_running(self) -> int:
        """Jobs that the model computes now."""

    def _require_ready(self) -> None:
        """Raises EngineUnavailable unless the engine is ready."""
        status = self.status()
        if status.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {status.state}: {status.detail or 'ask again later'}")

    def _become_ready(self) -> None:
        """The model is loaded; an engine that was ended meanwhile stays ended."""
        self.is_asleep = self.sleep_mode.level > 0
        if self._state is EngineState.LOADING:
            self._state = EngineState.READY
        self._loaded.set()

    def _stop(self, state: EngineState, detail: str) -> None:
        """``BROKEN`` or ``CLOSED``, and why; fails open jobs."""
        if self._state is not EngineState.BROKEN:
            self._state, self._detail = state, detail
        self._refuse_work()
        self.end_open(f"the engine is {state}: {detail}")

    @abstractmethod
    def _refuse_work(self) -> None:
        """Takes nothing more: what is submitted from now on fails."""

    def _finish(self, job: GenerationJob, completion: Completion) -> None:
        """Answers the job, unless it has ended."""
        self._open.discard(job)
        with suppress(InvalidStateError):
            job.future.set_result(completion)

    def _fail(self, job: GenerationJob, error: Exception) -> None:
        """Fails the job, unless it has ended."""
        self._open.discard(job)
        clear_traceback(error)
        with suppress(InvalidStateError):
            job.future.set_exception(error)

    def _run_to_the_end(self) -> None:
        while not self._may_load.wait(_IDLE_SLICE_S):  # nobody has asked yet, nor closed the engine
            continue
        try:
            if self._state in (EngineState.UNLOADED, EngineState.LOADING):
                self._state = EngineState.LOADING
                self._run()
        except UserError as error:
            self._stop(EngineState.BROKEN, str(error))
        except Exception as error:  # top of the thread
            # A model that does not load is told in one line, by who started the server.
            level = logging.ERROR if self._loaded.is_set() else logging.DEBUG
            _log.log(level, "the engine's thread ends", exc_info=True)
            self._stop(EngineState.BROKEN, f"{type(error).__name__}: {error}")
        finally:
            self._loaded.set()
