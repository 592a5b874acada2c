"""Our server on ms-swift's vLLM engine, for the tests of this folder: as a process, and inside the test's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from live_server import RunningServer, serve
from stock_server import ENVIRONMENT, MODEL, START_S, TEMPLATE, VARIABLE, ServerProcess, start

from swift_stage2 import wire
from swift_stage2.rollout_server.command_line import parse_command


def our_arguments(port: int, model: Path = MODEL, torch_dtype: str = "float32") -> list[str]:
    """The stock server's, without the plugin that only stock needs on a CPU."""
    return [
        "--engine", "vllm", "--model", str(model), "--model_type", "stage2_tiny_vl",
        "--template", "stage2_tiny_vl", "--external_plugins", str(TEMPLATE),
        "--host", "127.0.0.1", "--port", str(port), "--torch_dtype", torch_dtype,
        "--vllm_enforce_eager", "true", "--vllm_max_model_len", "1024",
    ]  # fmt: skip


def start_ours(directory: Path, port: int, extra: Sequence[str] = ()) -> ServerProcess:
    """Starts it as a process and returns at once; see ``wait_until_healthy``."""
    arguments = ["-m", "swift_stage2", "rollout", *our_arguments(port), *extra]
    return start(directory, f"http://127.0.0.1:{port}", arguments)


def wait_until_healthy(server: ServerProcess) -> None:
    """The port answers from the start, and says 503 until the model is loaded."""
    end = time.monotonic() + START_S
    seen: set[int] = set()
    while 200 not in seen:
        assert server.process.poll() is None, server.log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < end, server.log.read_text(errors="replace")[-3000:]
        with contextlib.suppress(httpx.TransportError):
            health = f"{server.base_url}{wire.HEALTH}"
            seen.add(httpx.get(health, trust_env=False, timeout=5.0).status_code)
        time.sleep(0.2)  # bounded polling of another process's start
    assert seen == {200, 503}


@contextmanager
def engine_here(
    weights_root: Path | None = None,
    *options: str,
    torch_dtype: str = "float32",
    fault: Path | None = None,
) -> Iterator[RunningServer]:
    """The engine's frontend and the routes in threads of this process; vLLM's own processes below it.

    With ``fault`` their loader goes wrong as that file says, see ``faulty_worker``.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, text in ENVIRONMENT.items():
            patch.setenv(name, text)
        if fault is not None:
            patch.setenv(VARIABLE, str(fault))
            extension = "swift_stage2.rollout_server.vllm_generator.WORKER_EXTENSION"
            patch.setattr(extension, "faulty_worker.FaultyExtension")
        others = set(psutil.Process().children(recursive=True))  # of a server that other tests share
        engine = parse_command([*our_arguments(0, torch_dtype=torch_dtype), *options]).start_engine()
        try:
            engine.load_now(START_S)  # which does nothing to one that loads already
            assert engine.wait_loaded(START_S)
            assert engine.status().state == "ready", engine.status().detail
            with serve(engine, weights_root=weights_root) as server:
                yield server
        finally:
            children = set(psutil.Process().children(recursive=True)) - others
            engine.close(timeout_s=20.0)
            _, left = psutil.wait_procs([each for each in children if is_vllm(each)], timeout=10.0)
            assert not left


def is_vllm(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "VLLM::" in " ".join(process.cmdline())
    return False
