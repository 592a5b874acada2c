"""Attacks by requests: files named, sizes claimed, bodies without sense, callers that vanish; on a real server process.

Memory is the server's peak beyond what it held when the attack began; latency of ``/health/`` is measured all along.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from benchmarks.attacks.run import AttackResult, Tries
from benchmarks.servers import BenchServer, BenchServers, ServerKind
from swift_stage2.servers import protocol

_TIMEOUT_S = 120.0
_HEALTH_PERIOD_S = 0.05
_POLL_S = 0.1
_OPTIONS = {"max_tokens": 1, "temperature": 0.0}
_CUTS = 20


Attempt = Callable[[httpx.Client], str]
"""One try: asks the server, and returns the word for how that ended."""


def attacks() -> list[AttackResult]:
    with tempfile.TemporaryDirectory() as folder, BenchServers(Path(folder)) as servers:
        server = servers.start(ServerKind.TRANSFORMERS)
        found = [result for group in (_files, _sizes, _bodies) for result in group(server, Path(folder))]
        return [*found, _vanished(server)]


def _attack(server: BenchServer, name: str, attempts: Sequence[Attempt]) -> list[AttackResult]:
    """One result for the tries, one for the health calls meanwhile: its longest is the longest latency."""
    tries, health, ended = Tries(name, server), Tries(f"/health/ during: {name}"), threading.Event()
    thread = threading.Thread(target=_watch, args=(server, tries, health, ended), name="health", daemon=True)
    thread.start()
    try:
        with _client(server) as http:
            num_tracebacks = _num_tracebacks(server)
            for attempt in attempts:
                with tries.one():
                    outcome = _outcome(http, attempt)
                before, num_tracebacks = num_tracebacks, _num_tracebacks(server)
                tries.count("traceback" if num_tracebacks > before else outcome)
    finally:
        ended.set()
        thread.join(_TIMEOUT_S)
    return [tries.counted(), health.counted()]


def _watch(server: BenchServer, tries: Tries, health: Tries, ended: threading.Event) -> None:
    """Asks for health, and looks at the memory of the server, until it is ended."""

    def ask(http: httpx.Client) -> str:
        status = http.get(protocol.HEALTH).status_code
        return "answered" if status == httpx.codes.OK else f"status {status}"

    with _client(server) as http:
        while not ended.wait(_HEALTH_PERIOD_S):
            with health.one():
                health.count(_outcome(http, ask))
            tries.look()


def _outcome(http: httpx.Client, attempt: Attempt) -> str:
    try:
        return attempt(http)
    except httpx.TimeoutException:
        return "hang"
    except httpx.TransportError:
        return "lost"


def _client(server: BenchServer) -> httpx.Client:
    return httpx.Client(base_url=server.base_url, trust_env=False, timeout=_TIMEOUT_S)


def _num_tracebacks(server: BenchServer) -> int:
    return server.tree.log_path.read_text(errors="replace").count("Traceback (most recent call last)")


def _files(server: BenchServer, folder: Path) -> list[AttackResult]:
    secret = folder / "secret.png"
    Image.new("RGB", (64, 64), (200, 10, 10)).save(secret)
    tries: list[Attempt] = []
    nowhere = str(folder / "nosuch.png")
    for place in (str(secret), nowhere, f"file://{secret}", "http://127.0.0.1:9/x.png", "/dev/zero"):
        tag = f"<img>{place}</img>"
        call = {
            "id": "1",
            "function": {"name": "f", "arguments": json.dumps({"a": tag}).replace("<", "\\u003c")},
        }
        picture = _base64(_hollow_png(64, 64))
        image: dict[str, Any] = _text("<image>a") | {"images": [picture]}
        conversations: list[dict[str, Any]] = [
            _text(tag),
            _text(f"<video>{place}</video>"),
            _text(f"<audio>{place}</audio>"),
            {**image, "images": [place]},
            {**image, "images": [f"{place};base64,{picture}"]},
            {**image, "videos": [place]},
            {**image, "audios": [place]},
            {**image, "chat_template_kwargs": {"image": place}},
            {**image, "chat_template_kwargs": {"image_url": place}},
            {
                "messages": [
                    {"role": "assistant", "content": "x", "tool_calls": [call]},
                    *_text("b")["messages"],
                ]
            },
            {"messages": [{"role": "user", "content": [{"type": "image", "image": place}]}]},
        ]
        tries += [_infer(conversation) for conversation in conversations]
    return _attack(server, "files and addresses named in requests", tries)


def _sizes(server: BenchServer, folder: Path) -> list[AttackResult]:
    found = []
    for side in (9000, 13300):
        content = _hollow_png(side, side)
        name = f"PNG of {len(content) // 1024} KiB, {side} x {side} pixels"
        found += _attack(server, name, [_infer(_text("<image>a") | {"images": [_base64(content)]})])
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20000 20000\n%%EndComments\n(%pipe%id) (r) file\n"
    found += _attack(server, "EPS", [_infer(_text("<image>a") | {"images": [_base64(eps)]})])
    many = json.dumps({"infer_requests": [_text("x")] * 50_000, "request_config": _OPTIONS}).encode()
    found += _attack(server, "50,000 conversations", [_post(protocol.INFER, many)] * 3)
    long_text = _text("word " * 4_000_000)
    return found + _attack(server, "a text of 20 million characters", [_infer(long_text)])


def _bodies(server: BenchServer, folder: Path) -> list[AttackResult]:
    paths = (
        protocol.INFER, protocol.INIT_COMMUNICATOR, protocol.UPDATE_FLATTENED_PARAMS, protocol.UPDATE_NAMED_PARAM,
        protocol.BEGIN_ROUND, protocol.FINISH_ROUND, protocol.ABORT,
    )  # fmt: skip
    odd = (
        b"", b"{", b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe", b"NaN", b"1" * 6000, b"null", b"[]",
        b'"\\ud800"', b"[" + b"0," * 2**21 + b"0]",
    )  # fmt: skip
    tries = [_post(path, body) for path in paths for body in odd]
    texts = ("\ud800", "\0", "a" * 2000)
    tries += [_post(protocol.INFER, json.dumps({"infer_requests": [_text(text)], key: text}).encode())
              for text in texts for key in ("request_config", "no_such_field", "adapter_request")]  # fmt: skip
    timeouts: tuple[Any, ...] = ("abc", 1e400, -1, True, [], 10**30)
    tries += [_post(path, json.dumps({"host": "127.0.0.1", "port": 1, "round_id": "r", "run_id": "a", "version": 1,
                                      "manifest": [], "timeout_s": value}).encode())
              for value in timeouts for path in (protocol.INIT_COMMUNICATOR, protocol.BEGIN_ROUND)]  # fmt: skip
    tries += [_redirect(path) for path in (protocol.INFER, protocol.SERVER_INFO, protocol.BEGIN_ROUND)]
    return _attack(server, "bodies that make no sense", tries)


def _vanished(server: BenchServer) -> AttackResult:
    """Callers that close their connection after some of their bytes; the server must be idle soon after the last."""
    body = json.dumps(
        {"infer_requests": [_text("hello")] * 32, "request_config": {"max_tokens": 4000}}
    ).encode()
    host, port = server.base_url.removeprefix("http://").split(":")
    head = f"POST {protocol.INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def vanish(num_bytes: int) -> Attempt:
        def attempt(http: httpx.Client) -> str:
            with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as caller:
                caller.sendall(head + body[:num_bytes])
            end, pause = time.monotonic() + _TIMEOUT_S, threading.Event()
            while time.monotonic() < end:
                told = http.get(protocol.HEALTH).json()
                if told["num_waiting"] + told["num_running"] == 0:
                    return "idle again"
                pause.wait(_POLL_S)
            return "hang"

        return attempt

    cuts = [len(body) * cut // _CUTS for cut in range(_CUTS + 1)]
    return _attack(server, "callers that vanish", [vanish(num_bytes) for num_bytes in cuts])[0]


def _infer(conversation: dict[str, Any]) -> Attempt:
    return _post(
        protocol.INFER, json.dumps({"infer_requests": [conversation], "request_config": _OPTIONS}).encode()
    )


def _post(path: str, body: bytes) -> Attempt:
    """Refused means an answer of one line that is no 200."""

    def attempt(http: httpx.Client) -> str:
        reply = http.post(path, content=body)
        if reply.status_code == httpx.codes.OK:
            return "accepted"
        try:
            detail = reply.json()["detail"]
        except (ValueError, KeyError, TypeError):
            return "traceback"
        return f"refused {reply.status_code}" if "\n" not in detail else "traceback"

    return attempt


def _redirect(path: str) -> Attempt:
    def attempt(http: httpx.Client) -> str:
        reply = http.post(path.rstrip("/"), headers={"Host": "evil.example"})
        return "accepted" if "evil" in reply.headers.get("location", "") else f"refused {reply.status_code}"

    return attempt


def _text(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _hollow_png(width: int, height: int) -> bytes:

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + (width + 7) // 8) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
