"""The routes of the rollout server: stock ``swift rollout``'s paths, and ours under ``/stage2/``.

A route checks its body, asks engine or rounds, and turns errors into statuses; it decides nothing. Whatever may wait,
or takes long for a large call, runs off the event loop, so that ``/health/`` always answers at once.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from swift_stage2 import wire
from swift_stage2.errors import EngineUnavailable, RoundRefused
from swift_stage2.rollout_server.checked_call import CheckedCall, check_call
from swift_stage2.rollout_server.engine import CacheKind, Engine, EngineState, GenerationJob
from swift_stage2.rollout_server.infer_door import DoorShut
from swift_stage2.rollout_server.weight_rounds import WeightRounds
from swift_stage2.servers.http_app import (
    BodyLimit,
    attend,
    failed_requests,
    make_app,
    retrieve,
    run_attended,
)
from swift_stage2.servers.infer_wire import (
    output_json,
)
from swift_stage2.servers.request_checks import RequestLimits

_SETTLE_TIMEOUT_S = 600.0
_LOOP_TIMEOUT_S = 30.0  # the event loop waits for nothing
_LOOK_S = 0.25  # how often a call at a shut door looks whether its round has ended
_CONTROL_THREADS = 8
_CONTROL_BODY_BYTES = 64 * 2**20  # a manifest of 100,000 tensors has about 10 MB
_CACHES = {
    wire.RESET_PREFIX_CACHE: CacheKind.PREFIX,
    wire.RESET_ENCODER_CACHE: CacheKind.ENCODER,
    wire.RESET_MM_CACHE: CacheKind.MM,
}
ResultT = TypeVar("ResultT")


class RolloutService:
    """Engine and rounds, as the routes talk to them. ``incarnation`` is new at every start of the process."""

    def __init__(self, engine: Engine, host: str = "127.0.0.1", weights_root: Path | None = None) -> None:
        """``host``: the address to listen on for weights, too. ``weights_root``: the directory to read them from."""
        self.engine = engine
        self.incarnation = uuid.uuid4().hex
        self.rounds = WeightRounds(engine, self.incarnation, host=host, weights_root=weights_root)
        self._reads_disk = weights_root is not None

    def end_work(self) -> None:
        """Ends the open round and what is being generated, because the server is asked to end."""
        self.rounds.close()
        self.engine.abort()

    def state(self) -> str:
        """The engine's state unless it is ready; then the state of the weight rounds."""
        engine_state = self.engine.status().state
        return str(engine_state if engine_state is not EngineState.READY else self.rounds.state)

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
            can_abort=True,
            manifest=self.engine.manifest(),
            staging=True,
            round_id=stamp.round_id,
            reads_disk=self._reads_disk,
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


def _named_round(request: Request) -> str | None:
    return request.headers.get(wire.ROUND_HEADER)


class _ServerRoutes:
    def __init__(self, service: RolloutService, limits: RequestLimits) -> None:
        self._service = service
        self._limits = limits
        self._rounds = service.rounds
        self._engine = service.engine
        # Of the event loop alone: what an abort ends, how many there were, and what is being decoded.
        self._may_abort: set[GenerationJob] = set()
        self._num_aborts = 0
        self._arrived: set[asyncio.Future[CheckedCall]] = set()
        self._bodies = BodyLimit(limits.body_bytes)
        self._control_bodies = BodyLimit(min(limits.body_bytes, _CONTROL_BODY_BYTES))
        # Apart: resets may wait for completions, and the aborts and rounds that end completions must not wait for them.
        self._texts, self._control, self._resets = (
            ThreadPoolExecutor(_CONTROL_THREADS, thread_name_prefix=name)
            for name in ("text", "control", "reset")
        )

    def table(self) -> dict[tuple[str, str], Callable[..., Any]]:
        return {
            ("GET", wire.WORLD_SIZE): self.world_size,
            ("GET", wire.STATE_KEYS): self.state_keys,
            ("POST", wire.ENGINE_TYPE): self.engine_type,
            ("POST", wire.INFER): self.infer,
            ("POST", wire.INIT_COMMUNICATOR): self.init_communicator,
            ("POST", wire.PROCESS_WEIGHTS): self.process_weights,
            **{("POST", path): self.reset_cache for path in _CACHES},
            ("GET", wire.SERVER_INFO): self.info,
            ("POST", wire.BEGIN_ROUND): self.begin_round,
            ("POST", wire.FINISH_ROUND): self.finish_round,
            ("POST", wire.ABORT): self.abort,
        }

    async def health(self) -> JSONResponse:
        ready, body = self._service.health()
        return JSONResponse(body, 200 if ready else 503)

    async def info(self) -> dict[str, Any]:
        return self._service.info().to_json()

    async def world_size(self) -> dict[str, int]:
        return {"world_size": 1}

    async def state_keys(self) -> dict[str, list[str]]:
        return {"keys": [spec.name for spec in self._engine.manifest()]}

    async def engine_type(self) -> dict[str, Any]:
        return {
            "engine_type": f"Stage2{self._engine.name.capitalize()}Engine",
            "enable_multi_turn": False,
            "use_gym_env": False,
            "enable_lora": False,
        }

    async def infer(self, request: Request) -> Response:
        call, is_aborted = await self._checked_call(request)
        async with self._admission(request) as is_proven:
            if call.faults:
                return failed_requests(call.faults, call.num_requests)
            jobs = self._engine.submit(call.requests)
            in_flight = {job for job in jobs if job.request.may_abort}
            self._may_abort |= in_flight
            for job in in_flight if is_aborted else ():
                job.abort()
            try:
                failures = await _failures_of(jobs, request)
            finally:
                self._may_abort -= in_flight
                for job in jobs:
                    job.abort()  # does nothing to those that have ended
        if failures:
            return failed_requests(failures, len(jobs))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._texts, self._reply, jobs, call.return_details, is_proven)

    async def init_communicator(self, request: Request) -> dict[str, Any]:
        body, round_id = wire.mapping(await self._json(request), "the body"), _named_round(request)
        match body.get("backend"):
            case wire.SHARED_MEMORY:
                path = wire.MemoryOffer.from_json(body).path
                answer = await self._off_loop(request, lambda _: self._rounds.map_memory(path, round_id))
                return answer.to_json()
            case wire.DISK:
                await self._off_loop(request, lambda _: self._rounds.read_disk(round_id))
                return {"message": "the round's file is read"}
        offer = wire.StreamOffer.from_json(body)
        secret = await self._off_loop(
            request, lambda _: self._rounds.open_stream(offer.port, offer.num_bytes, round_id)
        )
        return {"message": f"listening for weights on port {offer.port}", "secret": secret}

    async def process_weights(self, request: Request) -> dict[str, Any]:
        wanted = wire.InstallRequest.from_json(await self._json(request, if_empty=b"{}"))
        abort = partial(self._abort_running, asyncio.get_running_loop()) if wanted.aborts else None
        round_id = _named_round(request)
        await self._off_loop(request, lambda given_up: self._rounds.load(given_up, round_id, abort))
        return {"message": "all weights arrived and are loaded"}

    async def reset_cache(self, request: Request) -> dict[str, str]:
        kind = _CACHES[request.url.path]
        if (round_id := _named_round(request)) is not None:
            self._rounds.require(round_id)
        if earlier := tuple(self._arrived):  # what came before is submitted, and waited for, or refused
            await asyncio.wait(earlier, timeout=_LOOP_TIMEOUT_S)
        succeeded = await run_attended(
            request, self._resets, lambda gone: self._engine.reset_cache(kind, _SETTLE_TIMEOUT_S, gone)
        )
        return {"message": f"Request received, resetting {kind} cache status: {succeeded}"}

    async def begin_round(self, request: Request) -> dict[str, str]:
        wanted = wire.RoundRequest.from_json(await self._json(request))
        await self._off_loop(request, lambda _: self._rounds.begin(wanted))
        return {"message": "the round is open", "incarnation": self._service.incarnation}

    async def finish_round(self, request: Request) -> dict[str, Any]:
        wanted = wire.FinishRequest.from_json(await self._json(request))
        if _named_round(request) not in (None, wanted.round_id):
            raise RoundRefused(
                wire.RefusalReason.NO_ROUND, f"one call names two rounds, got round_id={wanted.round_id}"
            )
        proof = await self._off_loop(request, lambda _: self._rounds.finish(wanted))
        if proof is None:
            return {"message": "the round was given up", "state": self._service.state()}
        return proof.to_json()

    async def abort(self, request: Request) -> dict[str, int]:
        wanted = wire.AbortRequest.from_json(await self._json(request))
        stamp = self._engine.stamp
        if (stamp.version, stamp.run_id) != (wanted.version, wanted.run_id):
            return {"aborted": 0}  # asked for before a round that has ended meanwhile
        self._num_aborts += 1
        jobs = list(self._may_abort)
        return {"aborted": await self._off_loop(request, lambda _: self._engine.abort(jobs))}

    def _abort_running(self, loop: asyncio.AbstractEventLoop) -> None:
        """On a control thread: ends what may be aborted.

        A call is admitted and submitted in one step of the loop, so none is missed that was admitted before.
        """
        running: Future[list[GenerationJob]] = Future()
        loop.call_soon_threadsafe(lambda: running.set_result(list(self._may_abort)))
        self._engine.abort(running.result(_LOOP_TIMEOUT_S))

    async def _json(self, request: Request, if_empty: bytes = b"") -> Any:
        async with self._control_bodies.body(request) as raw:
            return wire.parse_call(raw or if_empty)

    async def _checked_call(self, request: Request) -> tuple[CheckedCall, bool]:
        """The call, and whether an abort came while it was checked. Raises ProtocolError."""
        async with self._bodies.body(request) as raw:
            num_aborts = self._num_aborts
            arrival = asyncio.ensure_future(
                run_attended(request, self._texts, lambda _: check_call(raw, self._limits))
            )
            self._arrived.add(arrival)
            arrival.add_done_callback(self._arrived.discard)
            arrival.add_done_callback(retrieve)
            return await arrival, self._num_aborts != num_aborts

    @asynccontextmanager
    async def _admission(self, request: Request) -> AsyncIterator[bool]:
        """As ``WeightRounds.admission``; waits, on no thread, while weights are installed."""
        while True:
            try:
                with self._rounds.admission(_named_round(request)) as is_proven:
                    yield is_proven
                    return
            except DoorShut as shut:
                opened = asyncio.wrap_future(shut.opened)
            while not opened.done():
                await attend(request, opened, _LOOK_S)
                self._rounds.expire()

    async def _off_loop(self, request: Request, call: Callable[[threading.Event], ResultT]) -> ResultT:
        return await run_attended(request, self._control, call)

    def _reply(self, jobs: Sequence[GenerationJob], return_details: bool, is_proven: bool) -> Response:
        """Written output by output: no single step of it holds up other threads."""
        write = partial(
            output_json,
            model=self._engine.model,
            incarnation=self._service.incarnation,
            is_proven=is_proven,
            return_details=return_details,
        )
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
