"""All that a call holds is let go with its caller, also where it still waits for its turn."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import Request

from swift_stage2.errors import EngineUnavailable
from swift_stage2.rollout_server.routes import while_attended

LONGEST_WAIT_S = 60.0


class Body:
    def decode(self, given_up: threading.Event) -> None:
        raise AssertionError("nobody waits for it")


async def leave_while_it_waits(pool: ThreadPoolExecutor) -> weakref.ref[Body]:
    leaves = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await asyncio.wait_for(leaves.wait(), 60)
        return {"type": "http.disconnect"}

    body = Body()
    attended = asyncio.ensure_future(
        while_attended(
            Request({"type": "http"}, receive), pool, lambda given_up, body=body: body.decode(given_up)
        )
    )
    while pool._work_queue.empty():
        await asyncio.sleep(0)
    leaves.set()
    with pytest.raises(EngineUnavailable, match="has gone"):
        await asyncio.wait_for(attended, LONGEST_WAIT_S)
    return weakref.ref(body)


def test_a_body_whose_caller_has_gone_does_not_wait_for_a_thread() -> None:
    go_on = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            begun = threading.Event()
            pool.submit(lambda: (begun.set(), go_on.wait(LONGEST_WAIT_S)))
            assert begun.wait(LONGEST_WAIT_S)
            body = asyncio.run(leave_while_it_waits(pool))
            gc.collect()
            assert body() is None
        finally:
            go_on.set()
