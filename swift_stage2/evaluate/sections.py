"""Sections of an evaluation, and of two compared, for the terminal and the page; the worst images as its pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from swift_stage2.data import paper_scores, point_scores
from swift_stage2.data.counted_scores import Bounds
from swift_stage2.data.drawing import Drawing
from swift_stage2.data.point_scores import PointScores
from swift_stage2.data.prediction import LabelledBoxes, Prediction, TrueRow
from swift_stage2.data.scores import ERRORS, DetectionScores
from swift_stage2.report.content import (
    Gallery,
    Part,
    Section,
    Sentence,
    Table,
    Tone,
    filled,
    format_number,
    headline,
)
from swift_stage2.report.quality import COLOURS, picture_of, whether_scores_help

Values = Mapping[str, float]
Intervals = Mapping[str, Bounds]

MEANINGS = {
    "eval/ap": "COCO's AP, mean over IoU 0.5 to 0.95 and classes",
    "eval/ap_without_scores": "the same if every object counts as 1",
    "eval/ece": "expected calibration error: |score - share matched at IoU 0.5|, 10 bins",
    "eval/ap50": "AP at IoU 0.5",
    "eval/ap75": "AP at IoU 0.75",
    "eval/ap_small": "AP of objects below 32 x 32 pixels",
    "eval/ap_medium": "AP of objects from 32 x 32 to below 96 x 96 pixels",
    "eval/ap_large": "AP of larger objects",
    "eval/ar": "COCO's AR with at most 100 boxes per image and class",
    "eval/precision": "matched / predicted, at IoU 0.5",
    "eval/recall": "matched / true, at IoU 0.5",
    "eval/f1": "of precision and recall, at IoU 0.5",
    "eval/precision_50_95": "mean over IoU 0.5 to 0.95",
    "eval/recall_50_95": "mean over IoU 0.5 to 0.95",
    "eval/f1_50_95": "mean over IoU 0.5 to 0.95",
    "eval/mean_iou": "of pairs matched at IoU 0.5",
    **paper_scores.MEANINGS,
    "eval/truncated_ratio": "answers cut off",
    "eval/invalid_ratio": "answers that ended and cannot be read, or not all of their objects",
    "eval/failed_ratio": "rows without an answer",
}
_HEADLINE = {"eval/ap": "AP", "eval/ap50": "AP50", "eval/ar": "AR", "eval/f1": "F1 at IoU 0.5"}
_POINT_HEADLINE = {
    "eval/f1": "F1 within the radius",
    "eval/recall_inside": "Recall inside",
    "eval/mean_distance": "Mean distance",
}
_RATIOS = {"precision": "precision", "recall": "recall", "f1": "F1"}
_OF_BOXES = {"mean_iou": "mean IoU"}
_OF_POINTS = {"mean_distance": "mean distance", "recall_inside": "recall inside", "f1_inside": "F1 inside"}
_KINDS = {
    "class": "By class",
    "objects": "By number of objects in the image",
    "aspect": "By width : height of the true box",
}
_MOST_PARTS, _MOST_PICTURES = 200, 50


def evaluation_sections(
    scores: DetectionScores | PointScores,
    points: Values,
    bounds: Intervals,
    remarks: Sequence[Sentence],
    gallery: Gallery,
    lost: Mapping[str, Mapping[str, int]],
    ap_by_score: Mapping[str, float | None],
) -> tuple[Section, ...]:
    """The whole evaluation; ``points``, ``bounds`` and what is ``lost`` by name, ``remarks`` say how it was done."""
    has_points = isinstance(scores, PointScores)
    meanings = MEANINGS | (point_scores.MEANINGS if has_points else {})
    large = tuple(
        (
            title,
            _value(points, name),
            f"95 % interval {_interval(bounds[name])}" if name in bounds else meanings[name],
        )
        for name, title in (_POINT_HEADLINE if has_points else _HEADLINE).items()
        if name in points or not has_points
    )
    metrics = tuple(
        (name, _value(points, name), _interval(bounds.get(name)), meaning)
        for name, meaning in meanings.items()
        if name in points
    )
    table = Table("", ("metric", "value", "95 % interval", "meaning"), metrics, ends_in_words=True)
    losses = tuple((reason, str(of["objects"]), str(of["answers"])) for reason, of in sorted(lost.items()))
    errors: list[Part] = [] if isinstance(scores, PointScores) else _errors(scores)
    if lost:
        errors.append(Table("What answers lost", ("reason", "objects", "answers"), losses))
    parts = (part for kind in _KINDS for part in _parts(kind, scores, points, bounds))
    about_scores = () if isinstance(scores, PointScores) else _about_scores(scores, points, ap_by_score)
    return (
        Section("scores", "Scores", (headline(large), *remarks, table)),
        *([Section("calibration", "Scores of objects", about_scores)] if about_scores else []),
        Section(
            "parts", "By class and number of objects" + ("" if has_points else " and shape"), tuple(parts)
        ),
        Section("errors", "Errors by type", tuple(errors)),
        Section("gallery", "Worst images", (gallery,)),
    )


def _errors(scores: DetectionScores) -> list[Part]:
    errors = scores.errors()
    kinds = tuple(
        (meaning, format_number(errors[name]["count"]), f"{errors[name]['lost_ap50']:.3f}", name)
        for name, meaning in ERRORS.items()
    )
    by_number = tuple(
        (name, *(format_number(counts[each]) for each in ("images", *ERRORS)))
        for name, counts in scores.errors_by_number().items()
    )
    return [
        Sentence(
            "TIDE's types at IoU 0.5. Lost AP50: how much higher AP50 were without the errors of a type."
        ),
        Table("", ("error", "number", "lost AP50", "TIDE's name"), kinds),
        Table(_KINDS["objects"], ("objects", "images", *ERRORS), by_number),
    ]


def _about_scores(
    scores: DetectionScores, points: Values, ap_by_score: Mapping[str, float | None]
) -> tuple[Part, ...]:
    ways = tuple((name, "–" if ap is None else f"{ap:.3f}") for name, ap in ap_by_score.items())
    bins = tuple(
        (f"{low:.1f} to {high:.1f}", format_number(objects), f"{confidence:.3f}", f"{matched:.3f}")
        for low, high, objects, confidence, matched in scores.calibration
    )
    told = whether_scores_help(scores, points)
    by_way = Table("AP by score", ("score", "AP"), ways)
    by_bin = Table("Calibration", ("score", "objects", "mean score", "matched at IoU 0.5"), bins)
    return filled([Sentence(told) if told else None, by_way, by_bin])


def comparison_sections(
    first: Values, second: Values, bounds: Intervals, remarks: Sequence[Sentence]
) -> tuple[Section, ...]:
    """Both sets' metrics, their difference, and its interval over the same drawn images."""
    told = Sentence(
        "The difference is B minus A, with a 95 % interval over draws of the images, the same for both. It is beyond "
        "chance where its interval leaves out 0; of many that are looked at, one in twenty is so by chance."
    )
    classes = [name for name in first if name.startswith("class/") and name.endswith(("/ap", "/f1"))]
    names = MEANINGS | point_scores.MEANINGS
    metrics, by_class = (_differences(each, first, second, bounds) for each in (names, classes))
    return (
        Section("comparison", "Comparison", (*remarks, told, metrics)),
        Section("classes", "By class", (by_class,)),
    )


def _differences(metrics: Iterable[str], first: Values, second: Values, bounds: Intervals) -> Table:
    rows: list[tuple[str, ...]] = []
    tones: dict[int, Tone] = {}
    for name in metrics:
        if name not in first or name not in second:
            continue
        found, verdict = bounds.get(name), "–"
        if found is not None:
            verdict = "B is better" if found.low > 0 else "A is better" if found.high < 0 else "within chance"
        if verdict.endswith("better"):
            tones[len(rows)] = Tone.GOOD if verdict[0] == "B" else Tone.BAD
        difference = f"{second[name] - first[name]:+.3f}"
        rows.append(
            (name, _value(first, name), _value(second, name), difference, _interval(found, "+.3f"), verdict)
        )
    headings = ("metric", "A", "B", "difference", "95 % interval", "verdict")
    return Table("", headings, tuple(rows), tones, ends_in_words=True)


def _parts(
    kind: str, scores: DetectionScores | PointScores, points: Values, bounds: Intervals
) -> Iterator[Part]:
    counts = {name: each for name, each in scores.counts(kind).items() if each.true or each.predicted}
    if not counts:
        return
    names = list(counts)
    if kind == "class":
        names.sort(key=lambda name: (-counts[name].true, -counts[name].predicted))
        if unknown := [name for name in names if not counts[name].true]:
            yield Sentence(
                f"{len(unknown)} predicted label(s) that no true object has, as {unknown[0]!r}: precision and F1 count "
                "them as false"
                + ("." if isinstance(scores, PointScores) else ", COCO's AP leaves them out."),
                Tone.WARN,
            )
        if len(names) > _MOST_PARTS:
            yield Sentence(f"The {_MOST_PARTS} most frequent of {len(names)} classes; the JSON has all.")
    if isinstance(scores, PointScores):
        columns = {
            name: title for name, title in _OF_POINTS.items() if scores.has_regions or "inside" not in name
        }
    else:
        columns = _OF_BOXES | ({"ap": "AP"} if kind == "class" else {})
    columns = _RATIOS | columns
    rows = []
    for name in names[:_MOST_PARTS]:
        values = (_value(points, f"{kind}/{name}/{each}") for each in columns)
        sizes = format_number(counts[name].true), format_number(counts[name].predicted)
        rows.append((name, *sizes, *values, _interval(bounds.get(f"{kind}/{name}/f1"))))
    headings = (kind, "true", "predicted", *columns.values(), "95 % interval of F1")
    yield Table(_KINDS[kind], headings, tuple(rows))


def _value(points: Values, name: str) -> str:
    return f"{points[name]:.3f}" if name in points else "–"


def _interval(found: Bounds | None, form: str = ".3f") -> str:
    return f"{found.low:{form}} … {found.high:{form}}" if found else "–"


def worst_images(
    rows: Sequence[TrueRow],
    predictions: Sequence[Prediction | None],
    scores: DetectionScores | PointScores,
) -> Gallery:
    """Some images, those with the most objects missed or invented first. Opens their files."""
    found = [
        (row, prediction, matched, prediction.objects if prediction else LabelledBoxes())
        for row, prediction, matched in zip(rows, predictions, scores.matched, strict=True)
    ]
    found.sort(key=lambda each: 2 * len(each[2]) - len(each[0].truth) - len(each[3].ref))
    pictures = []
    for row, prediction, matched, objects in found[:_MOST_PICTURES]:
        truth = tuple(zip(row.truth.labels, row.truth.boxes, strict=True))
        predicted = tuple(zip(objects.ref, objects.bbox, strict=True))
        end = f"ended by: {prediction.finish_reason or 'not told'}" if prediction else "no answer"
        answer = (prediction.answer if prediction else None) or _listed(predicted)
        texts = (("Answer", answer), ("Truth", _listed(truth)))
        facts = (end, f"row {row.number} of the data")
        pictures.append(picture_of(Drawing(truth, predicted, matched), row.image, facts, texts))
    shown = (
        f"{format_number(len(pictures))} of {format_number(len(rows))} images, those with the most objects "
    )
    return Gallery(f"{shown}missed or invented first. {COLOURS}", tuple(pictures))


def _listed(objects: Sequence[tuple[str, Sequence[float]]]) -> str:
    return "\n".join(f"{label}: {', '.join(f'{value:g}' for value in box)}" for label, box in objects)
