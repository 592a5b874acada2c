"""A merger on a free port of 127.0.0.1, in this process, and callers that ask it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fake_rollout_server import FakeRolloutServer, request
from free_port import free_port as free_port
from waiting import wait_for

from swift_stage2 import wire
from swift_stage2.rollout_server.merger import Merger
from swift_stage2.servers.http_app import HttpServer, bind
from swift_stage2.servers.request_checks import RequestLimits
from swift_stage2.servers.session import ServerHttp

LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class LiveMerger:
    url: str
    merger: Merger

    def infer(self, *texts: str, seed: int | None = 7, **config: Any) -> httpx.Response:
        return self.post(wire.INFER, infer_body(*texts, seed=seed, **config))

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=LONGEST_WAIT_S, trust_env=False, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=LONGEST_WAIT_S, trust_env=False, **more)

    def wait_until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Waits until what ``/health/`` says makes ``holds`` true."""
        wait_for(lambda: holds(self.merger.health()))

    def wait_until_queued(self, num_parts: int, num_control: int = 0) -> None:
        self.wait_until(
            lambda state: (state["num_waiting"], state["num_waiting_control"]) == (num_parts, num_control)
        )

    def abandoned_call(self, path: str, body: Any) -> socket.socket:
        """A connection that has sent its whole call; closing it is what a caller does that gives up."""
        raw = json.dumps(body).encode()
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=LONGEST_WAIT_S)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        return connection


def infer_body(*texts: str, seed: int | None = 7, **config: Any) -> dict[str, Any]:
    options = {"temperature": 0.5, **config}
    if seed is not None:
        options["seed"] = seed
    return {"infer_requests": [request(text) for text in texts], "request_config": options}


def texts_of(reply: httpx.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    return [item["response"]["choices"][0]["message"]["content"] for item in reply.json()]


def seeds_of(reply: httpx.Response) -> list[int]:
    return [item["rollout_infos"]["stage2"]["seed"] for item in reply.json()]


@contextmanager
def live_merger(
    upstream: FakeRolloutServer | str,
    *,
    max_batch_size: int = 64,
    timeout_s: float = LONGEST_WAIT_S,
    api_key: str | None = None,
    limits: RequestLimits | None = None,
    needs_weights: bool = False,
    **patience: float,
) -> Iterator[LiveMerger]:
    url = upstream if isinstance(upstream, str) else upstream.url
    merger = Merger(
        upstream=ServerHttp(url, api_key=api_key),
        max_batch_size=max_batch_size,
        timeout_s=timeout_s,
        limits=limits or RequestLimits(),
        needs_weights=needs_weights,
        **patience,
    )
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = HttpServer(merger.app(api_key), merger.close)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield LiveMerger(f"http://127.0.0.1:{port}", merger)
    finally:
        server.should_exit = True
        thread.join(LONGEST_WAIT_S)
        assert not thread.is_alive()
