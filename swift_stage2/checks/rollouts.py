"""Prompts as the server reads them, a few timed calls, and the answers as channel B takes them.

The first timed call asks for one rollout, the second for as many as the run would keep in flight there. An objective
that trains rollouts by their rewards weighs every token by both sides' log-probabilities: where those differ for
another reason than the steps between (dtype, weights, images, attention), no loss shows it, and a row here does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from swift_stage2.channel_b.encoding import IGNORED_LABEL, Encoder, PromptEncoding
from swift_stage2.channel_b.preprocessing import as_sampled, make_segment
from swift_stage2.channel_b.rollout_client.chat_connection import connect
from swift_stage2.channel_b.rollout_client.connection import PostResult, ServerConnection
from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.channel_b.task import Task, needed_columns
from swift_stage2.checks.examination import Outcome, failed, left_out, ok, warning
from swift_stage2.columns import BEHAVIOUR, Column, given_by
from swift_stage2.config import DecodingConfig, Stage2Config
from swift_stage2.config.objective import LEAST_TEMPERATURE
from swift_stage2.config.stage2_ab import SHIPPED_TASKS
from swift_stage2.errors import SampleError, ServerFault
from swift_stage2.records import MatchQuality, Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.servers import protocol
from swift_stage2.servers.protocol import Completion
from swift_stage2.servers.session import Deadline, ServerSession

_ONE_TOKEN = DecodingConfig(temperature=0.0, max_new_tokens=1)
_CONNECT_TIMEOUT_S = 10.0
_SEED = 1
_FEW_PARSED = 0.5
_TEXT_PROMPT = "Write one word."
_FIX = (
    "give the server the learner's model, template and pixel limits (--template, MAX_PIXELS, --max_pixels), "
    "and restart it"
)


def connection_by_route(session: ServerSession, key: str | None) -> ServerConnection:
    """By the route that the server answers, as far as it answers; whether it does is a row of its own."""
    chat_model = None
    with suppress(ServerFault):
        chat_model = session.info(Deadline(_CONNECT_TIMEOUT_S)).chat_model
    return connect(session.base_url, chat_model, api_key=key, connect_timeout_s=_CONNECT_TIMEOUT_S)


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
        result = infer(
            connection, encoder, chosen, rollout.decoding, rollout.request_timeout_s, needed_columns(config)
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
                f"{rollout.decoding.max_new_tokens}, raise "
                "launch.servers[].args.vllm_max_model_len",
            )
        rollouts = tuple(_rollout(*pair) for pair in zip(chosen, result.completions, strict=True))
        calls.append(TimedCall(size, seconds, rollouts))
    shown = ", ".join(f"{call.num_rollouts} in {call.seconds:.2f} s" for call in calls)
    return ok(f"{shown}: {calls[-1].rollouts_per_s:.2f} rollouts/s with all slots in use", tuple(calls))


def check_matching(
    calls: Sequence[TimedCall], encoder: Encoder, task: Task, config: Stage2Config
) -> Outcome[None]:
    """Parses, matches and encodes every answer, as the pipeline would."""
    rollouts = [rollout for call in calls for rollout in call.rollouts]
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
    found = _describe(qualities, len(rollouts), task.likeness)
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
    connection: ServerConnection,
    encoder: Encoder,
    samples: Sequence[Sample],
    decoding: DecodingConfig,
    timeout_s: float,
    columns: Iterable[Column] = (),
) -> PostResult:
    """One ``/infer/`` call with the run's own requests."""
    config = protocol.request_config(**asdict(decoding), seed=_SEED, columns=columns)
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
        **given_by(completion),
    )


def _describe(qualities: Sequence[MatchQuality], num_rollouts: int, likeness: str) -> str:
    predicted = sum(quality.num_predictions for quality in qualities)
    truths = sum(quality.num_ground_truth for quality in qualities)
    pairs = sum(quality.num_pairs for quality in qualities)
    mean = f" (mean {likeness} {sum(quality.sum_iou for quality in qualities) / pairs:.2f})" if pairs else ""
    dropped: Counter[str] = Counter()
    for quality in qualities:
        dropped.update(quality.dropped)
    shown = ", ".join(f"{reason} {count}" for reason, count in dropped.items() if count) or "none"
    return (
        f"{num_rollouts} rollout(s): {predicted} objects parsed, {pairs} of {truths} in the ground truth matched"
        f"{mean}, objects dropped: {shown}"
    )


def check_prompts(
    connection: ServerConnection, encoder: Encoder, samples: Sequence[Sample], timeout_s: float
) -> Outcome[None]:
    """Asks for one token each, greedily, and compares what the server says it read."""
    text = {"messages": [{"role": "user", "content": _TEXT_PROMPT}], "objects": {"ref": [], "bbox": []}}
    asked = [*samples, Sample(SampleKey(0, 0, 0), text)]
    prompts = [encoder.encode_prompt(sample) for sample in asked]
    result = infer(connection, encoder, asked, _ONE_TOKEN, timeout_s)
    if result.end is not PostEnd.ANSWERED:
        return failed(
            f"{len(samples)} sample(s) of the data set: {result.reason}",
            "read the server's log for the cause; an image or a prompt that it refuses is named there",
        )
    for number, (prompt, completion) in enumerate(zip(prompts, result.completions, strict=True)):
        difference = _difference(prompt, completion)
        if difference:
            row = f"row {samples[number].key.index}" if number < len(samples) else "a prompt of text alone"
            return failed(f"{row}: {difference}", _FIX)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    sizes = sorted({f"{width}x{height}" for prompt in prompts for width, height in prompt.images_size})
    return ok(
        f"{len(samples)} sample(s) and one text: all {sum(lengths)} prompt tokens are the learner's own; images as the "
        f"model sees them: {', '.join(sizes[:4]) or 'none'}"
    )


def _difference(prompt: PromptEncoding, completion: Completion) -> str:
    own, theirs = prompt.token_ids, completion.prompt_token_ids
    if completion.images_size and completion.images_size != prompt.images_size:
        return f"images are {_sizes(completion.images_size)} on the server, {_sizes(prompt.images_size)} on the learner"
    if own != theirs:
        place = next(
            (i for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b),
            min(len(own), len(theirs)),
        )
        return f"the server reads {len(theirs)} prompt tokens, the learner {len(own)}, different from place {place} on"
    return ""


def _sizes(sizes: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{width}x{height}" for width, height in sizes) or "none"


# Mean |difference| in nats. In float32 ours differ by less than 1e-4 at any token (tests/rollout_server); the rest is
# for other kernels. In 16 bits NeMo RL takes a mean exp |difference| of 1.05 for the limit at equal precision, which
# is a mean of 0.049; a learner with other weights, or another temperature, is off by tenths.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
_MOST_ROLLOUTS = 16
_FEWEST_TOKENS = 32
_NO_QUALITY = MatchQuality(0, 0, 0, 0.0, 0, 0)

Logits = Callable[[Mapping[str, Any]], torch.Tensor]
"""The learner's logits before every supervised token of a pack's batch, in float32."""


def check_gap(
    calls: Sequence[TimedCall],
    encoder: Encoder,
    decoding: DecodingConfig,
    logits: Logits,
    dtypes: tuple[torch.dtype, str],
) -> Outcome[None]:
    """Compares both sides' log-probabilities of the timed calls' rollouts, which brought the server's.

    ``dtypes``: that the learner computes in, and the server's of its weights, empty where it does not tell.
    """
    plain = DecodingConfig(temperature=decoding.temperature, max_new_tokens=decoding.max_new_tokens)
    if decoding != plain or 0 < decoding.temperature < LEAST_TEMPERATURE:
        return left_out(
            "cannot tell: top_p, top_k, repetition_penalty, or a temperature below "
            f"{LEAST_TEMPERATURE:g}, make another distribution of the learner's"
        )
    temperature = decoding.temperature or 1.0  # greedy decoding divides by none
    try:
        parts = _log_probs(calls, encoder, logits, temperature)
    except torch.OutOfMemoryError:
        return left_out("cannot tell: the model is loaded, but a forward pass does not fit its device here")
    num_tokens = sum(len(served) for served, _, _ in parts)
    if num_tokens < _FEWEST_TOKENS:
        return left_out(
            f"cannot tell: the rollouts that can be trained have {num_tokens} tokens, fewer than {_FEWEST_TOKENS}"
        )
    served, own, own_at_one = (torch.cat(column) for column in zip(*parts, strict=True))
    tolerance, gaps = _TOLERANCES[dtypes[0]], (own - served).abs()
    learners = str(dtypes[0]).removeprefix("torch.")
    found = (
        f"{num_tokens} tokens of {len(parts)} rollouts at temperature {temperature:g}: learner and server differ by "
        f"{float(gaps.mean()):.2g} nats on average, 99 % of the tokens by at most {float(gaps.quantile(0.99)):.2g} "
        f"(tolerance in {learners}: {tolerance:g} on average)"
    )
    if float(gaps.mean()) <= tolerance:  # what is not a number is not
        return ok(found)
    if float((own_at_one - served).abs().mean()) <= tolerance:
        return warning(
            f"{found}; at temperature 1 they agree: the server leaves the temperature out",
            "bring ms-swift and vLLM on the server to this machine's versions, or write rollout.decoding.temperature: "
            "1.0",
        )
    other = dtypes[1] or "which the server does not tell"
    causes = [
        "other weights: restart the server with the learner's model, and let a round with checksums prove them",
        "other images: mend row pixel limits, install one version of transformers on both sides",
        "another attention: write one kind for swift.attn_impl and the server's",
    ]
    if other != learners:
        causes.insert(0, f"another dtype ({other}): start the server with --torch_dtype {learners}")
    listed = "; ".join(f"({place}) {cause}" for place, cause in enumerate(causes, 1))
    return warning(found, f"likely, in this order: {listed}")


def _log_probs(
    calls: Sequence[TimedCall], encoder: Encoder, logits: Logits, temperature: float
) -> list[tuple[torch.Tensor, ...]]:
    """Of each rollout's sampled tokens: the server's, the learner's, and the learner's at temperature 1."""
    parts: list[tuple[torch.Tensor, ...]] = []
    for rollout in list(chain.from_iterable(call.rollouts for call in reversed(calls)))[:_MOST_ROLLOUTS]:
        try:
            encoder.require_trainable(rollout)
            target, prompt = as_sampled(rollout, 1.0, _NO_QUALITY), encoder.encode_prompt(rollout.sample)
            batch = encoder.collate([encoder.encode_segment(rollout, prompt, [(target, None)])])
        except SampleError:
            continue  # no pack takes it, and the row above tells why
        labels, served = batch["labels"][0], batch[BEHAVIOUR.name][0]
        trained, rows = labels != IGNORED_LABEL, logits(batch)
        tokens = labels[trained, None].to(rows.device)
        own = (torch.log_softmax(rows / by, -1).gather(1, tokens)[:, 0].cpu() for by in (temperature, 1.0))
        parts.append((served[trained], *own))
    return parts
