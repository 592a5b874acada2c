"""The wire between learner and rollout server: paths and message records, and nothing that does I/O.

The first group of paths and records is ms-swift 4.6's ``swift rollout``; the second group, under
``/stage2/``, is answered by our own server only. Shared by client, weight sync and server.
Everything on the wire is JSON and is checked field by field; nothing is unpickled or evaluated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic_core import from_json

from swift_stage2.columns import LOG_PROBS, Column, request_options
from swift_stage2.errors import ProtocolError
from swift_stage2.servers.wire_record import (
    TensorSpec as TensorSpec,
)
from swift_stage2.servers.wire_record import (
    WireRecord,
    integer,
    integer_list,
    log_prob_list,
    mapping,
    optional_integer,
    optional_text,
    read,
    text,
)

# --- paths of stock `swift rollout` -------------------------------------------------------------
HEALTH = "/health/"
WORLD_SIZE = "/get_world_size/"
ENGINE_TYPE = "/get_engine_type/"
STATE_KEYS = "/get_model_state_keys/"
INFER = "/infer/"
INIT_COMMUNICATOR = "/init_communicator/"
UPDATE_FLATTENED_PARAMS = "/update_flattened_params/"
UPDATE_NAMED_PARAM = "/update_named_param/"
PROCESS_WEIGHTS = "/process_weights_after_loading/"
RESET_PREFIX_CACHE = "/reset_prefix_cache/"
RESET_ENCODER_CACHE = "/reset_encoder_cache/"
RESET_MM_CACHE = "/reset_mm_cache/"
CLOSE_COMMUNICATOR = "/close_communicator/"

# --- paths that only our server answers (stock: 404) --------------------------------------------
SERVER_INFO = "/stage2/info/"
INSTALLING_STATE = (
    "installing"  # in a server's info: its engine copies weights in, also of a round that has ended
)
BEGIN_ROUND = "/stage2/begin_round/"
FINISH_ROUND = "/stage2/finish_round/"
ABORT = "/stage2/abort/"

# A stock server that was started with the plugin ``stock_proof`` answers this one (others: 404). GET tells its
# incarnation, POST what it holds of the last push, once everything sent to it before has been done.
WEIGHT_SUMS = "/stage2/weight_sums/"

# How our server takes a round's snapshot: ``backend`` of INIT_COMMUNICATOR. A stream to ``port`` of ``num_bytes``, the
# memory file of a learner beside it at ``path``, or the round's file below the server's --weights-root.
WEIGHT_STREAM = "tcp"
SHARED_MEMORY = "shared_memory"
DISK = "disk"

# A round's own requests carry its id: one that names another round than the open one changes nothing.
ROUND_HEADER = "X-Stage2-Round"


# How long an answer may be. JSON spells an id in at most 8 bytes, a token's text and its log-probability in some more;
# a prompt's ids come back as well, some ten thousands where images are large, and stock servers echo messages.
MOST_CONTROL_BYTES = 32 << 20  # a manifest and two checksums for each of 70,000 tensors
_BYTES_OF_A_PROMPT = 512 << 10
_BYTES_OF_A_TOKEN = 512


def most_infer_bytes(num_requests: int, max_new_tokens: int) -> int:
    """How long the answer to an ``/infer/`` call may be, beyond the bytes that were sent."""
    return (1 << 20) + num_requests * (_BYTES_OF_A_PROMPT + max_new_tokens * _BYTES_OF_A_TOKEN)


def parse_json(body: bytes, what: str = "an answer") -> Any:
    """The value of a body, which is read as UTF-8 whatever its sender claims; ``what`` names it in a refusal.

    Raises:
        ProtocolError: no JSON, more than 200 levels deep, half a character, or a number of more than 4300 digits.
    """
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ProtocolError(f"{what} must be JSON: {error}") from error


class RefusalReason(StrEnum):
    """Why our server answers 409: the ``reason`` beside ``detail`` in the body. Nothing was changed."""

    BUSY = "busy"  # completions are in the making; ask again when they have ended
    ROUND_OPEN = "round_open"  # another round holds the server, or /infer/ came without its id
    NO_ROUND = "no_round"  # the round named is not the open one, or none is open
    MANIFEST_DIFFERS = "manifest_differs"  # names, shapes or dtypes are not the model's own
    WRONG_ORDER = "wrong_order"  # the step belongs elsewhere in a round
    UNPROVEN = "unproven"  # the model holds weights that nobody vouches for; only a round helps


@dataclass(frozen=True, slots=True)
class ServerInfo(WireRecord):
    """A server's word of itself. ``stock`` servers know no ``/stage2/`` path and say little.

    One with a ``chat_model`` is a plain ``vllm serve`` (``vllm_serve``): it is asked by that name at OpenAI's routes.
    """

    stock: bool
    incarnation: str | None = None  # changes at every start of the server process
    engine: str | None = None
    model: str | None = None
    weight_version: int | None = None
    run_id: str | None = None
    state: str | None = None
    can_abort: bool = False
    manifest: tuple[TensorSpec, ...] = ()
    staging: bool = False  # whether it answers with its old weights while a staged round brings new ones
    round_id: str | None = None  # that brought the resident weights
    reads_disk: bool = False  # whether it was started with --weights-root
    resume: bool = False  # whether a request may bring the first ids of its answer
    chat_model: str | None = None

    @property
    def is_swift_rollout(self) -> bool:
        """True for a stock ``swift rollout``, False for our server and for plain ``vllm serve``."""
        return self.stock and self.chat_model is None

    def to_json(self) -> dict[str, Any]:
        record = WireRecord.to_json(self)
        del record["stock"], record["chat_model"]
        return record

    @classmethod
    def from_json(cls, data: Any) -> ServerInfo:
        record = mapping(data, "server info")
        return read(
            cls, {**record, "incarnation": text(record, "incarnation"), "stock": False, "chat_model": None}
        )


@dataclass(frozen=True, slots=True)
class RoundRequest(WireRecord):
    """Opens one sync round on our server; the manifest is compared before any downtime."""

    round_id: str
    run_id: str
    version: int  # the version that the server will hold once the round is proven
    manifest: tuple[TensorSpec, ...]
    timeout_s: float = 300.0  # the server forgets the round this long after it began
    staged: bool = False  # /infer/ is answered until the install; else the round must find the server idle


@dataclass(frozen=True, slots=True)
class MemoryAnswer(WireRecord):
    """Whether the server has mapped the learner's memory, and why not; then a stream is left."""

    message: str
    mapped: bool


@dataclass(frozen=True, slots=True)
class InstallRequest(WireRecord):
    """Body of PROCESS_WEIGHTS: what a staged round does with completions in the making."""

    on_pending: str = "wait"  # "wait" | "abort" | "resume": ended, too; their caller asks for the rest

    @property
    def aborts(self) -> bool:
        """Whether those that may be aborted are; the others are waited for."""
        return self.on_pending != "wait"

    @classmethod
    def from_json(cls, data: Any) -> InstallRequest:
        record = read(cls, mapping(data, "install request"))
        if record.on_pending not in ("wait", "abort", "resume"):
            raise ProtocolError(
                f"on_pending must be 'wait', 'abort' or 'resume', got on_pending={record.on_pending!r}"
            )
        return record


@dataclass(frozen=True, slots=True)
class FinishRequest(WireRecord):
    """Ends a round. Without ``checksums`` of all tensors as they were sent the server serves none of them."""

    round_id: str
    commit: bool = True  # False gives the round up
    checksums: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class RoundProof(WireRecord):
    """The proof that our server can show after a round.

    ``arrived`` holds a checksum per tensor as it came off the wire, ``resident`` a checksum per
    tensor as the engine now holds it, ``loaded`` the names that the engine reports as loaded.
    """

    round_id: str
    incarnation: str
    weight_version: int
    arrived: Mapping[str, str]
    resident: Mapping[str, str]
    loaded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AbortRequest(WireRecord):
    """Asks our server to end what is in flight under these weights, apart from requests that must not be aborted.

    A call that arrives late, when a round has brought other weights, ends nothing.
    """

    run_id: str
    version: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of ``/infer/``: what the model sampled, verbatim, and what the server adds to it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # "stop" | "length" | "abort"
    prompt_token_ids: tuple[int, ...]
    images_size: tuple[tuple[int, int], ...] = ()  # (width, height) of each image as the model saw it
    log_probs: tuple[float, ...] | None = None
    weight_version: int | None = None  # stamped by our server
    run_id: str | None = None
    incarnation: str | None = None
    round_id: str | None = None  # that brought the weights
    seed: int | None = None  # that it was sampled with, where a merger shared a POST among callers
    request_id: str | None = (
        None  # of the request that it answers, as our server says; a stock server names none
    )


def request_config(
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    repetition_penalty: float,
    seed: int,
    columns: Iterable[Column] = (),
) -> dict[str, Any]:
    """ms-swift's ``RequestConfig`` as JSON; ``return_details`` asks for token ids and prompt ids."""
    return {
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "return_details": True,
        **request_options(columns),
    }


def greedy_config(max_new_tokens: int) -> dict[str, Any]:
    """A ``request_config`` under which equal weights give equal answers."""
    return request_config(
        max_new_tokens=max_new_tokens, temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=1
    )


REQUEST_ID = "uuid"  # of an infer request, as ms-swift calls it: our server stamps its answer with it
PREFIX = "prefix_token_ids"  # of an infer request: the first ids of its answer, where ``ServerInfo.resume``
_MAY_ABORT = "may_abort"


def protect_from_abort(request: Mapping[str, Any]) -> dict[str, Any]:
    """The same infer request, which ``/stage2/abort/`` leaves alone. Stock servers take the field and ignore it."""
    return {**request, "data_dict": {**request.get("data_dict", {}), "stage2": {_MAY_ABORT: False}}}


def may_abort(request: Mapping[str, Any]) -> bool:
    """Whether an infer request may be ended by ``/stage2/abort/``: yes unless it is protected."""
    extra = request.get("data_dict")
    ours = extra.get("stage2") if isinstance(extra, Mapping) else None
    return not (isinstance(ours, Mapping) and ours.get(_MAY_ABORT) is False)


def parse_infer_reply(data: Any, num_requests: int, asked: Collection[str] = ()) -> tuple[Completion, ...]:
    """Checks the body of an ``/infer/`` reply and returns one completion per request, in order.

    Raises:
        ProtocolError: not a list, another number of outputs than requests, a field of a wrong type, or one of the
            columns ``asked`` for is missing or is none.
    """
    if not isinstance(data, list):
        raise ProtocolError(f"an /infer/ reply must be a list, got {type(data).__name__}")
    if len(data) != num_requests:
        raise ProtocolError(
            f"an /infer/ reply must hold one output per request, got num_outputs={len(data)} "
            f"num_requests={num_requests}"
        )
    return tuple(_parse_completion(item, asked) for item in data)


def parse_cache_reset(data: Any) -> bool:
    """True iff a cache reset reports success; its message ends in ``status: True`` or ``False``."""
    message = text(mapping(data, "cache reset"), "message")
    _, found, status = message.rpartition("status: ")
    if not found or status not in ("True", "False"):
        raise ProtocolError(f"a cache reset must report 'status: True' or 'status: False', got {message!r}")
    return status == "True"


def parse_incarnation(data: Any) -> str:
    """Which process answers, of a stock server with our plugin."""
    return text(mapping(data, "answer"), "incarnation")


def parse_stream_secret(data: Any) -> str:
    """The secret of our server's answer to INIT_COMMUNICATOR, to be presented where it listens for weights."""
    return text(mapping(data, "answer"), "secret")


def _parse_completion(item: Any, asked: Collection[str]) -> Completion:
    output = mapping(item, "output")
    response = mapping(output.get("response"), "response")
    choices = response.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        raise ProtocolError("a response must hold exactly one choice (request n=1)")
    choice = mapping(choices[0], "choice")
    content = mapping(choice.get("message"), "message").get("content")
    if not isinstance(content, str):
        raise ProtocolError(f"message.content must be text, got {type(content).__name__}")
    infos = output.get("rollout_infos") or {}
    stamp = infos.get("stage2") if isinstance(infos, Mapping) else None
    stamp = mapping(stamp, "rollout_infos.stage2") if stamp is not None else {}
    token_ids = tuple(integer_list(choice, "token_ids"))
    log_probs = log_prob_list(choice)
    return Completion(
        text=content,
        token_ids=token_ids,
        finish_reason=optional_text(choice, "finish_reason"),
        prompt_token_ids=tuple(integer_list(response, "prompt_token_ids")),
        images_size=_sizes(response.get("images_size")),
        log_probs=LOG_PROBS.check(log_probs, len(token_ids), asked=LOG_PROBS.name in asked),
        weight_version=optional_integer(stamp, "weight_version"),
        run_id=optional_text(stamp, "run_id"),
        incarnation=optional_text(stamp, "incarnation"),
        round_id=optional_text(stamp, "round_id"),
        seed=optional_integer(stamp, "seed"),
        request_id=optional_text(stamp, "request_id"),
    )


def _sizes(value: Any) -> tuple[tuple[int, int], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(
        isinstance(size, Sequence) and len(size) == 2 for size in value
    ):
        raise ProtocolError("images_size must be a list of (width, height)")
    return tuple((integer(width, "width"), integer(height, "height")) for width, height in value)
