"""Talks to a plain ``vllm serve`` (0.32 and later) by vLLM's own routes: how it is recognised, asked and proven.

Rollouts are asked by its OpenAI route, one request a call. A round needs routes that only ``VLLM_SERVER_DEV_MODE=1``
opens: pause, weight transfer, weight checker, weight version. The version is a text of the learner's choice that vLLM
keeps until its process ends, so one with run and version tells whose weights answer, and that no other process does.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AliasPath, Field
from pydantic.dataclasses import dataclass as message

from swift_stage2.errors import ProtocolError, ServerFault
from swift_stage2.servers.infer_wire import Completion, LogProbs
from swift_stage2.wire import OPEN, Int, Many, Message, ServerInfo, Sums, Text, member

if TYPE_CHECKING:
    from swift_stage2.servers.session import Deadline, ServerSession

MODELS = "/v1/models"
_VERSION = "/version"
CHAT = "/v1/chat/completions"
ABORT_REQUESTS = "/abort_requests"
WEIGHT_INFO = "/weight_info"
PAUSE = "/pause?mode=wait"  # answers once nothing runs, with all caches emptied; what comes later waits
RESUME = "/resume"
INIT_TRANSFER = "/init_weight_transfer_engine"
SHUTDOWN_TRANSFER = "/shutdown_weight_transfer_engine"
START_UPDATE = "/start_weight_update"
UPDATE_WEIGHTS = "/update_weights"
FINISH_UPDATE = "/finish_weight_update"
_CHECKER = "/weight_checker"
_WORLD_SIZE = "/get_world_size"

_IMAGE = "<image>"
_ENGINE_HEADER = "X-data-parallel-rank"


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The text that a proven server answers to ``WEIGHT_INFO``. One that was started anew says ``default``."""

    run_id: str
    version: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.version}"

    @classmethod
    def parse(cls, said: str) -> WeightVersion | None:
        """None if the text is not a learner's."""
        found = re.fullmatch(r"(.+)/([0-9]{1,18})", said)
        return cls(found[1], int(found[2])) if found else None


def find_info(session: ServerSession, deadline: Deadline) -> ServerInfo | None:
    """What a ``vllm serve`` with its development routes says of itself; None of another program.

    Raises:
        ServerFault: it cannot be asked, or its engine has failed.
    """
    try:
        ask_weight_version(session, deadline)
    except ServerFault as fault:
        if fault.is_foreign:
            return None
        raise
    return session.read(MODELS, _read_models, session.get(MODELS, deadline))


def _read_models(data: Any) -> ServerInfo:
    """The served model: the name to ask it by, and the path or hub id that it was read from."""
    model = member(data, "data", Annotated[Many[dict[str, Any]], Field(min_length=1)])[0]
    name = member(model, "id", Text)
    return ServerInfo(stock=True, model=member(model, "root", Text | None) or name, chat_model=name)


TRANSFER_OPTION = """--weight-transfer-config '{"backend": "nccl"}'"""


def missing_routes_remedy(session: ServerSession, deadline: Deadline) -> str:
    """The remedy for vLLM without the routes that a round needs; empty if another program answers."""
    with suppress(ServerFault):
        reply = session.get(_VERSION, deadline)
        if isinstance(reply, Mapping) and reply.keys() == {"version"}:
            return (
                f"it is vLLM {str(reply['version'])[:20]} without the routes that a round needs: start vLLM 0.32 or "
                f"later with VLLM_SERVER_DEV_MODE=1 and {TRANSFER_OPTION}, or serve with swift rollout or "
                "swift-stage2 rollout, which take vLLM 0.23 and later"
            )
    return ""


def ask_weight_version(session: ServerSession, deadline: Deadline) -> str:
    """Raises ServerFault."""
    return session.read(WEIGHT_INFO, parse_weight_version, session.get(WEIGHT_INFO, deadline))


def ask_num_workers(session: ServerSession, deadline: Deadline, *, of_one_engine: bool = False) -> int:
    """Of all data-parallel engines, or of each of them. Raises ServerFault."""
    path = f"{_WORLD_SIZE}?include_dp={str(not of_one_engine).lower()}"
    size: Callable[[Any], int] = partial(member, key="world_size", kind=Annotated[Int, Field(ge=1)])
    return session.read(path, size, session.get(path, deadline))


def ask_canary(
    session: ServerSession,
    model: str,
    question: tuple[Mapping[str, Any], Mapping[str, Any]],
    deadline: Deadline,
) -> list[Completion]:
    """Every data-parallel engine's own answer to a request under a config. Raises ServerFault."""
    each = ask_num_workers(session, deadline, of_one_engine=True)
    answers = []
    for engine in range(ask_num_workers(session, deadline) // each):
        name = uuid.uuid4().hex
        body = chat_body(model, *question, name)
        reply = session.post(CHAT, body, deadline, headers={_ENGINE_HEADER: str(engine)})
        answers.append(session.read(CHAT, partial(parse_chat_reply, request_id=name), reply))
    return answers


def ask_digests(session: ServerSession, deadline: Deadline, *, blank: bool = False) -> dict[str, str]:
    """vLLM's own SHA-256 of every parameter in its own layout; ``blank``: of zeros, which it holds from now on.

    Raises:
        ServerFault: it has none.
    """
    if blank:
        session.post(_CHECKER, {"action": "reset"}, deadline)
    reply = session.post(_CHECKER, {"action": "checksum"}, deadline)
    return session.read(_CHECKER, partial(member, key="checksums", kind=Sums), reply)


def parse_weight_version(data: Any) -> str:
    """The text of an answer to ``WEIGHT_INFO``. Raises ProtocolError."""
    version: str = member(data, "weight_version", Text)
    return version


@message(frozen=True, slots=True, config=OPEN)
class ChatReply(Message):
    """Answer of ``CHAT``, which asks for one choice, with the ids that vLLM adds."""

    id: Text
    prompt_token_ids: Many[Int]
    token_ids: Many[Int] = Field(validation_alias=AliasPath("choices", 0, "token_ids"))
    content: Text | None = Field(validation_alias=AliasPath("choices", 0, "message", "content"))
    finish_reason: Text | None = Field(
        default=None, validation_alias=AliasPath("choices", 0, "finish_reason")
    )
    log_probs: LogProbs = Field(default=None, validation_alias=AliasPath("choices", 0, "logprobs"))
    """Of the model, not of what its answer was drawn from."""


def chat_body(
    model: str, request: Mapping[str, Any], config: Mapping[str, Any], request_id: str
) -> dict[str, Any]:
    """Body of ``CHAT`` for one infer request; ``config`` is a ``request_config``."""
    sampling = {name: value for name, value in config.items() if name != "return_details"}
    return {
        "model": model,
        "messages": _chat_messages(request),
        "request_id": request_id,
        "return_token_ids": True,
        **sampling,
    }


def engine_name(request_id: str) -> str:
    """How ``ABORT_REQUESTS`` calls the request that ``CHAT`` was given under this id."""
    return f"chatcmpl-{request_id}"


def parse_chat_reply(data: Any, request_id: str) -> Completion:
    """The completion of a ``CHAT`` answer; it names no weights. Raises ProtocolError: none, or another request's."""
    reply = ChatReply.from_json(data)
    if reply.id != engine_name(request_id):
        raise ProtocolError(
            f"an answer must be of its request, got id={reply.id[:80]!r} for request_id={request_id}"
        )
    content, prompt, end = reply.content or "", reply.prompt_token_ids, reply.finish_reason
    return Completion(content, reply.token_ids, prompt, end, log_probs=reply.log_probs)


def stamped(completion: Completion, said: str) -> Completion:
    """With the weights that the server says it holds."""
    weights = WeightVersion.parse(said)
    if weights is None:
        return completion
    return replace(completion, weight_version=weights.version, run_id=weights.run_id)


def _chat_messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Its messages with every image in the place of its tag; those without one come first, as ms-swift has them."""
    messages = [dict(turn) for turn in request["messages"]]
    images = list(request.get("images") or ())
    num_tags = sum(str(turn["content"]).count(_IMAGE) for turn in messages)
    messages[0]["content"] = _IMAGE * (len(images) - num_tags) + messages[0]["content"]
    for turn in messages:
        first, *others = turn["content"].split(_IMAGE)
        if not others:
            continue
        parts = [_text(first)]
        for following in others:
            if not images:
                raise ProtocolError(f"a prompt must not have more {_IMAGE} tags than images")
            parts += [_image(images.pop(0)), _text(following)]
        turn["content"] = [part for part in parts if part.get("text") != ""]
    return messages


def _text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def _image(image: str) -> dict[str, Any]:
    url = image if image.startswith("data:") else f"data:image/*;base64,{image}"
    return {"type": "image_url", "image_url": {"url": url}}
