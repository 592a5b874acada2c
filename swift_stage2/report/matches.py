"""Checks the lines of ``RUN_DIR/matches``, and tells how good rollouts and evaluations were. Pure.

The lines hold what models and data sets said, so nothing in them is believed: one that has not the form is counted and
left out. Quality by version comes from the ledger's ``matched`` records, which tell of every rollout that became a
segment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, FiniteFloat, TypeAdapter

from swift_stage2.pages.content import Part, Section, Sentence, Table, Tone, filled, number
from swift_stage2.records import match_ratios
from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry

_MOST = 2**53
_MOST_CHARACTERS = 20_000  # of a text that is shown


def _shortened(value: Any) -> str:
    text = "" if value is None else str(value)
    more = len(text) - _MOST_CHARACTERS
    return f"{text[:_MOST_CHARACTERS]} … and {more} characters more" if more > 0 else text


_Whole = Annotated[int, Field(ge=-_MOST, le=_MOST)]
_Side = Annotated[int, Field(ge=1, le=_MOST)]
_Text = Annotated[str, BeforeValidator(_shortened)]
_Path = Annotated[str | None, BeforeValidator(lambda path: path if isinstance(path, str) else None)]
Box = tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]
"""x1, y1, x2, y2 in the match's space."""
Point = tuple[FiniteFloat, FiniteFloat]
"""x, y in the match's space."""
Key = tuple[_Whole, _Whole, _Whole, _Whole]
"""Epoch, position in the rank's shard, row of the data set, attempt; of an evaluation only the row tells anything."""
EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class Labelled:
    label: str
    box: Box | Point


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedMatch:
    """One rollout against its ground truth."""

    time: FiniteFloat
    rank: int
    sample: Key
    purpose: str
    version: _Whole
    images: tuple[_Path, ...]
    space: tuple[_Side, _Side]
    """Width and height that the boxes, or points, are measured in."""
    truth: tuple[Labelled, ...]
    predicted: tuple[Labelled, ...]
    pairs: tuple[tuple[int, int, float], ...]
    """(prediction, truth, IoU, or closeness of points)."""
    rollout: _Text
    target: _Text
    truncated: bool
    dropped: Mapping[str, int]
    """Objects that the parser dropped, by reason."""
    reward: Mapping[str, FiniteFloat] = field(default_factory=dict)
    """The task's terms and their ``total``."""

    @property
    def row(self) -> int:
        """Of its data set."""
        return self.sample[2]

    @property
    def image(self) -> str:
        """The path of its first image, or nothing."""
        return (self.images[0] if self.images else None) or ""

    @property
    def is_of_points(self) -> bool:
        """Whether any object is a point; a task has objects of one kind."""
        return any(len(one.box) == 2 for one in (*self.truth, *self.predicted))


_FORM = TypeAdapter(LoggedMatch)


def matches_of(records: Iterable[Record]) -> tuple[list[LoggedMatch], int]:
    """The matches of all ranks by time, and how many records had another form.

    A draw that a resumed process repeated counts once, as it was answered last. Evaluations repeat their keys, so a key
    counts once for every version.
    """
    found: dict[tuple[int, str, Key, int], LoggedMatch] = {}
    num_odd = 0
    for record in records:
        try:
            match = match_of(record)
        except (ValueError, OverflowError):
            num_odd += 1
        else:
            found[match.rank, match.purpose, match.sample, match.version] = match
    return sorted(found.values(), key=lambda match: match.time), num_odd


def match_of(record: Record) -> LoggedMatch:
    """Raises ValueError or OverflowError: the record has not the form."""
    match = _FORM.validate_python(record)
    for box in (each.box for each in (*match.truth, *match.predicted)):
        # Of a point both are alike.
        if box[0] > box[-2] or box[1] > box[-1] or max(-box[0], -box[1], *box[-2:]) > _MOST:
            raise ValueError("no box")
    for numbers, limit in (
        ([prediction for prediction, _, _ in match.pairs], len(match.predicted)),
        ([truth for _, truth, _ in match.pairs], len(match.truth)),
    ):
        if len(set(numbers)) < len(numbers) or not all(0 <= number < limit for number in numbers):
            raise ValueError("pairs of what is not there")
    return match


_NAMES = {"precision": "precision", "recall": "recall", "f1": "F1", "mean_iou": "mean IoU"}
_NOT_SHOWN = ("truncated_ratio",)
_MOST_EVALUATIONS = 12
_SAME_LABEL = ("stage2_ab", "channel_b", "matching", "same_label")
_FEWEST_PAIRS = 20  # of which something is said
_FEW_EQUAL = 0.05
_MOST_OF_LABEL = 40  # characters


class _Counts(NamedTuple):
    num_predictions: int
    num_ground_truth: int
    num_pairs: int
    sum_iou: float


_ByVersion = Mapping[int, Sequence[_Counts]]


def quality_section(run: RunData, matches: Sequence[LoggedMatch]) -> Section:
    names = _NAMES
    if any(match.is_of_points for match in matches):
        names = _NAMES | {"mean_iou": "mean closeness"}
    by_version = _of_ledger(run.ledger_records)
    versions = sorted(by_version)
    evaluations = run.first.evaluations
    told = dict.fromkeys(
        name for record in evaluations for name in record["ratios"] if name not in _NOT_SHOWN
    )
    own = {name: name for name in told if name not in _NAMES}  # of the task, which may be no shares
    measures = {**names, **own}
    parts: list[Part | None] = [
        None if run.setting(*_SAME_LABEL) else _labels_apart(matches),
        _halves(versions, by_version, names),
        _evaluations(evaluations, measures),
    ]
    return Section("quality", "Match quality", filled(parts) or (Sentence("No rollout was matched."),))


def _labels_apart(matches: Iterable[LoggedMatch]) -> Sentence | None:
    """A warning where pairs, found whatever their labels say, have next to no label in common."""
    pairs = Counter(
        (match.predicted[prediction].label, match.truth[truth].label)
        for match in matches
        for prediction, truth, _ in match.pairs
    )
    num_pairs, num_equal = pairs.total(), sum(n for (said, true), n in pairs.items() if said == true)
    if num_pairs < _FEWEST_PAIRS or num_equal >= _FEW_EQUAL * num_pairs:
        return None
    (said, true), _ = next(each for each in pairs.most_common() if each[0][0] != each[0][1])
    return Sentence(
        f"Only {num_equal} of {num_pairs} matched pairs have one label, most often the model says "
        f"{said[:_MOST_OF_LABEL]!r} where the data say {true[:_MOST_OF_LABEL]!r}: probably the data spell labels "
        "otherwise than the model was taught, or the prompt does not name them; mend that, or write "
        f"{'.'.join(_SAME_LABEL)}: true if pairs of two labels shall be none.",
        Tone.WARN,
    )


def _of_ledger(records: Iterable[Record]) -> _ByVersion:
    found = defaultdict(list)
    for record in records:
        if record["kind"] == Entry.MATCHED:
            told = record["quality"]
            found[record["version"]].append(_Counts(*(told[name] for name in _Counts._fields)))
    return found


def _ratios(versions: Iterable[int], by_version: _ByVersion) -> dict[str, float]:
    rollouts = chain.from_iterable(by_version[version] for version in versions)
    sums = [sum(column) for column in zip(*rollouts, strict=True)]
    return match_ratios(**dict(zip(_Counts._fields, sums, strict=True)))


def _halves(versions: Sequence[int], by_version: _ByVersion, names: Mapping[str, str]) -> Table:
    """The older half of the versions against the newer one, and all: the trend in numbers."""
    parts = {"all versions": versions}
    if len(versions) > 1:
        middle = len(versions) // 2
        for half in (versions[:middle], versions[middle:]):
            parts[f"{half[0]} to {half[-1]}" if len(half) > 1 else str(half[0])] = half
    rows = []
    for name, members in parts.items() if versions else ():
        ratios = _ratios(members, by_version)
        num_rollouts = sum(len(by_version[version]) for version in members)
        rows.append((name, *(number(ratios.get(measure)) for measure in names), number(num_rollouts)))
    return Table("Rollouts before correction", ("version", *names.values(), "rollouts"), tuple(rows))


def _evaluations(evaluations: Sequence[Record], measures: Mapping[str, str]) -> Table:
    rows = tuple(
        (
            number(record["begun_step"]),
            number(record["version"]),
            f"{record['counts']['num_answered']} of {record['counts']['num_wanted']}",
            *(number(record["ratios"].get(measure)) for measure in measures),
            str(record["end"]),
        )
        for record in evaluations[-_MOST_EVALUATIONS:]
    )
    title = f"The last {len(rows)} of {len(evaluations)} evaluations"
    return Table(title, ("step", "version", "answered", *measures.values(), "end"), rows)
