"""The wire between learner and rollout server: paths, and one frozen, strict model per message, for both sides.

The first group of paths is ms-swift 4.6's ``swift rollout``; the second group, under ``/stage2/``, is answered by our
own server only. A message is checked by pydantic when it is made and when it is read: no number for a text, no
fraction, nothing that is not finite, no integer of more than 64 bits. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from reprlib import repr as shown
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import from_json

from swift_stage2.errors import ProtocolError, RequestTooLarge

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
WEIGHT_SUMS = "/stage2/weight_sums/"
"""A stock server with the plugin ``stock_proof`` answers it: GET with its incarnation, POST with ``WeightSums``."""

INSTALLING_STATE = "installing"  # of a server that copies weights in, also of a round that has ended
ROUND_HEADER = "X-Stage2-Round"
"""On a round's own requests, with its id: one that names another round than the open one changes nothing."""

# How our server takes a round's snapshot: the ``backend`` of INIT_COMMUNICATOR. A stream, the memory file of a learner
# beside it, or the round's file below the server's --weights-root.
WEIGHT_STREAM = "tcp"
SHARED_MEMORY = "shared_memory"
DISK = "disk"

MOST_CONTROL_BYTES = 32 << 20  # of an answer: a manifest and two checksums for each of 70,000 tensors
_MOST_VALUES = (
    1_000_000  # of one call's body; each costs about 100 bytes and 100 ns that nothing can interrupt
)
_MOST_SHOWN = 80
_MOST_MEMBERS = 64

ValueT = TypeVar("ValueT")

Text: TypeAlias = Annotated[str, Strict()]
Flag: TypeAlias = Annotated[bool, Strict()]
Int: TypeAlias = Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)]
Number: TypeAlias = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Seconds: TypeAlias = Annotated[Number, Field(gt=0, le=1e9)]
TokenId: TypeAlias = Annotated[Int, Field(ge=0, lt=2**31)]
Many: TypeAlias = Annotated[tuple[ValueT, ...], Field(fail_fast=True)]
Sums: TypeAlias = Annotated[Mapping[str, str], WrapValidator(lambda sums, _: _require_text(sums))]
"""A checksum per tensor. pydantic would note what is wrong with every one of a million, for minutes."""

OPEN = ConfigDict(extra="ignore")  # an answer, or a control call: a newer version may say more
CLOSED = ConfigDict(extra="forbid")  # a rollout request: what is not understood is not done


def _require_text(sums: Any) -> dict[str, str]:
    if not isinstance(sums, Mapping) or not all(
        isinstance(text, str) for pair in sums.items() for text in pair
    ):
        raise ValueError("must be an object of texts")
    return dict(sums)


def parse_json(body: bytes | bytearray, what: str = "an answer") -> Any:
    """The value of a body, which is read as UTF-8 whatever its sender claims; ``what`` names it in a refusal.

    Raises:
        ProtocolError: no JSON, more than 200 levels deep, half a character, or a number of more than 4300 digits.
    """
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ProtocolError(f"{what} must be JSON: {error}") from error


def parse_call(body: bytes | bytearray) -> Any:
    """As ``parse_json``, for a server. Raises RequestTooLarge: more values than any call of the wire has."""
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > _MOST_VALUES:
        raise RequestTooLarge(
            f"a body may hold {_MOST_VALUES:,} values, got more; send fewer requests at once"
        )
    return parse_json(body, "the body")


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def read(kind: type[ValueT], data: Any, what: str = "") -> ValueT:
    """``data``, which was JSON, as a ``kind``. Raises ProtocolError, in one line, for what is none."""
    try:
        value: ValueT = _adapter(kind).validate_python(data)
    except ValidationError as error:
        raise ProtocolError(one_line(error, what or kind.__name__)) from None
    return value


def one_line(error: ValidationError, what: str) -> str:
    """The first thing that is wrong with a message; names of members come from its sender."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(step) for step in first["loc"])
    shown_place = " ".join(ascii(place)[1:-1][:_MOST_SHOWN].split())
    given, rule = first["input"], first["msg"].removeprefix("Value error, ")
    got = type(given).__name__
    if isinstance(given, str):
        got = repr(given[:_MOST_SHOWN])
    elif given is None or isinstance(given, int | float):
        got = shown(given)
    is_missing = first["type"] == "missing"
    return f"{what}{f': {shown_place}' if place else ''}: {rule}{'' if is_missing else f', got {got}'}"


class Message:
    """What travels as a JSON object under the names of its fields."""

    __slots__ = ()

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raises ProtocolError, in one line, for what is no such message."""
        return read(cls, data)

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = _adapter(type(self)).dump_python(self, mode="json")
        return record


@dataclass(frozen=True, slots=True, config=CLOSED)
class ClosedMessage(Message):
    """One that knows all its members."""

    @model_validator(mode="before")
    @classmethod
    def _require_few(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and len(data) > _MOST_MEMBERS:  # pydantic would name each of a million
            raise ValueError(f"must have at most {_MOST_MEMBERS} members")
        return data


# --- who a server is ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, config=OPEN)
class TensorSpec(Message):
    """Name, shape and dtype (``"float32"``, without ``torch.``) of one weight tensor."""

    name: Text
    shape: Many[Int]
    dtype: Annotated[Text, AfterValidator(lambda dtype: dtype.removeprefix("torch."))]


@dataclass(frozen=True, slots=True, config=OPEN)
class ServerInfo(Message):
    """A server's word of itself. ``stock`` servers know no ``/stage2/`` path and say little.

    One with a ``chat_model`` is a plain ``vllm serve`` (``vllm_serve``): it is asked by that name at OpenAI's routes.
    """

    stock: Flag
    incarnation: Text | None = None  # changes at every start of the server process
    engine: Text | None = None
    model: Text | None = None
    weight_version: Int | None = None
    run_id: Text | None = None
    state: Text | None = None
    can_abort: Flag = False
    manifest: Many[TensorSpec] = ()
    staging: Flag = False  # whether it answers with its old weights while a staged round brings new ones
    round_id: Text | None = None  # that brought the resident weights
    reads_disk: Flag = False  # whether it was started with --weights-root
    resume: Flag = False  # whether a request may bring the first ids of its answer
    chat_model: Text | None = None

    @property
    def is_swift_rollout(self) -> bool:
        """True for a stock ``swift rollout``, False for our server and for plain ``vllm serve``."""
        return self.stock and self.chat_model is None

    def to_json(self) -> dict[str, Any]:
        record = Message.to_json(self)
        del record["stock"], record["chat_model"]
        return record

    @classmethod
    def from_json(cls, data: Any) -> ServerInfo:
        """Of a server of ours, which names its process."""
        said = {**mapping(data, "server info"), "stock": False, "chat_model": None}
        return read(cls, {**said, "incarnation": member(said, "incarnation", Text)})


# --- the calls of a weight round ----------------------------------------------------------------
class RefusalReason(StrEnum):
    """Why our server answers 409: the ``reason`` beside ``detail`` in the body. Nothing was changed."""

    BUSY = "busy"  # completions are in the making; ask again when they have ended
    ROUND_OPEN = "round_open"  # another round holds the server, or /infer/ came without its id
    NO_ROUND = "no_round"  # the round named is not the open one, or none is open
    MANIFEST_DIFFERS = "manifest_differs"  # names, shapes or dtypes are not the model's own
    WRONG_ORDER = "wrong_order"  # the step belongs elsewhere in a round
    UNPROVEN = "unproven"  # the model holds weights that nobody vouches for; only a round helps


@dataclass(frozen=True, slots=True, config=OPEN)
class RoundRequest(Message):
    """Opens one sync round on our server; the manifest is compared before any downtime."""

    round_id: Text
    run_id: Text
    version: Int  # the version that the server will hold once the round is proven
    manifest: Many[TensorSpec]
    timeout_s: Seconds = 300.0  # the server forgets the round this long after it began
    staged: Flag = False  # /infer/ is answered until the install; else the round must find the server idle


@dataclass(frozen=True, slots=True, config=OPEN)
class StreamOffer(Message):
    """Body of INIT_COMMUNICATOR: the server listens at ``port`` of its own machine, whatever host a caller names."""

    port: Annotated[Int, Field(ge=1, le=65535)]
    num_bytes: Int = 0  # of the snapshot
    backend: Literal["tcp"] = "tcp"


@dataclass(frozen=True, slots=True, config=OPEN)
class MemoryOffer(Message):
    """Body of INIT_COMMUNICATOR beside ``backend``: a memory file of a learner on the server's machine."""

    path: Text  # /proc/<pid>/fd/<n>


@dataclass(frozen=True, slots=True, config=OPEN)
class MemoryAnswer(Message):
    """Whether the server has mapped a ``MemoryOffer``, and why not; then a stream is left."""

    message: Text
    mapped: Flag


@dataclass(frozen=True, slots=True, config=OPEN)
class InstallRequest(Message):
    """Body of PROCESS_WEIGHTS: what a staged round does with completions in the making."""

    on_pending: Annotated[Text, Field(pattern="^(wait|abort|resume)$")] = "wait"
    """``resume``: ended, too; their caller asks for the rest."""

    @property
    def aborts(self) -> bool:
        """Whether those that may be aborted are; the others are waited for."""
        return self.on_pending != "wait"


@dataclass(frozen=True, slots=True, config=OPEN)
class FinishRequest(Message):
    """Ends a round. Without ``checksums`` of all tensors as they were sent the server serves none of them."""

    round_id: Text
    commit: Flag = True  # False gives the round up
    checksums: Sums | None = None


@dataclass(frozen=True, slots=True, config=OPEN)
class RoundProof(Message):
    """The proof that our server can show after a round."""

    round_id: Text
    incarnation: Text
    weight_version: Int
    arrived: Sums  # as each tensor came off the wire
    resident: Sums  # as the engine now holds it
    loaded: Many[Text]  # names that the engine reports as loaded


@dataclass(frozen=True, slots=True, config=OPEN)
class AbortRequest(Message):
    """Asks our server to end what is in flight under these weights, apart from requests that must not be aborted.

    A call that arrives late, when a round has brought other weights, ends nothing.
    """

    run_id: Text
    version: Int


# --- other answers ------------------------------------------------------------------------------
def parse_cache_reset(data: Any) -> bool:
    """True iff a cache reset reports success; its message ends in ``status: True`` or ``False``."""
    message: str = member(data, "message", Text)
    _, found, status = message.rpartition("status: ")
    if not found or status not in ("True", "False"):
        raise ProtocolError(
            f"a cache reset must report 'status: True' or 'status: False', got {shown(message)}"
        )
    return status == "True"


def parse_incarnation(data: Any) -> str:
    """Which process answers, of a stock server with our plugin."""
    incarnation: str = member(data, "incarnation", Text)
    return incarnation


def parse_stream_secret(data: Any) -> str:
    """The secret of our server's answer to INIT_COMMUNICATOR, to be presented where it listens for weights."""
    secret: str = member(data, "secret", Text)
    return secret


def mapping(value: Any, what: str) -> dict[str, Any]:
    """An object of any members. Raises ProtocolError."""
    return read(dict[Text, Any], value, what)


def member(data: Any, key: str, kind: Any) -> Any:
    """One member of an object, which need not be there if ``kind`` allows None. Raises ProtocolError."""
    return read(kind, mapping(data, "an answer").get(key), key)
