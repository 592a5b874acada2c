"""``swift-stage2 evaluate``: predictions of a file or a model against a data set's truth; tables, JSON and a page out.

Exit status: 0 every row has a prediction, 1 some have none (they count as empty answers), 2 the user's mistake.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from swift_stage2.channel_b.object_scores import DEFAULT_WAY, ScoreWay
from swift_stage2.checks.model import check_model, recorded_plugins
from swift_stage2.config import ServerEngine
from swift_stage2.config.yaml_text import set_values
from swift_stage2.data.counted_scores import Bounds
from swift_stage2.data.files import coordinates_in
from swift_stage2.data.paper_scores import all_points
from swift_stage2.data.point_scores import RADIUS_SHARE, PointScores
from swift_stage2.data.prediction import (
    FAILED,
    Prediction,
    TrueRow,
    answer_dialect,
    answer_flags,
    check_folder,
    coordinates_of_rows,
    log_probs_of,
    lost_objects,
    read_predictions,
    read_rows,
    write_file,
    write_predictions,
)
from swift_stage2.data.scores import DetectionScores, detection_data
from swift_stage2.errors import UserError
from swift_stage2.evaluate.sections import comparison_sections, evaluation_sections, worst_images
from swift_stage2.evaluate.served_model import ENGINES, own_server, require_answer
from swift_stage2.report.content import PageContent, Section, Sentence, Tone, page_of, terminal_report
from swift_stage2.runtime.output import SafeConsole, going_on, progress_bar, quieten_libraries, say
from swift_stage2.runtime.parser import CommandParser, real_number, whole_number

EXIT_INCOMPLETE = 1
PREDICTIONS_FILE = "predictions.jsonl"
_FOLDER = Path("evaluation")
_NUM_DRAWS = 1000
_NO_SCORE = "none"
_MISSING = "{:,} images have no prediction and count as empty answers."


_Told = tuple[dict[str, Any], tuple[Section, ...], int]
"""Facts, sections, and how many rows have no prediction."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Raises:
        UserError: a file cannot be used or written, or the server does not answer.
    """
    options = parse_options(argv)
    rows = read_rows(options.data, coordinates_in([options.data]))
    has_points = coordinates_of_rows(rows) == 2
    if (options.radius and not has_points) or (has_points and options.score and not _asks(options)):
        rule, what = ("--score is of boxes", "points") if has_points else ("--radius is of points", "boxes")
        raise UserError(rule, got=f"{options.data}, which has {what}", remedy="leave it out")
    if _asks(options) or options.output or not options.json:
        check_folder(options.output or _FOLDER)
    facts, sections, num_missing = (_compare if options.compare else _evaluate)(rows, options)
    head = {"data": str(options.data), "num_images": len(rows), "draws": _NUM_DRAWS}
    head |= {"radius": options.radius} if options.radius else {}
    _tell(head | facts, sections, options)
    return EXIT_INCOMPLETE if num_missing else 0


def _evaluate(rows: Sequence[TrueRow], options: argparse.Namespace) -> _Told:
    predictions = _ask(rows, options) if _asks(options) else _read(options.predictions, rows, options)
    scores, num_missing = _score(rows, predictions, options.radius), _num_missing(predictions)
    points, bounds = _points(scores), scores.intervals(_NUM_DRAWS)
    gallery = worst_images(rows, predictions, scores)
    how = _how(scores, options)
    remarks = [Sentence(f"{len(rows):,} images; {how}. Intervals: {_NUM_DRAWS:,} draws of as many images.")]
    if num_missing:
        remarks.append(Sentence(_MISSING.format(num_missing), Tone.BAD))
    lost = lost_objects(predictions, answer_dialect(rows))
    facts = {
        "source": str(options.server or options.predictions or options.model),
        "how": how,
        "num_without_prediction": num_missing,
        "metrics": {name: {"value": value} | _bounds(bounds, name) for name, value in points.items()},
        "lost": lost,
    }
    by_score = dict[str, float | None]()
    if not isinstance(scores, PointScores):
        by_score = _ap_by_score(scores, predictions)
        facts |= {
            "ap_by_score": by_score,
            "calibration": [each._asdict() for each in scores.calibration],
            "errors": scores.errors(),
            "errors_by_number": scores.errors_by_number(),
        }
    sections = evaluation_sections(scores, points, bounds, remarks, gallery, lost, by_score)
    return facts, sections, num_missing


def _ap_by_score(
    scores: DetectionScores, predictions: Sequence[Prediction | None]
) -> dict[str, float | None]:
    """AP by the way of making scores; nothing where log-probabilities do not tell."""
    if not (log_probs := log_probs_of(predictions)):
        return {}
    by_way = {str(way): [each.score(way) for each in log_probs] for way in ScoreWay}
    tried = {**by_way, _NO_SCORE: [1.0] * len(log_probs)}
    return {name: scores.ap_with(np.array(values)) for name, values in tried.items()}


def _read(path: Path, rows: Sequence[TrueRow], options: argparse.Namespace) -> list[Prediction | None]:
    """Raises UserError: they have no log-probabilities for the scores that are asked for."""
    found = read_predictions(path, rows)
    if options.score is None:
        return found
    if options.score != _NO_SCORE and log_probs_of(found) is None:
        raise UserError(
            "--score needs log_probs in every line",
            got=f"{path} without",
            remedy=f"leave it out or write {_NO_SCORE}, or ask the model again",
        )
    way = _way(found, options)
    return [each and each.scored(way) for each in found]


def _way(predictions: Sequence[Prediction | None], options: argparse.Namespace) -> ScoreWay | None:
    """The way that is asked for; None for no scores, also where log-probabilities do not give them."""
    given = options.score != _NO_SCORE and log_probs_of(predictions) is not None
    return ScoreWay(options.score) if given else None


def _compare(rows: Sequence[TrueRow], options: argparse.Namespace) -> _Told:
    both = [_read(path, rows, options) for path in options.compare]
    first, second = (_score(rows, each, options.radius) for each in both)
    if isinstance(first, DetectionScores) and isinstance(second, DetectionScores):
        told = [each.data.has_scores for each in (first, second) if len(each.data.predicted)]
        if len(set(told)) > 1:
            raise UserError(
                "both files must have scores, or none", got="one has", remedy=f"write --score {_NO_SCORE}"
            )
    how, bounds = _how(first, options), second.intervals(_NUM_DRAWS, minus=first)
    before, after = _points(first), _points(second)
    missing = list(map(_num_missing, both))
    remarks = [Sentence(f"{name}: {path}") for name, path in zip("AB", options.compare, strict=True)]
    remarks.append(Sentence(f"{how}."))
    remarks += [
        Sentence(f"{path}: {_MISSING.format(num)}", Tone.BAD)
        for path, num in zip(options.compare, missing, strict=True)
        if num
    ]
    facts = {
        **dict(zip(("a", "b"), map(str, options.compare), strict=True)),
        "how": how,
        "num_without_prediction": missing,
        "metrics": {
            name: {"a": before[name], "b": after[name], "difference": after[name] - before[name]}
            | _bounds(bounds, name)
            for name in before
            if name in after
        },
    }
    return facts, comparison_sections(before, after, bounds, remarks), sum(missing)


def _score(
    rows: Sequence[TrueRow], predictions: Sequence[Prediction | None], radius: float | None
) -> DetectionScores | PointScores:
    flags = answer_flags(predictions, answer_dialect(rows))
    if coordinates_of_rows(rows) == 2:
        return PointScores(rows, predictions, flags, radius)
    return DetectionScores(detection_data([row.truth for row in rows], predictions), flags)


def _points(scores: DetectionScores | PointScores) -> dict[str, float]:
    return scores.points() if isinstance(scores, PointScores) else all_points(scores)


def _how(scores: DetectionScores | PointScores, options: argparse.Namespace) -> str:
    if isinstance(scores, PointScores):
        radius = options.radius
        most = f"{radius:g} pixels" if radius else f"{RADIUS_SHARE:g} of the image's diagonal"
        return f"radius {most}" + ("" if scores.has_regions else "; some rows lack objects.region")
    if scores.data.has_scores:
        return f"scores by {options.score}" if options.score else "scores as given"
    lacking = "; the server gave no log-probabilities of tokens that spell every answer"
    how = "no scores: all objects count as 1, and AP takes them in their order"
    return how + (lacking if _asks(options) and options.score != _NO_SCORE else "")


def _num_missing(predictions: Sequence[Prediction | None]) -> int:
    return sum(each is None or each.finish_reason == FAILED for each in predictions)


def _bounds(bounds: Mapping[str, Bounds], name: str) -> dict[str, float]:
    return bounds[name]._asdict() if name in bounds else {}


def _ask(rows: Sequence[TrueRow], options: argparse.Namespace) -> Sequence[Prediction]:
    path = (options.output or _FOLDER) / PREDICTIONS_FILE
    found = ask(rows, options, path.parent)
    way = _way(found, options)
    found = [each.scored(way) for each in found]
    write_predictions(path, found)
    say(f"predictions: {path}", is_error=True)
    return found


def ask(rows: Sequence[TrueRow], options: argparse.Namespace, folder: Path, **more: Any) -> list[Prediction]:
    """A prediction per row, as ``ask_server`` has it; ``folder`` gets the log of a server of our own.

    ``more`` are further ``AskingSettings``. Raises UserError: model or server cannot be used.
    """
    if not options.model:
        raise UserError(
            "--server needs --model DIR, whose template says what boxes are measured in", remedy="give it"
        )
    if options.server:
        require_answer(options.server)  # before anything slow
    swift = set_values({}, options.swift, "--swift")
    arguments = {**swift, "model": options.model}
    check_model(arguments, of="--")
    if not swift.get("external_plugins"):
        recorded_plugins(Path(options.model), "--swift external_plugins=FILE")
    with ExitStack() as stack:
        base_url = options.server
        if not base_url:
            engine = ServerEngine(options.engine or ServerEngine.TRANSFORMERS)
            base_url = stack.enter_context(own_server(options.model, engine, swift, folder))
        quieten_libraries()  # here alone: the log of our own server shall tell all
        with going_on("evaluate", "loading torch and the model's template"):
            from swift_stage2.evaluate import asking

            encoder = stack.enter_context(asking.model_encoder(options.model, options.data, swift))
        questions = asking.AskingSettings(
            dialect=answer_dialect(rows),
            max_new_tokens=options.max_new_tokens,
            timeout_s=options.timeout_s,
            num_in_flight=options.in_flight,
            **more,
        )
        with progress_bar(len(rows), "answers") as move_to:
            begun = time.monotonic()
            found = asking.ask_server(base_url, rows, encoder, questions, move_to)
            objects_per_s = sum(len(each.objects.bbox) for each in found) / (time.monotonic() - begun)
    by = options.server or f"engine {options.engine or ServerEngine.TRANSFORMERS}"
    say(f"speed: {objects_per_s:.1f} objects/s with --in-flight {options.in_flight}, {by}", is_error=True)
    return found


def _tell(facts: dict[str, Any], sections: Sequence[Section], options: argparse.Namespace) -> None:
    text = json.dumps(facts, indent=1)
    if options.json:
        say(*text.splitlines())
    else:
        SafeConsole().print(terminal_report(sections))
    if options.json and options.output is None:
        return
    folder = options.output or _FOLDER
    write_file(folder / "evaluation.json", text + "\n")
    content = PageContent(
        heading="Comparison" if options.compare else "Evaluation",
        places=[facts[name] for name in ("data", "source", "a", "b") if name in facts],
        state=f"{facts['num_images']:,} images",
        sections=sections,
    )
    write_file(folder / "evaluation.html", page_of(content))
    if not options.json:
        say(f"page: {folder / 'evaluation.html'}")


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the process as argparse does when it makes no sense."""
    parser = CommandParser(
        prog="swift-stage2 evaluate",
        description="Standard detection metrics: COCO's AP and AR, precision, recall and F1 with 95 % intervals, by "
        "class and number of objects, and TIDE's error types; of points their ratios and distance. Compares two sets "
        "of predictions image by image.",
        exit_statuses="0 every row has a prediction; 1 some have none",
    )
    add = parser.add_argument
    add("--data", required=True, type=Path, metavar="FILE.jsonl", help="rows with their true objects")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--predictions", type=Path, metavar="FILE.jsonl", help="a file of predictions")
    source.add_argument("--server", metavar="URL", help="a running rollout server of --model, asked greedily")
    places = ("A.jsonl", "B.jsonl")
    source.add_argument("--compare", nargs=2, type=Path, metavar=places, help="two files of predictions")
    model_help = "a checkpoint to ask; without --server one of our own serves it while the command runs"
    add("--model", metavar="DIR", help=model_help)
    add("--output", type=Path, metavar="DIR", help=f"folder for the files (default {_FOLDER})")
    radius_help = (
        f"of points: the most that a pair is apart (default {RADIUS_SHARE:g} of the image's diagonal)"
    )
    add("--radius", type=real_number("a number above 0"), metavar="PIXELS", help=radius_help)
    json_help = "print JSON; page and evaluation.json are then written only with --output"
    add("--json", action="store_true", help=json_help)
    score_help = f"how objects are scored (default: as files have it; of answers {DEFAULT_WAY})"
    add("--score", choices=[*map(str, ScoreWay), _NO_SCORE], help=score_help)
    add_asking_options(parser)
    options = parser.parse_args(argv)
    if _asks(options) and options.score is None:
        options.score = str(DEFAULT_WAY)
    if not (options.predictions or options.compare or options.model or options.server):
        parser.error("one of --model, --server, --predictions and --compare is required")
    if options.engine and not (_asks(options) and not options.server):
        parser.error("--engine is of the server that --model alone starts; leave it out")
    return options


def add_asking_options(parser: argparse.ArgumentParser) -> None:
    """Those of how a model is asked."""
    add = parser.add_argument
    add("--engine", choices=[str(each) for each in ENGINES], help="of that server (default transformers)")
    swift_help = "with --model: an argument of ms-swift, as max_pixels=1003520, or vllm_… of --engine vllm"
    add("--swift", action="append", default=[], metavar="KEY=VALUE", help=swift_help)
    add("--max-new-tokens", type=whole_number(1), default=1024, metavar="N", help="per answer (default 1024)")
    add(
        "--timeout-s", type=whole_number(1), default=300, metavar="S", help="deadline of a call (default 300)"
    )
    add("--in-flight", type=whole_number(1), default=16, metavar="N", help="rows asked at once (default 16)")


def _asks(options: argparse.Namespace) -> bool:
    return not (options.predictions or options.compare)
