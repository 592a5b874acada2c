"""A plain mapping into a tree of frozen sections, by their type hints.

A key that no section has, a value of another type and a required key that is absent are refused with
the dotted place in the file. Numbers: an integer may stand for a float, a boolean for neither.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from math import isfinite
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from swift_stage2.errors import ConfigError
from swift_stage2.nearest_word import closest

S = TypeVar("S")

# The words for each type, and an example.
_KINDS: dict[type, tuple[str, str]] = {
    bool: ("true or false", "true"),
    int: ("an integer", "4"),
    float: ("a number", "0.5"),
    str: ("a text", "'text'"),
}


def bind(section: type[S], data: Mapping[str, Any], *, root: type | None = None, place: str = "") -> S:
    """Builds ``section`` from ``data``; ``root`` is the tree in which a misplaced key is looked for.

    Raises:
        ConfigError: unknown key, wrong type, missing key, or a rule of a section, with its place.
    """
    root = root or section
    declared = {item.name: item for item in fields(section)}  # type: ignore[arg-type]
    hints = get_type_hints(section)
    for key in data:
        if key not in declared:
            raise ConfigError(_unknown_key(key, place, tuple(declared), root))
    for name, item in declared.items():
        if name not in data and item.default is MISSING and item.default_factory is MISSING:
            full = f"{place}.{name}" if place else name
            hint = f" ({item.metadata['allowed']})" if "allowed" in item.metadata else ""
            raise ConfigError(f"{full} is required and has no default; add the key {name!r}{hint}")
    values = {
        key: _convert(
            hints[key],
            value,
            root=root,
            place=f"{place}.{key}" if place else key,
            example=_example_of(declared[key]),
        )
        for key, value in data.items()
    }
    try:
        return section(**values)
    except ConfigError as exc:
        raise ConfigError(f"{place}: {exc}" if place else str(exc)) from exc


_LONGEST_SHOWN = 120


def _unknown_key(key: str, place: str, valid: tuple[str, ...], root: type) -> str:
    where = f"section {place}" if place else "the top level"
    if elsewhere := [path for path in _all_keys(root) if path.rpartition(".")[2] == key]:
        return f"unknown key {key!r} in {where}; it belongs at {' or '.join(map(repr, elsewhere))}"
    if near := closest(key, valid):
        return f"unknown key {key!r} in {where}; did you mean {near!r}?"
    return f"unknown key {key!r} in {where}; its keys are {', '.join(valid)}"


def _all_keys(section: type, place: str = "") -> Iterator[str]:
    """Dotted paths of every key below ``section``."""
    hints = get_type_hints(section)
    for item in fields(section):
        path = f"{place}.{item.name}" if place else item.name
        yield path
        for candidate in (hints[item.name], *get_args(hints[item.name])):
            if isinstance(candidate, type) and is_dataclass(candidate):
                yield from _all_keys(candidate, path + "[]" * (candidate is not hints[item.name]))


def _example_of(item: Field[Any]) -> str | None:
    """The example of a scalar that its section gives, or else its default."""
    default = item.default
    if isinstance(default, bool):
        return str(default).lower()
    shown = f"{default:g}" if isinstance(default, float) else repr(default)
    return shown if isinstance(default, int | float | str) else item.metadata.get("example")


def _convert(hint: Any, value: Any, *, root: type, place: str, example: str | None = None) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint == int | str:
        return _scalar(str if isinstance(value, str) else int, value, place)
    if origin in (Union, types.UnionType):  # all others are "or nothing"
        inner = next(argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _convert(inner, value, root=root, place=place, example=example)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(_wrong(place, "a list", value, f"[{_example(arguments[0])}]"))
        return tuple(
            _convert(arguments[0], item, root=root, place=f"{place}[{index}]")
            for index, item in enumerate(value)
        )
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(_wrong(place, "a mapping", value, "{name: value}"))
        return dict(value)
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ConfigError(_wrong(place, "a mapping", value, _example(hint)))
        return bind(hint, value, root=root, place=place)
    return _scalar(hint, value, place, example)


def _scalar(kind: type, value: Any, place: str, example: str | None = None) -> Any:
    if issubclass(kind, StrEnum):
        choices = tuple(str(member) for member in kind)
        if value in choices:
            return kind(value)
        remedy = "write one of them" if len(choices) > 1 else f"write {choices[0]}"
        near = closest(value.lower(), choices) if isinstance(value, str) else None
        # With another first letter the opposite may be meant: sync is not async.
        if near is not None and near[0] == value[0].lower():
            remedy = f"did you mean {near!r}?"
        raise ConfigError(f"{_must_be(place, ' or '.join(choices), value)}; {remedy}")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        wanted, usual = _KINDS[kind]
        raise ConfigError(_wrong(place, wanted, value, _as_kind(kind, value) or example or usual))
    return value


def _as_kind(kind: type, value: Any) -> str | None:
    """The same value as the file holds it where it is of ``kind``: 4 for "4" or 4.0; None if it has none."""
    if kind is str or isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if kind is bool:
        return word if (word := str(value).lower()) in ("true", "false") else None
    try:
        number = kind(value)
        return repr(number) if number == float(value) and isfinite(number) else None
    except (ValueError, OverflowError):
        return None


def _example(hint: Any) -> str:
    """A value of this type as the file holds it."""
    if isinstance(hint, type) and is_dataclass(hint):
        return f"{{{fields(hint)[0].name}: …}}"
    hint = int if hint == int | str else hint
    return _KINDS[hint][1] if hint in _KINDS else "…"


def _wrong(place: str, wanted: str, value: Any, example: str) -> str:
    name = place.rpartition(".")[2]
    entry = f"the entry {example}" if name.endswith("]") else f"{name}: {example}"
    return f"{_must_be(place, wanted, value)}; write for example {entry}"


def _must_be(place: str, wanted: str, value: Any) -> str:
    shown = repr(value)
    if len(shown) > _LONGEST_SHOWN:
        shown = f"{shown[:_LONGEST_SHOWN]}… ({len(shown)} characters)"
    return f"{place} must be {wanted}, got {place.rpartition('.')[2]}={shown}"
