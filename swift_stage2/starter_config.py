"""``swift-stage2 init``: data, model and GPUs in, by options or a training script; a YAML with comments out.

Nothing is overwritten. Rows, model and ms-swift's arguments are the doctor's to check.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swift_stage2.config import load_config
from swift_stage2.config.launch import UTILIZATION, ServerEngine, even_share
from swift_stage2.config.stage2_ab import DEFAULT_TASK
from swift_stage2.config.swift_arguments import UNSUPPORTED, as_argv
from swift_stage2.config.train_script import TrainScript, read_train_script
from swift_stage2.config.yaml_text import parse_yaml, set_values, write_yaml
from swift_stage2.data.files import local_files, split_rows
from swift_stage2.errors import UserError
from swift_stage2.runtime.output import say
from swift_stage2.runtime.parser import CommandParser

_FIRST_PORT, _FIRST_GROUP_PORT = 8000, 29600
_PATHS = (
    *("model", "dataset", "val_dataset", "cached_dataset", "cached_val_dataset"),
    *("external_plugins", "adapters", "deepspeed"),
)
_OF_BOTH_SIDES = ("model_type", "template", "external_plugins", "max_pixels")
_HEAD = """\
# Written by swift-stage2 init; every key is explained in docs/design/formats.md.
# A relative path, in here or in a row of the data, is read from the folder in which a command is started.
# Whatever init found is absolute here, so that every folder will do if the rows' paths are absolute, too.
"""
_COMMENTS = {
    "swift": "ms-swift's own training arguments",
    "model": "stage 1's, which already answers in the data's format",
    "output_dir": "a folder of this run's own",
    "add_version": "so that the report, and a resume, find the run in output_dir itself",
    "stage2_ab": "what channel B trains, and when",
    "b_ratio": "share of the steps that want channel B",
    "rollout": "who answers",
    "launch": "what launch starts; leave it out to start servers and torchrun yourself",
}
_STEPS = "gradient_accumulation_steps"
_NEW_NAMES = {"train_type": "tuner_type"}
# Variables of a script: what sizes pictures, on both sides alike, and how torch allocates, which vLLM can fail with.
_FOR_ALL = r"(IMAGE|VIDEO|MIN|MAX|FPS)_[A-Z_]+|FPS|NFRAMES|INPUT_SIZE"
_FOR_LEARNER = "PYTORCH_(CUDA_)?ALLOC_CONF"
_KNOWN = f"{_FOR_ALL}|{_FOR_LEARNER}|CUDA_VISIBLE_DEVICES|NPROC_PER_NODE|MASTER_PORT|QWENVL_BBOX_FORMAT"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file. Raises UserError: an option that no run could use, or a file that is there already."""
    options = _parse(argv)
    output: Path = options.output
    if os.path.lexists(output):
        raise UserError("--output must be a new file", got=str(output), remedy="name another, or remove it")
    script = read_train_script(vars(options)["from"]) if vars(options)["from"] else TrainScript({}, {})
    _take_devices(options, script)
    data = starter_config(options, script)
    local_files(data["swift"])
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as file:
            file.write(_commented(data))
    except OSError as error:
        raise UserError(
            "--output must be a file that can be written",
            got=f"{output}: {error.strerror}",
            remedy="name another",
        ) from error
    try:
        load_config(output)
    except UserError as error:
        output.unlink()
        raise UserError(f"what was asked for cannot run: {error}") from error
    if script.arguments and data["swift"].get("val_dataset"):
        say("val_dataset: servers answer it during training with --set stage2_ab.evaluation.every_steps=N")
    if script.arguments and not options.model:
        must = (
            "must answer in your rows' format; if it does not, train it first; --model names the checkpoint"
        )
        say(f"{_option('model', data['swift']['model'])}: {must}")
    rollout, learner = options.rollout_gpus, options.learner_gpus
    if shared := sorted(set(rollout) & set(learner)):
        say(f"learner and servers share GPU {', '.join(map(str, shared))}; doctor tells whether both fit")
    engine, reason = _engine(rollout)
    say(f"servers run engine {engine}, because {reason}; launch.servers[].engine names another")
    say(f"wrote {output}; check it with: swift-stage2 doctor {output}")
    say(f"then start it with: swift-stage2 launch {output}")
    return 0


def starter_config(options: argparse.Namespace, script: TrainScript) -> dict[str, Any]:
    """The settings that differ from the defaults, as plain values; what is not the script's is told.

    Raises UserError: an option that is none, no model or no data.
    """
    learner, rollout = options.learner_gpus, options.rollout_gpus
    kept = _kept_arguments(script, b_ratio=options.b_ratio)
    own: dict[str, Any] = {
        "model": options.model or kept.get("model"),
        "dataset": [options.data] if options.data else kept.get("dataset"),
        "cached_dataset": None if options.data else kept.get("cached_dataset"),
        "output_dir": str(Path(str(kept.get("output_dir", "runs")), options.output.stem)),
        **({} if script.arguments else {_STEPS: 4}),
        **({} if learner else {"use_cpu": True, "ddp_backend": "gloo", "attn_impl": "sdpa"}),
        "add_version": False,
    }
    swift = {name: value for name, value in {**kept, **own}.items() if value is not None}
    urls = [
        {"base_url": f"http://127.0.0.1:{_FIRST_PORT + number}", "group_port": _FIRST_GROUP_PORT + number}
        for number in range(len(rollout) or 1)
    ]
    env = {"env": found} if (found := script.variables(_FOR_LEARNER)) else {}
    data: dict[str, Any] = {
        "swift": swift,
        "stage2_ab": {"schedule": {"b_ratio": options.b_ratio}, "task": options.task},
        "rollout": {"servers": urls},
        "launch": {"learner": {"nproc_per_node": len(learner) or 1, "devices": learner, **env}},
    }
    set_values(data, [*(f"swift.{word}" for word in options.swift), *options.set], "--set")
    data_sets = swift.get("dataset") or swift.get("cached_dataset")
    if missing := [
        name for name, found in (("--model", swift.get("model")), ("--data", data_sets)) if not found
    ]:
        raise UserError(f"{' and '.join(missing)} must be given, or a --from that names what it stands for")
    for name, value in kept.items():
        if swift.get(name) != value:
            why = _COMMENTS.get(name, "as the options say")
            say(f"{_option(name, value)}: becomes {_option(name, swift.get(name)) or 'nothing'}, {why}")
        elif name == _STEPS and isinstance(value, int) and (ranks := len(learner) or 1) != script.num_ranks:
            same = f"{max(1, round(value * script.num_ranks / ranks))} would keep the rows of a step"
            say(f"{_option(name, value)}: stays; {same} (ranks: {ranks}, in the script {script.num_ranks})")
    if isinstance(swift["output_dir"], str):  # what else was given is refused by the configuration
        swift["output_dir"] = str(Path(swift["output_dir"]).expanduser().absolute())
    swift |= {name: _absolute(swift[name]) for name in _PATHS if name in swift}
    shares = {gpu: even_share(1 + rollout.count(gpu)) for gpu in learner if gpu in rollout}
    servers = [_server([gpu], swift, shares.get(gpu)) for gpu in rollout] or [_server([], swift)]
    data["launch"] = {"servers": servers, **({"share_devices": True} if shares else {}), **data["launch"]}
    return data


def _kept_arguments(script: TrainScript, *, b_ratio: float) -> dict[str, Any]:
    """The script's arguments that channel B supports, by ms-swift's present names. Tells of all others."""
    kept: dict[str, Any] = {}
    for old, value in script.arguments.items():
        name, given = _NEW_NAMES.get(old, old), f"{_option(old, value)}: "
        rule = next((rule for rule in UNSUPPORTED if rule.key == name and rule.refused(value)), None)
        if rule and b_ratio > 0:
            say(f"{given}left out, for {rule.reason}; {rule.remedy}".removesuffix("; remove it"))
            continue
        kept[name] = value
        if name != old:
            say(f"{given}becomes {_option(name, value)}, as ms-swift calls it now")
    for pattern, sides in ((_FOR_ALL, "learner and servers"), (_FOR_LEARNER, "the learner alone")):
        say(*(f"{name} {value}: goes to {sides}" for name, value in script.variables(pattern).items()))
    if others := [name for name in script.environment if not re.fullmatch(_KNOWN, name)]:
        say(f"{', '.join(others)}: left out; export it before doctor and launch if they need it")
    passed = str(kept.get("model_kwargs", "{}"))  # by which ms-swift sets such variables
    if passed.startswith("{") and (both := {**script.variables(_FOR_ALL), **parse_yaml(passed, "--from")}):
        kept["model_kwargs"] = {name.lower(): value for name, value in both.items()}
    return kept


def _option(name: str, value: Any) -> str:
    return " ".join(as_argv({name: value}))


def _take_devices(options: argparse.Namespace, script: TrainScript) -> None:
    """Gives a side that no option names GPUs of the script's, half of them to servers, and tells so."""
    given = {"--learner-gpus": options.learner_gpus, "--rollout-gpus": options.rollout_gpus}
    if open_options := " and ".join(name for name, gpus in given.items() if gpus is None):
        found = script.variables("CUDA_VISIBLE_DEVICES") or script.variables("NPROC_PER_NODE")
        if not found:
            raise UserError(f"{open_options} must be given, or a --from that names GPUs")
        gpus = _devices(found.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(script.num_ranks)))))
        if options.rollout_gpus is None:
            learner = gpus[: (len(gpus) + 1) // 2] if options.learner_gpus is None else options.learner_gpus
            options.rollout_gpus = [gpu for gpu in gpus if gpu not in learner] or gpus
        if options.learner_gpus is None:
            options.learner_gpus = [gpu for gpu in gpus if gpu not in options.rollout_gpus] or gpus
        sides = f"{options.learner_gpus} for the learner, {options.rollout_gpus} for servers"
        say(f"GPUs {gpus}: {sides}; {open_options} would say otherwise")
        if len(gpus) > 1 and "NPROC_PER_NODE" not in script.environment:
            say(
                "one process on all GPUs: here each rank holds the whole model, unless swift.deepspeed is zero3"
            )


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
    return str(found.absolute()) + rows if os.path.exists(found) else value


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
    kwargs = swift.get("model_kwargs")
    env = {name.upper(): str(value) for name, value in kwargs.items()} if isinstance(kwargs, dict) else {}
    if share is not None and engine is ServerEngine.VLLM:  # on transformers it takes what it needs
        args[UTILIZATION] = share
    more = {key: value for key, value in (("args", args), ("env", env)) if value}
    return {"engine": str(engine), "devices": devices, **more}


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
        description="Writes the YAML of a job on this machine, and tells what of a script --from is not as it was. "
        "Data, model and GPUs need not be given where the script names them; those that are given win.",
        exit_statuses="0 the file is written",
    )
    kinds: dict[str, Callable[[str], Any]] = {"FILE.yaml": Path, "R": float, "N,N": _devices}
    own_task = "one of your own needs --swift external_plugins=FILE.py"
    for option, metavar, default, meaning in (
        ("--from", "SCRIPT", None, "a script of yours with one `swift sft`, or that in quotes; never run"),
        ("--data", "FILE.jsonl", None, "training data"),
        ("--model", "DIR", None, "the directory of a stage-1 checkpoint, or a hub id"),
        ("--learner-gpus", "N,N", None, "GPU numbers of the learner, as 0,1; none for the CPU"),
        ("--rollout-gpus", "N,N", None, "GPU numbers of the servers, as 2,3; none for one on the CPU"),
        ("--output", "FILE.yaml", None, "never a file that exists"),
        ("--task", "NAME", DEFAULT_TASK, f"the meaning of answers (default %(default)s); {own_task}"),
        ("--b-ratio", "R", 0.25, "share of steps on channel B (default %(default)s)"),
    ):
        kind = kinds.get(metavar, str)
        parser.add_argument(
            option, required=option == "--output", metavar=metavar, default=default, type=kind, help=meaning
        )
    for option, metavar, meaning in (
        ("--set", "SECTION.KEY=VALUE", "any key of the YAML by its whole path, as rollout.num_generations=8"),
        ("--swift", "KEY=VALUE", "short for --set swift.KEY=VALUE, an argument of ms-swift"),
    ):
        text = f"{meaning}; may be given again"
        parser.add_argument(option, action="append", default=[], metavar=metavar, help=text)
    return parser.parse_args(argv)
