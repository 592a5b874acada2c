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
from typing import Annotated, Any, Self, TypeAlias, TypeVar

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
PROCESS_WEIGHTS = "/process_weights_after_loading/"
RESET_PREFIX_CACHE = "/reset_prefix_cache/"
RESET_ENCODER_CACHE = "/reset_encoder_cache/"
RESET_MM_CACHE = "/reset_mm_cache/"
CLOSE_COMMUNICATOR = "/close_communicator/"

# --- paths that only our server answers (stock: 404) --------------------------------------------
SERVER_INFO = "/stage2/info/"
WEIGHTS = "/stage2/weights/"
INSTALL = "/stage2/install/"
SLEEP = "/stage2/sleep/"
WEIGHT_SUMS = "/stage2/weight_sums/"
"""A stock server with the plugin ``stock_proof`` answers it: GET with its incarnation, POST with ``WeightSums``."""

INSTALLING_STATE = "installing"  # of a server that waits for what it computes, or copies weights in
ASLEEP_STATE = "asleep"  # of a server that holds no weights until an install

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
    manifest: Many[TensorSpec] = ()
    chat_model: Text | None = None
    takes_turns: Flag = False  # it runs a scheduler of several turns
    sleeps: Flag = False  # it was started with a --sleep-level

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


# --- new weights: two calls ---------------------------------------------------------------------
class RefusalReason(StrEnum):
    """Why our server answers 409: the ``reason`` beside ``detail`` in the body. Nothing was changed."""

    NO_WEIGHTS = "no_weights"  # these were never offered, or a newer offer has replaced them
    MANIFEST_DIFFERS = "manifest_differs"  # names, shapes or dtypes are not the model's own
    NO_ROOT = "no_root"  # weights on a disk, of a server that was started without --weights-root
    UNPROVEN = "unproven"  # the model holds weights that nobody vouches for, or none; only an install helps
    NO_SLEEP = "no_sleep"  # it was started without a --sleep-level


class WeightWay(StrEnum):
    """How weights come: in the memory file of a learner beside the server, by a stream, or in a file below
    ``--weights-root``."""

    SHARED_MEMORY = "shared_memory"
    STREAM = "tcp"
    DISK = "disk"


@dataclass(frozen=True, slots=True, config=OPEN)
class WeightOffer(Message):
    """Body of WEIGHTS: a version that the server may take. ``/infer/`` goes on; an offer before it is forgotten."""

    run_id: Text
    version: Int
    manifest: Many[TensorSpec]
    way: WeightWay
    path: Text | None = None  # of the memory file: /proc/<pid>/fd/<n>
    port: Annotated[Int, Field(ge=1, le=65535)] | None = None
    """The server listens there for a stream, at its own machine whatever host a caller names."""
    num_bytes: Int = 0  # of a stream
    timeout_s: Seconds = 300.0  # within which all must have arrived

    @model_validator(mode="after")
    def _require_place(self) -> Self:
        wanted = {WeightWay.SHARED_MEMORY: ("path", self.path), WeightWay.STREAM: ("port", self.port)}
        name, value = wanted.get(self.way, ("", ""))
        if value is None:
            raise ValueError(f"an offer by {self.way} must name its {name}")
        return self


@dataclass(frozen=True, slots=True, config=OPEN)
class OfferAnswer(Message):
    """Whether the server takes an offer, or why it cannot map the learner's memory; then a stream is left."""

    taken: Flag
    message: Text
    secret: Text | None = None  # to be presented where it listens for a stream


@dataclass(frozen=True, slots=True, config=OPEN)
class InstallRequest(Message):
    """Body of INSTALL. The server serves the weights that were offered iff their sums are these, as they were sent."""

    run_id: Text
    version: Int
    checksums: Sums
    timeout_s: Seconds = 300.0


@dataclass(frozen=True, slots=True, config=OPEN)
class WeightProof(Message):
    """Answer of INSTALL: everything that our server can show of the weights that it holds."""

    run_id: Text
    version: Int
    incarnation: Text
    arrived: Sums  # as each tensor came off the wire
    resident: Sums  # as the engine now holds it
    loaded: Many[Text]  # names that the engine reports as loaded

    def vouches_for(self, checksums: Mapping[str, str]) -> bool:
        """True if every tensor arrived, and is resident, with these sums."""
        return self.resident == self.arrived == checksums and checksums.keys() <= set(self.loaded)


# --- between installs ---------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, config=OPEN)
class SleepRequest(Message):
    """Body of SLEEP: the server gives the memory of weights and caches back, until an install wakes it.

    What it still answers ends; calls that come are refused as UNPROVEN. Its answer's ``state`` is ASLEEP_STATE.
    """

    timeout_s: Seconds = 30.0


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


def mapping(value: Any, what: str) -> dict[str, Any]:
    """An object of any members. Raises ProtocolError."""
    return read(dict[Text, Any], value, what)


def member(data: Any, key: str, kind: Any) -> Any:
    """One member of an object, which need not be there if ``kind`` allows None. Raises ProtocolError."""
    return read(kind, mapping(data, "an answer").get(key), key)
