"""The base of every rollout engine: its thread, its state, its open jobs, and the records that it gives.

An engine owns the model. Everything that touches it is ordered by the engine; callers hold futures. Nothing here
knows HTTP or torch. An engine of another kind is one subclass in a file of its own and an entry in
``command_line.ENGINES``.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from swift_stage2.errors import EngineUnavailable, UserError
from swift_stage2.rollout_server.jobs import GenerationJob, GenerationRequest, JobBook, WeightStamp
from swift_stage2.servers.protocol import TensorSpec

_log = logging.getLogger(__name__)

ModelT = TypeVar("ModelT")


@dataclass(frozen=True, slots=True)
class InstalledWeights:
    """Names of the tensors that an engine took, and checksums of what it holds now."""

    loaded: tuple[str, ...]
    resident: Mapping[str, str]


class InstallFault(StrEnum):
    """Faults of the load that tests switch on, to see whether a proof shows them."""

    NONE = "none"
    SKIP_COPY = "skip_copy"
    FLIP_ELEMENT = "flip_element"


class CacheKind(StrEnum):
    """Caches of what was computed with the weights: the stock server has a route for each."""

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


class Engine(ABC):
    """One model that answers requests and takes weights. Methods may be called from any thread.

    A subclass sets ``name``, loads and works in ``_run`` on the engine's thread, and starts that at the end of its
    ``__init__`` by ``_thread.start()``. ``BROKEN`` is for good, whatever is said later.
    """

    name: str
    can_abort = True
    _traces_failed_load = False

    def __init__(self, model: str, install_fault: InstallFault = InstallFault.NONE) -> None:
        self.model = model
        self.install_fault = install_fault
        self.stamp = WeightStamp()
        self._book = JobBook()
        self._manifest: tuple[TensorSpec, ...] = ()
        self._batches_run = 0
        self._state, self._detail = EngineState.LOADING, ""
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run_to_the_end, name="rollout-engine", daemon=True)

    def wait_loaded(self, timeout_s: float) -> bool:
        """True when the model is loaded, or could not be, within the time; see ``status``."""
        return self._loaded.wait(timeout_s)

    def status(self) -> EngineStatus:
        """State, its reason, and counts; never waits."""
        state, detail = self._state, self._detail
        if state in (EngineState.LOADING, EngineState.READY) and (ailment := self._ailment()):
            state, detail = EngineState.BROKEN, ailment
        num_open = len(self._book)
        num_running = min(num_open, self._num_running())
        return EngineStatus(
            state,
            detail,
            num_waiting=num_open - num_running,
            num_running=num_running,
            batches_run=self._batches_run,
            completions_made=self._book.completions_made,
        )

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Name, shape and dtype of every parameter of the checkpoint, tied weights once; empty until it is loaded."""
        return self._manifest

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> list[GenerationJob]:
        """Begins to answer them. Raises EngineUnavailable unless the engine is ready."""

    def abort(self, jobs: Sequence[GenerationJob] | None = None) -> int:
        """Ends these, or everything waiting or running; their completions say ``abort``. Returns how many."""
        asked = [job for job in self._book.open_jobs() if jobs is None or job in jobs]
        for job in asked:
            job.abort()
        return len(asked)

    @abstractmethod
    def reset_cache(self, kind: CacheKind, timeout_s: float, given_up: threading.Event) -> bool:
        """Empties one cache, after all that was submitted before has ended; False when it could not in time.

        Ends soon after ``given_up`` is set, too: its caller has gone.
        """

    @abstractmethod
    def install(self, weights: Mapping[str, Any], stamp: WeightStamp, timeout_s: float) -> InstalledWeights:
        """Copies all tensors into the model while it computes nothing; later completions carry ``stamp``.

        Raises:
            RoundFailed: not loaded; ``torn`` says whether the model may hold a part of the weights.
        """

    def close(self, timeout_s: float) -> None:
        """Aborts what is open and ends the thread within the time. May be called again.

        A load cannot be interrupted and is not waited for.
        """
        self._stop(EngineState.CLOSED, "the server is shutting down")
        self._thread.join(timeout_s if self._loaded.is_set() else 0.0)

    # --- for subclasses -------------------------------------------------------------------------
    @abstractmethod
    def _run(self) -> None:
        """Loads the model, calls ``_become_ready`` and works until the engine is stopped. On the engine's thread."""

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
        if self._state is EngineState.LOADING:
            self._state = EngineState.READY
        self._loaded.set()

    def _stop(self, state: EngineState, detail: str) -> None:
        """``BROKEN`` or ``CLOSED``, and why; ends open jobs. A running job hands over what it has, if it can."""
        if self._state is not EngineState.BROKEN:
            self._state, self._detail = state, detail
        self._refuse_work()
        for job in self._book.open_jobs():
            if state is EngineState.BROKEN or not self._hands_over(job):
                self._book.fail(job, EngineUnavailable(f"the engine is {state}: {detail}"))
            job.abort()

    @abstractmethod
    def _refuse_work(self) -> None:
        """Takes nothing more: what is submitted from now on fails."""

    @abstractmethod
    def _hands_over(self, job: GenerationJob) -> bool:
        """Whether a job that is aborted now will still be answered."""

    def _finish_unstarted(self, job: GenerationJob) -> None:
        self._book.finish(job, job.completion(self.stamp))

    def _run_to_the_end(self) -> None:
        try:
            self._run()
        except UserError as error:
            self._stop(EngineState.BROKEN, str(error))
        except Exception as error:  # top of the thread
            # A model that does not load is the user's to mend, and the server's last line says how.
            where = self._loaded.is_set() or self._traces_failed_load or _log.isEnabledFor(logging.DEBUG)
            _log.error("the engine's thread ends", exc_info=where)
            self._stop(EngineState.BROKEN, f"{type(error).__name__}: {error}")
        finally:
            self._loaded.set()


def require_loaded(model: ModelT | None) -> ModelT:
    """The model, or a part of it. Raises EngineUnavailable while there is none."""
    if model is None:
        raise EngineUnavailable("the model is not loaded yet; ask again later")
    return model
