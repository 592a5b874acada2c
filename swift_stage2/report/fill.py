"""How much of the packs' room was used. Pure."""

from __future__ import annotations

from swift_stage2.report.content import (
    Chart,
    Mark,
    Section,
    Sentence,
    number,
    pairs,
    series_of,
)
from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.ledger import Entry

_NUM_BINS = 20


def fill_section(run: RunData) -> Section:
    """How much of the packs' room was used."""
    packed = [
        (record["num_tokens"], record["capacity_tokens"])
        for record in run.ledger_records
        if record["kind"] == Entry.PACKED and record["capacity_tokens"]
    ]
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
    return Section("fill", "Pack fill", (pairs("Packs", rows), chart))
