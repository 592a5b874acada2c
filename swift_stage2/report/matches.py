"""Tells how good rollouts and evaluations were. Pure.

Quality by version comes from the events ``matched``, which tell of every rollout that became a segment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swift_stage2.pages.content import Part, Section, Sentence, Table, Tone, filled, number
from swift_stage2.records import MatchQuality, match_ratios
from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.event_log import RankEvents
from swift_stage2.telemetry.events import Evaluation
from swift_stage2.telemetry.sample_events import Key, Match, Matched


@dataclass(frozen=True, slots=True)
class RankMatch:
    """One rollout against its ground truth, on one rank."""

    rank: int
    match: Match

    @property
    def is_of_points(self) -> bool:
        """Whether any object is a point; a task has objects of one kind."""
        return any(len(one.box) == 2 for one in (*self.match.truth, *self.match.predicted))


def matches_of(ranks: Iterable[RankEvents]) -> list[RankMatch]:
    """The matches of all ranks by time.

    A draw that a resumed process repeated counts once, as it was answered last. Evaluations repeat their keys, so a key
    counts once for every version.
    """
    found: dict[tuple[int, str, Key, int], RankMatch] = {}
    for rank in ranks:
        for match in rank.of(Match):
            found[rank.rank, match.purpose, match.sample, match.version] = RankMatch(rank.rank, match)
    return sorted(found.values(), key=lambda each: each.match.time)


_NAMES = {"precision": "precision", "recall": "recall", "f1": "F1", "mean_iou": "mean IoU"}
_COUNTS = ("num_predictions", "num_ground_truth", "num_pairs", "sum_iou")
_NOT_SHOWN = ("truncated_ratio",)
_MOST_EVALUATIONS = 12
_SAME_LABEL = ("stage2_ab", "channel_b", "matching", "same_label")
_FEWEST_PAIRS = 20  # of which something is said
_FEW_EQUAL = 0.05
_MOST_OF_LABEL = 40  # characters
_ByVersion = Mapping[int, Sequence[MatchQuality]]


def quality_section(run: RunData, matches: Sequence[RankMatch]) -> Section:
    names = _NAMES
    if any(match.is_of_points for match in matches):
        names = _NAMES | {"mean_iou": "mean closeness"}
    by_version: dict[int, list[MatchQuality]] = defaultdict(list)
    for matched in (each for rank in run.ranks for each in rank.of(Matched)):
        by_version[matched.version].append(matched.quality)
    evaluations = run.first.of(Evaluation)
    told = dict.fromkeys(name for each in evaluations for name in each.ratios if name not in _NOT_SHOWN)
    own = {name: name for name in told if name not in _NAMES}  # of the task, which may be no shares
    parts: list[Part | None] = [
        None if run.setting(*_SAME_LABEL) else _labels_apart(matches),
        _halves(sorted(by_version), by_version, names),
        _evaluations(evaluations, {**names, **own}),
    ]
    return Section("quality", "Match quality", filled(parts) or (Sentence("No rollout was matched."),))


def _labels_apart(matches: Iterable[RankMatch]) -> Sentence | None:
    """A warning where pairs, found whatever their labels say, have next to no label in common."""
    pairs = Counter(
        (each.match.predicted[prediction].label, each.match.truth[truth].label)
        for each in matches
        for prediction, truth, _ in each.match.pairs
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


def _halves(versions: Sequence[int], by_version: _ByVersion, names: Mapping[str, str]) -> Table:
    """The older half of the versions against the newer one, and all: the trend in numbers."""
    parts = {"all versions": versions} if versions else {}
    if len(versions) > 1:
        middle = len(versions) // 2
        for half in (versions[:middle], versions[middle:]):
            parts[f"{half[0]} to {half[-1]}" if len(half) > 1 else str(half[0])] = half
    rows = []
    for name, members in parts.items():
        found = [each for version in members for each in by_version[version]]
        ratios = match_ratios(**{name: sum(getattr(each, name) for each in found) for name in _COUNTS})
        rows.append((name, *(number(ratios.get(measure)) for measure in names), number(len(found))))
    return Table("Rollouts before correction", ("version", *names.values(), "rollouts"), tuple(rows))


def _evaluations(evaluations: Sequence[Evaluation], measures: Mapping[str, str]) -> Table:
    rows = tuple(
        (
            number(each.begun_step),
            number(each.version),
            f"{each.counts.num_answered} of {each.counts.num_wanted}",
            *(number(each.ratios.get(measure)) for measure in measures),
            each.end,
        )
        for each in evaluations[-_MOST_EVALUATIONS:]
    )
    title = f"The last {len(rows)} of {len(evaluations)} evaluations"
    return Table(title, ("step", "version", "answered", *measures.values(), "end"), rows)
