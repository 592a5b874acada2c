"""``swift-stage2 bench merge``: requests/s of one server at several client ranks, with and without merging.

Every cell asks the same number of image requests, split evenly over the ranks, one POST per rank, all at once;
with one rank that is the single call which the others are compared with. Systems take turns within a
repetition, and no picture comes twice, so that no cache answers.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.benches import MERGED, NAIVE
from benchmarks.estimates import Spread
from benchmarks.results import ResultTable, publish, say
from benchmarks.servers import BenchServers, ServerKind
from swift_stage2.demo.grounding_dataset import PROMPT
from swift_stage2.demo.scenes import SceneKind, Split, make_scene, scene_seed
from swift_stage2.errors import ChildFailed, ProtocolError, UserError
from swift_stage2.servers import protocol


@dataclass(frozen=True, slots=True)
class Cell:
    """One repetition of one system at one number of ranks."""

    system: str
    num_ranks: int
    repetition: int
    seconds: float
    num_requests: int
    num_tokens: int

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds


def check(options: argparse.Namespace) -> None:
    """Every rank asks as much as the others."""
    if any(options.requests % ranks for ranks in options.ranks):
        raise UserError(
            f"--requests must be a multiple of every number of ranks, got requests={options.requests} "
            f"ranks={options.ranks}"
        )


def run(options: argparse.Namespace, directory: Path) -> int:
    """Raises UserError when something is not installed, ChildFailed when a server or a client rank did not answer."""
    cells: list[Cell] = []
    with BenchServers(directory / "logs") as servers, ClientRanks(max(options.ranks)) as clients:
        systems = _start(servers, options.systems, options.requests)
        pictures = count()
        for base_url in systems.values():  # first calls compile and allocate
            clients.post(base_url, _bodies(pictures, options.requests, 1))
        for repetition in range(options.repeats):
            for num_ranks in options.ranks:
                bodies = _bodies(pictures, options.requests, num_ranks)
                for system, base_url in list(systems.items())[:: -1 if repetition % 2 else 1]:
                    # The merger stands before the stock server itself: with its own pictures no cache answers.
                    own = _bodies(pictures, options.requests, num_ranks) if system == MERGED else bodies
                    posted = clients.post(base_url, own)
                    seconds = max(each.ended_s for each in posted) - min(each.started_s for each in posted)
                    num_tokens = sum(each.num_tokens for each in posted)
                    cells.append(Cell(system, num_ranks, repetition, seconds, options.requests, num_tokens))
            say(f"repetition {repetition + 1} of {options.repeats}")
    publish(directory, "merge", [asdict(cell) for cell in cells], merge_table(cells))
    return 0


def merge_table(cells: Sequence[Cell]) -> ResultTable:
    """Median requests/s, and in brackets the median ratio to the same system's single call of the repetition."""
    ranks = sorted({cell.num_ranks for cell in cells})

    def rate(num_ranks: int) -> Callable[[str], str]:
        return lambda system: _rate(cells, system, num_ranks)

    return ResultTable.of(
        f"requests/s, {cells[0].num_requests} image requests (ratio to one single call)",
        dict.fromkeys(cell.system for cell in cells),
        {"system": str, **{f"{number} rank{'s' if number > 1 else ''}": rate(number) for number in ranks}},
    )


def _rate(cells: Sequence[Cell], system: str, num_ranks: int) -> str:
    rate = np.median([cell.requests_per_s for cell in _of(cells, system, num_ranks)])
    found = Spread.of(ratios_to_single_call(cells, system, num_ranks) or [float("nan")])
    beside = f" ({found.median:.2f}; {found.low:.2f}..{found.high:.2f})" if num_ranks > 1 else ""
    return f"{rate:.1f}{beside}"


def ratios_to_single_call(cells: Sequence[Cell], system: str, num_ranks: int) -> list[float]:
    """Rate at ``num_ranks`` over the rate at one rank of the same repetition; empty without such calls."""
    single = {cell.repetition: cell.requests_per_s for cell in _of(cells, system, 1)}
    return [
        cell.requests_per_s / single[cell.repetition]
        for cell in _of(cells, system, num_ranks)
        if cell.repetition in single
    ]


def _of(cells: Sequence[Cell], system: str, num_ranks: int) -> list[Cell]:
    return [cell for cell in cells if cell.system == system and cell.num_ranks == num_ranks]


def _start(servers: BenchServers, names: Sequence[str], num_requests: int) -> Mapping[str, str]:
    """Base URL by system, in the order of ``names``."""
    found: dict[str, str] = {}
    if {NAIVE, MERGED} & set(names):
        found[NAIVE] = servers.start(ServerKind.STOCK, max_batch_size=num_requests).base_url
    if MERGED in names:
        merger = (
            "-m",
            "swift_stage2",
            "merge",
            "--upstream",
            found[NAIVE],
            "--max-batch-size",
            str(num_requests),
        )
        found[MERGED] = servers.start_program("merger", lambda port: (*merger, "--port", str(port))).base_url
    for kind in (ServerKind.VLLM, ServerKind.TRANSFORMERS):
        if kind in names:
            found[kind.value] = servers.start(kind, max_batch_size=num_requests).base_url
    return {name: found[name] for name in names}


def _bodies(pictures: Iterator[int], num_requests: int, num_ranks: int) -> list[bytes]:
    """One ``/infer/`` body per rank, of pictures that nobody has seen."""
    requests = [_request(next(pictures)) for _ in range(num_requests)]
    config = protocol.request_config(
        max_new_tokens=96, temperature=1.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=1
    )
    share = len(requests) // num_ranks
    parts = [requests[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
    return [
        json.dumps({"infer_requests": part, "request_config": config | {"seed": 1 + 4096 * rank}}).encode()
        for rank, part in enumerate(parts)
    ]


def _request(number: int) -> dict[str, Any]:
    scene = make_scene(SceneKind.SHAPES, scene_seed(Split.TRAIN, number, stream=7))
    stream = io.BytesIO()
    scene.image.save(stream, "PNG")
    image = base64.b64encode(stream.getvalue()).decode()
    return {"messages": [{"role": "user", "content": PROMPT}], "images": [image]}


_REPLY_S = 300.0


@dataclass(frozen=True, slots=True)
class Posted:
    """One rank's measurement; moments of the machine's monotonic clock, in seconds."""

    started_s: float
    ended_s: float
    num_tokens: int


class ClientRanks:
    """``num_ranks`` callers, each with a connection of its own; ``post`` uses as many as it has bodies.

    They are threads: a call is one prepared body and its bytes in return, which are read once all have answered.
    """

    def __init__(self, num_ranks: int) -> None:
        self._pool = ThreadPoolExecutor(num_ranks, thread_name_prefix="client-rank")
        headers = {"Content-Type": "application/json"}
        self._clients = [
            httpx.Client(trust_env=False, timeout=_REPLY_S, headers=headers) for _ in range(num_ranks)
        ]

    def __enter__(self) -> ClientRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()
        for client in self._clients:
            client.close()

    def post(self, base_url: str, bodies: Sequence[bytes]) -> list[Posted]:
        """One body per rank, all at once. Raises ChildFailed when one got no good answer."""
        all_here = threading.Barrier(len(bodies))

        def post(http: httpx.Client, body: bytes) -> tuple[float, float, httpx.Response]:
            all_here.wait(_REPLY_S)
            started = time.monotonic()
            response = http.post(f"{base_url}{protocol.INFER}", content=body)
            return started, time.monotonic(), response

        try:
            answers = list(self._pool.map(post, self._clients[: len(bodies)], bodies, timeout=2 * _REPLY_S))
            return [_posted(body, *answer) for body, answer in zip(bodies, answers, strict=True)]
        except (httpx.HTTPError, ProtocolError, ValueError, TimeoutError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ChildFailed(f"a client rank got no answer from {base_url}: {reason}") from error


def _posted(body: bytes, started: float, ended: float, response: httpx.Response) -> Posted:
    response.raise_for_status()
    num_requests = len(json.loads(body)["infer_requests"])
    completions = protocol.parse_infer_reply(response.json(), num_requests)
    return Posted(started, ended, sum(len(each.token_ids) for each in completions))
