"""A few timed calls with the run's own decoding, and what channel B makes of the answers: parsed, matched, encoded.

The first call asks for one rollout, the second for as many as the run would keep in flight there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.packing_line import make_segment
from swift_stage2.channel_b.records import MatchQuality, Rollout, Sample, VersionSpan
from swift_stage2.channel_b.rollout_client.connection import PostResult, ServerConnection
from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.channel_b.task import Task
from swift_stage2.config import DecodingConfig, Stage2Config
from swift_stage2.doctor.finding import Outcome, failed, ok, warning
from swift_stage2.errors import SampleError
from swift_stage2.servers import protocol

_SEED = 1
_FEW_PARSED = 0.5


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One ``/infer/`` call and its answers."""

    num_rollouts: int
    seconds: float
    rollouts: tuple[Rollout, ...]

    @property
    def rollouts_per_s(self) -> float:
        return self.num_rollouts / self.seconds


def check_calls(
    connection: ServerConnection, encoder: Encoder, samples: Sequence[Sample], config: Stage2Config, key: str
) -> Outcome[tuple[TimedCall, ...]]:
    """Times a call of one rollout and one of ``max_inflight_per_server``."""
    rollout = config.rollout
    sizes = dict.fromkeys((1, rollout.max_inflight_per_server))  # each once, in this order
    calls = []
    for size in sizes:
        chosen = [samples[number % len(samples)] for number in range(size)]
        started = time.perf_counter()
        result = _infer(connection, encoder, chosen, rollout.decoding, rollout.request_timeout_s)
        seconds = time.perf_counter() - started
        if result.end is PostEnd.TIMED_OUT:
            return failed(
                f"{size} rollout(s) at once took longer than request_timeout_s={rollout.request_timeout_s:g}",
                f"write rollout.request_timeout_s: {2 * rollout.request_timeout_s:g}, or a smaller "
                "max_inflight_per_server or max_new_tokens",
            )
        if result.end is not PostEnd.ANSWERED:
            return failed(
                f"{size} rollout(s) at once: {result.reason}",
                f"read the log of {key}; if its context is too short for prompt + max_new_tokens="
                f"{rollout.decoding.max_new_tokens}, raise vllm_max_model_len",
            )
        rollouts = tuple(_rollout(*pair) for pair in zip(chosen, result.completions, strict=True))
        calls.append(TimedCall(size, seconds, rollouts))
    shown = ", ".join(f"{call.num_rollouts} in {call.seconds:.2f} s" for call in calls)
    return ok(f"{shown}: {calls[-1].rollouts_per_s:.2f} rollouts/s with all slots in use", tuple(calls))


def check_matching(
    calls: Sequence[TimedCall], encoder: Encoder, task: Task, config: Stage2Config
) -> Outcome[list[MatchQuality]]:
    """Parses, matches and encodes every answer, as the pipeline would."""
    rollouts = [rollout for call in calls for rollout in call.rollouts]
    qualities, refused = [], []
    for rollout in rollouts:
        try:
            qualities.append(_correct(rollout, encoder, task))
        except SampleError as error:
            refused.append(str(error))
    if not qualities:
        return failed(
            f"no rollout can be trained: {refused[0]}", "mend what this names; every sample is quarantined"
        )
    channel_b = config.stage2_ab.channel_b
    found = _describe(qualities, len(rollouts))
    truncated = sum(quality.num_truncated for quality in qualities) / len(qualities)
    if truncated > channel_b.max_truncated_ratio:
        return failed(
            f"{found}; {truncated:.0%} were cut off by max_new_tokens, B pauses above "
            f"max_truncated_ratio={channel_b.max_truncated_ratio:g}",
            f"write rollout.decoding.max_new_tokens: {2 * config.rollout.decoding.max_new_tokens}, or train a model "
            "that ends its answers",
        )
    # Of an image without objects an answer without objects is the right one.
    parsed = sum(quality.num_predictions > 0 or not quality.num_ground_truth for quality in qualities) / len(
        qualities
    )
    if parsed < _FEW_PARSED:
        return warning(
            f"{found}; only {parsed:.0%} of the rollouts hold an object in the dialect {channel_b.target.dialect}",
            "start from a stage-1 checkpoint that answers in this dialect, or correct channel_b.target.dialect",
            qualities,
        )
    if refused:
        return warning(
            f"{found}; {len(refused)} cannot be trained: {refused[0]}",
            "mend what this names, or live with it",
            qualities,
        )
    return ok(found, qualities)


def _infer(
    connection: ServerConnection,
    encoder: Encoder,
    samples: Sequence[Sample],
    decoding: DecodingConfig,
    timeout_s: float,
) -> PostResult:
    config = protocol.request_config(
        max_new_tokens=decoding.max_new_tokens,
        temperature=decoding.temperature,
        top_p=decoding.top_p,
        top_k=decoding.top_k,
        repetition_penalty=decoding.repetition_penalty,
        seed=_SEED,
    )
    return connection.infer([encoder.request(sample) for sample in samples], config, timeout_s=timeout_s)


def _rollout(sample: Sample, completion: protocol.Completion) -> Rollout:
    return Rollout(
        sample=sample,
        text=completion.text,
        token_ids=completion.token_ids,
        prompt_token_ids=completion.prompt_token_ids,
        truncated=completion.finish_reason == "length",
        seed=_SEED,
        server="",
        spans=(VersionSpan(0, 0, len(completion.token_ids)),),
    )


def _correct(rollout: Rollout, encoder: Encoder, task: Task) -> MatchQuality:
    prompt = encoder.encode_prompt(rollout.sample)
    return make_segment(rollout, prompt, encoder, task)[0].quality


def _describe(qualities: Sequence[MatchQuality], num_rollouts: int) -> str:
    predicted = sum(quality.num_predictions for quality in qualities)
    truths = sum(quality.num_ground_truth for quality in qualities)
    pairs = sum(quality.num_pairs for quality in qualities)
    iou = f" (mean IoU {sum(quality.sum_iou for quality in qualities) / pairs:.2f})" if pairs else ""
    dropped: Counter[str] = Counter()
    for quality in qualities:
        dropped.update(quality.dropped)
    shown = ", ".join(f"{reason} {count}" for reason, count in dropped.items() if count) or "none"
    return (
        f"{num_rollouts} rollout(s): {predicted} objects parsed, {pairs} of {truths} in the ground truth matched{iou}, "
        f"objects dropped: {shown}"
    )
