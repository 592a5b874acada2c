"""Checks every row of every file, streamed, and says what was found: all of it counted, the first of each kind kept.

Deterministic: files and lines in their order, no seed. Which format is right is known only at the end: the one that
most rows have (and a configured dialect, where there is one); rows that contradict it are faults then.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from swift_stage2.channel_b.answer_format import join_formats
from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.channel_b.targets import AnswerFormat
from swift_stage2.dataset.fault import Fault, Place, Rule
from swift_stage2.dataset.files import read_lines
from swift_stage2.dataset.picture import look_at
from swift_stage2.dataset.row_check import CheckedRow, check_line
from swift_stage2.errors import DatasetError

MOST_KEPT = 100
"""Faults of one rule that are kept to be shown; all are counted."""
_FIRST_BLOCK = 10 * 2**20  # bytes by which ms-swift's loader, `datasets`, takes the columns' types
_MOST_FORMATS = 1000
_PICTURES_REMEMBERED = 4096  # rows that ask several things about one image stand near each other
OnProgress = Callable[[int, int], None]
"""Told after every row: rows so far, bytes of this file so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The findings in all files. ``counts`` holds every fault, ``faults`` the first of each rule, in order."""

    files: tuple[Path, ...]
    num_rows: int
    num_bad_rows: int
    counts: Mapping[Rule, int]
    faults: tuple[Fault, ...]
    answer_format: AnswerFormat | None
    seconds: float

    @property
    def num_faults(self) -> int:
        """Without advice."""
        return sum(count for rule, count in self.counts.items() if not rule.is_advice)

    def of(self, rule: Rule) -> list[Fault]:
        """Those that were kept."""
        return [fault for fault in self.faults if fault.rule is rule]


def survey(
    files: Sequence[Path],
    *,
    dialect: Dialect | None = None,
    decode: bool = False,
    judge_answers: bool = True,
    needs_objects: bool = True,
    num_coordinates: int | None = 4,
    on_progress: OnProgress = lambda num_rows, num_bytes: None,
) -> Findings:
    """Checks all rows of ``files``; ``decode`` reads every image to its last pixel.

    Without ``judge_answers`` an answer may be anything, as long as its placeholders find their objects; without
    ``needs_objects`` a row may have no list of objects. ``num_coordinates`` as ``check_line`` takes it.

    Raises:
        DatasetError: a file cannot be read or holds no rows.
    """
    check = partial(
        check_line,
        look=lru_cache(_PICTURES_REMEMBERED)(partial(look_at, decode=decode)),
        judge_answer=judge_answers,
        needs_objects=needs_objects,
        num_coordinates=num_coordinates,
    )
    run = _Survey(dialect, check, on_progress)
    for file in files:
        run.read(file)
    return run.finish(tuple(files))


@dataclass(slots=True)
class _Survey:
    """A survey under way."""

    dialect: Dialect | None
    check_line: Callable[[bytes, Place], CheckedRow]
    on_progress: OnProgress
    started_s: float = field(default_factory=time.monotonic)
    num_rows: int = 0
    num_bad_rows: int = 0
    counts: Counter[Rule] = field(default_factory=Counter)
    kept: defaultdict[Rule, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    num_written: Counter[AnswerFormat] = field(default_factory=Counter)
    num_else_good: Counter[AnswerFormat] = field(default_factory=Counter)
    """Rows with no fault but perhaps this one."""
    first_written: dict[AnswerFormat, list[tuple[Place, str | None]]] = field(default_factory=dict)

    def read(self, file: Path) -> None:
        num_before, num_bytes = self.num_rows, 0
        columns: set[str] = set()
        for number, line in enumerate(read_lines(file), start=1):
            begins, num_bytes = num_bytes, num_bytes + len(line)
            if line.strip():
                place = Place(file, number)
                row = self._check(line, place)
                if begins >= _FIRST_BLOCK and (late := sorted(row.columns - columns)):
                    self._tell_late(late[0], place, row)
                columns |= row.columns
                self.on_progress(self.num_rows, num_bytes)
        if self.num_rows == num_before:
            raise DatasetError(
                f"a data set must hold rows, got none in {file}; write one JSON object per line"
            )

    def _tell_late(self, column: str, place: Place, row: CheckedRow) -> None:
        reason = (
            f"the first {_FIRST_BLOCK >> 20} MiB of a file must show each column that it has, because ms-swift loads "
            f"the rest as these say, got the first {column} after them; move this row to the top of the file"
        )
        self.num_bad_rows += all(fault.rule.is_advice for fault in row.faults)
        self._tell(Fault(place, Rule.COLUMNS, reason, row.image))

    def _check(self, line: bytes, place: Place) -> CheckedRow:
        row = self.check_line(line, place)
        self.num_rows += 1
        is_bad = any(not fault.rule.is_advice for fault in row.faults)
        self.num_bad_rows += is_bad
        for fault in row.faults:
            self._tell(fault)
        shown = row.answer_format
        if shown and (shown in self.num_written or len(self.num_written) < _MOST_FORMATS):
            self.num_written[shown] += 1
            self.num_else_good[shown] += not is_bad
            places = self.first_written.setdefault(shown, [])
            if len(places) < MOST_KEPT:
                places.append((place, row.image))
        return row

    def _tell(self, fault: Fault) -> None:
        self.counts[fault.rule] += 1
        if len(kept := self.kept[fault.rule]) < MOST_KEPT:
            kept.append(fault)

    def finish(self, files: tuple[Path, ...]) -> Findings:
        learned = self._learn_format()
        return Findings(
            files=files,
            num_rows=self.num_rows,
            num_bad_rows=self.num_bad_rows,
            counts={rule: self.counts[rule] for rule in Rule if self.counts[rule]},
            faults=tuple(fault for rule in Rule for fault in self.kept[rule]),
            answer_format=learned,
            seconds=time.monotonic() - self.started_s,
        )

    def _learn_format(self) -> AnswerFormat | None:
        """The format that most answers are written in; tells of every answer that is written otherwise."""
        if not self.num_written:
            return None
        num_in: Counter[Dialect] = Counter()
        for shown, count in self.num_written.items():
            num_in[shown.dialect] += count
        dialect = self.dialect or num_in.most_common(1)[0][0]
        learned, others = join_formats(
            {shown: count for shown, count in self.num_written.items() if shown.dialect == dialect}, dialect
        )
        odd = [*others, *(shown for shown in self.num_written if shown.dialect != dialect)]
        num_alike = self.num_written.total() - sum(self.num_written[shown] for shown in odd)
        for shown in odd:
            self.num_bad_rows += self.num_else_good[shown]
            places = self.first_written[shown]
            for place, image in places:
                self._tell(Fault(place, Rule.FORMAT, self._difference(learned, shown, num_alike), image))
            self.counts[Rule.FORMAT] += self.num_written[shown] - len(places)
        self.kept[Rule.FORMAT].sort(key=lambda fault: (fault.place.file, fault.place.line))
        return learned

    def _difference(self, learned: AnswerFormat, shown: AnswerFormat, num_alike: int) -> str:
        if shown.dialect != learned.dialect and num_alike == 0:
            return (
                "an answer must be in the configured dialect, got "
                f"dialect={shown.dialect}, stage2_ab.channel_b.target.dialect={learned.dialect}; set the other one"
            )
        return (
            f"all answers must be written alike, got {_example(shown)!r} where {num_alike:,} rows write "
            f"{_example(learned)!r}; write it as they do"
        )


def _example(answer_format: AnswerFormat) -> str:
    """With what the format shows and nothing else."""
    if "empty" in answer_format.seen and "opener" not in answer_format.seen:
        return answer_format.write([])
    objects = [("…", (1, 2, 3, 4)[: answer_format.dialect.num_coordinates])]
    return answer_format.write(objects * (1 + ("separator" in answer_format.seen)))
