"""Parts that have names, some of them from a user's own file: plain dicts, filled by decorators, asked by ``find``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from swift_stage2.errors import ConfigError
from swift_stage2.nearest_word import closest

_REGISTER = "register it in a file of swift.external_plugins"
P = TypeVar("P")


def register(parts: dict[str, P], kind: str, name: str) -> Callable[[P], P]:
    """A decorator that adds a part of this ``kind`` under ``name``. Raises ConfigError: the name is taken."""

    def add(part: P) -> P:
        if name in parts:
            raise ConfigError(
                f"every {kind} needs a name of its own, got {name!r} for {_told(parts[name])} and for {_told(part)}; "
                "choose another"
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
        f"{key} must be {' or '.join(parts)}, got {key.rpartition('.')[2]}={name!r}; "
        + (f"did you mean {near!r}?" if near else remedy)
    )
