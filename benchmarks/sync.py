"""``swift-stage2 bench sync``: a real sync round against a raw broadcast of the same bytes on the same transport.

Rounds and raw broadcasts take turns, bucket by bucket the same bytes between two processes on one machine. The
broadcast phase is the time inside the transport; export, checksums, the server's load and the proof stand apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.raw_peer import KEPT, NEW, OURS, STOCK, RawSender
from benchmarks.servers import BenchServer, BenchServers, ServerKind
from benchmarks.sized_model import write_model
from swift_stage2 import rollout_protocol as protocol
from swift_stage2.collectives import SingleRank
from swift_stage2.command_parser import CommandParser
from swift_stage2.demo.demo_config import free_ports
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.output_directory import claim_directory
from swift_stage2.server_session import Deadline, ServerSession
from swift_stage2.weight_export import WeightExport, flatten
from swift_stage2.weight_sync import RoundOutcome, WeightSync
from swift_stage2.weight_transport import ServerEndpoint, StockTransport, StreamTransport, WeightTransport

BUDGET = 1.3
BUDGET_FROM_MIB = 100
_BUCKET_MIB = 512
_TIMEOUT_S = 240.0
_MIB = 1 << 20
_CANARY_TOKENS = 4
_PHASES = (
    "canary", "export", "begin", "connect", "wait", "pack", "push", "acknowledge", "prove", "total",
)  # fmt: skip


class TimedTransport:
    """A transport that adds up the seconds inside ``send``."""

    def __init__(self, inner: WeightTransport, add: Callable[[float], None]) -> None:
        self._inner = inner
        self._add = add

    def open(self, session: ServerSession, endpoint: ServerEndpoint, deadline: Deadline) -> None:
        self._inner.open(session, endpoint, deadline)

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        started = time.perf_counter()
        self._inner.send(flat, deadline)
        self._add(time.perf_counter() - started)

    def is_lost(self) -> bool:
        return self._inner.is_lost()

    def close(self) -> None:
        self._inner.close()


class TextCanary:
    """A greedy question without an image; the answer is Hugging Face's own ``generate``."""

    def __init__(self, module: Any, tokenizer: Any) -> None:
        self.request: dict[str, Any] = {"messages": [{"role": "user", "content": "Detect all objects"}]}
        self.config = protocol.request_config(
            max_new_tokens=_CANARY_TOKENS,
            temperature=0.0,
            top_p=1.0,
            top_k=-1,
            repetition_penalty=1.0,
            seed=1,
        )
        self._module = module
        text = tokenizer.apply_chat_template(
            self.request["messages"], tokenize=False, add_generation_prompt=True
        )
        self._prompt = tokenizer(text, return_tensors="pt")["input_ids"].to(module.device)
        self._answer: list[int] = []

    def answer(self) -> None:
        with torch.no_grad():
            tokens = self._module.generate(
                input_ids=self._prompt,
                attention_mask=torch.ones_like(self._prompt),
                max_new_tokens=_CANARY_TOKENS,
                do_sample=False,
            )
        self._answer = tokens[0, self._prompt.shape[1] :].tolist()

    def agrees(self, token_ids: Sequence[int]) -> bool:
        return list(token_ids)[: len(self._answer)] == self._answer[: len(token_ids)] and bool(token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncMeasurement:
    """All repetitions of one server and size. Seconds."""

    server: str
    num_bytes: int
    raw: list[float]
    """Raw broadcasts of the same buckets, into memory that the receiver keeps."""
    raw_into_new: list[float]
    """The same, into memory that the receiver allocates each time."""
    broadcast: list[float]
    """Inside the round's transport."""
    rounds: list[dict[str, float]]
    """Phases of each round, ``total`` and ``canary`` (the learner's own answer) among them."""

    @property
    def ratios(self) -> list[float]:
        """Broadcast phase over the raw broadcast before it."""
        return [ours / raw for ours, raw in zip(self.broadcast, self.raw, strict=True)]

    @property
    def ratios_to_new(self) -> list[float]:
        """Broadcast phase over the raw broadcast into new memory before it."""
        return [ours / raw for ours, raw in zip(self.broadcast, self.raw_into_new, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every server and size, prints a table and writes ``sync.json``.

    Raises:
        UserError: an option is out of range, or something is not installed.
        ChildFailed: a server did not answer, or a round was not proven.
    """
    arguments = _parse(argv)
    directory = claim_directory(arguments.output, keep=arguments.keep)
    measured = []
    for mib in arguments.mib:
        model = directory / f"model-{mib}"
        write_model(model, mib)
        for kind in arguments.servers:
            print(f"[bench] {kind}, {mib} MiB", flush=True)
            with BenchServers(directory / "logs" / f"{kind}-{mib}") as servers:
                server = servers.start(kind, model=model)
                measured.append(measure(servers, server, model, arguments.repeats))
        shutil.rmtree(model)
    report = [
        asdict(each) | {"ratios": each.ratios, "ratios_to_new": each.ratios_to_new} for each in measured
    ]
    (directory / "sync.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    Console().print(sync_table(measured))
    return 0


def measure(servers: BenchServers, server: BenchServer, model: Path, repeats: int) -> SyncMeasurement:
    """Raw broadcasts and rounds in turns, after one of each that is not counted."""
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    module = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).train(False)
    canary = TextCanary(module, AutoTokenizer.from_pretrained(model))
    in_transport: list[float] = []
    stock = server.kind is ServerKind.STOCK

    def make_transport(_: protocol.ServerInfo) -> WeightTransport:
        inner: WeightTransport = StockTransport(torch.device("cpu")) if stock else StreamTransport()
        return TimedTransport(inner, in_transport.append)

    export = WeightExport(module)
    sync = WeightSync(
        [ServerEndpoint(server.base_url, server.group_port)],
        control=SingleRank(),
        export=export,
        canary=canary,
        make_transport=make_transport,
        run_id="bench",
        timeout_s=_TIMEOUT_S,
        bucket_mib=_BUCKET_MIB,
    )
    flats = [flatten(export.read(names))[0] for names in export.plan(_BUCKET_MIB * _MIB)]
    to_kept, to_new = (
        _start_peer(servers, STOCK if stock else OURS, memory, flats) for memory in (KEPT, NEW)
    )
    versions = count(1)
    raw, raw_into_new, broadcast, rounds = [], [], [], []
    for repetition in range(repeats + 1):
        raw_seconds, new_seconds = _seconds_to_send(to_kept, flats), _seconds_to_send(to_new, flats)
        in_transport.clear()
        phases = _phases(sync.run(next(versions), [0]))
        if repetition:
            raw.append(raw_seconds)
            raw_into_new.append(new_seconds)
            broadcast.append(sum(in_transport))
            rounds.append(phases)
    for sender in (to_kept, to_new):
        sender.close()
    sync.close()
    return SyncMeasurement(
        server=server.kind.value,
        num_bytes=sum(flat.numel() for flat in flats),
        raw=raw,
        raw_into_new=raw_into_new,
        broadcast=broadcast,
        rounds=rounds,
    )


def _start_peer(
    servers: BenchServers, transport: str, memory: str, flats: Sequence[torch.Tensor]
) -> RawSender:
    (port,) = free_ports(1)
    sizes = [str(flat.numel()) for flat in flats]
    peer = ("-m", "benchmarks.raw_peer", transport, memory, str(port), *sizes)
    servers.start_process(f"raw-peer-{memory}", (sys.executable, "-u", *peer))
    return RawSender(transport, port)


def _seconds_to_send(sender: RawSender, flats: Sequence[torch.Tensor]) -> float:
    started = time.perf_counter()
    for flat in flats:
        sender.send(flat)
    return time.perf_counter() - started


def sync_table(measured: Sequence[SyncMeasurement]) -> Table:
    """One column per server and size; medians over the repetitions."""
    table = Table(title="sync round against a raw broadcast, median seconds", title_justify="left")
    table.add_column("")
    for each in measured:
        table.add_column(f"{each.server}\n{each.num_bytes / _MIB:.0f} MiB", justify="right")
    rows = {
        "raw broadcast": [f"{np.median(each.raw):.4f}" for each in measured],
        "raw broadcast into new memory": [f"{np.median(each.raw_into_new):.4f}" for each in measured],
        "broadcast phase": [f"{np.median(each.broadcast):.4f}" for each in measured],
        "ratio to raw": [_with_quartiles(each.ratios) for each in measured],
        "ratio to raw into new memory": [_with_quartiles(each.ratios_to_new) for each in measured],
        "budget": [
            f"{BUDGET}" if each.num_bytes > 0.99 * BUDGET_FROM_MIB * _MIB else "" for each in measured
        ],
        **{name: [_median_phase(each, name) for each in measured] for name in _PHASES},
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _with_quartiles(ratios: Sequence[float]) -> str:
    return "{1:.2f} ({0:.2f}..{2:.2f})".format(*np.percentile(ratios, (25, 50, 75)))


def _median_phase(measurement: SyncMeasurement, name: str) -> str:
    seconds = [phases.get(name, 0.0) for phases in measurement.rounds]
    if name == "push":  # apart from the broadcast, which has a row of its own
        seconds = [all_of_it - sent for all_of_it, sent in zip(seconds, measurement.broadcast, strict=True)]
    return f"{np.median(seconds):.4f}"


def _phases(outcome: RoundOutcome) -> dict[str, float]:
    report = outcome.reports.get(0)
    if report is None or not report.proven:
        raise ChildFailed(f"a round must be proven to be measured, got {report.error if report else outcome}")
    apart = {"canary": outcome.canary_seconds, "export": outcome.export_seconds, "total": outcome.seconds}
    return {**report.seconds, **apart}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 bench sync",
        description="A sync round against a raw broadcast of the same bytes on the same transport.",
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 100, 1024], help="bytes of weights, MiB")
    parser.add_argument(
        "--servers", nargs="+", type=ServerKind, choices=list(ServerKind),
        default=[ServerKind.TRANSFORMERS, ServerKind.STOCK],
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="pairs per cell (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-sync"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    arguments = parser.parse_args(argv)
    if min(arguments.mib) < 1:
        raise UserError(f"--mib must be at least 1, got mib={min(arguments.mib)}")
    if arguments.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got repeats={arguments.repeats}")
    return arguments
