"""All cases: those of ``cases.yaml``, one for every key of a configuration, one for every setting refused beside B."""

from __future__ import annotations

import io
import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from PIL import Image

from benchmarks.wrong_inputs.case import CONFIG_FILE, Case, Setup, put, remove
from swift_stage2.config import Stage2Config
from swift_stage2.config.swift_arguments import UNSUPPORTED
from swift_stage2.demo.demo_config import MODEL_TYPE, STAGE1, TEMPLATE_FILE
from swift_stage2.demo.grounding_dataset import ROWS_FILE

_CASES = Path(__file__).with_name("cases.yaml")
_BAD = 3  # one bad row among good ones, never the first
_LAUNCH = f"launch {CONFIG_FILE}"
_COPY = "model"
_ORIENTATION = 0x0112
_STAGE1 = shlex.quote(str(STAGE1))
_PLUGIN = f"--template {MODEL_TYPE} --external-plugins {shlex.quote(str(TEMPLATE_FILE))}"
_START = {
    "kind": "start",
    "time": 1.0,
    "rank": 0,
    "step": 0,
    "world_size": 1,
    "settings": {"run_id": "a", "seed": 0},
}
_NAMES: dict[str, Any] = {
    "stage1": _STAGE1,
    "rollout": f"rollout {_COPY} --port 0 --model-type {MODEL_TYPE} {_PLUGIN}",
    "init": f"init --data {ROWS_FILE} --model {_STAGE1} --learner-gpus none --rollout-gpus none",
    "start": json.dumps(_START),
    "other_start": json.dumps(_START | {"settings": {"run_id": "b", "seed": 1}}),
}
"""Stand in braces in the table; beside them the ports of a scene."""
_TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
_REFUSED_VALUES = {
    "task_type": "seq_cls",
    "tuner_type": "adalora",
    "truncation_strategy": "right",
    "sequence_parallel_size": 2,
    "deepspeed_autotp_size": 2,
    "average_tokens_across_devices": False,
}


def all_cases() -> Iterator[Case]:
    """Raises ValueError when the table holds a word that is no field and no verb."""
    for group in yaml.safe_load(_CASES.read_text(encoding="utf-8")):
        cases, also = group.pop("cases"), group.pop("also", None)
        for defaults in [group, *([group | also] if also else [])]:
            yield from (_case(**defaults | case) for case in cases)
    for place in _leaves(Stage2Config):
        yield _case("types", "must be", f"{place}: a mapping with a list", set={place: {"x": [1]}})
    for rule in UNSUPPORTED:
        place, refused = f"swift.{rule.key}", _REFUSED_VALUES.get(rule.key, True)
        yield _case("combinations", "not supported", f"{place}: {refused} beside B", set={place: refused})


def _case(
    area: str,
    told: str,
    wrong: str = "",
    command: str = _LAUNCH,
    statuses: tuple[int, ...] = (2,),
    never: str = "",
    **changes: Any,
) -> Case:
    if unknown := changes.keys() - _VERBS.keys():
        raise ValueError(f"cases.yaml must hold known verbs, got {sorted(unknown)} in {wrong!r}")
    if not wrong and changes:
        ((place, value),) = changes["set"].items()
        wrong = f"{place}: {str(value)[:40] or 'nothing'}"
    return Case(
        area=area,
        wrong=wrong or _filled(command, _NAMES) or "no word at all",
        told=told,
        command=_filled(command, _NAMES),
        spoil=partial(_spoil, changes),
        statuses=tuple(statuses),
        never=never,
    )


def _spoil(changes: Mapping[str, Any], scene: Setup) -> None:
    names = _NAMES | {"stage1": str(STAGE1), "free_port": scene.free_port, "foreign_port": scene.foreign_port}
    for verb, given in changes.items():
        _VERBS[verb](scene, _filled(given, names))


def _filled(given: Any, names: Mapping[str, Any]) -> Any:
    """``given`` with names put in; texts of parts and of bytes as what they stand for."""
    match given:
        case str():
            if given[1:-1] in names and given[0] == "{":
                return names[given[1:-1]]
            for name, value in names.items():
                given = given.replace(f"{{{name}}}", str(value))
            return given
        case {"parts": parts}:
            return "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts)
        case {"latin-1": text}:
            return text.encode("latin-1")
        case {"utf-16": text}:
            return text.encode("utf-16")
        case dict():
            return {key: _filled(value, names) for key, value in given.items()}
        case list():
            return [_filled(value, names) for value in given]
    return given


# --- verbs ------------------------------------------------------------------------------------------


def _set(tree: Any, given: Mapping[str, Any]) -> None:
    for place, value in given.items():
        put(tree, place, value)


def _drop(tree: Any, given: list[str]) -> None:
    for place in given:
        remove(tree, place)


def _line(scene: Setup, given: str) -> None:
    lines = [json.dumps(row) for row in scene.rows]
    lines[_BAD] = given
    scene.files[ROWS_FILE] = "\n".join(lines) + "\n"


def _row_repeat(scene: Setup, given: str) -> None:
    scene.rows[_BAD][given].append(scene.rows[_BAD][given][-1])


def _answer_replace(scene: Setup, given: list[str]) -> None:
    answer = scene.rows[_BAD]["messages"][-1]
    answer["content"] = answer["content"].replace(*given, 1)


def _data(scene: Setup, given: str) -> None:
    if given == "one list":
        scene.files[ROWS_FILE] = json.dumps(scene.rows, indent=1)
        return
    scene.rows[0]["objects"]["ref"][0] = "café"
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in scene.rows)
    scene.files[ROWS_FILE] = text.encode(given)


def _image(scene: Setup, given: Mapping[str, Any]) -> None:
    image = scene.folder / str(scene.rows[_BAD]["images"][0])
    image.write_bytes(_changed(image.read_bytes(), given))


def _model(scene: Setup, given: Mapping[str, Mapping[str, Any] | None]) -> None:
    shutil.copytree(STAGE1, scene.folder / _COPY)
    for name, how in given.items():
        file = scene.folder / _COPY / name
        if how is None:
            file.unlink()
        else:
            file.write_bytes(_changed(file.read_bytes(), how))
    put(scene.config, "swift.model", _COPY)


def _changed(content: bytes, how: Mapping[str, Any]) -> bytes:
    match how:
        case {"holds": text}:
            return bytes(text, "utf-8")
        case {"begins": text}:
            return bytes(text, "utf-8") + content[len(text) :]
        case {"cut": length}:
            return content[: int(len(content) * length) if isinstance(length, float) else length]
        case {"damage": share}:
            place = int(len(content) * share)
            return content[:place] + b"\xff" * 64 + content[place + 64 :]
        case {"exif": number}:
            exif, told = Image.Exif(), io.BytesIO()
            exif[_ORIENTATION] = number
            Image.open(io.BytesIO(content)).convert("RGB").save(told, "JPEG", exif=exif)
            return told.getvalue()
    raise ValueError(f"a file must be changed in a known way, got {how}")


_VERBS: dict[str, Any] = {
    "set": lambda scene, given: _set(scene.config, given),
    "drop": lambda scene, given: _drop(scene.config, given),
    "files": lambda scene, given: scene.files.update(given),
    "env": lambda scene, given: scene.environment.update(given),
    "torchrun": lambda scene, given: scene.environment.update(
        {name: value for name, value in (_TORCHRUN | given).items() if value is not None}
    ),
    "line": _line,
    "row": lambda scene, given: _set(scene.rows[_BAD], given),
    "row_drop": lambda scene, given: remove(scene.rows[_BAD], given),
    "row_repeat": _row_repeat,
    "answer_replace": _answer_replace,
    "data": _data,
    "image": _image,
    "model": _model,
}


def _leaves(section: type, place: str = "") -> Iterator[str]:
    """Every key that is no section."""
    hints = get_type_hints(section)
    for item in fields(section):
        hint, path = hints[item.name], f"{place}{item.name}"
        entry = next((part for part in get_args(hint) if isinstance(part, type) and is_dataclass(part)), None)
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _leaves(hint, f"{path}.")
        elif entry is not None:
            yield from _leaves(entry, f"{path}.0.")
        elif path not in ("swift", "launch.servers.0.args", "launch.servers.0.env"):
            yield path
