"""Rules between and about settings, and parts that have names: plain dicts, filled by decorators, asked by ``find``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar

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


_REGISTER = "register it in a file of swift.external_plugins"


def register(parts: dict[str, P], kind: str, name: str) -> Callable[[P], P]:
    """A decorator that adds a part of this ``kind`` under ``name``. Raises ConfigError: the name is taken."""

    def add(part: P) -> P:
        if name in parts:
            raise ConfigError(
                f"every {kind} needs a name of its own",
                got=f"{name!r} for {parts[name]!r} and for {part!r}",
                remedy="choose another",
            )
        parts[name] = part
        return part

    return add


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
