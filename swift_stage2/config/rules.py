"""Rules between and about settings, and parts that have names: plain dicts, filled by decorators, asked by ``find``."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar

from pydantic import Field

from swift_stage2.errors import ConfigError, UserError, closest

P = TypeVar("P")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHORTEST_KEY = 16
_CREDENTIALS = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)?.*@", re.DOTALL)


Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def at_least(section: Any, minimum: float, *names: str, remedy: str = "") -> None:
    """Each of the section's settings is finite and at least ``minimum``."""
    for name in names:
        _require(section, name, lambda value: value >= minimum, f"at least {minimum}", remedy)


def deadline(section: Any, *names: str) -> None:
    """Each is finite and positive: nothing may wait for ever."""
    remedy = "write a number of seconds, because every wait needs a deadline"
    for name in names:
        _require(section, name, lambda value: value > 0, "above 0", remedy)


def variable_name(name: str, value: str) -> None:
    """The name of an environment variable. A value that is none, or looks like a key itself, is never shown."""
    if not _VARIABLE.fullmatch(value) or _looks_like_a_key(value):
        raise ConfigError(
            f"{name} must be the name of an environment variable that holds the key, never the key",
            got=f"{name}=*** ({len(value)} characters)",
            remedy=f"export SWIFT_ROLLOUT_API_KEY=<the key> and write {name}: SWIFT_ROLLOUT_API_KEY",
        )


def variable_option(value: str) -> str:
    """The same for a command line's ``--api-key-env``. argparse would show the value of what is a ValueError, too."""
    try:
        variable_name("--api-key-env", value)
    except ConfigError as error:
        raise UserError(error.rule, got=error.got, remedy=error.remedy) from None
    return value


def without_credentials(url: str) -> str:
    """``url`` with everything before its last ``@`` hidden: a user, a password, or what was meant as one."""
    return _CREDENTIALS.sub(lambda found: f"{found[1] or ''}***@", url)


def _looks_like_a_key(word: str) -> bool:
    """As random characters do: long, and without a joint or with several digits among small letters."""
    is_mixed = sum(map(str.isdigit, word)) > 1 and any(map(str.islower, word))
    return len(word) >= _SHORTEST_KEY and ("_" not in word or is_mixed)


def _require(section: Any, name: str, holds: Callable[[float], bool], allowed: str, remedy: str) -> None:
    value = getattr(section, name)
    is_finite = math.isfinite(value)
    if not is_finite or not holds(value):
        allowed = allowed if is_finite else f"a finite number {allowed}"
        default = next(each.default for each in fields(section) if each.name == name)
        if not remedy and isinstance(default, int | float):
            remedy = f"the default is {default:g}"
        tail = f"; {remedy}" if remedy else ""
        raise ConfigError(f"{name} must be {allowed}", got=f"{name}={value!r}{tail}")


_REGISTER = "register it in a file of swift.external_plugins"


def register(parts: dict[str, P], kind: str, name: str) -> Callable[[P], P]:
    """A decorator that adds a part of this ``kind`` under ``name``. Raises ConfigError: the name is taken."""

    def add(part: P) -> P:
        if name in parts:
            raise ConfigError(
                f"every {kind} needs a name of its own",
                got=f"{name!r} for {_told(parts[name])} and for {_told(part)}",
                remedy="choose another",
            )
        parts[name] = part
        return part

    return add


def _told(part: object) -> str:
    if not isinstance(part, type):
        return repr(part)
    # ms-swift's name of a plugin tells nothing
    file = getattr(sys.modules.get(part.__module__), "__file__", None)
    return f"{part.__qualname__} ({file or part.__module__})"


def find(parts: Mapping[str, P], key: str, name: str, remedy: str = _REGISTER) -> P:
    """The part that the configuration's ``key`` names. Raises ConfigError with the nearest name, else ``remedy``."""
    if name in parts:
        return parts[name]
    near = closest(name, tuple(parts))
    raise ConfigError(
        f"{key} must be {' or '.join(parts)}",
        got=f"{key.rpartition('.')[2]}={name!r}",
        remedy=f"did you mean {near!r}?" if near else remedy,
    )
