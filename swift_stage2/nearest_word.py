"""The word that a misspelt one was meant to be, for the hints of commands and configuration."""

from __future__ import annotations

import difflib
import re

_NEAR = 0.75  # below that, what is alike is an ending (`_type`, `_steps`), and the hint names another setting
_LISTED = re.compile(r"'([^']*)' not in \[(.*)\]")


def closest(word: str, words: tuple[str, ...]) -> str | None:
    """The word nearest to ``word``, or None when none is near."""
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=_NEAR)), None)


def without_list(message: str) -> str:
    """``message`` of ms-swift that lists every choice, with the nearest three in place of the list."""

    def nearest(found: re.Match[str]) -> str:
        words = re.findall(r"'([^']*)'", found[2])
        near = difflib.get_close_matches(found[1], words, cutoff=_NEAR)
        hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
        return f"{found[1]!r} is none of the {len(words)} that there are{hint}"

    return _LISTED.sub(nearest, message)
