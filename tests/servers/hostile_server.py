"""A server on the loopback that answers an HTTP call with any bytes it is given, and answers that no sound one gives.

These are good ones with one to three faults, or plain rubbish, seeded; ``rng`` may be hypothesis's, which then shrinks
what it draws.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from random import Random
from typing import Any

from swift_stage2 import wire

_ACCEPT_S = 0.2
_SOCKET_S = 30.0
_MARK = "@@odd@@"
_ODD_WORDS = """
    null true [] {} "" -1 0.5 1e400 -1e400 NaN Infinity 9223372036854775808 "\\ud800" "\\u0000" "\\u202e"
    [[]] [1e400] 01 1. 'x'
"""
_ODD_JSON = (
    *_ODD_WORDS.split(),
    *(
        '"\\udfff x"',
        '"status: True"',
        '{"index": -1}',
        '[{"index": true}]',
        '[{"index": 0}, {"index": 99999}]',
    ),
    *("1" + "0" * 400, "1" + "0" * 4400, "[" * 60 + "]" * 60, "[" * 5000 + "]" * 5000),
    *('{"a":' * 900 + "1" + "}" * 900, "\xa0", ""),
)
_STATUS_WORDS = """
    100 101 199 201 204 205 206 301 302 304 307 400 401 403 404 405 408 409 418 422 429
    500 501 502 503 504 599 600 700 999
"""
_STATUSES = tuple(map(int, _STATUS_WORDS.split()))
_CHARSETS = (
    *("utf-16", "idna", "hex", "utf-7", "punycode", "base64", "rot13", "unicode_escape"),
    *("x" * 300, "\xff"),
)
_HEADERS = (
    b"Content-Encoding: br",
    b"Content-Encoding: gzip",
    b"Content-Encoding: gzip, gzip, gzip",
    b"Content-Encoding: zstd",
    b"Content-Encoding: \xff\xfe",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: one",
    b"Content-Length: 3\r\nContent-Length: 4",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Set-Cookie: session=stolen; Domain=127.0.0.1; Path=/",
    b"Location: http://127.0.0.1:9/",
    b"Connection: upgrade\r\nUpgrade: h2c",
    b"WWW-Authenticate: Basic",
    b"X-Long: " + b"a" * 200_000,
    b"X-Bytes: \x80\x81\xff",
    b"X-Null: \x00",
    b"no colon at all",
    b" folded",
    b": no name",
)


Answer = Callable[[str], Iterable[bytes]]
"""Gets the call's path and returns what goes back, piece by piece."""


class HostileServer:
    """One call at a time."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls: list[bytes] = []
        """Heads of the calls, as they came."""
        self._ending = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_ACCEPT_S)
        self._thread = threading.Thread(target=self._run, name="hostile-server", daemon=True)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> HostileServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join(_SOCKET_S)
        self._listener.close()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            # The caller may leave in the middle; that is its right.
            with connection, suppress(OSError):
                connection.settimeout(_SOCKET_S)
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        call = b""
        while b"\r\n\r\n" not in call:
            more = connection.recv(65536)
            if not more:
                return
            call += more
        head, _, body = call.partition(b"\r\n\r\n")
        self.calls.append(head)
        num_left = _content_length(head) - len(body)
        while num_left > 0 and (more := connection.recv(65536)):
            num_left -= len(more)
        path = head.split(b" ")[1].decode("latin-1")
        for piece in self.answer(path):
            if self._ending.is_set():
                return
            connection.sendall(piece)


def _content_length(head: bytes) -> int:
    values = (line.partition(b":") for line in head.lower().split(b"\r\n")[1:])
    return next((int(value) for name, _, value in values if name == b"content-length"), 0)


def good_records(path: str) -> list[Any]:
    """Answers ``path`` as a sound server does, ours or a stock one."""
    if path == wire.INFER:
        response = {
            "model": "m",
            "choices": [
                {
                    "message": {"role": "assistant", "content": "[]"},
                    "finish_reason": "stop",
                    "token_ids": [1, 2],
                    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1}]},
                }
            ],
            "prompt_token_ids": [1, 2, 3],
            "images_size": [[448, 448]],
        }
        stamp = {"stage2": {"weight_version": 3, "run_id": "run", "seed": 7}}
        failed = {"detail": "refused", "failures": [{"index": 0, "cause": "image"}]}
        return [[{"response": response}], [{"response": response, "rollout_infos": stamp}], failed]
    if path == wire.SERVER_INFO:
        specs = (wire.TensorSpec("w", (2, 3), "float32"),)
        info = wire.ServerInfo(
            False, "one", "vllm", "m", weight_version=3, run_id="run", state="ready", manifest=specs
        )
        return [info.to_json()]
    if path == wire.INSTALL:
        return [wire.WeightProof("run", 3, "one", {"w": "sum"}, {"w": "sum"}, ("w",)).to_json()]
    return [{"world_size": 1}, {"message": "cache status: True"}, {"detail": "busy", "reason": "busy"}]


def odd_answer(rng: Random, path: str) -> bytes:
    """Raw bytes for one connection, which ends behind them."""
    if path == wire.PROCESS_WEIGHTS:  # without it a merger asks a server that it lost nothing more
        return b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(200))
    body = _odd_body(rng, rng.choice(good_records(path)))
    status = 200 if rng.random() < 0.6 else rng.choice(_STATUSES)
    headers = [b"Content-Type: application/json"]
    if rng.random() < 0.3:
        headers = [b"Content-Type: text/plain; charset=" + rng.choice(_CHARSETS).encode("latin-1")]
    if rng.random() < 0.3:
        headers.append(rng.choice(_HEADERS))
    if rng.random() < 0.7:
        length = len(body) if rng.random() < 0.85 else max(0, len(body) + rng.randrange(-5, 6))
        headers.append(b"Content-Length: %d" % length)
    elif rng.random() < 0.5:
        headers.append(b"Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    version = rng.choice((b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2", b"ICY"))
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" * rng.choice((0, 0, 0, 1, 50))
    raw = interim + version + b" %d Odd\r\n" % status + b"\r\n".join(headers) + b"\r\n\r\n" + body
    return raw[: rng.randrange(len(raw))] if rng.random() < 0.05 else raw


def _odd_body(rng: Random, record: Any) -> bytes:
    text = json.dumps(record)
    for _ in range(rng.randrange(4)):
        tree = json.loads(json.dumps(record))
        text = json.dumps(_marked(rng, tree)).replace(f'"{_MARK}"', rng.choice(_ODD_JSON))
    body = text.encode("utf-8", errors="surrogatepass")
    fault = rng.random()
    if fault < 0.05:
        return body[: rng.randrange(len(body) + 1)]
    if fault < 0.1:
        return body.decode("utf-8").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
    if fault < 0.15 and body:
        place = rng.randrange(len(body))
        return body[:place] + rng.randbytes(3) + body[place + 1 :]
    if fault < 0.2:
        return rng.randbytes(rng.randrange(300))
    return body


def _marked(rng: Random, tree: Any) -> Any:
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(sorted(tree))
        return {**tree, key: _marked(rng, tree[key])}
    if isinstance(tree, list) and tree and rng.random() < 0.9:
        place = rng.randrange(len(tree))
        return [*tree[:place], _marked(rng, tree[place]), *tree[place + 1 :]]
    return _MARK
