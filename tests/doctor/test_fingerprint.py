"""Hashes of what makes prompts: equal for a copy, different when template, tokenizer or image processor change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from live_server import MODEL

from swift_stage2.doctor.examination import Verdict
from swift_stage2.doctor.server_identity import Fingerprint, check_same_files


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors")))


def test_the_checkpoint_has_every_part() -> None:
    found = Fingerprint.read(MODEL)
    assert all((found.tokenizer, found.chat_template, found.image_processor, found.dtype))
    assert (
        found.vocabulary_size == json.loads((MODEL / "config.json").read_text())["text_config"]["vocab_size"]
    )


def test_the_same_directory_and_an_equal_copy(copy: Path) -> None:
    assert "the same directory" in check_same_files(MODEL, MODEL).found
    outcome = check_same_files(MODEL, copy)
    assert outcome.verdict is Verdict.OK
    assert f"equal in {copy}" in outcome.found


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("chat_template.jinja", "chat_template"),
        ("tokenizer.json", "tokenizer"),
        ("processor_config.json", "image_processor"),
    ],
)
def test_a_changed_file_is_named(copy: Path, file: str, name: str) -> None:
    if file.endswith(".jinja"):
        (copy / file).write_text("other")
    elif name == "tokenizer":
        (copy / file).write_text((copy / file).read_text() + " ")
    else:
        settings = json.loads((copy / file).read_text())
        settings["image_processor"]["min_pixels"] = 1
        (copy / file).write_text(json.dumps(settings))
    outcome = check_same_files(MODEL, copy)
    assert outcome.verdict is Verdict.FAILED
    assert outcome.found.startswith(f"learner and server differ: {name} ")
    assert outcome.fix == f"restart the server with the learner's model: --model {MODEL}"


def test_a_directory_that_cannot_be_looked_into_is_said_so(tmp_path: Path) -> None:
    for place in (None, tmp_path / "absent"):
        outcome = check_same_files(MODEL, place)
        assert outcome.verdict is Verdict.NOT_CHECKED
        assert "cannot be looked into" in outcome.found
