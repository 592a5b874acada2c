"""Refuses in one line a missing or cut checkpoint, and a model that servers would read otherwise than the learner.

Looks at directories, the heads of weight files and ``config.json``; loads no ms-swift. A hub id is ms-swift's own
business. What channel B cannot read or teach is told by its template, once that is there (``Encoder``, ``Task.learn``).
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
from swift_stage2.errors import ConfigError
from swift_stage2.whole_file import read_regular

_TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken")

# ms-swift's argument, and the file that makes a directory what the argument asks for.
_MARKS = {
    "model": "config.json",
    "adapters": "adapter_config.json",
    "resume_from_checkpoint": "trainer_state.json",
}

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
            remedy="check the path" + "; a hub id is owner/name" * (argument != "resume_from_checkpoint"),
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


def refuse_transposed_experts(config: Stage2Config) -> None:
    """Raises ConfigError: launch would start vLLM for a model whose experts it holds in another layout."""
    engines = [server.engine for server in config.launch.servers]
    for model in named_places(config.swift, "model") if config.b_enabled else ():
        is_moe = _architecture(Path(model).expanduser()) == _MOE
        if is_moe and any(engine is not ServerEngine.TRANSFORMERS for engine in engines):
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
