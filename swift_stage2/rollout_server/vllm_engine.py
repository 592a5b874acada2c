"""Runs VllmGenerator as an engine: one thread with an event loop of its own, in front of vLLM's processes.

Every request is a task of that loop and enters vLLM's running batch by itself, whoever asked for it. Weights are
installed once every request has ended, so that no completion ever mixes two versions; the caches of the old weights
go with them. When vLLM's processes die, open requests fail and the engine is broken for good.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from swift_stage2.errors import EngineUnavailable, InstallFailed
from swift_stage2.rollout_server.engine import (
    CacheKind,
    Engine,
    EngineState,
    GenerationJob,
    GenerationRequest,
    InstalledWeights,
    JobAborted,
    WeightStamp,
    require_loaded,
)
from swift_stage2.rollout_server.vllm_weights import installed_weights

if TYPE_CHECKING:  # ms-swift and vLLM take many seconds to import; the engine's thread does it
    from swift_stage2.rollout_server.vllm_generator import VllmGenerator
    from swift_stage2.rollout_server.weight_source import OfferedWeights

_LIVENESS_POLL_S = 0.1
_ABORT_POLL_S = 0.02
_RPC_MARGIN_S = 1.0
_SHUTDOWN_TIMEOUT_S = 2.0  # then vLLM kills them
_DEAD = "vLLM's processes have died; start the server again"


@dataclass(eq=False, slots=True)
class VllmJob(GenerationJob):
    """A job that tells the engine of its abort, which vLLM must be told by name."""

    on_abort: Callable[[VllmJob], None] = lambda job: None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: bool = False

    def abort(self) -> None:
        if not self.aborted and not self.future.done():
            self.aborted = True
            self.on_abort(self)


class VllmRolloutEngine(Engine):
    """An ``Engine`` on vLLM. ``build`` makes the generator, on the engine's thread and loop.

    ``status().batches_run`` stays 0: vLLM has one batch, which requests enter and leave.
    """

    name = "vllm"
    can_resume = True
    _traces_failed_load = True

    def __init__(self, build: Callable[[], VllmGenerator], *, model: str) -> None:
        super().__init__(model)
        self._build = build
        self._lent: list[BinaryIO] = []  # to workers, in loads that are not known to be over
        self._generator: VllmGenerator | None = None
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GenerationJob]:
        """As ``Engine.submit``. The i-th request's seed is the call's plus i, as ms-swift's batch engine has it."""
        self._require_ready()
        jobs = [
            VllmJob(
                replace(request, seed=None if request.seed is None else request.seed + i),
                on_abort=self._tell_abort,
            )
            for i, request in enumerate(requests)
        ]
        self._book.add(jobs)
        with suppress(RuntimeError):  # the loop has just been closed
            self._loop.call_soon_threadsafe(self._spawn, self._answer, jobs)
        if self.status().state is not EngineState.READY:  # it ended before it knew of these
            for job in jobs:
                self._book.fail(job, EngineUnavailable("the engine was shut down"))
        return list(jobs)

    def reset_cache(self, kind: CacheKind, timeout_s: float, given_up: threading.Event) -> bool:
        """As ``Engine.reset_cache``; raises EngineUnavailable unless the engine is ready."""
        settled = self._book.settle(timeout_s, given_up)
        return settled and self._call(require_loaded(self._generator).reset_cache(kind), timeout_s)

    @property
    def may_read(self) -> bool:
        return bool(self._lent)

    def install(
        self,
        weights: OfferedWeights,
        stamp: WeightStamp,
        timeout_s: float,
        arrived: Mapping[str, str] | None = None,
    ) -> InstalledWeights:
        """As ``Engine.install``. ``resident`` is read back from vLLM's own parameters, fused or cut as they
        are: ``vllm_weights`` says how. ``loaded`` are the tensors of which any part was found there. The workers open
        and sum the weights themselves.
        """
        generator = self._generator
        if generator is None:
            raise InstallFailed("the model is not loaded yet")
        end = time.monotonic() + timeout_s
        # Nobody is let in any more, but vLLM may still be at what a lost caller has asked.
        if not self._book.settle(timeout_s, threading.Event()):
            raise InstallFailed(f"completions in the making did not end within {timeout_s:.1f} s")
        left_s = end - time.monotonic()
        try:
            work = self._install(generator, weights, stamp, left_s)
            installed: InstalledWeights = self._call(work, left_s + _RPC_MARGIN_S)
            return installed
        except EngineUnavailable as error:
            raise InstallFailed(f"the weights were not loaded: {error}", torn=True) from error

    # --- engine thread --------------------------------------------------------------------------
    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        """Builds inside the running loop, so that vLLM starts to listen to its processes at once."""
        self._generator = generator = self._build()
        try:
            self._manifest = generator.manifest()
            self._become_ready()
            while self._state is EngineState.READY and not generator.is_dead:
                await asyncio.sleep(_LIVENESS_POLL_S)
            if generator.is_dead:
                self._stop(EngineState.BROKEN, _DEAD)
            else:  # what was aborted at the close still hands over what it has
                await asyncio.wait([*self._tasks, self._loop.create_task(asyncio.sleep(0))], timeout=1.0)
        finally:
            generator.shut_down(_SHUTDOWN_TIMEOUT_S)
            self._generator = None  # nothing of vLLM is left for the interpreter's end
            del generator
            self._close_lent()
            for task in self._tasks:
                task.cancel()
            await asyncio.sleep(0)

    def _spawn(self, do: Callable[[VllmJob], Coroutine[Any, Any, None]], jobs: Sequence[VllmJob]) -> None:
        for job in jobs:
            task = self._loop.create_task(do(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, job: VllmJob) -> None:
        from swift_stage2.rollout_server.vllm_generator import EngineDeadError, request_failure

        try:
            if job.future.done():
                return
            job.started = True
            completion = await require_loaded(self._generator).answer(
                job.request, job.request_id, self.stamp, lambda: job.aborted
            )
            self._book.finish(job, completion)
        except JobAborted:
            self._finish_unstarted(job)
        except EngineDeadError:
            self._book.fail(job, EngineUnavailable(_DEAD))
        except asyncio.CancelledError:
            self._book.fail(job, EngineUnavailable("the engine was shut down"))
            raise
        except Exception as error:  # a request that cannot be answered fails alone
            self._book.fail(job, request_failure(error))

    async def _end(self, job: VllmJob) -> None:
        """Repeats the abort until the job has ended: vLLM forgets an abort of what it does not hold yet."""
        while not job.future.done():
            if not job.started:
                self._finish_unstarted(job)
                return
            await require_loaded(self._generator).abort(job.request_id)
            await asyncio.sleep(_ABORT_POLL_S)

    async def _install(
        self,
        generator: VllmGenerator,
        weights: OfferedWeights,
        stamp: WeightStamp,
        timeout_s: float,
    ) -> InstalledWeights:
        try:
            path, file = weights.lend()
            self._lent.append(file)
            async with asyncio.timeout(timeout_s):
                reports = await generator.load_weights(path, str(self.install_fault))
                self._close_lent()  # workers do one thing after another: earlier loads are over
                for kind in CacheKind:
                    if not await generator.reset_cache(kind):
                        raise InstallFailed(f"vLLM did not reset its {kind} cache", torn=True)
            installed = installed_weights(weights.tensors, reports)
            self.stamp = stamp
            return installed
        except TimeoutError as error:
            raise InstallFailed(f"vLLM did not load within {timeout_s:.1f} s", torn=True) from error
        except InstallFailed:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise InstallFailed(f"the weights could not be loaded: {reason[-1]}", torn=True) from error

    def _close_lent(self) -> None:
        lent, self._lent = self._lent, []
        for file in lent:
            file.close()

    # --- any thread -----------------------------------------------------------------------------
    def _call(self, work: Any, timeout_s: float) -> Any:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise EngineUnavailable("the engine was shut down") from error
        try:
            return future.result(timeout_s)
        except FutureTimeout as error:
            future.cancel()
            raise EngineUnavailable(f"the engine did not answer within {timeout_s:.1f} s") from error
        except CancelledError as error:
            raise EngineUnavailable("the engine was shut down") from error
        except Exception as error:
            if self.status().state is EngineState.BROKEN:
                raise EngineUnavailable(f"the engine is broken: {_DEAD}") from error
            raise

    def _tell_abort(self, job: VllmJob) -> None:
        try:
            self._loop.call_soon_threadsafe(self._spawn, self._end, [job])
        except RuntimeError:
            self._book.fail(job, EngineUnavailable("the engine was shut down"))

    def _ailment(self) -> str:
        generator = self._generator
        return super()._ailment() or (_DEAD if generator is not None and generator.is_dead else "")

    def _num_running(self) -> int:
        generator = self._generator
        return generator.num_running if generator is not None else 0

    def _refuse_work(self) -> None:
        """Nothing to close: ``submit`` looks at the state again."""

    def _hands_over(self, job: GenerationJob) -> bool:
        return True
