"""Our rollout server with a model that does not compute: every answer is prepared before, and comes after a wait.

``python -m benchmarks.stand_in_server --model DIR --port N --rows FILE --latency-s S`` speaks the whole wire,
rounds included, so that a learner beside it has its processor to itself. The wait of a batch is drawn from the seed of
its first request, or where a client sends none from the number of its row, so that the same POST waits as long in every
arm of a bench. With ``--stock`` it takes weights as a stock server does from ms-swift's own client.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.crowds import half_right_answer
from swift_stage2.collectives import GlooCommunicator
from swift_stage2.demo.grounding_dataset import answer_text
from swift_stage2.demo.scenes import IMAGE_SIZE
from swift_stage2.demo.tiny_template import TINY_VL
from swift_stage2.errors import RoundFailed
from swift_stage2.rollout_server import routes
from swift_stage2.rollout_server.command_line import ServerCommand, serve
from swift_stage2.rollout_server.engine import Engine, GenerationRequest, Sampling
from swift_stage2.rollout_server.routes import RolloutService
from swift_stage2.rollout_server.swift_generator import EncodedRow, GeneratedRow, RowEnd, SwiftGenerator
from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine
from swift_stage2.rollout_server.weight_receiver import Bucket
from swift_stage2.rollout_server.weight_rounds import RoundState
from swift_stage2.servers.request_checks import RequestLimits

SPREAD = 0.5
"""A wait is drawn evenly from ``1 - SPREAD`` to ``1 + SPREAD`` times the mean."""
_ABORT_POLL_S = 0.05
_LOOPBACK = "127.0.0.1"
_SERVER_RANK, _LEARNER_RANK, _NUM_MEMBERS = 0, 1, 2
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Prepared:
    row: EncodedRow
    answer: GeneratedRow
    number: int


class StandInGenerator(SwiftGenerator):
    """Knows the answers to a data set's rows; the weights are taken and proven, and never used."""

    def learn(self, rows: Path, latency_s: float) -> None:
        """Encodes every row and writes its answer, before anybody asks."""
        self._latency_s = latency_s
        self._prepared: dict[str, _Prepared] = {}
        lines = rows.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            row = json.loads(line)
            images = [base64.b64encode(Path(path).read_bytes()).decode() for path in row["images"]]
            request = GenerationRequest({"messages": row["messages"][:1], "images": images}, Sampling())
            truth = list(zip(row["objects"]["ref"], map(tuple, row["objects"]["bbox"]), strict=True))
            text = answer_text(half_right_answer(truth, IMAGE_SIZE[0], number))
            tokens = (
                *self.tokenizer(text, add_special_tokens=False)["input_ids"],
                self.tokenizer.eos_token_id,
            )
            encoded = replace(super().encode_row(request), inputs={}, template_inputs=None)
            prepared = _Prepared(encoded, GeneratedRow(text, tokens, RowEnd.STOP, None), number)
            # ms-swift's own client sends a path, which a stock server opens.
            self._prepared[_key(images)] = self._prepared[_key(row["images"])] = prepared

    def encode_row(
        self, request: GenerationRequest, is_aborted: Callable[[], bool] = lambda: False
    ) -> EncodedRow:
        """Looks the prompt up. One of another data set, a probe for instance, is encoded and answered with nothing."""
        prepared = self._prepared.get(_key(request.conversation.get("images") or ()))
        if prepared is None:
            return replace(super().encode_row(request, is_aborted), inputs={}, template_inputs=None)
        # In a place that only the real generator's template uses, the row carries its answer.
        seed = prepared.number if request.seed is None else request.seed
        return replace(prepared.row, template_inputs=prepared.answer, seed=seed)

    def generate_rows(
        self,
        rows: Sequence[EncodedRow],
        sampling: Sampling,
        *,
        with_log_probs: bool,
        aborted: Callable[[], Sequence[bool]],
    ) -> list[GeneratedRow]:
        nothing = GeneratedRow("", (self.tokenizer.eos_token_id,), RowEnd.STOP, None)
        if any(row.template_inputs is not None for row in rows):
            left_s = drawn_latency(self._latency_s, rows[0].seed)
            pause = threading.Event()
            while left_s > 0 and not all(aborted()):
                pause.wait(min(left_s, _ABORT_POLL_S))
                left_s -= _ABORT_POLL_S
        return [
            replace(row.template_inputs or nothing, end=RowEnd.ABORT if ended else RowEnd.STOP)
            for row, ended in zip(rows, aborted(), strict=True)
        ]


class StockWeights:
    """Takes weights as a stock ``swift rollout`` takes them from ms-swift's own client, and loads them nowhere.

    One communicator for a whole run, each bucket announced by HTTP before its broadcast over gloo, no rounds and no
    proof. Stands behind the routes in the place of ``WeightRounds``. Its thread joins communicators and receives.
    """

    state = RoundState.SERVING

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stock-weights")
        self._communicator: Any = None
        self._under_way: list[Future[None]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def admission(self, round_id: str | None) -> Iterator[bool]:
        """A stock server answers always, proven or not; it is for the client not to ask while it pushes."""
        yield False

    def open_receiver(self, port: int, timeout_s: float) -> str:
        """Returns before anybody can connect, as stock does, and has no secret. Listens on loopback only."""
        self.close_receiver()
        self._under_way = [self._thread.submit(self._join, port)]
        return ""

    def expect(self, bucket: Bucket) -> None:
        self._under_way.append(self._thread.submit(self._receive, bucket.num_bytes))

    def load(self, given_up: threading.Event) -> tuple[str, ...]:
        """Waits until all that was announced has arrived.

        Raises:
            RoundFailed: it did not.
        """
        under_way, self._under_way = self._under_way, []
        try:
            for each in under_way:
                each.result(timeout=_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            raise RoundFailed(f"weights must arrive within {_TIMEOUT_S:.0f} s: {error!r}") from error
        return ()

    def close_receiver(self) -> None:
        """Lets the communicator go, and its port with it."""
        self._thread.submit(self._leave).result(timeout=2 * _TIMEOUT_S)
        self._under_way = []

    def close(self) -> None:
        """Begins nothing any more; what is under way ends with the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _join(self, port: int) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(
            _LOOPBACK, port, rank=_SERVER_RANK, world_size=_NUM_MEMBERS, store_timeout=int(_TIMEOUT_S)
        )
        self._communicator = GlooCommunicator(group, timeout_s=_TIMEOUT_S)

    def _receive(self, num_bytes: int) -> None:
        if self._communicator is None:
            raise RuntimeError("nobody has joined; /init_communicator/ comes first")
        if self._buffer.numel() != num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self._communicator.broadcast(self._buffer, src=_LEARNER_RANK)
        self._communicator.group.barrier()

    def _leave(self) -> None:
        self._communicator = None


class StockService(RolloutService):
    """A service without rounds."""

    def __init__(self, engine: Engine, host: str = "127.0.0.1") -> None:
        super().__init__(engine, host)
        self.rounds = StockWeights()  # type: ignore[assignment]


def drawn_latency(mean_s: float, seed: int | None) -> float:
    """Seconds that a batch waits whose first request has this seed."""
    return mean_s * random.Random(seed).uniform(1 - SPREAD, 1 + SPREAD)


def _key(images: Sequence[str]) -> str:
    return hashlib.blake2b("".join(images).encode(), digest_size=16).hexdigest()


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM; exit status as ``swift-stage2 rollout``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stand_in_server")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--latency-s", type=float, required=True)
    parser.add_argument("--stock", action="store_true")
    options = parser.parse_args(argv)
    if options.stock:
        routes.RolloutService = StockService  # type: ignore[misc]

    def load() -> StandInGenerator:
        torch.set_num_threads(1)
        given: dict[str, Any] = {
            "model_type": TINY_VL,
            "template_type": TINY_VL,
            "torch_dtype": torch.float32,
        }
        generator = StandInGenerator(str(options.model), device_map="cpu", **given)
        generator.prepare()
        generator.learn(options.rows, options.latency_s)
        return generator

    return serve(
        ServerCommand(
            host="127.0.0.1",
            port=options.port,
            api_key=None,
            has_children=False,
            start_engine=lambda: TransformersRolloutEngine(load, model=str(options.model)),
            limits=RequestLimits(checks_images=False),  # a path is known by its text, and is not opened
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
