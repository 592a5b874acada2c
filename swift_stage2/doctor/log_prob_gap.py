"""By how much learner and server differ about the tokens that the server sampled, and what may be the cause.

An objective that trains rollouts by their rewards weighs every token by both sides' probabilities. Where those differ
for another reason than the steps between (dtype, weights, temperature, images, attention), it trains something else
than it was asked to, and no loss shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swift_stage2.channel_b.encoding import IGNORED_LABEL, Encoder
from swift_stage2.channel_b.preprocessing import as_sampled
from swift_stage2.channel_b.task import needed_columns
from swift_stage2.columns import BEHAVIOUR, LOG_PROBS
from swift_stage2.config import DecodingConfig, Stage2Config
from swift_stage2.config.objective import LEAST_TEMPERATURE
from swift_stage2.doctor.data import Samples
from swift_stage2.doctor.examination import Checked, Examination, Outcome, left_out, ok, warning
from swift_stage2.doctor.rollouts import TimedCall
from swift_stage2.errors import SampleError
from swift_stage2.records import MatchQuality, Rollout, ServerReport
from swift_stage2.servers.protocol import ServerInfo

if TYPE_CHECKING:
    from swift_stage2.doctor.preparation import LearnerPreparation

# Mean |difference| in nats. In float32 ours differ by less than 1e-4 at any token (tests/rollout_server); the rest is
# for other kernels. In 16 bits NeMo RL takes a mean exp |difference| of 1.05 for the limit at equal precision, which
# is a mean of 0.049; a learner with other weights, or another temperature, is off by tenths.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
_OF_OTHER_WEIGHTS = 0.5  # nats, on average: ten times what rounding in 16 bits explains
_MOST_ROLLOUTS = 16
_FEWEST_TOKENS = 32
_NO_QUALITY = MatchQuality(0, 0, 0, 0.0, 0, 0)

Logits = Callable[[Mapping[str, Any]], torch.Tensor]
"""The learner's logits before every supervised token of a pack's batch, in float32."""


@dataclass(frozen=True, slots=True)
class LearnerSide:
    """The learner's forward pass."""

    logits: Logits
    dtype: torch.dtype
    """That it computes in."""
    dropout: float
    """The largest share that any of its layers drops while it trains."""

    @classmethod
    def of(cls, preparation: LearnerPreparation, module: nn.Module) -> LearnerSide:
        return cls(partial(preparation.logits, module), preparation.compute_dtype(module), dropout_of(module))


@dataclass(frozen=True, slots=True)
class ServerSide:
    """Its facts that may explain a difference."""

    key: str
    """Where the configuration names it."""
    dtype: str | None
    """Of its weights; None where it does not tell."""
    proof: str
    """By which a round of this doctor proved them to be the learner's; empty without a round."""

    @classmethod
    def of(cls, index: int, info: ServerInfo, report: ServerReport | None) -> ServerSide:
        dtypes = {spec.dtype for spec in info.manifest}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        return cls(f"launch.servers[{index}].args", dtype, report.proof if report else "")


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Log-probabilities of the sampled tokens of some rollouts, in nats."""

    num_rollouts: int
    served: torch.Tensor
    own: torch.Tensor
    own_at_one: torch.Tensor
    """The learner's at temperature 1."""


def examine_gap(
    exam: Examination,
    config: Stage2Config,
    server: Callable[[], ServerSide],
    needs: tuple[Checked[tuple[TimedCall, ...]], Checked[Samples], Checked[nn.Module]],
    learner: Callable[[], LearnerPreparation],
) -> None:
    """A row, where anything asks for log-probabilities: the timed calls among ``needs`` were answered with them."""
    if LOG_PROBS not in needed_columns(config):
        return
    calls, samples, module = needs
    exam.check(
        "log-probabilities",
        lambda: check_gap(
            calls.result,
            samples.result.encoder,
            config,
            LearnerSide.of(learner(), module.result),
            server(),
        ),
        needs=needs,
    )


def dropout_of(module: nn.Module) -> float:
    """The largest share that any layer drops while it trains: of ``nn.Dropout``, LoRA's too, and of attention."""
    shares = (
        each.p if isinstance(each, nn.Dropout) else getattr(each, "attention_dropout", 0.0)
        for each in module.modules()
    )
    return max((float(share) for share in shares if isinstance(share, int | float)), default=0.0)


def check_gap(
    calls: Sequence[TimedCall],
    encoder: Encoder,
    config: Stage2Config,
    learner: LearnerSide,
    server: ServerSide,
) -> Outcome[None]:
    """Compares both sides' log-probabilities of the timed calls' rollouts, which brought the server's."""
    decoding = config.rollout.decoding
    if why := _incomparable(decoding):
        return left_out(f"cannot tell: {why}")
    temperature = decoding.temperature or 1.0  # greedy decoding divides by none
    try:
        sampled = _sampled(calls, encoder, learner.logits, temperature)
    except torch.OutOfMemoryError:
        return left_out("cannot tell: the model is loaded, but a forward pass does not fit its device here")
    num_tokens, tolerance = len(sampled.own), _TOLERANCES[learner.dtype]
    if num_tokens < _FEWEST_TOKENS:
        return left_out(
            f"cannot tell: the rollouts that can be trained have {num_tokens} tokens, fewer than {_FEWEST_TOKENS}"
        )
    gaps = (sampled.own - sampled.served).abs()
    mean, high = float(gaps.mean()), float(gaps.quantile(0.99))
    found = (
        f"{num_tokens} tokens of {sampled.num_rollouts} rollouts at temperature {temperature:g}: learner and server "
        f"differ by {mean:.2g} nats on average, 99 % of the tokens by at most {high:.2g} (tolerance in "
        f"{_name(learner.dtype)}: {tolerance:g} on average)"
    )
    if not mean <= tolerance:  # also what is not a number
        at_one = float((sampled.own_at_one - sampled.served).abs().mean())
        if at_one <= tolerance:
            return warning(
                f"{found}; at temperature 1 they differ by {at_one:.2g}: the server leaves the temperature out",
                "bring ms-swift and vLLM on the server to this machine's versions, or write "
                "rollout.decoding.temperature: 1.0",
            )
        are_others = mean > _OF_OTHER_WEIGHTS and not server.proof
        if are_others:
            found += "; so far apart are other weights: the server does not hold the checkpoint's"
        causes = (f"({place}) {cause}" for place, cause in enumerate(_causes(learner, server, are_others), 1))
        return warning(found, f"likely, in this order: {'; '.join(causes)}")
    if learner.dropout and config.stage2_ab.uses_rewards:
        return warning(
            f"{found}, without dropout; but the learner trains with a dropout of {learner.dropout:g}, and servers "
            "have none",
            _WITHOUT_DROPOUT,
        )
    if -float(sampled.served.mean()) <= tolerance:
        return left_out(f"cannot tell: the model is sure of every token, so that nothing can differ; {found}")
    return ok(found)


_WITHOUT_DROPOUT = (
    "write swift.lora_dropout: 0, also in the adapter_config.json of an adapter that is trained further, or the "
    "dropout of the model's config.json to 0"
)


def _causes(learner: LearnerSide, server: ServerSide, are_other_weights: bool) -> Iterator[str]:
    """Likely ones first, each with what to change: what is known to differ comes before what may."""
    dtype = _name(learner.dtype)
    of_weights = "other weights: " + (
        "have checksums prove them (rollout.sync.proof: auto)"
        if server.proof
        else "restart the server with the learner's model, or leave out --no-sync"
    )
    if are_other_weights:
        yield of_weights
    if server.dtype not in (None, dtype):
        yield f"another dtype ({server.dtype} there): start it with --torch_dtype {dtype} ({server.key})"
    if not are_other_weights and "checksums" not in server.proof:
        yield of_weights
    if server.dtype is None:
        yield f"another dtype, which it does not tell: start it with --torch_dtype {dtype} ({server.key})"
    yield "other images: mend the rows files and pixel limits, install one version of transformers on both sides"
    yield "another attention: write one kind for swift.attn_impl and the server's"
    if learner.dtype is torch.bfloat16:
        yield f"rounding: write swift.torch_dtype: float16 and start it with --torch_dtype float16 ({server.key})"


def _incomparable(decoding: DecodingConfig) -> str:
    """Why the servers' log-probabilities are no plain ones of the learner's logits; empty if they are."""
    for name, plain in (("top_p", 1), ("top_k", -1), ("repetition_penalty", 1)):
        if (value := getattr(decoding, name)) != plain:
            return f"rollout.decoding.{name}: {value:g} changes the distribution; write {plain}"
    if 0 < decoding.temperature < LEAST_TEMPERATURE:
        return (
            f"rollout.decoding.temperature: {decoding.temperature:g} enlarges the rounding of logits by "
            f"{1 / decoding.temperature:.0f}; write 0, or {LEAST_TEMPERATURE:g} or more"
        )
    return ""


def _sampled(calls: Sequence[TimedCall], encoder: Encoder, logits: Logits, temperature: float) -> _Sampled:
    """One rollout at a time goes through the model, as a pack of its own."""
    parts = []
    for rollout in list(chain.from_iterable(call.rollouts for call in reversed(calls)))[:_MOST_ROLLOUTS]:
        try:
            batch = _pack_of(rollout, encoder)
        except SampleError:
            continue  # no pack takes it, and the row above tells why
        labels, served = batch["labels"][0], batch[BEHAVIOUR.name][0]
        trained = labels != IGNORED_LABEL
        rows = logits(batch)
        tokens = labels[trained, None].to(rows.device)
        own, own_at_one = (
            torch.log_softmax(rows / divisor, -1).gather(1, tokens)[:, 0].cpu()
            for divisor in (temperature, 1.0)
        )
        parts.append((served[trained], own, own_at_one))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)] or [torch.empty(0)] * 3
    return _Sampled(len(parts), *columns)


def _pack_of(rollout: Rollout, encoder: Encoder) -> dict[str, Any]:
    encoder.require_trainable(rollout)
    target = as_sampled(rollout, 1.0, _NO_QUALITY)
    prompt = encoder.encode_prompt(rollout.sample)
    return encoder.collate([encoder.encode_segment(rollout, prompt, [(target, None)])])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
