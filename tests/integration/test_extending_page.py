"""Every block of ``docs/extending.md`` does what the page says, with the real parts: template, servers, processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import scripted_turns
import yaml
from commands import run_python
from real_model import (
    STAGE1,
    make_encoder,
    read_rows,
    rollout_of,
    sample_of,
)
from swift.rollout import multi_turns
from swift.utils import import_external_file
from torchrun_job import RECORDER, TEMPLATE, LearnerRun, Server, run_learner, write_config

import swift_stage2
from swift_stage2 import try_task
from swift_stage2.channel_b.dialects import DIALECTS
from swift_stage2.channel_b.parsing import parse_rollout
from swift_stage2.channel_b.preprocessing import EncodedRollout, make_segment, make_target
from swift_stage2.channel_b.preprocessing_process import ProcessPreprocessor
from swift_stage2.channel_b.task import TASKS
from swift_stage2.checks.channel_b_parts import make_task as task_of
from swift_stage2.config import load_config
from swift_stage2.errors import ConfigError
from swift_stage2.records import Sample, SampleKey
from swift_stage2.servers import infer_wire

pytestmark = pytest.mark.timeout(1800)

AGAIN = "Look again at the image. Write the whole list once more, with every object that you missed."
PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
PACKAGE = Path(swift_stage2.__file__).parent
_BLOCK = re.compile(r"```python\n# (?P<head>(?P<name>[\w/.]+)[^\n]*)\n(?P<code>.*?)```", re.DOTALL)
BLOCKS = {match["name"]: match for match in _BLOCK.finditer(PAGE.read_text(encoding="utf-8"))}
SETTINGS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files."""
    directory = tmp_path_factory.mktemp("files")
    for name, block in BLOCKS.items():
        if "/" not in name:
            (directory / name).write_text(block["code"], encoding="utf-8")
    return directory


@pytest.fixture
def load(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a file as ms-swift imports a plugin; what it registers, and its path, are gone afterwards."""
    registries: list[dict[str, Any]] = [TASKS, DIALECTS]
    names = [dict(parts) for parts in registries]
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda name: import_external_file(str(files / name))
    for parts, before in zip(registries, names, strict=True):
        parts.clear()
        parts.update(before)
    for name in [name for name in sys.modules if name.startswith("_swift_external_")]:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(files)):
            del sys.modules[name]


def _configured(tmp_path: Path, settings: dict[str, Any]) -> Any:
    """As the page's YAML says, in a configuration that is whole."""
    config = settings | {
        "swift": {"model": str(STAGE1), **settings["swift"]},
        "stage2_ab": {"schedule": {"b_ratio": 0.5}, **settings["stage2_ab"]},
        "rollout": {"servers": [{"base_url": "http://127.0.0.1:9"}], **settings.get("rollout", {})},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return load_config(file)


def _counted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same images, asked for the number of their objects; nothing tells boxes."""
    return [
        {
            "messages": [
                {"role": "user", "content": "<image>How many shapes?"},
                {"role": "assistant", "content": str(len(row["objects"]["ref"]))},
            ],
            "images": row["images"],
        }
        for row in rows
    ]


# --- a dialect ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dialect_is_read_learned_and_written(load: Any, tmp_path: Path, rows_file: Path) -> None:
    config = _configured(tmp_path, SETTINGS[0])
    with pytest.raises(
        ConfigError, match=r"target\.dialect must be object_list or .* or point_list, got dialect="
    ):
        task_of(config)
    load("named_boxes.py")
    encoder, rows = make_encoder(), read_rows(rows_file)[:3]
    for row in rows:
        listed = ",\n ".join('{"box": <bbox>, "name": "<ref-object>"}' for _ in row["objects"]["ref"])
        row["messages"][1] = {"role": "assistant", "content": f"[{listed}]"}
    task = task_of(config).learn(rows, sample_of(rows[0]), encoder)
    for row in rows:
        sample = sample_of(row)
        answer, prompt = encoder.answer_of(sample), encoder.encode_prompt(sample)
        target = make_target(rollout_of(sample, answer, prompt.token_ids), prompt, encoder, task)
        assert target.text == answer
        assert target.quality.num_pairs == len(row["objects"]["ref"]) > 0
        assert len(parse_rollout(answer, DIALECTS["named_boxes"]).objects) == len(row["objects"]["ref"])
    # The process that preprocesses knows nothing of the file, and need not.
    with closing(ProcessPreprocessor(encoder, task)) as there:
        there.await_ready()
        (judged,) = there.score([rollout_of(sample, answer, prompt.token_ids)])
        assert judged.target == target  # type: ignore[union-attr]


# --- tasks -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_users_task_works_in_the_preprocessing_process(load: Any, tmp_path: Path, rows_file: Path) -> None:
    config = _configured(tmp_path, SETTINGS[1])
    with pytest.raises(
        ConfigError, match=r"stage2_ab\.task must be detection or point, got task='counting'; register it"
    ):
        task_of(config)
    load("counting.py")
    task, encoder = task_of(config), make_encoder()
    (row,) = _counted(read_rows(rows_file)[:1])
    truth = task.read_truth(row)
    sample = Sample(SampleKey(0, 0, 0), row, truth)
    prompt = encoder.encode_prompt(sample)
    task.check_answer(encoder.answer_of(sample), task.to_space(sample.truth, prompt.convert))
    with closing(ProcessPreprocessor(encoder, task)) as there:
        there.await_ready()
        right, wrong = there.encode(
            [rollout_of(sample, text, prompt.token_ids) for text in (str(truth), "many")]
        )
        assert isinstance(right, EncodedRollout)
        assert isinstance(wrong, EncodedRollout)
        assert (right.target.text, wrong.target.text) == (str(truth),) * 2
        assert [each.segment.quality.reward["exact"] for each in (right, wrong)] == [1.0, 0.0]
        assert right.segment.quality.reward["total"] == 1.5, "its weights came along"
        assert (right.target.metrics["exact"], wrong.target.metrics["exact"]) == ((1.0, 1.0), (0.0, 1.0))
        pack = there.pack("p", [right.segment])
        assert pack.num_supervised_tokens == len(right.target.token_ids) + len(encoder.closing_token_ids)


def test_a_task_is_tried_without_a_model(files: Path) -> None:
    done = run_python("try_counting.py", cwd=files, variables={"PYTHONPATH": str(PACKAGE.parent)})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == BLOCKS["try_counting.py"]["code"].strip().rpartition("# ")[2]


def test_a_users_reward_has_its_terms_and_weights(load: Any, tmp_path: Path) -> None:
    load("counting.py")
    row = {"messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "4"}]}
    task = task_of(_configured(tmp_path, SETTINGS[1]))
    assert try_task(task, row, "7").quality.reward == {"exact": 0.0, "near": 0.25, "total": 0.5 * 0.25}
    assert try_task(task, row, "4").quality.reward == {"exact": 1.0, "near": 1.0, "total": 1.5}
    channel_b = {"reward": {"weights": {"nears": 1.0}}}
    settings = {**SETTINGS[1], "stage2_ab": {**SETTINGS[1]["stage2_ab"], "channel_b": channel_b}}
    with pytest.raises(
        ConfigError, match=r"reward\.weights must be exact or near, got .*; did you mean 'near'"
    ):
        task_of(_configured(tmp_path, settings))


def test_a_users_settings_are_checked_and_reach_the_task(load: Any, tmp_path: Path, rows_file: Path) -> None:
    load("emphatic.py")
    settings, row = SETTINGS[2], read_rows(rows_file)[0]
    heavy = try_task(task_of(_configured(tmp_path, settings)), row, "[]")
    plain = try_task(task_of(_configured(tmp_path, _with_settings(settings, {}))), row, "[]")
    assert set(plain.weights) == {1.0}
    assert set(heavy.weights) == {2.0}
    for written, wanted in (
        ({"when_all_mised": 2.0}, r"section stage2_ab\.task_settings; did you mean 'when_all_missed'"),
        ({"when_all_missed": "2"}, r"stage2_ab\.task_settings\.when_all_missed must be a valid number"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            task_of(_configured(tmp_path, _with_settings(settings, written)))
    undeclared = {**_with_settings(settings, {"a": 1})["stage2_ab"], "task": "detection"}
    with pytest.raises(ConfigError, match="declares no settings, got task=detection task_settings="):
        task_of(_configured(tmp_path, {**settings, "stage2_ab": undeclared}))


def _with_settings(settings: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "stage2_ab": {**settings["stage2_ab"], "task_settings": written}}


@pytest.fixture(scope="module")
def counting_run(
    tmp_path_factory: pytest.TempPathFactory, rows_file: Path, server: Server, files: Path
) -> LearnerRun:
    """A learner with the page's task, which waits for packs, rounds and evaluations."""
    directory = tmp_path_factory.mktemp("runs") / "counting"
    rows = directory.parent / "counted.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in _counted(read_rows(rows_file))))
    plugins = [str(TEMPLATE), str(files / "counting.py"), str(RECORDER)]
    config = write_config(
        directory,
        rows,
        server,
        b_ratio=0.15,  # a pipeline that idles at times: evaluations are asked only then
        swift={
            "max_steps": 32,
            "val_dataset": [str(rows)],
            "external_plugins": plugins,
            "eval_strategy": "no",
        },
        evaluation={"every_steps": 9, "num_samples": 4, "max_round_delay_steps": 40},
    )
    written = yaml.safe_load(config.read_text())
    written["stage2_ab"]["task"] = SETTINGS[1]["stage2_ab"]["task"]
    config.write_text(yaml.safe_dump(written))
    run = run_learner(config, directory, ranks=1, inject="*:1:await_packs,*:1:await_rounds")
    assert run.status == 0, run.output[-4000:]
    return run


@pytest.mark.slow
def test_a_run_trains_a_users_task_on_both_channels(counting_run: LearnerRun) -> None:
    steps = counting_run.audit(0, "step")
    assert {step["channel"] for step in steps} == {"A", "B"}, [step["skip_reason"] for step in steps]
    assert counting_run.audit(0, "quarantined") == []
    numbers = counting_run.audit(0, "metrics")[-1]["numbers"]
    assert numbers["reward/exact"] == numbers["match_pairs"]
    assert numbers["reward/near"] > 0


@pytest.mark.slow
def test_an_evaluation_tells_a_users_metrics(counting_run: LearnerRun) -> None:
    evaluations = counting_run.audit(0, "evaluation")
    answered = [each for each in evaluations if each["counts"]["num_answered"]]
    assert answered, [each["end"] for each in evaluations]
    for record in answered:
        counts = record["counts"]
        assert counts["metrics"]["exact"] == [counts["num_pairs"], counts["num_answered"]]
        assert (
            record["ratios"]["exact"]
            == counts["num_pairs"] / counts["num_answered"]
            == record["ratios"]["recall"]
        )
        assert "error" in record["ratios"]


# --- a second turn -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_turn_is_asked_for_and_corrected(
    load: Any, tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(multi_turns, "look_again", None)  # gone afterwards
    load("look_again.py")
    load("second_look.py")
    (settings,) = (each for each in SETTINGS if "rollout" in each)
    config = _configured(tmp_path, settings)
    (process,) = config.launch.servers
    assert process.args["multi_turn_scheduler"] in multi_turns
    encoder, sample = make_encoder(packing_length=2048), sample_of(read_rows(rows_file)[0])
    truth, prompt = encoder.answer_of(sample), encoder.encode_prompt(sample)
    task = task_of(config).learn(read_rows(rows_file), sample, encoder)
    kind = multi_turns["look_again"]
    for said, reward in ((["[]", "[]"], 0.0), (["[]", truth], 1.0), ([truth, truth], 1.0)):
        _, found = scripted_turns.conversation(kind, encoder, sample, said)
        rollout = scripted_turns.rollout_of(sample, found)
        segment, target = make_segment(rollout, prompt, encoder, task)
        assert target.text == truth
        assert segment.quality.reward["format"] == reward
        (encoding,) = segment.encodings
        assert encoder.decode(encoding["input_ids"]).endswith(
            f"{said[0]}<|im_end|>\n<|im_start|>user\n{AGAIN}<|im_end|>\n<|im_start|>assistant\n{truth}<|im_end|>\n"
        )
        trained = [label for label in encoding["labels"] if label != -100]
        assert trained == [*target.token_ids, *encoder.closing_token_ids]


# --- an engine ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_serves_under_its_name(files: Path, tmp_path: Path) -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    arguments = [
        str(STAGE1), "--engine", "greedy", "--model-type", "stage2_tiny_vl", "--template", "stage2_tiny_vl",
        "--external-plugins", str(TEMPLATE), "--port", str(port), "--device", "cpu", "--num-threads", "1",
    ]  # fmt: skip
    code = f"import greedy\nfrom swift_stage2.rollout_server import command_line\ncommand_line.main({arguments!r})"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONPATH": str(files), "HF_HUB_OFFLINE": "1"},
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0, trust_env=False) as http:
            deadline = time.monotonic() + 120
            while not _is_healthy(http):
                assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.2)  # bounded polling of another process's start
            assert _answer(http, seed=1) == _answer(http, seed=2), "asked to sample, it is greedy"
    finally:
        process.kill()
        process.wait(timeout=60)


def _is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health/").status_code == 200
    except httpx.HTTPError:
        return False


def _answer(http: httpx.Client, *, seed: int) -> tuple[int, ...]:
    config = infer_wire.request_config(
        max_new_tokens=12, temperature=2.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=seed
    )
    request = {"messages": [{"role": "user", "content": "What is there?"}]}
    reply = http.post("/infer/", json={"infer_requests": [request], "request_config": config})
    assert reply.status_code == 200, reply.text
    (completion,) = infer_wire.parse_infer_reply(reply.json(), 1)
    return completion.token_ids


# --- a metric ----------------------------------------------------------------------------------------


def test_a_metric_is_two_lines_in_two_files(tmp_path: Path) -> None:
    """The package with these two lines added counts, merges and tags the new number."""
    copied = tmp_path / "swift_stage2"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("stage1", "__pycache__"))
    anchors = {
        "swift_stage2/telemetry/metrics.py": "METRICS: tuple[Metric, ...] = (\n",
        "swift_stage2/telemetry/recorders.py": "        add = self.counters.add\n",
    }
    assert anchors.keys() == {name for name in BLOCKS if "/" in name}
    for name, anchor in anchors.items():
        source = (tmp_path / name).read_text()
        assert source.count(anchor) == 1
        (tmp_path / name).write_text(source.replace(anchor, anchor + BLOCKS[name]["code"]))
    code = (
        "from pathlib import Path\n"
        "from swift_stage2.records import MatchQuality, Rollout, Sample, SampleKey, Target, VersionSpan\n"
        "from swift_stage2.telemetry.facade import Telemetry\n"
        f"telemetry = Telemetry(Path({str(tmp_path / 'run')!r}), 0, 1, tensorboard=False, queue_limit=4)\n"
        "for said in (0, 2):\n"
        "    quality = MatchQuality(said, 3, 0, 0.0, 0, 0)\n"
        "    spans = (VersionSpan(1, 0, 1),)\n"
        "    rollout = Rollout(Sample(SampleKey(0, 0, 0), {}), 'a', (1,), (), False, 5, 'http://s', spans)\n"
        "    telemetry.pipeline.matched(rollout, Target('a', (1,), (1.0,), quality), None)\n"
        "values = telemetry.merge_and_write(1, lambda text: [text])\n"
        "telemetry.close()\n"
        "print(values['stage2_ab/parse/empty'])\n"
    )
    done = run_python("-c", code, cwd=tmp_path, variables={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "1.0"
