"""Attacks on a sync round: uninvited peers, stores without an end, peers that stand still, weights that lie.

One real server process; its learner is played here, with zeros for weights.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

import psutil
import torch

from benchmarks.attacks.run import AttackResult, Tries, server_process
from benchmarks.servers import BenchServer, BenchServers, ServerKind
from swift_stage2.errors import ServerFault
from swift_stage2.servers import protocol
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.stream import WeightStream, connect_stream
from swift_stage2.weights.tensors import checksum_tensor, num_bytes

_HOST = "127.0.0.1"
_LONGEST_S = 30.0
_ROUND_S = 600.0
_MIB = 1 << 20
_NUM_STRANGERS, _NUM_SILENT, _NUM_STORES, _NUM_LIES, _NUM_WAITING, _NUM_ENDS = 4000, 128, 100, 50, 20, 3
_LOADS = 10
_WORDS = (
    b"",
    b"\0" * 32,
    b"0" * 64,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00\x3c\x85\x7b\xfc\x01",  # as PyTorch's TCPStore begins
    os.urandom(31),
    os.urandom(4096),
)
_SERVING = "serving"
_STRANGERS = "peers without the secret, 128 of them silent"
_STORE = b"\1" * 8 * _MIB
_CONNECT = """
import sys
from swift_stage2.weights.stream import connect_stream
stream = connect_stream(sys.argv[1], int(sys.argv[2]), sys.argv[3], 60.0)
print("connected", flush=True)
sys.stdin.read()
"""


def attacks() -> list[AttackResult]:
    with tempfile.TemporaryDirectory() as logs, BenchServers(Path(logs)) as servers:
        server = servers.start(ServerKind.TRANSFORMERS)
        with ServerSession(server.base_url) as session:
            found = [
                _strangers(server, session, _STRANGERS, _WORDS, _NUM_STRANGERS, _NUM_SILENT),
                _strangers(server, session, "8 MiB of a peer without the secret", [_STORE], _NUM_STORES),
                _stores_of_callers(server, session),
                _lies(server, session),
                _waiting_loads(server, session),
            ]
        servers.end(server)
        return [*found, _ends_beside_a_frozen_learner(servers)]


class _Learner:
    """One round after another on one server, its weights all zeros."""

    _numbers = count(1)

    def __init__(self, server: BenchServer, session: ServerSession) -> None:
        self._server, self._session = server, session
        self._manifest = session.info(Deadline(_LONGEST_S)).manifest
        self.layout: list[dict[str, object]] = []
        end = 0
        for spec in self._manifest:
            size = num_bytes(spec)
            self.layout.append(spec.to_json() | {"start_idx": end, "end_idx": end + size, "numel": size})
            end += size
        self.flat = torch.zeros(end, dtype=torch.uint8)
        self.round_id = ""

    def ask(self, path: str, body: object) -> object:
        return self._session.post(path, body, Deadline(_LONGEST_S))

    def open(self) -> str:
        """Begins, and lets the server listen; returns the secret."""
        number = next(self._numbers)
        self.round_id = f"round {number}"
        request = protocol.RoundRequest(self.round_id, "attack", number, self._manifest, _ROUND_S)
        self.ask(protocol.BEGIN_ROUND, request.to_json())
        body = {"port": self._server.group_port, "timeout_s": _ROUND_S}
        return protocol.parse_stream_secret(self.ask(protocol.INIT_COMMUNICATOR, body))

    def announce(self) -> None:
        self.ask(protocol.UPDATE_FLATTENED_PARAMS, {"metadatas": self.layout})

    def complete(self, secret: str, sent: torch.Tensor | None = None) -> str:
        """The rest of the round; returns what the server says of itself afterwards."""
        with closing(self.connect(secret)) as stream:
            self.announce()
            stream.send(self.flat if sent is None else sent, _LONGEST_S)
            self.ask(protocol.PROCESS_WEIGHTS, {})
        sums = {spec.name: checksum_tensor(torch.zeros(num_bytes(spec) // 4)) for spec in self._manifest}
        self.ask(protocol.FINISH_ROUND, protocol.FinishRequest(self.round_id, checksums=sums).to_json())
        return self._session.info(Deadline(_LONGEST_S)).state or ""

    def connect(self, secret: str) -> WeightStream:
        return connect_stream(_HOST, self._server.group_port, secret, _LONGEST_S)


def _strangers(
    server: BenchServer,
    session: ServerSession,
    name: str,
    words: Sequence[bytes],
    times: int,
    num_silent: int = 0,
) -> AttackResult:
    """Peers say one word each; ``num_silent`` of them are not heard before a learner has come."""
    tries = Tries(f"{name}, then a learner", server)
    learner = _Learner(server, session)
    secret = learner.open()
    silent: deque[socket.socket] = deque()
    for number in range(times):
        with tries.one():
            silent.append(_present(server.group_port, words[number % len(words)]))
            if len(silent) > num_silent:
                tries.count(_heard(silent.popleft()))
    tries.count("learner let in" if learner.complete(secret) == _SERVING else "lost")
    for peer in silent:
        tries.count(_heard(peer))
    return tries.counted()


def _stores_of_callers(server: BenchServer, session: ServerSession) -> AttackResult:
    tries = Tries("one tensor announced again, of a terabyte, or of nobody", server)
    learner = _Learner(server, session)
    first = learner.layout[0]
    terabyte = {"shape": [1 << 38], "start_idx": 0, "end_idx": 1 << 40, "numel": 1 << 40}
    for changes in ({}, terabyte, {"name": "nobody"}) * _NUM_LIES:
        learner.open()
        with tries.one():
            if not changes:
                learner.announce()
            try:
                learner.ask(protocol.UPDATE_FLATTENED_PARAMS, {"metadatas": [first | changes]})
                tries.count("accepted")
            except ServerFault as fault:
                tries.count("refused" if fault.status in (422, 500) else "lost")
    return tries.counted()


def _lies(server: BenchServer, session: ServerSession) -> AttackResult:
    tries = Tries("one bit changed on the way: info, health and a completion afterwards")
    learner = _Learner(server, session)
    for number in range(_NUM_LIES):
        with tries.one():
            changed = learner.flat.clone()
            changed[number * 7919 % len(changed)] = 1
            state = learner.complete(learner.open(), changed)
            health = session.get(protocol.HEALTH, Deadline(_LONGEST_S))["state"]
            refused = _reason_to_refuse(session)
            is_unproven = {state, health, refused} == {protocol.RefusalReason.UNPROVEN.value}
            tries.count("unproven for all" if is_unproven else "accepted")
    tries.count("proven again" if learner.complete(learner.open()) == _SERVING else "lost")
    return tries.counted()


def _reason_to_refuse(session: ServerSession) -> str | None:
    body = {
        "infer_requests": [{"messages": [{"role": "user", "content": "ping"}]}],
        "request_config": {"max_tokens": 1},
    }
    try:
        session.post(protocol.INFER, body, Deadline(_LONGEST_S))
    except ServerFault as fault:
        return fault.reason
    return None


def _waiting_loads(server: BenchServer, session: ServerSession) -> AttackResult:
    """The loads of one round wait for a learner that sends nothing; then that learner begins anew."""
    tries = Tries(f"{_LOADS} loads that wait for a silent learner, then its next round")
    learner = _Learner(server, session)
    for _ in range(_NUM_WAITING):
        with tries.one(), closing(learner.connect(learner.open())):
            learner.announce()
            with ThreadPoolExecutor(_LOADS) as callers:
                loads = [callers.submit(_load, session) for _ in range(_LOADS)]
                wait(loads, _LONGEST_S, FIRST_COMPLETED)  # refused, because another one waits
                learner.open()
                for load in loads:
                    tries.count(load.result(timeout=2 * _LONGEST_S))
    tries.count("proven" if learner.complete(learner.open()) == _SERVING else "lost")
    return tries.counted()


def _load(session: ServerSession) -> str:
    try:
        session.post(protocol.PROCESS_WEIGHTS, {}, Deadline(_LONGEST_S))
    except ServerFault as fault:
        return {409: "refused at once", 500: "ended with its round"}.get(fault.status or 0, "hang")
    return "accepted"


def _ends_beside_a_frozen_learner(servers: BenchServers) -> AttackResult:
    """SIGTERM while a load waits for a process that stands still; the round has ten minutes."""
    tries = Tries("SIGTERM while a load waits for a frozen learner")
    for _ in range(_NUM_ENDS):
        server = servers.start(ServerKind.TRANSFORMERS)
        process = server_process(server)
        with ServerSession(server.base_url) as session, ThreadPoolExecutor(2) as callers:
            learner = _Learner(server, session)
            frozen = _start_learner(server.group_port, learner.open())
            try:
                frozen.send_signal(signal.SIGSTOP)
                learner.announce()
                loads = [callers.submit(_load, session) for _ in range(2)]
                wait(loads, _LONGEST_S, FIRST_COMPLETED)
                with tries.one():
                    process.send_signal(signal.SIGTERM)
                    tries.count(_end_of(process))
            finally:
                frozen.kill()
                frozen.wait(_LONGEST_S)
        servers.end(server)
    return tries.counted()


def _start_learner(port: int, secret: str) -> subprocess.Popen[bytes]:
    """A process that has connected and is let in."""
    command = [sys.executable, "-c", _CONNECT, _HOST, str(port), secret]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _end_of(process: psutil.Process) -> str:
    try:
        process.wait(_LONGEST_S)
    except psutil.TimeoutExpired:
        process.kill()
        return "hang"
    return "ended"


def _present(port: int, said: bytes) -> socket.socket:
    """A peer that has said this where a learner is awaited."""
    peer = socket.create_connection((_HOST, port), _LONGEST_S)
    with suppress(ConnectionError):  # turned away while it speaks
        peer.sendall(said)
    return peer


def _heard(peer: socket.socket) -> str:
    """Tells whether the peer got an answer, that is whether it was let in."""
    peer.setblocking(False)
    with peer:
        try:
            return "accepted" if peer.recv(1) else "turned away"
        except BlockingIOError:
            return "not answered"
        except ConnectionError:
            return "turned away"
