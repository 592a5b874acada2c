"""The process of our server on vLLM: stock's records, and what is left when any part of it is killed."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from live_server import free_port, image_request, text_request
from our_server import is_vllm, start_ours, wait_until_healthy
from stock_server import START_S, ServerProcess, start_stock

from swift_stage2 import wire
from swift_stage2.columns import asked_by
from swift_stage2.servers import infer_wire

CALL_S = 60.0
GONE_S = 60.0
ENDLESS = {"temperature": 2.0, "seed": 3, "max_tokens": 900}
SHARED_MEMORY = Path("/dev/shm")

IMAGES = [
    image_request(30),
    image_request(120, "what is here"),
    text_request("say something"),
    image_request(210),
]
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 48},
    "sampled": {"temperature": 1.0, "seed": 17, "max_tokens": 32, "logprobs": True},
    "top_k and top_p": {
        "temperature": 0.9,
        "seed": 5,
        "top_k": 5,
        "top_p": 0.8,
        "max_tokens": 32,
        "logprobs": True,
    },
    "no top_k": {"temperature": 1.3, "seed": 5, "top_k": -1, "top_p": 1.0, "max_tokens": 32},
    "penalty": {"temperature": 0.0, "repetition_penalty": 1.3, "max_tokens": 32},
    "cut": {"temperature": 0.0, "max_tokens": 3},
    "no limit": {"temperature": 0.0},
}


def ask(server: ServerProcess, requests: Sequence[dict[str, Any]], options: dict[str, Any]) -> httpx.Response:
    body = {"infer_requests": list(requests), "request_config": {"return_details": True, **options}}
    url = f"{server.base_url}{wire.INFER}"
    return httpx.post(url, json=body, trust_env=False, timeout=CALL_S)


def records(server: ServerProcess) -> dict[str, list[Any]]:
    replies = {name: ask(server, IMAGES, options) for name, options in CALLS.items()}
    assert {reply.status_code for reply in replies.values()} == {200}
    return {name: reply.json() for name, reply in replies.items()}


@pytest.fixture(scope="module")
def stock_records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Answers of the unmodified server; it has ended before ours starts."""
    server = start_stock(tmp_path_factory.mktemp("stock"), free_port())
    try:
        server.wait_until_it_answers()
        return records(server)
    finally:
        server.end()


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[ServerProcess]:
    yield from _started(tmp_path)


def _started(directory: Path) -> Iterator[ServerProcess]:
    server = start_ours(directory, free_port())
    try:
        wait_until_healthy(server)
        yield server
    finally:
        server.end()


class Traces:
    """Traces that a server could leave behind, noted while it lives."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.processes = server.descendants()
        self._segments = {name for each in self.processes for name in _mapped(each)}
        assert self._segments  # vLLM talks to its worker through shared memory
        names = [" ".join(each.cmdline()) for each in self.processes]
        assert any(name.startswith("VLLM::EngineCore") for name in names)

    def left(self) -> list[str]:
        alive = [f"{each.pid} {each.name()}" for each in self.processes if each.is_running()]
        owners = {f"-{each.pid}-" for each in self.processes}
        segments = [
            path.name
            for path in SHARED_MEMORY.iterdir()
            if path.name in self._segments or any(owner in path.name for owner in owners)
        ]
        return [*alive, *segments]

    def assert_gone(self) -> None:
        """No process and no shared memory, after at most some seconds, and the port is free."""
        end = time.monotonic() + GONE_S
        while self.left():
            assert time.monotonic() < end, self.left()
            if self._server.process.poll() is not None:
                time.sleep(0.1)  # bounded polling of other processes' ends
        socket.create_server(("127.0.0.1", self._server.port)).close()


def _mapped(process: psutil.Process) -> set[str]:
    prefix = f"{SHARED_MEMORY}/"
    lines = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()
    paths = [line.partition(prefix)[2] for line in lines if prefix in line]
    return {path for path in paths if not path.endswith("(deleted)")}


def test_the_records_are_the_stock_servers_and_sigterm_leaves_nothing(
    stock_records: dict[str, list[Any]], tmp_path: Path
) -> None:
    for server in _started(tmp_path):
        for name, mine in records(server).items():
            asked = asked_by(CALLS[name])
            for reply in (mine, stock_records[name]):
                completions = infer_wire.parse_infer_reply(reply, len(IMAGES), asked)
                assert all((each.log_probs is not None) == bool(asked) for each in completions)
            for got, wanted in zip(mine, stock_records[name], strict=True):
                _assert_equal_record(name, got, wanted)
        _end_by_sigterm(server)


def _assert_equal_record(name: str, got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    mine, stock = got["response"], wanted["response"]
    assert mine.keys() == stock.keys()
    for key in ("usage", "prompt_token_ids", "prompt_logprobs", "images_size", "object"):
        assert mine[key] == stock[key], (name, key)
    ((my_choice,), (stock_choice,)) = mine["choices"], stock["choices"]
    assert my_choice.keys() == stock_choice.keys()
    for key in ("index", "message", "finish_reason", "token_ids", "routed_experts"):
        assert my_choice[key] == stock_choice[key], (name, key)
    if stock_choice["logprobs"] is None:
        assert my_choice["logprobs"] is None
    else:
        numbers = [entry["logprob"] for entry in stock_choice["logprobs"]["content"]]
        assert [entry["logprob"] for entry in my_choice["logprobs"]["content"]] == pytest.approx(
            numbers, abs=1e-4
        )


def _end_by_sigterm(server: ServerProcess) -> None:
    """In the middle of a rollout: its caller gets what there is."""
    traces = Traces(server)
    with ThreadPoolExecutor(1) as pool:
        with _in_the_making(pool, server, [text_request(), image_request()]) as running:
            server.process.send_signal(signal.SIGTERM)
            reply = running.result(CALL_S)
    assert reply.status_code == 200, reply.text
    reasons = [record["response"]["choices"][0]["finish_reason"] for record in json.loads(reply.text)]
    assert reasons == ["abort", "abort"]
    assert server.process.wait(GONE_S) == 0, server.log.read_text(errors="replace")[-3000:]
    traces.assert_gone()


@pytest.mark.parametrize("victim", ["VLLM::EngineCore", "VLLM::Worker"])
def test_when_vllm_dies_open_requests_fail_health_says_so_and_the_process_ends(
    ours: ServerProcess, victim: str
) -> None:
    traces = Traces(ours)
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=ours.base_url, trust_env=False) as http:
        with _in_the_making(pool, ours, [text_request(), image_request()]) as running:
            ours.named(victim).kill()
        seen: set[int] = set()
        end = time.monotonic() + GONE_S
        while ours.process.poll() is None:
            assert time.monotonic() < end
            try:
                seen.add(http.get(wire.HEALTH, timeout=5.0).status_code)
            except httpx.TransportError:
                time.sleep(0.05)  # the port is closed; bounded polling of the process's end
        reply = running.result(CALL_S)
    assert reply.status_code == 503
    assert "died" in reply.json()["detail"]
    assert 503 in seen
    assert ours.process.returncode == 1
    assert "the engine broke" in ours.log.read_text(errors="replace")
    traces.assert_gone()


@pytest.mark.parametrize("killed", ["supervisor", "server"])
def test_when_a_process_of_it_is_killed_nothing_outlives_it(ours: ServerProcess, killed: str) -> None:
    """Whom the user has started is the supervisor; the server is right below."""
    traces = Traces(ours)
    victim = ours.process if killed == "supervisor" else traces.processes[0]
    with ThreadPoolExecutor(1) as pool:
        with _in_the_making(pool, ours, [text_request()]) as running:
            victim.kill()
        with suppress(httpx.TransportError):  # one that is told of its supervisor's end still answers
            running.result(CALL_S)
    ours.process.wait(GONE_S)
    traces.assert_gone()


def test_a_server_killed_while_it_loads_leaves_nothing(tmp_path: Path) -> None:
    server = start_ours(tmp_path, free_port())
    try:
        end = time.monotonic() + START_S
        while not any(is_vllm(each) for each in server.descendants()):
            assert time.monotonic() < end
            assert server.process.poll() is None
            time.sleep(0.05)  # bounded polling of another process's start
        below = server.descendants()
        server.process.kill()
        server.process.wait(GONE_S)
        _, left = psutil.wait_procs(below, timeout=GONE_S)
        assert not left, [each.cmdline() for each in left]
    finally:
        server.end()


@contextmanager
def _in_the_making(
    pool: ThreadPoolExecutor, server: ServerProcess, requests: Sequence[dict[str, Any]]
) -> Iterator[Future[httpx.Response]]:
    """All of a call's requests, running and unable to end inside the block: the worker is held.

    Before that it answers once, since the first call of all needs it also to be admitted.
    """
    assert ask(server, requests, {"max_tokens": 1}).status_code == 200
    worker = server.named("VLLM::Worker")
    worker.suspend()
    try:
        running = pool.submit(ask, server, requests, ENDLESS)
        _wait_until_running(server, len(requests))
        yield running
    finally:
        with suppress(psutil.NoSuchProcess):
            worker.resume()


def _wait_until_running(server: ServerProcess, num_requests: int) -> None:
    end = time.monotonic() + CALL_S
    with httpx.Client(base_url=server.base_url, trust_env=False, timeout=5.0) as http:
        while http.get(wire.HEALTH).json()["num_running"] != num_requests:
            assert time.monotonic() < end
            time.sleep(0.02)  # bounded polling of a state
