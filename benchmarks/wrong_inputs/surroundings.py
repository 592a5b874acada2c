"""Mistakes around a job: models, servers, directories, command lines, the environment, what a run left behind."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.wrong_inputs.case import DOCTOR, LAUNCH, RUN_DIR, TRAIN, Case, Setup, Spoil, holding, placed
from swift_stage2.demo.demo_config import MODEL_TYPE, STAGE1, TEMPLATE_FILE

_COPY = "model"
_STAGE1 = shlex.quote(str(STAGE1))
_PLUGIN = f"--template {MODEL_TYPE} --external-plugins {shlex.quote(str(TEMPLATE_FILE))}"
_ROLLOUT = f"rollout {_COPY} --port 0 --model-type {MODEL_TYPE} {_PLUGIN}"
_INIT = f"init --data rows.jsonl --model {_STAGE1} --learner-gpus none --rollout-gpus none"


def surrounding_cases() -> Iterator[Case]:
    """In the order of a user's day."""
    for cases in (_models, _servers, _directories, _commands, _environment, _left_behind):
        yield from cases()


def _copied(change: Callable[[Path], object]) -> Spoil:
    """The scene's model is a copy of the tiny one, which ``change`` damages."""

    def spoil(scene: Setup) -> None:
        shutil.copytree(STAGE1, scene.folder / _COPY)
        change(scene.folder / _COPY)
        scene.set("swift.model", _COPY)

    return spoil


def _cut(name: str, keep: float) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * keep)])

    return change


def _without(*names: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return change


def _models() -> Iterator[Case]:
    case = partial(Case, "models")
    for wrong, place, value, told in (
        ("a model that is not there", "model", "/nowhere/model", "must be a directory that exists"),
        ("a file as model", "model", "./rows.jsonl", "must be a directory that exists"),
        ("a folder without config.json", "model", "./images", "must hold config.json"),
        ("no model", "model", None, "model"),
        ("an empty name", "model", "", "model"),
        ("a number as model", "model", 7, "must be a path"),
        ("an adapter that is not there", "adapters", ["./absent"], "swift.adapters"),
        ("an adapter without its configuration", "adapters", ["./images"], "adapter_config.json"),
        ("a checkpoint to resume from that is not there", _RESUME, "absent", _RESUME),
        ("a model to resume from instead of a checkpoint", _RESUME, str(STAGE1), "trainer_state.json"),
    ):
        yield case(wrong, told, spoil=placed(f"swift.{place}", value))
    damages: dict[str, Callable[[Path], object]] = {
        "cut safetensors": _cut("model.safetensors", 0.5),
        "safetensors of no bytes": _cut("model.safetensors", 0),
        "no weights at all": _without("model.safetensors"),
        "config.json that is no JSON": _cut("config.json", 0.5),
        "config.json of another kind of model": lambda model: (model / "config.json").write_text(
            _UNKNOWN_MODEL
        ),
        "no tokenizer": _without("tokenizer.json", "tokenizer_config.json"),
    }
    for wrong, change in damages.items():
        told = "must hold its tokenizer" if wrong == "no tokenizer" else ""
        yield case(f"{wrong}, met by rollout", told, _ROLLOUT, _copied(change))
    broken = _copied(_cut("config.json", 0.5))
    yield case("config.json that is no JSON, met by the doctor", "template", DOCTOR, broken, (1,))
    plugin = f"rollout {_STAGE1} --external-plugins absent.py"
    yield case("rollout of a model that is not there", "checkpoint directory", "rollout /nowhere/m")
    yield case("rollout of a folder without config.json", "checkpoint directory", "rollout images")
    yield case("rollout with a plugin that is not there", "plugin", plugin)
    yield case("rollout of nothing", "model", "rollout")


_RESUME = "resume_from_checkpoint"
_UNKNOWN_MODEL = '{"model_type": "nothing_known"}'


def _servers() -> Iterator[Case]:
    case = partial(Case, "servers")

    def elsewhere(port: str) -> Spoil:
        def spoil(scene: Setup) -> None:
            scene.config.pop("launch", None)
            scene.set(_BASE_URL, f"http://127.0.0.1:{getattr(scene, port)}")
            scene.set("rollout.start_timeout_s", 3)
            scene.config["swift"].pop("ddp_backend")  # train runs without torchrun here

        return spoil

    nobody, foreign = elsewhere("free_port"), elsewhere("foreign_port")
    live, never = f"{DOCTOR} --live", "stock swift rollout"
    awaited = "every rollout server must answer within"
    yield case("nobody on the port, met by doctor --live", "nothing answers at", live, nobody, (1,))
    yield case(
        "a web server on the port, met by doctor --live", "is no rollout server", live, foreign, (1,), never
    )
    yield case("nobody on the port, met by train", awaited, TRAIN, nobody)
    yield case(
        "a web server on the port, met by train", "an answer of another program", TRAIN, foreign, (2,), never
    )

    def taken(scene: Setup) -> None:
        scene.set(_BASE_URL, f"http://127.0.0.1:{scene.foreign_port}")

    def group_taken(scene: Setup) -> None:
        scene.set("rollout.servers.0.group_port", scene.foreign_port)

    unknown = placed(_BASE_URL, "http://no-such-host.invalid:8000")
    yield case("the server's port is taken", "must be free", spoil=taken)
    yield case("the group port is taken", "must be free", spoil=group_taken)
    yield case("a host that nobody knows", "this machine only", spoil=unknown)
    upstream = "merge --upstream http://h:1"
    for wrong, command, told in (
        ("--host of another machine", "--host 192.0.2.1", "must be an address of this machine"),
        ("--host that nobody knows", "--host no-such-host.invalid", "must be an address of this machine"),
        ("--port 70000", "--port 70000", "range 0..65535"),
        ("--port eight", "--port eight", "invalid int value"),
        ("a key as --api-key-env", "--api-key-env sk-proj-Ab12Cd34Ef56Gh78", "never the key"),
        ("--engine of nothing known", "--engine tensorrt", "invalid choice"),
        ("--max-batch-size 0", "--max-batch-size 0", "at least 1"),
        ("--torch-dtype int8", "--torch-dtype int8", "invalid choice"),
        ("a merger without --upstream", "merge", "--upstream"),
        ("a merger before no URL", "merge --upstream localhost", "--upstream must"),
        ("a merger before a URL without port", "merge --upstream http://h", "server's port"),
        ("a merger before itself", "merge --upstream http://127.0.0.1:9000", "a port of its own"),
        ("a merger with credentials", "merge --upstream http://me:hush@h:1", "credentials"),
        ("a merger with a batch of 0", f"{upstream} --max-batch-size 0", "at least 1"),
        ("a merger with a batch of 5,000", f"{upstream} --max-batch-size 5000", "at most"),
        ("a merger with no time", f"{upstream} --upstream-timeout-s 0", "positive"),
        ("a merger on another machine", f"{upstream} --host 192.0.2.1", "this machine"),
    ):
        whole = f"rollout {_STAGE1} {command}" if command.startswith("--") else command
        yield case(wrong, told, whole, never="hush")


_BASE_URL = "rollout.servers.0.base_url"


def _directories() -> Iterator[Case]:
    case = partial(Case, "directories")
    for wrong, place in (
        ("that nobody can write", "/proc/nowhere/run"),
        ("that is a file", "rows.jsonl"),
        ("below a file", "rows.jsonl/run"),
    ):
        spoil = placed("swift.output_dir", place)
        yield case(f"output_dir {wrong}, met by launch", "directory", LAUNCH, spoil)
        yield case(f"output_dir {wrong}, met by doctor", "cannot be written", DOCTOR, spoil, (1,))
    left = {f"{RUN_DIR}/checkpoint-2/trainer_state.json": "{}", f"{RUN_DIR}/audit/rank0.jsonl": "{}\n"}
    yield case("a second launch into a run's directory", RUN_DIR, spoil=holding(**left))
    for wrong, command, file, told in (
        ("a demo into files of somebody", "demo --output mine", "mine/a.txt", "with other files"),
        ("a demo into a file", "demo --output mine", "mine", "a file"),
        ("a bench into files of somebody", "bench learning --output mine", "mine/a.txt", "with other files"),
        ("init over a file", f"{_INIT} --output run.yaml", "x", "must be a new file"),
        (
            "init into a folder that nobody can write",
            f"{_INIT} --output /proc/nowhere/a.yaml",
            "x",
            "can be written",
        ),
        ("init below a file", f"{_INIT} --output x/a.yaml", "x", "can be written"),
        ("init without .yaml", f"{_INIT} --output job", "x", "name of a YAML file"),
        ("a report of nothing", "report absent", "x", "absent"),
        ("a report of a file", "report x", "x", "x"),
        ("a report of an empty folder", "report mine", "mine/a.txt", "mine"),
        ("a replay of nothing", "replay absent", "x", "absent"),
        ("a replay of a folder without a record", "replay mine", "mine/a.txt", "mine"),
        ("a replay into its own run", "replay mine --output .", "mine/a.txt", "must not hold the run"),
        ("train of a folder", "train images", "x", "readable UTF-8"),
        ("launch of a file that is not there", "launch absent.yaml", "x", "must exist"),
        ("train of a file that is not there", "train absent.yaml", "x", "must exist"),
        ("doctor of a file that is not there", "doctor absent.yaml", "x", "must exist"),
        ("launch of a data set", "launch rows.jsonl", "x", "valid YAML"),
    ):
        yield case(wrong, told, command, holding(**{file: "mine"}), (1, 2))


def _commands() -> Iterator[Case]:
    for command, told in (
        ("", "required: COMMAND"),
        ("nothing", "invalid choice"),
        ("trian run.yaml", "did you mean train?"),
        ("Launch run.yaml", "did you mean launch?"),
        ("train", "required: CONFIG.yaml"),
        ("launch", "required: CONFIG.yaml"),
        ("doctor", "required: CONFIG.yaml"),
        ("report", "required: RUN_DIR"),
        ("replay", "required: RUN_DIR"),
        ("bench", "required: NAME"),
        ("completion", "required: shell"),
        ("completion fish", "invalid choice"),
        ("--verison", "required: COMMAND"),
        (f"{LAUNCH} --nproc-per-node 0", "at least 1, got '0'"),
        (f"{LAUNCH} --nproc-per-node two", "at least 1, got 'two'"),
        (f"{LAUNCH} --nproc_per_node 2", "did you mean --nproc-per-node?"),
        (f"{LAUNCH} --resum", "--resum"),
        (f"{LAUNCH} more.yaml", "unrecognized arguments"),
        (f"{TRAIN} --live", "unrecognized arguments"),
        (f"{DOCTOR} --lvie", "did you mean --live?"),
        (f"{DOCTOR} --step-seconds 0", "seconds above 0"),
        (f"{DOCTOR} --step-seconds nan", "seconds above 0"),
        (f"{DOCTOR} --nproc-per-node 0", "at least 1"),
        ("report x --gallery -1", "gallery"),
        ("report x --gallery many", "0 or more"),
        ("report x --outptu y", "did you mean --output?"),
        ("demo --stpes 3", "did you mean --steps?"),
        ("demo --steps 0", "--steps must be at least 1"),
        ("demo --steps few", "invalid int value"),
        ("demo --b-ratio 2", "b_ratio"),
        ("demo --kind cats", "cats"),
        ("demo --engine tensorrt", "invalid choice"),
        ("bench learnng", "did you mean learning?"),
        ("bench learning --steps 0", "steps"),
        ("bench learning --b-ratios x", "b-ratios"),
        ("bench kills --points 0", "points"),
        ("bench faults --server x", "must be one of"),
        ("bench faults --rows none_such", "none_such"),
        ("bench all --only none_such", "none_such"),
        ("init", "an answer to every question"),
        ("init --data rows.jsonl", "--model"),
        (f"{_INIT} --output a.yaml --learner-gpus first", "GPUs must be numbers"),
        (f"{_INIT} --output a.yaml --learner-gpus 0 --rollout-gpus 0", "devices of their own"),
        (f"{_INIT} --output a.yaml --data absent.jsonl", "must name files that exist"),
        (f"{_INIT} --output a.yaml --model absent", "must be a directory that exists"),
        (f"{_INIT} --output a.yaml --b-ratio 2", "0..1"),
        (f"{_INIT} --output a.yaml --swift tuner_type", "KEY=VALUE"),
        (f"{_INIT} --output a.yaml --swift packing=true", "not supported"),
    ):
        yield Case("command lines", command or "no word at all", told, command)


def _environment() -> Iterator[Case]:
    case = partial(Case, "environment")

    def having(**names: str) -> Spoil:
        return lambda scene: scene.environment.update(names)

    whole = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name in whole:
        rest = having(**{key: value for key, value in whole.items() if key != name})
        yield case(f"torchrun's variables without {name}", "come together", TRAIN, rest)
    for name, value in (("RANK", "first"), ("WORLD_SIZE", "-1"), ("MASTER_PORT", ""), ("LOCAL_RANK", "1.5")):
        spoil = having(**(whole | {name: value}))
        yield case(f"{name}={value or 'nothing'}", "must be a whole number", TRAIN, spoil)
    without_b = placed("stage2_ab.schedule.b_ratio", 0)
    hub, no_gpu = "nobody/no-such-model", "CUDA_VISIBLE_DEVICES of a GPU that is not there"
    in_cache = "a hub id that is not in the cache, HF_HUB_OFFLINE=1, met by rollout"
    yield case("train without torchrun, with gloo written", "torchrun", TRAIN, without_b)
    yield case(in_cache, hub, f"rollout {hub} --port 0")
    key = having(SWIFT_ROLLOUT_API_KEY="two words")
    yield case("a key with a space in it", "cannot be a bearer token", DOCTOR, key, (1,), "two words")

    def copied_with_gpu(scene: Setup) -> None:
        _copied(lambda model: None)(scene)
        scene.environment["CUDA_VISIBLE_DEVICES"] = "901"

    def trained_with_gpu(scene: Setup) -> None:
        scene.config["swift"].pop("use_cpu")
        scene.environment["CUDA_VISIBLE_DEVICES"] = "901"

    told = "every device that is named must exist"
    yield case(f"{no_gpu}, met by rollout", told, _ROLLOUT, copied_with_gpu)
    yield case(f"{no_gpu}, met by train", told, TRAIN, trained_with_gpu)
    home = having(HOME="/nowhere", XDG_CACHE_HOME="/nowhere")
    yield case("a home that is not there", "absent", "report absent", home)


def _left_behind() -> Iterator[Case]:
    case = partial(Case, "what a run left")
    settings = {"run_id": "a", "seed": 0}
    start = {"kind": "start", "time": 1.0, "rank": 0, "step": 0, "world_size": 1, "settings": settings}
    step = {"kind": "step", "time": 2.0, "rank": 0, "step": 0, "channel": "A"}
    bare = {"kind": "start", "time": 1.0, "rank": 0}
    audit, matches, ledger = (f"{RUN_DIR}/{name}/rank0.jsonl" for name in ("audit", "matches", "ledger"))
    lines, report = _lines_of, f"report {RUN_DIR}"
    other = {"other/audit/rank0.jsonl": lines(start | {"settings": {"run_id": "b", "seed": 1}})}
    stray = holding(**{audit: lines(start), matches: lines({"a": 1})})
    # No account is made of matches.
    told = "1 lines of matches/ have another form"
    yield case("a stray record among matches", told, report, stray, (0,))
    for wrong, files, command in (
        ("an audit of no lines", {audit: ""}, report),
        ("an audit that is no JSON", {audit: "hello\n"}, report),
        ("an audit of lists", {audit: lines([1], 7, None)}, report),
        ("a record without a kind", {audit: lines(start, {"time": 1.0})}, report),
        ("a step without its fields", {audit: lines(start, step)}, report),
        ("a start without settings", {audit: lines(bare)}, report),
        ("a ledger that is no JSON", {audit: lines(start), ledger: "\x00\x01\n"}, report),
        ("an audit cut in a line", {audit: lines(start)[:-20]}, report),
        ("two unrelated runs at once", {audit: lines(start)} | other, f"{report} other"),
        ("a page where nobody can write", {audit: lines(start)}, f"{report} --output /proc/nowhere/a.html"),
        ("a page that is a folder", {audit: lines(start)}, f"{report} --output images"),
        (
            "a record to replay that is cut",
            {f"{RUN_DIR}/record/rank0.jsonl": '{"kind": "sta'},
            f"replay {RUN_DIR}",
        ),
    ):
        yield case(wrong, "", command, holding(**files), (1, 2))


def _lines_of(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
