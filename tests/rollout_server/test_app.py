"""The process: what stops it before it starts, who may ask it, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from live_server import CALL_TIMEOUT_S, MODEL, free_port, serve, text_request
from waiting import wait_for

from swift_stage2 import demo, wire
from swift_stage2.cli import main
from swift_stage2.errors import UserError
from swift_stage2.rollout_server.command_line import parse_command
from swift_stage2.rollout_server.routes import RolloutService
from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine
from swift_stage2.servers.http_app import bind, require_key
from swift_stage2.weights.stream import connect_stream
from swift_stage2.weights.tensors import snapshot_bytes
from swift_stage2.wire import TensorSpec

KEY = "a key of this test"
START_TIMEOUT_S = 240.0


def test_the_port_bound_is_the_port_asked_for() -> None:
    port = free_port()
    with bind("127.0.0.1", port) as listener:
        assert listener.getsockname()[1] == port
        with pytest.raises(UserError, match=str(port)):
            bind("127.0.0.1", port)


def test_a_listener_that_others_reach_without_a_key_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for host, key, refused in [("0.0.0.0", None, True), ("0.0.0.0", KEY, False), ("127.0.0.1", None, False)]:
        with bind(host, 0) as listener, pytest.raises(UserError) if refused else nullcontext():
            require_key(listener, key, is_insecure=False)
    monkeypatch.delenv("SWIFT_ROLLOUT_API_KEY", raising=False)
    assert main(["rollout", str(MODEL), "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--insecure" in capsys.readouterr().err
    command = parse_command([str(MODEL), "--insecure", "--trust-remote-code"])
    assert command.is_insecure


@pytest.fixture
def guarded(loaded_engine: TransformersRolloutEngine) -> Iterator[httpx.Client]:
    """A second server on the same engine that wants a key."""
    with (
        serve(loaded_engine, KEY) as server,
        httpx.Client(base_url=server.base_url, timeout=CALL_TIMEOUT_S, trust_env=False) as http,
    ):
        yield http


def test_every_route_but_health_wants_the_key(guarded: httpx.Client) -> None:
    posts = [wire.INFER, wire.RESET_PREFIX_CACHE, wire.WEIGHTS, wire.INSTALL, wire.SLEEP]
    for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        assert guarded.get(wire.SERVER_INFO, headers=wrong).status_code == 401
        assert {guarded.post(path, json={}, headers=wrong).status_code for path in posts} == {401}
    assert guarded.get(wire.HEALTH).status_code == 200
    right = {"Authorization": f"Bearer {KEY}"}
    assert guarded.get(wire.SERVER_INFO, headers=right).status_code == 200
    body = {"infer_requests": [text_request()], "request_config": {"max_tokens": 1}}
    assert guarded.post(wire.INFER, json=body, headers=right).status_code == 200


def test_an_engine_that_cannot_load_is_unhealthy_and_answers_503() -> None:
    def load() -> object:
        raise RuntimeError("no such architecture")

    engine = TransformersRolloutEngine(load, model="none")  # type: ignore[arg-type]
    assert engine.wait_loaded(CALL_TIMEOUT_S)
    ready, body = RolloutService(engine).health()
    assert (ready, body["state"]) == (False, "broken")
    assert "no such architecture" in body["detail"]
    engine.close(timeout_s=5.0)


@contextmanager
def server_process(
    tmp_path: Path, *options: str, host: str = "127.0.0.1", model: Path = MODEL
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """``swift-stage2 rollout``, healthy, with its base URL; killed at the end if it runs still."""
    port = free_port()
    plugin = Path(demo.__file__).parent / "tiny_template.py"
    command = [
        sys.executable, "-m", "swift_stage2", "rollout", str(model), *options,
        "--external-plugins", str(plugin), "--model-type", "stage2_tiny_vl",
        "--template", "stage2_tiny_vl", "--host", host, "--port", str(port), "--device", "cpu",
        "--num-threads", "1",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with log.open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=5.0, trust_env=False) as http:
            wait_until_healthy(http, process, log)
        yield process, f"http://{host}:{port}"
    finally:
        process.kill()
        process.wait(10.0)


@pytest.mark.slow
def test_the_process_serves_and_ends_soon_after_sigterm_in_the_middle_of_a_rollout(tmp_path: Path) -> None:
    with server_process(tmp_path) as (process, base_url):
        with httpx.Client(base_url=base_url, timeout=5.0, trust_env=False) as http:
            body = {
                "infer_requests": [text_request()],
                "request_config": {
                    "max_tokens": 4000,
                    "temperature": 50.0,
                    "seed": 5,
                    "return_details": True,
                },
            }
            with http.stream("POST", wire.INFER, json=body, timeout=60.0) as reply:
                process.send_signal(signal.SIGTERM)
                reply.read()
            assert reply.status_code in (200, 503)
        assert process.wait(20.0) == 0, (tmp_path / "log").read_text()
        socket.create_server(("127.0.0.1", int(base_url.rpartition(":")[2]))).close()


@pytest.mark.slow
def test_sigterm_ends_a_server_whose_install_waits_for_a_silent_learner_and_its_port_is_where_it_was_told(
    tmp_path: Path,
) -> None:
    with (
        server_process(tmp_path, host="127.0.0.2") as (process, base_url),
        httpx.Client(base_url=base_url, timeout=CALL_TIMEOUT_S, trust_env=False) as http,
    ):
        manifest = http.get(wire.SERVER_INFO).json()["manifest"]
        port = free_port()
        size = snapshot_bytes([TensorSpec.from_json(spec) for spec in manifest])
        name, way = {"run_id": "a", "version": 1, "timeout_s": 600.0}, {"way": "tcp", "host": "0.0.0.0"}
        offer = {**name, **way, "manifest": manifest, "port": port, "num_bytes": size}
        secret = http.post(wire.WEIGHTS, json=offer).raise_for_status().json()["secret"]
        listens = {
            each.laddr for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN"
        }
        assert {address.ip for address in listens} == {"127.0.0.2"}
        assert port in {address.port for address in listens}
        with (
            closing(connect_stream("127.0.0.2", port, secret, CALL_TIMEOUT_S)),
            ThreadPoolExecutor(2) as callers,
        ):
            install = {**name, "checksums": {}}
            installs = {
                callers.submit(http.post, wire.INSTALL, json=install, timeout=600.0) for _ in range(2)
            }
            ended, waiting = wait(installs, CALL_TIMEOUT_S, FIRST_COMPLETED)
            assert [each.result(0).status_code for each in ended] == [409]  # because the other one waits
            process.send_signal(signal.SIGTERM)
            assert process.wait(20.0) == 0, (tmp_path / "log").read_text()  # of the install's 600
            (reply,) = (each.result(CALL_TIMEOUT_S) for each in waiting)
        assert (reply.status_code, "the offer has ended" in reply.text) == (500, True)
        socket.create_server(("127.0.0.2", port)).close()


def wait_until_healthy(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    def is_healthy() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(httpx.TransportError):  # not listening yet
            return http.get(wire.HEALTH).status_code == 200
        return False

    wait_for(is_healthy, START_TIMEOUT_S)
