"""The spelling of labels that an answer can hold and that a tokenizer reads as plain text."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_MARK = re.compile(
    r"</?\|?([^<>|]*)\|?>"
)  # `<|im_end|>`, `<bbox>`, `</s>`: a tokenizer or ms-swift may take it
_SPECIAL = re.compile(r"<\|[^<>]*\|>|</?s>|<(image|video|audio|bbox|ref-object)>")
_ESCAPED = str.maketrans('"\\', "'/")


@lru_cache(4096)
def spell_label(text: str) -> str:
    """``text`` composed (NFC), without special tokens, invisible characters and what JSON escapes; it may be empty."""
    text = unicodedata.normalize("NFC", text).translate(_ESCAPED)
    text = "".join(_visible(each) for each in text)
    while _MARK.search(text):
        text = _MARK.sub(r"\1", text)
    return " ".join(text.split())


def _visible(character: str) -> str:
    kind = unicodedata.category(character)
    if kind[0] == "Z" or character.isspace():
        return " "
    return "?" if kind == "Cs" else "" if kind in ("Cc", "Cf") else character


def has_special_token(label: str) -> bool:
    """True if ``label`` holds a special token of a tokenizer or a placeholder of ms-swift."""
    return _SPECIAL.search(label) is not None
