"""Reads the body of a call: bounded before it is held, bounded again before it is decoded, decoded off the event loop.

What is wrong with a body is a ProtocolError in one line, whatever was sent. Shared by rollout server and merger.
"""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import Request

from swift_stage2.errors import ProtocolError, RequestTooLarge

_MAX_VALUES = (
    1_000_000  # of one body; each costs a decoder about 100 bytes and 100 ns that nothing can interrupt
)
_DRAINED_IN_LIMITS = 8
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONG_INTEGER = re.compile(rb"\d{19}")
_LARGEST_INTEGER = 2**63 - 1


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        RequestTooLarge: more than ``max_bytes``. What follows is read and forgotten, so that the caller hears of it.
        ClientDisconnect: the caller has gone.
    """
    held, num_bytes = bytearray(), 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            held += chunk
        elif num_bytes > _DRAINED_IN_LIMITS * max_bytes:
            break
        else:
            held.clear()
    if num_bytes > max_bytes:
        raise RequestTooLarge(
            f"a body may have {max_bytes:,} bytes, got {num_bytes:,} or more; send fewer requests at once, or start "
            "the server with a higher --max-body-mib"
        )
    return bytes(held)


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
