"""A real HTTP server that speaks the rollout wire and misbehaves on command.

A behaviour turns a call into an ``Answer``; without one every ``/infer/`` request is echoed, and a GET finds
nothing, as on a stock server that is asked for a ``/stage2/`` path. What was asked is recorded, and
``wait_until`` waits for it, so tests need no sleeping.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from swift_stage2 import wire
from swift_stage2.servers import infer_wire

LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class Call:
    """One call as it arrived."""

    path: str
    headers: Mapping[str, str]
    body: Any

    @property
    def requests(self) -> list[dict[str, Any]]:
        return list(self.body["infer_requests"])

    @property
    def texts(self) -> list[str]:
        return [request["messages"][0]["content"] for request in self.requests]

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.body["request_config"])


@dataclass(frozen=True)
class Answer:
    """An answer, and how badly it goes back."""

    status: int = 200
    body: bytes = b""
    after: threading.Event | None = None  # the answer waits for it
    cut_after_bytes: int | None = None  # the connection breaks after so much of the body
    drop: bool = False  # the connection breaks before anything is said
    trickle: bool = False  # header bytes without end


Behaviour = Callable[[Call], Answer]


def request(text: str) -> dict[str, Any]:
    """An infer request that is nothing but text."""
    return {"messages": [{"role": "user", "content": text}]}


def output(text: str, *, finish_reason: str = "stop", **stamp: Any) -> dict[str, Any]:
    """One completion on the wire; ``stamp`` is what only our own server adds."""
    choice = {"message": {"content": text}, "finish_reason": finish_reason, "token_ids": [len(text), 2]}
    item: dict[str, Any] = {"response": {"choices": [choice], "prompt_token_ids": [1, 2, 3]}}
    if stamp:
        item["rollout_infos"] = {"stage2": stamp}
    return item


def json_answer(body: Any, **answer: Any) -> Answer:
    return Answer(body=json.dumps(body).encode(), **answer)


def echo(call: Call, **answer: Any) -> Answer:
    """Every request answered by its own text."""
    return json_answer([output(f"echo {text}") for text in call.texts], **answer)


def stamped(**stamp: Any) -> Behaviour:
    """Echo with a stamp on every completion."""
    return lambda call: json_answer([output(f"echo {text}", **stamp) for text in call.texts])


def _named(answer: Answer, call: Call) -> Answer:
    """With the id of its request in every stamp that has none, as our server gives it."""
    try:
        items = json.loads(answer.body)
        for item, asked in zip(items, call.requests, strict=True):
            if stamp := item.get("rollout_infos", {}).get("stage2"):
                stamp.setdefault("request_id", asked.get(infer_wire.REQUEST_ID))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return answer  # broken on purpose
    return replace(answer, body=json.dumps(items).encode())


def error(status: int = 500, text: str = "Internal Server Error") -> Answer:
    return Answer(status=status, body=text.encode())


@dataclass
class FakeRolloutServer:
    """Listens on 127.0.0.1, on a free port if none is given, for as long as the context lasts."""

    on_infer: Behaviour = echo
    on_reset: Behaviour = lambda call: Answer(
        body=json.dumps({"message": "Request received, resetting prefix cache status: True"}).encode()
    )
    on_get: Behaviour = lambda call: (
        Answer(body=b'{"world_size": 1}') if call.path == wire.WORLD_SIZE else Answer(status=404)
    )
    calls: list[Call] = field(default_factory=list)
    most_at_once: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server._handle(self)

            def do_GET(self) -> None:
                server._handle(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing is printed."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # calls of a share connect together; five is http.server's own

        self._http = Server(("127.0.0.1", self.port), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), name="fake-server")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def infer_calls(self) -> list[Call]:
        return [call for call in self.calls if call.path == wire.INFER]

    @property
    def reset_calls(self) -> list[Call]:
        return [call for call in self.calls if call.path == wire.RESET_PREFIX_CACHE]

    @property
    def batch_sizes(self) -> list[int]:
        return [len(call.requests) for call in self.infer_calls]

    @property
    def seeds(self) -> list[int]:
        return [call.config["seed"] for call in self.infer_calls]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Waits until something that was recorded makes ``holds()`` true."""
        with self._changed:
            assert self._changed.wait_for(holds, LONGEST_WAIT_S), "the call never came"

    def __enter__(self) -> FakeRolloutServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(LONGEST_WAIT_S)

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers["Content-Length"] or 0))
        call = Call(handler.path, dict(handler.headers), json.loads(raw or b"null"))
        with self._changed:
            self.calls.append(call)
            self._num_running += 1
            self.most_at_once = max(self.most_at_once, self._num_running)
            self._changed.notify_all()
        if handler.command == "GET":
            answer = self.on_get(call)
        else:
            answer = _named(self.on_infer(call), call) if call.path == wire.INFER else self.on_reset(call)
        try:
            if answer.after is not None:
                answer.after.wait(LONGEST_WAIT_S)
        finally:
            with self._changed:
                self._num_running -= 1
        try:
            self._send(handler, answer)
        except OSError:
            handler.close_connection = True  # the client did not wait

    def _send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        if answer.drop:
            _break(handler)
        elif answer.trickle:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not threading.Event().wait(0.02):
                handler.wfile.write(b"a")
        else:
            handler.send_response(answer.status)
            handler.send_header("Content-Length", str(len(answer.body)))
            handler.end_headers()
            handler.wfile.write(answer.body[: answer.cut_after_bytes])
            if answer.cut_after_bytes is not None:
                _break(handler)
            handler.close_connection = True


def _break(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True
