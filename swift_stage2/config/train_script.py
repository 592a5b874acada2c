"""A training script: ms-swift's arguments and what is set in their environment, out of text that a shell would run.

It is read and never run. What only a shell can tell is refused where the command that trains needs it.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swift_stage2.config.yaml_text import parse_yaml
from swift_stage2.errors import UserError
from swift_stage2.whole_file import read_regular_text

_PIECES = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?:\$\(+[^)]*\)+|`[^`]*`|\$\{[^}]*\}|[^\s;&|<>()'"\\`])+"""
_PIECE = re.compile(_PIECES, re.DOTALL)
_TOKEN = re.compile(rf"""(?xs)
    \\\r?\n | [^\S\n]+ | \#[^\n]* | (?:\d+|&)? (?:<<<|>>|>\||[<>]&|[<>]) [^\S\n]* (?:{_PIECES})*
    | (?P<end> \|\||&&|\|&|[\n;&|()] ) | (?P<word> (?:{_PIECES})+ )""")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_EXPANSION = re.compile(r"""(?xs) \\(?P<escaped>.) | \$\(\(\s*(?P<product>\d+(?:\s*\*\s*\d+)*)\s*\)\)
    | \$(?:(?P<name>[A-Za-z_]\w*|\d)|\{(?P<braced>\w+)(?:(?P<colon>:?)-(?P<default>[^}]*))?\})
    | (?P<shell>\$[({\[@*#?!$-]|`)""")
_BLOCKS = dict.fromkeys(("if", "for", "while", "until", "case", "select", "function", "{"), 1)
_BLOCKS |= dict.fromkeys(("fi", "done", "esac", "}"), -1)
_TRAINS = re.compile(r"((\S*/)?(swift|megatron) |(.*\W)?swift[./]cli[./](_megatron.)?)(sft|pt|rlhf)(\.py)?")
_RANKS = re.compile(r"--?(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)(?:=(.*))?")
_SCALAR = re.compile(r"(?i:true|false)|-?(?:0|[1-9]\d*)(?:\.(?:0|\d*[1-9]))?(?:[eE][-+]?\d+)?")
_REMEDY = "give the command itself: --from 'swift sft --model …'"
_UNSURE = UserError("--from reads no condition, loop or function", remedy=_REMEDY)
_UNSET = UserError("--from reads what the script sets, or this shell has exported", remedy="write its value")


@dataclass(frozen=True, slots=True)
class TrainScript:
    """One command that trains with ``swift sft``."""

    arguments: Mapping[str, Any]
    """ms-swift's, by name. Several values are a list; what reads as a number or a truth value is one."""
    environment: Mapping[str, str | UserError]
    """With a launcher's number of processes as ``NPROC_PER_NODE``. An error: the value cannot be read."""

    @property
    def num_ranks(self) -> int:
        count = self.environment.get("NPROC_PER_NODE")
        return int(count) if isinstance(count, str) and count.isdecimal() else 1

    def variables(self, pattern: str) -> dict[str, str]:
        """Those of the environment whose whole names match. Raises UserError: one cannot be read."""
        names = filter(re.compile(pattern).fullmatch, self.environment)
        return {name: _value(name, self.environment) for name in names}


def read_train_script(source: str) -> TrainScript:
    """Reads a file, or ``source`` itself where that is a command.

    Raises:
        UserError: it cannot be read, or does not hold exactly one command of ``swift sft`` that can be.
    """
    try:
        text = source if " " in source.strip() and not os.path.exists(source) else read_regular_text(source)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        raise UserError("--from must be a script, or a command in quotes", got=f"{source}: {why}") from error
    variables: dict[str, str | UserError] = {**os.environ}
    exported: set[str] = set()
    found = []
    depth = 0  # of conditions, loops and functions
    for line, is_joint, words in _commands(f"{text}\n"):
        depth += _BLOCKS.get(words[0], 0)
        ends = [end for end in range(len(words) + 1) if _TRAINS.fullmatch(" ".join(words[:end][-2:]))]
        for end in ends[:1]:
            found.append((f"{' '.join(words[:end][-2:])} in line {line}", words[:end], words[end:]))
        exports = "export" in words[: 2 if depth else 1]
        if not found and (depth or exports or all(map(_ASSIGNMENT.fullmatch, words))):
            exported.update(word.partition("=")[0] for word in words if exports)
            names = {name for word in words for name in _assign(variables, word)}
            variables |= dict.fromkeys(names, _UNSURE) if depth or is_joint else {}
    if len(found) != 1:
        got = " and ".join(where for where, *_ in found) or "none"
        raise UserError("--from must hold one command that trains with swift sft", got=got, remedy=_REMEDY)
    ((where, before, options),) = found
    if not re.search(r"(?<![\w-])swift( |[./]cli[./])sft(\.py)? in ", where):
        raise UserError(
            "--from must train with swift sft, on which stage 2 builds",
            got=where,
            remedy="give a swift sft of the same model; to train by rewards add --set stage2_ab.objective=grpo",
        )
    try:
        arguments = _arguments([field for word in options for field in _fields(word, variables)])
    except UserError as error:
        raise error.at(where) from error
    for word, following in zip(before, [*before[1:], ""], strict=True):
        ranks = _RANKS.fullmatch(word)
        exported |= _assign(variables, f"NPROC_PER_NODE={ranks[1] or following}" if ranks else word)
    return TrainScript(arguments, {name: variables[name] for name in sorted(exported & variables.keys())})


def _commands(text: str) -> Iterator[tuple[int, bool, list[str]]]:
    """Each with its line, and whether it depends on what the one before it came to."""
    words: list[str] = []
    place, line, joint = 0, 1, ""
    while place < len(text):
        if (token := _TOKEN.match(text, place)) is None:
            raise UserError("--from must close every quotation", got=repr(text[place:].splitlines()[0][:80]))
        if token["word"]:
            line = line if words else text.count("\n", 0, place) + 1
            words.append(re.sub(r"\\\r?\n", "", token["word"]))
        elif token["end"] and words:
            yield line, joint in ("&&", "||"), words
            words, joint = [], token["end"]
        place = token.end()


def _assign(variables: dict[str, str | UserError], word: str) -> set[str]:
    """The name that a word gives a value, if it is an assignment."""
    if (match := _ASSIGNMENT.fullmatch(word)) is None:
        return set()
    try:
        variables[match[1]] = " ".join(_fields(match[2], variables, splits=False))
    except UserError as error:
        variables[match[1]] = error
    return {match[1]}


def _arguments(words: list[str]) -> dict[str, Any]:
    values: dict[str, list[Any]] = {}
    given: list[Any] = []
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            given = values[name.replace("-", "_")] = [_plain(value)] if equals else []
        else:
            given.append(_plain(word))
    return {name: given if len(given) > 1 else given[0] if given else True for name, given in values.items()}


def _plain(word: str) -> Any:
    """A number or a truth value, if ms-swift is given the same word for it again."""
    return parse_yaml(word, "--from") if _SCALAR.fullmatch(word) else word


def _fields(word: str, variables: Mapping[str, str | UserError], *, splits: bool = True) -> list[str]:
    """The arguments that bash makes of one word. Raises UserError: a variable has no value, or only bash knows it."""
    return shlex.split("".join(_expanded(piece, variables, splits) for piece in _PIECE.findall(word)))


def _expanded(piece: str, variables: Mapping[str, str | UserError], splits: bool) -> str:
    """With values for variables, written so that they are read as text; at their blanks it ``splits``."""

    def value_of(match: re.Match[str]) -> str:
        if match["escaped"]:  # few characters are, in double quotes
            return match["escaped"] if match["escaped"] in "$`" else match[0]
        if match["product"]:
            return str(math.prod(map(int, match["product"].split("*"))))
        if match["shell"]:
            raise UserError("--from runs nothing", got=piece[:80], remedy="write what it stands for")
        name, default = match["name"] or match["braced"], match["default"]
        if default is None or (variables.get(name, "") != "" if match["colon"] else name in variables):
            special = r'(["\\])' if piece[0] == '"' else r"([^\w\s])" if splits else r"(\W)"
            return re.sub(special, r"\\\1", _value(name, variables))
        if piece[0] == '"':
            return _EXPANSION.sub(value_of, default)
        return _PIECE.sub(lambda found: _expanded(found[0], variables, splits), default)

    return piece if piece[0] in "'\\" else _EXPANSION.sub(value_of, piece)


def _value(name: str, variables: Mapping[str, str | UserError]) -> str:
    if isinstance(value := variables.get(name, _UNSET), UserError):
        raise value.at(f"${name}")
    return value
