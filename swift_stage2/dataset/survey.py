"""Checks every row of every file, streamed, and says what was found: all of it counted, the first of each kind kept.

Deterministic: files and lines in their order, no seed. Which format is right is known only at the end: the one that
most rows have (and a configured dialect, where there is one); rows that contradict it are faults then.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from swift_stage2.channel_b.answer_format import AnswerFormat
from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.dataset.fault import Fault, Place, Rule
from swift_stage2.dataset.picture import look_at
from swift_stage2.dataset.row_check import check_line
from swift_stage2.errors import DatasetError

MOST_KEPT = 100
"""Faults of one rule that are kept to be shown; all are counted."""
_MOST_FORMATS = 1000
_PICTURES_REMEMBERED = 4096  # rows that ask several things about one image stand near each other

OnProgress = Callable[[int, int], None]
"""Told after every row: rows so far, bytes of this file so far."""


@dataclass(frozen=True, slots=True)
class Longest:
    """The row with the longest answer."""

    place: Place
    num_characters: int
    num_objects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was found in all files. ``counts`` holds every fault, ``faults`` the first of each rule, in order."""

    files: tuple[Path, ...]
    num_rows: int
    num_bad_rows: int
    counts: Mapping[Rule, int]
    faults: tuple[Fault, ...]
    answer_format: AnswerFormat | None
    longest: Longest | None
    seconds: float

    @property
    def num_faults(self) -> int:
        """Without advice."""
        return sum(count for rule, count in self.counts.items() if not rule.is_advice)

    @property
    def rows_per_second(self) -> float:
        return self.num_rows / self.seconds if self.seconds > 0 else 0.0

    def of(self, rule: Rule) -> list[Fault]:
        """Those that were kept."""
        return [fault for fault in self.faults if fault.rule is rule]


def survey(
    files: Sequence[Path],
    *,
    dialect: Dialect | None = None,
    decode: bool = False,
    judge_answers: bool = True,
    on_progress: OnProgress = lambda num_rows, num_bytes: None,
) -> Findings:
    """Checks all rows of ``files``; ``decode`` reads every image to its last pixel.

    Without ``judge_answers`` an answer may be anything, as long as its placeholders find their objects.

    Raises:
        DatasetError: a file cannot be read or holds no rows.
    """
    run = _Survey(dialect, decode, judge_answers, on_progress)
    for file in files:
        run.read(file)
    return run.finish(tuple(files))


class _Survey:
    """What is known so far."""

    def __init__(
        self, dialect: Dialect | None, decode: bool, judge_answers: bool, on_progress: OnProgress
    ) -> None:
        self._dialect = dialect
        self._judge_answers = judge_answers
        self._on_progress = on_progress
        self._look = lru_cache(_PICTURES_REMEMBERED)(partial(look_at, decode=decode))
        self._started_s = time.monotonic()
        self._num_rows = 0
        self._num_bad_rows = 0
        self._counts: Counter[Rule] = Counter()
        self._kept: dict[Rule, list[Fault]] = defaultdict(list)
        self._num_written: Counter[AnswerFormat] = Counter()
        self._num_else_good: Counter[AnswerFormat] = Counter()  # rows with no fault but perhaps this one
        self._first_written: dict[AnswerFormat, list[Place]] = {}
        self._longest: Longest | None = None

    def read(self, file: Path) -> None:
        num_before = self._num_rows
        try:
            with file.open("rb") as lines:
                num_bytes = 0
                for number, line in enumerate(lines, start=1):
                    num_bytes += len(line)
                    if line.strip():
                        self._check(line, Place(file, number))
                        self._on_progress(self._num_rows, num_bytes)
        except OSError as error:
            raise DatasetError(f"a data set must be a readable UTF-8 file, got {file}: {error}") from error
        if self._num_rows == num_before:
            raise DatasetError(
                f"a data set must hold rows, got none in {file}; write one JSON object per line"
            )

    def _check(self, line: bytes, place: Place) -> None:
        row = check_line(line, place, self._look, judge_answer=self._judge_answers)
        self._num_rows += 1
        is_bad = any(not fault.rule.is_advice for fault in row.faults)
        self._num_bad_rows += is_bad
        for fault in row.faults:
            self._tell(fault)
        shown = row.answer_format
        if shown and (shown in self._num_written or len(self._num_written) < _MOST_FORMATS):
            self._num_written[shown] += 1
            self._num_else_good[shown] += not is_bad
            places = self._first_written.setdefault(shown, [])
            if len(places) < MOST_KEPT:
                places.append(place)
        if self._longest is None or row.num_answer_characters > self._longest.num_characters:
            self._longest = Longest(place, row.num_answer_characters, row.num_objects)

    def _tell(self, fault: Fault, count: int = 1) -> None:
        self._counts[fault.rule] += count
        if len(kept := self._kept[fault.rule]) < MOST_KEPT:
            kept.append(fault)

    def finish(self, files: tuple[Path, ...]) -> Findings:
        learned = self._learn_format()
        return Findings(
            files=files,
            num_rows=self._num_rows,
            num_bad_rows=self._num_bad_rows,
            counts={rule: self._counts[rule] for rule in Rule if self._counts[rule]},
            faults=tuple(fault for rule in Rule for fault in self._kept[rule]),
            answer_format=learned,
            longest=self._longest,
            seconds=time.monotonic() - self._started_s,
        )

    def _learn_format(self) -> AnswerFormat | None:
        """What most answers are written in; tells of every answer that is written otherwise."""
        learned: AnswerFormat | None = None
        num_alike = 0
        odd: list[tuple[AnswerFormat, int]] = []
        for shown, count in self._num_written.most_common():
            joined = self._joined(learned, shown)
            if joined is None:
                odd.append((shown, count))
            else:
                learned, num_alike = joined, num_alike + count
        for shown, count in odd:
            self._num_bad_rows += self._num_else_good[shown]
            places = self._first_written[shown]
            for place in places:
                self._tell(Fault(place, Rule.FORMAT, self._difference(learned, shown, num_alike)))
            self._counts[Rule.FORMAT] += count - len(places)
        self._kept[Rule.FORMAT].sort(key=lambda fault: (fault.place.file, fault.place.line))
        return learned

    def _joined(self, learned: AnswerFormat | None, shown: AnswerFormat) -> AnswerFormat | None:
        if self._dialect not in (None, shown.dialect):
            return None
        return shown if learned is None else learned.joined(shown)

    def _difference(self, learned: AnswerFormat | None, shown: AnswerFormat, num_alike: int) -> str:
        if learned is None:
            return (
                "an answer must be in the configured dialect, got "
                f"dialect={shown.dialect}, stage2_ab.channel_b.target.dialect={self._dialect}; set the other one"
            )
        example = [("…", (1, 2, 3, 4))]
        return (
            f"all answers must be written alike, got {shown.write(example)!r} where {num_alike} rows write "
            f"{learned.write(example)!r}; write it as they do"
        )
