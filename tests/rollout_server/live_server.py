"""The parts that the server's tests share: a client of a running server, and the learner's side of a round."""

from __future__ import annotations

import base64
import io
import os
import socket
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from free_port import free_port as free_port
from PIL import Image, ImageDraw

from swift_stage2 import demo, wire
from swift_stage2.compat import declare_operators
from swift_stage2.errors import WeightSyncError
from swift_stage2.rollout_server.routes import RolloutService
from swift_stage2.rollout_server.transformers_engine import copy_weights
from swift_stage2.runtime.memory import MemoryFile
from swift_stage2.servers.http_app import HttpServer, bind
from swift_stage2.servers.infer_wire import Completion, parse_infer_reply
from swift_stage2.servers.request_checks import RequestLimits
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.snapshot import SnapshotFile, WeightIdentity
from swift_stage2.weights.stream import WeightStream, connect_stream
from swift_stage2.weights.tensors import checksums_by_name
from swift_stage2.wire import WeightOffer, WeightProof, WeightWay

MODEL = Path(demo.__file__).parent / "stage1"
CALL_TIMEOUT_S = 60.0


def picture(shade: int = 200, size: int = 112) -> Image.Image:
    image = Image.new("RGB", (size, size), (250, 250, 250))
    ImageDraw.Draw(image).rectangle((20, 30, 70, 80), fill=(shade, 10, 10))
    return image


def base64_png(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def hollow_png(width: int, height: int) -> bytes:
    """A whole PNG of black pixels, one bit each: kilobytes that say megapixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + (width + 7) // 8) * height), 9)
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def image_request(shade: int = 200, text: str = "find") -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"<image>{text}"}],
        "images": [base64_png(picture(shade))],
    }


def text_request(text: str = "hello") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


GREEDY = {"max_tokens": 8, "temperature": 0.0, "return_details": True}


@dataclass
class RunningServer:
    """One server in a thread of this process, and a client for it."""

    engine: Any  # TransformersRolloutEngine or VllmRolloutEngine
    service: RolloutService
    http: httpx.Client
    base_url: str
    versions: Iterator[int] = field(default_factory=lambda: iter(range(1, 10_000)))

    def infer(self, requests: Sequence[dict[str, Any]], **options: Any) -> list[Completion]:
        reply = self.post_infer(requests, **options)
        assert reply.status_code == 200, reply.text
        return list(parse_infer_reply(reply.json(), len(requests)))

    def post_infer(self, requests: Sequence[dict[str, Any]], **options: Any) -> httpx.Response:
        return self.post(
            wire.INFER, {"infer_requests": list(requests), "request_config": {**GREEDY, **options}}
        )

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.http.post(path, json={} if body is None else body)

    def state(self) -> str:
        return str(self.http.get(wire.SERVER_INFO).json()["state"])


@contextmanager
def serve(
    engine: Any,
    api_key: str | None = None,
    limits: RequestLimits | None = None,
    weights_root: Path | None = None,
) -> Iterator[RunningServer]:
    """A server with a service of its own on port 0, in a thread, for as long as the context lasts."""
    service = RolloutService(engine, weights_root=weights_root, limits=limits)
    listener = bind("127.0.0.1", 0)
    base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    uvicorn_server = HttpServer(service.app(api_key), service.end_work)
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=base_url, timeout=CALL_TIMEOUT_S, trust_env=False, headers=headers) as http:
        yield RunningServer(engine, service, http, base_url)
    uvicorn_server.should_exit = True
    thread.join(15.0)
    assert not thread.is_alive()


def call_and_wait(server: RunningServer, path: str, body: bytes = b"{}") -> socket.socket:
    host, port = server.base_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=CALL_TIMEOUT_S)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@contextmanager
def held_before(
    server: RunningServer, num_forwards: int
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Generation stops before that forward; yields (has stopped there, let it go)."""
    forwards: list[None] = []
    stopped, go_on = threading.Event(), threading.Event()

    def pause(*_: Any) -> None:
        forwards.append(None)
        if len(forwards) == num_forwards:
            stopped.set()
            assert go_on.wait(CALL_TIMEOUT_S)

    handle = server.engine.generator.model.register_forward_pre_hook(pause)
    try:
        yield stopped, go_on
    finally:
        go_on.set()
        handle.remove()


def hold_copies(server: RunningServer) -> tuple[threading.Event, threading.Event]:
    """An install stops before it copies; returns (has stopped there, let it go). The next test finds a sound one."""
    stopped, go_on = threading.Event(), threading.Event()

    def hold(*weights: Any) -> None:
        stopped.set()
        assert go_on.wait(CALL_TIMEOUT_S)
        copy_weights(*weights)

    server.engine.copy = hold
    return stopped, go_on


class SharedFile:
    """A learner's memory file, with anything in it."""

    def __init__(self, content: bytes, name: str = "snapshot") -> None:
        self.file = MemoryFile(name, len(content))
        # Written, not mapped: what maps it then is the server.
        self.file.memory.release()
        os.pwrite(self.file.fd, content, 0)

    @property
    def num_mapped(self) -> int:
        """How many times it is mapped in this process."""
        return num_mappings(self.file.fd)

    def close(self) -> None:
        self.file.close()


def num_mappings(descriptor: int) -> int:
    """How many times the file is mapped in this process."""
    inode = str(os.stat(descriptor).st_ino)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("memfd:" in line and line.split()[4] == inode for line in maps)


class LearnerRound:
    """The learner's calls of one round, in order; each step may be left out or repeated by a test."""

    def __init__(self, server: RunningServer, module: torch.nn.Module, *, run_id: str = "run-1") -> None:
        self.server = server
        self.export = WeightExport(module)
        self.version = next(server.versions)
        self.run_id = run_id
        self.stream: WeightStream | None = None
        self.snapshot = snapshot_of(self.export, WeightIdentity(run_id, self.version))

    def offer(self, way: WeightWay, timeout_s: float = 60.0, **place: Any) -> httpx.Response:
        manifest = self.export.manifest()
        offer = WeightOffer(self.run_id, self.version, manifest, way, timeout_s=timeout_s, **place)
        return self.server.post(wire.WEIGHTS, offer.to_json())

    def connect(self, timeout_s: float = 20.0) -> None:
        port, num_bytes = free_port(), self.snapshot.file.num_bytes
        reply = self.offer(WeightWay.STREAM, timeout_s, port=port, num_bytes=num_bytes)
        assert reply.status_code == 200, reply.text
        with socket.create_connection(("127.0.0.1", port), 1.0):
            pass  # the reply means that it listens, also to strangers
        self.stream = connect_stream("127.0.0.1", port, reply.json()["secret"], timeout_s)

    def push(self) -> None:
        self.connect()
        assert self.stream is not None
        self.stream.send(self.snapshot.file.memory, CALL_TIMEOUT_S)

    def push_shared(self) -> SharedFile:
        """From a copy that the learner does not map."""
        file = SharedFile(bytes(self.snapshot.file.memory))
        answer = self.offer(WeightWay.SHARED_MEMORY, path=file.file.path).json()
        assert answer["taken"], answer
        return file

    @property
    def installation(self) -> dict[str, Any]:
        """Body of its INSTALL."""
        sums = checksums_by_name(self.snapshot.tensors)
        return {"run_id": self.run_id, "version": self.version, "checksums": sums}

    def install(self, **options: Any) -> httpx.Response:
        return self.server.post(wire.INSTALL, self.installation | options)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def run(self) -> WeightProof:
        """The whole round."""
        self.push()
        reply = self.install()
        self.close()
        assert reply.status_code == 200, reply.text
        return WeightProof.from_json(reply.json())


def skip_copy(*_: Any) -> None:
    """In the place of ``engine.copy``: a load that changes nothing."""


def flip_element(parameters: Any, weights: Any) -> None:
    """A load with one wrong element."""
    copy_weights(parameters, weights)
    next(iter(parameters.values())).view(-1)[0] += 1


def snapshot_of(export: WeightExport, identity: WeightIdentity) -> SnapshotFile:
    """The module's weights now, ready to be pushed."""
    manifest = export.manifest()
    snapshot = SnapshotFile(manifest, bucket_bytes=1 << 20)
    snapshot.put(export.read([spec.name for spec in manifest]))
    with suppress(WeightSyncError):  # a test's own
        snapshot.describe(identity)
    return snapshot


def load_learner(*, seed: int | None = None, model: Path = MODEL) -> torch.nn.Module:
    """The learner's model from plain Hugging Face; with a seed, after a training step of sorts."""
    declare_operators()
    from transformers import Qwen2_5_VLForConditionalGeneration

    module = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return module


def train_a_little(module: torch.nn.Module) -> None:
    """Moves all weights visibly."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def load_generator(dtype: torch.dtype = torch.float32) -> Any:
    torch.set_num_threads(1)
    from swift_stage2.demo import tiny_template
    from swift_stage2.rollout_server.swift_generator import SwiftGenerator

    name = tiny_template.TINY_VL
    return SwiftGenerator(
        str(MODEL), model_type=name, template_type=name, torch_dtype=dtype, device_map="cpu"
    )
