"""``swift-stage2 init``: data, model and GPUs in, by options; a YAML with comments that a run takes out.

Nothing is overwritten. Rows, model and ms-swift's arguments are the doctor's to check.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swift_stage2.config import load_config
from swift_stage2.config.launch import UTILIZATION, ServerEngine, even_share
from swift_stage2.config.stage2_ab import DEFAULT_TASK
from swift_stage2.config.yaml_text import set_values, write_yaml
from swift_stage2.data.files import local_files, split_rows
from swift_stage2.errors import UserError
from swift_stage2.runtime.output import say
from swift_stage2.runtime.parser import CommandParser

_FIRST_PORT, _FIRST_GROUP_PORT = 8000, 29600
_PATHS = ("model", "dataset", "val_dataset", "external_plugins", "adapters")
_OF_BOTH_SIDES = ("model_type", "template", "external_plugins", "max_pixels")
_HEAD = """\
# Written by swift-stage2 init; every key is explained in docs/design/formats.md.
# A relative path, in here or in a row of the data, is read from the folder in which a command is started.
# Here all are absolute, so that every folder will do if the rows name their pictures by absolute paths, too.
"""
_COMMENTS = {
    "swift": "ms-swift's own training arguments",
    "model": "stage 1's, which already answers in the data's format",
    "add_version": "so that the report, and a resume, find the run in output_dir itself",
    "stage2_ab": "what channel B trains, and when",
    "b_ratio": "share of the steps that want channel B",
    "rollout": "who answers",
    "launch": "what launch starts; leave it out to start servers and torchrun yourself",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file. Raises UserError: an option that no run could use, or a file that is there already."""
    options = _parse(argv)
    output: Path = options.output
    data = starter_config(options)
    local_files(data["swift"])
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as file:
            file.write(_commented(data))
    except OSError as error:
        raise UserError(
            "--output must be a new file that can be written", got=str(error), remedy="name another"
        ) from error
    try:
        load_config(output)
    except UserError as error:
        output.unlink()
        raise UserError(f"what was asked for cannot run: {error}") from error
    rollout, learner = _devices(options.rollout_gpus), _devices(options.learner_gpus)
    if shared := sorted(set(rollout) & set(learner)):
        say(f"learner and servers share GPU {', '.join(map(str, shared))}; doctor tells whether both fit")
    engine, reason = _engine(rollout)
    say(f"servers run engine {engine}, because {reason}; launch.servers[].engine names another")
    say(f"wrote {output}; check it with: swift-stage2 doctor {output}")
    say(f"then start it with: swift-stage2 launch {output}")
    return 0


def starter_config(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that differ from the defaults, as plain values. Raises UserError: an option that is none."""
    learner, rollout = _devices(options.learner_gpus), _devices(options.rollout_gpus)
    swift: dict[str, Any] = {
        "model": options.model,
        "dataset": [options.data],
        "output_dir": f"runs/{options.output.stem}",
        "gradient_accumulation_steps": 4,
        **({} if learner else {"use_cpu": True, "ddp_backend": "gloo", "attn_impl": "sdpa"}),
        "add_version": False,
    }
    urls = [
        {"base_url": f"http://127.0.0.1:{_FIRST_PORT + number}", "group_port": _FIRST_GROUP_PORT + number}
        for number in range(len(rollout) or 1)
    ]
    data: dict[str, Any] = {
        "swift": swift,
        "stage2_ab": {"schedule": {"b_ratio": options.b_ratio}, "task": options.task},
        "rollout": {"servers": urls},
        "launch": {"learner": {"nproc_per_node": len(learner) or 1, "devices": learner}},
    }
    set_values(data, [*(f"swift.{word}" for word in options.swift), *options.set], "--set")
    if isinstance(swift["output_dir"], str):  # what else was given is refused by the configuration
        swift["output_dir"] = str(Path(swift["output_dir"]).expanduser().absolute())
    swift |= {name: _absolute(swift[name]) for name in _PATHS if name in swift}
    shares = {gpu: even_share(1 + rollout.count(gpu)) for gpu in learner if gpu in rollout}
    servers = [_server([gpu], swift, shares.get(gpu)) for gpu in rollout] or [_server([], swift)]
    data["launch"] = {"servers": servers, **({"share_devices": True} if shares else {}), **data["launch"]}
    return data


def _commented(data: dict[str, Any]) -> str:
    text = _HEAD + write_yaml(data)
    for key, comment in _COMMENTS.items():
        text = re.sub(rf"^( *{key}:.*)$", rf"\1  # {comment}", text, count=1, flags=re.MULTILINE)
    return text


def _absolute(value: Any) -> Any:
    """Paths of what is here as absolute ones; a hub's id stays."""
    if isinstance(value, list):
        return [_absolute(each) for each in value]
    path, rows = split_rows(str(value))
    found = Path(path).expanduser()
    return str(found.absolute()) + rows if found.exists() else value


def _engine(devices: Sequence[int]) -> tuple[ServerEngine, str]:
    """Our server on vLLM where it is installed and has a GPU, else on transformers; and why."""
    if devices and find_spec("vllm") is not None:
        return ServerEngine.VLLM, "vLLM is installed here"
    return ServerEngine.TRANSFORMERS, "vLLM is not installed here" if devices else "the servers have no GPU"


def _server(devices: list[int], swift: dict[str, Any], share: float | None = None) -> dict[str, Any]:
    """Our server, told of the learner what decides how a prompt is read, and its part of a GPU that it shares."""
    engine, _ = _engine(devices)
    # On vLLM ms-swift's own parser reads the options, and they are spelt as the learner's.
    dash = "-" if engine is ServerEngine.TRANSFORMERS else "_"
    args = {key.replace("_", dash): swift[key] for key in _OF_BOTH_SIDES if swift.get(key)}
    if share is not None and engine is ServerEngine.VLLM:  # on transformers it takes what it needs
        args[UTILIZATION] = share
    return {"engine": str(engine), "devices": devices, **({"args": args} if args else {})}


def _devices(answer: str) -> list[int]:
    """``0,1`` as numbers; ``none`` or nothing is the CPU. Raises UserError."""
    words = [] if answer.strip().lower() in ("", "none", "cpu") else answer.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UserError(
            "GPUs must be numbers with commas between", got=f"{answer!r}", remedy="write 0,1 or none"
        )
    return [int(word) for word in words]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 init",
        description="Writes the YAML of a job on this machine.",
        exit_statuses="0 the file is written",
    )
    own_task = "one of your own needs --swift external_plugins=FILE.py"
    for option, metavar, default, meaning in (
        ("--data", "FILE.jsonl", None, "training data"),
        ("--model", "DIR", None, "the directory of a stage-1 checkpoint, or a hub id"),
        ("--learner-gpus", "N,N", None, "GPU numbers of the learner, as 0,1; none for the CPU"),
        ("--rollout-gpus", "N,N", None, "GPU numbers of the servers, as 2,3; none for one on the CPU"),
        ("--output", "FILE.yaml", None, "never a file that exists"),
        ("--task", "NAME", DEFAULT_TASK, f"the meaning of answers (default %(default)s); {own_task}"),
        ("--b-ratio", "R", 0.25, "share of steps on channel B (default %(default)s)"),
    ):
        kind = {"--output": Path, "--b-ratio": float}.get(option, str)
        is_required = default is None
        parser.add_argument(
            option, required=is_required, metavar=metavar, default=default, type=kind, help=meaning
        )
    for option, metavar, meaning in (
        ("--set", "SECTION.KEY=VALUE", "any key of the YAML by its whole path, as rollout.num_generations=8"),
        ("--swift", "KEY=VALUE", "short for --set swift.KEY=VALUE, an argument of ms-swift"),
    ):
        text = f"{meaning}; may be given again"
        parser.add_argument(option, action="append", default=[], metavar=metavar, help=text)
    return parser.parse_args(argv)
