"""The wire between learner and rollout server: paths and message records, and nothing that does I/O.

The first group of paths and records is ms-swift 4.6's ``swift rollout``; the second group, under
``/stage2/``, is answered by our own server only. Shared by client, weight sync and server.
Everything on the wire is JSON and is checked field by field; nothing is unpickled or evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic_core import from_json

from swift_stage2.errors import ProtocolError
from swift_stage2.servers.wire_record import (
    TensorSpec as TensorSpec,
)
from swift_stage2.servers.wire_record import (
    WireRecord,
    finite,
    integer,
    integer_list,
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
BEGIN_ROUND = "/stage2/begin_round/"
FINISH_ROUND = "/stage2/finish_round/"
ABORT = "/stage2/abort/"

# A stock server that was started with the plugin ``stock_proof`` answers this one (others: 404). GET tells its
# incarnation, POST what it holds of the last push, once everything sent to it before has been done.
WEIGHT_SUMS = "/stage2/weight_sums/"

# How our server takes weights: ``backend`` of INIT_COMMUNICATOR, see ``weight_stream``.
WEIGHT_STREAM = "tcp"

# A round's own requests carry its id; our server refuses any other /infer/ while a round is open.
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
    """A server's word of itself. ``stock`` servers know no ``/stage2/`` path and say little."""

    stock: bool
    incarnation: str | None = None  # changes at every start of the server process
    engine: str | None = None
    model: str | None = None
    weight_version: int | None = None
    run_id: str | None = None
    state: str | None = None
    can_abort: bool = False
    manifest: tuple[TensorSpec, ...] = ()

    def to_json(self) -> dict[str, Any]:
        record = WireRecord.to_json(self)
        del record["stock"]
        return record

    @classmethod
    def from_json(cls, data: Any) -> ServerInfo:
        record = mapping(data, "server info")
        return read(cls, {**record, "incarnation": text(record, "incarnation"), "stock": False})


@dataclass(frozen=True, slots=True)
class RoundRequest(WireRecord):
    """Opens one sync round on our server; the manifest is compared before any downtime."""

    round_id: str
    run_id: str
    version: int  # the version that the server will hold once the round is proven
    manifest: tuple[TensorSpec, ...]
    timeout_s: float = 300.0  # the server forgets the round this long after it began


@dataclass(frozen=True, slots=True)
class FinishRequest(WireRecord):
    """Ends a round. ``checksums``, of all tensors as they were sent, decide with the server's own what it may serve."""

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
class WeightSums(WireRecord):
    """Answer of a stock server with our plugin about the last push: all its workers, in all its engines, agree on it.

    ``resident`` lacks tensors of which no whole copy into the model was seen. ``left_out`` are the model's parameters
    that nothing was copied into. Of an ``adapter`` only what arrived is known.
    """

    incarnation: str
    arrived: Mapping[str, str]
    resident: Mapping[str, str]
    left_out: tuple[str, ...]
    adapter: Mapping[str, str]
    errors: tuple[str, ...]  # of its workers; ms-swift itself only logs them

    def problems(self, sent: Mapping[str, str]) -> list[str]:
        """Why the server does not hold the weights whose checksums are ``sent``; empty if it does."""
        problems = [*self.errors, *sum_differences("arrived", sent, self.arrived)]
        if not problems:
            problems += sum_differences(
                "resident", {name: sent[name] for name in self.resident}, self.resident
            )
        untraced = sorted(sent.keys() - self.resident.keys())
        if untraced and not problems:
            problems.append(
                f"{_first_of(untraced)} arrived and was not seen whole in the model: it was dropped, or this model's "
                "loader leaves no trace"
            )
        if self.left_out and not problems:
            problems.append(f"nothing was loaded into the server's parameter {_first_of(self.left_out)}")
        return problems

    def adapter_problems(self, sent: Mapping[str, str]) -> list[str]:
        """Why the last adapter did not arrive as ``sent``. Whether it is resident the server cannot tell."""
        return [*self.errors, *sum_differences("arrived", sent, self.adapter)]


def sum_differences(what: str, sent: Mapping[str, str], got: Mapping[str, str]) -> list[str]:
    """One line that names the first tensor whose checksum is not as sent; none if all are."""
    names = [name for name in sorted(sent.keys() | got.keys()) if sent.get(name) != got.get(name)]
    return [f"{what} checksum of {names[0]} differs ({len(names)} in all)"] if names else []


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} ({len(names)} in all)"


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
    seed: int | None = None  # that it was sampled with, where a merger shared a POST among callers


def request_config(
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    repetition_penalty: float,
    seed: int,
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
    }


def one_token_request() -> dict[str, Any]:
    """An ``/infer/`` body that asks for one greedy token: whether the server answers, and with which model."""
    config = request_config(
        max_new_tokens=1, temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=1
    )
    return {"infer_requests": [{"messages": [{"role": "user", "content": "?"}]}], "request_config": config}


_MAY_ABORT = "may_abort"


def protect_from_abort(request: Mapping[str, Any]) -> dict[str, Any]:
    """The same infer request, which ``/stage2/abort/`` leaves alone. Stock servers take the field and ignore it."""
    return {**request, "data_dict": {**request.get("data_dict", {}), "stage2": {_MAY_ABORT: False}}}


def may_abort(request: Mapping[str, Any]) -> bool:
    """Whether an infer request may be ended by ``/stage2/abort/``: yes unless it is protected."""
    extra = request.get("data_dict")
    ours = extra.get("stage2") if isinstance(extra, Mapping) else None
    return not (isinstance(ours, Mapping) and ours.get(_MAY_ABORT) is False)


def parse_infer_reply(data: Any, num_requests: int) -> tuple[Completion, ...]:
    """Checks the body of an ``/infer/`` reply and returns one completion per request, in order.

    Raises:
        ProtocolError: not a list, another number of outputs than requests, a field of a wrong type.
    """
    if not isinstance(data, list):
        raise ProtocolError(f"an /infer/ reply must be a list, got {type(data).__name__}")
    if len(data) != num_requests:
        raise ProtocolError(
            f"an /infer/ reply must hold one output per request, got num_outputs={len(data)} "
            f"num_requests={num_requests}"
        )
    return tuple(_parse_completion(item) for item in data)


def parse_failed_places(record: Any) -> tuple[int, ...]:
    """Places of the requests that our server's error answer to ``/infer/`` names as failed; empty for any other."""
    failures = record.get("failures") if isinstance(record, Mapping) else None
    entries = failures if isinstance(failures, list) else []
    places = [entry.get("index") for entry in entries if isinstance(entry, Mapping)]
    return tuple(place for place in places if type(place) is int and place >= 0)


def parse_served_model(data: Any) -> str | None:
    """The model that an ``/infer/`` reply names: a path, or the last part of one. None if it names none."""
    output = data[0] if isinstance(data, list) and data else None
    response = output.get("response") if isinstance(output, Mapping) else None
    model = response.get("model") if isinstance(response, Mapping) else None
    return model if isinstance(model, str) else None


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


def _parse_completion(item: Any) -> Completion:
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
    return Completion(
        text=content,
        token_ids=tuple(integer_list(choice, "token_ids")),
        finish_reason=optional_text(choice, "finish_reason"),
        prompt_token_ids=tuple(integer_list(response, "prompt_token_ids")),
        images_size=_sizes(response.get("images_size")),
        log_probs=_log_probs(choice.get("logprobs")),
        weight_version=optional_integer(stamp, "weight_version"),
        run_id=optional_text(stamp, "run_id"),
        incarnation=optional_text(stamp, "incarnation"),
        seed=optional_integer(stamp, "seed"),
    )


def _sizes(value: Any) -> tuple[tuple[int, int], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(
        isinstance(size, Sequence) and len(size) == 2 for size in value
    ):
        raise ProtocolError("images_size must be a list of (width, height)")
    return tuple((integer(width, "width"), integer(height, "height")) for width, height in value)


def _log_probs(value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    content = mapping(value, "logprobs").get("content")
    if not isinstance(content, list):
        raise ProtocolError("logprobs.content must be a list")
    numbers = [mapping(entry, "logprobs entry").get("logprob") for entry in content]
    return tuple(finite(number, "logprob") for number in numbers)
