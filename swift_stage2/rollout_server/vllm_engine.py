"""Runs VllmGenerator as an engine: one thread with an event loop of its own, in front of vLLM's processes.

Every request is a task of that loop and enters vLLM's running batch by itself, whoever asked for it. Weights are
installed while no request is inside, so that no completion ever mixes two versions; the caches of the old weights
go with them. When vLLM's processes die, open requests fail and the engine is broken for good.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from swift_stage2.errors import EngineUnavailable, RoundFailed, UserError
from swift_stage2.rollout_server.engine import (
    CacheKind,
    EngineState,
    EngineStatus,
    GenerationRequest,
    InstalledWeights,
    InstallFault,
    Ticket,
    WeightStamp,
)
from swift_stage2.rollout_server.engine_life import EngineLife, require_ready
from swift_stage2.rollout_server.jobs import Job, JobBook
from swift_stage2.rollout_server.load_trace import Piece, resident_checksums
from swift_stage2.rollout_server.shared_staging import SharedStaging
from swift_stage2.servers.protocol import TensorSpec

if TYPE_CHECKING:  # ms-swift and vLLM take many seconds to import; the engine's thread does it
    from swift_stage2.rollout_server.vllm_generator import VllmGenerator

_log = logging.getLogger(__name__)
_LIVENESS_POLL_S = 0.1
_ABORT_POLL_S = 0.02
_RPC_MARGIN_S = 1.0
_SHUTDOWN_TIMEOUT_S = 2.0  # then vLLM kills them

ResultT = TypeVar("ResultT")


@dataclass(eq=False, slots=True)
class VllmJob(Job):
    """A job that tells the engine of its abort, which vLLM must be told by name."""

    on_abort: Callable[[VllmJob], None] = lambda job: None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: bool = False

    def abort(self) -> None:
        if not self.aborted and not self.future.done():
            self.aborted = True
            self.on_abort(self)


class VllmRolloutEngine:
    """An ``Engine`` on vLLM. ``build`` makes the generator, on the engine's thread and loop."""

    name = "vllm"
    can_abort = True

    def __init__(
        self,
        build: Callable[[], VllmGenerator],
        *,
        model: str,
        install_fault: InstallFault = InstallFault.NONE,
    ) -> None:
        self.model = model
        self.install_fault = install_fault
        self._build = build
        self._book = JobBook()
        self._stamp = WeightStamp()
        self._manifest: tuple[TensorSpec, ...] = ()
        self._staging: SharedStaging | None = None
        self._abandoned: list[SharedStaging] = []  # a worker may still read them
        self._generator: VllmGenerator | None = None
        self._loop = asyncio.new_event_loop()
        self._door = _Door()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._life = EngineLife(self._run)
        self._life.start()

    @property
    def stamp(self) -> WeightStamp:
        return self._stamp

    def wait_loaded(self, timeout_s: float) -> bool:
        """True when the model is loaded, or could not be, within the time; see ``status``."""
        return self._life.wait_loaded(timeout_s)

    def status(self) -> EngineStatus:
        """``batches_run`` stays 0: vLLM has one batch, which requests enter and leave."""
        state, detail = self._life.state
        generator = self._generator
        if state is EngineState.READY and generator is not None and generator.is_dead:
            state, detail = EngineState.BROKEN, _DEAD
        num_open = len(self._book)
        num_running = min(num_open, generator.num_running) if generator is not None else 0
        return EngineStatus(
            state,
            detail,
            num_waiting=num_open - num_running,
            num_running=num_running,
            completions_made=self._book.completions_made,
        )

    def manifest(self) -> tuple[TensorSpec, ...]:
        """The checkpoint's names, not vLLM's fused ones; tied weights once; empty until it is loaded."""
        return self._manifest

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Ticket]:
        """Starts them all. The i-th request's seed is the call's plus i, as ms-swift's batch engine has it.

        Raises EngineUnavailable unless the engine is ready.
        """
        status = self.status()
        require_ready(status.state, status.detail)
        jobs = [
            VllmJob(_with_own_seed(request, i), on_abort=self._tell_abort)
            for i, request in enumerate(requests)
        ]
        self._book.add(jobs)
        with suppress(RuntimeError):  # the loop has just been closed
            self._loop.call_soon_threadsafe(self._start, jobs)
        if self.status().state is not EngineState.READY:  # it ended before it knew of these
            for job in jobs:
                self._book.fail(job, EngineUnavailable("the engine was shut down"))
        return list(jobs)

    def abort(self, tickets: Sequence[Ticket] | None = None) -> int:
        jobs = [job for job in self._book.open_jobs() if tickets is None or job in tickets]
        for job in jobs:
            job.abort()
        return len(jobs)

    def reset_cache(self, kind: CacheKind, timeout_s: float, given_up: threading.Event) -> bool:
        """As ``Engine.reset_cache``; raises EngineUnavailable unless the engine is ready."""
        settled = self._book.settle(timeout_s, given_up)
        return settled and self._call(self._ready_generator().reset_cache(kind), timeout_s)

    def install(
        self, weights: Mapping[str, torch.Tensor], stamp: WeightStamp, timeout_s: float
    ) -> InstalledWeights:
        """As ``Engine.install``. ``resident`` is read back from vLLM's own parameters, fused or cut as they
        are: ``load_trace`` says how. ``loaded`` are the tensors of which any part was found there.
        """
        generator = self._generator
        if generator is None:
            raise RoundFailed("the model is not loaded yet")
        work = self._install(generator, weights, stamp, timeout_s)
        try:
            installed: InstalledWeights = self._call(work, timeout_s + _RPC_MARGIN_S)
            return installed
        except EngineUnavailable as error:
            raise RoundFailed(f"the weights were not loaded: {error}", torn=True) from error

    def close(self, timeout_s: float) -> None:
        """Aborts what is open, ends vLLM's processes and the thread within the time. May be called again.

        A load cannot be interrupted and is not waited for; the processes it has started end with the server's.
        """
        self._stop(EngineState.CLOSED, "the server is shutting down")
        self._closing = True
        self._life.join(0.0 if self._life.is_loading else timeout_s)

    # --- engine thread --------------------------------------------------------------------------
    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except UserError as error:
            self._stop(EngineState.BROKEN, str(error))
        except Exception as error:  # top of the thread
            _log.exception("the engine's thread ends")
            self._stop(EngineState.BROKEN, f"{type(error).__name__}: {error}")
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        """Builds inside the running loop, so that vLLM starts to listen to its processes at once."""
        self._generator = generator = self._build()
        try:
            self._manifest = generator.manifest()
            self._staging = SharedStaging()
            self._life.become_ready()
            while not self._closing and not generator.is_dead:
                await asyncio.sleep(_LIVENESS_POLL_S)
            if generator.is_dead:
                self._stop(EngineState.BROKEN, _DEAD)
            else:  # what was aborted at the close still hands over what it has
                await asyncio.wait([*self._tasks, self._loop.create_task(asyncio.sleep(0))], timeout=1.0)
        finally:
            generator.shut_down(_SHUTDOWN_TIMEOUT_S)
            self._generator = None  # nothing of vLLM is left for the interpreter's end
            del generator
            if self._staging is not None:
                self._staging.close()
            self._close_abandoned()
            for task in self._tasks:
                task.cancel()
            await asyncio.sleep(0)

    def _start(self, jobs: Sequence[VllmJob]) -> None:
        for job in jobs:
            self._spawn(self._answer(job))

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, job: VllmJob) -> None:
        from swift_stage2.rollout_server.vllm_generator import (
            AbortedBeforeStart,
            EngineDeadError,
            request_failure,
        )

        try:
            async with self._door.inside():
                if job.future.done():
                    return
                job.started = True
                stamp = self._stamp
                completion = await self._ready_generator().answer(
                    job.request, job.request_id, stamp, lambda: job.aborted
                )
                self._book.finish(job, completion)
        except AbortedBeforeStart:
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
            await self._ready_generator().abort(job.request_id)
            await asyncio.sleep(_ABORT_POLL_S)

    async def _install(
        self,
        generator: VllmGenerator,
        weights: Mapping[str, torch.Tensor],
        stamp: WeightStamp,
        timeout_s: float,
    ) -> InstalledWeights:
        end = self._loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(end):
                await self._door.shut()
        except TimeoutError as error:
            raise RoundFailed(f"completions in the making did not end within {timeout_s:.1f} s") from error
        try:
            try:
                staged = await asyncio.to_thread(self._ready_staging().put, weights)
                async with asyncio.timeout_at(end):
                    reports = await generator.load_weights(staged, str(self.install_fault))
                    self._close_abandoned()  # workers do one thing after another: earlier loads are over
                    for kind in CacheKind:
                        if not await generator.reset_cache(kind):
                            raise RoundFailed(f"vLLM did not reset its {kind} cache", torn=True)
            except asyncio.CancelledError:
                self._abandon_staging()
                raise
            except TimeoutError as error:
                self._abandon_staging()
                raise RoundFailed(f"vLLM did not load within {timeout_s:.1f} s", torn=True) from error
            installed = _installed(weights, reports)
            self._stamp = stamp
            return installed
        except RoundFailed:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise RoundFailed(f"the weights could not be loaded: {reason[-1]}", torn=True) from error
        finally:
            await self._door.open()

    def _abandon_staging(self) -> None:
        """The next load gets other memory. What is abandoned is as large as the model: kept no longer than needed."""
        self._abandoned.append(self._ready_staging())
        self._staging = SharedStaging()

    def _close_abandoned(self) -> None:
        for staging in self._abandoned:
            staging.close()
        self._abandoned.clear()

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
            self._loop.call_soon_threadsafe(lambda: self._spawn(self._end(job)))
        except RuntimeError:
            self._book.fail(job, EngineUnavailable("the engine was shut down"))

    def _ready_generator(self) -> VllmGenerator:
        if self._generator is None:
            raise EngineUnavailable("the model is not loaded yet; ask again later")
        return self._generator

    def _ready_staging(self) -> SharedStaging:
        if self._staging is None:
            raise EngineUnavailable("the model is not loaded yet; ask again later")
        return self._staging

    def _finish_unstarted(self, job: VllmJob) -> None:
        self._book.finish(job, job.completion(self._stamp, finish_reason="abort"))

    def _stop(self, state: EngineState, detail: str) -> None:
        self._life.end(state, detail)
        for job in self._book.open_jobs():
            if state is EngineState.BROKEN:
                self._book.fail(job, EngineUnavailable(f"the engine is {state}: {detail}"))
            else:
                job.abort()


class _Door:
    """Lets requests in, and weights only while none is inside. Used on the engine's loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._num_inside = 0
        self._is_shut = False

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_shut)  # an install has a deadline
            self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            async with self._changed:
                self._changed.notify_all()

    async def shut(self) -> None:
        """Returns when nobody is inside and nobody will be. Open again when it is cancelled."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_shut)
            self._is_shut = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_inside == 0)
        except BaseException:
            await self.open()
            raise

    async def open(self) -> None:
        async with self._changed:
            self._is_shut = False
            self._changed.notify_all()


_DEAD = "vLLM's processes have died; start the server again"


def _with_own_seed(request: GenerationRequest, index: int) -> GenerationRequest:
    if request.seed is None:
        return request
    return replace(request, seed=request.seed + index)


def _installed(weights: Mapping[str, torch.Tensor], reports: Sequence[Mapping[str, Any]]) -> InstalledWeights:
    """One answer of all workers. Raises RoundFailed when they did not read the same bytes."""
    read = dict(reports[0]["read"])
    if any(dict(report["read"]) != read for report in reports):
        raise RoundFailed("vLLM's workers read different weights", torn=True)
    pieces = [
        Piece(name, offset, tuple(shape), tuple(stride), given, held)
        for report in reports
        for name, offset, shape, stride, given, held in report["pieces"]
    ]
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    traced = {piece.name for piece in pieces}
    return InstalledWeights(
        loaded=tuple(name for name in weights if name in traced),
        resident=resident_checksums(shapes, read, pieces),
    )
