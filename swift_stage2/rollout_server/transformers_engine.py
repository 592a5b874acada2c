"""Runs SwiftGenerator as an engine: one thread owns the model, requests of all callers share its batches.

Requests are encoded by a small pool, queue up, and are generated together where their sampling is equal. A
request that cannot be encoded or generated fails alone. Weights are copied between two batches, on the
same thread, so that no completion ever mixes two versions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from swift_stage2.errors import EngineUnavailable, RoundFailed
from swift_stage2.rollout_protocol import Completion, TensorSpec
from swift_stage2.rollout_server.batching import BatchQueue, Task
from swift_stage2.rollout_server.engine import (
    EngineState,
    EngineStatus,
    GenerationRequest,
    InstalledWeights,
    Sampling,
    Ticket,
    WeightStamp,
)
from swift_stage2.weight_checksum import checksum_tensor

if TYPE_CHECKING:  # ms-swift takes seconds to import; the engine's thread does it
    from swift_stage2.rollout_server.swift_generator import EncodedRow, SwiftGenerator

_log = logging.getLogger(__name__)
_ENCODER_THREADS = 4


class InstallFault(StrEnum):
    """Faults of the load that tests switch on, to see whether a proof shows them."""

    NONE = "none"
    SKIP_COPY = "skip_copy"
    FLIP_ELEMENT = "flip_element"


@dataclass(eq=False, slots=True)
class _Job:
    """One request on its way; a ``Ticket``."""

    request: GenerationRequest
    future: Future[Completion] = field(default_factory=Future)
    row: EncodedRow | None = None
    aborted: bool = False
    alone: bool = False

    @property
    def key(self) -> tuple[Sampling, bool, int | None]:
        return self.request.sampling, self.request.with_log_probs, id(self) if self.alone else None

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # only the engine ends it

    def abort(self) -> None:
        self.aborted = True


class TransformersRolloutEngine:
    """An ``Engine`` on Hugging Face's ``generate``. ``load`` builds the generator, on the engine's thread."""

    name = "transformers"
    can_abort = True

    def __init__(
        self,
        load: Callable[[], SwiftGenerator],
        *,
        model: str,
        max_batch_size: int = 64,
        install_fault: InstallFault = InstallFault.NONE,
    ) -> None:
        self.model = model
        self.install_fault = install_fault
        self._load = load
        self._queue: BatchQueue[_Job] = BatchQueue(max_batch_size=max_batch_size)
        self._encoders = ThreadPoolExecutor(_ENCODER_THREADS, thread_name_prefix="encode")
        self._lock = threading.Lock()
        self._open_jobs: set[_Job] = set()
        self._state, self._detail = EngineState.LOADING, ""
        self._running: tuple[_Job, ...] = ()
        self._batches_run = self._completions_made = 0
        self._stamp = WeightStamp()
        self._manifest: tuple[TensorSpec, ...] = ()
        self._loaded = threading.Event()
        self._generator: SwiftGenerator | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)
        self._thread.start()

    @property
    def stamp(self) -> WeightStamp:
        return self._stamp

    def wait_loaded(self, timeout_s: float) -> bool:
        """True when the model is loaded, or could not be, within the time; see ``status``."""
        return self._loaded.wait(timeout_s)

    def status(self) -> EngineStatus:
        state, detail = self._state, self._detail
        if not self._thread.is_alive() and state in (EngineState.LOADING, EngineState.READY):
            state, detail = EngineState.BROKEN, "the engine's thread has died"
        num_open, num_running = len(self._open_jobs), len(self._running)
        return EngineStatus(
            state,
            detail,
            num_waiting=max(0, num_open - num_running),
            num_running=num_running,
            batches_run=self._batches_run,
            completions_made=self._completions_made,
        )

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Name, shape and dtype of every parameter, tied weights once; empty until the model is loaded."""
        return self._manifest

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Ticket]:
        """Encodes and queues. Raises EngineUnavailable unless the engine is ready."""
        status = self.status()
        if status.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {status.state}: {status.detail or 'ask again later'}")
        self._queue.expect(len(requests))
        jobs = [_Job(request) for request in requests]
        with self._lock:
            self._open_jobs.update(jobs)
        for job in jobs:
            self._encoders.submit(self._encode, job)
        return list(jobs)

    def abort(self) -> int:
        with self._lock:
            jobs = list(self._open_jobs)
        for job in jobs:
            job.abort()
        for job in jobs:
            if self._queue.remove(job):
                self._finish_unstarted(job)
        return len(jobs)

    def settle(self, timeout_s: float) -> bool:
        with self._lock:
            futures = [job.future for job in self._open_jobs]
        return not wait(futures, timeout_s).not_done

    def install(
        self, weights: Mapping[str, torch.Tensor], stamp: WeightStamp, timeout_s: float
    ) -> InstalledWeights:
        """As ``Engine.install``. A copy that never began is taken back: then the old weights are whole."""
        try:
            future = self._queue.put_task(lambda: self._copy_weights(weights, stamp))
            installed: InstalledWeights = future.result(timeout_s)
        except FutureTimeout as error:
            raise RoundFailed(
                f"the engine did not load within timeout_s={timeout_s:.1f}", torn=not future.cancel()
            ) from error
        except (CancelledError, EngineUnavailable) as error:
            raise RoundFailed("the engine was shut down before it loaded") from error
        except (RuntimeError, KeyError) as error:
            reason = f"the weights could not be loaded: {type(error).__name__}: {error}"
            raise RoundFailed(reason, torn=True) from error
        return installed

    def close(self, timeout_s: float) -> None:
        """Aborts what runs, drops what waits, ends the thread within the time. May be called again."""
        self._stop(EngineState.CLOSED, "the server is shutting down")
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self._thread.join(timeout_s)

    # --- encoder threads ------------------------------------------------------------------------
    def _encode(self, job: _Job) -> None:
        try:
            if not job.aborted:
                job.row = self._ready_generator().encode_row(job.request)
        except Exception as error:  # top of a pool thread: a broken sample is that request's own failure
            self._queue.withdraw()
            self._fail(job, error)
            return
        if job.aborted:
            self._queue.withdraw()
            self._finish_unstarted(job)
            return
        try:
            self._queue.put(job, expected=True)
        except EngineUnavailable as error:
            self._fail(job, error)

    # --- engine thread --------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._generator = self._load()
            self._generator.prepare()
            self._manifest = tuple(
                TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in self._generator.model.named_parameters()
            )
            self._state = EngineState.READY
            self._loaded.set()
            while (work := self._queue.take()) is not None:
                self._do(work)
        except Exception as error:  # top of the thread
            _log.exception("the engine's thread ends")
            self._stop(EngineState.BROKEN, f"{type(error).__name__}: {error}")
        finally:
            self._loaded.set()

    def _do(self, work: list[_Job] | Task) -> None:
        if isinstance(work, Task):
            if work.future.set_running_or_notify_cancel():
                try:
                    work.future.set_result(work.call())
                except Exception as error:  # handed to whoever waits for the task
                    work.future.set_exception(error)
            return
        for job in work:
            if job.aborted:
                self._finish_unstarted(job)
        jobs = [job for job in work if not job.aborted]
        if jobs:
            self._run_batch(jobs)

    def _run_batch(self, jobs: list[_Job]) -> None:
        stamp = self._stamp
        self._running = tuple(jobs)
        try:
            rows = self._ready_generator().generate_rows(
                [job.row for job in jobs if job.row is not None],
                jobs[0].request.sampling,
                with_log_probs=jobs[0].request.with_log_probs,
                aborted=lambda: [job.aborted for job in jobs],
            )
        except torch.AcceleratorError:
            for job in jobs:
                self._fail(job, EngineUnavailable("the accelerator failed under this batch"))
            raise  # nothing on the device can be trusted any more
        except Exception as error:  # a row that the model cannot take must not fail its neighbours
            self._running = ()
            self._retry_alone(jobs, error)
            return
        self._running = ()
        self._batches_run += 1
        for job, row in zip(jobs, rows, strict=True):
            completion = self._completion(
                job, stamp, row.text, row.token_ids, row.end.name.lower(), row.log_probs
            )
            self._finish(job, completion)

    def _retry_alone(self, jobs: list[_Job], error: Exception) -> None:
        if len(jobs) == 1:
            self._fail(jobs[0], error)
            return
        _log.warning("a batch of %d failed and is run again one by one: %s", len(jobs), error)
        for job in jobs:
            job.alone = True
            try:
                self._queue.put(job)
            except EngineUnavailable as closed:
                self._fail(job, closed)

    def _copy_weights(self, weights: Mapping[str, torch.Tensor], stamp: WeightStamp) -> InstalledWeights:
        parameters = dict(self._ready_generator().model.named_parameters())
        with torch.no_grad():
            if self.install_fault is not InstallFault.SKIP_COPY:
                for name, tensor in weights.items():
                    parameters[name].copy_(tensor)
            if self.install_fault is InstallFault.FLIP_ELEMENT:
                next(iter(parameters.values())).view(-1)[0] += 1
        self._stamp = stamp
        resident = {name: checksum_tensor(parameters[name]) for name in weights}
        return InstalledWeights(loaded=tuple(weights), resident=resident)

    # --- any thread -----------------------------------------------------------------------------
    def _ready_generator(self) -> SwiftGenerator:
        if self._generator is None:
            raise EngineUnavailable("the model is not loaded yet; ask again later")
        return self._generator

    def _completion(
        self,
        job: _Job,
        stamp: WeightStamp,
        text: str,
        token_ids: tuple[int, ...],
        finish_reason: str,
        log_probs: tuple[float, ...] | None,
    ) -> Completion:
        return Completion(
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            prompt_token_ids=job.row.prompt_token_ids if job.row else (),
            images_size=job.row.images_size if job.row else (),
            log_probs=log_probs,
            weight_version=stamp.version,
            run_id=stamp.run_id,
        )

    def _finish_unstarted(self, job: _Job) -> None:
        self._finish(job, self._completion(job, self._stamp, "", (), "abort", None))

    def _finish(self, job: _Job, completion: Completion) -> None:
        if self._settle_job(job):
            self._completions_made += 1
            job.future.set_result(completion)

    def _fail(self, job: _Job, error: Exception) -> None:
        if self._settle_job(job):
            job.future.set_exception(error)

    def _settle_job(self, job: _Job) -> bool:
        """True for the one caller that may end the job's future."""
        with self._lock:
            is_open = job in self._open_jobs
            self._open_jobs.discard(job)
            return is_open

    def _stop(self, state: EngineState, detail: str) -> None:
        if self._state is not EngineState.BROKEN:
            self._state, self._detail = state, detail
        for item in self._queue.close():
            if isinstance(item, Task):
                item.future.cancel()
        with self._lock:
            jobs = list(self._open_jobs)
        for job in jobs:
            job.abort()  # a running batch hands over what it has
            if state is EngineState.BROKEN or job not in self._running:
                self._fail(job, EngineUnavailable(f"the engine is {state}: {detail}"))
