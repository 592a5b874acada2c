"""A YAML file into plain Python values, and plain values back into YAML.

Scalars follow YAML 1.2 (``1e-5`` is a number; ``off``, ``no`` and dates are text); PyYAML's own rules
are those of 1.1. A key written twice and a tag of another type are refused. Called by ``load_config``.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from swift_stage2.errors import ConfigError, UserError
from swift_stage2.whole_file import read_regular_text


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema of YAML 1.2, whose tags alone it knows; no key is repeated."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(
                    f"line {line}: a key must be text", got=f"key={key!r}", remedy="put it in quotes"
                )
            if key in seen:
                raise ConfigError(
                    f"line {line}: a key may be written once", got=f"{key!r} also on line {seen[key]}"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else; writes a value out wherever it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)), 10)  # PyYAML would read 010 as octal


_Loader.yaml_implicit_resolvers = {}  # those of YAML 1.1 go; the dumper keeps them and quotes by both rules
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    _first_characters = [character if character != "\0" else "" for character in _first]
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first_characters
        )
_CORE = ("bool", "null", "int", "float", "str", "seq", "map", "None")  # None refuses every other tag
_Loader.yaml_constructors = {
    tag: make for tag, make in _Loader.yaml_constructors.items() if str(tag).rpartition(":")[2] in _CORE
}
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping at the top of a YAML file.

    Raises:
        ConfigError: the file is missing, unreadable, no YAML, or no mapping; a key is repeated or no text.
    """
    try:
        text = read_regular_text(path)
    except FileNotFoundError as exc:
        raise ConfigError(
            "a configuration file must exist", got=f"path={path}", remedy="check the path"
        ) from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: the file must be readable UTF-8 text: {exc}") from exc
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        kind = "an empty file" if data is None else type(data).__name__
        raise ConfigError(f"{path}: the file must hold a mapping with the section stage2_ab", got=kind)
    return data


def parse_yaml(text: str, name: str) -> Any:
    """Plain values. Raises ConfigError, with the ``name`` of the text, as ``read_yaml`` does."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as exc:
        raise _syntax_error(exc).at(name) from exc
    except ConfigError as exc:
        raise exc.at(name) from exc


def _syntax_error(error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return ConfigError(
        f"{where}the file must be valid YAML",
        got=problem,
        remedy="mend the line (indent by spaces, put one after each colon, close every bracket and quote)",
    )


def write_yaml(data: dict[str, Any]) -> str:
    """``data`` as YAML that ``read_yaml`` reads back equal."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


def set_values(data: dict[str, Any], words: Sequence[str], option: str) -> dict[str, Any]:
    """Puts each ``SECTION.KEY=VALUE`` in its place, with the value read as YAML does; returns ``data``.

    Raises:
        UserError: a word of another form, or a key inside something that is no section.
    """
    for word in words:
        path, equals, value = word.partition("=")
        *sections, key = path.split(".")
        if not equals or not all(map(str.isidentifier, (*sections, key))):
            raise UserError(
                f"{option} must be KEY=VALUE",
                got=f"{word!r}",
                remedy=f"write it like {option} {'swift.' * (option == '--set')}tuner_type=full",
            )
        place: Any = data
        for name in sections:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise UserError(
                    f"{option} must name a key of a section", got=f"{word!r}, in which {name} is none"
                )
        place |= parse_yaml(f"{key}: {value}", f"{option} {word}")
    return data
