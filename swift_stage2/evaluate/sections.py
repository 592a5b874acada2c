"""Sections of an evaluation, and of two compared, for the terminal and the page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from swift_stage2.detections.scores import ERRORS, DetectionScores, parts_of
from swift_stage2.evaluate.intervals import Interval
from swift_stage2.pages.content import (
    GALLERY_KEY,
    Chart,
    Gallery,
    Headline,
    Mark,
    Part,
    Section,
    Sentence,
    Series,
    Table,
    Tone,
    filled,
    number,
    pairs,
)

Values = Mapping[str, float]
Intervals = Mapping[str, Interval]

MEANINGS = {
    "eval/ap": "COCO's AP, mean over IoU 0.5 to 0.95 and classes",
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
    "eval/truncated_ratio": "answers cut off",
    "eval/invalid_ratio": "answers that ended and cannot be read, or not all of their objects",
    "eval/failed_ratio": "rows without an answer",
}
_HEADLINE = {"eval/ap": "AP", "eval/ap50": "AP50", "eval/ar": "AR", "eval/f1": "F1 at IoU 0.5"}
_RATIOS = ("precision", "recall", "f1", "mean_iou")
_PARTS = {"objects": "By number of objects in the image", "size": "By size of the object"}
_MOST_CLASSES = 200
_OF_F1 = "95 % interval of F1"


def evaluation_sections(
    scores: DetectionScores,
    points: Values,
    bounds: Intervals,
    remarks: Sequence[Sentence],
    gallery: Gallery,
    dropped: Mapping[str, int] | None,
) -> tuple[Section, ...]:
    """The whole evaluation; ``points`` and ``bounds`` by name, ``remarks`` say how it was done.

    ``dropped``: objects that the parser dropped, by reason; None where that is not known.
    """
    errors = scores.errors()
    lost = (
        (meaning, number(errors[name]["count"]), f"{errors[name]['lost_ap50']:.3f}", name)
        for name, meaning in ERRORS.items()
    )
    return (
        Section(
            "scores",
            "Scores",
            (
                Headline(tuple(_headline(points, bounds))),
                *remarks,
                Table(
                    "",
                    ("metric", "value", "95 % interval", "meaning"),
                    tuple(_metrics(points, bounds)),
                    ends_in_words=True,
                ),
                _by_threshold(points, bounds),
            ),
        ),
        Section("classes", "By class", tuple(_classes(scores, points, bounds))),
        Section(
            "parts",
            "By number and size of objects",
            filled(_parts(kind, title, points, bounds) for kind, title in _PARTS.items()),
        ),
        Section(
            "errors",
            "Errors by type",
            (
                Sentence(
                    "TIDE's types at IoU 0.5. Lost AP50: how much higher AP50 were without the errors of a type."
                ),
                Table("", ("error", "number", "lost AP50", "TIDE's name"), tuple(lost)),
                *_dropped(dropped),
            ),
        ),
        Section(
            GALLERY_KEY,
            "Worst images",
            (
                Sentence(
                    f"{number(len(gallery.pictures))} of {number(gallery.num_matches)} images, those with the most "
                    "objects missed or invented first."
                ),
            ),
        ),
    )


def told_apart(first: Path, second: Path) -> tuple[str, str]:
    """Their names: as many of the last parts of each path as it takes."""
    for num_parts in range(1, max(len(first.parts), len(second.parts)) + 1):
        names = [str(Path(*path.parts[-num_parts:])) for path in (first, second)]
        if names[0] != names[1]:
            return names[0], names[1]
    return f"{first} (first)", f"{second} (second)"


def comparison_sections(
    names: Sequence[str],
    first: Values,
    second: Values,
    bounds: Intervals,
    num_draws: int,
    remarks: Sequence[Sentence] = (),
) -> tuple[Section, ...]:
    """Both sets' metrics, their difference, and its interval over the same drawn images. ``names`` of the two sets."""
    shown = [name for name in MEANINGS if name in first and name in second]
    classes = [f"class/{name}/{metric}" for name in parts_of(list(first), "class") for metric in ("ap", "f1")]
    told = Sentence(
        f"The difference is {names[1]} minus {names[0]}, with a 95 % interval over {num_draws} draws of the images, "
        "the same for both. It is beyond "
        "chance where its interval leaves out 0; of many that are looked at, one in twenty is so by chance."
    )
    return (
        Section(
            "comparison", "Comparison", (*remarks, told, _differences(names, shown, first, second, bounds))
        ),
        Section("classes", "By class", filled([_differences(names, classes, first, second, bounds)])),
    )


def _differences(
    names: Sequence[str], metrics: Sequence[str], first: Values, second: Values, bounds: Intervals
) -> Table:
    rows: list[tuple[str, ...]] = []
    tones: dict[int, Tone] = {}
    for name in metrics:
        if name not in first or name not in second:
            continue
        found, verdict = bounds.get(name), "within chance"
        if found is None:
            verdict = "–"
        elif found.low > 0 or found.high < 0:
            more_is_worse = name.endswith(("truncated_ratio", "invalid_ratio", "failed_ratio"))
            is_gain = (found.low > 0) is not more_is_worse
            verdict = f"{names[is_gain]} is better"
            tones[len(rows)] = Tone.GOOD if is_gain else Tone.BAD
        values = f"{first[name]:.3f}", f"{second[name]:.3f}", f"{second[name] - first[name]:+.3f}"
        rows.append((name, *values, _interval(found, "+.3f"), verdict))
    return Table(
        "",
        ("metric", *names, "difference", "95 % interval", "verdict"),
        tuple(rows),
        tones,
        ends_in_words=True,
    )


def _dropped(dropped: Mapping[str, int] | None) -> Iterator[Part]:
    if dropped is None:
        yield Sentence("How many objects were dropped is not known: the predictions bring no answers.")
    elif not dropped:
        yield Sentence("No object of the answers was dropped.")
    else:
        total = sum(dropped.values())
        yield Sentence(
            f"{number(total)} object(s) of the answers could not be read and were dropped.", Tone.WARN
        )
        yield pairs(
            "Dropped objects", {why: number(count) for why, count in dropped.items()}, ("reason", "number")
        )


def _headline(points: Values, bounds: Intervals) -> Iterator[tuple[str, str, str]]:
    for name, title in _HEADLINE.items():
        value = f"{points[name]:.3f}" if name in points else "–"
        yield title, value, f"95 % interval {_interval(bounds[name])}" if name in bounds else MEANINGS[name]


def _metrics(points: Values, bounds: Intervals) -> Iterator[tuple[str, ...]]:
    for name, meaning in MEANINGS.items():
        if name in points:
            yield name, f"{points[name]:.3f}", _interval(bounds.get(name)), meaning


def _classes(scores: DetectionScores, points: Values, bounds: Intervals) -> Iterator[Part]:
    counts = scores.counts("class")
    order = sorted(counts, key=lambda name: (-counts[name].true, -counts[name].predicted))
    if unknown := [name for name in order if not counts[name].true]:
        yield Sentence(
            f"{len(unknown)} predicted label(s) that no true object has, as {unknown[0]!r}: COCO's AP leaves them "
            "out, precision and F1 count them as false.",
            Tone.WARN,
        )
    if len(order) > _MOST_CLASSES:
        yield Sentence(f"The {_MOST_CLASSES} most frequent of {len(order)} classes; the JSON has all.")
    rows = []
    for label in order[:_MOST_CLASSES]:
        part = f"class/{label}"
        rows.append(
            (
                label,
                number(counts[label].true),
                number(counts[label].predicted),
                _value(points, f"{part}/ap"),
                *(_value(points, f"{part}/{name}") for name in _RATIOS),
                _interval(bounds.get(f"{part}/f1")),
            )
        )
    headings = ("class", "true", "predicted", "AP", "precision", "recall", "F1", "mean IoU", _OF_F1)
    yield Table("", headings, tuple(rows))


def _parts(kind: str, title: str, points: Values, bounds: Intervals) -> Table:
    rows = []
    for part in parts_of(list(points), kind):
        name = f"{kind}/{part}"
        ap = f"eval/ap_{part}" if kind == "size" else f"{name}/ap"
        rows.append(
            (
                part,
                _value(points, ap),
                *(_value(points, f"{name}/{each}") for each in _RATIOS),
                _interval(bounds.get(f"{name}/f1")),
            )
        )
    return Table(title, (kind, "AP", "precision", "recall", "F1", "mean IoU", _OF_F1), tuple(rows))


def _by_threshold(points: Values, bounds: Intervals) -> Chart:
    series = []
    thresholds = parts_of(list(points), "iou")
    for name in ("precision", "recall", "f1"):
        found = [(float(iou), f"iou/{iou}/{name}") for iou in thresholds if f"iou/{iou}/{name}" in points]
        known = [bounds[full] for _, full in found if full in bounds]
        whole = known if len(known) == len(found) else []
        series.append(
            Series(
                "F1" if name == "f1" else name,
                Mark.POINTS,
                tuple(place for place, _ in found),
                tuple(points[full] for _, full in found),
                tuple(each.low for each in whole),
                tuple(each.high for each in whole),
            )
        )
    return Chart(
        key="iou",
        title="Precision, recall and F1 by IoU threshold",
        description="Pairs of one class, matched one to one, need an IoU of at least the threshold.",
        x_title="IoU threshold",
        y_title="share",
        series=tuple(series),
    )


def _value(points: Values, name: str) -> str:
    return f"{points[name]:.3f}" if name in points else "–"


def _interval(found: Interval | None, form: str = ".3f") -> str:
    return f"{found.low:{form}} … {found.high:{form}}" if found else "–"
