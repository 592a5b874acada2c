"""Attacks by a server's answers: odd ones in every way, and ones without an end, each of these in a process of its own.

``python -m benchmarks.attacks.answers URL WHO`` is such a process: it asks once and prints what it cost.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from random import Random

from benchmarks.attacks.answer_targets import serving
from benchmarks.attacks.hostile_server import HostileServer, odd_answer
from benchmarks.attacks.result import AttackResult
from benchmarks.results import say
from swift_stage2.channel_b.rollout_client.connection import ServerConnection
from swift_stage2.errors import ServerFault
from swift_stage2.process.background import BackgroundFailures
from swift_stage2.servers import protocol
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
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def attacks() -> list[AttackResult]:
    """Every attack of this group, one after the other."""
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
    kinds: dict[str, Callable[[str], Iterable[bytes]]] = {
        f"gzip bomb of {len(bomb) / 1e6:.1f} MB": lambda path: (_head(len(bomb), b"gzip"), bomb),
        "1 GB of spaces": lambda path: chain([_head(_LONG_MIB * _MIB)], repeat(b" " * _MIB, _LONG_MIB)),
        "1 GB of chunks, no length": lambda path: _chunks(),
        "a byte every 0.2 s": lambda path: _trickle(),
        "100 Continue without end": lambda path: _interim(),
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


def _cost(name: str, answer: Callable[[str], Iterable[bytes]], who: str) -> AttackResult:
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


def _drawn(number: int) -> Callable[[str], Iterable[bytes]]:
    return lambda path: [odd_answer(Random(f"{_SEED} {number} {path}"), path)]


def _gzip_bomb(num_mib: int) -> bytes:
    packer, piece = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16), b" " * _MIB
    return b"".join([*(packer.compress(piece) for _ in range(num_mib)), packer.flush()])


def _head(length: int, encoding: bytes = b"identity") -> bytes:
    return _HEAD + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (encoding, length)


def _chunks() -> Iterable[bytes]:
    yield _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    for _ in range(_LONG_MIB):
        yield b"%x\r\n%b\r\n" % (_MIB, b" " * _MIB)


def _trickle() -> Iterable[bytes]:
    yield _head(_MIB)
    while True:
        time.sleep(0.2)
        yield b" "


def _interim() -> Iterable[bytes]:
    while True:
        yield b"HTTP/1.1 100 Continue\r\n\r\n"


if __name__ == "__main__":
    print(json.dumps(ask(sys.argv[1], sys.argv[2])))
