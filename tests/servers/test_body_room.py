"""The room for bodies: who is refused takes none of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi import HTTPException, Request

from swift_stage2.errors import RequestTooLarge
from swift_stage2.servers.http_app import BodyRoom

AMPLE_S = 60.0


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


async def read(room: BodyRoom, max_bytes: int, *chunks: bytes | Callable[[], Any]) -> bytes:
    async with room.body(request(parts(*chunks)), max_bytes, AMPLE_S) as raw:
        return raw


def test_a_body_that_is_too_large_takes_no_room_while_its_rest_is_drained() -> None:
    room = BodyRoom(100)

    async def another() -> None:
        assert await read(room, 100, b"y" * 100) == b"y" * 100

    with pytest.raises(RequestTooLarge):
        asyncio.run(read(room, 80, b"x" * 60, b"x" * 60, another, b"x"))
    asyncio.run(another())


def test_a_body_without_room_is_refused_for_now_and_takes_none() -> None:
    room = BodyRoom(100)

    async def hold_and_ask() -> int:
        async with room.body(request(parts(b"x" * 60)), 100, AMPLE_S) as raw:
            assert raw == b"x" * 60
            with pytest.raises(HTTPException) as refused:
                await read(room, 100, b"y" * 30, b"y" * 30, lambda: read(room, 100, b"z" * 40), b"y")
            assert await read(room, 100, b"y" * 40) == b"y" * 40
        return refused.value.status_code

    assert asyncio.run(hold_and_ask()) == 429
