"""Attacks by a server's answers: odd ones in every way, and ones without an end, each of these in a process of its own.

``python -m benchmarks.attacks.answers URL WHO`` is such a process: it asks once and prints what it cost.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from random import Random
from typing import Any

import httpx

from benchmarks.attacks.hostile_server import Answer, HostileServer, odd_answer
from benchmarks.attacks.run import AttackResult
from benchmarks.results import say
from swift_stage2.channel_b.rollout_client import RolloutClient, ServedWeights
from swift_stage2.channel_b.rollout_client.connection import ServerConnection
from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.config import DecodingConfig
from swift_stage2.errors import ProtocolError, ServerFault
from swift_stage2.fence import InferFence
from swift_stage2.process.background import BackgroundFailures
from swift_stage2.records import Sample, SampleKey
from swift_stage2.rollout_merger.dispatcher import Dispatcher, Upstream
from swift_stage2.rollout_merger.merged_post import SeedLayout
from swift_stage2.rollout_merger.routes import create_app
from swift_stage2.servers import protocol
from swift_stage2.servers.http_app import SHUTDOWN_GRACE_S, HttpServer, bind
from swift_stage2.servers.probe import SuspectProbe
from swift_stage2.servers.session import Deadline, ServerSession

NUM_ODD_ANSWERS = 20_000
_SEED = 1
_MIB = 1 << 20
_BOMB_MIB = 2900
_LONG_MIB = 1024
_CALL_S = 20.0
_LEEWAY_S = 5.0  # over the deadline, on a busy machine
_CHILD_S = 300.0
_NUM_REQUESTS = 8
_CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
_CHUNK = b"%x\r\n%b\r\n" % (_MIB, b" " * _MIB)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def attacks() -> list[AttackResult]:
    return [*odd_answers(NUM_ODD_ANSWERS), *endless_answers()]


def odd_answers(num_answers: int) -> list[AttackResult]:
    """At least so many drawn answers to everything that reads any, by target."""
    failures = BackgroundFailures()
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    with HostileServer(lambda path: []) as server, serving(server.url, failures) as targets:
        number = 0
        while len(server.calls) < num_answers:
            number += 1
            server.answer = _drawn(number)
            for target, end in targets.ask_all().items():
                ends[target][end] += 1
        ends["threads"][targets.what_the_threads_did(failures)] += 1
        for line in targets.failures[:20]:
            say(line)
        say(f"{len(server.calls):,} odd answers were given")
    return [
        AttackResult(f"odd answers to the {target}", found.total(), dict(found))
        for target, found in ends.items()
    ]


def endless_answers() -> list[AttackResult]:
    """A bomb, a gigabyte, and trickles, against a deadline of 20 s."""
    bomb = _gzip_bomb(_BOMB_MIB)
    kinds: dict[str, Answer] = {
        f"gzip bomb of {len(bomb) / 1e6:.1f} MB": lambda path: (_head(len(bomb), b"gzip"), bomb),
        "1 GB of spaces": lambda path: chain([_head(_LONG_MIB * _MIB)], repeat(b" " * _MIB, _LONG_MIB)),
        "1 GB of chunks, no length": lambda path: chain([_CHUNKED], repeat(_CHUNK, _LONG_MIB)),
        "a byte every 0.2 s": lambda path: _trickle(),
        "100 Continue without end": lambda path: repeat(b"HTTP/1.1 100 Continue\r\n\r\n"),
    }
    return [
        _cost(f"{name} to the {who}", answer, who)
        for name, answer in kinds.items()
        for who in ("client", "session")
    ]


def ask(url: str, who: str) -> dict[str, object]:
    """One call, and what it cost this process: seconds and MiB beyond what it had."""
    before_kib, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    if who == "client":
        connection = ServerConnection(url, api_key=None, connect_timeout_s=_CALL_S)
        request = {"messages": [{"role": "user", "content": "x"}]}
        result = connection.infer([request] * _NUM_REQUESTS, {"max_tokens": 64}, timeout_s=_CALL_S)
        said = f"{result.end}: {result.reason}"
    else:
        with ServerSession(url) as session:
            try:
                said = f"accepted {session.get(protocol.WORLD_SIZE, Deadline(_CALL_S))!r:.40}"
            except ServerFault as fault:
                said = f"{fault.kind}: {fault}"
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return {"said": said, "seconds": time.monotonic() - started, "peak_mib": peak_kib / 1024}


def _cost(name: str, answer: Answer, who: str) -> AttackResult:
    with HostileServer(answer) as server:
        child = subprocess.run(
            (sys.executable, "-m", __name__, server.url, who),
            stdout=subprocess.PIPE,
            timeout=_CHILD_S,
            check=False,
        )
    if child.returncode != 0:
        return AttackResult(name, 1, {"traceback": 1})
    found = json.loads(child.stdout.splitlines()[-1])
    say(f"{name}: {found['said'][:160]}")
    end = "accepted" if found["said"].startswith(("answered", "accepted")) else "fault"
    if found["seconds"] > _CALL_S + _LEEWAY_S:
        end = "hang"
    return AttackResult(name, 1, {end: 1}, found["peak_mib"], found["seconds"])


def _drawn(number: int) -> Answer:
    return lambda path: [odd_answer(Random(f"{_SEED} {number} {path}"), path)]


def _gzip_bomb(num_mib: int) -> bytes:
    packer, piece = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16), b" " * _MIB
    return b"".join([*(packer.compress(piece) for _ in range(num_mib)), packer.flush()])


def _head(length: int, encoding: bytes = b"identity") -> bytes:
    return _HEAD + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (encoding, length)


def _trickle() -> Iterable[bytes]:
    yield _head(_MIB)
    while True:
        time.sleep(0.2)
        yield b" "


_TARGET_CALL_S = 10.0
_LONGEST_S = 3 * _TARGET_CALL_S
_PROBE_INTERVAL_S = 0.02
_TARGET_REQUEST = {"messages": [{"role": "user", "content": "x"}]}
_DECODING = DecodingConfig(max_new_tokens=64)


class AnswerTargets:
    """Real parts in front of one server, for as long as ``serving`` lasts."""

    def __init__(self, url: str, merger_url: str, client: RolloutClient, probe: SuspectProbe) -> None:
        self._url = url
        self._merger_url = merger_url
        self._client = client
        self._connection = ServerConnection(url, api_key=None, connect_timeout_s=_TARGET_CALL_S)
        self._probe = probe
        self._config = protocol.request_config(
            max_new_tokens=64, temperature=0.5, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=7
        )
        # One for all calls: it loads certificates, which takes longer than a call.
        self._http = httpx.Client(timeout=_LONGEST_S, trust_env=False)
        self._merger_log = _Log()
        self.failures: list[str] = []
        """The rules that the command broke, in words."""

    def ask_all(self) -> Mapping[str, str]:
        """The end per target: ``record``, ``fault``, ``traceback`` or ``hang``."""
        targets: dict[str, Callable[[], str]] = {
            "client": self._generate,
            "connection": self._infer,
            "session": partial(
                self._ask, lambda session: session.info(Deadline(_TARGET_CALL_S)), ServerFault
            ),
            "round proof": partial(self._ask, _proof_of, (ServerFault, ProtocolError)),
            "merger /infer/": partial(self._merged, "POST", protocol.INFER),
            "merger control": partial(self._merged, "GET", protocol.WORLD_SIZE),
        }
        return {name: self._watched(name, target) for name, target in targets.items()}

    def what_the_threads_did(self, failures: BackgroundFailures) -> str:
        """``traceback`` if a background thread failed, else ``fault``."""
        self.failures += failures.take()
        self.failures += self._merger_log.lines
        if not self._probe.is_alive:
            self.failures.append("the suspect probe's thread has ended")
        return "traceback" if self.failures else "fault"

    def _watched(self, name: str, target: Callable[[], str]) -> str:
        started = time.monotonic()
        try:
            end = target()
        except Exception as error:  # counted: this is what the attack is for
            self.failures.append(f"{name}: {type(error).__name__}: {error}"[:300])
            return "traceback"
        return "hang" if time.monotonic() - started > _LONGEST_S else end

    def _generate(self) -> str:
        self._client.set_proven({self._url: ServedWeights(None, 3, "one")})
        sample = Sample(SampleKey(epoch=0, position=0, index=0), row={})
        self._client.submit([sample], [_TARGET_REQUEST])
        outcome = self._client.next_finished(_LONGEST_S)
        assert outcome is not None
        assert len(outcome.rollouts) + len(outcome.returned) + len(outcome.quarantined) == 1
        return "record" if outcome.rollouts else "fault"

    def _infer(self) -> str:
        result = self._connection.infer([_TARGET_REQUEST], self._config, timeout_s=_TARGET_CALL_S)
        return "record" if result.end is PostEnd.ANSWERED else "fault"

    def _ask(self, call: Callable[[ServerSession], object], faults: Any) -> str:
        with ServerSession(self._url) as session:
            try:
                call(session)
            except faults:
                return "fault"
        return "record"

    def _merged(self, method: str, path: str) -> str:
        asks = path == protocol.INFER
        body = {"infer_requests": [_TARGET_REQUEST], "request_config": self._config} if asks else None
        self._http.post(self._merger_url + protocol.PROCESS_WEIGHTS, json={})
        reply = self._http.request(method, self._merger_url + path, json=body)
        if reply.status_code != httpx.codes.OK:
            return "fault"
        assert not asks or isinstance(json.loads(reply.content), list)
        return "record"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The merger's own complaints count while this lasts."""
        loggers = [logging.getLogger(name) for name in ("swift_stage2.rollout_merger", "uvicorn.error")]
        for logger in loggers:
            logger.addHandler(self._merger_log)
        clients = logging.getLogger("swift_stage2.channel_b.rollout_client")
        level, clients.propagate = clients.level, False  # it tells every suspect, some thousands here
        clients.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(self._merger_log)
            clients.setLevel(level)
            clients.propagate = True
            self._connection.close()
            self._http.close()


def _proof_of(session: ServerSession) -> object:
    return protocol.RoundProof.from_json(session.post(protocol.FINISH_ROUND, {}, Deadline(_TARGET_CALL_S)))


class _Log(logging.Handler):
    """Keeps what a thread of the merger, or the web server around it, could not deal with."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[:300])


@contextmanager
def serving(url: str, failures: BackgroundFailures) -> Iterator[AnswerTargets]:
    """All targets in front of the server at ``url``; the probe asks it all the time."""
    upstream = Upstream(url, api_key=None, timeout_s=_TARGET_CALL_S)
    dispatcher = Dispatcher(upstream, max_batch_size=1, layout=SeedLayout(), gather_s=0.0)
    listener = bind("127.0.0.1", 0)
    server = HttpServer(create_app(dispatcher), partial(dispatcher.close, SHUTDOWN_GRACE_S))
    dispatcher.start()
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="merger under attack", daemon=True
    )
    thread.start()
    probe = SuspectProbe(rank=0, api_key=None, interval_s=_PROBE_INTERVAL_S, failures=failures)
    probe.start()
    probe.watch([url])
    client = RolloutClient(
        [url],
        fence=InferFence(version=3),
        decoding=_DECODING,
        request_timeout_s=_TARGET_CALL_S,
        run_seed=1,
        rank=0,
        world_size=1,
        run_id="run",
    )
    targets = AnswerTargets(url, f"http://127.0.0.1:{listener.getsockname()[1]}", client, probe)
    try:
        with client, targets.listening():
            yield targets
    finally:
        probe.stop()
        server.should_exit = True
        thread.join(_LONGEST_S)


if __name__ == "__main__":
    print(json.dumps(ask(sys.argv[1], sys.argv[2])))
