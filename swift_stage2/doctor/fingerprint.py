"""What a model directory says about prompts: short hashes of tokenizer, chat template and image processor, and sizes.

Two directories with equal fingerprints turn a sample into the same prompt. Reads files only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_stage2.doctor.finding import Outcome, failed, left_out, ok

_HASH_CHARACTERS = 8
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """None where a directory has no such thing."""

    tokenizer: str | None
    chat_template: str | None
    image_processor: str | None
    vocabulary_size: int | None
    dtype: str | None

    @classmethod
    def read(cls, directory: Path) -> Fingerprint:
        """Raises OSError or ValueError for a directory that is no readable checkpoint."""
        config = _read_json(directory / "config.json")
        nested = config.get("text_config")
        text_config = nested if isinstance(nested, dict) else config
        return cls(
            tokenizer=_hash_of(b"".join(_tokenizer_bytes(directory))),
            chat_template=_hash_of(_chat_template(directory).encode()),
            image_processor=_hash_of(_image_processor(directory)),
            vocabulary_size=_integer(text_config.get("vocab_size", config.get("vocab_size"))),
            dtype=config.get("dtype") or config.get("torch_dtype") or text_config.get("dtype"),
        )

    def __str__(self) -> str:
        return (
            f"tokenizer {self.tokenizer}, chat template {self.chat_template}, image processor "
            f"{self.image_processor}, vocabulary {self.vocabulary_size}, dtype {self.dtype}"
        )


def check_same_files(learner: Path, server: Path | None) -> Outcome[None]:
    """Compares the learner's directory with the server's, where that is known and on this machine."""
    own = Fingerprint.read(learner)
    if server is None or not (server / "config.json").is_file():
        return left_out(f"the server's directory cannot be looked into from here; learner: {own}")
    theirs = Fingerprint.read(server)
    names = ("tokenizer", "chat_template", "image_processor", "vocabulary_size")
    differing = [name for name in names if getattr(own, name) != getattr(theirs, name)]
    if differing:
        shown = ", ".join(
            f"{name} {getattr(own, name)} against {getattr(theirs, name)}" for name in differing
        )
        return failed(
            f"learner and server differ: {shown}",
            f"restart the server with the learner's model: --model {learner}",
        )
    where = "the same directory" if server.resolve() == learner.resolve() else f"equal in {server}"
    return ok(f"{own}; {where}")


def _tokenizer_bytes(directory: Path) -> Iterator[bytes]:
    for name in _TOKENIZER_FILES:
        if (directory / name).is_file():
            yield (directory / name).read_bytes()


def _chat_template(directory: Path) -> str:
    if (directory / "chat_template.jinja").is_file():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _read_json(directory / name).get("chat_template")
        if template:
            return json.dumps(template, sort_keys=True)
    return ""


def _image_processor(directory: Path) -> bytes:
    settings = _read_json(directory / "preprocessor_config.json")
    settings = settings or _read_json(directory / "processor_config.json").get("image_processor") or {}
    return json.dumps(settings, sort_keys=True).encode() if settings else b""


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    data = json.loads(file.read_text(encoding="utf-8"))
    return data if isinstance(data, dict) else {}


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _hash_of(content: bytes) -> str | None:
    return hashlib.sha256(content).hexdigest()[:_HASH_CHARACTERS] if content else None
