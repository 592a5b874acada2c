"""Reads one JSON object from the middle of a text, or finds where a malformed element ends.

The grammar is RFC 8259, plus coordinate tokens as bare values and the NaN and Infinity that Python
writes. Nothing recurses and every character is looked at a bounded number of times. Called by parsing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import NamedTuple

_SPACE = r"[ \t\n\r]*+"
_STRING = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
_LEXEME = re.compile(
    _SPACE
    + rf"(?:(?P<key>{_STRING}){_SPACE}:"
    + rf"|(?P<string>{_STRING})"
    + r"|(?P<number>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+)"
    + r"|(?P<token><\|coord_[0-9]++\|>)"
    + r"|(?P<mark>[{}\[\],])"
    + r"|(?P<word>true|false|null|NaN|-?Infinity))"
)
_KEY = re.compile(rf"({_STRING}){_SPACE}:{_SPACE}")
# Where a malformed element ends depends on brackets and commas outside strings; a string that is itself
# malformed still hides what stands between its quotes.
_STRUCTURE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\],"]', re.DOTALL)
_OPENER_OF = {"}": "{", "]": "["}


class Atom(NamedTuple):
    """A value without parts. ``kind`` is string, number, token or word; ``lexeme`` is its text."""

    kind: str
    lexeme: str


@dataclass(slots=True)
class Members:
    """The members of a JSON object in text order, repeated keys included."""

    pairs: list[tuple[str, Value]] = field(default_factory=list)


Value = Atom | Members | list["Value"]


def decode_string(lexeme: str) -> str:
    """The text of a well-formed JSON string literal."""
    return str(json.loads(lexeme)) if "\\" in lexeme else lexeme[1:-1]


def read_key(text: str, position: int) -> tuple[str, int] | None:
    """A member's key and the position of its value, or None where no well-formed key stands."""
    match = _KEY.match(text, position)
    return (decode_string(match[1]), match.end()) if match else None


def read_object(text: str, position: int) -> tuple[Members, int] | None:
    """The object that opens at ``position`` and the position after it; None if it is malformed or cut."""
    root = Members()
    stack: list[Members | list[Value]] = [root]
    key: str | None = None  # read, and still without its value
    position += 1
    after_value = after_comma = False
    while stack:
        match = _LEXEME.match(text, position)
        if match is None:
            return None
        position = match.end()
        kind = str(match.lastgroup)
        lexeme = match[kind]
        top = stack[-1]
        if lexeme == "]" or lexeme == "}":
            if after_comma or key is not None or isinstance(top, Members) != (lexeme == "}"):
                return None
            stack.pop()
            after_value = True
        elif after_value:
            if lexeme != ",":
                return None
            after_value, after_comma = False, True
        elif isinstance(top, Members) and key is None:
            if kind != "key":
                return None
            key, after_comma = decode_string(lexeme), False
        elif kind == "key" or lexeme == ",":
            return None
        else:
            value: Value = Members() if lexeme == "{" else [] if lexeme == "[" else Atom(kind, lexeme)
            if isinstance(top, Members):
                top.pairs.append((str(key), value))
            else:
                top.append(value)
            key, after_comma, after_value = None, False, isinstance(value, Atom)
            if not isinstance(value, Atom):
                stack.append(value)
    return root, position


def skip_element(text: str, position: int, closer: str) -> int | None:
    """The position where the element at ``position`` ends, or None if the text ends before it does.

    An element that opens a bracket ends after the bracket that balances it. Any other ends in front of
    the next comma or of the container's ``closer``. Inside, a closing bracket ends everything opened
    since its own opener; one that nothing opened is skipped.
    """
    bracketed = text[position] in "{["
    stack: list[str] = []
    open_counts = {"{": 0, "[": 0}
    while match := _STRUCTURE.search(text, position):
        position = match.end()
        mark = match[0]
        if mark == '"':
            return None  # a string that never ends
        if mark in open_counts:
            stack.append(mark)
            open_counts[mark] += 1
        elif not stack and mark in (",", closer):
            return match.start()
        elif mark in _OPENER_OF and open_counts[_OPENER_OF[mark]]:
            opened = ""
            while opened != _OPENER_OF[mark]:
                opened = stack.pop()
                open_counts[opened] -= 1
            if bracketed and not stack:
                return position
    return None
