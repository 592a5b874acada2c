"""Reads the body of a call: bounded before it is held, bounded again before it is decoded, decoded off the event loop.

What is wrong with a body is a ProtocolError in one line, whatever was sent. Shared by rollout server and merger.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import HTTPException, Request

from swift_stage2.errors import ProtocolError, RequestTooLarge

_MAX_VALUES = (
    1_000_000  # of one body; each costs a decoder about 100 bytes and 100 ns that nothing can interrupt
)
_DRAINED_IN_LIMITS = 8
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONG_INTEGER = re.compile(rb"\d{19}")
_LARGEST_INTEGER = 2**63 - 1


class BodyRoom:
    """How many bytes of bodies are held at once, until their contexts end. Of the event loop alone."""

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes = max_bytes

    @asynccontextmanager
    async def body(self, request: Request, max_bytes: int, timeout_s: float) -> AsyncIterator[bytes]:
        """The whole body; its room is free again at the end of the context.

        What follows a refusal is read and forgotten, so that the caller hears of it; it takes no room.

        Raises:
            RequestTooLarge: more than ``max_bytes``.
            HTTPException: 429, other bodies fill the room, which says nothing of this one; 408, it did not arrive
                within ``timeout_s``.
            ClientDisconnect: the caller has gone.
        """
        held, num_bytes, num_taken, fits = bytearray(), 0, 0, True
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    async for chunk in request.stream():
                        num_bytes += len(chunk)
                        if fits := fits and num_bytes <= max_bytes and len(chunk) <= self._free_bytes:
                            self._free_bytes -= len(chunk)
                            num_taken += len(chunk)
                            held += chunk
                        elif num_bytes > _DRAINED_IN_LIMITS * max_bytes:
                            break
                        else:
                            self._free_bytes += num_taken
                            num_taken = 0
                            held.clear()
            except TimeoutError as error:
                raise HTTPException(408, f"a body must arrive within {timeout_s:g} s") from error
            if num_bytes > max_bytes:
                raise RequestTooLarge(
                    f"a body may have {max_bytes:,} bytes, got {num_bytes:,} or more; send fewer requests at once, or "
                    "start the server with a higher --max-body-mib"
                )
            if not fits:
                raise HTTPException(
                    429,
                    "the bodies of other calls fill the room for them; ask again later",
                    {"Retry-After": "1"},
                )
            yield _moved(held)
        finally:
            self._free_bytes += num_taken


def _moved(held: bytearray) -> bytes:
    """The content, which nothing here holds any more."""
    raw = bytes(held)
    held.clear()
    return raw


def parse_json(raw: bytes) -> Any:
    """The value of a body.

    Raises:
        ProtocolError: not JSON in UTF-8, too deep, with half a surrogate pair in a text, or with a number that no
            field takes.
        RequestTooLarge: more values than any call of the wire has.
    """
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        raise RequestTooLarge(
            f"a body may hold {_MAX_VALUES:,} values, got more; send fewer requests at once"
        )
    try:
        read_integer = _integer if _LONG_INTEGER.search(raw) else None
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse, parse_int=read_integer)
        if _ESCAPED_SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ProtocolError("the body must be JSON, got one that is nested too deeply") from error
    except UnicodeError as error:
        raise ProtocolError(f"the body must be JSON of whole UTF-8 characters: {error}") from error
    except ValueError as error:
        raise ProtocolError(f"the body must be JSON: {str(error)[:200]}") from error
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > _LARGEST_INTEGER:
        _refuse(text)
    return int(text)


def _refuse(text: str) -> None:
    raise ValueError(f"a number must be finite and at most {_LARGEST_INTEGER}, got {text[:40]}")
