"""How much of the packs' room was used. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swift_stage2.config.stage2_ab import PackingConfig
from swift_stage2.report.content import (
    Chart,
    Mark,
    Section,
    Sentence,
    Tone,
    filled,
    number,
    pairs,
    series_of,
)
from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.ledger import Entry

_NUM_BINS = 20
_GOOD_FILL = 0.8
_LENGTH_STEP = 256
_PACKING = ("stage2_ab", "channel_b", "packing")


def fill_section(run: RunData) -> Section:
    """How much of the packs' room was used."""
    packs = [
        record
        for record in run.ledger_records
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
