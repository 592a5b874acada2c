"""Client ranks as processes of their own: each posts one prepared ``/infer/`` body at the same moment as the others.

``python -m benchmarks.client_ranks`` is one of them: a line of JSON with what to post, then an empty line
as the signal to post it, and a line of JSON with what was measured.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import httpx

from swift_stage2.errors import ChildFailed, ProtocolError
from swift_stage2.servers import protocol

_REPLY_S = 300.0
_START_S = 60.0
_END_S = 5.0
_READY = "ready"


@dataclass(frozen=True, slots=True)
class Posted:
    """What one rank measured; moments of the machine's monotonic clock, in seconds."""

    started_s: float
    ended_s: float
    num_completions: int
    num_tokens: int


class ClientRanks:
    """``num_ranks`` idle processes; ``post`` uses the first of them."""

    def __init__(self, num_ranks: int) -> None:
        command = [sys.executable, "-m", "benchmarks.client_ranks"]
        self._ranks = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(num_ranks)
        ]

    def __enter__(self) -> ClientRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._ranks:
            rank.kill()  # it holds nothing that could be lost
        for rank in self._ranks:
            rank.communicate(timeout=_END_S)

    def post(self, base_url: str, bodies: Sequence[bytes]) -> list[Posted]:
        """One body per rank, all at once.

        Raises:
            ChildFailed: a rank got no good answer.
        """
        ranks = self._ranks[: len(bodies)]
        for rank, body in zip(ranks, bodies, strict=True):
            _write(rank, json.dumps({"base_url": base_url, "body": body.decode()}))
        for rank in ranks:
            _read(rank, _START_S)  # it has everything and waits
        for rank in ranks:
            _write(rank, "")
        replies = [_read(rank, _REPLY_S) for rank in ranks]
        for reply in replies:
            if not isinstance(reply, dict):
                raise ChildFailed(f"a client rank got no answer from {base_url}: {reply}")
        return [Posted(**reply) for reply in replies]


def main() -> int:
    """One rank; ends with its input."""
    headers = {"Content-Type": "application/json"}
    with httpx.Client(trust_env=False, timeout=_REPLY_S, headers=headers) as http:
        for line in sys.stdin:
            wanted = json.loads(line)
            print(json.dumps(_READY), flush=True)
            if not sys.stdin.readline():
                break
            try:
                answer: Any = asdict(_post(http, wanted["base_url"], wanted["body"].encode()))
            except (httpx.HTTPError, ProtocolError, ValueError) as error:
                answer = f"{type(error).__name__}: {error}"
            print(json.dumps(answer), flush=True)
    return 0


def _post(http: httpx.Client, base_url: str, body: bytes) -> Posted:
    started = time.monotonic()
    response = http.post(f"{base_url}{protocol.INFER}", content=body)
    ended = time.monotonic()
    response.raise_for_status()
    num_requests = len(json.loads(body)["infer_requests"])
    completions = protocol.parse_infer_reply(response.json(), num_requests)
    return Posted(started, ended, len(completions), sum(len(each.token_ids) for each in completions))


def _write(rank: subprocess.Popen[str], line: str) -> None:
    assert rank.stdin is not None
    try:
        rank.stdin.write(f"{line}\n")
        rank.stdin.flush()
    except OSError as error:
        raise ChildFailed(f"a client rank has ended with status {rank.poll()}") from error


def _read(rank: subprocess.Popen[str], timeout_s: float) -> Any:
    """One line; the rank writes nothing else, so that none is ever left in a buffer."""
    assert rank.stdout is not None
    readable, _, _ = select.select([rank.stdout], [], [], timeout_s)
    line = rank.stdout.readline() if readable else ""
    if not line:
        raise ChildFailed(f"a client rank must answer within {timeout_s:.0f} s, it did not")
    return json.loads(line)


if __name__ == "__main__":
    sys.exit(main())
