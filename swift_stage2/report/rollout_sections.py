"""How good rollouts were, how fast their matches grow old, and how full packs were. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

from swift_stage2.config import MatchingConfig, PackingConfig
from swift_stage2.report import quality
from swift_stage2.report.content import (
    Chart,
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
    series_of,
)
from swift_stage2.report.drift import DEFINITION, Drift, drift_of
from swift_stage2.report.matches import EVALUATION, Match
from swift_stage2.report.quality import Quality
from swift_stage2.report.run_data import RunData
from swift_stage2.report.steps_over_time import MOST_POINTS
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry

_MEASURES = ("precision", "recall", "f1", "mean_iou")
_NAMES = {"precision": "precision", "recall": "recall", "f1": "F1", "mean_iou": "mean IoU"}
_NUM_BINS = 20
_GOOD_FILL = 0.8
_LENGTH_STEP = 256
_PACKING = ("stage2_ab", "channel_b", "packing")
_FEW_BOXES = 30
_MOST_EVALUATIONS = 12


def quality_section(run: RunData, matches: Sequence[Match]) -> Section:
    """Precision, recall, F1 and mean IoU by version, and of evaluations by step."""
    records = list(chain.from_iterable(run.histories.values()))
    by_version = quality.of_ledger(records) or quality.of_matches(
        match for match in matches if match.purpose != EVALUATION
    )
    evaluations = run.first.evaluations if run.first else []
    parts: list[Part | None] = [
        _halves(by_version),
        _measures(
            "quality",
            "Match quality of rollouts",
            "Rollouts against ground truth before correction, by the version of the weights that gave them.",
            "version",
            _grouped(by_version),
        ),
        _evaluations(evaluations),
        _measures(
            "evaluations",
            "Evaluations",
            "Greedy answers to the validation set, at the step at which each evaluation began.",
            "step",
            [(record["begun_step"], record["ratios"]) for record in evaluations],
        ),
    ]
    return Section("quality", "Match quality", filled(parts) or (Sentence("No rollout was matched."),))


def drift_section(run: RunData, matches: Sequence[Match]) -> Section:
    """The share of boxes that change their partner, by version difference."""
    threshold = run.number_setting("stage2_ab", "channel_b", "matching", "iou_threshold")
    threshold = MatchingConfig().iou_threshold if threshold is None else threshold
    found = drift_of(matches, threshold)
    if not found:
        return Section("drift", "Match drift", (Sentence(DEFINITION), Sentence("No image was asked twice.")))
    rows = tuple(
        (
            f"{one.purpose}, lag {one.lag}",
            f"{one.share:.1%}",
            f"{one.low:.1%} to {one.high:.1%}",
            number(one.num_boxes),
            number(one.num_images),
        )
        for one in _shown(found)
    )
    chart = Chart(
        key="drift",
        title="Boxes whose partner changed",
        description="Percent of ground-truth boxes with another partner, by the difference of the two versions.",
        x_title="version difference",
        y_title="percent",
        series=tuple(
            _drift_series(purpose, [one for one in _shown(found) if one.purpose == purpose])
            for purpose in dict.fromkeys(one.purpose for one in found)
        ),
    )
    headings = ("asked for", "changed", "95 % interval", "boxes", "images")
    table = Table(f"Changed partners, matching threshold {threshold:g}", headings, rows)
    few = any(one.num_boxes < _FEW_BOXES for one in _shown(found))
    parts: list[Part | None] = [
        Sentence(DEFINITION),
        Sentence(f"Shares of fewer than {_FEW_BOXES} boxes say little: read their intervals.", Tone.WARN)
        if few
        else None,
        table,
        chart,
    ]
    return Section("drift", "Match drift", filled(parts))


def fill_section(run: RunData) -> Section:
    """How much of the packs' room was used."""
    packs = [
        record
        for record in chain.from_iterable(run.histories.values())
        if record["kind"] == Entry.PACKED and record["capacity_tokens"]
    ]
    packed = [(record["num_tokens"], record["capacity_tokens"]) for record in packs]
    if not packed:
        return Section("fill", "Pack fill", (Sentence("No pack was made."),))
    fills = sorted(tokens / capacity for tokens, capacity in packed)
    rows = {
        "packs made": number(len(packed)),
        "tokens / room": f"{sum(t for t, _ in packed) / sum(c for _, c in packed):.1%}",
        "median fill": f"{fills[len(fills) // 2]:.1%}",
        "lowest fill": f"{fills[0]:.1%}",
    }
    counts = [0] * _NUM_BINS
    for fill in fills:
        counts[min(_NUM_BINS - 1, int(fill * _NUM_BINS))] += 1
    width = 100 / _NUM_BINS
    bars = [(width * (index + 0.5), float(count)) for index, count in enumerate(counts)]
    chart = Chart(
        key="fill",
        title="Packs by fill",
        description=f"How many packs were filled to what percent, in steps of {width:g}, each named by its middle.",
        x_title="percent of the room",
        y_title="packs",
        series=(series_of("packs", Mark.BARS, bars),),
    )
    num_samples = sum(len(record["samples"]) for record in packs)
    advice = fill_advice(
        fills,
        segment_tokens=sum(tokens for tokens, _ in packed) / max(1, num_samples),
        capacity=max(capacity for _, capacity in packed),
        min_fill=run.number_setting(*_PACKING, "packing_min_fill_ratio"),
        b_ratio=run.number_setting("stage2_ab", "schedule", "b_ratio"),
    )
    told = Sentence(advice, Tone.WARN) if advice else None
    return Section("fill", "Pack fill", filled((told, pairs("Packs", rows), chart)))


def fill_advice(
    fills: Sequence[float],
    *,
    segment_tokens: float,
    capacity: int,
    min_fill: float | None,
    b_ratio: float | None,
) -> str:
    """Which key would fill the packs better, with a value; nothing where they are well filled.

    ``fills`` are shares of ``capacity`` tokens, ``segment_tokens`` the mean of the segments. A pack waits for a
    segment as long as one fits, so that room for about one stays empty.
    """
    mean = sum(fills) / len(fills)
    if mean >= _GOOD_FILL:
        return ""
    found = f"Packs are {mean:.0%} full on average"
    waited_for = PackingConfig().packing_min_fill_ratio if min_fill is None else min_fill
    num_early = sum(fill < waited_for for fill in fills)
    if 2 * num_early > len(fills):
        share = f"{mean * b_ratio:.2g}" if b_ratio else f"{mean:.2g} times what it is"
        return (
            f"{found}: {num_early} of {len(fills)} left below packing_min_fill_ratio {waited_for:g} because the queue "
            f"was starving. The same samples in full packs feed stage2_ab.schedule.b_ratio: {share}."
        )
    reachable = math.floor(100 * min(_GOOD_FILL + 0.1, 1 - segment_tokens / capacity)) / 100
    if reachable > max(waited_for, mean):
        return (
            f"{found}: they leave at packing_min_fill_ratio {waited_for:g}. With segments of {segment_tokens:.0f} "
            f"tokens, write {'.'.join(_PACKING)}.packing_min_fill_ratio: {reachable:g}."
        )
    longer = math.ceil(segment_tokens / (1 - _GOOD_FILL) / _LENGTH_STEP) * _LENGTH_STEP
    return (
        f"{found}: segments of {segment_tokens:.0f} tokens leave much of {capacity} empty. If memory allows, write "
        f"{'.'.join(_PACKING)}.packing_length: {max(longer, capacity + _LENGTH_STEP)}."
    )


def _halves(by_version: Mapping[int, Quality]) -> Table:
    """The older half of the versions against the newer one, and all: the trend in numbers."""
    versions = list(by_version)
    parts = {"all versions": versions}
    if len(versions) > 1:
        middle = len(versions) // 2
        parts |= {_span(versions[:middle]): versions[:middle], _span(versions[middle:]): versions[middle:]}
    rows = []
    for name, members in parts.items():
        found = _sum([by_version[version] for version in members])
        values = (getattr(found, measure) for measure in _MEASURES)
        rows.append((name, *(number(value) for value in values), number(found.num_rollouts)))
    headings = ("version", *_NAMES.values(), "rollouts")
    return Table("Rollouts before correction", headings, tuple(rows) if versions else ())


def _evaluations(evaluations: Sequence[Record]) -> Table:
    rows = tuple(
        (
            number(record["begun_step"]),
            number(record["version"]),
            f"{record['counts']['num_answered']} of {record['counts']['num_wanted']}",
            *(number(record["ratios"].get(measure)) for measure in _MEASURES),
            str(record["end"]),
        )
        for record in evaluations[-_MOST_EVALUATIONS:]
    )
    title = f"The last {len(rows)} of {len(evaluations)} evaluations"
    headings = ("step", "version", "answered", *_NAMES.values(), "end")
    return Table(title, headings, rows)


def _span(versions: Sequence[int]) -> str:
    return f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else str(versions[0])


def _grouped(by_version: Mapping[int, Quality]) -> list[tuple[float, dict[str, float]]]:
    """At most ``MOST_POINTS``: the counts of neighbouring versions are added up."""
    versions = list(by_version)
    size = max(1, -(-len(versions) // MOST_POINTS))
    groups = [versions[begin : begin + size] for begin in range(0, len(versions), size)]
    points = []
    for group in groups:
        found = _sum([by_version[version] for version in group])
        values = {measure: getattr(found, measure) for measure in _MEASURES}
        points.append((float(group[0]), {name: value for name, value in values.items() if value is not None}))
    return points


def _sum(parts: Sequence[Quality]) -> Quality:
    return Quality(
        num_rollouts=sum(part.num_rollouts for part in parts),
        num_predictions=sum(part.num_predictions for part in parts),
        num_truth=sum(part.num_truth for part in parts),
        num_pairs=sum(part.num_pairs for part in parts),
        sum_iou=sum(part.sum_iou for part in parts),
    )


def _measures(
    key: str, title: str, description: str, x_title: str, points: Sequence[tuple[float, Record]]
) -> Chart:
    return Chart(
        key=key,
        title=title,
        description=description,
        x_title=x_title,
        y_title="0 to 1",
        series=tuple(
            series_of(
                name, Mark.LINE, [(place, values[measure]) for place, values in points if measure in values]
            )
            for measure, name in _NAMES.items()
            if any(measure in values for _, values in points)
        ),
    )


def _shown(found: Sequence[Drift]) -> list[Drift]:
    """Every lag while they are few; else the first ones and those that double."""
    few = [one for one in found if one.lag <= 8 or one.lag & (one.lag - 1) == 0]
    return few if len(found) > 24 else list(found)


def _drift_series(purpose: str, found: Sequence[Drift]) -> Series:
    return Series(
        purpose,
        Mark.POINTS,
        tuple(float(one.lag) for one in found),
        tuple(100 * one.share for one in found),
        tuple(100 * one.low for one in found),
        tuple(100 * one.high for one in found),
    )
