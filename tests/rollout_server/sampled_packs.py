"""Answers as a server sampled them, packed with their log-probabilities, beside the learner's of one forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from as_sampled import AsSampled
from live_server import LearnerRound, RunningServer, load_learner
from real_model import make_encoder, sample_of
from rollout_batch import generate, make_client, prove

from swift_stage2.channel_b.preprocessing import make_pack, make_segment
from swift_stage2.columns import LOG_PROBS
from swift_stage2.config import DecodingConfig
from swift_stage2.records import Rollout, Segment
from swift_stage2.servers.health_check import ServerKind
from swift_stage2.wire import WeightProof

TOLERANCE = 1e-4  # nats, float32
MEDIA_IDS = {6, 7}  # the learner would look for their pixels


def sample_answers(
    server: RunningServer, proof: WeightProof, rows: Sequence[Mapping[str, Any]], **decoding: Any
) -> list[Rollout]:
    """One rollout of each row by the learner's client, which asks for log-probabilities."""
    encoder, samples = make_encoder(), [sample_of(row, number) for number, row in enumerate(rows)]
    client = make_client(
        server.base_url,
        decoding=DecodingConfig(**decoding),
        run_seed=5,
        run_id="run-1",
        max_inflight_per_server=len(rows),
        columns=(LOG_PROBS,),
        kinds={server.base_url: ServerKind(is_ours=True)},
    )
    with client:
        prove(client, version=proof.version)
        outcome = generate(client, samples, [encoder.request(sample) for sample in samples])
    assert (outcome.failures, client.suspects) == ((), {})
    return [rollout for rollout in outcome.rollouts if MEDIA_IDS.isdisjoint(rollout.token_ids)]


def packed_gaps(rollouts: Sequence[Rollout], learner: Any, temperature: float) -> torch.Tensor:
    """By how much learner and column differ at every sampled token of one pack of all rollouts, in nats."""
    encoder = make_encoder(packing_length=4096)
    segments = [_segment(rollout, encoder) for rollout in rollouts]
    batch = make_pack("p", segments, encoder).batch
    inputs = {
        name: value
        for name, value in batch.items()
        if name not in ("labels", "loss_scale", "length", LOG_PROBS.name)
    }
    with torch.no_grad():
        logits = learner(**inputs, use_cache=False).logits[0].float()
    labels, column = batch["labels"][0], batch[LOG_PROBS.name][0]
    assert (column.shape, column.dtype) == (labels.shape, torch.float32)
    places = _sampled_places(segments, rollouts)
    expected = torch.log_softmax(logits[places - 1] / temperature, -1).gather(1, labels[places, None])[:, 0]
    others = torch.ones_like(labels, dtype=torch.bool)
    others[places] = False
    assert not column[others].any(), "prompts and the ends of turns that were added have no value"
    return (column[places] - expected).abs()


def require_learners_log_probs(
    server: RunningServer, rows: Sequence[Mapping[str, Any]], temperature: float, of_greedy: float
) -> None:
    """Of a pack of sampled answers; ``of_greedy`` is the temperature that the learner takes."""
    learner = load_learner()
    proof = LearnerRound(server, learner).run()
    rollouts = sample_answers(server, proof, rows[:5], temperature=temperature, max_new_tokens=40)
    gaps = packed_gaps(rollouts, learner, of_greedy)
    print(f"temperature {temperature}: {len(gaps)} tokens, at most {float(gaps.max()):.1e} nats")
    assert len(gaps) > 60
    assert float(gaps.max()) < TOLERANCE


def _segment(rollout: Rollout, encoder: Any) -> Segment:
    prompt = encoder.encode_prompt(rollout.sample)
    return make_segment(rollout, prompt, encoder, AsSampled())[0]


def _sampled_places(segments: Sequence[Segment], rollouts: Sequence[Rollout]) -> torch.Tensor:
    places, start = [], 0
    for segment, rollout in zip(segments, rollouts, strict=True):
        begin = start + len(rollout.prompt_token_ids)
        places += range(begin, begin + len(rollout.token_ids))
        start += segment.num_tokens
    return torch.tensor(places)
