"""Conversations of several turns on the unmodified server and on ours: ids, masks and log-probabilities.

The oracle is the code of ms-swift's own GRPO trainer, on the same record; a job's is the learner's own model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from detection_task import make_task
from live_server import free_port, image_request, text_request
from our_server import start_ours, wait_until_healthy
from real_model import make_encoder, make_template
from reward_job import require_equal_log_probs, run_rewards
from scripted_turns import rollout_of
from stock_server import TEMPLATE, ServerProcess, start_stock
from swift.infer_engine.protocol import RolloutOutput
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch, encode_sample
from torchrun_job import RECORDER, assert_replays

from swift_stage2 import wire
from swift_stage2.channel_b.preprocessing import as_sampled, make_target
from swift_stage2.demo.scenes import SceneKind, Split, write_dataset
from swift_stage2.errors import ProtocolError
from swift_stage2.records import Sample, SampleKey
from swift_stage2.servers.infer_wire import Completion, parse_infer_reply

PLUGIN, TASK = (Path(__file__).with_name(f"turns_{name}.py") for name in ("plugin", "task"))
OPTIONS = ["--multi_turn_scheduler", "mixed", "--max_turns", "3"]
CALL_S = 120.0
STEPS = 4
ASKED = {
    "looks again": image_request(30),
    "without an image": text_request("say something"),
    "goes on": image_request(120, "go on with what is here"),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 24},
    "sampled": {"temperature": 1.0, "seed": 17, "max_tokens": 24},
    "cut off": {"temperature": 1.0, "seed": 3, "max_tokens": 5},
}


def start_stock_here(directory: Path) -> ServerProcess:
    server = start_stock(directory, free_port(), OPTIONS, plugins=[PLUGIN])
    server.wait_until_it_answers()
    return server


def start_ours_here(directory: Path) -> ServerProcess:
    plugins = ["--external_plugins", str(TEMPLATE), str(PLUGIN)]
    server = start_ours(directory, free_port(), [*OPTIONS, *plugins])
    wait_until_healthy(server)
    return server


@pytest.fixture(scope="module", params=[start_stock_here, start_ours_here], ids=["stock", "ours"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    start: Callable[[Path], ServerProcess] = request.param
    found = start(tmp_path_factory.mktemp("server"))
    try:
        yield found
    finally:
        found.end()


@pytest.fixture(scope="module")
def seen() -> dict[tuple[str, str], Completion]:
    """What the first server answered, which has ended when the second is asked."""
    return {}


def ask(server: ServerProcess, request: dict[str, Any], options: dict[str, Any]) -> httpx.Response:
    config = {"return_details": True, "logprobs": True, **options}
    body = {"infer_requests": [copy.deepcopy(request)], "request_config": config}
    return httpx.post(f"{server.base_url}{wire.INFER}", json=body, trust_env=False, timeout=CALL_S)


def as_swift_trains(
    request: dict[str, Any], record: dict[str, Any]
) -> tuple[list[int], list[int], list[float] | None]:
    """Token ids, the trained places and their log-probabilities, by ms-swift's GRPO trainer.

    Behind a turn that was cut off its template trains the end of turn as well, which nobody sampled; it then has no
    log-probabilities.
    """
    template = make_template()
    sample = OnPolicySample.from_row(copy.deepcopy(request))
    sample.apply_rollout_output(rollout_output=RolloutOutput(**copy.deepcopy(record)))
    sample.encoded = encode_sample(sample, template)
    _, batch = collate_to_grpo_micro_batch([sample], template, device=torch.device("cpu"))
    (places,) = batch.completion_mask[0].nonzero(as_tuple=True)
    found = batch.rollout_per_token_logps
    values = None if found is None else found[0, places].tolist()
    return list(sample.encoded["input_ids"]), [place + 1 for place in places.tolist()], values


def test_a_conversation_is_trained_as_swift_trains_it_and_alike_on_both_servers(
    server: ServerProcess, seen: dict[tuple[str, str], Completion]
) -> None:
    encoder, num_alike = make_encoder(packing_length=2048), 0
    for name, request in ASKED.items():
        for how, options in CONFIGS.items():
            reply = ask(server, request, options)
            assert reply.status_code == 200, reply.text
            (found,) = parse_infer_reply(reply.json(), 1, {"log_probs"})
            assert len(found.turns) == 3, (name, how, found)
            row = {**request, "objects": {"ref": [], "bbox": []}}
            sample = Sample(SampleKey(0, 0, 0), row, make_task().read_truth(row))
            rollout = rollout_of(sample, found)
            prompt = encoder.encode_prompt(sample)
            target = as_sampled(rollout, 1.0, make_target(rollout, prompt, encoder, make_task()).quality)
            (ours,) = encoder.encode_segment(rollout, prompt, [(target, None)]).encodings
            ids, trained, log_probs = as_swift_trains(request, reply.json()[0])
            sampled = [place for place, label in enumerate(ours["labels"]) if label != -100]
            assert ours["input_ids"] == ids, (name, how)
            if log_probs is not None:
                num_alike += 1
                assert sampled == trained
                assert [ours["behaviour"][place] for place in sampled] == pytest.approx(log_probs)
            ends = {len(prompt.token_ids) + end for _, end in found.turns[:-1]}
            of_template = {place + ahead for place in ends for ahead in range(len(encoder.closing_token_ids))}
            assert sampled == [place for place in trained if place not in of_template]
            first = seen.setdefault((name, how), found)
            assert (found.token_ids, found.turns, found.text) == (first.token_ids, first.turns, first.text)
            assert found.log_probs == pytest.approx(first.log_probs, abs=1e-4)
    assert num_alike >= 5, "most are not cut off"


def test_lists_and_pictures_are_refused_by_name(server: ServerProcess) -> None:
    for words, rule in (("answer twice", "must return one"), ("bring a picture", "text alone, got images")):
        reply = ask(server, text_request(words), CONFIGS["greedy"])
        if reply.status_code == 200:
            with pytest.raises(ProtocolError, match=rule):
                parse_infer_reply(reply.json(), 1)
        else:
            assert reply.status_code == 500
            assert rule in reply.text


def test_a_job_trains_all_turns_by_the_log_probabilities_of_the_server(
    server: ServerProcess, tmp_path: Path
) -> None:
    """The canary, too, is asked again behind its answer: its first turn counts."""
    rows = write_dataset(tmp_path / "shapes", SceneKind.SHAPES, 62, Split.TRAIN, 3)
    run = run_rewards(
        tmp_path / "grpo",
        rows,
        server,
        "grpo",
        "inline",
        max_turns=3,
        task="whole_talk",
        learning_rate=0.0,
        max_steps=STEPS,
        external_plugins=[str(TEMPLATE), str(RECORDER), str(TASK)],
    )
    # Where the model loses itself it samples tokens that stand for an image, which cost a sample.
    require_equal_log_probs(run, may_quarantine=True)
    told = [record for rank in range(2) for record in run.audit(rank, "completion")]
    assert {len(record["turns"]) for record in told} == {3}
    for record in told:
        assert record["turns"][0][0] == 0
        assert record["turns"][-1][1] == len(record["token_ids"]) == record["spans"][-1][2]
    assert any(record["channel"] == "B" for record in run.audit(0, "step"))
    assert_replays(run, STEPS, tmp_path / "replay")
