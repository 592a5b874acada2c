"""Runs SwiftGenerator as an engine: one thread owns the model, requests of all callers share its batches.

Requests are encoded by a small pool, queue up, and are generated together where their sampling is equal. A
request that cannot be encoded or generated fails alone. Weights are copied on the same thread, between two batches or
between two tokens of one; what was computed of its answers stays.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING

import torch

from swift_stage2.errors import EngineUnavailable, InstallFailed
from swift_stage2.rollout_server.engine import (
    AWAKE,
    Engine,
    GenerationJob,
    GenerationRequest,
    InstalledWeights,
    JobAborted,
    SleepMode,
    WeightStamp,
)
from swift_stage2.runtime.memory import HeapTrim
from swift_stage2.servers.batching import BatchQueue
from swift_stage2.weights.tensors import checksum_tensor, checksums_by_name
from swift_stage2.wire import TensorSpec

if TYPE_CHECKING:  # ms-swift takes seconds to import; the engine's thread does it
    from swift_stage2.rollout_server.swift_generator import SwiftGenerator
    from swift_stage2.rollout_server.weight_source import WeightSource

_log = logging.getLogger(__name__)
_ENCODER_THREADS = 4


def copy_weights(parameters: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)


class TransformersRolloutEngine(Engine):
    """An ``Engine`` on Hugging Face's ``generate``. ``load`` builds the generator, on the engine's thread."""

    name = "transformers"
    copy = staticmethod(copy_weights)

    def __init__(
        self,
        load: Callable[[], SwiftGenerator],
        *,
        model: str,
        max_batch_size: int = 64,
        sleep_mode: SleepMode = AWAKE,
    ) -> None:
        super().__init__(model, sleep_mode)
        self._load = load
        self._queue: BatchQueue[GenerationJob] = BatchQueue(max_batch_size=max_batch_size)
        self._encoders = ThreadPoolExecutor(_ENCODER_THREADS, thread_name_prefix="encode")
        self._running: tuple[GenerationJob, ...] = ()
        self._generator: SwiftGenerator | None = None
        self._places: dict[str, tuple[torch.Size, torch.device]] = {}  # of parameters that are awake
        self._late_copy: Future[InstalledWeights] | None = None  # that outlived its install
        self._thread.start()

    @property
    def generator(self) -> SwiftGenerator:
        """The model and its template, once they are loaded."""
        assert self._generator is not None
        return self._generator

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GenerationJob]:
        """As ``Engine.submit``: encodes and queues."""
        self._require_ready()
        self._queue.expect(len(requests))
        jobs = [GenerationJob(request) for request in requests]
        self._open.update(jobs)
        for job in jobs:
            try:
                self._encoders.submit(self._encode, job)
            except RuntimeError:  # the engine has ended since it was ready
                self._fail(job, EngineUnavailable("the engine was shut down"))
        return jobs

    def sum_arrived(self, weights: WeightSource) -> None:
        weights.require(checksums_by_name(weights.tensors))

    @property
    def may_read(self) -> bool:
        return self._late_copy is not None and not self._late_copy.done()

    def install(self, weights: WeightSource, stamp: WeightStamp, timeout_s: float) -> InstalledWeights:
        """As ``Engine.install``. A copy that never began is taken back: then the old weights are whole."""
        tensors, arrived = weights.tensors, weights.arrived
        try:
            future = self._queue.put_task(lambda: self._copy_weights(tensors, arrived, stamp)).future
            installed: InstalledWeights = future.result(timeout_s)
        except FutureTimeout as error:
            if has_begun := not future.cancel():
                self._late_copy = future
            raise InstallFailed(
                f"the engine did not load within timeout_s={timeout_s:.1f}", torn=has_begun
            ) from error
        except (CancelledError, EngineUnavailable) as error:
            raise InstallFailed("the engine was shut down before it loaded") from error
        except (RuntimeError, KeyError) as error:
            reason = f"the weights could not be loaded: {type(error).__name__}: {error}"
            raise InstallFailed(reason, torn=True) from error
        return installed

    # --- encoder threads ------------------------------------------------------------------------
    def _encode(self, job: GenerationJob) -> None:
        try:
            if not job.aborted:
                job.row = self.generator.encode_row(job.request, lambda: job.aborted)
        except JobAborted:
            pass  # ended below, as one that was aborted before or after
        except Exception as error:  # top of a pool thread: a broken sample is that request's own failure
            self._queue.withdraw()
            self._fail(job, error)
            return
        if job.aborted:
            self._queue.withdraw()
            self._fail(job, JobAborted())
            return
        try:
            self._queue.put(job, expected=True)
        except EngineUnavailable as error:
            self._fail(job, error)

    # --- engine thread --------------------------------------------------------------------------
    def _run(self) -> None:
        self._generator = self._load()
        self._generator.prepare()
        parameters = self._generator.model.named_parameters
        self._manifest = tuple(
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in parameters()
        )
        self._places = {name: (tensor.shape, tensor.device) for name, tensor in parameters()}
        if self.sleep_mode.level:
            self._give_memory_back()
        self._become_ready()
        while (work := self._queue.take()) is not None:
            for job in work:
                if job.aborted:
                    self._fail(job, JobAborted())
            if jobs := [job for job in work if not job.aborted]:
                self._run_batch(jobs)
            del work, jobs  # else pictures until more work comes

    def _run_batch(self, jobs: list[GenerationJob]) -> None:
        stamps = [(self.stamp, 0)]  # each with the number of tokens that were there when it came

        def between_tokens(num_tokens: int) -> list[bool]:
            # A batch that nobody waits for ends here, and tasks run behind it, when its memory is free.
            if not all(job.aborted for job in jobs):
                self._queue.run_tasks()
            if self.stamp is not stamps[-1][0]:
                stamps.append((self.stamp, num_tokens))
            return [job.aborted for job in jobs]

        self._running = tuple(jobs)
        try:
            rows = self.generator.generate_rows(
                [job.row for job in jobs if job.row is not None], jobs[0].request.sampling, between_tokens
            )
        except torch.AcceleratorError:
            for job in jobs:
                self._fail(job, EngineUnavailable("the accelerator failed under this batch"))
            raise  # nothing on the device can be trusted any more
        except Exception as error:  # a row that the model cannot take must not fail its neighbours
            if len(jobs) == 1:
                self._fail(jobs[0], error)
                return
            _log.warning("a batch of %d failed and is run again one by one: %s", len(jobs), error)
            for job in jobs:
                self._run_batch([job])
            return
        finally:
            self._running = ()
        for job, row in zip(jobs, rows, strict=True):
            if job.aborted:
                self._fail(job, JobAborted())
            else:
                self._finish(job, job.completion(row, spans_of(stamps, len(row.token_ids))))

    def _copy_weights(
        self, weights: Mapping[str, torch.Tensor], arrived: Mapping[str, str], stamp: WeightStamp
    ) -> InstalledWeights:
        parameters = dict(self.generator.model.named_parameters())
        self.stamp, self.is_asleep = stamp, False
        for name, parameter in parameters.items():
            if (place := self._places[name]) != (parameter.shape, parameter.device):
                parameter.data = parameter.data.new_empty(place[0], device=place[1])
        with torch.no_grad():
            self.copy(parameters, weights)
        resident = checksums_by_name({name: parameters[name] for name in weights})
        for name, tensor in weights.items():
            dtype = parameters[name].dtype
            if tensor.dtype != dtype and resident[name] == checksum_tensor(tensor.to(dtype)):
                resident[name] = arrived[name]
        return InstalledWeights(loaded=tuple(weights), arrived=arrived, resident=resident)

    def _give_memory_back(self) -> None:
        """Parameters stay the objects that they are, and with them ties and hooks; buffers stay as they are."""
        for parameter in self.generator.model.parameters():
            is_kept = self.sleep_mode.level == 1
            parameter.data = parameter.data.cpu() if is_kept else parameter.data.new_empty(0)
        self.is_asleep = True
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        HeapTrim().now()

    # --- any thread -----------------------------------------------------------------------------
    def _fall_asleep(self) -> Future[None]:
        return self._queue.put_task(self._give_memory_back).future

    def _num_running(self) -> int:
        return len(self._running)

    def _refuse_work(self) -> None:
        self._queue.close()
        self._encoders.shutdown(wait=False, cancel_futures=True)


def spans_of(stamps: Sequence[tuple[WeightStamp, int]], num_tokens: int) -> list[tuple[WeightStamp, int]]:
    """Tokens of one row by stamp; those that came when it had ended left out."""
    begins = [begin for _, begin in stamps if begin < num_tokens or not begin]
    ends = [*begins[1:], num_tokens]
    return [(stamp, end - begin) for (stamp, begin), end in zip(stamps, ends, strict=False)]
