"""A plain ``vllm serve`` as a rollout server: pushes by vLLM's own weight transfer, rollouts by its OpenAI route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from live_server import free_port, image_request, load_learner, train_a_little
from our_server import engine_here
from packaging.version import Version
from plain_vllm import is_paused, start_plain, wait_until_it_serves, weight_version
from rollout_batch import ask
from stock_server import ServerProcess
from test_weight_sync import GenerateCanary
from torchrun_job import run_learner, write_config
from weight_updates import make_updates, mark_suspect, server_at

from swift_stage2.channel_b.rollouts import RolloutClient
from swift_stage2.config import DecodingConfig, Transport
from swift_stage2.demo.scenes import SceneKind, Split, write_dataset
from swift_stage2.errors import ServerFault
from swift_stage2.records import BatchOutcome, RoundOutcome
from swift_stage2.servers import vllm_serve
from swift_stage2.servers.health_check import ServerKind
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.publisher import ThreadPublisher
from swift_stage2.weights.stock_transport import VllmTransport
from swift_stage2.weights.transport import OurTransport

pytestmark = pytest.mark.skipif(
    Version(vllm.__version__) < Version("0.32"), reason="a plain vllm serve needs vLLM 0.32"
)
_CPU = torch.device("cpu")
_NUM_TOKENS = 12
_REQUESTS = [image_request(shade, text) for shade, text in ((200, "find"), (120, "find red"), (60, "count"))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it alive."""
    server = start_plain(tmp_path_factory.mktemp("plain"), free_port())
    try:
        wait_until_it_serves(server)
        yield server
    finally:
        server.end()


class Learner:
    """A module, its canary and its pushes, and a rank's client beside them."""

    def __init__(self, server: ServerProcess, *, seed: int = 1, transport: Any = VllmTransport) -> None:
        self.server = server
        self.module = load_learner(seed=seed)
        self.canary = GenerateCanary(self.module)
        self.transport = transport
        self.publisher = ThreadPublisher(
            [server_at(server.base_url, free_port())], lambda info: self.transport(_CPU)
        )
        self.sync = make_updates(self.module, self.publisher, canary=self.canary)
        with ServerSession(server.base_url) as session:
            model = vllm_serve.find_info(session, Deadline(20.0))
        assert model is not None
        self.client = RolloutClient(
            [server.base_url],
            decoding=DecodingConfig(temperature=0.0, max_new_tokens=_NUM_TOKENS),
            request_timeout_s=60.0,
            run_seed=1,
            rank=0,
            world_size=1,
            run_id="run",
            kinds={server.base_url: ServerKind(chat_model=model.chat_model)},
        )

    def push(self) -> RoundOutcome:
        outcome = self.sync.run([0])
        self.client.update(self.server.base_url, outcome.version if outcome.proven else 0, closed=False)
        return outcome

    def rollouts(self, requests: Sequence[dict[str, Any]] = _REQUESTS) -> BatchOutcome:
        return ask(self.client, requests)

    def close(self) -> None:
        self.client.close()
        self.sync.close()


@pytest.fixture
def learner(plain: ServerProcess) -> Iterator[Learner]:
    built = Learner(plain)
    yield built
    built.close()


def _tokens(outcome: BatchOutcome) -> list[tuple[int, ...]]:
    assert len(outcome.rollouts) == len(_REQUESTS), outcome
    return [rollout.token_ids for rollout in outcome.rollouts]


def test_pushes_bring_new_weights_and_rollouts_are_those_of_our_engine(learner: Learner) -> None:
    """Greedy tokens and prompts of images equal those of our vLLM engine after a push of the same weights."""
    with engine_here() as ours:
        publisher = ThreadPublisher(
            [server_at(ours.base_url, free_port())], lambda info: OurTransport(Transport.TCP)
        )
        our_sync = make_updates(learner.module, publisher, canary=learner.canary)
        answers = []
        for version in range(1, 4):
            outcome = learner.push()
            assert outcome.proven == (0,), outcome.reports[0].error
            report = outcome.reports[0]
            assert (report.proof, report.transport) == ("canary", "gloo")
            assert report.num_bytes == sum(
                each.numel() * each.element_size() for each in learner.module.parameters()
            )
            said = vllm_serve.WeightVersion.parse(weight_version(learner.server))
            assert said == vllm_serve.WeightVersion("run", version)
            assert our_sync.run([0]).proven == (0,)
            expected = ours.infer(_REQUESTS, max_tokens=_NUM_TOKENS)
            rollouts = learner.rollouts().rollouts
            assert [each.token_ids for each in rollouts] == [each.token_ids for each in expected]
            # Bytes that are no character yet are written as such by ours alone.
            assert [each.text for each in rollouts] == [each.text.rstrip("\ufffd") for each in expected]
            assert [each.prompt_token_ids for each in rollouts] == [
                each.prompt_token_ids for each in expected
            ]
            assert {each.version for each in rollouts} == {version}
            answers.append(tuple(each.token_ids for each in rollouts))
            train_a_little(learner.module)
        our_sync.close()
    assert len(set(answers)) == 3  # the pushes really moved something


class _LeavesOneOut(VllmTransport):
    """Neither announces nor sends one bias of the vision tower, which changes few answers."""

    def _carry_bucket(self, push: Any, bucket: Any) -> None:
        kept = tuple(spec for spec in bucket.specs if "visual.blocks.0.attn.proj.bias" not in spec.name)
        super()._carry_bucket(push, replace(bucket, specs=kept))


class _BreaksOff(VllmTransport):
    """Fails before the third tensor of a bucket that was announced whole."""

    num_sent = 0

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        self.num_sent += 1
        if self.num_sent == 3:
            raise ServerFault("broken off")
        super().send(flat, deadline)


def test_parameters_that_no_tensor_reached_are_named(plain: ServerProcess) -> None:
    learner = Learner(plain, transport=_LeavesOneOut)
    error = str(learner.push().reports[0].error)
    assert "1 of" in error
    assert "attn.proj.bias" in error
    assert is_paused(plain)
    learner.transport = VllmTransport
    assert learner.push().proven == (0,)
    learner.close()


def test_a_push_that_breaks_off_leaves_the_server_suspect_and_the_next_one_mends_it(
    plain: ServerProcess,
) -> None:
    """Its layers lie in pieces: what came of them must not be counted among the tensors of the next push."""
    learner = Learner(plain, seed=3, transport=_BreaksOff)
    assert learner.push().failed == (0,)
    assert is_paused(plain)
    assert not learner.rollouts().rollouts
    learner.transport = VllmTransport
    train_a_little(learner.module)
    outcome = learner.push()
    assert outcome.proven == (0,), outcome.reports[0].error
    assert len(_tokens(learner.rollouts())) == len(_REQUESTS)
    learner.close()


def test_a_request_that_it_refuses_is_given_up_alone(learner: Learner) -> None:
    assert learner.push().proven == (0,)
    broken = {"messages": [{"role": "user", "content": "<image>find"}], "images": ["AAAA"]}
    learner.rollouts([_REQUESTS[0], broken])  # the first failure, behind a success
    outcome = learner.rollouts([_REQUESTS[0], broken])
    assert [rollout.sample.key.index for rollout in outcome.rollouts] == [0]
    assert [sample.key.index for sample, _ in outcome.quarantined] == [1]


def test_two_ranks_train_both_channels_and_every_round_is_proven(
    plain: ServerProcess, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    rows = write_dataset(tmp_path / "shapes", SceneKind.SHAPES, 62, Split.TRAIN, 3)
    config = write_config(directory, rows, plain, b_ratio=0.3, swift={"max_steps": 44})
    run = run_learner(config, directory, ranks=2, inject="*:3:await_packs,*:3:await_rounds")
    assert run.status == 0, run.output[-3000:]
    plans = [[(step["channel"], step["version"]) for step in run.audit(rank, "step")] for rank in (0, 1)]
    assert plans[0] == plans[1]
    wanted = [step for step in run.audit(0, "step") if step["wants_b"]]
    ran = [step for step in wanted if step["channel"] == "B"]
    assert ran, [step["skip_reason"] for step in wanted]
    rounds = run.audit(0, "round")
    assert [record["version"] for record in rounds] == list(range(1, len(rounds) + 1))
    assert len(rounds) >= 5
    reports = [report for record in rounds for report in record["servers"].values()]
    assert all(report["proven"] for report in reports), [report["error"] for report in reports]
    assert {(report["proof"], report["transport"]) for report in reports} == {("canary", "gloo")}
    assert run.last_weights(0) == run.last_weights(1)


def test_a_server_that_was_started_again_is_suspect_until_a_push(tmp_path: Path) -> None:
    port = free_port()
    server = start_plain(tmp_path, port)
    try:
        wait_until_it_serves(server)
        learner = Learner(server)
        assert learner.push().proven == (0,)
        assert not learner.publisher.lost_servers()
        server.end()
        assert learner.publisher.lost_servers() == (0,)
        server = learner.server = start_plain(tmp_path, port)
        wait_until_it_serves(server)
        outcome = learner.rollouts()
        assert not outcome.rollouts
        assert "weight_version=None" in str(learner.client.suspects)
        assert learner.client.take_suspicions() == {server.base_url}
        mark_suspect(learner.sync, 0)
        assert learner.push().proven == (0,)
        assert len(_tokens(learner.rollouts())) == len(_REQUESTS)
        learner.close()
    finally:
        server.end()
