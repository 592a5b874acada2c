"""Runs VllmGenerator as an engine: one thread with an event loop of its own, in front of vLLM's processes.

Every request is a task of that loop and enters vLLM's running batch by itself, whoever asked for it. Weights are
installed while vLLM pauses between two tokens, or, by a vLLM that cannot say which tokens are of which weights, once
every request has ended. When vLLM's processes die, open requests fail and the engine is broken for good.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

from swift_stage2.errors import EngineUnavailable, InstallFailed
from swift_stage2.rollout_server.engine import (
    AWAKE,
    Engine,
    EngineState,
    GenerationJob,
    GenerationRequest,
    InstalledWeights,
    SleepMode,
    WeightStamp,
)
from swift_stage2.rollout_server.vllm_weights import Report, combine

if TYPE_CHECKING:  # ms-swift and vLLM take many seconds to import; the engine's thread does it
    from swift_stage2.rollout_server.vllm_generator import VllmGenerator
    from swift_stage2.rollout_server.weight_source import WeightSource

_MAX_SHOWN = 5
_POLL_S = 0.02
_SHUTDOWN_TIMEOUT_S = 2.0  # then vLLM kills them
_DEAD = "vLLM's processes have died; start the server again"


class VllmRolloutEngine(Engine):
    """An ``Engine`` on vLLM. ``build`` makes the generator, on the engine's thread and loop."""

    name = "vllm"

    def __init__(
        self, build: Callable[[], VllmGenerator], *, model: str, sleep_mode: SleepMode = AWAKE
    ) -> None:
        super().__init__(model, sleep_mode)
        self._build = build
        self._lent: list[BinaryIO] = []  # to workers, in loads that are not known to be over
        self._generator: VllmGenerator | None = None
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: dict[GenerationJob, str] = {}  # by vLLM, under that name
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GenerationJob]:
        """As ``Engine.submit``. The i-th request's seed is the call's plus i, as ms-swift's batch engine has it."""
        self._require_ready()
        jobs = [
            GenerationJob(replace(request, seed=None if request.seed is None else request.seed + i))
            for i, request in enumerate(requests)
        ]
        self._open.update(jobs)
        with suppress(RuntimeError):  # the loop has just been closed
            self._loop.call_soon_threadsafe(self._spawn, jobs)
        if self.status().state is not EngineState.READY:  # it ended before it knew of these
            for job in jobs:
                self._fail(job, EngineUnavailable("the engine was shut down"))
        return jobs

    @property
    def may_read(self) -> bool:
        return bool(self._lent)

    def install(self, weights: WeightSource, stamp: WeightStamp, timeout_s: float) -> InstalledWeights:
        """As ``Engine.install``. ``resident`` is read back from vLLM's own parameters, fused or cut as they
        are: ``vllm_weights`` says how. ``loaded`` are the tensors that were found there. The workers open and sum the
        weights themselves.
        """
        generator = self._generator
        assert generator is not None  # its manifest was asked for
        path, file = weights.lend()
        self._lent.append(file)
        try:
            future = asyncio.run_coroutine_threadsafe(self._load_weights(generator, path, stamp), self._loop)
            reports, is_reset = future.result(timeout_s)
        except InstallFailed:
            raise
        except FutureTimeout as error:
            future.cancel()
            raise InstallFailed(f"the engine did not answer within {timeout_s:.1f} s", torn=True) from error
        except Exception as error:  # whatever vLLM's loader raises
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise InstallFailed(f"the weights could not be loaded: {reason[-1]}", torn=True) from error
        if not is_reset:
            raise InstallFailed("vLLM did not empty its caches", torn=True)
        sums = combine("", "", [reports], len(reports))
        if left_out := sums.left_out:
            raise InstallFailed(
                f"a push must reach every parameter of the engine, got num_left_out={len(left_out)}: "
                f"{', '.join(left_out[:_MAX_SHOWN])}",
                torn=True,
            )
        return InstalledWeights(tuple(sums.resident), sums.arrived, sums.resident)

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
            self.installs_beside = generator.keeps_requests
            self.takes_turns = generator.scheduler is not None
            if self.sleep_mode.level:
                await generator.sleep(self.sleep_mode.level)
            self._become_ready()
            while not generator.is_dead and self._state is EngineState.READY:
                for job, name in list(self._held.items()):
                    if job.aborted:  # again and again: vLLM forgets an abort of what it does not hold yet
                        await generator.abort(name)
                await asyncio.sleep(_POLL_S)
            if generator.is_dead:
                self._stop(EngineState.BROKEN, _DEAD)
        finally:
            generator.shut_down(_SHUTDOWN_TIMEOUT_S)
            self._generator = None  # nothing of vLLM is left for the interpreter's end
            del generator
            self._close_lent()
            for task in self._tasks:
                task.cancel()
            await asyncio.sleep(0)

    def _spawn(self, jobs: Sequence[GenerationJob]) -> None:
        for job in jobs:
            task = self._loop.create_task(self._answer(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, job: GenerationJob) -> None:
        from swift_stage2.rollout_server.vllm_generator import EngineDeadError, request_failure

        name = self._held[job] = uuid.uuid4().hex
        try:
            assert self._generator is not None  # a request was taken
            self._finish(job, await self._generator.answer(job.request, name, lambda: job.aborted))
        except EngineDeadError:
            self._fail(job, EngineUnavailable(_DEAD))
        except asyncio.CancelledError:
            self._fail(job, EngineUnavailable("the engine was shut down"))
            raise
        except Exception as error:  # a request that cannot be answered fails alone
            self._fail(job, request_failure(error))
        finally:
            del self._held[job]

    async def _load_weights(
        self, generator: VllmGenerator, path: str, stamp: WeightStamp
    ) -> tuple[Sequence[Report], bool]:
        """The workers' reports, and whether what was computed with the old weights is gone.

        An engine that sleeps computes nothing until its cache, too, is there again.
        """
        sleeps = self.sleep_mode.level > 0 and await generator.is_sleeping()
        self.is_asleep = False
        if sleeps:
            await self._wake(generator, "weights")
        async with nullcontext() if sleeps else generator.paused():
            refusals = [""]
            try:
                refusals = await generator.load_weights(path)
            finally:
                if not all(refusals):  # else no worker has read anything
                    self.stamp = stamp
                    await generator.name_weights(stamp)
            self._close_lent()  # workers do one thing after another: earlier loads are over
            if refused := [each for each in refusals if each]:
                raise InstallFailed(
                    f"vLLM's workers must read the weights, got in {len(refused)} of {len(refusals)}: {refused[0]}",
                    torn=len(refused) < len(refusals),
                )
            reports, is_reset = await generator.held_weights(), await generator.reset_caches()
        if sleeps:
            await self._wake(generator, "kv_cache")
        return reports, is_reset

    async def _wake(self, generator: VllmGenerator, part: str) -> None:
        try:
            await generator.wake(part)
        except Exception as error:  # vLLM would call itself asleep and hold what it has got
            self._stop(EngineState.BROKEN, f"vLLM has no memory for {part}: {error}")
            raise

    async def _sleep(self, generator: VllmGenerator) -> None:
        while self._held:  # they are aborted
            await asyncio.sleep(_POLL_S)
        await generator.sleep(self.sleep_mode.level)
        self.is_asleep = True

    def _close_lent(self) -> None:
        lent, self._lent = self._lent, []
        for file in lent:
            file.close()

    # --- any thread -----------------------------------------------------------------------------
    def _fall_asleep(self) -> Future[None]:
        assert self._generator is not None  # it is ready
        return asyncio.run_coroutine_threadsafe(self._sleep(self._generator), self._loop)

    def _ailment(self) -> str:
        generator = self._generator
        return super()._ailment() or (_DEAD if generator is not None and generator.is_dead else "")

    def _num_running(self) -> int:
        generator = self._generator
        return generator.num_running if generator is not None else 0

    def _refuse_work(self) -> None:
        """Nothing to close: ``submit`` looks at the state again."""
