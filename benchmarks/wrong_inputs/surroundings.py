"""What is wrong around a job: models, servers, directories, command lines, the environment, what a run left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.wrong_inputs.case import DOCTOR, LAUNCH, TRAIN, Case, command, placed
from benchmarks.wrong_inputs.scene import RUN_DIR, Scene
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.demo.demo_server import MODEL_TYPE, TEMPLATE_FILE

_COPY = "model"
_ROLLOUT = (
    "rollout",
    _COPY,
    "--port",
    "0",
    "--model-type",
    MODEL_TYPE,
    "--template",
    MODEL_TYPE,
    "--external-plugins",
    str(TEMPLATE_FILE),
)
_INIT = (
    "init",
    "--data",
    "rows.jsonl",
    "--model",
    str(STAGE1),
    "--learner-gpus",
    "none",
    "--rollout-gpus",
    "none",
)


def surrounding_cases() -> Iterator[Case]:
    """In the order of a user's day."""
    for cases in (_models, _servers, _directories, _commands, _environment, _left_behind):
        yield from cases()


def _copied(change: Callable[[Path], object]) -> Callable[[Scene], None]:
    """The scene's model is a copy of the tiny one, which ``change`` damages."""

    def spoil(scene: Scene) -> None:
        shutil.copytree(STAGE1, scene.folder / _COPY)
        change(scene.folder / _COPY)
        scene.set("swift.model", _COPY)

    return spoil


def _cut(name: str, keep: float) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * keep)])

    return change


def _holding(files: dict[str, str]) -> Callable[[Scene], object]:
    return lambda scene: scene.files.update(files)


def _models() -> Iterator[Case]:
    area = "models"
    for wrong, place, value, told in (
        ("a model that is not there", "swift.model", "/nowhere/model", "must be a directory that exists"),
        ("a file as model", "swift.model", "./rows.jsonl", "must be a directory that exists"),
        ("a folder without config.json", "swift.model", "./images", "must hold config.json"),
        ("no model", "swift.model", None, "model"),
        ("an empty name", "swift.model", "", "model"),
        ("a number as model", "swift.model", 7, "must be a path"),
        ("an adapter that is not there", "swift.adapters", ["./absent"], "swift.adapters"),
        ("an adapter without its configuration", "swift.adapters", ["./images"], "adapter_config.json"),
        (
            "a checkpoint to resume from that is not there",
            "swift.resume_from_checkpoint",
            "absent",
            "resume_from_checkpoint",
        ),
        (
            "a model to resume from instead of a checkpoint",
            "swift.resume_from_checkpoint",
            str(STAGE1),
            "trainer_state.json",
        ),
    ):
        yield Case(
            area=area,
            wrong=wrong,
            told=told,
            spoil=placed(place, value),
        )
    for wrong, change, told in (
        ("cut safetensors", _cut("model.safetensors", 0.5), ""),
        ("safetensors of no bytes", _cut("model.safetensors", 0), ""),
        ("no weights at all", lambda model: (model / "model.safetensors").unlink(), ""),
        ("config.json that is no JSON", _cut("config.json", 0.5), ""),
        (
            "config.json of another kind of model",
            lambda model: (model / "config.json").write_text('{"model_type": "nothing_known"}'),
            "",
        ),
        (
            "no tokenizer",
            lambda model: [(model / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
            "must hold its tokenizer",
        ),
    ):
        spoil = _copied(change)
        yield Case(area=area, wrong=f"{wrong}, met by rollout", words=_ROLLOUT, spoil=spoil, told=told)
    yield Case(
        area=area,
        wrong="config.json that is no JSON, met by the doctor",
        words=DOCTOR,
        statuses=(1,),
        spoil=_copied(_cut("config.json", 0.5)),
        told="template",
    )
    for wrong, words, told in (
        ("rollout of a model that is not there", ("rollout", "/nowhere/m"), "checkpoint directory"),
        ("rollout of a folder without config.json", ("rollout", "images"), "checkpoint directory"),
        (
            "rollout with a plugin that is not there",
            ("rollout", str(STAGE1), "--external-plugins", "absent.py"),
            "plugin",
        ),
        ("rollout of nothing", ("rollout",), "model"),
    ):
        yield command(area, wrong, words, told)


def _servers() -> Iterator[Case]:
    area = "servers"

    def elsewhere(port: str) -> Callable[[Scene], None]:
        def spoil(scene: Scene) -> None:
            scene.config.pop("launch", None)
            scene.set("rollout.servers.0.base_url", f"http://127.0.0.1:{getattr(scene, port)}")
            scene.set("rollout.start_timeout_s", 3)
            scene.config["swift"].pop("ddp_backend")  # train runs without torchrun here

        return spoil

    live = (*DOCTOR, "--live")
    yield Case(
        area=area,
        wrong="nobody on the port, met by doctor --live",
        words=live,
        statuses=(1,),
        spoil=elsewhere("free_port"),
        told="nothing answers at",
    )
    yield Case(
        area=area,
        wrong="a web server on the port, met by doctor --live",
        words=live,
        statuses=(1,),
        spoil=elsewhere("foreign_port"),
        told="is no rollout server",
        never="stock swift rollout",
    )
    yield Case(
        area=area,
        wrong="nobody on the port, met by train",
        words=TRAIN,
        spoil=elsewhere("free_port"),
        told="every rollout server must answer within",
    )
    yield Case(
        area=area,
        wrong="a web server on the port, met by train",
        words=TRAIN,
        spoil=elsewhere("foreign_port"),
        told="an answer of another program",
        never="stock swift rollout",
    )
    yield Case(
        area=area,
        wrong="the server's port is taken",
        told="must be free",
        spoil=lambda scene: scene.set("rollout.servers.0.base_url", f"http://127.0.0.1:{scene.foreign_port}"),
    )
    yield Case(
        area=area,
        wrong="the group port is taken",
        told="must be free",
        spoil=lambda scene: scene.set("rollout.servers.0.group_port", scene.foreign_port),
    )
    yield Case(
        area=area,
        wrong="a host that nobody knows",
        told="this machine only",
        spoil=lambda scene: scene.set("rollout.servers.0.base_url", "http://no-such-host.invalid:8000"),
    )
    stage1 = ("rollout", str(STAGE1))
    for wrong, words, told in (
        ("--host of another machine", (*stage1, "--host", "192.0.2.1"), "must be an address of this machine"),
        (
            "--host that nobody knows",
            (*stage1, "--host", "no-such-host.invalid"),
            "must be an address of this machine",
        ),
        ("--port 70000", (*stage1, "--port", "70000"), "range 0..65535"),
        ("--port eight", (*stage1, "--port", "eight"), "invalid int value"),
        ("a key as --api-key-env", (*stage1, "--api-key-env", "sk-proj-Ab12Cd34Ef56Gh78"), "never the key"),
        ("--engine of nothing known", (*stage1, "--engine", "tensorrt"), "invalid choice"),
        ("--max-batch-size 0", (*stage1, "--max-batch-size", "0"), "at least 1"),
        ("--torch-dtype int8", (*stage1, "--torch-dtype", "int8"), "invalid choice"),
        ("a merger without --upstream", ("merge",), "--upstream"),
        ("a merger before no URL", ("merge", "--upstream", "localhost"), "--upstream must"),
        ("a merger before a URL without port", ("merge", "--upstream", "http://h"), "server's port"),
        ("a merger before itself", ("merge", "--upstream", "http://127.0.0.1:9000"), "a port of its own"),
        ("a merger with credentials", ("merge", "--upstream", "http://me:hush@h:1"), "credentials"),
        (
            "a merger with a batch of 0",
            ("merge", "--upstream", "http://h:1", "--max-batch-size", "0"),
            "at least 1",
        ),
        (
            "a merger with a batch of 5,000",
            ("merge", "--upstream", "http://h:1", "--max-batch-size", "5000"),
            "at most",
        ),
        (
            "a merger with no time",
            ("merge", "--upstream", "http://h:1", "--upstream-timeout-s", "0"),
            "positive",
        ),
        (
            "a merger on another machine",
            ("merge", "--upstream", "http://h:1", "--host", "192.0.2.1"),
            "this machine",
        ),
    ):
        yield command(area, wrong, words, told, never="hush")


def _directories() -> Iterator[Case]:
    area = "directories"

    def made(name: str, content: str = "mine") -> Callable[[Scene], None]:
        return lambda scene: scene.files.update({name: content})

    for wrong, place in (
        ("that nobody can write", "/proc/nowhere/run"),
        ("that is a file", "rows.jsonl"),
        ("below a file", "rows.jsonl/run"),
    ):
        for met_by, statuses in ((LAUNCH, (2,)), (DOCTOR, (1,))):
            yield Case(
                area=area,
                wrong=f"output_dir {wrong}, met by {met_by[0]}",
                words=met_by,
                statuses=statuses,
                spoil=placed("swift.output_dir", place),
                told="directory" if met_by is LAUNCH else "cannot be written",
            )
    yield Case(
        area=area,
        wrong="a second launch into a run's directory",
        told=RUN_DIR,
        spoil=lambda scene: scene.files.update(
            {f"{RUN_DIR}/checkpoint-2/trainer_state.json": "{}", f"{RUN_DIR}/audit/rank0.jsonl": "{}\n"}
        ),
    )
    for wrong, words, name, told in (
        ("a demo into files of somebody", ("demo", "--output", "mine"), "mine/a.txt", "with other files"),
        ("a demo into a file", ("demo", "--output", "mine"), "mine", "a file"),
        (
            "a bench into files of somebody",
            ("bench", "learning", "--output", "mine"),
            "mine/a.txt",
            "with other files",
        ),
        ("init over a file", (*_INIT, "--output", "run.yaml"), "x", "must be a new file"),
        (
            "init into a folder that nobody can write",
            (*_INIT, "--output", "/proc/nowhere/a.yaml"),
            "x",
            "can be written",
        ),
        ("init below a file", (*_INIT, "--output", "x/a.yaml"), "x", "can be written"),
        ("init without .yaml", (*_INIT, "--output", "job"), "x", "name of a YAML file"),
        ("a report of nothing", ("report", "absent"), "x", "absent"),
        ("a report of a file", ("report", "x"), "x", "x"),
        ("a report of an empty folder", ("report", "mine"), "mine/a.txt", "mine"),
        ("a replay of nothing", ("replay", "absent"), "x", "absent"),
        ("a replay of a folder without a record", ("replay", "mine"), "mine/a.txt", "mine"),
        (
            "a replay into its own run",
            ("replay", "mine", "--output", "."),
            "mine/a.txt",
            "must not hold the run",
        ),
        ("train of a folder", ("train", "images"), "x", "readable UTF-8"),
        ("launch of a file that is not there", ("launch", "absent.yaml"), "x", "must exist"),
        ("train of a file that is not there", ("train", "absent.yaml"), "x", "must exist"),
        ("doctor of a file that is not there", ("doctor", "absent.yaml"), "x", "must exist"),
        ("launch of a data set", ("launch", "rows.jsonl"), "x", "valid YAML"),
    ):
        yield Case(area=area, wrong=wrong, words=words, spoil=made(name), told=told, statuses=(1, 2))


def _commands() -> Iterator[Case]:
    area = "command lines"
    for words, told in (
        ((), "required: COMMAND"),
        (("nothing",), "invalid choice"),
        (("trian", "run.yaml"), "did you mean train?"),
        (("Launch", "run.yaml"), "did you mean launch?"),
        (("train",), "required: CONFIG.yaml"),
        (("launch",), "required: CONFIG.yaml"),
        (("doctor",), "required: CONFIG.yaml"),
        (("report",), "required: RUN_DIR"),
        (("replay",), "required: RUN_DIR"),
        (("bench",), "required: NAME"),
        (("completion",), "required: shell"),
        (("completion", "fish"), "invalid choice"),
        (("--verison",), "required: COMMAND"),
        ((*LAUNCH, "--nproc-per-node", "0"), "at least 1, got '0'"),
        ((*LAUNCH, "--nproc-per-node", "two"), "at least 1, got 'two'"),
        ((*LAUNCH, "--nproc_per_node", "2"), "did you mean --nproc-per-node?"),
        ((*LAUNCH, "--resum"), "--resum"),
        ((*LAUNCH, "more.yaml"), "unrecognized arguments"),
        ((*TRAIN, "--live"), "unrecognized arguments"),
        ((*DOCTOR, "--lvie"), "did you mean --live?"),
        ((*DOCTOR, "--step-seconds", "0"), "seconds above 0"),
        ((*DOCTOR, "--step-seconds", "nan"), "seconds above 0"),
        ((*DOCTOR, "--nproc-per-node", "0"), "at least 1"),
        (("report", "x", "--gallery", "-1"), "gallery"),
        (("report", "x", "--gallery", "many"), "0 or more"),
        (("report", "x", "--outptu", "y"), "did you mean --output?"),
        (("demo", "--stpes", "3"), "did you mean --steps?"),
        (("demo", "--steps", "0"), "--steps must be at least 1"),
        (("demo", "--steps", "few"), "invalid int value"),
        (("demo", "--b-ratio", "2"), "b_ratio"),
        (("demo", "--kind", "cats"), "cats"),
        (("demo", "--engine", "tensorrt"), "invalid choice"),
        (("bench", "learnng"), "did you mean learning?"),
        (("bench", "learning", "--steps", "0"), "steps"),
        (("bench", "learning", "--b-ratios", "x"), "b-ratios"),
        (("bench", "kills", "--points", "0"), "points"),
        (("bench", "faults", "--server", "x"), "must be one of"),
        (("bench", "faults", "--rows", "none_such"), "none_such"),
        (("bench", "all", "--only", "none_such"), "none_such"),
        (("init",), "an answer to every question"),
        (("init", "--data", "rows.jsonl"), "--model"),
        ((*_INIT, "--output", "a.yaml", "--learner-gpus", "first"), "GPUs must be numbers"),
        (
            (*_INIT, "--output", "a.yaml", "--learner-gpus", "0", "--rollout-gpus", "0"),
            "devices of their own",
        ),
        ((*_INIT, "--output", "a.yaml", "--data", "absent.jsonl"), "must name files that exist"),
        ((*_INIT, "--output", "a.yaml", "--model", "absent"), "must be a directory that exists"),
        ((*_INIT, "--output", "a.yaml", "--b-ratio", "2"), "0..1"),
        ((*_INIT, "--output", "a.yaml", "--swift", "tuner_type"), "KEY=VALUE"),
        ((*_INIT, "--output", "a.yaml", "--swift", "packing=true"), "not supported"),
    ):
        yield command(area, " ".join(words) or "no word at all", words, told)


def _environment() -> Iterator[Case]:
    area = "environment"

    def having(**names: str) -> Callable[[Scene], None]:
        return lambda scene: scene.environment.update(names)

    whole = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name in whole:
        rest = {key: value for key, value in whole.items() if key != name}
        yield Case(
            area=area,
            wrong=f"torchrun's variables without {name}",
            words=TRAIN,
            spoil=having(**rest),
            told="come together",
        )
    for name, value in (("RANK", "first"), ("WORLD_SIZE", "-1"), ("MASTER_PORT", ""), ("LOCAL_RANK", "1.5")):
        yield Case(
            area=area,
            wrong=f"{name}={value or 'nothing'}",
            words=TRAIN,
            spoil=having(**(whole | {name: value})),
            told="must be a whole number",
        )
    yield Case(
        area=area,
        wrong="train without torchrun, with gloo written",
        words=TRAIN,
        told="torchrun",
        spoil=lambda scene: scene.set("stage2_ab.schedule.b_ratio", 0),
    )
    yield Case(
        area=area,
        wrong="a hub id that is not in the cache, HF_HUB_OFFLINE=1, met by rollout",
        words=("rollout", "nobody/no-such-model", "--port", "0"),
        told="nobody/no-such-model",
    )
    yield Case(
        area=area,
        wrong="a key with a space in it",
        words=DOCTOR,
        statuses=(1,),
        spoil=having(SWIFT_ROLLOUT_API_KEY="two words"),
        told="cannot be a bearer token",
        never="two words",
    )
    yield Case(
        area=area,
        wrong="CUDA_VISIBLE_DEVICES of a GPU that is not there, met by rollout",
        words=_ROLLOUT,
        spoil=lambda scene: (_copied(lambda model: None)(scene), having(CUDA_VISIBLE_DEVICES="901")(scene)),
        told="every device that is named must exist",
    )
    yield Case(
        area=area,
        wrong="CUDA_VISIBLE_DEVICES of a GPU that is not there, met by train",
        words=TRAIN,
        spoil=lambda scene: (scene.config["swift"].pop("use_cpu"), having(CUDA_VISIBLE_DEVICES="901")(scene)),
        told="every device that is named must exist",
    )
    yield Case(
        area=area,
        wrong="a home that is not there",
        words=("report", "absent"),
        told="absent",
        spoil=having(HOME="/nowhere", XDG_CACHE_HOME="/nowhere"),
    )


def _left_behind() -> Iterator[Case]:
    area = "what a run left"
    start = {
        "kind": "start",
        "time": 1.0,
        "rank": 0,
        "step": 0,
        "world_size": 1,
        "settings": {"run_id": "a", "seed": 0},
    }
    step = {"kind": "step", "time": 2.0, "rank": 0, "step": 0, "channel": "A"}
    audit, matches, ledger = (f"{RUN_DIR}/{name}/rank0.jsonl" for name in ("audit", "matches", "ledger"))

    def lines(*records: object) -> str:
        return "".join(
            (record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records
        )

    other = start | {"settings": {"run_id": "b", "seed": 1}}
    told = ("report", RUN_DIR)
    yield Case(
        area=area,
        wrong="a stray record among matches",
        words=told,
        spoil=lambda scene: scene.files.update({audit: lines(start), matches: lines({"a": 1})}),
        told="1 lines of matches/ have another form",
        statuses=(0,),  # no account is made of matches
    )
    for wrong, files, words, said in (
        ("an audit of no lines", {audit: ""}, told, ""),
        ("an audit that is no JSON", {audit: "hello\n"}, told, ""),
        ("an audit of lists", {audit: lines([1], 7, None)}, told, ""),
        ("a record without a kind", {audit: lines(start, {"time": 1.0})}, told, ""),
        ("a step without its fields", {audit: lines(start, step)}, told, ""),
        ("a start without settings", {audit: lines({"kind": "start", "time": 1.0, "rank": 0})}, told, ""),
        ("a ledger that is no JSON", {audit: lines(start), ledger: "\x00\x01\n"}, told, ""),
        ("an audit cut in a line", {audit: lines(start)[:-20]}, told, ""),
        (
            "two unrelated runs at once",
            {audit: lines(start), "other/audit/rank0.jsonl": lines(other)},
            ("report", RUN_DIR, "other"),
            "",
        ),
        (
            "a page where nobody can write",
            {audit: lines(start)},
            (*told, "--output", "/proc/nowhere/a.html"),
            "",
        ),
        ("a page that is a folder", {audit: lines(start)}, (*told, "--output", "images"), ""),
        (
            "a record to replay that is cut",
            {f"{RUN_DIR}/record/rank0.jsonl": '{"kind": "sta'},
            ("replay", RUN_DIR),
            "",
        ),
    ):
        yield Case(
            area=area,
            wrong=wrong,
            words=words,
            told=said,
            statuses=(1, 2),
            spoil=_holding(files),
        )
