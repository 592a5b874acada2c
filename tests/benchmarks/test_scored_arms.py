"""Benches that score trained arms: arms differ in one thing, and gains are taken seed by seed."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import learning, scored_arms, turns
from benchmarks.plugins.lagging import FIRST_VERSION_VARIABLE, LAG_VARIABLE, DelayedQueue
from benchmarks.servers import write_job
from benchmarks.staleness import plan_arms
from swift_stage2.config import Objective, load_config
from swift_stage2.demo.demo_config import STAGE1, DemoJob
from swift_stage2.scheduling.version_clock import require_fresh

ARMS = ["a@12", "once", "renew4", "b0.3", "b1/grpo", "first5", "first"]


@pytest.fixture
def options() -> argparse.Namespace:
    own = {"arms": ARMS, "steps": 10, "core_seconds": 12.0, "model": None, "results": None}
    return argparse.Namespace(seeds=2, kind="shapes", learning_rate=1e-4, **own)


def test_arms_differ_in_nothing_but_what_their_names_say(tmp_path: Path, options: argparse.Namespace) -> None:
    bases = [learning.base_job(tmp_path, seed, STAGE1, options) for seed in (0, 1)]
    found = {}
    for arm in learning.check(options):
        job = arm.job(bases[0])
        assert replace(
            job, directory=tmp_path, rows=tmp_path, b_ratio=0.0, objective=Objective.GRPO
        ) == replace(bases[0], directory=tmp_path, rows=tmp_path, objective=Objective.GRPO)
        config = load_config(write_job(job, (4001, 4002), arm.changes))
        channel_b, cadence = config.stage2_ab.channel_b, None
        if job.b_ratio:
            assert (config.stage2_ab.mode, channel_b.target.missed_order) == ("inline", "reading")
            cadence = channel_b.prefetch.sync_every_steps
        found[arm.name] = (job.b_ratio, job.objective.value, job.rows != bases[0].rows, cadence)
        assert config.swift["lr_scheduler_type"] == "constant_with_warmup"
    plain = "corrected_target"
    assert found == {
        "a": (0.0, plain, False, None),
        "once": (0.0, plain, True, None),
        "renew4": (0.0, plain, True, None),
        "b0.3": (0.3, plain, False, 4),
        "b1/grpo": (1.0, "grpo", False, 4),
        "first5": (1.0, plain, False, 5),
        "first": (1.0, plain, False, 1_000_000),
    }
    assert bases[0].rows.read_text() != bases[1].rows.read_text()


def test_arms_are_trained_in_pieces_and_a_score_that_is_there_is_not_measured_again(
    tmp_path: Path, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes a core second, a correction of the rows 5; F1 is a thousandth of the steps, of ``once`` 0.1 more."""
    clock, done = [0], list[str]()

    def train(processes: object, job: DemoJob, environment: object, changes: object) -> None:
        clock[0] += job.num_steps - max((int(each.name[11:]) for each in job.run_dir.glob("*")), default=0)
        job.checkpoint.mkdir(parents=True)
        done.append(f"{job.directory.name} to {job.num_steps} on {job.rows.parent.name}")

    def correct(processes: object, rows: Path, checkpoint: Path, output: Path) -> None:
        clock[0] += 5
        done.append(f"{rows.parent.name} by {checkpoint.name} for {output.parent.name}")

    def score(processes: object, rows: Path, checkpoint: Path, output: Path) -> dict[str, Any]:
        clock[0] += 1000  # no arm's
        f1 = int(checkpoint.name[11:] or 0) / 1000 + 0.1 * (checkpoint.parts[-3] == "once")
        found = {"num_images": 4, "errors": {"Dupe": {"count": 2}}, "metrics": {"eval/f1": f1}}
        return {**found, "ways": {"both": 0.5}}

    seconds, summary = (lambda: clock[0]), (lambda run_dir: argparse.Namespace(num_b_run=7))
    for each in (train, correct, score):
        monkeypatch.setattr(learning, each.__name__, each)
    monkeypatch.setattr(learning, "_seconds_of_children", seconds)
    monkeypatch.setattr(learning, "summarise", summary)
    options.arms, options.seeds, options.results = ARMS[:4], 1, tmp_path / "learning.jsonl"
    assert learning.run(options, tmp_path) == 0
    assert ", ".join(done) == (
        "a to 10 on train, a to 12 on train, train by stage1 for once, once to 10 on once, train by stage1 for renew4, "
        "renew4 to 4 on renew4, train by checkpoint-4 for renew4, renew4 to 8 on renew4, "
        "train by checkpoint-8 for renew4, renew4 to 10 on renew4, b0.3 to 10 on train"
    )
    lines = learning.read_lines(options.results)
    keys = ("arm", "steps", "core_seconds", "b_steps")
    assert [tuple(line[key] for key in keys) for line in lines] == [
        *(("before", 0, 0, 0), ("a", 10, 10, 7), ("a", 12, 12, 7), ("once", 10, 15, 7)),
        *(("renew4", 10, 25, 7), ("b0.3", 10, 10, 7)),
    ]
    assert all(line["ways"] == {"both": 0.5} and line["state"] and line["cpu"] for line in lines)
    done.clear()
    options.arms, other = [*ARMS[:4], "first"], tmp_path / "other"
    other.mkdir()
    assert learning.run(options, other) == 0
    assert done == ["first to 10 on train"]
    steps, core = (other / "learning.md").read_text().split("at 12 core seconds")
    assert re.search(r"\| once .*\| \+0.100 ", steps)
    assert re.search(r"\| first .*\| \+0.000 .*\| -0.100 ", steps)
    assert re.findall(r"^\| (\S+) .*\| (0\.\d+) ", core, re.MULTILINE) == [
        ("before", "0.500"),
        ("a", "0.500"),
    ]


def test_scores_of_objects_reach_the_table(tmp_path: Path) -> None:
    def run(name: str, words: tuple[str, ...], deadline_s: float) -> None:
        metrics = {
            "eval/f1": {"value": 0.5},
            "eval/ap_without_scores": {"value": 0.25},
            "eval/ece": {"value": 0.125},
        }
        facts = {
            "num_images": 4,
            "errors": {"Dupe": {"count": 2}},
            "ap_by_score": {"none": 0.25},
            "calibration": [],
        }
        (tmp_path / "evaluation.json").write_text(json.dumps({"metrics": metrics, **facts}))

    found = scored_arms.score(argparse.Namespace(run=run), tmp_path, STAGE1, tmp_path)  # type: ignore[arg-type]
    assert (found["ap_by_score"], "calibration" in found) == ({"none": 0.25}, False)
    arm = scored_arms.ScoredArm(name="a", seed=0, score=scored_arms.scores_of(found))
    table = scored_arms.score_table("now", arm.score, [arm], {})
    told = dict(zip(table.columns, table.rows[1], strict=True))
    assert (told["AP without scores"], told["ECE"]) == ("0.250", "0.125")


@dataclass
class StandInPack:
    version: int


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(FIRST_VERSION_VARIABLE, "9")
    return monkeypatch


def _train(lag: int, forced: pytest.MonkeyPatch, versions: list[int]) -> list[list[int]]:
    """Versions behind of what each step trains that gets something; every step finds two packs of its version."""
    forced.setenv(LAG_VARIABLE, str(lag))
    queue = DelayedQueue(8, 2)
    trained = []
    for version in versions:
        while queue.num_fresh(version) < 2:
            assert queue.has_room(version)
            queue.offer(StandInPack(version), current_version=version)  # type: ignore[arg-type]
        reservation = queue.reserve(2, current_version=version)
        if reservation is not None:
            packs = reservation.take()
            require_fresh(
                ((pack, pack.version) for pack in packs), current=version, window=queue.version_window
            )
            trained.append([version - pack.version for pack in packs])
    return trained


@pytest.mark.parametrize("lag", [0, 2, 8])
def test_packs_are_trained_so_many_versions_after_they_were_made(
    lag: int, forced: pytest.MonkeyPatch
) -> None:
    trained = _train(lag, forced, list(range(1, 30)))
    assert trained == [[lag, lag]] * (29 - 8), "every step from version 9 on, in every arm"


def test_a_version_that_no_step_wanted_makes_it_older_never_younger(forced: pytest.MonkeyPatch) -> None:
    trained = _train(2, forced, [version for version in range(1, 40) if version % 3])
    assert trained
    assert {lag for step in trained for lag in step} <= {2, 3}


def test_arms_of_a_lag_differ_in_the_lag_alone(tmp_path: Path) -> None:
    arms = list(plan_arms(tmp_path, 2, 2, (0, 8)))
    assert [(lag, job.seed, job.b_ratio) for lag, job in arms] == [
        (None, 0, 0.0), (0, 0, 0.25), (8, 0, 0.25), (None, 1, 0.0), (0, 1, 0.25), (8, 1, 0.25),
    ]  # fmt: skip
    assert len({job.directory for _, job in arms}) == 6
    assert len({job.rows for _, job in arms[:3]}) == 1


@pytest.fixture
def taught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[DemoJob, dict[str, Any]]]:
    monkeypatch.setattr("swift_stage2.demo.demo_config.require_vllm", lambda **_: None)
    monkeypatch.setattr("swift_stage2.demo.demo_config.files", Path)  # of what comes with vLLM
    return list(turns.plan_jobs(tmp_path, argparse.Namespace(lessons=4, steps=2, seeds=2)))


def test_lessons_have_every_second_row_look_again_at_what_its_first_answer_left_out(
    taught: list[tuple[DemoJob, dict[str, Any]]],
) -> None:
    job, _ = taught[0]
    assert (job.b_ratio, job.swift["loss_scale"]) == (0.0, "last_round"), "what leaves out is not trained"
    rows = [json.loads(line) for line in job.rows.read_text().splitlines()]
    assert [len(row["messages"]) for row in rows[:4]] == [4, 2, 4, 2]
    num_told = num_all = 0
    for row in rows[::2]:
        _, first, again, whole = row["messages"]
        objects = [*zip(row["objects"]["ref"], row["objects"]["bbox"], strict=True)]
        told = [(each["label"], each["bbox_2d"]) for each in json.loads(first["content"])]
        assert [each for each in objects if each in told] == told
        assert again["content"].startswith("Look again")
        assert whole["content"].count("<bbox>") == len(objects)
        num_told, num_all = num_told + len(told), num_all + len(objects)
    assert num_all / 3 < num_told < num_all * 2 / 3


def test_arms_of_turns_differ_in_the_second_turn_alone(taught: list[tuple[DemoJob, dict[str, Any]]]) -> None:
    found = []
    for job, changes in taught[1:]:
        config = yaml.safe_load(
            write_job(job, (4001, 4002), changes).read_text().replace(job.directory.name, "")
        )
        arguments = config["launch"]["servers"][0]["args"]
        scheduler = [arguments.pop(name, None) for name in ("multi_turn_scheduler", "max_turns")]
        found.append((job.seed, job.num_steps, config["rollout"].pop("max_turns"), scheduler, config))
    ones, twos = found[::2], found[1::2]
    assert [each[:2] for each in ones] == [each[:2] for each in twos] == [(3, 1), (0, 2), (1, 2)]
    assert [each[4] for each in ones] == [each[4] for each in twos]
    assert {(each[2], *each[3]) for each in ones} == {(1, None, None)}
    assert {(each[2], *each[3]) for each in twos} == {(2, "look_again", 2)}
