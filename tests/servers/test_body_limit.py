"""The room for bodies: who is refused takes none of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fastapi import HTTPException, Request

from swift_stage2.errors import RequestTooLarge
from swift_stage2.servers.http_app import BodyLimit


def request(chunks: AsyncIterator[bytes]) -> Request:
    async def receive() -> dict[str, Any]:
        chunk = await anext(chunks, b"")
        return {"type": "http.request", "body": chunk, "more_body": bool(chunk)}

    return Request({"type": "http"}, receive)


async def parts(*chunks: bytes | Callable[[], Any]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        if isinstance(chunk, bytes):
            yield chunk
        else:
            await chunk()


async def read(limit: BodyLimit, *chunks: bytes | Callable[[], Any]) -> bytes:
    async with limit.body(request(parts(*chunks))) as raw:
        return bytes(raw)


def test_a_refused_body_takes_no_room_while_its_rest_is_drained() -> None:
    limit = BodyLimit(100)  # in all 400

    async def fill() -> None:
        async with AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(limit.body(request(parts(b"y" * 100))))
            assert await read(limit, b"y" * 60) == b"y" * 60
            async with limit.body(request(parts(b"y" * 40))):
                with pytest.raises(HTTPException) as refused:
                    await read(limit, b"z" * 50, b"z" * 20, lambda: read(limit, b"y" * 60), b"z")
            assert refused.value.status_code == 429

    async def too_large() -> None:
        with pytest.raises(RequestTooLarge):
            await read(limit, b"x" * 60, b"x" * 60, lambda: read(limit, b"y" * 100), b"x")

    asyncio.run(too_large())
    asyncio.run(fill())
