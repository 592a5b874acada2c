"""One control call on a thread, for as long as the caller who asked for it is there.

A call that waits for its turn when its caller goes is never begun; one that has begun is told, and ends its waits.
Used by the routes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from fastapi import Request

from swift_stage2.errors import EngineUnavailable

ResultT = TypeVar("ResultT")


async def while_attended(
    request: Request, pool: Executor, call: Callable[[threading.Event], ResultT]
) -> ResultT:
    """What ``call`` returns. The event that it gets is set once nobody waits for it any more.

    Raises:
        EngineUnavailable: the caller has gone.
    """
    if await request.is_disconnected():  # while its body was read, or while it waited
        raise EngineUnavailable("the caller has gone; nothing is begun")
    given_up = threading.Event()
    waiting = [call]  # taken out when its turn comes, or when nobody waits for it: it may hold a body
    job = pool.submit(lambda: waiting.pop()(given_up))
    work: asyncio.Future[Any] = asyncio.wrap_future(job)
    work.add_done_callback(retrieve)
    gone: asyncio.Future[Any] = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise EngineUnavailable("the caller has gone; nothing is waited for")
        result: ResultT = work.result()  # deadline: it has ended
        return result
    finally:
        given_up.set()
        if job.cancel():  # it has not begun; the pool forgets it at its turn only
            waiting.clear()
        work.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue  # a body that nobody asked for


def retrieve(work: asyncio.Future[Any]) -> None:
    """Looks at the end of work that nobody waits for any more: asyncio logs a traceback otherwise."""
    if not work.cancelled():
        work.exception()
