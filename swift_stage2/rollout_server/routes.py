"""The routes of the rollout server: stock ``swift rollout``'s paths, and ours under ``/stage2/``.

A route checks its body, asks engine or rounds, and turns errors into statuses; it decides nothing. Whatever may wait,
or takes long for a large call, runs off the event loop, so that ``/health/`` always answers at once.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import Any, TypeVar
from weakref import WeakSet

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from swift_stage2.errors import EngineUnavailable, ProtocolError, RoundFailed, RoundRefused
from swift_stage2.rollout_server.engine import CacheKind, Engine, EngineState, GenerationJob
from swift_stage2.rollout_server.infer_wait import admission, failures_of, named_round
from swift_stage2.rollout_server.infer_wire import InferCall, output_json
from swift_stage2.rollout_server.weight_rounds import WeightRounds
from swift_stage2.servers import protocol
from swift_stage2.servers.http_app import (
    BodyRoom,
    failed_requests,
    make_app,
    parse_json,
    retrieve,
    while_attended,
)
from swift_stage2.servers.protocol import (
    AbortRequest,
    FinishRequest,
    InstallRequest,
    RefusalReason,
    RoundRequest,
    ServerInfo,
)
from swift_stage2.servers.request_checks import RequestLimits
from swift_stage2.servers.wire_record import integer, mapping, text

_SETTLE_TIMEOUT_S = 600.0
_LOOP_TIMEOUT_S = 30.0  # the event loop waits for nothing
_CONTROL_THREADS = 8
_DECODING_THREADS = 2  # for each kind of body
_SMALL_BODY_BYTES = 2**20
_CONTROL_BODY_BYTES = 64 * 2**20  # a manifest of 100,000 tensors has about 10 MB
_HELD_IN_BODIES = 4  # bodies of the largest size that wait to be decoded at once
_UPLOAD_TIMEOUT_S = 300.0
_CACHES = {
    protocol.RESET_PREFIX_CACHE: CacheKind.PREFIX,
    protocol.RESET_ENCODER_CACHE: CacheKind.ENCODER,
    protocol.RESET_MM_CACHE: CacheKind.MM,
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

    def info(self) -> ServerInfo:
        stamp = self.engine.stamp
        return ServerInfo(
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
    statuses: dict[type[Exception], int] = {RoundRefused: 409, RoundFailed: 500, EngineUnavailable: 503}
    return make_app(routes.table(), routes.health, api_key, statuses)


class _ServerRoutes:
    def __init__(self, service: RolloutService, limits: RequestLimits) -> None:
        self._service = service
        self._limits = limits
        self._rounds = service.rounds
        self._engine = service.engine
        self._may_abort: set[GenerationJob] = set()  # of the event loop alone
        # Bodies of ``/infer/`` that are being decoded, and those that an abort has met; of the event loop alone.
        self._arrived: set[asyncio.Future[InferCall]] = set()
        self._aborted_early: WeakSet[asyncio.Future[InferCall]] = WeakSet()
        self._room = BodyRoom(_HELD_IN_BODIES * limits.body_bytes)
        self._control_room = BodyRoom(_HELD_IN_BODIES * _CONTROL_BODY_BYTES)
        # Apart, so that small calls wait for no large one, and control calls and answers for none.
        self._large_decoders, self._small_decoders, self._control_decoders, self._writers = (
            ThreadPoolExecutor(_DECODING_THREADS, thread_name_prefix=name)
            for name in ("decode-large", "decode-small", "decode-control", "reply")
        )
        self._control = ThreadPoolExecutor(_CONTROL_THREADS, thread_name_prefix="control")
        # Apart: these may wait for completions, and the aborts and rounds that end completions must not wait for them.
        self._resets = ThreadPoolExecutor(_CONTROL_THREADS, thread_name_prefix="reset")

    def table(self) -> dict[tuple[str, str], Callable[..., Any]]:
        return {
            ("GET", protocol.WORLD_SIZE): self.world_size,
            ("GET", protocol.STATE_KEYS): self.state_keys,
            ("POST", protocol.ENGINE_TYPE): self.engine_type,
            ("POST", protocol.INFER): self.infer,
            ("POST", protocol.INIT_COMMUNICATOR): self.init_communicator,
            ("POST", protocol.PROCESS_WEIGHTS): self.process_weights,
            **{("POST", path): self.reset_cache for path in _CACHES},
            ("GET", protocol.SERVER_INFO): self.info,
            ("POST", protocol.BEGIN_ROUND): self.begin_round,
            ("POST", protocol.FINISH_ROUND): self.finish_round,
            ("POST", protocol.ABORT): self.abort,
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
        call, is_aborted = await self._decoded_call(request)
        async with admission(self._rounds, request) as is_proven:
            if call.faults:
                return failed_requests(call.faults, call.num_requests)
            jobs = self._engine.submit(call.requests)
            in_flight = {job for job in jobs if job.request.may_abort}
            self._may_abort |= in_flight
            for job in in_flight if is_aborted else ():
                job.abort()
            try:
                failures = await failures_of(jobs, request)
            finally:
                self._may_abort -= in_flight
                for job in jobs:
                    job.abort()  # does nothing to those that have ended
        if failures:
            return failed_requests(failures, len(jobs))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writers, self._reply, jobs, call, is_proven)

    async def init_communicator(self, request: Request) -> dict[str, Any]:
        body, round_id = mapping(await self._json(request), "the body"), named_round(request)
        if body.get("backend") == protocol.SHARED_MEMORY:
            path = text(body, "path")
            answer = await self._off_loop(request, lambda _: self._rounds.map_memory(path, round_id))
            return answer.to_json()
        if body.get("backend") == protocol.DISK:
            await self._off_loop(request, lambda _: self._rounds.read_disk(round_id))
            return {"message": "the round's file is read"}
        port, num_bytes = _port(body), integer(body.get("num_bytes", 0), "num_bytes")
        secret = await self._off_loop(request, lambda _: self._rounds.open_stream(port, num_bytes, round_id))
        return {"message": f"listening for weights on port {port}", "secret": secret}

    async def process_weights(self, request: Request) -> dict[str, Any]:
        wanted = InstallRequest.from_json(await self._json(request, if_empty=b"{}"))
        abort = partial(self._abort_running, asyncio.get_running_loop()) if wanted.aborts else None
        round_id = named_round(request)
        await self._off_loop(request, lambda given_up: self._rounds.load(given_up, round_id, abort))
        return {"message": "all weights arrived and are loaded"}

    async def reset_cache(self, request: Request) -> dict[str, str]:
        kind = _CACHES[request.url.path]
        if (round_id := named_round(request)) is not None:
            self._rounds.require(round_id)
        await self._decode_earlier()
        succeeded = await while_attended(
            request,
            self._resets,
            lambda given_up: self._engine.reset_cache(kind, _SETTLE_TIMEOUT_S, given_up),
        )
        return {"message": f"Request received, resetting {kind} cache status: {succeeded}"}

    async def begin_round(self, request: Request) -> dict[str, str]:
        wanted = RoundRequest.from_json(await self._json(request))
        if not wanted.staged:
            await self._decode_earlier()
        await self._off_loop(request, lambda _: self._rounds.begin(wanted))
        return {"message": "the round is open", "incarnation": self._service.incarnation}

    async def finish_round(self, request: Request) -> dict[str, Any]:
        wanted = FinishRequest.from_json(await self._json(request))
        if named_round(request) not in (None, wanted.round_id):
            raise RoundRefused(
                RefusalReason.NO_ROUND, f"one call names two rounds, got round_id={wanted.round_id}"
            )
        proof = await self._off_loop(request, lambda _: self._rounds.finish(wanted))
        if proof is None:
            return {"message": "the round was given up", "state": self._service.state()}
        return proof.to_json()

    async def abort(self, request: Request) -> dict[str, int]:
        wanted = AbortRequest.from_json(await self._json(request))
        stamp = self._engine.stamp
        if (stamp.version, stamp.run_id) != (wanted.version, wanted.run_id):
            return {"aborted": 0}  # asked for before a round that has ended meanwhile
        self._aborted_early |= self._arrived
        jobs = list(self._may_abort)
        return {"aborted": await self._off_loop(request, lambda _: self._engine.abort(jobs))}

    def _abort_running(self, loop: asyncio.AbstractEventLoop) -> None:
        """On a control thread: ends what may be aborted.

        A call is admitted and submitted in one step of the loop, so none is missed that was admitted before.
        """
        running: Future[list[GenerationJob]] = Future()
        loop.call_soon_threadsafe(lambda: running.set_result(list(self._may_abort)))
        self._engine.abort(running.result(_LOOP_TIMEOUT_S))

    async def _decode_earlier(self) -> None:
        """Until the bodies that have arrived are submitted or refused: what came before is ended or waited for, too."""
        if earlier := tuple(self._arrived):
            await asyncio.wait(earlier, timeout=_UPLOAD_TIMEOUT_S)

    async def _json(self, request: Request, if_empty: bytes = b"") -> Any:
        max_bytes = min(self._limits.body_bytes, _CONTROL_BODY_BYTES)
        async with self._control_room.body(request, max_bytes, _UPLOAD_TIMEOUT_S) as raw:
            return await while_attended(
                request, self._control_decoders, lambda _: parse_json(raw or if_empty)
            )

    async def _decoded_call(self, request: Request) -> tuple[InferCall, bool]:
        """The call, and whether an abort came while it was decoded. Raises ProtocolError."""
        async with self._room.body(request, self._limits.body_bytes, _UPLOAD_TIMEOUT_S) as raw:
            pool = self._small_decoders if len(raw) <= _SMALL_BODY_BYTES else self._large_decoders
            arrival = asyncio.ensure_future(
                while_attended(request, pool, lambda _: InferCall(parse_json(raw), self._limits))
            )
            self._arrived.add(arrival)
            arrival.add_done_callback(self._arrived.discard)
            arrival.add_done_callback(retrieve)
            return await arrival, arrival in self._aborted_early

    async def _off_loop(self, request: Request, call: Callable[[threading.Event], ResultT]) -> ResultT:
        return await while_attended(request, self._control, call)

    def _reply(self, jobs: list[GenerationJob], call: InferCall, is_proven: bool) -> Response:
        """Written output by output: no single step of it holds up other threads."""
        write = partial(
            output_json,
            model=self._engine.model,
            incarnation=self._service.incarnation,
            is_proven=is_proven,
            return_details=call.return_details,
        )
        outputs = (json.dumps(write(job.future.result(0), request_id=job.request.request_id)) for job in jobs)
        return Response(f"[{','.join(outputs)}]", media_type="application/json")


def _port(body: Mapping[str, Any]) -> int:
    port = integer(body.get("port"), "port")
    if (backend := body.get("backend", protocol.WEIGHT_STREAM)) != protocol.WEIGHT_STREAM:
        raise ProtocolError(
            f"backend must be {protocol.WEIGHT_STREAM!r}, got backend={shown(backend)}; "
            "use one version of swift_stage2 for learner and server"
        )
    if not 0 < port < 65536:
        raise ProtocolError(f"port must be from 1 to 65535, got port={port}")
    return port
