"""The learner's pushes to the real server: what is proven, what is caught, whose fault is whose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from live_server import (
    MODEL,
    RunningServer,
    flip_element,
    free_port,
    image_request,
    load_learner,
    train_a_little,
)
from weight_updates import make_updates, mark_suspect, server_at

from swift_stage2.config import Proof, Transport
from swift_stage2.rollout_server.transformers_engine import copy_weights
from swift_stage2.runtime.memory import MemoryFile
from swift_stage2.servers import infer_wire
from swift_stage2.weights.proof import CanaryAnswer
from swift_stage2.weights.publisher import ThreadPublisher
from swift_stage2.weights.transport import OurTransport
from swift_stage2.weights.waited_updates import WaitedUpdates


class GenerateCanary:
    """The learner's answer from Hugging Face's own ``generate``, independent of ms-swift's engine."""

    def __init__(self, module: torch.nn.Module) -> None:
        from swift_stage2.demo.tiny_template import load_tiny_model, tiny_template

        self.request = image_request(shade=120)
        self._config = infer_wire.request_config(
            max_new_tokens=12, temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=1
        )
        self._module = module
        loaded, processor = load_tiny_model(MODEL)
        template = tiny_template(loaded, processor)
        template.set_mode("transformers")
        encoded = template.encode(self.request)
        self._inputs = {
            "input_ids": torch.tensor([encoded["input_ids"]]),
            "pixel_values": encoded["pixel_values"],
            "image_grid_thw": encoded["image_grid_thw"],
            "mm_token_type_ids": encoded["mm_token_type_ids"][None],
        }
        self._closing = (template.tokenizer.eos_token_id,)
        self.latest = CanaryAnswer(self.request, self._config)

    def answer(self) -> CanaryAnswer:
        with torch.no_grad():
            output = self._module.generate(**self._inputs, max_new_tokens=12, do_sample=False)
        tokens = output[0, self._inputs["input_ids"].shape[1] :].tolist()
        shown = CanaryAnswer.without_closing(tokens, self._closing)
        self.latest = CanaryAnswer(self.request, self._config, shown, self._closing)
        return self.latest


class Learner:
    """A module, its canary, and a sync whose transports a test may replace."""

    def __init__(self, server: RunningServer) -> None:
        self.module = load_learner(seed=next(server.versions))
        self.canary = GenerateCanary(self.module)
        self._server = server
        self.sync = self.make_sync()

    def make_sync(self, **options: Any) -> WaitedUpdates:
        servers = [server_at(self._server.base_url, free_port())]
        self.publisher = ThreadPublisher(servers, lambda info: OurTransport(Transport.TCP))
        return make_updates(
            self.module, self.publisher, canary=self.canary, run_id="run-1", timeout_s=30.0, **options
        )

    def push(self) -> Any:
        return self.sync.run([0], version=next(self._server.versions))


@pytest.fixture
def learner(server: RunningServer) -> Iterator[Learner]:
    built = Learner(server)
    yield built
    built.sync.close()


def require_each_push_answered(learner: Any, ask: Callable[[], tuple[int, ...]], proof: str) -> None:
    """After each push ``ask``, the server's greedy answer to the canary, is the learner's own."""
    answers = []
    for _ in range(3):
        outcome = learner.push()
        assert outcome.proven == (0,), outcome.reports[0].error
        assert outcome.reports[0].proof == proof
        answers.append(ask())
        assert learner.canary.latest.agrees(answers[-1])
        train_a_little(learner.module)
    assert len(set(answers)) > 1  # the pushes really moved something


def test_after_each_push_the_servers_greedy_answer_is_the_learners(
    server: RunningServer, learner: Learner
) -> None:
    def ask() -> tuple[int, ...]:
        (completion,) = server.infer([learner.canary.request], max_tokens=12)
        assert completion.weight_version == learner.sync.version
        return completion.token_ids

    require_each_push_answered(learner, ask, "checksums+canary")


def test_where_checksums_prove_the_canary_is_asked_at_first_and_after_a_fault(
    server: RunningServer, learner: Learner
) -> None:
    sync = learner.make_sync(proof=Proof.AUTO)

    def proof(version: int) -> tuple[str, bool]:
        outcome = sync.run([0], version=version)
        return outcome.reports[0].proof if outcome.proven else "none", outcome.canary_seconds > 0

    try:
        told = [proof(next(server.versions)) for _ in range(3)]
        server.engine.copy = flip_element
        told.append(proof(next(server.versions)))
        server.engine.copy = copy_weights
        told += [proof(next(server.versions)) for _ in range(2)]
        mark_suspect(sync, 0)
        told.append(proof(next(server.versions)))
    finally:
        sync.close()
    with_canary, without = ("checksums+canary", True), ("checksums", False)
    assert told[:3] == [with_canary, without, without]
    assert told[3:] == [("none", False), with_canary, without, with_canary]


def test_the_reason_why_memory_was_not_mapped_stands_beside_the_way_that_was_taken(
    server: RunningServer, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = learner.make_sync(proof=Proof.CHECKSUM)
    learner.publisher.make_transport = lambda info: OurTransport()
    monkeypatch.setattr(MemoryFile, "path", "/proc/999999999/fd/3")  # as it is read on another host
    (report,) = sync.run([0], version=next(server.versions)).reports.values()
    sync.close()
    assert report.proven, report.error
    assert report.transport == "tcp (the learner's memory cannot be read here: No such file or directory)"
