"""The routes of the rollout server: stock ``swift rollout``'s paths, and ours under ``/stage2/``.

A route checks its body, asks the service, and turns errors into statuses; it decides nothing. Whatever may wait, or
takes long for a large call, runs off the event loop, so that ``/health/`` always answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import reprlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakSet

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from swift_stage2.errors import EngineUnavailable, ProtocolError, RequestTooLarge, RoundFailed, RoundRefused
from swift_stage2.rollout_server.attended_call import retrieve, while_attended
from swift_stage2.rollout_server.engine import CacheKind, Ticket, WeightStamp
from swift_stage2.rollout_server.infer_wire import InferCall, output_json
from swift_stage2.rollout_server.service import RolloutService, parse_bucket, parse_single_tensor
from swift_stage2.servers import protocol
from swift_stage2.servers.http_app import BodyRoom, parse_json
from swift_stage2.servers.listener import bearer_check
from swift_stage2.servers.protocol import AbortRequest, Completion, FinishRequest, RoundRequest
from swift_stage2.servers.request_checks import RequestLimits

_DISCONNECT_POLL_S = 0.25
_SETTLE_TIMEOUT_S = 600.0
_CONTROL_THREADS = 8
_DECODING_THREADS = 2  # for each kind of body
_SMALL_BODY_BYTES = 2**20
_CONTROL_BODY_BYTES = 64 * 2**20  # a manifest of 100,000 tensors has about 10 MB
_HELD_IN_BODIES = 4  # bodies of the largest size that wait to be decoded at once
_UPLOAD_TIMEOUT_S = 300.0
_LONGEST_TIMEOUT_S = 86400.0
_LONGEST_DETAIL = 1000  # a message may quote what was sent

ResultT = TypeVar("ResultT")


def create_app(
    service: RolloutService, api_key: str | None = None, limits: RequestLimits | None = None
) -> FastAPI:
    """The application. With an ``api_key`` every route but ``/health/`` wants it as a bearer token."""
    # A redirect to the path with its slash would name the host that the caller gave.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    routes = _Routes(service, limits or RequestLimits())
    router = APIRouter(dependencies=[Depends(bearer_check(api_key))] if api_key else [])
    for path, method, handler in routes.table():
        router.add_api_route(path, handler, methods=[method], response_model=None)
    app.include_router(router)
    for path in (protocol.HEALTH, protocol.HEALTH.rstrip("/")):
        app.add_api_route(path, routes.health, methods=["GET"], response_model=None)
    app.add_exception_handler(ProtocolError, _answer(422))
    app.add_exception_handler(RequestTooLarge, _answer(413))
    app.add_exception_handler(ClientDisconnect, _nobody_reads)
    app.add_exception_handler(RoundRefused, _answer(409))
    app.add_exception_handler(RoundFailed, _answer(500))
    app.add_exception_handler(EngineUnavailable, _answer(503))
    return app


class _Routes:
    def __init__(self, service: RolloutService, limits: RequestLimits) -> None:
        self._service = service
        self._limits = limits
        self._rounds = service.rounds
        self._engine = service.engine
        self._may_abort: set[Ticket] = set()  # of the event loop alone
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

    def table(self) -> list[tuple[str, str, Callable[..., Any]]]:
        return [
            (protocol.WORLD_SIZE, "GET", self.world_size),
            (protocol.STATE_KEYS, "GET", self.state_keys),
            (protocol.ENGINE_TYPE, "POST", self.engine_type),
            (protocol.INFER, "POST", self.infer),
            (protocol.INIT_COMMUNICATOR, "POST", self.init_communicator),
            (protocol.UPDATE_FLATTENED_PARAMS, "POST", self.update_flattened_params),
            (protocol.UPDATE_NAMED_PARAM, "POST", self.update_named_param),
            (protocol.PROCESS_WEIGHTS, "POST", self.process_weights),
            (protocol.RESET_PREFIX_CACHE, "POST", self.reset_prefix_cache),
            (protocol.RESET_ENCODER_CACHE, "POST", self.reset_encoder_cache),
            (protocol.RESET_MM_CACHE, "POST", self.reset_mm_cache),
            (protocol.CLOSE_COMMUNICATOR, "POST", self.close_communicator),
            (protocol.SERVER_INFO, "GET", self.info),
            (protocol.BEGIN_ROUND, "POST", self.begin_round),
            (protocol.FINISH_ROUND, "POST", self.finish_round),
            (protocol.ABORT, "POST", self.abort),
        ]

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
        with self._rounds.admission(request.headers.get(protocol.ROUND_HEADER)) as is_proven:
            if call.faults():
                return _failed_requests(call.faults(), len(call.requests))
            requests = call.valid_requests()
            tickets = self._engine.submit(requests)
            in_flight = {t for t, wanted in zip(tickets, requests, strict=True) if wanted.may_abort}
            self._may_abort |= in_flight
            for ticket in in_flight if is_aborted else ():
                ticket.abort()
            try:
                failures = await self._wait(tickets, request)
            finally:
                self._may_abort -= in_flight
                for ticket in tickets:
                    ticket.abort()  # does nothing to those that have ended
        if failures:
            return _failed_requests(failures, len(tickets))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writers, self._reply, tickets, call, is_proven)

    async def init_communicator(self, request: Request) -> dict[str, str]:
        body = _fields(await self._json(request), {"port": int})
        if (backend := body.get("backend", protocol.WEIGHT_STREAM)) != protocol.WEIGHT_STREAM:
            raise ProtocolError(
                f"backend must be {protocol.WEIGHT_STREAM!r}, got backend={_shown(backend)}; "
                "use one version of swift_stage2 for learner and server"
            )
        port, timeout_s = _port_and_timeout(body)
        secret = await self._off_loop(request, lambda _: self._rounds.open_receiver(port, timeout_s))
        return {"message": f"listening for weights on port {port}", "secret": secret}

    async def update_flattened_params(self, request: Request) -> dict[str, str]:
        self._rounds.expect(parse_bucket(await self._json(request)))
        return {"message": "ready for the bucket"}

    async def update_named_param(self, request: Request) -> dict[str, str]:
        self._rounds.expect(parse_single_tensor(await self._json(request)))
        return {"message": "ready for the tensor"}

    async def process_weights(self, request: Request) -> dict[str, Any]:
        non_finite = await self._off_loop(request, self._rounds.load)
        return {"message": "all weights arrived and are loaded", "non_finite": list(non_finite)}

    async def reset_prefix_cache(self, request: Request) -> dict[str, str]:
        return await self._reset_cache(CacheKind.PREFIX, request)

    async def reset_encoder_cache(self, request: Request) -> dict[str, str]:
        return await self._reset_cache(CacheKind.ENCODER, request)

    async def reset_mm_cache(self, request: Request) -> dict[str, str]:
        return await self._reset_cache(CacheKind.MM, request)

    async def _reset_cache(self, kind: CacheKind, request: Request) -> dict[str, str]:
        await self._decode_earlier()
        succeeded = await while_attended(
            request,
            self._resets,
            lambda given_up: self._engine.reset_cache(kind, _SETTLE_TIMEOUT_S, given_up),
        )
        return {"message": f"Request received, resetting {kind} cache status: {succeeded}"}

    async def close_communicator(self, request: Request) -> dict[str, str]:
        await self._off_loop(request, lambda _: self._rounds.close_receiver())
        return {"message": "Request received, closing communicator"}

    async def begin_round(self, request: Request) -> dict[str, str]:
        wanted = RoundRequest.from_json(await self._json(request))
        await self._decode_earlier()
        await self._off_loop(request, lambda _: self._rounds.begin(wanted))
        return {"message": "the round is open", "incarnation": self._service.incarnation}

    async def finish_round(self, request: Request) -> dict[str, Any]:
        wanted = FinishRequest.from_json(await self._json(request))
        proof = await self._off_loop(request, lambda _: self._rounds.finish(wanted))
        if proof is None:
            return {"message": "the round was given up", "state": self._service.state()}
        return proof.to_json()

    async def abort(self, request: Request) -> dict[str, int]:
        wanted = AbortRequest.from_json(await self._json(request))
        if self._engine.stamp != WeightStamp(wanted.version, wanted.run_id):
            return {"aborted": 0}  # asked for before a round that has ended meanwhile
        self._aborted_early |= self._arrived
        tickets = list(self._may_abort)
        return {"aborted": await self._off_loop(request, lambda _: self._engine.abort(tickets))}

    async def _decode_earlier(self) -> None:
        """Until the bodies that have arrived are submitted or refused: what came before is ended or waited for, too."""
        if earlier := tuple(self._arrived):
            await asyncio.wait(earlier, timeout=_UPLOAD_TIMEOUT_S)

    async def _json(self, request: Request) -> Any:
        max_bytes = min(self._limits.body_bytes, _CONTROL_BODY_BYTES)
        async with self._control_room.body(request, max_bytes, _UPLOAD_TIMEOUT_S) as raw:
            return await while_attended(request, self._control_decoders, lambda _: parse_json(raw))

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

    async def _wait(self, tickets: list[Ticket], request: Request) -> dict[int, BaseException]:
        """Returns when all have ended, one has failed or the caller has gone; the failures by index."""
        over = _over(tickets)
        while not over.done():
            await asyncio.wait({over}, timeout=_DISCONNECT_POLL_S)
            if await request.is_disconnected():
                break
        ended = {i: ticket.future for i, ticket in enumerate(tickets) if ticket.future.done()}
        failures = {i: error for i, future in ended.items() if (error := future.exception(0)) is not None}
        unavailable = next((e for e in failures.values() if isinstance(e, EngineUnavailable)), None)
        if unavailable is not None:
            raise unavailable
        if len(ended) < len(tickets) and not failures:
            raise EngineUnavailable("the caller has gone; its requests were aborted")
        return failures

    def _reply(self, tickets: list[Ticket], call: InferCall, is_proven: bool) -> Response:
        """Written output by output: no single step of it holds up other threads."""
        outputs = (json.dumps(self._output(ticket.future.result(0), call, is_proven)) for ticket in tickets)
        return Response(f"[{','.join(outputs)}]", media_type="application/json")

    def _output(self, completion: Completion, call: InferCall, is_proven: bool) -> dict[str, Any]:
        return output_json(
            completion,
            model=self._engine.model,
            incarnation=self._service.incarnation,
            is_proven=is_proven,
            return_details=call.return_details,
        )


def _failed_requests(failures: Mapping[int, BaseException], num_requests: int) -> JSONResponse:
    causes = {place: _cause(error) for place, error in failures.items()}
    return JSONResponse(protocol.failed_requests(causes, num_requests), 500)


def _cause(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    cause = f"{type(error).__name__}: {text[0] if text else ''}".removeprefix("SampleError: ")
    return cause[:_LONGEST_DETAIL]


def _answer(status: int) -> Callable[[Request, Exception], JSONResponse]:
    def answer(_: Request, error: Exception) -> JSONResponse:
        body = {"detail": " ".join(str(error)[:_LONGEST_DETAIL].splitlines())}
        if isinstance(error, RoundRefused):
            body["reason"] = error.reason
        return JSONResponse(body, status)

    return answer


async def _nobody_reads(_: Request, error: Exception) -> Response:
    return Response(status_code=408)


def _over(tickets: list[Ticket]) -> asyncio.Future[None]:
    """Done, on the running loop, when all have ended or one has failed."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    lock, num_open = threading.Lock(), len(tickets)

    def finish() -> None:
        if not over.done():
            over.set_result(None)

    def count(future: Future[Completion]) -> None:
        nonlocal num_open
        with lock:
            num_open -= 1
            is_last = num_open == 0
        if is_last or future.exception(0) is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and who waited with it
                loop.call_soon_threadsafe(finish)

    for ticket in tickets:
        ticket.future.add_done_callback(count)
    return over


def _port_and_timeout(body: Mapping[str, Any]) -> tuple[int, float]:
    port, timeout_s = body["port"], body.get("timeout_s", 300.0)
    if not 0 < port < 65536:
        raise ProtocolError(f"port must be from 1 to 65535, got port={port}")
    if type(timeout_s) not in (int, float) or not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        raise ProtocolError(
            f"timeout_s must be a number of seconds above 0 and up to {_LONGEST_TIMEOUT_S:g}, got "
            f"timeout_s={_shown(timeout_s)}"
        )
    return port, float(timeout_s)


def _shown(value: Any) -> str:
    return reprlib.repr(value)


def _fields(body: Any, required: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ProtocolError(f"the body must be an object, got {type(body).__name__}")
    for name, kind in required.items():
        if type(body.get(name)) is not kind:
            raise ProtocolError(
                f"{name} must be given as {kind.__name__}, got {name}={_shown(body.get(name))}"
            )
    return body
