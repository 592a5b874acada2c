"""The routes of the rollout server: stock ``swift rollout``'s paths for rollouts, and ours under ``/stage2/``.

A route checks its body, asks engine or weight slot, and turns errors into statuses; it decides nothing. What is wrong
with an ``/infer/`` call as a whole raises; what is wrong with one conversation becomes that request's own error, so
that its sender can find it by halving. Whatever may wait, or takes long for a large call, runs off the event loop, so
that ``/health/`` always answers at once.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from swift_stage2 import wire
from swift_stage2.errors import EngineUnavailable, SampleError
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
from swift_stage2.servers.infer_wire import (
    REQUEST_ID,
    InferCall,
    SamplingOptions,
    output_json,
)
from swift_stage2.servers.request_checks import RequestLimits, check_conversations

# An engine that loads when it is asked is one that sleeps.
_IN_SERVICE = (EngineState.READY, EngineState.UNLOADED)
_SETTLE_TIMEOUT_S = 600.0
_LOOP_TIMEOUT_S = 30.0  # the event loop waits for nothing
_CONTROL_THREADS = 8
_CONTROL_BODY_BYTES = 64 * 2**20  # a manifest of 100,000 tensors has about 10 MB
# What of a request ms-swift sees; the rest changes nothing that is generated.
_CONVERSATION_KEYS = ("messages", "images", "tools", "objects", "chat_template_kwargs")
ResultT = TypeVar("ResultT")


class RolloutService:
    """One server's engine and weight slot, and the routes to them. ``incarnation`` is new at every start."""

    def __init__(
        self,
        engine: Engine,
        host: str = "127.0.0.1",
        weights_root: Path | None = None,
        limits: RequestLimits | None = None,
    ) -> None:
        """``host``: the address to listen on for weights, too. ``weights_root``: the directory to read them from."""
        self.engine = engine
        self.incarnation = uuid.uuid4().hex
        self.slot = WeightSlot(engine, self.incarnation, host=host, weights_root=weights_root)
        self._limits = limits or RequestLimits()
        self._arrived: set[asyncio.Future[CheckedCall]] = set()  # being decoded; of the event loop alone
        self._bodies = BodyLimit(self._limits.body_bytes)
        self._control_bodies = BodyLimit(min(self._limits.body_bytes, _CONTROL_BODY_BYTES))
        # Apart: resets may wait for completions, and the installs that end completions must not wait for them.
        self._texts, self._control, self._resets = (
            ThreadPoolExecutor(_CONTROL_THREADS, thread_name_prefix=name)
            for name in ("text", "control", "reset")
        )

    def app(self, api_key: str | None) -> FastAPI:
        """The application. With an ``api_key`` every route but ``/health/`` wants it as a bearer token."""
        return make_app(self._table(), self._health, api_key)

    def end_work(self) -> None:
        """Ends an install and what is being generated, because the server is asked to end."""
        self.slot.close()
        self.engine.end_open("the server is shutting down")

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the engine can answer, and what it does; never waits for it."""
        status = self.engine.status()
        ready = status.state in _IN_SERVICE
        told = {"status": "ok" if ready else str(status.state)}
        return ready, told | asdict(status) | {"state": self._state()}

    def _state(self) -> str:
        """The engine's state unless it is ready; then the state of the weights."""
        state = self.engine.status().state
        return str(self.slot.state if state in _IN_SERVICE else state)

    # --- routes ---------------------------------------------------------------------------------
    def _table(self) -> dict[tuple[str, str], Callable[..., Any]]:
        return {
            ("POST", wire.INFER): self._infer,
            ("POST", wire.RESET_PREFIX_CACHE): self._reset_prefix_cache,
            ("GET", wire.SERVER_INFO): self._info,
            ("POST", wire.WEIGHTS): self._offer_weights,
            ("POST", wire.INSTALL): self._install_weights,
            ("POST", wire.SLEEP): self._sleep,
        }

    async def _health(self) -> JSONResponse:
        ready, body = self.health()
        return JSONResponse(body, 200 if ready else 503)

    async def _info(self) -> dict[str, Any]:
        stamp, model = self.engine.stamp, self.engine.model
        return wire.ServerInfo(
            stock=False,
            incarnation=self.incarnation,
            engine=self.engine.name,
            # A directory so that others on this machine find it, too; a hub id as it is.
            model=str(Path(model).absolute()) if Path(model).is_dir() else model,
            weight_version=stamp.version,
            run_id=stamp.run_id,
            state=self._state(),
            manifest=self.engine.manifest(),
            takes_turns=self.engine.takes_turns,
            sleeps=self.engine.sleep_mode.level > 0,
        ).to_json()

    async def _infer(self, request: Request) -> Response:
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

    async def _reset_prefix_cache(self, request: Request) -> dict[str, str]:
        """Answers once all has ended that was asked before. Every install empties the caches, so they stay."""
        if earlier := tuple(self._arrived):  # what came before is submitted, and waited for, or refused
            await asyncio.wait(earlier, timeout=_LOOP_TIMEOUT_S)
        succeeded = await run_attended(
            request, self._resets, lambda gone: not self.engine.settle(_SETTLE_TIMEOUT_S, gone)
        )
        return {"message": f"Request received, resetting prefix cache status: {succeeded}"}

    async def _offer_weights(self, request: Request) -> dict[str, Any]:
        offer = wire.WeightOffer.from_json(await self._json(request))
        return (await self._off_loop(request, lambda _: self.slot.offer(offer))).to_json()

    async def _install_weights(self, request: Request) -> dict[str, Any]:
        wanted = wire.InstallRequest.from_json(await self._json(request))
        return (await self._off_loop(request, partial(self.slot.install, wanted))).to_json()

    async def _sleep(self, request: Request) -> dict[str, Any]:
        wanted = wire.SleepRequest.from_json(await self._json(request))
        await self._off_loop(request, partial(self.slot.sleep, wanted))
        return {"state": self._state()}

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
                with self.slot.admission():
                    return self.engine.submit(asked)
            except GateShut as shut:
                opened = asyncio.wrap_future(shut.opened)
            await attend(request, opened)  # deadline: the install's

    async def _off_loop(self, request: Request, call: Callable[[threading.Event], ResultT]) -> ResultT:
        return await run_attended(request, self._control, call)

    def _reply(self, jobs: Sequence[GenerationJob], return_details: bool) -> Response:
        """Written output by output: no single step of it holds up other threads."""
        write = partial(output_json, model=self.engine.model, return_details=return_details)
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


# --- the body of /infer/ -------------------------------------------------------------------------
class CheckedCall(NamedTuple):
    """An ``/infer/`` call. ``faults`` says why a conversation, by its place, cannot be asked; the others are
    ``requests``."""

    requests: Sequence[GenerationRequest]
    faults: Mapping[int, SampleError]
    num_requests: int
    return_details: bool


def check_call(raw: bytes | bytearray, limits: RequestLimits) -> CheckedCall:
    """Raises ProtocolError, in one line, for what is wrong with the call as a whole."""
    call = InferCall.from_json(wire.parse_call(raw))
    options = call.request_config or SamplingOptions()
    faults = check_conversations(call.infer_requests, limits)
    requests = []
    for place, record in enumerate(call.infer_requests):
        if place not in faults:
            try:
                requests.append(_request(record, options))
            except SampleError as error:
                faults[place] = error
    return CheckedCall(requests, faults, len(call.infer_requests), bool(options.return_details))


def _request(record: Mapping[str, Any], options: SamplingOptions) -> GenerationRequest:
    conversation = {key: record[key] for key in _CONVERSATION_KEYS if record.get(key) is not None}
    request_id = record.get(REQUEST_ID)
    return GenerationRequest(
        conversation={**conversation, "images": record.get("images") or []},
        sampling=replace(options, max_tokens=None, seed=None, return_details=None),
        max_new_tokens=options.max_tokens,
        seed=options.seed,
        request_id=request_id if isinstance(request_id, str) else None,
    )
