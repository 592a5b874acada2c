"""The words of refusals stand once: in ``messages.json`` beside the tests of a folder, by test file and case.

``UPDATE_GOLDEN=1 pytest --numprocesses 0 tests/test_config.py`` writes what the tests saw, so that a change of words
is one diff. Other tests of the same refusal ask for its type, and for no more than the key that it names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def name_of(case: Mapping[str, Any]) -> str:
    """What a case changes, as its name; a long value is cut."""
    return (
        ", ".join(f"{key}: {'removed' if value is ... else _cut(repr(value))}" for key, value in case.items())
        or "unchanged"
    )


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:180]}… ({len(text)} characters)"


class Golden:
    """The messages of one test file, whose cases are all named."""

    def __init__(self, test_file: str, cases: Iterable[str]) -> None:
        self._file = Path(test_file).with_name("messages.json")
        self._section = Path(test_file).stem
        names = list(cases)
        assert len(set(names)) == len(names), "two cases have one name"
        if _may_write():
            known = self._messages()
            self._write({name: known[name] for name in names if name in known})
        assert self._messages().keys() <= set(names), "a message has no case any more: UPDATE_GOLDEN=1"

    def check(self, case: str, message: str) -> None:
        """Asserts that the message is one line, and the very one that the file has."""
        assert "\n" not in message
        messages = self._messages()
        if _may_write() and messages.get(case) != message:
            self._write(messages | {case: message})
            messages[case] = message
        assert message == messages.get(case)

    def _messages(self) -> dict[str, str]:
        return _read(self._file).get(self._section, {})

    def _write(self, messages: Mapping[str, str]) -> None:
        sections = _read(self._file) | {self._section: dict(messages)}
        text = json.dumps(sections, indent=2, ensure_ascii=False, sort_keys=True)
        self._file.write_text(text + "\n", encoding="utf-8")


def _may_write() -> bool:
    return bool(os.environ.get("UPDATE_GOLDEN"))


def _read(file: Path) -> dict[str, dict[str, str]]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
