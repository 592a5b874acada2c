"""Prompts as the server reads them, a timed call of as many rollouts as a run has in flight, and the answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from swift_stage2.channel_b.encoding import Encoder, PromptEncoding
from swift_stage2.channel_b.preprocessing import make_segment
from swift_stage2.channel_b.rollouts.requests import PostEnd, PostResult
from swift_stage2.channel_b.rollouts.routes import RouteNow
from swift_stage2.channel_b.task import Task, needed_columns
from swift_stage2.checks.checks import CheckResult, failed, ok, warning
from swift_stage2.columns import Column, given_by
from swift_stage2.config import DecodingConfig, Stage2Config
from swift_stage2.config.stage2_ab import SHIPPED_TASKS
from swift_stage2.errors import SampleError, ServerFault
from swift_stage2.records import MatchQuality, Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.servers import infer_wire
from swift_stage2.servers.infer_wire import Completion
from swift_stage2.servers.session import Deadline, ServerSession

_ONE_TOKEN = DecodingConfig(temperature=0.0, max_new_tokens=1)
_CONNECT_TIMEOUT_S = 10.0
_SEED = 1
_FEW_PARSED = 0.5
_TEXT_PROMPT = "Write one word."
OTHER_PROMPT = (
    "give the server the learner's model, template and pixel limits (--template, MAX_PIXELS, --max_pixels), "
    "and restart it"
)


def route_of(session: ServerSession, key: str | None) -> RouteNow:
    """By the route that the server answers, as far as it answers; whether it does is a row of its own."""
    chat_model = None
    with suppress(ServerFault):
        chat_model = session.info(Deadline(_CONNECT_TIMEOUT_S)).chat_model
    return RouteNow(session.base_url, chat_model, api_key=key)


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One ``/infer/`` call and its answers."""

    seconds: float
    rollouts: tuple[Rollout, ...]

    @property
    def rollouts_per_s(self) -> float:
        return len(self.rollouts) / self.seconds


def check_call(
    route: RouteNow, encoder: Encoder, samples: Sequence[Sample], config: Stage2Config, key: str
) -> CheckResult[TimedCall]:
    """Times a call of ``max_inflight_per_server`` rollouts."""
    rollout, size = config.rollout, config.rollout.max_inflight_per_server
    chosen = [samples[number % len(samples)] for number in range(size)]
    started = time.perf_counter()
    result = infer(
        route, encoder, chosen, rollout.decoding, rollout.request_timeout_s, needed_columns(config)
    )
    seconds = time.perf_counter() - started
    if result.end is PostEnd.TIMED_OUT:
        return failed(
            f"{size} rollout(s) at once took longer than request_timeout_s={rollout.request_timeout_s:g}",
            f"write rollout.request_timeout_s: {2 * rollout.request_timeout_s:g}, or a smaller "
            "rollout.max_inflight_per_server or rollout.decoding.max_new_tokens",
        )
    if result.end is not PostEnd.ANSWERED:
        return failed(
            f"{size} rollout(s) at once: {result.reason}",
            f"read the log of {key}; if its context is too short for prompt + max_new_tokens="
            f"{rollout.decoding.max_new_tokens}, raise launch.servers[].args.vllm_max_model_len",
        )
    call = TimedCall(seconds, tuple(_rollout(*pair) for pair in zip(chosen, result.completions, strict=True)))
    return ok(f"{size} in {seconds:.2f} s: {call.rollouts_per_s:.2f} rollouts/s with all slots in use", call)


def check_matching(
    rollouts: Sequence[Rollout], encoder: Encoder, task: Task, config: Stage2Config
) -> CheckResult[None]:
    """Parses, matches and encodes every answer, as the pipeline would."""
    qualities, refused = [], []
    for rollout in rollouts:
        try:
            prompt = encoder.encode_prompt(rollout.sample)
            qualities.append(make_segment(rollout, prompt, encoder, task)[0].quality)
        except SampleError as error:
            refused.append(str(error))
    if not qualities:
        return failed(
            f"no rollout can be trained: {refused[0]}", "mend what this names; every sample is quarantined"
        )
    channel_b = config.stage2_ab.channel_b
    found = _describe(qualities, len(rollouts), task.similarity)
    truncated = sum(quality.num_truncated for quality in qualities) / len(qualities)
    if truncated > channel_b.max_truncated_ratio:
        return failed(
            f"{found}; {truncated:.0%} were cut off by max_new_tokens, B pauses above "
            f"max_truncated_ratio={channel_b.max_truncated_ratio:g}",
            f"write rollout.decoding.max_new_tokens: {2 * config.rollout.decoding.max_new_tokens}, or train a model "
            "that ends its answers",
        )
    # Of an image without objects an answer without objects is the right one.
    num_parsed = sum(
        quality.num_predictions > 0 or not (quality.num_ground_truth or quality.num_unclosed)
        for quality in qualities
    )
    parsed = num_parsed / len(qualities)
    if parsed < _FEW_PARSED:
        written, correct = f"as task {config.stage2_ab.task} reads them", "how that task reads answers"
        if config.stage2_ab.task in SHIPPED_TASKS:
            written = f"in the dialect {config.stage2_ab.dialect}"
            correct = "stage2_ab.channel_b.target.dialect"
        return warning(
            f"{found}; only {parsed:.0%} of the rollouts hold an object, {written}",
            f"start from a stage-1 checkpoint that answers so, or correct {correct}",
        )
    if refused:
        return warning(
            f"{found}; {len(refused)} cannot be trained: {refused[0]}",
            "mend what this names, or live with it",
        )
    return ok(found)


def infer(
    route: RouteNow,
    encoder: Encoder,
    samples: Sequence[Sample],
    decoding: DecodingConfig,
    timeout_s: float,
    columns: Iterable[Column] = (),
) -> PostResult:
    """One ``/infer/`` call with the run's own requests."""
    config = infer_wire.request_config(**asdict(decoding), seed=_SEED, columns=columns)
    return route.generate([encoder.request(sample) for sample in samples], config, timeout_s=timeout_s)


def _rollout(sample: Sample, completion: infer_wire.Completion) -> Rollout:
    return Rollout(
        sample=sample,
        text=completion.text,
        token_ids=completion.token_ids,
        prompt_token_ids=completion.prompt_token_ids,
        truncated=completion.finish_reason == "length",
        seed=_SEED,
        server="",
        spans=(VersionSpan(0, 0, len(completion.token_ids)),),
        **given_by(completion),
    )


def _describe(qualities: Sequence[MatchQuality], num_rollouts: int, similarity: str) -> str:
    predicted = sum(quality.num_predictions for quality in qualities)
    truths = sum(quality.num_ground_truth for quality in qualities)
    pairs = sum(quality.num_pairs for quality in qualities)
    mean = (
        f" (mean {similarity} {sum(quality.sum_iou for quality in qualities) / pairs:.2f})" if pairs else ""
    )
    dropped: Counter[str] = Counter()
    for quality in qualities:
        dropped.update(quality.dropped)
    shown = ", ".join(f"{reason} {count}" for reason, count in dropped.items() if count) or "none"
    return (
        f"{num_rollouts} rollout(s): {predicted} objects parsed, {pairs} of {truths} in the ground truth matched"
        f"{mean}, objects dropped: {shown}"
    )


def check_prompts(
    route: RouteNow, encoder: Encoder, samples: Sequence[Sample], timeout_s: float
) -> CheckResult[None]:
    """Asks for one token each, greedily, and compares what the server says it read."""
    text = {"messages": [{"role": "user", "content": _TEXT_PROMPT}], "objects": {"ref": [], "bbox": []}}
    asked = [*samples, Sample(SampleKey(0, 0, 0), text)]
    prompts = [encoder.encode_prompt(sample) for sample in asked]
    result = infer(route, encoder, asked, _ONE_TOKEN, timeout_s)
    if result.end is not PostEnd.ANSWERED:
        return failed(
            f"{len(samples)} sample(s) of the data set: {result.reason}",
            "read the server's log for the cause; an image or a prompt that it refuses is named there",
        )
    for number, (prompt, completion) in enumerate(zip(prompts, result.completions, strict=True)):
        difference = _difference(prompt, completion)
        if difference:
            row = f"row {samples[number].key.index}" if number < len(samples) else "a prompt of text alone"
            return failed(f"{row}: {difference}", OTHER_PROMPT)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    sizes = sorted({f"{width}x{height}" for prompt in prompts for width, height in prompt.images_size})
    return ok(
        f"{len(samples)} sample(s) and one text: all {sum(lengths)} prompt tokens are the learner's own; images as the "
        f"model sees them: {', '.join(sizes[:4]) or 'none'}"
    )


def _difference(prompt: PromptEncoding, completion: Completion) -> str:
    own, theirs = prompt.token_ids, completion.prompt_token_ids
    if sizes := size_difference(completion.images_size, prompt.images_size):
        return sizes
    if own != theirs:
        place = next(
            (i for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b),
            min(len(own), len(theirs)),
        )
        return f"the server reads {len(theirs)} prompt tokens, the learner {len(own)}, different from place {place} on"
    return ""


def size_difference(served: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]]) -> str:
    """Empty where the server does not say in which sizes its model sees images."""
    if not served or tuple(served) == tuple(own):
        return ""
    return f"images are {_sizes(served)} on the server, {_sizes(own)} on the learner"


def _sizes(sizes: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{width}x{height}" for width, height in sizes) or "none"
