"""Our rollout server with a model that does not compute: every answer is prepared before, and comes after a wait.

``python -m benchmarks.stand_in_server --model DIR --port N --rows FILE --latency-s S`` speaks the whole wire,
rounds included, so that a learner beside it has its processor to itself. Requests begin and end one by one, as with
continuous batching, and a POST ends with its last one. A row has several answers, given in turn, so that copies of it
can be compared. A request's wait is drawn from the number of its answer, so that it is as long in every arm of a bench,
and its tokens come evenly meanwhile.
Log-probabilities are all the same number: no model has sampled. With ``--stock`` it takes weights as a stock server
does from ms-swift's own client.
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
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import torch
from fastapi import Request

from benchmarks.crowds import Objects, half_right_answer
from swift_stage2 import wire
from swift_stage2.collectives import GlooCommunicator
from swift_stage2.demo.scenes import IMAGE_SIZE, answer_text
from swift_stage2.demo.tiny_template import TINY_VL
from swift_stage2.errors import InstallFailed
from swift_stage2.rollout_server import routes
from swift_stage2.rollout_server.command_line import ServerCommand, serve
from swift_stage2.rollout_server.engine import GenerationJob, GenerationRequest
from swift_stage2.rollout_server.routes import RolloutService
from swift_stage2.rollout_server.swift_generator import EncodedRow, GeneratedRow, RowEnd, SwiftGenerator
from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine, spans_of
from swift_stage2.rollout_server.weight_slot import SlotState
from swift_stage2.servers.infer_wire import SamplingOptions
from swift_stage2.servers.request_checks import RequestLimits

SPREAD = 0.5
"""A wait is drawn evenly from ``1 - SPREAD`` to ``1 + SPREAD`` times the mean."""
SLOW_FACTOR = 10.0
"""So much longer waits a request that is slow."""
NUM_ANSWERS = 7
"""Of a row: as many as the peer bench compares."""
LOG_PROB = -0.5
"""Of every token."""
_MOST_AT_ONCE = 256
_TOKEN_S = 0.05
_LOOPBACK = "127.0.0.1"
_SERVER_RANK, _LEARNER_RANK, _NUM_MEMBERS = 0, 1, 2
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Prepared:
    row: EncodedRow
    answers: Iterator[tuple[int, GeneratedRow]]
    """In turn, each with its number among those of all rows."""


class StandInGenerator(SwiftGenerator):
    """Knows the answers to a data set's rows; the weights are taken and proven, and never used."""

    def learn(self, rows: Path, wait_of: Callable[[int | None], float]) -> None:
        """Encodes every row and writes its answers, before anybody asks; ``wait_of`` an answer's number is its wait."""
        self._wait_of = wait_of
        self._prepared: dict[str, _Prepared] = {}
        lines = rows.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            row = json.loads(line)
            images = [base64.b64encode(Path(path).read_bytes()).decode() for path in row["images"]]
            request = GenerationRequest({"messages": row["messages"][:1], "images": images})
            truth = list(zip(row["objects"]["ref"], map(tuple, row["objects"]["bbox"]), strict=True))
            first = number * NUM_ANSWERS
            answers = tuple((each, self._answer(truth, each)) for each in range(first, first + NUM_ANSWERS))
            encoded = replace(super().encode_row(request), inputs={}, template_inputs=None)
            prepared = _Prepared(encoded, cycle(answers))
            # ms-swift's own client sends a path, which a stock server opens.
            self._prepared[_key(images)] = self._prepared[_key(row["images"])] = prepared

    def _answer(self, truth: Objects, number: int) -> GeneratedRow:
        text = answer_text(half_right_answer(truth, IMAGE_SIZE[0], number))
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return GeneratedRow(text, (*tokens, self.tokenizer.eos_token_id), RowEnd.STOP, None)

    def encode_row(
        self, request: GenerationRequest, is_aborted: Callable[[], bool] = lambda: False
    ) -> EncodedRow:
        """Looks the prompt up. One of another data set, a probe for instance, is encoded and answered with nothing."""
        prepared = self._prepared.get(_key(request.conversation.get("images") or ()))
        if prepared is None:
            return replace(super().encode_row(request, is_aborted), inputs={}, template_inputs=None)
        number, answer = next(prepared.answers)
        # In a place that only the real generator's template uses, the row carries its answer.
        return replace(prepared.row, template_inputs=answer, seed=number)

    def generate_rows(
        self,
        rows: Sequence[EncodedRow],
        sampling: SamplingOptions,
        between_tokens: Callable[[int], Sequence[bool]],
    ) -> list[GeneratedRow]:
        """Waits for one row; ``StandInEngine`` asks for no more at once."""
        (row,) = rows
        given = self._generate(row, between_tokens)
        return [replace(given, log_probs=(LOG_PROB,) * len(given.token_ids) if sampling.logprobs else None)]

    def _generate(self, row: EncodedRow, between_tokens: Callable[[int], Sequence[bool]]) -> GeneratedRow:
        answer: GeneratedRow | None = row.template_inputs
        if answer is None:
            return GeneratedRow("", (self.tokenizer.eos_token_id,), RowEnd.STOP, None)
        left_s = wait_s = self._wait_of(row.seed)
        pause = threading.Event()
        while left_s > 0 and not all(between_tokens(int(len(answer.token_ids) * (1 - left_s / wait_s)))):
            pause.wait(min(left_s, _TOKEN_S))
            left_s -= _TOKEN_S
        return answer


class StandInEngine(TransformersRolloutEngine):
    """Has every request answered by a thread of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._answering = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="answer")
        super().__init__(*args, **options)

    def _run_batch(self, jobs: list[GenerationJob]) -> None:
        for job in jobs:
            self._answering.submit(self._answer, job)

    def _answer(self, job: GenerationJob) -> None:
        stamps = [(self.stamp, 0)]

        def between_tokens(num_tokens: int) -> list[bool]:
            if (stamp := self.stamp) is not stamps[-1][0]:
                stamps.append((stamp, num_tokens))
            return [job.aborted]

        assert job.row is not None
        (row,) = self.generator.generate_rows([job.row], job.request.sampling, between_tokens)
        self._finish(job, job.completion(row, spans_of(stamps, len(row.token_ids))))


class StockWeights:
    """Takes weights as a stock ``swift rollout`` takes them from ms-swift's own client, and loads them nowhere.

    One communicator for a whole run, each bucket announced by HTTP before its broadcast over gloo, no rounds and no
    proof. Stands behind the routes in the place of ``WeightSlot``. Its thread joins communicators and receives.
    """

    state = SlotState.SERVING

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stock-weights")
        self._communicator: Any = None
        self._under_way: list[Future[None]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def admission(self) -> Iterator[None]:
        """A stock server answers always, proven or not; it is for the client not to ask while it pushes."""
        yield

    def join(self, port: int) -> None:
        """Returns before anybody can connect, as stock does. Listens on loopback only."""
        self.leave()
        self._under_way = [self._thread.submit(self._join, port)]

    def expect(self, metadatas: Sequence[dict[str, Any]]) -> None:
        """The next bucket, of these tensors."""
        self._under_way.append(self._thread.submit(self._receive, max(each["end_idx"] for each in metadatas)))

    def load(self) -> None:
        """Waits until all that was announced has arrived. Raises InstallFailed: it did not."""
        under_way, self._under_way = self._under_way, []
        try:
            for each in under_way:
                each.result(timeout=_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            raise InstallFailed(f"weights must arrive within {_TIMEOUT_S:.0f} s: {error!r}") from error

    def leave(self) -> None:
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
    """Ours, and the routes by which ms-swift's client brings weights."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.slot = StockWeights()  # type: ignore[assignment]

    def _table(self) -> dict[tuple[str, str], Callable[..., Any]]:
        return super()._table() | {
            ("GET", wire.WORLD_SIZE): self.world_size,
            ("POST", wire.ENGINE_TYPE): self.engine_type,
            ("POST", wire.INIT_COMMUNICATOR): self.init_communicator,
            ("POST", wire.UPDATE_FLATTENED_PARAMS): self.update_flattened_params,
            ("POST", wire.PROCESS_WEIGHTS): self.process_weights,
            ("POST", wire.CLOSE_COMMUNICATOR): self.close_communicator,
            ("POST", wire.RESET_ENCODER_CACHE): self._reset_prefix_cache,
            ("POST", wire.RESET_MM_CACHE): self._reset_prefix_cache,
        }

    @property
    def _stock(self) -> StockWeights:
        weights: Any = self.slot
        return cast(StockWeights, weights)

    async def world_size(self) -> dict[str, int]:
        return {"world_size": 1}

    async def engine_type(self) -> dict[str, Any]:
        off = dict.fromkeys(("enable_multi_turn", "use_gym_env", "enable_lora"), False)
        return {"engine_type": "StandIn", **off}

    async def init_communicator(self, request: Request) -> dict[str, str]:
        port = (await self._json(request))["port"]
        await self._off_loop(request, lambda _: self._stock.join(port))
        return {"message": "joining"}

    async def update_flattened_params(self, request: Request) -> dict[str, str]:
        metadatas = (await self._json(request))["metadatas"]
        self._stock.expect(metadatas)
        return {"message": "ready for the bucket"}

    async def process_weights(self, request: Request) -> dict[str, str]:
        await self._off_loop(request, lambda _: self._stock.load())
        return {"message": "all weights arrived"}

    async def close_communicator(self, request: Request) -> dict[str, str]:
        await self._off_loop(request, lambda _: self._stock.leave())
        return {"message": "Request received, closing communicator"}


def drawn_latency(mean_s: float, slow_share: float, answer: int | None) -> float:
    """Seconds that a request waits which gets this answer. ``mean_s`` is the mean of those that are not slow."""
    draw = random.Random(answer)
    return (
        mean_s * draw.uniform(1 - SPREAD, 1 + SPREAD) * (SLOW_FACTOR if draw.random() < slow_share else 1.0)
    )


def _key(images: Sequence[str]) -> str:
    return hashlib.blake2b("".join(images).encode(), digest_size=16).hexdigest()


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM; exit status as ``swift-stage2 rollout``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stand_in_server")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--latency-s", type=float, required=True)
    parser.add_argument("--slow-share", type=float, default=0.0)
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
        generator.learn(options.rows, partial(drawn_latency, options.latency_s, options.slow_share))
        return generator

    return serve(
        ServerCommand(
            host="127.0.0.1",
            port=options.port,
            api_key=None,
            has_children=False,
            start_engine=lambda: StandInEngine(load, model=str(options.model)),
            limits=RequestLimits(checks_images=False),  # a path is known by its text, and is not opened
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
