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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.client_ranks import ClientRanks
from benchmarks.servers import BenchServers, ServerKind
from swift_stage2 import rollout_protocol as protocol
from swift_stage2.command_parser import CommandParser
from swift_stage2.demo.demo_config import free_ports
from swift_stage2.demo.grounding_dataset import PROMPT
from swift_stage2.demo.scenes import SceneKind, Split, make_scene, scene_seed
from swift_stage2.errors import UserError
from swift_stage2.output_directory import claim_directory

MERGED = "stock merged"
NAIVE = "stock naive"
BUDGET = 0.9
BUDGET_RANKS = 4


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all cells, prints a table and writes ``merge.json``.

    Raises:
        UserError: an option is out of range, or something is not installed.
        ChildFailed: a server or a client rank did not answer.
    """
    arguments = _parse(argv)
    directory = claim_directory(arguments.output, keep=arguments.keep)
    cells: list[Cell] = []
    with BenchServers(directory / "logs") as servers, ClientRanks(max(arguments.ranks)) as clients:
        systems = _start(servers, arguments.systems, arguments.requests)
        pictures = iter(range(1_000_000_000))
        for base_url in systems.values():  # first calls compile and allocate
            clients.post(base_url, _bodies(pictures, arguments.requests, 1))
        for repetition in range(arguments.repeats):
            for num_ranks in arguments.ranks:
                bodies = _bodies(pictures, arguments.requests, num_ranks)
                order = list(systems.items())
                if repetition % 2:
                    order.reverse()
                for system, base_url in order:
                    # The merger stands before the stock server itself: with its own pictures no cache answers.
                    own = _bodies(pictures, arguments.requests, num_ranks) if system == MERGED else bodies
                    posted = clients.post(base_url, own)
                    seconds = max(each.ended_s for each in posted) - min(each.started_s for each in posted)
                    num_tokens = sum(each.num_tokens for each in posted)
                    cells.append(Cell(system, num_ranks, repetition, seconds, arguments.requests, num_tokens))
            print(f"[bench] repetition {repetition + 1} of {arguments.repeats}", flush=True)
    (directory / "merge.json").write_text(
        json.dumps([asdict(cell) for cell in cells]) + "\n", encoding="utf-8"
    )
    Console().print(merge_table(cells))
    return 0


def merge_table(cells: Sequence[Cell]) -> Table:
    """Median requests/s, and in brackets the median ratio to the same system's single call of the repetition."""
    ranks = sorted({cell.num_ranks for cell in cells})
    table = Table(
        title=f"requests/s, {cells[0].num_requests} image requests (ratio to one single call)",
        title_justify="left",
    )
    table.add_column("system")
    for num_ranks in ranks:
        table.add_column(f"{num_ranks} rank{'s' if num_ranks > 1 else ''}", justify="right")
    for system in dict.fromkeys(cell.system for cell in cells):
        row = []
        for num_ranks in ranks:
            rate = np.median([cell.requests_per_s for cell in _of(cells, system, num_ranks)])
            ratios = ratios_to_single_call(cells, system, num_ranks)
            low, middle, high = np.percentile(ratios, (25, 50, 75)) if ratios else (np.nan,) * 3
            row.append(
                f"{rate:.1f} ({middle:.2f}; {low:.2f}..{high:.2f})" if num_ranks > 1 else f"{rate:.1f}"
            )
        table.add_row(system, *row)
    return table


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
        (port,) = free_ports(1)
        place = ("--port", str(port), "--max-batch-size", str(num_requests))
        merger = ("-m", "swift_stage2", "merge", "--upstream", found[NAIVE], *place)
        found[MERGED] = f"http://127.0.0.1:{port}"
        tree = servers.start_process("merger", (sys.executable, "-u", *merger))
        servers.await_answer(found[MERGED], tree)
    for kind in (ServerKind.VLLM, ServerKind.TRANSFORMERS):
        if kind in names:
            found[kind.value] = servers.start(kind, max_batch_size=num_requests).base_url
    return {name: found[name] for name in names}


def _bodies(pictures: Any, num_requests: int, num_ranks: int) -> list[bytes]:
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


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 bench merge", description="requests/s at several client ranks on one server."
    )
    systems = [NAIVE, MERGED, ServerKind.VLLM.value, ServerKind.TRANSFORMERS.value]
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems[:3])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of client ranks")
    parser.add_argument("--requests", type=int, default=64, help="requests per cell (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-merge"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got repeats={arguments.repeats}")
    if min(arguments.ranks) < 1 or any(arguments.requests % ranks for ranks in arguments.ranks):
        raise UserError(
            f"--requests must be a multiple of every number of ranks, got requests={arguments.requests} "
            f"ranks={arguments.ranks}"
        )
    return arguments
