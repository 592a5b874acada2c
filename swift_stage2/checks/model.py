"""Refuses in one line a missing or cut checkpoint, and by name a model whose answers channel B could not read or teach.

Looks at directories, the heads of weight files, ``config.json`` and the first row of the data set; loads no ms-swift. A
hub id is ms-swift's own business. Among those refused are
models that think before they answer; a model that has no name here is judged by its template, once that is there
(``Encoder``). docs/data.md is the list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from swift_stage2.config import ServerEngine, Stage2Config
from swift_stage2.config.swift_arguments import named_places
from swift_stage2.data.files import local_files, read_lines
from swift_stage2.errors import ConfigError
from swift_stage2.whole_file import read_regular

_TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken")

# ms-swift's argument, and the file that makes a directory what the argument asks for.
_MARKS = {
    "model": "config.json",
    "adapters": "adapter_config.json",
    "resume_from_checkpoint": "trainer_state.json",
}

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


def check_model(swift_arguments: Mapping[str, Any], *, of: str = "swift.") -> None:
    """Checks every local directory that ``model``, ``adapters`` and ``resume_from_checkpoint`` name.

    ``of`` stands before their names in what is said of them.

    Raises:
        ConfigError: none of them is given, one is no path, or a directory is missing, no checkpoint or not whole.
    """
    named = 0
    for argument in _MARKS:
        for place in named_places(swift_arguments, argument):
            named += 1
            if argument == "resume_from_checkpoint" or _is_local(place):  # no hub holds what a run left
                check_checkpoint(argument, Path(place).expanduser(), of=of)
    if named == 0:
        raise ConfigError(
            "swift.model must name a checkpoint",
            got="none",
            remedy="write the directory of a stage-1 checkpoint",
        )


def _is_local(place: str) -> bool:
    """A hub id is ``owner/name``; its owner is no folder on this machine, and its name no checkpoint's."""
    owner, slash, name = place.partition("/")
    is_checkpoint = re.fullmatch(r"(last-|best-)?checkpoint(-\w+)?", name) is not None
    return (
        is_checkpoint or place.startswith((".", "/", "~")) or "/" in name or not slash or Path(owner).exists()
    )


def check_checkpoint(argument: str, directory: Path, *, of: str = "swift.") -> None:
    """Checks the directory that ``of`` names as its ``model``, ``adapters`` or ``resume_from_checkpoint``.

    Raises:
        ConfigError: it is missing, holds no ``mark``, is a model without tokenizer, or one of its weight files is cut.
    """
    setting, mark = f"{of}{argument}", _MARKS[argument]
    if not directory.is_dir():
        raise ConfigError(
            f"{setting} must be a directory that exists",
            got=f"{argument}={str(directory)!r}",
            remedy="check the path",
        )
    if not (directory / mark).is_file():
        is_adapter = argument == "model" and (directory / _MARKS["adapters"]).is_file()
        merge = f"merge it into its model with swift export --adapters {directory} --merge_lora true, and name what it "
        raise ConfigError(
            f"{setting} must hold {mark}",
            got=f"{'an adapter in ' * is_adapter}{argument}={str(directory)!r}{' without it' * (not is_adapter)}",
            remedy=f"{merge}writes" if is_adapter else "name a checkpoint",
        )
    # transformers 5 makes an empty tokenizer where it finds none, without a word.
    if argument == "model" and not any(any(directory.glob(name)) for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"{setting} must hold its tokenizer",
            got=f"model={str(directory)!r} with none of {', '.join(_TOKENIZER_FILES)}",
            remedy="copy it from the model that this one was trained from",
        )
    for path in sorted(directory.glob("*.safetensors")):
        try:
            safe_open(path, framework="np")  # reads where the tensors lie, and that the file goes as far
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{setting} must hold whole weights",
                got=f"{path} of {path.stat().st_size:,} bytes: {' '.join(str(error).split())}",
                remedy="copy or save it again, a full disk or a broken copy has cut it",
            ) from error


def recorded_plugins(checkpoint: Path, remedy: str) -> list[str]:
    """The plugin files of the run that wrote a checkpoint, from the ``args.json`` that ms-swift puts beside weights.

    ms-swift imports them again wherever it takes up a checkpoint; only files of this machine's are ever meant, so
    that what came along with the weights runs nothing.

    Raises:
        ConfigError: one is not there any more, or lies in the checkpoint; ``remedy`` names others.
    """
    try:
        recorded = json.loads(read_regular(checkpoint / "args.json")).get("external_plugins")
    except (OSError, ValueError, AttributeError):
        return []  # not ms-swift's, or none: it says itself what it misses
    plugins = [name for name in recorded or () if isinstance(name, str)] if isinstance(recorded, list) else []
    for plugin in plugins:
        path = Path(plugin)
        if not path.is_file():
            raise ConfigError(
                f"the plugin that {checkpoint / 'args.json'} names must be there",
                got=plugin,
                remedy=f"write {remedy}",
            )
        if path.resolve().is_relative_to(checkpoint.resolve()):
            raise ConfigError(
                "a checkpoint may not bring its own code",
                got=plugin,
                remedy=f"read that code, then write {remedy}",
            )
    return plugins


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
                "answers must begin with their list of objects",
                got=f"model={model!r}{named}, which thinks first",
                remedy=_REMEDY,
            )
        if swift.get("external_plugins"):
            continue  # which may give the model a template of its own
        if architecture and architecture not in _PLAIN_BOXES and _uses_placeholders(swift):
            raise ConfigError(
                "boxes must be written as [x1, y1, x2, y2]",
                got=f"a model {model!r} ({architecture}) for which ms-swift writes <bbox> and <ref-object> in "
                "another format",
                remedy="write labels and boxes out in every answer, boxes in thousandths of the image's width "
                f"and height, or {_REMEDY}",
            )
        engines = [server.engine for server in config.launch.servers]
        if architecture == _MOE and any(engine is not ServerEngine.TRANSFORMERS for engine in engines):
            raise ConfigError(
                f"experts of {_MOE} must reach a server as the learner holds them",
                got=f"engine={str(engines[0])!r}, and vLLM reads them transposed",
                remedy="set launch.servers[].engine: transformers, or train a dense model",
            )


def _architecture(directory: Path) -> str:
    """Of a local checkpoint; empty where nothing is known of it here."""
    try:
        named = json.loads(read_regular(directory / "config.json"))["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return ""  # a hub id, or what ms-swift will refuse with its own words
    return str(named)


def _uses_placeholders(swift: Mapping[str, Any]) -> bool:
    """Whether the first row of any local training set leaves its boxes or labels to the template."""
    return any(_answer_has_placeholders(file) for file in local_files(swift)["dataset"])


def _answer_has_placeholders(file: Path) -> bool:
    first = next((line for line in read_lines(file) if line.strip()), b"")
    try:
        answer = json.loads(first)["messages"][-1]["content"]
    except (ValueError, LookupError, TypeError):
        return False  # the check of every row says what is wrong with it
    return isinstance(answer, str) and any(mark in answer for mark in _PLACEHOLDERS)
