"""Prompts as the server reads them, a timed call of as many rollouts as a run has in flight, and the answers.

And the one adviser for settings: can the servers, as timed, feed channel B, and which settings fit? Rates are of all
servers with every slot in use. Units: seconds where a name ends in ``_s``, else optimizer steps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction

from swift_stage2.channel_b.dialects import OBJECT_LIST
from swift_stage2.channel_b.encoding import Encoder, PromptEncoding
from swift_stage2.channel_b.preprocessing import Preprocessor, ScoredRollout, make_segment
from swift_stage2.channel_b.rollouts.requests import PostEnd, PostResult
from swift_stage2.channel_b.rollouts.routes import RouteNow
from swift_stage2.channel_b.task import Task, needed_columns
from swift_stage2.checks.checks import CheckResult, failed, ok, warning
from swift_stage2.columns import LOG_PROBS, Column, given_by
from swift_stage2.config import DecodingConfig, Stage2Config
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.config.stage2_ab import SHIPPED_TASKS, sustained
from swift_stage2.data.recorded import recorded_row, scores_of, with_scores
from swift_stage2.errors import SampleError, ServerFault
from swift_stage2.records import MatchQuality, Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.scheduling.version_schedule import MOST_CADENCES
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
    columns, timeout_s = needed_columns(config), rollout.request_timeout_s
    result = infer(route, encoder, chosen, rollout.decoding, timeout_s, columns, wished=[LOG_PROBS])
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
    found = _describe(qualities, len(rollouts), task.similarity) + _told_ap(rollouts, encoder, task)
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
    wished: Iterable[Column] = (),
) -> PostResult:
    """One ``/infer/`` call with the run's own requests; answers may lack the columns ``wished`` for."""
    needed = set(columns)
    config = infer_wire.request_config(**asdict(decoding), seed=_SEED, columns=needed.union(wished))
    requests, may_lack = [encoder.request(sample) for sample in samples], {*wished} - needed
    return route.generate(requests, config, timeout_s=timeout_s, may_lack={each.name for each in may_lack})


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
        turns=completion.turns,
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


def _told_ap(rollouts: Sequence[Rollout], encoder: Encoder, task: Task) -> str:
    """AP as ``evaluate`` computes it, every rollout an image of its own; empty for a task without boxes."""
    pairs = zip(rollouts, Preprocessor(encoder, task).score(rollouts), strict=True)
    rows = [
        recorded_row(number, rollout.sample.row, rollout.sample.truth, (rollout, scored))
        for number, (rollout, scored) in enumerate(pairs)
        if isinstance(scored, ScoredRollout)
    ]
    found = scores_of(with_scores(rows), OBJECT_LIST)
    if "ap_without_scores" in found:
        return f", AP {found['ap']:.3f} with scores and {found['ap_without_scores']:.3f} without"
    return f", AP {found['ap']:.3f}" if "ap" in found else ""


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


_LOAD_THAT_STARVES = 2.0  # at less than half of the need the starvation watch speaks up


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """The configured and the measured numbers."""

    b_ratio: Fraction
    packs_per_b_step: int
    """``gradient_accumulation_steps``."""
    num_ranks: int
    num_servers: int
    max_inflight_per_server: int
    version_window: int
    sync_every_steps: int
    samples_per_pack: float
    batch_s: float
    """``max_inflight_per_server`` rollouts at once on the slowest server."""
    rollouts_per_s: float
    """All servers together, every slot in use."""

    @property
    def rollouts_per_b_step(self) -> float:
        """Rollouts that all ranks together train in one B step."""
        return self.packs_per_b_step * self.num_ranks * self.samples_per_pack

    @property
    def rollouts_per_step(self) -> float:
        """The same, spread over all steps."""
        return float(self.b_ratio) * self.rollouts_per_b_step

    @property
    def shortest_step_s(self) -> float:
        """The step time from which on the servers' rate is enough."""
        return self.rollouts_per_step / self.rollouts_per_s

    @property
    def posts_per_production(self) -> int:
        """POSTs, one after another, until a rank can fill a pack: more than one where a pack holds more samples."""
        slots = self.max_inflight_per_server * self.num_servers / self.num_ranks
        return math.ceil(self.samples_per_pack / slots)

    def production(self, step_s: float) -> float:
        """Steps that pass while a rank's pack is made: its age when it arrives."""
        return self.posts_per_production * self.batch_s / step_s

    def versions_passed(self, step_s: float) -> int:
        """Versions that pass while packs are made, although each waits for them as long as it may."""
        return math.ceil(self.production(step_s) / (MOST_CADENCES * self.sync_every_steps))

    def load(self, step_s: float) -> float:
        """Need over what the servers can give; above 1 they cannot keep up."""
        return self.shortest_step_s / step_s


def check_rate(feeding: Feeding, step_s: float | None) -> CheckResult[None]:
    """The verdict on whether rollouts keep up with ``step_s``; where that is None, the shortest step that they feed."""
    found = (
        f"a B step trains {feeding.packs_per_b_step} packs * {feeding.num_ranks} rank(s) * "
        f"{feeding.samples_per_pack:.1f} samples a pack = {feeding.rollouts_per_b_step:.0f} rollouts, "
        f"{feeding.rollouts_per_step:.1f} per step; available: {feeding.rollouts_per_s:.2f} rollouts/s, enough for "
        f"steps of {feeding.shortest_step_s:.2f} s or more"
    )
    if step_s is None:
        return ok(f"{found}; --step-seconds S says whether yours are")
    load = feeding.load(step_s)
    found += (
        f"; at {step_s:g} s the servers are busy {load:.0%} of the time, and packs arrive "
        f"{feeding.production(step_s):.1f} steps old"
    )
    if load > 1:
        fix = f"take what row settings says, or run {math.ceil(feeding.num_servers * load)} such servers"
        return failed(found, fix) if load > _LOAD_THAT_STARVES else warning(found, fix)
    if feeding.versions_passed(step_s) > feeding.version_window:
        return warning(f"{found}, beyond the version window", "take what row settings says")
    return ok(found)


def check_settings(feeding: Feeding, step_s: float | None) -> CheckResult[None]:
    """Settings that are too small, and a share of B steps that is too large, with reasons; without a step time what
    needs none."""
    inflight, window = feeding.max_inflight_per_server, feeding.version_window
    load = 1.0 if step_s is None else max(1.0, feeding.load(step_s))
    slots = max(int(feeding.rollouts_per_b_step / feeding.num_servers), math.ceil(inflight * load))
    slots = min(MAX_REQUESTS_PER_POST, slots)
    reasons, values = [], []
    if slots > inflight:
        reasons.append("one batch fills a B step, or as many more as the load asks for")
        values.append(f"rollout.max_inflight_per_server: {slots} (now {inflight})")
    if step_s is not None and (passed := feeding.versions_passed(step_s)) > window:
        age = feeding.production(step_s)
        lasts = MOST_CADENCES * feeding.sync_every_steps
        reasons.append(f"packs arrive {age:.1f} steps old, and a version lasts {lasts} at most")
        values.append(f"stage2_ab.channel_b.prefetch.version_window: {passed} (now {window})")
    if load > 1:
        ratio = float(feeding.b_ratio)
        reasons.append("these servers sustain a smaller share of B steps")
        values.append(f"stage2_ab.schedule.b_ratio: {sustained(ratio / load):g} (now {ratio:g})")
    return warning("; ".join(reasons), f"write {', '.join(values)}") if values else ok("as written")
