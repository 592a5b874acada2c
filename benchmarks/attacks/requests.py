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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from PIL import Image

from benchmarks.attacks.result import AttackResult, server_process
from benchmarks.servers import BenchServers, ServerKind
from swift_stage2.servers import protocol

_TIMEOUT_S = 120.0
_HEALTH_PERIOD_S = 0.05
_POLL_S = 0.1
_MIB = 2**20
_OPTIONS = {"max_tokens": 1, "temperature": 0.0}
_CUTS = 20


def attacks() -> list[AttackResult]:
    """Every attack of this group, one after the other, on one server."""
    with tempfile.TemporaryDirectory() as folder, BenchServers(Path(folder)) as servers:
        server = servers.start(ServerKind.TRANSFORMERS)
        target = _Target(server.base_url, server_process(server), server.tree.log_path)
        found = [result for group in (_files, _sizes, _bodies) for result in group(target, Path(folder))]
        return [*found, _vanished(target)]


class _Target:
    """The server under attack: calls that become outcomes, its memory, its log, its health's latency."""

    def __init__(self, base_url: str, process: psutil.Process, log: Path) -> None:
        self.base_url = base_url
        self._process = process
        self._log = log

    def attack(self, name: str, tries: Sequence[Callable[[httpx.Client], str]]) -> list[AttackResult]:
        """One result for the tries, one for the health calls meanwhile: its longest is the longest latency."""
        outcomes: Counter[str] = Counter()
        longest_s, num_tracebacks = 0.0, self._num_tracebacks()
        with (
            self._watched() as watch,
            httpx.Client(base_url=self.base_url, trust_env=False, timeout=_TIMEOUT_S) as http,
        ):
            for attempt in tries:
                begun = time.monotonic()
                try:
                    outcome = attempt(http)
                except httpx.TimeoutException:
                    outcome = "hang"
                except httpx.TransportError:
                    outcome = "lost"
                longest_s = max(longest_s, time.monotonic() - begun)
                if (now := self._num_tracebacks()) > num_tracebacks:
                    outcome, num_tracebacks = "traceback", now
                outcomes[outcome] += 1
        health = AttackResult(
            f"/health/ during: {name}",
            sum(watch.outcomes.values()),
            dict(watch.outcomes),
            seconds=watch.longest_s,
        )
        return [AttackResult(name, len(tries), dict(outcomes), watch.peak_mib, longest_s), health]

    def is_idle(self) -> bool:
        body = httpx.get(self.base_url + protocol.HEALTH, trust_env=False, timeout=_TIMEOUT_S).json()
        return bool(body["num_waiting"] + body["num_running"] == 0)

    def memory_mib(self) -> float:
        return float(self._process.memory_info().rss) / _MIB

    @contextmanager
    def _watched(self) -> Iterator[_Watch]:
        watch = _Watch(self)
        thread = threading.Thread(target=watch.run, name="health", daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            watch.ended.set()
            thread.join(_TIMEOUT_S)

    def _num_tracebacks(self) -> int:
        return self._log.read_text(errors="replace").count("Traceback (most recent call last)")


class _Watch:
    """Asks for health and memory until it is ended."""

    def __init__(self, target: _Target) -> None:
        self.ended = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.longest_s = 0.0
        self.peak_mib = 0.0
        self._target = target
        self._first_mib = target.memory_mib()

    def run(self) -> None:
        with httpx.Client(base_url=self._target.base_url, trust_env=False, timeout=_TIMEOUT_S) as http:
            while not self.ended.wait(_HEALTH_PERIOD_S):
                begun = time.monotonic()
                try:
                    status = http.get(protocol.HEALTH).status_code
                    self.outcomes["answered" if status == httpx.codes.OK else f"status {status}"] += 1
                except httpx.TimeoutException:
                    self.outcomes["hang"] += 1
                except httpx.TransportError:
                    self.outcomes["lost"] += 1
                self.longest_s = max(self.longest_s, time.monotonic() - begun)
                self.peak_mib = max(self.peak_mib, self._target.memory_mib() - self._first_mib)


def _files(target: _Target, folder: Path) -> list[AttackResult]:
    secret = folder / "secret.png"
    Image.new("RGB", (64, 64), (200, 10, 10)).save(secret)
    tries: list[Callable[[httpx.Client], str]] = []
    for place in (
        str(secret),
        str(folder / "nosuch.png"),
        f"file://{secret}",
        "http://127.0.0.1:9/x.png",
        "/dev/zero",
    ):
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
    return target.attack("files and addresses named in requests", tries)


def _sizes(target: _Target, folder: Path) -> list[AttackResult]:
    found = []
    for side in (9000, 13300):
        content = _hollow_png(side, side)
        name = f"PNG of {len(content) // 1024} KiB, {side} x {side} pixels"
        found += target.attack(name, [_infer(_text("<image>a") | {"images": [_base64(content)]})])
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20000 20000\n%%EndComments\n(%pipe%id) (r) file\n"
    found += target.attack("EPS", [_infer(_text("<image>a") | {"images": [_base64(eps)]})])
    many = json.dumps({"infer_requests": [_text("x")] * 50_000, "request_config": _OPTIONS}).encode()
    found += target.attack("50,000 conversations", [_post(protocol.INFER, many)] * 3)
    long_text = _text("word " * 4_000_000)
    return found + target.attack("a text of 20 million characters", [_infer(long_text)])


def _bodies(target: _Target, folder: Path) -> list[AttackResult]:
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
    return target.attack("bodies that make no sense", tries)


def _vanished(target: _Target) -> AttackResult:
    """Callers that close their connection after some of their bytes; the server must be idle soon after the last."""
    body = json.dumps(
        {"infer_requests": [_text("hello")] * 32, "request_config": {"max_tokens": 4000}}
    ).encode()
    host, port = target.base_url.removeprefix("http://").split(":")
    head = f"POST {protocol.INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def vanish(num_bytes: int) -> Callable[[httpx.Client], str]:
        def attempt(http: httpx.Client) -> str:
            with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as caller:
                caller.sendall(head + body[:num_bytes])
            end, pause = time.monotonic() + _TIMEOUT_S, threading.Event()
            while not target.is_idle():
                if time.monotonic() > end:
                    return "hang"
                pause.wait(_POLL_S)
            return "idle again"

        return attempt

    cuts = [len(body) * cut // _CUTS for cut in range(_CUTS + 1)]
    return target.attack("callers that vanish", [vanish(num_bytes) for num_bytes in cuts])[0]


def _infer(conversation: dict[str, Any]) -> Callable[[httpx.Client], str]:
    return _post(
        protocol.INFER, json.dumps({"infer_requests": [conversation], "request_config": _OPTIONS}).encode()
    )


def _post(path: str, body: bytes) -> Callable[[httpx.Client], str]:
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


def _redirect(path: str) -> Callable[[httpx.Client], str]:
    def attempt(http: httpx.Client) -> str:
        reply = http.post(path.rstrip("/"), headers={"Host": "evil.example"})
        return "accepted" if "evil" in reply.headers.get("location", "") else f"refused {reply.status_code}"

    return attempt


def _text(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _hollow_png(width: int, height: int) -> bytes:
    """A whole PNG of black pixels, one bit each."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + (width + 7) // 8) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
