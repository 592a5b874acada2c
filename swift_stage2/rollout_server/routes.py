"""The routes of the rollout server: stock ``swift rollout``'s paths, and ours under ``/stage2/``.

A route checks its body, asks engine or weight slot, and turns errors into statuses; it decides nothing. Whatever may
wait, or takes long for a large call, runs off the event loop, so that ``/health/`` always answers at once.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from swift_stage2 import wire
from swift_stage2.errors import EngineUnavailable
from swift_stage2.rollout_server.checked_call import CheckedCall, check_call
from swift_stage2.rollout_server.engine import Engine, EngineState, GenerationJob, GenerationRequest
from swift_stage2.rollout_server.weight_slot import GateShut, WeightSlot
from swift_stage2.servers.http_app import (
    BodyLimit,
    attend,
    failed_requests,
    make_app,
    retrieve,
    run_attended,
)
from swift_stage2.servers.infer_wire import output_json
from swift_stage2.servers.request_checks import RequestLimits

_SETTLE_TIMEOUT_S = 600.0
_LOOP_TIMEOUT_S = 30.0  # the event loop waits for nothing
_CONTROL_THREADS = 8
_CONTROL_BODY_BYTES = 64 * 2**20  # a manifest of 100,000 tensors has about 10 MB
ResultT = TypeVar("ResultT")


class RolloutService:
    """Engine and weight slot, as the routes talk to them. ``incarnation`` is new at every start of the process."""

    def __init__(self, engine: Engine, host: str = "127.0.0.1", weights_root: Path | None = None) -> None:
        """``host``: the address to listen on for weights, too. ``weights_root``: the directory to read them from."""
        self.engine = engine
        self.incarnation = uuid.uuid4().hex
        self.slot = WeightSlot(engine, self.incarnation, host=host, weights_root=weights_root)

    def end_work(self) -> None:
        """Ends an install and what is being generated, because the server is asked to end."""
        self.slot.close()
        self.engine.abort()

    def state(self) -> str:
        """The engine's state unless it is ready; then the state of the weights."""
        engine_state = self.engine.status().state
        return str(engine_state if engine_state is not EngineState.READY else self.slot.state)

    def info(self) -> wire.ServerInfo:
        stamp = self.engine.stamp
        return wire.ServerInfo(
            stock=False,
            incarnation=self.incarnation,
            engine=self.engine.name,
            model=_absolute(self.engine.model),
            weight_version=stamp.version,
            run_id=stamp.run_id,
            state=self.state(),
            manifest=self.engine.manifest(),
            resume=self.engine.can_resume,
        )

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the engine can answer, and what it does; never waits for it."""
        status = self.engine.status()
        ready = status.state is EngineState.READY
        return ready, {
            "status": "ok" if ready else str(status.state),
            **asdict(status),
            "state": self.state(),
        }


def _absolute(model: str) -> str:
    """A directory so that others on this machine find it, too; a hub id as it is."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def create_app(
    service: RolloutService, api_key: str | None = None, limits: RequestLimits | None = None
) -> FastAPI:
    """The application. With an ``api_key`` every route but ``/health/`` wants it as a bearer token."""
    takes = replace(limits or RequestLimits(), takes_prefix=service.engine.can_resume)
    routes = _ServerRoutes(service, takes)
    return make_app(routes.table(), routes.health, api_key)


class _ServerRoutes:
    def __init__(self, service: RolloutService, limits: RequestLimits) -> None:
        self._service = service
        self._limits = limits
        self._slot = service.slot
        self._engine = service.engine
        self._arrived: set[asyncio.Future[CheckedCall]] = (
            set()
        )  # what is being decoded; of the event loop alone
        self._bodies = BodyLimit(limits.body_bytes)
        self._control_bodies = BodyLimit(min(limits.body_bytes, _CONTROL_BODY_BYTES))
        # Apart: resets may wait for completions, and the installs that end completions must not wait for them.
        self._texts, self._control, self._resets = (
            ThreadPoolExecutor(_CONTROL_THREADS, thread_name_prefix=name)
            for name in ("text", "control", "reset")
        )

    def table(self) -> dict[tuple[str, str], Callable[..., Any]]:
        return {
            ("GET", wire.WORLD_SIZE): self.world_size,
            ("POST", wire.ENGINE_TYPE): self.engine_type,
            ("POST", wire.INFER): self.infer,
            ("POST", wire.RESET_PREFIX_CACHE): self.reset_prefix_cache,
            ("GET", wire.SERVER_INFO): self.info,
            ("POST", wire.WEIGHTS): self.offer_weights,
            ("POST", wire.INSTALL): self.install_weights,
        }

    async def health(self) -> JSONResponse:
        ready, body = self._service.health()
        return JSONResponse(body, 200 if ready else 503)

    async def info(self) -> dict[str, Any]:
        return self._service.info().to_json()

    async def world_size(self) -> dict[str, int]:
        return {"world_size": 1}

    async def engine_type(self) -> dict[str, Any]:
        return {
            "engine_type": f"Stage2{self._engine.name.capitalize()}Engine",
            "enable_multi_turn": False,
            "use_gym_env": False,
            "enable_lora": False,
        }

    async def infer(self, request: Request) -> Response:
        call = await self._checked_call(request)
        if call.faults:
            return failed_requests(call.faults, call.num_requests)
        jobs = await self._submitted(request, call.requests)
        try:
            failures = await _failures_of(jobs, request)
        finally:
            for job in jobs:
                job.abort()  # does nothing to those that have ended
        if failures:
            return failed_requests(failures, len(jobs))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._texts, self._reply, jobs, call.return_details)

    async def reset_prefix_cache(self, request: Request) -> dict[str, str]:
        if earlier := tuple(self._arrived):  # what came before is submitted, and waited for, or refused
            await asyncio.wait(earlier, timeout=_LOOP_TIMEOUT_S)
        succeeded = await run_attended(
            request, self._resets, lambda gone: self._engine.reset_prefix_cache(_SETTLE_TIMEOUT_S, gone)
        )
        return {"message": f"Request received, resetting prefix cache status: {succeeded}"}

    async def offer_weights(self, request: Request) -> dict[str, Any]:
        offer = wire.WeightOffer.from_json(await self._json(request))
        return (await self._off_loop(request, lambda _: self._slot.offer(offer))).to_json()

    async def install_weights(self, request: Request) -> dict[str, Any]:
        wanted = wire.InstallRequest.from_json(await self._json(request))
        return (await self._off_loop(request, partial(self._slot.install, wanted))).to_json()

    async def _json(self, request: Request) -> Any:
        async with self._control_bodies.body(request) as raw:
            return wire.parse_call(raw)

    async def _checked_call(self, request: Request) -> CheckedCall:
        """Raises ProtocolError."""
        async with self._bodies.body(request) as raw:
            arrival = asyncio.ensure_future(
                run_attended(request, self._texts, lambda _: check_call(raw, self._limits))
            )
            self._arrived.add(arrival)
            arrival.add_done_callback(self._arrived.discard)
            arrival.add_done_callback(retrieve)
            return await arrival

    async def _submitted(self, request: Request, asked: Sequence[GenerationRequest]) -> list[GenerationJob]:
        """Waits, on no thread, while weights are installed. Raises as ``WeightSlot.admission`` does, and the engine."""
        while True:
            try:
                with self._slot.admission():
                    return self._engine.submit(asked)
            except GateShut as shut:
                opened = asyncio.wrap_future(shut.opened)
            await attend(request, opened)  # deadline: the install's

    async def _off_loop(self, request: Request, call: Callable[[threading.Event], ResultT]) -> ResultT:
        return await run_attended(request, self._control, call)

    def _reply(self, jobs: Sequence[GenerationJob], return_details: bool) -> Response:
        """Written output by output: no single step of it holds up other threads."""
        write = partial(output_json, model=self._engine.model, return_details=return_details)
        outputs = (json.dumps(write(job.future.result(0), request_id=job.request.request_id)) for job in jobs)
        return Response(f"[{','.join(outputs)}]", media_type="application/json")


async def _failures_of(jobs: Sequence[GenerationJob], request: Request) -> dict[int, BaseException]:
    """Returns when all have ended or one has failed; the failures by place.

    Raises:
        ClientDisconnect: the caller has gone.
        EngineUnavailable: the engine has.
    """
    over = asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
    over.add_done_callback(retrieve)
    await attend(request, over)
    ended = {place: job.future for place, job in enumerate(jobs) if job.future.done()}
    failures = {place: error for place, future in ended.items() if (error := future.exception(0)) is not None}
    for error in failures.values():
        if isinstance(error, EngineUnavailable):
            raise error
    return failures
