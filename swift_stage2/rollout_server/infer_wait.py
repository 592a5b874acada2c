"""Where an ``/infer/`` call waits: at the door, and for its jobs. On the event loop, while its caller is there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress

from fastapi import Request

from swift_stage2.errors import EngineUnavailable
from swift_stage2.rollout_server.engine import GenerationJob
from swift_stage2.rollout_server.infer_door import DoorShut
from swift_stage2.rollout_server.weight_rounds import WeightRounds
from swift_stage2.servers import protocol
from swift_stage2.servers.protocol import Completion

_DISCONNECT_POLL_S = 0.25


def named_round(request: Request) -> str | None:
    return request.headers.get(protocol.ROUND_HEADER)


@asynccontextmanager
async def admission(rounds: WeightRounds, request: Request) -> AsyncIterator[bool]:
    """As ``WeightRounds.admission``; waits, on no thread, while weights are installed.

    Raises:
        EngineUnavailable: the caller has gone, or the server is shutting down.
    """
    while True:
        try:
            with rounds.admission(named_round(request)) as is_proven:
                yield is_proven
                return
        except DoorShut as shut:
            opened = asyncio.wrap_future(shut.opened)
        while not opened.done():
            await asyncio.wait({opened}, timeout=_DISCONNECT_POLL_S)
            if await request.is_disconnected():
                raise EngineUnavailable("the caller has gone; nothing is begun")
            rounds.expire()


async def failures_of(jobs: list[GenerationJob], request: Request) -> dict[int, BaseException]:
    """Returns when all have ended, one has failed or the caller has gone; the failures by index."""
    over = _over(jobs)
    while not over.done():
        await asyncio.wait({over}, timeout=_DISCONNECT_POLL_S)
        if await request.is_disconnected():
            break
    ended = {i: job.future for i, job in enumerate(jobs) if job.future.done()}
    failures = {i: error for i, future in ended.items() if (error := future.exception(0)) is not None}
    unavailable = next((e for e in failures.values() if isinstance(e, EngineUnavailable)), None)
    if unavailable is not None:
        raise unavailable
    if len(ended) < len(jobs) and not failures:
        raise EngineUnavailable("the caller has gone; its requests were aborted")
    return failures


def _over(jobs: list[GenerationJob]) -> asyncio.Future[None]:
    """Done, on the running loop, when all have ended or one has failed."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    lock, num_open = threading.Lock(), len(jobs)

    def finish() -> None:
        if not over.done():
            over.set_result(None)

    def count(future: Future[Completion]) -> None:
        nonlocal num_open
        with lock:
            num_open -= 1
            is_last = num_open == 0
        if is_last or future.exception(0) is not None:
            with suppress(RuntimeError):  # the loop has ended, and who waited with it
                loop.call_soon_threadsafe(finish)

    for job in jobs:
        job.future.add_done_callback(count)
    return over
