"""The wire of ``/infer/``: what a learner asks, and how ms-swift's records and ours answer; for both sides.

A call of rollouts is closed, because what a server does not understand it must not do; an answer may say more.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import chain, compress
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, AliasPath, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from swift_stage2.columns import LOG_PROBS, Column, request_options
from swift_stage2.errors import ProtocolError
from swift_stage2.servers.turns import place_turns, spread
from swift_stage2.wire import (
    CLOSED,
    OPEN,
    ClosedMessage,
    Flag,
    Int,
    Many,
    Message,
    Number,
    Text,
    ValueT,
    read,
)

_Zero: TypeAlias = Annotated[Number, Field(ge=0, le=0)]
_One: TypeAlias = Annotated[Number, Field(ge=1, le=1)]
_LogProb: TypeAlias = Annotated[
    Number, Field(ge=-3.4028234663852886e38, le=0)
]  # what float32 has as a number

# JSON spells an id in at most 8 bytes, a token's text and its log-probability in some more; a prompt's ids come back as
# well, some ten thousands where images are large or turns came before, those with log-probabilities and as messages.
_BYTES_OF_A_PROMPT = 2 << 20
_BYTES_OF_A_TOKEN = 512
_MEDIA = ("images", "videos", "audios")

REQUEST_ID = "uuid"  # of an infer request, as ms-swift calls it: our server stamps its answer with it


def most_infer_bytes(num_requests: int, max_new_tokens: int) -> int:
    """How long the answer to an ``/infer/`` call may be, beyond the bytes that were sent."""
    return (1 << 20) + num_requests * (_BYTES_OF_A_PROMPT + max_new_tokens * _BYTES_OF_A_TOKEN)


@dataclass(frozen=True, slots=True, config=CLOSED)
class ChatMessage(ClosedMessage):
    """One turn. Structured content could name files and addresses; media travels in ``images`` only."""

    role: Text
    content: Text
    name: Text | None = None
    loss: Flag | None = None
    loss_scale: Number | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: Text | None = None


@dataclass(frozen=True, slots=True, config=CLOSED)
class TemplateArguments(ClosedMessage):
    """All others reach a media loader or a chat template as arguments, under any name."""

    enable_thinking: Flag | None = None
    preserve_thinking: Flag | None = None
    response_prefix: Text | None = None


@dataclass(frozen=True, slots=True, config=CLOSED)
class Conversation(ClosedMessage):
    """One of ms-swift's infer requests, as far as it says what is generated; media as base64."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    images: Many[Text] | None = None
    tools: Any = None
    objects: Any = None
    chat_template_kwargs: TemplateArguments | None = None
    uuid: Any = None
    data_dict: Any = None
    add_eos: Any = None  # does not change what is generated
    audios: Annotated[list[Any], Field(max_length=0)] | None = None
    videos: Annotated[list[Any], Field(max_length=0)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class SamplingOptions(ClosedMessage):
    """ms-swift's ``RequestConfig``: what our server does, and the one value that it takes of the rest."""

    max_tokens: Annotated[Int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=2**31)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=1e6)] | None = None
    seed: Annotated[Int, Field(ge=0)] | None = None
    logprobs: Flag | None = None
    return_details: Flag | None = None
    stream: Literal[False] = False
    n: _One = 1
    best_of: _One | None = None
    num_beams: _One = 1
    min_p: _Zero | None = None
    presence_penalty: _Zero = 0
    frequency_penalty: _Zero = 0
    length_penalty: _One = 1
    prompt_logprobs: None = None
    structured_outputs_regex: None = None
    top_logprobs: None = None
    stop: Annotated[Many[Text], Field(max_length=0)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class InferCall(ClosedMessage):
    """Body of ``/infer/``. Each request is a ``Conversation``, or an error of its own."""

    infer_requests: Annotated[list[Any], Field(min_length=1)]
    request_config: SamplingOptions | None = None
    use_tqdm: Any = None
    metrics: None = None  # ms-swift's own client sends these two, and null
    adapter_request: None = None


def request_config(
    *, max_new_tokens: int, seed: int, columns: Iterable[Column] = (), **sampling: float
) -> dict[str, Any]:
    """``SamplingOptions`` as JSON that asks for token ids, prompt ids and ``columns``."""
    asked = {"max_tokens": max_new_tokens, **sampling, "seed": seed, "return_details": True}
    SamplingOptions.from_json(asked)
    return {**asked, **request_options(columns)}


def greedy_config(max_new_tokens: int) -> dict[str, Any]:
    """A ``request_config`` under which equal weights give equal answers."""
    return request_config(
        max_new_tokens=max_new_tokens, temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=1
    )


# --- /infer/, answered --------------------------------------------------------------------------
_RESPONSE, _CHOICE, _STAMP = ("response",), ("response", "choices", 0), ("rollout_infos", "stage2")


def _log_probs(said: Any) -> Any:
    """The numbers in ms-swift's record of an answer's tokens; what this process gives are the numbers themselves."""
    if said is None or isinstance(said, tuple):
        return said
    tokens = said.get("content") if isinstance(said, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(token, dict) for token in tokens):
        raise ValueError("must hold a content of one record per token")
    return tuple(token.get("logprob") for token in tokens)


LogProbs: TypeAlias = Annotated[Many[_LogProb] | None, BeforeValidator(_log_probs)]


def _of_whole(reason: str | None) -> str | None:
    if reason not in (None, "stop", "length"):
        raise ValueError("must be of a whole answer")
    return reason


def _without_pictures(infos: Any) -> Any:
    if isinstance(infos, dict) and (media := [name for name in _MEDIA if infos.get(name)]):
        raise ValueError(f"an environment must bring text alone, got {media[0]}")
    return infos


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore", populate_by_name=True))
class Completion(Message):
    """One answer of ``/infer/``: what the model sampled, verbatim, and what the server adds to it.

    Read from ms-swift's ``RolloutOutput``, in which each field has the place that stands beside it. Of a conversation
    of several turns ``token_ids`` are all behind the first prompt, what the environment said included, and ``text`` is
    the last turn's.
    """

    text: Text = Field(validation_alias=AliasPath(*_CHOICE, "message", "content"))
    token_ids: Many[Int] = Field(validation_alias=AliasPath(*_CHOICE, "token_ids"))
    prompt_token_ids: Many[Int] = Field(validation_alias=AliasPath(*_RESPONSE, "prompt_token_ids"))
    finish_reason: Annotated[Text | None, AfterValidator(_of_whole)] = Field(
        default=None, validation_alias=AliasPath(*_CHOICE, "finish_reason")
    )
    """``stop`` or ``length``."""
    images_size: Annotated[
        Many[tuple[Int, Int]], BeforeValidator(lambda sizes: () if sizes is None else sizes)
    ] = Field(default=(), validation_alias=AliasPath(*_RESPONSE, "images_size"))
    """(width, height) of each image as the model saw it."""
    log_probs: LogProbs = Field(default=None, validation_alias=AliasPath(*_CHOICE, "logprobs"))
    """One per token; 0 of what the environment said."""
    weight_version: Int | None = Field(default=None, validation_alias=AliasPath(*_STAMP, "weight_version"))
    """The newest. Stamped by our server, as is the rest; ``seed`` by a merger that shared a POST among callers."""
    spans: Many[tuple[Int | None, Int]] = Field(default=(), validation_alias=AliasPath(*_STAMP, "spans"))
    """(version, tokens) in order, where new weights came while it was made; empty of an answer of one version."""
    run_id: Text | None = Field(default=None, validation_alias=AliasPath(*_STAMP, "run_id"))
    seed: Int | None = Field(default=None, validation_alias=AliasPath(*_STAMP, "seed"))
    request_id: Text | None = Field(default=None, validation_alias=AliasPath(*_STAMP, "request_id"))
    """Of the request that it answers; a stock server names none."""
    turns: Many[tuple[Int, Int]] = ()
    """Runs of tokens ``start <= i < end`` that the model sampled; none where it sampled all of them."""

    @property
    def first_turn(self) -> tuple[int, ...]:
        """The tokens that were sampled before an environment said anything."""
        start, end = self.turns[0] if self.turns else (0, len(self.token_ids))
        return self.token_ids[start:end]


_Lists: TypeAlias = Annotated[Many[Many[ValueT]], BeforeValidator(lambda said: said or ())]


@dataclass(frozen=True, slots=True, config=OPEN)
class Turns(Message):
    """What ms-swift's schedulers add to an answer: a list per message of the assistant's; none without a scheduler."""

    token_ids: _Lists[Int] = Field(default=(), validation_alias="response_token_ids")
    masks: _Lists[Annotated[Int, Field(ge=0, le=1)]] = Field(
        default=(), validation_alias="response_loss_mask"
    )
    log_probs: _Lists[_LogProb] = Field(default=(), validation_alias="rollout_logprobs")
    """Of sampled tokens alone."""
    infos: Annotated[Any, AfterValidator(_without_pictures)] = Field(
        default=None, validation_alias="rollout_infos"
    )


def as_one(last: Completion, said: Turns, *, needs_log_probs: bool) -> Completion:
    """All turns that were ``said`` as one answer; ``last`` is the last one. Raises ProtocolError: they do not fit."""
    if not said.token_ids:
        return replace(last, turns=()) if last.turns else last
    token_ids = last.prompt_token_ids + last.token_ids
    masks = said.masks or tuple((1,) * len(turn) for turn in said.token_ids)
    first, turns = place_turns(token_ids, said.token_ids, masks)
    num_tokens, num_sampled = len(token_ids) - first, sum(end - start for start, end in turns)
    log_probs = tuple(chain.from_iterable(said.log_probs))
    if (log_probs or needs_log_probs) and len(log_probs) != num_sampled:
        raise ProtocolError(
            f"rollout_logprobs must have one value per sampled token, got num_values={len(log_probs)} "
            f"num_tokens={num_sampled}"
        )
    return replace(
        last,
        prompt_token_ids=token_ids[:first],
        token_ids=token_ids[first:],
        turns=() if num_sampled == num_tokens else turns,
        log_probs=spread(log_probs, turns, num_tokens, LOG_PROBS.filler) if log_probs else None,
    )


def parse_infer_reply(data: Any, num_requests: int, asked: Collection[str] = ()) -> tuple[Completion, ...]:
    """The completions of an ``/infer/`` reply, one per request, in order.

    Raises:
        ProtocolError: not a list, another number of outputs than requests, a field of a wrong type, or one of the
            columns ``asked`` for is missing or is none; turns that do not fit, or with pictures of the environment's.
    """
    completions = read(Many[Completion], data, "an /infer/ reply")
    if len(completions) != num_requests:
        raise ProtocolError(
            f"an /infer/ reply must hold one output per request, got num_outputs={len(completions)} "
            f"num_requests={num_requests}; a scheduler of several turns must return one, not a list"
        )
    if LOG_PROBS.name in asked:  # of an answer that was aborted before its first token, servers say null
        completions = tuple(replace(each, log_probs=each.log_probs or ()) for each in completions)
    needs_log_probs, turns = LOG_PROBS.name in asked, read(Many[Turns], data, "an /infer/ reply")
    completions = tuple(
        as_one(each, said, needs_log_probs=needs_log_probs)
        for each, said in zip(completions, turns, strict=True)
    )
    for each in completions:
        if each.log_probs is not None and len(each.log_probs) != len(each.token_ids):
            raise ProtocolError(
                f"log_probs must have one value per token, got num_values={len(each.log_probs)} "
                f"num_tokens={len(each.token_ids)}"
            )
    return completions


def remove_log_probs(data: Any) -> None:
    """From an ``/infer/`` reply, in place, as far as it is one."""
    with suppress(LookupError, TypeError, AttributeError):
        for output in data:
            output.pop("rollout_logprobs", None)
            output["response"]["choices"][0].pop("logprobs", None)


def output_json(
    completion: Completion,
    *,
    request_id: str | None,
    model: str,
    return_details: bool,
) -> dict[str, Any]:
    """ms-swift's ``RolloutOutput``, stamped with the weights that made the answer.

    Several turns are as one of the assistant's in which an environment's tokens are masked.
    """
    num_prompt, num_new = len(completion.prompt_token_ids), len(completion.token_ids)
    log_probs = None
    if completion.log_probs is not None and not completion.turns:
        pairs = zip(completion.token_ids, completion.log_probs, strict=True)
        log_probs = {"content": [{"token_id": token, "logprob": log_prob} for token, log_prob in pairs]}
    message = {"role": "assistant", "content": completion.text, "tool_calls": None, "reasoning_content": None}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": completion.finish_reason,
        "logprobs": log_probs,
        "token_ids": completion.token_ids if return_details else None,
        "routed_experts": None,
    }
    response = {
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        },
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "prompt_token_ids": completion.prompt_token_ids if return_details else None,
        "prompt_logprobs": None,
        "images_size": completion.images_size if return_details else None,
    }
    stamp = {
        "weight_version": completion.weight_version,
        "spans": completion.spans,
        "run_id": completion.run_id,
        "request_id": request_id,
    }
    return {
        "response": response,
        "messages": None,
        "rollout_infos": {"stage2": stamp},
        "prompt_logprobs": None,
        **_lists(completion),
    }


def _lists(completion: Completion) -> dict[str, Any]:
    turns, num_tokens = completion.turns, len(completion.token_ids)
    mask = spread((1,) * num_tokens, turns, num_tokens, 0)
    log_probs = tuple(compress(completion.log_probs or (), mask))
    lists = {
        "response_token_ids": completion.token_ids,
        "response_loss_mask": mask,
        "rollout_logprobs": log_probs,
    }
    return {name: [values] if turns and values else [] for name, values in lists.items()}


@dataclass(frozen=True, slots=True, config=OPEN)
class FailedRequest(Message):
    """One request of an ``/infer/`` call that cannot be answered."""

    index: Annotated[Int, Field(ge=0)]
    cause: Text = ""


@dataclass(frozen=True, slots=True, config=OPEN)
class FailedRequests(Message):
    """Our server's answer of status 500 to ``/infer/``; calls that share a batch with these are answered."""

    failures: Many[FailedRequest]
    detail: Text = ""
