"""A plain mapping into a tree of frozen sections: pydantic checks types, strictly and as JSON has them.

A key that no section has, a value of another type, a required key that is absent and what a section refuses itself are
told with the dotted place in the file. Numbers: an integer may stand for a float, a boolean for neither.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from swift_stage2.errors import ConfigError, closest

S = TypeVar("S")
_STRICT = ConfigDict(strict=True, extra="forbid")
_LONGEST_SHOWN = 120
_GONE = dict.fromkeys(("on_pending", "max_resumes"), "remove it: answers that run survive new weights")
_GONE["grpo.straggler_s"] = "remove it: a group waits until new weights can wait no longer"


def bind(section: type[S], data: Mapping[str, Any], *, place: str = "") -> S:
    """Builds ``section``, which stands at ``place`` of a file, from ``data``.

    Raises:
        ConfigError: unknown key, wrong type, missing key, or a rule of a section, with its place.
    """
    try:
        adapter = _adapter(section)  # type: ignore[arg-type]  # a type can be hashed
        built: S = adapter.validate_json(json.dumps({place: data}))[place]
    except ValidationError as invalid:
        # A key that nobody knows says best why another is missing.
        error = min(invalid.errors(), key=lambda each: each["type"] != "unexpected_keyword_argument")
        raise _refusal(section, error, place) from None
    return built


@cache
def _adapter(section: Hashable) -> TypeAdapter[Any]:
    # As a value of a mapping, because a type of its own would not take the settings.
    return TypeAdapter(dict[str, section], config=_STRICT)  # type: ignore[valid-type]


def _refusal(section: type, error: ErrorDetails, root: str) -> ConfigError:
    *above, name = error["loc"][1:] or ("",)
    if name in ("int", "str"):  # one of the types that a value may have
        *above, name = above
    around = _dotted([root, *above]) if root else _dotted(above)
    full = _dotted([around, name]) if around else _dotted([name])
    told = error.get("ctx", {}).get("error")
    if isinstance(told, ConfigError):
        return told.at(full) if full else told
    if error["type"] == "unexpected_keyword_argument":
        return _unknown_key(section, str(name), above, around)
    if error["type"] == "missing":
        return ConfigError(f"{full} is required and has no default", remedy=f"add the key {name!r}")
    value, rule, default = (
        error["input"],
        error["msg"].replace("Input should be", "must be"),
        dict(_all_keys(section)).get(_pattern([*above, name])),
    )
    remedy = "docs/design/formats.md lists every key"
    if type(default) in (int, float) and isinstance(value, int | float):
        remedy = f"the default is {default:g}"
    if isinstance(value, str) and error["type"].startswith(("int", "float", "bool")):
        remedy = "write a number without quotes, and 1e-5 as 1.0e-5"
    return ConfigError(
        f"{full} {rule}",
        got=f"{full.rpartition('.')[2]}={value!r:.{_LONGEST_SHOWN}}",
        remedy=remedy,
    )


def _unknown_key(section: type, key: str, above: Sequence[int | str], around: str) -> ConfigError:
    known, parent = dict(_all_keys(section)), _pattern(above)
    where = f"in section {around}" if around else "at the top level"
    valid = tuple(path.rpartition(".")[2] for path in known if path.rpartition(".")[0] == parent)
    if gone := _GONE.get(key) or _GONE.get(f"{parent.rpartition('.')[2]}.{key}"):
        remedy = gone
    elif key in known:
        remedy = f"write it nested, as {key.replace('.', ': {')}: …{'}' * key.count('.')}"
    elif elsewhere := [path for path in known if path.rpartition(".")[2] == key]:
        remedy = f"it belongs at {' or '.join(map(repr, elsewhere))}"
    elif near := closest(key, valid):
        remedy = f"did you mean {near!r}?"
    else:
        remedy = f"its keys are {', '.join(valid)}"
    return ConfigError(f"unknown key {key!r} {where}", remedy=remedy)


def _all_keys(section: type, place: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths of every key below ``section``, each with its default; entries of a list stand below ``[]``."""
    hints = get_type_hints(section)
    for item in fields(section):
        path = f"{place}.{item.name}" if place else item.name
        yield path, item.default
        for candidate in (hints[item.name], *get_args(hints[item.name])):
            if isinstance(candidate, type) and is_dataclass(candidate):
                yield from _all_keys(candidate, path + "[]" * (candidate is not hints[item.name]))


def _dotted(path: Sequence[int | str]) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path).removeprefix(".")


def _pattern(path: Sequence[int | str]) -> str:
    return "".join("[]" if isinstance(each, int) else f".{each}" for each in path).removeprefix(".")
