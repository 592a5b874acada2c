"""Sections on quality: detection over steps, pictures of the newest matches, match quality, suspected label errors.

A picture has what was seen, said, matched, missed, invented and trained. A true object is suspect if none of at least
``FEWEST`` versions predicted a box of its label there; a false box if the last ``FEWEST`` versions all predicted it, of
one label, where nothing true is near. How much that says depends on the model: ``strength`` is the share of its label's
objects that the versions find, or of its label's boxes that are right, so that suspects of a label that the model knows
come first, and one that it never met is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean

from swift_stage2.channel_b.matching import iou_matrix
from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.data.counted_scores import Counts
from swift_stage2.data.drawing import Drawing, gallery_image
from swift_stage2.data.prediction import TRUNCATED, LabelledBoxes
from swift_stage2.data.recorded import RecordedRow, evaluation_file, evaluations_directory, read_recorded
from swift_stage2.data.scores import DetectionScores, detection_data
from swift_stage2.report.content import (
    Gallery,
    Part,
    Picture,
    Section,
    Sentence,
    Table,
    filled,
    format_number,
    pairs,
)
from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.event_log import RankEvents
from swift_stage2.telemetry.events import Evaluation, Match, Matched, Trained
from swift_stage2.telemetry.summary import RunSummary

_MOST_SHOWN = 30
_MEASURES = {"eval/ap50": "AP50", "eval/ap": "AP", "eval/f1": "F1"}
_OF_SCORES = {"eval/ap_without_scores": "AP without scores", "eval/ece": "ECE"}


@dataclass(frozen=True)
class RowEvaluation:
    step: int
    """At which it began."""
    version: int
    rows: Mapping[int, RecordedRow]
    """By row of the validation set; those that were kept and have boxes."""

    @cached_property
    def scores(self) -> DetectionScores:
        """Of the rows in their order, as ``swift-stage2 evaluate`` has it: equal labels, an IoU of at least 0.5."""
        rows = [self.rows[row] for row in sorted(self.rows)]
        truths = [TrueObjects(row.truth.ref, row.truth.bbox) for row in rows if row.truth is not None]
        return DetectionScores(detection_data(truths, rows))

    @cached_property
    def matched(self) -> Mapping[int, tuple[tuple[int, int, float], ...]]:
        """By row, (prediction, true object, IoU) of each pair."""
        return dict(zip(sorted(self.rows), self.scores.matched, strict=True))

    @cached_property
    def counts(self) -> Mapping[str, Counts]:
        """By label."""
        return self.scores.counts("class")


def evaluations_of(run: RunData) -> list[RowEvaluation]:
    """Those that ended and of which rows with boxes were kept, by step; what a resumed run asked anew counts."""
    found = []
    for _, told in sorted({each.due_step: each for each in run.first.of(Evaluation)}.items()):
        folders = map(evaluations_directory, run.run_dirs)
        files = (evaluation_file(folder, told.due_step, told.version) for folder in folders)
        rows = {row.row: row for file in files for row in read_recorded(file) if _has_boxes(row)}
        if rows:
            found.append(RowEvaluation(told.begun_step, told.version, rows))
    return found


def _has_boxes(row: RecordedRow) -> bool:
    """True if the row's truth and answer are boxes. Other tasks have none, and a damaged file may hold anything."""
    if row.truth is None or row.fault():
        return False
    return not replace(row, objects=row.truth, scores=None, log_probs=None).fault()


def detection_section(evaluations: Sequence[RowEvaluation]) -> Section:
    if not evaluations:
        return Section("detection", "Detection over steps")
    shown = evaluations[-_MOST_SHOWN:]
    points = [each.scores.points() for each in shown]
    some = (
        f"The last {len(shown)} of {len(evaluations)} evaluations. " if len(shown) < len(evaluations) else ""
    )
    told = (
        f"{some}Labels must be equal and the IoU at least 0.5, as in swift-stage2 evaluate, which also tells "
        f"intervals, classes and types of errors. {whether_scores_help(shown[-1].scores, points[-1])}"
    ).strip()
    have_scores = any(name in values for name in _OF_SCORES for values in points)
    measures = _MEASURES | (_OF_SCORES if have_scores else {})
    rows = tuple(
        (
            format_number(each.step),
            format_number(len(each.rows)),
            *(f"{values[name]:.3f}" if name in values else "–" for name in measures),
        )
        for each, values in zip(shown, points, strict=True)
    )
    table = Table("", ("step", "rows", *measures.values()), rows)
    return Section("detection", "Detection over steps", (Sentence(told), table))


def whether_scores_help(scores: DetectionScores, points: Mapping[str, float]) -> str:
    """One sentence; empty without scores."""
    if not {"eval/ap", "eval/ap_without_scores"} <= points.keys():
        return ""
    ap, plain = points["eval/ap"], points["eval/ap_without_scores"]
    verdict = "help" if ap > plain and scores.rank_right_first else "do not help beyond chance"
    return f"Scores {verdict}: AP is {ap:.3f} with and {plain:.3f} without them."


RankMatch = tuple[int, Match]
"""A rank, and one rollout against its ground truth there."""


def matches_of(ranks: Iterable[RankEvents]) -> list[RankMatch]:
    """The matches of all ranks by time. A draw that a resumed process repeated counts once, as it was answered last."""
    found = {(rank.rank, match.sample): match for rank in ranks for match in rank.of(Match)}
    return sorted(((rank, match) for (rank, _), match in found.items()), key=lambda each: each[1].time)


_MOST_PICTURES = 24
COLOURS = "Blue: true; orange: missed; green: predicted, with its closeness to what is true; pink: false."


def gallery_of(matches: Sequence[RankMatch]) -> Gallery:
    """The newest of the ``matches``, which are by time. Opens their images."""
    newest = matches[: -_MOST_PICTURES - 1 : -1]
    told = (
        f"{format_number(len(newest))} of {format_number(len(matches))} matches, the newest first. {COLOURS}"
    )
    return Gallery(told, tuple(_picture(*each) for each in newest))


def _picture(rank: int, match: Match) -> Picture:
    epoch, position, row, attempt = match.sample
    again = f", attempt {attempt}" if attempt else ""
    facts = [f"row {row}, epoch {epoch}, position {position}, rank {rank}{again}, version {match.version}"]
    facts += [f"dropped: {count} × {reason}" for reason, count in match.dropped.items() if count]
    if match.reward:
        facts.append("reward: " + ", ".join(f"{term} {value:.2f}" for term, value in match.reward.items()))
    if match.truncated:
        facts.append("cut off at max_new_tokens")
    if len(match.images) > 1:
        facts.append(f"first of {len(match.images)} images")
    drawing = Drawing(match.truth, match.predicted, match.pairs)
    path = (match.images[0] if match.images else None) or ""
    texts = (("Rollout", match.rollout), ("Corrected answer", match.target))
    return picture_of(drawing, path, facts, texts, match.space)


def picture_of(
    drawing: Drawing,
    path: str,
    facts: Iterable[str],
    texts: tuple[tuple[str, str], ...],
    space: tuple[int, int] | None = None,
) -> Picture:
    """The image at ``path`` with true and predicted objects. ``space`` as ``draw`` takes it."""
    image, trouble = gallery_image(drawing, path, space)
    num_pairs = len(drawing.pairs)
    num_missed, num_false = len(drawing.truth) - num_pairs, len(drawing.predicted) - num_pairs
    return Picture(
        image=image,
        trouble=trouble,
        name=Path(path).name or "an image without a path",
        facts=(f"{num_pairs} matched, {num_missed} missed, {num_false} false", *facts),
        texts=texts,
    )


_AS_TRAINING_DOES = (
    "Objects are matched as training matches them, by matching.iou_threshold (0.3 unless set) and whatever their "
    "labels unless matching.same_label is set: a corrected target has the true ones. swift-stage2 evaluate is stricter."
)
_NAMES = {"precision": "precision", "recall": "recall", "f1": "F1"}
_NOT_SHOWN = ("truncated_ratio",)


def quality_section(run: RunData, summary: RunSummary) -> Section:
    names = _NAMES | {"mean_iou": f"mean {run.similarity}"}
    evaluations = run.first.of(Evaluation)
    told = dict.fromkeys(name for each in evaluations for name in each.ratios if name not in _NOT_SHOWN)
    own = {name: name for name in told if name not in names}  # of the task, which may be no shares
    parts: list[Part | None] = [
        pairs("Quality over the run", {tag: f"{value:.3f}" for tag, value in summary.ratios.items()}),
        _evaluations(evaluations, {**names, **own}),
        _by_length(run.ranks),
    ]
    shown = filled(parts)
    return Section("quality", "Match quality", (Sentence(_AS_TRAINING_DOES), *shown) if shown else ())


def _by_length(ranks: Sequence[RankEvents]) -> Table:
    """Rollouts in quarters by the length of their answers: whether long ones are trained as often as short ones."""
    matched = [
        (event.num_rollout_tokens, (number, *key))
        for number, rank in enumerate(ranks)
        for event in rank.of(Matched)
        for key in event.samples
    ]
    trained = {
        (number, *key)
        for number, rank in enumerate(ranks)
        for event in rank.of(Trained)
        for key in event.samples
    }
    matched.sort()
    rows = []
    for begin, end in pairwise(len(matched) * quarter // 4 for quarter in range(5)):
        if quarter := matched[begin:end]:
            num_trained = sum(key in trained for _, key in quarter)
            lengths = f"{quarter[0][0]} to {quarter[-1][0]}"
            rows.append((lengths, str(len(quarter)), str(num_trained), f"{num_trained / len(quarter):.0%}"))
    return Table("Rollouts by length", ("tokens", "matched", "trained", "share"), tuple(rows))


def _evaluations(evaluations: Sequence[Evaluation], measures: Mapping[str, str]) -> Table:
    rows = tuple(
        (
            format_number(each.begun_step),
            format_number(each.version),
            f"{each.counts.num_answered} of {each.counts.num_wanted}",
            *(format_number(each.ratios.get(measure)) for measure in measures),
            each.end,
        )
        for each in evaluations[-_MOST_SHOWN:]
    )
    title = f"The last {len(rows)} of {len(evaluations)} evaluations"
    return Table(title, ("step", "version", "answered", *measures.values(), "end"), rows)


FEWEST = 3
"""Versions that must agree."""
_MOST_SUSPECTS = 20
_SAME = 0.5  # IoU of one box in two versions
_NEAR = 0.1  # IoU from which a true object is near, as TIDE has it


@dataclass(frozen=True, slots=True)
class Suspect:
    """One label of the data, or one that it lacks."""

    row: int
    image: str
    label: str
    box: tuple[float, ...]
    """In pixels."""
    what: str
    strength: float
    """0 to 1."""


def suspects_of(evaluations: Sequence[RowEvaluation]) -> list[Suspect]:
    """The strongest first; none with fewer than ``FEWEST`` versions."""
    versions = [*{each.version: each for each in evaluations}.values()]
    found: list[Suspect] = []
    for row in sorted({row for each in versions for row in each.rows}):
        asked = [
            each
            for each in versions
            if row in each.rows
            and each.rows[row].answer
            and each.rows[row].finish_reason != TRUNCATED  # which says nothing of what it lacks
        ]
        # Rows that changed between parts of a run are not those of one label.
        asked = [each for each in asked if each.rows[row].truth == asked[-1].rows[row].truth]
        if len(asked) >= FEWEST:
            found += [*_never_found(row, asked), *_always_added(row, asked[-FEWEST:])]
    return sorted((each for each in found if each.strength), key=lambda each: (-each.strength, each.row))


def _iou(one: Sequence[float], other: Sequence[float]) -> float:
    return float(iou_matrix([one], [other])[0, 0])


def _never_found(row: int, versions: Sequence[RowEvaluation]) -> Iterator[Suspect]:
    newest = versions[-1].rows[row]
    truth = newest.truth or LabelledBoxes()
    found = {true for each in versions for _, true, _ in each.matched[row]}
    for index, (label, box) in enumerate(zip(truth.ref, truth.bbox, strict=True)):
        if index in found:
            continue
        answers = [version.rows[row].objects for version in versions[-FEWEST:]]
        said = set.intersection(
            *(
                {name for name, place in zip(each.ref, each.bbox, strict=True) if _iou(place, box) >= _SAME}
                for each in answers
            )
        )
        what = "truth never found" + (f", they say {min(said)!r}" if said else "")
        counts = [version.counts[label] for version in versions]
        strength = fmean(each.matched / each.true for each in counts)
        yield Suspect(row, newest.file or newest.image, label, box, what, strength)


def _always_added(row: int, versions: Sequence[RowEvaluation]) -> Iterator[Suspect]:
    newest = versions[-1].rows[row]
    truth = newest.truth or LabelledBoxes()
    for label, box in _false(versions[-1], row):
        if any(_iou(box, true) >= _NEAR for true in truth.bbox):
            continue
        seen = [box]
        for version in versions[:-1]:
            alike = [place for name, place in _false(version, row) if name == label]
            seen += sorted(alike, key=lambda other: _iou(other, box))[-1:]
        least = min(_iou(a, b) for a, b in combinations(seen, 2)) if len(seen) == len(versions) else 0.0
        if least >= _SAME:
            counts = [version.counts[label] for version in versions]
            strength = least * fmean(each.matched / each.predicted for each in counts)
            yield Suspect(row, newest.file or newest.image, label, box, "false in all versions", strength)


def _false(version: RowEvaluation, row: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    objects, right = version.rows[row].objects, {prediction for prediction, _, _ in version.matched[row]}
    for index, found in enumerate(zip(objects.ref, objects.bbox, strict=True)):
        if index not in right:
            yield found


def suspects_section(suspects: Sequence[Suspect]) -> Section:
    """The strongest ones."""
    title = "Suspected label errors"
    if not suspects:
        return Section("suspects", title)
    told = (
        f"True objects that none of at least {FEWEST} versions found, and boxes without a true object near that the "
        f"last {FEWEST} versions all predicted. Look from the first on: strength is the share of the label's objects "
        "that the versions find, or of its boxes that are right. What a model never learned it misses, too."
    )
    rows = tuple(
        (
            str(each.row),
            each.label,
            each.what,
            ", ".join(f"{value:g}" for value in each.box),
            f"{each.strength:.2f}",
            each.image,
        )
        for each in suspects[:_MOST_SUSPECTS]
    )
    table = Table(
        f"The strongest {format_number(len(rows))} of {format_number(len(suspects))}",
        ("row", "label", "suspect", "box", "strength", "image"),
        rows,
        ends_in_words=True,
    )
    return Section("suspects", title, (Sentence(told), table))
