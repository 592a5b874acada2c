"""``swift-stage2 evaluate``: predictions of a file or a model against a data set's truth; tables, JSON and a page out.

Exit status: 0 every row has a prediction, 1 some have none (they count as empty answers), 2 the user's mistake.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from swift_stage2.checks.model import check_hub_ids, check_model, recorded_plugins
from swift_stage2.config import ServerEngine
from swift_stage2.config.yaml_text import key_values
from swift_stage2.detections.objects import ScoreConvention, detection_data
from swift_stage2.detections.prediction import FAILED, Prediction, answer_flags, dropped_objects
from swift_stage2.detections.prediction_files import (
    TrueRow,
    answer_dialect,
    check_folder,
    read_predictions,
    read_rows,
    write_file,
    write_predictions,
)
from swift_stage2.detections.scores import DetectionScores
from swift_stage2.errors import UserError
from swift_stage2.evaluate.gallery import worst_images
from swift_stage2.evaluate.intervals import DEFAULT_DRAWS, Interval, affordable_draws, difference, intervals
from swift_stage2.evaluate.sections import comparison_sections, evaluation_sections, told_apart
from swift_stage2.evaluate.served_model import ENGINES, OwnServer, own_server, require_answer
from swift_stage2.pages.content import GALLERY_KEY, Gallery, Section, Sentence, Tone
from swift_stage2.pages.page import PageContent, page_of, write_page
from swift_stage2.pages.terminal import terminal_report
from swift_stage2.terminal.console import SafeConsole
from swift_stage2.terminal.output import needs_stdout, quieten_libraries, say
from swift_stage2.terminal.parser import CommandParser, whole_number
from swift_stage2.terminal.progress import going_on, progress_bar

EXIT_INCOMPLETE = 1
PREDICTIONS_FILE = "predictions.jsonl"
_FOLDER = Path("evaluation")
_MOST_DRAWS = 100_000  # minutes, of the smallest set
_MOST_SECONDS = 86_400
_MOST_CALLS = 1024  # each has a thread
_MISSING = "{:,} images have no prediction and count as empty answers."
_CONVENTIONS: dict[str, str] = {
    "given": "scores as given",
    ScoreConvention.ONE: "no scores: all count as 1, and COCO's AP takes them in the order of the data "
    "(--score-convention)",
    ScoreConvention.ORDER: "no scores: an object's place in its answer counts as one, the first as the surest "
    "(--score-convention)",
}


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """One set of predictions with its scores. ``convention`` is "given" where the predictions bring scores."""

    predictions: Sequence[Prediction | None]
    scores: DetectionScores
    convention: str

    @property
    def num_missing(self) -> int:
        return sum(each is None or each.finish_reason == FAILED for each in self.predictions)


@dataclass(frozen=True, slots=True)
class _Told:
    facts: dict[str, Any]
    sections: tuple[Section, ...]
    gallery: Gallery
    num_missing: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Raises:
        UserError: a file cannot be used or written, or the server does not answer.
    """
    options = parse_options(argv)
    rows = read_rows(options.data)
    if _asks(options) or options.output or not options.json:
        check_folder(options.output or _FOLDER)
    told = _compare(rows, options) if options.compare else _evaluate(rows, options)
    facts = {"data": str(options.data), "num_images": len(rows)} | told.facts
    with needs_stdout("an evaluation"):
        _tell(replace(told, facts=facts), options)
    return EXIT_INCOMPLETE if told.num_missing else 0


def _evaluate(rows: Sequence[TrueRow], options: argparse.Namespace) -> _Told:
    predictions = _ask(rows, options) if _asks(options) else read_predictions(options.predictions, rows)
    found = _score(rows, predictions, options)
    num_draws = affordable_draws(found.scores, options.bootstrap)
    points, bounds = found.scores.points(), intervals(found.scores.values, len(rows), num_draws)
    gallery = worst_images(rows, predictions, found.scores, options.gallery)
    dropped = dropped_objects(predictions, answer_dialect(rows))
    facts = {
        "source": str(options.server or options.predictions or options.model),
        "num_without_prediction": found.num_missing,
        "score_convention": found.convention,
        "draws": num_draws,
        "metrics": {name: {"value": value} | _bounds(bounds, name) for name, value in points.items()},
        "errors": found.scores.errors(),
        "dropped_objects": dropped,
    }
    sections = evaluation_sections(
        found.scores, points, bounds, list(_remarks(found, num_draws)), gallery, dropped
    )
    return _Told(facts, sections, gallery, found.num_missing)


def _compare(rows: Sequence[TrueRow], options: argparse.Namespace) -> _Told:
    first, second = (_score(rows, read_predictions(path, rows), options) for path in options.compare)
    num_draws = min(affordable_draws(each.scores, options.bootstrap) for each in (first, second))
    bounds = intervals(difference(first.scores, second.scores), len(rows), num_draws)
    before, after = first.scores.points(), second.scores.points()
    facts = {
        **dict(zip(("a", "b"), map(str, options.compare), strict=True)),
        "num_without_prediction": [first.num_missing, second.num_missing],
        "score_convention": [first.convention, second.convention],
        "draws": num_draws,
        "metrics": {
            name: {"a": before[name], "b": after[name], "difference": after[name] - before[name]}
            | _bounds(bounds, name)
            for name in before
            if name in after
        },
    }
    missing = [
        Sentence(f"{path}: {_MISSING.format(found.num_missing)}", Tone.BAD)
        for path, found in zip(options.compare, (first, second), strict=True)
        if found.num_missing
    ]
    names = told_apart(*map(Path, options.compare))
    sections = comparison_sections(names, before, after, bounds, num_draws, missing)
    no_pictures = Gallery(pictures=(), num_matches=0)
    return _Told(facts, sections, no_pictures, first.num_missing + second.num_missing)


def _score(
    rows: Sequence[TrueRow], predictions: Sequence[Prediction | None], options: argparse.Namespace
) -> _Evaluated:
    data = detection_data([row.truth for row in rows], predictions, ScoreConvention(options.score_convention))
    has_scores = any(each and each.scores is not None for each in predictions)
    convention = "given" if has_scores else options.score_convention
    return _Evaluated(
        predictions, DetectionScores(data, answer_flags(predictions, answer_dialect(rows))), convention
    )


def _bounds(bounds: Mapping[str, Interval], name: str) -> dict[str, float]:
    return asdict(bounds[name]) if name in bounds else {}


def _remarks(found: _Evaluated, num_draws: int) -> Iterator[Sentence]:
    yield Sentence(f"{len(found.predictions):,} images; {_CONVENTIONS[found.convention]}.")
    if num_draws:
        yield Sentence(f"Intervals: {num_draws:,} draws of as many images, with replacement.")
    if found.num_missing:
        yield Sentence(_MISSING.format(found.num_missing), Tone.BAD)


def _ask(rows: Sequence[TrueRow], options: argparse.Namespace) -> Sequence[Prediction]:
    if not options.model:
        raise UserError("--server needs --model DIR, whose template says what boxes are measured in; give it")
    if options.server:
        require_answer(options.server)  # before anything slow
    swift, folder = key_values(options.swift), options.output or _FOLDER
    arguments = {**swift, "model": options.model}
    check_model(arguments, of="--")
    check_hub_ids(arguments, of="--")
    if not swift.get("external_plugins"):
        recorded_plugins(Path(options.model), "--swift external_plugins=FILE")
    with ExitStack() as stack:
        own = None
        if not options.server:
            engine = ServerEngine(options.engine or ServerEngine.TRANSFORMERS)
            own = stack.enter_context(own_server(options.model, engine, swift, folder))
        found = _answers(rows, options, swift, own)
    path = folder / PREDICTIONS_FILE
    write_predictions(path, found)
    say(f"predictions: {path}", is_error=True)
    return found


def _answers(
    rows: Sequence[TrueRow], options: argparse.Namespace, swift: Mapping[str, Any], own: OwnServer | None
) -> Sequence[Prediction]:
    quieten_libraries()  # here alone: the log of our own server shall tell all
    with going_on("evaluate", "loading torch"):
        from swift_stage2.evaluate import asking

    questions = asking.AskingSettings(
        dialect=answer_dialect(rows),
        max_new_tokens=options.max_new_tokens,
        timeout_s=options.timeout_s,
        num_in_flight=options.in_flight,
    )
    with ExitStack() as stack:
        with going_on("evaluate", "loading the model's template"):
            encoder = stack.enter_context(asking.model_encoder(options.model, options.data, swift))
        if own is not None:
            own.wait()  # deadline: its own, of a server that loads
        base_url = own.base_url if own else options.server
        with progress_bar(len(rows), "answers") as move_to:
            return asking.ask_server(base_url, rows, encoder, questions, move_to)


def _tell(told: _Told, options: argparse.Namespace) -> None:
    text = json.dumps(told.facts, indent=1)
    if options.json:
        say(*text.splitlines())
    else:
        SafeConsole().print(terminal_report(told.sections))
    if options.json and options.output is None:
        return
    folder = options.output or _FOLDER
    write_file(folder / "evaluation.json", text + "\n")
    content = PageContent(
        heading="Comparison" if options.compare else "Evaluation",
        places=[told.facts[name] for name in ("data", "source", "a", "b") if name in told.facts],
        state=f"{told.facts['num_images']:,} images",
        sections=told.sections,
        galleries={GALLERY_KEY: told.gallery},
    )
    write_page(folder / "evaluation.html", page_of(content))
    if not options.json:
        say(f"page: {folder / 'evaluation.html'}")


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the process as argparse does when it makes no sense."""
    parser = CommandParser(
        prog="swift-stage2 evaluate",
        description="Standard detection metrics: COCO's AP and AR, precision, recall and F1 with 95 % intervals, by "
        "class, number and size of objects, and TIDE's error types. Compares two sets of predictions image by image.",
        exit_statuses="0 every row has a prediction; 1 some have none",
    )
    parser.add_argument(
        "--data", required=True, type=Path, metavar="FILE.jsonl", help="rows with their true objects"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--predictions", type=Path, metavar="FILE.jsonl", help="a file of predictions")
    source.add_argument("--server", metavar="URL", help="a running rollout server of --model, asked greedily")
    source.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A.jsonl", "B.jsonl"), help="two files of predictions"
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a checkpoint to ask; without --server one of our own serves it while the command runs",
    )
    parser.add_argument(
        "--engine", choices=[str(each) for each in ENGINES], help="of that server (default transformers)"
    )
    parser.add_argument(
        "--swift",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --model: an argument of ms-swift, as max_pixels=1003520, or vllm_… of --engine vllm; may be "
        "repeated",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help=f"folder for the files (default {_FOLDER})"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON; page and evaluation.json are then written only with --output",
    )
    parser.add_argument(
        "--score-convention",
        choices=[str(each) for each in ScoreConvention],
        default=str(ScoreConvention.ONE),
        help="scores of objects that have none (default %(default)s)",
    )
    parser.add_argument(
        "--bootstrap",
        type=whole_number(0, _MOST_DRAWS),
        default=DEFAULT_DRAWS,
        metavar="N",
        help="draws for the intervals, fewer of very large sets; 0 for none (default %(default)s)",
    )
    parser.add_argument(
        "--gallery",
        type=whole_number(0),
        default=50,
        metavar="N",
        help="worst images on the page (default %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=whole_number(1),
        default=1024,
        metavar="N",
        help="per answer (default %(default)s)",
    )
    parser.add_argument(
        "--timeout-s",
        type=whole_number(1, _MOST_SECONDS),
        default=300,
        metavar="S",
        help="deadline of a call (default %(default)s)",
    )
    parser.add_argument(
        "--in-flight",
        type=whole_number(1, _MOST_CALLS),
        default=16,
        metavar="N",
        help="rows asked at once (default %(default)s)",
    )
    options = parser.parse_args(argv)
    if not (options.predictions or options.compare or options.model or options.server):
        parser.error("one of --model, --server, --predictions and --compare is required")
    if options.engine and not (_asks(options) and not options.server):
        parser.error("--engine is of the server that --model alone starts; leave it out")
    return options


def _asks(options: argparse.Namespace) -> bool:
    return not (options.predictions or options.compare)
