"""``swift-stage2 bench sync``: what a sync round costs, against a raw broadcast of the same bytes on its transport.

Between two processes on one machine, with untrained models of a wanted size. The broadcast phase is the time inside the
transport; export, checksums, the server's load and the proof stand apart.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.estimates import Spread, pair_ratios
from benchmarks.results import ResultTable, publish, say
from benchmarks.servers import BenchServer, BenchServers, ServerKind
from benchmarks.tiny_model import build_model, build_processor, build_tokenizer, save_model
from swift_stage2.collectives import GlooCommunicator, SingleRank
from swift_stage2.demo.demo_config import free_ports
from swift_stage2.errors import ChildFailed
from swift_stage2.records import RoundOutcome
from swift_stage2.servers import protocol
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.stream import WeightListener, WeightStream, connect_stream
from swift_stage2.weights.sync_round import WeightSync
from swift_stage2.weights.tensors import flatten
from swift_stage2.weights.transport import ServerEndpoint, StockTransport, StreamTransport, WeightTransport

BUDGET = 1.3
BUDGET_FROM_MIB = 100
_BUCKET_MIB = 512
_TIMEOUT_S = 240.0
_MIB = 1 << 20
_CANARY_TOKENS = 4
_PHASES = (
    "canary", "snapshot", "begin", "connect", "pack", "push", "acknowledge", "prove", "total",
)  # fmt: skip
_FLOAT32 = 4
# Feed-forward width is what grows: matrices of a usual shape, and generation that stays quick.
_SMALL = ({"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1},
          {"hidden_size": 32, "num_heads": 1, "depth": 1, "intermediate_size": 64, "out_hidden_size": 32})  # fmt: skip
_USUAL: tuple[dict[str, int], dict[str, int]] = ({}, {})
_USUAL_FROM_MIB = 16


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
    raw: list[float] = field(default_factory=list)
    """Raw broadcasts of the same buckets, into memory that the receiver keeps."""
    raw_into_new: list[float] = field(default_factory=list)
    """The same, into memory that the receiver allocates each time."""
    broadcast: list[float] = field(default_factory=list)
    """Inside the round's transport."""
    rounds: list[dict[str, float]] = field(default_factory=list)
    """Phases of each round, ``total`` and ``canary`` (the learner's own answer) among them."""


def run(options: argparse.Namespace, directory: Path) -> int:
    """Raises UserError when something is not installed, ChildFailed when a server did not answer or prove a round."""
    measured = []
    for mib in options.mib:
        model = directory / f"model-{mib}"
        write_model(model, mib)
        for kind in map(ServerKind, options.servers):
            say(f"{kind}, {mib} MiB")
            with BenchServers(directory / "logs" / f"{kind}-{mib}") as servers:
                measured.append(measure(servers, servers.start(kind, model=model), model, options.repeats))
        shutil.rmtree(model)
    facts = [
        asdict(each) | {"ratios": ratios(each, each.raw), "ratios_to_new": ratios(each, each.raw_into_new)}
        for each in measured
    ]
    publish(directory, "sync", facts, sync_table(measured))
    return 0


def ratios(each: SyncMeasurement, raw: Sequence[float]) -> list[float]:
    """Broadcast phase over the raw broadcast before it."""
    return pair_ratios(each.broadcast, raw)


def measure(servers: BenchServers, server: BenchServer, model: Path, repeats: int) -> SyncMeasurement:
    """Raw broadcasts and rounds in turns, after one of each that is not counted."""
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    module = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).train(False)
    canary = TextCanary(module, AutoTokenizer.from_pretrained(model))
    in_transport: list[float] = []
    stock = server.kind is ServerKind.STOCK

    def make_transport(_: protocol.ServerInfo) -> WeightTransport:
        transport: Any = StockTransport(torch.device("cpu")) if stock else StreamTransport()
        send = transport.send

        def timed(flat: torch.Tensor, deadline: Deadline) -> None:
            started = time.perf_counter()
            send(flat, deadline)
            in_transport.append(time.perf_counter() - started)

        transport.send = timed
        made: WeightTransport = transport
        return made

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
    found = SyncMeasurement(server=server.kind.value, num_bytes=sum(flat.numel() for flat in flats))
    for repetition in range(repeats + 1):
        raw, raw_into_new = _seconds_to_send(to_kept, flats), _seconds_to_send(to_new, flats)
        in_transport.clear()
        phases = _phases(sync.run(repetition + 1, [0]))
        if repetition:
            found.raw.append(raw)
            found.raw_into_new.append(raw_into_new)
            found.broadcast.append(sum(in_transport))
            found.rounds.append(phases)
    for sender in (to_kept, to_new):
        sender.close()
    sync.close()
    return found


def _start_peer(
    servers: BenchServers, transport: str, memory: str, flats: Sequence[torch.Tensor]
) -> RawSender:
    (port,) = free_ports(1)
    sizes = [str(flat.numel()) for flat in flats]
    peer = ("-m", "benchmarks.sync", transport, memory, str(port), *sizes)
    servers.start_process(f"raw-peer-{memory}", (sys.executable, "-u", *peer))
    return RawSender(transport, port)


def _seconds_to_send(sender: RawSender, flats: Sequence[torch.Tensor]) -> float:
    started = time.perf_counter()
    for flat in flats:
        sender.send(flat)
    return time.perf_counter() - started


def sync_table(measured: Sequence[SyncMeasurement]) -> ResultTable:
    """One column per server and size; medians over the repetitions."""
    rows = {
        "raw broadcast": [f"{np.median(each.raw):.4f}" for each in measured],
        "raw broadcast into new memory": [f"{np.median(each.raw_into_new):.4f}" for each in measured],
        "broadcast phase": [f"{np.median(each.broadcast):.4f}" for each in measured],
        "ratio to raw": [Spread.of(ratios(each, each.raw)).words(2) for each in measured],
        "ratio to raw into new memory": [
            Spread.of(ratios(each, each.raw_into_new)).words(2) for each in measured
        ],
        "budget": [
            f"{BUDGET}" if each.num_bytes > 0.99 * BUDGET_FROM_MIB * _MIB else "" for each in measured
        ],
        **{name: [_median_phase(each, name) for each in measured] for name in _PHASES},
    }
    return ResultTable(
        "sync round against a raw broadcast, median seconds",
        ("", *(f"{each.server}, {each.num_bytes / _MIB:.0f} MiB" for each in measured)),
        [(name, *cells) for name, cells in rows.items()],
    )


def _median_phase(measurement: SyncMeasurement, name: str) -> str:
    seconds = [phases.get(name, 0.0) for phases in measurement.rounds]
    if name == "push":  # apart from the broadcast, which has a row of its own
        seconds = [all_of_it - sent for all_of_it, sent in zip(seconds, measurement.broadcast, strict=True)]
    return f"{np.median(seconds):.4f}"


def _phases(outcome: RoundOutcome) -> dict[str, float]:
    report = outcome.reports.get(0)
    if report is None or not report.proven:
        raise ChildFailed(f"a round must be proven to be measured, got {report.error if report else outcome}")
    apart = {"canary": outcome.canary_seconds, "snapshot": outcome.snapshot_seconds, "total": outcome.seconds}
    return {**report.seconds, **apart}


def write_model(directory: Path, mib: int) -> None:
    """Writes a model directory of about ``mib`` MiB of float32 weights, at least 1."""
    text, vision = _USUAL if mib >= _USUAL_FROM_MIB else _SMALL
    tokenizer = build_tokenizer()

    def build(width: int) -> Any:
        text_of = {**text, "intermediate_size": width}
        return build_model(0, vocab_size=len(tokenizer), text=text_of, vision=vision)

    narrow, wide = (
        sum(parameter.numel() * _FLOAT32 for parameter in build(width).parameters()) for width in (64, 128)
    )
    width = max(16, round((mib * _MIB - narrow) / ((wide - narrow) / 64)) + 64)
    save_model(build(width), build_processor(tokenizer), directory)


# --- the receiving end of a raw broadcast: python -m benchmarks.sync TRANSPORT MEMORY PORT NUM_BYTES… ------

_HOST = "127.0.0.1"
_PEER_S = 300.0
OURS = "ours"
STOCK = "stock"
KEPT = "kept"
NEW = "new"
_SECRET = "0" * 64
_POLL_S = 0.1
_RECEIVER_RANK, _SENDER_RANK = 0, 1


class RawSender:
    """The sending end: the transport's own connection, and nothing around it."""

    def __init__(self, transport: str, port: int) -> None:
        self._stream = _connect(port) if transport == OURS else None
        self._group = _join(port, _SENDER_RANK) if transport == STOCK else None

    def send(self, flat: torch.Tensor) -> None:
        if self._stream is not None:
            self._stream.send(flat, _PEER_S)
        elif self._group is not None:
            self._group.broadcast(flat, _SENDER_RANK)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._group = None


def main(argv: Sequence[str]) -> int:
    """Receives these buckets again and again until the sender has gone.

    MEMORY is ``kept``: buffers are allocated and touched before the first broadcast; or ``new``: one is allocated for
    every broadcast, as stock ``swift rollout`` does, and its pages come while it is filled.
    """
    transport, memory, port, *sizes = argv
    kept = [torch.ones(int(size), dtype=torch.uint8) for size in sizes] if memory == KEPT else []
    receive: Callable[[torch.Tensor], None]
    if transport == OURS:
        stream = WeightListener(_HOST, int(port), _SECRET).accept(_PEER_S)
        receive = partial(stream.receive, timeout_s=_PEER_S)
    else:
        receive = partial(_join(int(port), _RECEIVER_RANK).broadcast, src=_SENDER_RANK)
    while True:
        for buffer in kept or (torch.empty(int(size), dtype=torch.uint8) for size in sizes):
            try:
                receive(buffer)
            except (RuntimeError, OSError):
                return 0  # the sender has gone


def _connect(port: int) -> WeightStream:
    end = time.monotonic() + _PEER_S
    while True:
        try:
            return connect_stream(_HOST, port, _SECRET, _PEER_S)
        except ConnectionRefusedError:  # the peer is being started
            if time.monotonic() > end:
                raise
        time.sleep(_POLL_S)


def _join(port: int, rank: int) -> GlooCommunicator:
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(_HOST, port, rank=rank, world_size=2, store_timeout=int(_PEER_S))
    return GlooCommunicator(group, timeout_s=_PEER_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
