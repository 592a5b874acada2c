"""Turns the body of ``/infer/`` into requests, and completions into the records of stock ``swift rollout``.

What is wrong with the call as a whole raises; what is wrong with one conversation becomes that request's own
error, so that its sender can find it by halving. Unknown fields are errors, unsupported options too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from reprlib import repr as shown
from typing import Any

from swift_stage2.errors import ProtocolError, SampleError
from swift_stage2.rollout_server.engine import GenerationRequest, Sampling
from swift_stage2.servers.protocol import PREFIX, REQUEST_ID, Completion, may_abort
from swift_stage2.servers.request_checks import CONVERSATION_KEYS, RequestLimits, check_conversations
from swift_stage2.servers.wire_record import mapping

_BODY_KEYS = {"infer_requests", "request_config", "use_tqdm"}
_NULL_BODY_KEYS = {"metrics", "adapter_request"}  # ms-swift's own client sends them, and null
# ms-swift's RequestConfig: options with the only value that this server takes.
_FIXED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "stream": (False,), "n": (1,), "best_of": (None, 1), "num_beams": (1,), "min_p": (None, 0, 0.0),
    "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0), "length_penalty": (1, 1.0),
    "prompt_logprobs": (None,), "structured_outputs_regex": (None,), "top_logprobs": (None,),
}  # fmt: skip
_FREE_OPTIONS = {
    "max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop", "logprobs",
    "return_details",
}  # fmt: skip
_RANGES: dict[str, tuple[str, str, float, float]] = {
    "temperature": ("a number", "from", 0.0, 1e6),
    "top_p": ("a number", "above", 0.0, 1.0),
    "repetition_penalty": ("a number", "above", 0.0, 1e6),
    "top_k": ("an integer", "from", -1, 2**31),
    "max_tokens": ("an integer", "from", 1, 2**31),
    "seed": ("an integer", "from", 0, 2**63 - 1),
}
_MOST_STOP_CHARS = 4096  # a search for them runs after every token of every row


class InferCall:
    """One checked ``/infer/`` call.

    ``faults`` says why a conversation, by its place, cannot be asked; ``requests`` are the others.
    """

    def __init__(self, body: Any, limits: RequestLimits | None = None) -> None:
        """Raises ProtocolError, in one line, for what is wrong with the call as a whole."""
        record = mapping(body, "the body")
        unset = {key for key in _NULL_BODY_KEYS if record.get(key) is None}
        _refuse_unknown(record, _BODY_KEYS | unset, "the body")
        conversations = record.get("infer_requests")
        if not isinstance(conversations, list) or not conversations:
            raise ProtocolError("infer_requests must be a list of at least one request")
        config = record.get("request_config")
        options = mapping({} if config is None else config, "request_config")
        _check_options(options)
        self.return_details = options.get("return_details") is True
        self.num_requests = len(conversations)
        self.faults = check_conversations(conversations, limits or RequestLimits())
        for place, item in enumerate(conversations):
            if place not in self.faults and (fault := _prefix_fault(item, options)):
                self.faults[place] = SampleError(fault)
        self.requests = [
            _request(item, options) for place, item in enumerate(conversations) if place not in self.faults
        ]


def output_json(
    completion: Completion,
    *,
    request_id: str | None,
    model: str,
    incarnation: str,
    is_proven: bool,
    return_details: bool,
) -> dict[str, Any]:
    """One ``RolloutOutput`` of ms-swift, stamped with the weights that produced it."""
    num_prompt, num_new = len(completion.prompt_token_ids), len(completion.token_ids)
    log_probs = None
    if completion.log_probs is not None:
        pairs = zip(completion.token_ids, completion.log_probs, strict=True)
        log_probs = {"content": [{"token_id": token, "logprob": log_prob} for token, log_prob in pairs]}
    message = {
        "role": "assistant", "content": completion.text, "tool_calls": None, "reasoning_content": None,
    }  # fmt: skip
    usage = {
        "prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new,
    }  # fmt: skip
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": completion.finish_reason,
        "logprobs": log_probs,
        "token_ids": list(completion.token_ids) if return_details else None,
        "routed_experts": None,
    }
    response = {
        "model": model,
        "choices": [choice],
        "usage": usage,
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "prompt_token_ids": list(completion.prompt_token_ids) if return_details else None,
        "prompt_logprobs": None,
        "images_size": [list(size) for size in completion.images_size] if return_details else None,
    }
    stamp = {
        "weight_version": completion.weight_version,
        "run_id": completion.run_id,
        "round_id": completion.round_id,
        "incarnation": incarnation,
        "proven": is_proven,
        "request_id": request_id,
    }
    return {
        "response": response,
        "messages": None,
        "response_token_ids": [],
        "response_loss_mask": [],
        "rollout_infos": {"stage2": stamp},
        "rollout_logprobs": [],
        "prompt_logprobs": None,
    }


def _request(record: Mapping[str, Any], options: Mapping[str, Any]) -> GenerationRequest:
    conversation = {key: record[key] for key in CONVERSATION_KEYS if record.get(key) is not None}
    return GenerationRequest(
        conversation={**conversation, "images": record.get("images") or []},
        sampling=Sampling(
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
            repetition_penalty=options.get("repetition_penalty"),
            stop=tuple(options.get("stop") or []),
        ),
        max_new_tokens=options.get("max_tokens"),
        seed=options.get("seed"),
        prefix=tuple(record.get(PREFIX) or ()),
        with_log_probs=bool(options.get("logprobs", False)),
        may_abort=may_abort(record),
        request_id=name if isinstance(name := record.get(REQUEST_ID), str) else None,
    )


def _prefix_fault(record: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Why no engine can go on behind a request's prefix; empty if one can, or there is none."""
    prefix, most = record.get(PREFIX), options.get("max_tokens")
    if prefix is None or prefix == []:
        return ""
    if not isinstance(prefix, list) or not all(type(token) is int and 0 <= token < 2**31 for token in prefix):
        return f"{PREFIX} must be a list of token ids, integers from 0, got {PREFIX}={shown(prefix)}"
    if most is not None and len(prefix) >= most:
        return (
            f"{PREFIX} must be shorter than max_tokens, which counts them, too, got num_prefix={len(prefix)} "
            f"max_tokens={most}; take such an answer as one that was cut, or ask for more"
        )
    if options.get("stop"):
        return f"a stop word may stand across the cut of an answer, got stop with {PREFIX}; leave one of them out"
    return ""


def _check_options(options: Mapping[str, Any]) -> None:
    _refuse_unknown(options, _FREE_OPTIONS | _FIXED_OPTIONS.keys(), "request_config")
    for key, allowed in _FIXED_OPTIONS.items():
        if key in options and options[key] not in allowed:
            raise ProtocolError(
                f"this server supports {key}={allowed[0]!r} only, got {key}={shown(options[key])}"
            )
    for key, (kind, start, smallest, largest) in _RANGES.items():
        value = options.get(key)
        if value is None:
            continue
        is_one = isinstance(value, int if kind == "an integer" else (int, float)) and not isinstance(
            value, bool
        )
        if not is_one or not smallest <= value <= largest or (start == "above" and value == smallest):
            raise ProtocolError(
                f"{key} must be {kind} {start} {smallest} to {largest}, got {key}={shown(value)}"
            )
    stop = options.get("stop")
    words = [] if stop is None else stop
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise ProtocolError(f"stop must be a list of text, got stop={shown(stop)}")
    if sum(map(len, words)) > _MOST_STOP_CHARS:
        raise ProtocolError(f"stop may hold {_MOST_STOP_CHARS} characters, got {sum(map(len, words))}")


def _refuse_unknown(record: Mapping[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(record.keys() - known)
    if unknown:
        raise ProtocolError(f"{what} knows no field {shown(unknown[0])}; it takes {', '.join(sorted(known))}")
