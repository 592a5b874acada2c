"""Rules between and about settings; each refuses with rule, value and remedy in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from swift_stage2.errors import ConfigError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY_PREFIX = re.compile(r"(sk|pk|rk|hf|gh[a-z]|glpat|xox[a-z]|github_pat|AKIA|Bearer)[-_ A-Z0-9]", re.ASCII)
_SHORTEST_KEY = 16
_CREDENTIALS = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)?.*@", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inequality:
    """A rule as evaluated on one configuration."""

    name: str
    """Two or three words, one of its own for each rule."""
    statement: str
    """The rule in the names of the keys: ``prefetch_target_packs <= queue_limit``."""
    numbers: str
    """The same with the numbers: ``4 <= 8``."""
    holds: bool
    refusal: str
    """The mistake when it does not hold, with ``got name=value``."""
    remedy: str
    """The correction, in one line."""
    is_advice: bool = False
    """Such a setting wastes something; it is warned about, not refused."""

    def require(self) -> None:
        """Raises ConfigError unless the rule holds."""
        if not self.holds:
            raise ConfigError(self.message)

    @property
    def message(self) -> str:
        """Rule, what was got, and remedy in one line."""
        return f"{self.refusal}; {self.remedy}"


def at_least(section: Any, minimum: float, *names: str, remedy: str = "") -> None:
    """Each of the section's settings is finite and at least ``minimum``."""
    for name in names:
        _require(section, name, lambda value: value >= minimum, f"at least {minimum}", remedy)


def in_unit_range(section: Any, name: str, remedy: str = "") -> None:
    """``0 <= value <= 1``."""
    _require(section, name, lambda value: 0 <= value <= 1, "in the range 0..1", remedy)


def deadline(section: Any, *names: str) -> None:
    """Each is finite and positive: nothing may wait for ever."""
    remedy = "write a number of seconds, because every wait needs a deadline"
    for name in names:
        _require(section, name, lambda value: value > 0, "above 0", remedy)


def above_zero(section: Any, name: str, maximum: float = math.inf, remedy: str = "") -> None:
    """``0 < value <= maximum`` and finite."""
    allowed = "above 0" if math.isinf(maximum) else f"above 0 and at most {maximum:g}"
    _require(section, name, lambda value: 0 < value <= maximum, allowed, remedy)


def written(section: Any, *names: str) -> list[str]:
    """Those of ``names``, by default of all settings, that are not at their defaults: of others nobody knows."""
    defaults = type(section)()
    names = names or tuple(each.name for each in fields(section))
    return [name for name in names if getattr(section, name) != getattr(defaults, name)]


def variable_name(name: str, value: str) -> None:
    """The name of an environment variable. A value that is none, or looks like a key itself, is never shown."""
    if not _VARIABLE.fullmatch(value) or _looks_like_a_key(value):
        raise ConfigError(
            f"{name} must be the name of an environment variable that holds the key, never the key, got {name}=*** "
            f"({len(value)} characters); export SWIFT_ROLLOUT_API_KEY=<the key> and write {name}: SWIFT_ROLLOUT_API_KEY"
        )


def variable_option(value: str) -> str:
    """The same for a command line's ``--api-key-env``."""
    variable_name("--api-key-env", value)
    return value


def without_credentials(url: str) -> str:
    """``url`` with everything before its last ``@`` hidden: a user, a password, or what was meant as one."""
    return _CREDENTIALS.sub(lambda found: f"{found[1] or ''}***@", url)


def _looks_like_a_key(word: str) -> bool:
    """Random letters and digits without a joint, or the beginning that a well-known service gives its keys."""
    if len(word) < _SHORTEST_KEY:
        return False
    kinds = [any(map(test, word)) for test in (str.isdigit, str.islower, str.isupper)]
    jointless = "_" not in word and kinds[0] and any(kinds[1:])
    return (
        jointless or all(kinds) or (kinds[0] and _KEY_PREFIX.match(word) is not None and not word.isupper())
    )


def _require(section: Any, name: str, holds: Callable[[float], bool], allowed: str, remedy: str) -> None:
    value = getattr(section, name)
    is_finite = math.isfinite(value)
    if not is_finite or not holds(value):
        allowed = allowed if is_finite else f"a finite number {allowed}"
        default = next(each.default for each in fields(section) if each.name == name)
        if not remedy and isinstance(default, int | float):
            remedy = f"the default is {default:g}"
        tail = f"; {remedy}" if remedy else ""
        raise ConfigError(f"{name} must be {allowed}, got {name}={value!r}{tail}")
