"""``swift-stage2 init``: data, model and GPUs in, by options; a YAML that the doctor accepts out.

Options are checked by the functions that a run calls at its start. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from swift_stage2.channel_b.dialects import coordinates_of
from swift_stage2.checks.dataset import refuse_faults
from swift_stage2.checks.model import check_model
from swift_stage2.config import Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.config.launch import UTILIZATION, ServerEngine, even_share
from swift_stage2.config.stage2_ab import DEFAULT_TASK
from swift_stage2.config.yaml_text import key_values, parse_yaml, write_yaml
from swift_stage2.dataset.command import lines_of_task
from swift_stage2.dataset.files import local_files, split_rows
from swift_stage2.dataset.survey import survey
from swift_stage2.errors import UserError
from swift_stage2.process.ports import is_free
from swift_stage2.terminal.output import quieten_libraries, say
from swift_stage2.terminal.parser import CommandParser
from swift_stage2.terminal.progress import going_on

_FIRST_PORT, _FIRST_GROUP_PORT, _LAST_PORT = 8000, 29600, 65535
_GRADIENT_ACCUMULATION_STEPS = 4
_PATHS = ("model", "dataset", "val_dataset", "external_plugins", "adapters")
_OF_BOTH_SIDES = ("model_type", "template", "external_plugins", "max_pixels")
_HEAD = """\
# Written by swift-stage2 init; every key is explained in docs/design/formats.md.
# A relative path, in here or in a row of the data, is read from the folder in which a command is started.
# Here all are absolute, so that every folder will do if the rows name their pictures by absolute paths, too.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file. Raises UserError: an option that no run could use, or a file that is there already."""
    options = _parse(argv)
    for check in (_check_data, _check_model, _check_output):
        check(options)
    write_starter(options)
    rollout = _devices(options.rollout_gpus)
    engine, reason = _engine(rollout)
    if shared := sorted(set(rollout) & set(_devices(options.learner_gpus))):
        say(f"learner and servers share GPU {', '.join(map(str, shared))}; doctor tells whether both fit")
    say(f"servers run engine {engine}, because {reason}; launch.servers[].engine names another")
    for line in lines_of_task(options.task):
        say(line)
    say(f"wrote {options.output}; check it with: swift-stage2 doctor {options.output}")
    say(f"then start it with: swift-stage2 launch {options.output}")
    return 0


def write_starter(options: argparse.Namespace) -> None:
    """Writes the YAML after the configuration has taken it. Raises ConfigError or UserError; then nothing is left."""
    data = starter_config(options)
    for word in options.set:
        _set(data, word)
    try:
        config = bind(Stage2Config, data)
        if options.swift:  # names and values that init has not written itself
            quieten_libraries()
            with going_on("init", "loading ms-swift, which checks its arguments"):
                from swift_stage2.checks.swift_parsing import check_arguments

                check_arguments(config)
    except UserError as error:
        raise UserError(f"what was asked for cannot run: {error}") from error
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("x", encoding="utf-8") as file:
            file.write(_HEAD + write_yaml(data))
    except OSError as error:
        raise UserError(
            f"--output must be a new file that can be written, got {error}; name another"
        ) from error


def starter_config(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that differ from the defaults, as plain values."""
    learner, rollout = _devices(options.learner_gpus), _devices(options.rollout_gpus)
    swift: dict[str, Any] = {
        "model": options.model,
        "dataset": [options.data],
        "output_dir": str(Path("runs").absolute() / options.output.stem),
        "gradient_accumulation_steps": _GRADIENT_ACCUMULATION_STEPS,
        **({} if learner else {"use_cpu": True, "ddp_backend": "gloo", "attn_impl": "sdpa"}),
        "add_version": False,  # so that the report, and a resume, find the run in output_dir itself
        **key_values(options.swift),
    }
    if isinstance(output := swift["output_dir"], str):  # what else was given is refused below
        swift["output_dir"] = str(Path(output).expanduser().absolute())
    swift |= {name: _absolute(swift[name]) for name in _PATHS if name in swift}
    ports = _free_ports(len(rollout) or 1)
    shares = {gpu: even_share(1 + rollout.count(gpu)) for gpu in learner if gpu in rollout}
    return {
        "swift": swift,
        "stage2_ab": {"schedule": {"b_ratio": options.b_ratio}, "task": options.task},
        "rollout": {
            "servers": [
                {"base_url": f"http://127.0.0.1:{http}", "group_port": group} for http, group in ports
            ]
        },
        "launch": {
            "learner": {"nproc_per_node": len(learner) or 1, "devices": learner},
            "servers": [_server([gpu], swift, shares.get(gpu)) for gpu in rollout] or [_server([], swift)],
            **({"share_devices": True} if shares else {}),
        },
    }


def _set(data: dict[str, Any], word: str) -> None:
    """Puts ``SECTION.KEY=VALUE`` in its place."""
    path, equals, value = word.partition("=")
    *sections, key = path.split(".")
    if not equals or not all(map(str.isidentifier, (*sections, key))):
        raise UserError(
            f"--set must be SECTION.KEY=VALUE, got {word!r}; write it like --set rollout.max_resumes=1"
        )
    for name in sections:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise UserError(
                f"--set must name a key of a section, got {word!r}, in which {name} is none; correct it"
            )
    data |= parse_yaml(f"{key}: {value}", f"--set {word}")


def _absolute(value: Any) -> Any:
    """Paths of what is here as absolute ones; a hub's id stays."""
    if isinstance(value, list):
        return [_absolute(each) for each in value]
    path, rows = split_rows(str(value))
    found = Path(path).expanduser()
    return str(found.absolute()) + rows if found.exists() else value


def _engine(devices: Sequence[int]) -> tuple[ServerEngine, str]:
    """Our server on vLLM where it is installed and has a GPU, else on transformers; and why."""
    if not devices:
        return ServerEngine.TRANSFORMERS, "the servers have no GPU"
    if find_spec("vllm") is None:
        return ServerEngine.TRANSFORMERS, "vLLM is not installed here"
    return ServerEngine.VLLM, "vLLM is installed here"


def _server(devices: list[int], swift: dict[str, Any], share: float | None = None) -> dict[str, Any]:
    """Our server, told of the learner what decides how a prompt is read, and its part of a GPU that it shares."""
    engine, _ = _engine(devices)
    # On vLLM ms-swift's own parser reads the options, and they are spelt as the learner's.
    spelt = {
        key: key.replace("_", "-") if engine is ServerEngine.TRANSFORMERS else key for key in _OF_BOTH_SIDES
    }
    args = {option: swift[key] for key, option in spelt.items() if swift.get(key)}
    if share is not None and engine is ServerEngine.VLLM:  # on transformers it takes what it needs
        args[UTILIZATION] = share
    return {"engine": str(engine), "devices": devices, **({"args": args} if args else {})}


def _check_data(options: argparse.Namespace) -> None:
    if not options.data:
        raise UserError("--data must name a JSONL file, got nothing; write its path")
    for argument, files in local_files({"dataset": [options.data]}).items():
        if files:
            with going_on("init", "checking the data set"):
                found = survey(files, num_coordinates=coordinates_of(options.task))
            refuse_faults(argument, found, "" if options.task == DEFAULT_TASK else f" --task {options.task}")


def _check_model(options: argparse.Namespace) -> None:
    check_model({"model": options.model}, of="--")


def _check_output(options: argparse.Namespace) -> None:
    path = options.output = Path(options.output)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--output must be the name of a YAML file, got {str(path)!r}; write it like run.yaml"
        )
    if path.exists():
        raise UserError(f"--output must be a new file, got {path}, which exists; name another one")


def _devices(answer: str) -> list[int]:
    """``0,1`` as numbers; ``none`` or nothing is the CPU. Raises UserError."""
    words = [] if answer.strip().lower() in ("", "none", "cpu") else answer.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UserError(f"GPUs must be numbers with commas between, got {answer!r}; write 0,1 or none")
    return [int(word) for word in words]


def _free_ports(number: int) -> list[tuple[int, int]]:
    """HTTP and group port of each server: the first that nobody here holds."""
    http, group = (
        (port for port in range(first, _LAST_PORT) if is_free("127.0.0.1", port))
        for first in (_FIRST_PORT, _FIRST_GROUP_PORT)
    )
    return list(islice(zip(http, group, strict=False), number))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 init",
        description="Writes the YAML of a job on this machine.",
        exit_statuses="0 the file is written",
    )
    for option, metavar, meaning in (
        ("--data", "FILE.jsonl", "training data, a JSONL file"),
        ("--model", "DIR", "the directory of a stage-1 checkpoint, or a hub id"),
        ("--learner-gpus", "N,N", "GPU numbers of the learner, as 0,1; none for the CPU"),
        (
            "--rollout-gpus",
            "N,N",
            "GPU numbers of the servers, one server on each, as 2,3; none for one on the CPU",
        ),
        ("--output", "FILE.yaml", "YAML file to write; never one that exists"),
    ):
        parser.add_argument(option, required=True, metavar=metavar, help=meaning)
    parser.add_argument(
        "--task",
        default=DEFAULT_TASK,
        metavar="NAME",
        help="the meaning of answers (default %(default)s); one of your own needs --swift external_plugins=FILE.py",
    )
    parser.add_argument(
        "--b-ratio", type=float, default=0.25, metavar="R", help="share of steps on channel B (default 0.25)"
    )
    parser.add_argument(
        "--swift",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further ms-swift training argument, as tuner_type=full or 'external_plugins=[a.py,b.py]'; "
        "may be given again with another KEY",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any other key of the YAML by its whole path, as stage2_ab.channel_b.packing.packing_length=2048; may be "
        "given again",
    )
    return parser.parse_args(argv)
