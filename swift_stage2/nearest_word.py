"""The word that a misspelt one was meant to be, for the hints of commands and configuration."""

from __future__ import annotations

import difflib

_NEAR = 0.75  # below that, what is alike is an ending (`_type`, `_steps`), and the hint names another setting


def closest(word: str, words: tuple[str, ...]) -> str | None:
    """The word nearest to ``word``, or None when none is near."""
    found = difflib.get_close_matches(word, words, n=1, cutoff=_NEAR)
    return found[0] if found else None
