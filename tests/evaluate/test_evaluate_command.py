"""The command on files: table, JSON and page of the same numbers, exit status, one line for what cannot be used."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
from detection_sets import line, write_lines, write_rows
from fake_rollout_server import Answer, FakeRolloutServer
from PIL import Image

from swift_stage2.cli import main

CAR, CAT = ("car", (10, 10, 110, 110)), ("cat", (200, 200, 260, 260))
EVIL = "</script><script>window.broken = 1</script>"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    Image.new("RGB", (400, 400), "red").save(tmp_path / "a.png")
    images = [(str(tmp_path / "a.png"), [CAR, CAT]), (f"{tmp_path}/{EVIL}.png", [CAT]), ("c.png", [])]
    return write_rows(tmp_path / "val.jsonl", images)


@pytest.fixture
def predictions(data: Path, tmp_path: Path) -> Path:
    """Two of three right, one invented, one of another class."""
    lines = [
        line(str(tmp_path / "a.png"), [CAR, CAT], answer="[", finish_reason="stop"),
        line(
            f"{tmp_path}/{EVIL}.png",
            [(EVIL, CAT[1])],
            answer='[] [{"label": "", {"label":',
            finish_reason="length",
        ),
        line("c.png", [CAR], answer="[{}, 7] or {}"),
    ]
    return write_lines(tmp_path / "predictions.jsonl", lines)


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments)])


def test_table_json_and_page_tell_the_same(
    data: Path, predictions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert evaluate("--data", data, "--predictions", predictions, "--output", output) == 0
    told = capsys.readouterr().out
    facts = json.loads((output / "evaluation.json").read_text(encoding="utf-8"))
    metrics = facts["metrics"]
    assert metrics["eval/precision"]["value"] == 0.5
    assert metrics["eval/recall"]["value"] == pytest.approx(2 / 3)
    assert metrics["eval/invalid_ratio"]["value"] == pytest.approx(2 / 3)
    assert metrics["eval/f1"]["low"] <= metrics["eval/f1"]["value"] <= metrics["eval/f1"]["high"]
    f1 = metrics["eval/f1"]
    assert f"{f1['low']:.3f} … {f1['high']:.3f}" in told
    assert "low" not in metrics["eval/ap"]
    assert facts["errors"]["Cls"]["count"] == facts["errors"]["Bkg"]["count"] == 1
    lost = {"missing_box": 1, "not_an_object": 1, "outside_list": 2, "unclosed": 0}
    assert facts["lost"] == {reason: {"objects": number, "answers": 1} for reason, number in lost.items()}
    assert "outside_list" in told
    assert facts["errors_by_number"]["0"] | {"images": 1, "Bkg": 1} == facts["errors_by_number"]["0"]
    assert (facts["num_images"], facts["draws"]) == (3, 1000)
    page = (output / "evaluation.html").read_text(encoding="utf-8")
    text = html.unescape(page)
    for name in ("eval/ap", "eval/ar", "eval/f1", "eval/mean_iou", "eval/acc_50"):
        value = f"{metrics[name]['value']:.3f}"
        assert name in told
        assert value in told
        assert value in text
    assert EVIL in text
    assert EVIL not in page
    assert page.count('<img src="data:image/webp') == 1
    assert page.count("No picture: ") == 2
    assert [path.name for path in output.iterdir() if path.name.startswith(".")] == []


def test_scores_are_made_in_every_way_and_it_is_told_whether_they_help(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels are surer of what is right, boxes of what is wrong; neither product nor mean changes the order."""
    wrong = ("car", (300, 300, 390, 390))
    sure, unsure = {"label": [-0.1, -0.3], "box": [-2.0]}, {"label": [-1.0], "box": [-0.5]}
    lines = [
        line(str(tmp_path / "a.png"), [wrong, CAR, CAT], log_probs=[unsure, sure, sure]),
        line(f"{tmp_path}/{EVIL}.png", [CAT], log_probs=[sure]),
        line("c.png", []),
    ]
    path = write_lines(tmp_path / "scored.jsonl", lines)
    arguments = ("--data", data, "--predictions", path, "--score", "label_mean", "--output", tmp_path / "out")
    assert evaluate(*arguments) == 0
    told = " ".join(capsys.readouterr().out.split())
    facts = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))
    # Behind the wrong box the one car has a precision of a half.
    low, high = pytest.approx(0.75), pytest.approx(1.0)
    assert facts["ap_by_score"] == {
        "label_mean": high, "label_product": high, "box_mean": low, "box_product": low,
        "both_mean": low, "both_product": low, "none": low,
    }  # fmt: skip
    assert facts["metrics"]["eval/ap"]["value"] == high
    assert [each["objects"] for each in facts["calibration"]] == [1, 3]
    assert "Scores do not help beyond chance: AP is 1.000 with and 0.750 without them." in told
    assert "scores by label_mean" in told
    assert evaluate("--data", data, "--compare", path, path, "--score", "box_mean", "--json") == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["eval/ap"]["a"] == low
    bare = write_lines(tmp_path / "bare.jsonl", [line("c.png", [CAR], scores=[0.5])])
    assert evaluate("--data", data, "--predictions", bare, "--score", "box_mean") == 2
    assert "--score needs log_probs" in capsys.readouterr().err
    assert evaluate("--data", data, "--compare", path, bare) == 2
    assert "both files must have scores, or none" in capsys.readouterr().err


def test_two_sets_are_told_side_by_side(
    data: Path, predictions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    better = write_lines(
        tmp_path / "b.jsonl",
        [
            line(str(tmp_path / "a.png"), [CAR, CAT]),
            line(f"{tmp_path}/{EVIL}.png", [CAT]),
            line("c.png", []),
        ],
    )
    assert evaluate("--data", data, "--compare", predictions, better, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert not Path("evaluation").exists()
    assert facts["metrics"]["eval/f1"]["difference"] == pytest.approx(1 - 4 / 7)
    assert facts["metrics"]["eval/f1"]["low"] >= 0.0
    assert evaluate("--data", data, "--compare", predictions, better, "--output", tmp_path / "out") == 0
    assert "difference" in capsys.readouterr().out
    assert "Comparison" in (tmp_path / "out" / "evaluation.html").read_text(encoding="utf-8")


def test_rows_without_a_prediction_count_as_silent_and_end_with_status_1(
    data: Path, predictions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_lines(tmp_path / "one.jsonl", [line("c.png", [])])
    assert evaluate("--data", data, "--predictions", one, "--json") == 1
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert facts["num_without_prediction"] == 2
    assert facts["metrics"]["eval/recall"]["value"] == 0.0
    assert evaluate("--data", data, "--compare", predictions, one, "--output", tmp_path / "out") == 1
    told = "".join(capsys.readouterr().out.split())  # lines end anywhere, also within a path
    assert "one.jsonl:2imageshavenopredictionandcountasemptyanswers." in told
    assert facts["metrics"]["eval/failed_ratio"]["value"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--predictions", "none.jsonl"], "none.jsonl"),
        (["--server", "http://127.0.0.1:1"], "--model"),
        (["--server", "127.0.0.1:1", "--model", "m"], "base_url"),
        (
            ["--server", "http://127.0.0.1:9", "--model", "m"],
            "--server must be a rollout server that answers",
        ),
        (["--predictions", "PREDICTIONS", "--output", "/proc/none"], "--output"),
        (
            ["--server", "http://127.0.0.1:9", "--model", "m", "--output", "/dev/null"],
            "--output must be a folder",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line_and_status_2(
    data: Path, predictions: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(predictions) if word == "PREDICTIONS" else word for word in arguments]
    assert evaluate("--data", data, *arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("swift-stage2 evaluate: error: ")
    assert told in error


@pytest.mark.parametrize(
    "page",
    [Answer(status=404, body=b"<html>"), Answer(body=b"<html>"), Answer(status=501), Answer(status=307)],
)
def test_another_program_at_the_servers_address_is_told_at_once(
    data: Path, page: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeRolloutServer(on_get=lambda call: page, on_infer=lambda call: page) as server:
        assert evaluate("--data", data, "--server", server.url, "--model", "m") == 2
        assert server.infer_calls == []
    (error,) = capsys.readouterr().err.splitlines()
    assert f"{server.url} must be a rollout server, got an answer of another program" in error
    assert "end what listens there, or correct --server, or name --model alone" in error
