"""Messages as JSON objects, checked field by field; nothing is unpickled or evaluated. Used by ``protocol``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self, TypeVar

from swift_stage2.errors import ProtocolError

LARGEST_INTEGER = 2**63 - 1

RecordT = TypeVar("RecordT", bound="WireRecord")


@dataclass(frozen=True, slots=True)
class WireRecord:
    """A message whose fields travel under their own names; ``_READERS`` checks each by its annotation."""

    def to_json(self) -> dict[str, Any]:
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raises ProtocolError, in one line, for what is no such message; fields that it does not know are ignored."""
        return read(cls, mapping(data, re.sub("(?<!^)(?=[A-Z])", " ", cls.__name__).lower()))


@dataclass(frozen=True, slots=True)
class TensorSpec(WireRecord):
    """Name, shape and dtype (``"float32"``, without ``torch.``) of one weight tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def to_json(self) -> dict[str, Any]:  # a manifest may hold 100,000 of them
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, data: Any) -> TensorSpec:
        record = mapping(data, "tensor spec")
        dtype = text(record, "dtype").removeprefix("torch.")
        return cls(text(record, "name"), tuple(integer_list(record, "shape")), dtype)


def finite(value: Any, what: str) -> float:
    # An integer may be larger than any float; bool is one of Python's integers.
    is_number = isinstance(value, float) or (type(value) is int and abs(value) <= LARGEST_INTEGER)
    if not is_number or not math.isfinite(value):
        raise ProtocolError(
            f"{what} must be a finite number, got {repr(value) if isinstance(value, float) else type(value).__name__}"
        )
    return float(value)


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{what} must be an object, got {type(value).__name__}")
    return value


def text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise ProtocolError(f"{key} must be text, got {type(value).__name__}")
    return value


def optional_text(record: Mapping[str, Any], key: str) -> str | None:
    return None if record.get(key) is None else text(record, key)


def integer(value: Any, what: str) -> int:
    if type(value) is not int:
        raise ProtocolError(f"{what} must be an integer, got {type(value).__name__}")
    if abs(value) > LARGEST_INTEGER:
        raise ProtocolError(f"{what} must be an integer of 64 bits, got one of {value.bit_length()}")
    return value


def optional_integer(record: Mapping[str, Any], key: str) -> int | None:
    return None if record.get(key) is None else integer(record[key], key)


def integer_list(record: Mapping[str, Any], key: str) -> list[int]:
    value = record.get(key)
    if not isinstance(value, list) or not all(type(n) is int and abs(n) <= LARGEST_INTEGER for n in value):
        raise ProtocolError(f"{key} must be a list of integers of 64 bits")
    return value


def log_prob_list(choice: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The log-probability of every token of one of ms-swift's choices; None where it has none."""
    if choice.get("logprobs") is None:
        return None
    content = mapping(choice["logprobs"], "logprobs").get("content")
    if not isinstance(content, list):
        raise ProtocolError("logprobs.content must be a list")
    numbers = (mapping(entry, "logprobs entry").get("logprob") for entry in content)
    return tuple(finite(number, "logprob") for number in numbers)


def _text_list(record: Mapping[str, Any], key: str) -> list[str]:
    value = record.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ProtocolError(f"{key} must be a list of text")
    return value


def _text_map(record: Mapping[str, Any], key: str) -> dict[str, str]:
    value = mapping(record.get(key), key)
    if not all(isinstance(item, str) for item in value.values()):
        raise ProtocolError(f"every value of {key} must be text")
    return dict(value)


def _specs(record: Mapping[str, Any], key: str) -> tuple[TensorSpec, ...]:
    value = record.get(key)
    if not isinstance(value, list):
        raise ProtocolError(f"{key} must be a list, got {type(value).__name__}")
    return tuple(TensorSpec.from_json(item) for item in value)


def _seconds(record: Mapping[str, Any], key: str) -> float:
    value = finite(record.get(key), key)
    if value <= 0:
        raise ProtocolError(f"{key} must be a positive number of seconds, got {key}={value!r}")
    return value


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
    "str": text,
    "str | None": optional_text,
    "int": lambda record, key: integer(record.get(key), key),
    "int | None": lambda record, key: optional_integer(record, key),
    "bool": lambda record, key: record.get(key) is True,
    "float": _seconds,
    "tuple[str, ...]": lambda record, key: tuple(_text_list(record, key)),
    "tuple[TensorSpec, ...]": _specs,
    "Mapping[str, str]": _text_map,
    "Mapping[str, str] | None": lambda record, key: (
        None if record.get(key) is None else _text_map(record, key)
    ),
}


def read(kind: type[RecordT], record: Mapping[str, Any]) -> RecordT:
    wanted = [each for each in fields(kind) if each.name in record or each.default is MISSING]
    return kind(**{each.name: _READERS[str(each.type)](record, each.name) for each in wanted})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [item.to_json() if isinstance(item, WireRecord) else item for item in value]
    return dict(value) if isinstance(value, Mapping) else value
