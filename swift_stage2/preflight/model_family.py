"""Refuses, by name and before anything starts, models whose answers channel B could not read or teach.

Looks at the configuration, at the checkpoint's ``config.json`` and at the first row of the data set; loads no ms-swift.
What has no name here is found by the template itself, once it is there (``Encoder``). docs/models.md is the list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift_stage2.config import ServerEngine, Stage2Config
from swift_stage2.config.swift_arguments import named_places
from swift_stage2.dataset.files import local_files
from swift_stage2.errors import ConfigError

_REMEDY = "train an Instruct model of Qwen2-VL, Qwen2.5-VL or Qwen3-VL, in stage 1 as well"
# The last part of a path or hub id, or the part that Hugging Face's cache names after the hub id.
_THINKING_NAME = re.compile(r"-Thinking(-FP8)?(?=/snapshots/[^/]+/?$|/?$)", re.IGNORECASE)
# Architectures whose every chat template in ms-swift begins an answer with thoughts, empty ones mostly.
_THINKING = frozenset(
    {
        "InternS1ForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForConditionalGeneration",
    }
)
# Architectures that ms-swift writes placeholders of as plain JSON, given QWENVL_BBOX_FORMAT=new.
_PLAIN_BOXES = frozenset(
    {
        *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        *("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
        *("LLaVAOneVision1_5_ForConditionalGeneration", "LlavaOnevision2ForConditionalGeneration"),
    }
)
_PLACEHOLDERS = ("<bbox>", "<ref-object>")
_MOE = "Qwen3VLMoeForConditionalGeneration"


def check_family(config: Stage2Config) -> None:
    """Refuses what channel B cannot do with this model; a run without channel B may train any.

    Raises:
        ConfigError: answers would begin with thoughts, boxes would be written in tags, or the servers would read the
            weights in another layout.
        DatasetError: as ``local_files`` does.
    """
    if not config.b_enabled:
        return
    swift = config.swift
    for model in named_places(swift, "model"):
        architecture = _architecture(Path(model).expanduser())
        if architecture in _THINKING or _THINKING_NAME.search(model):
            named = f" ({architecture})" if architecture else ""
            raise ConfigError(
                "answers must begin with their list of objects, got "
                f"model={model!r}{named}, which thinks first; {_REMEDY}"
            )
        if swift.get("external_plugins"):
            continue  # which may give the model a template of its own
        if architecture and architecture not in _PLAIN_BOXES and _uses_placeholders(swift):
            raise ConfigError(
                f"boxes must be written as [x1, y1, x2, y2], got a model {model!r} ({architecture}) for which ms-swift "
                "writes <bbox> and <ref-object> in another format; write labels and boxes out in every answer, boxes "
                f"in thousandths of the image's width and height, or {_REMEDY}"
            )
        engines = [server.engine for server in config.launch.servers]
        if architecture == _MOE and any(engine is not ServerEngine.TRANSFORMERS for engine in engines):
            raise ConfigError(
                f"experts of {_MOE} must reach a server as the learner holds them, got engine={str(engines[0])!r}, "
                "and vLLM reads them transposed; set launch.servers[].engine: transformers, or train a dense model"
            )


def _architecture(directory: Path) -> str:
    """Of a local checkpoint; empty where nothing is known of it here."""
    try:
        named = json.loads((directory / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return ""  # a hub id, or what ms-swift will refuse with its own words
    return str(named)


def _uses_placeholders(swift: Mapping[str, Any]) -> bool:
    """Whether the first row of any local training set leaves its boxes or labels to the template."""
    return any(_answer_has_placeholders(file) for file in local_files(swift)["dataset"])


def _answer_has_placeholders(file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as lines:
        first = next((line for line in lines if line.strip()), "")
    try:
        answer = json.loads(first)["messages"][-1]["content"]
    except (ValueError, LookupError, TypeError):
        return False  # the check of every row says what is wrong with it
    return isinstance(answer, str) and any(mark in answer for mark in _PLACEHOLDERS)
