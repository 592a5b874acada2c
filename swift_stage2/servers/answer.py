"""One server's answer as it comes off the wire: bytes that are counted while they arrive, then a record or a fault.

Whatever a server says is data. The size limit holds for what arrives and for what it unfolds to; the charset that a
server claims is ignored, because JSON is UTF-8. Made by ``server_call`` alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from swift_stage2.errors import ProtocolError
from swift_stage2.servers import protocol

_STATUSES = range(200, 600)
_OK = 200
# What zlib calls the window of a format; gzip is 16 more than zlib's own.
_WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of any status. ``body`` is as long as the caller's limit at most."""

    status: int
    body: bytes
    content_type: str

    @property
    def is_good(self) -> bool:
        """Whether the server says that it did what was asked."""
        return self.status == _OK

    def record(self) -> Any:
        """The body as JSON.

        Raises:
            ProtocolError: it is none.
        """
        return protocol.parse_json(self.body)

    def quote(self, num_characters: int) -> str:
        """The body's beginning as text, in one piece that any log can hold."""
        text = self.body[: 4 * num_characters].decode("utf-8", errors="replace")
        return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)[
            :num_characters
        ]


def read_answer(
    status: int, content_type: str, encoding: str, chunks: Iterable[bytes], most_bytes: int
) -> Answer:
    """Reads ``chunks`` to their end, or to the first byte over ``most_bytes``.

    Raises:
        ProtocolError: a status that says nothing, an encoding that was not asked for and cannot be limited, an
            answer that is too long or whose encoding is broken.
    """
    if status not in _STATUSES:
        raise ProtocolError(f"an answer must have a status from 200 to 599, got status={status}")
    is_json = content_type.partition(";")[0].strip().lower() == "application/json"
    body = _read(_unfolding(encoding), chunks, most_bytes)
    return Answer(status, body, "application/json" if is_json else "text/plain")


def _unfolding(encoding: str) -> zlib._Decompress | None:
    """What unfolds one layer of ``encoding``; several layers would multiply what little bytes can become."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in _WINDOWS:
        raise ProtocolError(
            f"an answer must be as it is, or gzip, got content_encoding={encoding[:40]!r}; is a proxy in between?"
        )
    return zlib.decompressobj(_WINDOWS[name])


def _read(unfold: zlib._Decompress | None, chunks: Iterable[bytes], most_bytes: int) -> bytes:
    body, num_arrived = bytearray(), 0
    for chunk in chunks:
        num_arrived += len(chunk)
        try:
            body += chunk if unfold is None else unfold.decompress(chunk, most_bytes + 1 - len(body))
        except zlib.error as error:
            raise ProtocolError(f"an answer must be encoded as it says, got {error}") from error
        if len(body) > most_bytes or num_arrived > most_bytes:
            raise ProtocolError(
                f"an answer must have at most {most_bytes} bytes for what was asked, got more; its rest was not read"
            )
    if unfold is not None and not unfold.eof:
        raise ProtocolError("an answer must be whole, got one whose encoding has no end")
    return bytes(body)
