"""Makes requests for an engine of the body of ``/infer/``.

What is wrong with the call as a whole raises; what is wrong with one conversation becomes that request's own error, so
that its sender can find it by halving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from swift_stage2 import wire
from swift_stage2.errors import SampleError
from swift_stage2.rollout_server.engine import GenerationRequest
from swift_stage2.servers.infer_wire import PREFIX, REQUEST_ID, InferCall, SamplingOptions, may_abort
from swift_stage2.servers.request_checks import RequestLimits, check_conversations

# What of a request ms-swift sees; the rest changes nothing that is generated.
_CONVERSATION_KEYS = ("messages", "images", "tools", "objects", "chat_template_kwargs")


class CheckedCall(NamedTuple):
    """An ``/infer/`` call. ``faults`` says why a conversation, by its place, cannot be asked; the others are
    ``requests``."""

    requests: Sequence[GenerationRequest]
    faults: Mapping[int, SampleError]
    num_requests: int
    return_details: bool


def check_call(raw: bytes | bytearray, limits: RequestLimits) -> CheckedCall:
    """Raises ProtocolError, in one line, for what is wrong with the call as a whole."""
    call = InferCall.from_json(wire.parse_call(raw))
    options = call.request_config or SamplingOptions()
    faults = check_conversations(call.infer_requests, limits)
    requests = []
    for place, record in enumerate(call.infer_requests):
        if place not in faults:
            try:
                requests.append(_request(record, options))
            except SampleError as error:
                faults[place] = error
    return CheckedCall(requests, faults, len(call.infer_requests), bool(options.return_details))


def _request(record: Mapping[str, Any], options: SamplingOptions) -> GenerationRequest:
    prefix = tuple(record.get(PREFIX) or ())
    if prefix and options.max_tokens is not None and len(prefix) >= options.max_tokens:
        raise SampleError(
            f"{PREFIX} must be shorter than max_tokens, which counts them, too",
            got=f"num_prefix={len(prefix)} max_tokens={options.max_tokens}",
            remedy="take such an answer as one that was cut, or ask for more",
        )
    if prefix and options.stop:
        raise SampleError("a stop word may stand across the cut of an answer", got=f"stop with {PREFIX}")
    conversation = {key: record[key] for key in _CONVERSATION_KEYS if record.get(key) is not None}
    request_id = record.get(REQUEST_ID)
    return GenerationRequest(
        conversation={**conversation, "images": record.get("images") or []},
        sampling=replace(options, max_tokens=None, seed=None, return_details=None),
        max_new_tokens=options.max_tokens,
        seed=options.seed,
        prefix=prefix,
        may_abort=may_abort(record),
        request_id=request_id if isinstance(request_id, str) else None,
    )
