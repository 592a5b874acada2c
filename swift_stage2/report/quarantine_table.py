"""Names the samples that were given up: file, line, image, and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from swift_stage2.report.content import Section, Table, Tone
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.rank_records import RankRecords

_MOST_SHOWN = 100
_HEADINGS = ("file and line", "image", "reason", "times", "message")


def with_quarantines(section: Section, ranks: Iterable[RankRecords]) -> Section:
    """The section with a row per place and reason at its end; itself where no sample was given up."""
    told = Counter(_described(record) for records in ranks for record in records.quarantines)
    if not told:
        return section
    rows = [
        (place, image, reason, str(count), message)
        for (place, image, reason, message), count in told.most_common(_MOST_SHOWN)
    ]
    title = "Samples given up"
    if len(told) > len(rows):
        title += f": {len(rows)} of {len(told):,} places"
    tones = dict.fromkeys(range(len(rows)), Tone.WARN)
    return Section(
        section.key, section.title, (*section.parts, Table(title, _HEADINGS, tuple(rows), tones, True))
    )


def _described(record: Record) -> tuple[str, str, str, str]:
    file, line = record.get("file"), record.get("line")
    place = (
        f"{file}:{line}" if file is not None else f"row {_row_number(record.get('sample'))} of ms-swift's set"
    )
    images = record.get("images")
    named = [str(image) for image in images if image is not None] if isinstance(images, list) else []
    return place, ", ".join(named), str(record.get("reason", "")), str(record.get("message", ""))


def _row_number(sample: Any) -> Any:
    return sample.get("index", "?") if isinstance(sample, dict) else "?"
