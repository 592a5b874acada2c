"""A plain ``vllm serve`` on this CPU, as a process of its own, for the tests of this folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from stock_server import MODEL, START_S, ServerProcess, start

from swift_stage2.servers import vllm_serve

# `vllm serve` itself needs a distribution that is called `vllm`; the one for CPUs has another name.
PROGRAM = ["-m", "vllm.entrypoints.openai.api_server"]
TRANSFER = ["--weight-transfer-config", '{"backend": "nccl"}']


def start_plain(
    directory: Path, port: int, extra: Sequence[str] = TRANSFER, *, dev: bool = True
) -> ServerProcess:
    """Starts it and returns at once; see ``wait_until_it_serves``. ``dev``: with the routes that a round needs."""
    arguments = [
        *PROGRAM, "--model", str(MODEL), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", *extra,
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", str(int(dev)))
        return start(directory, f"http://127.0.0.1:{port}", arguments)


def wait_until_it_serves(server: ServerProcess) -> None:
    end = time.monotonic() + START_S
    while True:
        assert server.process.poll() is None, server.log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < end, server.log.read_text(errors="replace")[-3000:]
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.base_url}/health", trust_env=False, timeout=5.0).status_code == 200:
                server.descendants()  # a test may kill it before anybody has looked at what it holds
                return
        time.sleep(0.5)  # bounded polling of another process's start


def weight_version(server: ServerProcess) -> str:
    reply = httpx.get(f"{server.base_url}{vllm_serve.WEIGHT_INFO}", trust_env=False, timeout=20.0)
    return vllm_serve.parse_weight_version(reply.json())


def is_paused(server: ServerProcess) -> bool:
    reply = httpx.get(f"{server.base_url}/is_paused", trust_env=False, timeout=20.0)
    return reply.json()["is_paused"] is True
