"""``swift-stage2 data check FILE…``: every row checked, streamed; all faults counted, the first of each kind kept.

Deterministic: files and lines in their order, no seed. Which format is right is known only at the end: the one that
most rows have (and a configured dialect, where there is one); rows that contradict it are faults then.
Exit status: 0 no fault (advice is none), 1 faults found, 2 the call cannot be used (no such file, a wrong option).
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from swift_stage2.channel_b.answer_templates import PossibleTemplates, common_templates
from swift_stage2.channel_b.dialects import DIALECTS, Dialect, coordinates_of
from swift_stage2.channel_b.targets import AnswerTemplate
from swift_stage2.config.stage2_ab import DEFAULT_TASK
from swift_stage2.data.files import Fault, Place, Rule, coordinates_in, read_lines
from swift_stage2.data.picture import look_at
from swift_stage2.data.row_check import CheckedRow, check_line
from swift_stage2.errors import DatasetError
from swift_stage2.runtime.output import progress_bar, say
from swift_stage2.runtime.parser import CommandParser

MOST_KEPT = 100
"""Faults of one rule that are kept to be shown; all are counted."""
_FIRST_BLOCK = 10 * 2**20  # bytes by which ms-swift's loader, `datasets`, takes the columns' types
_MOST_FORMATS = 1000
_PICTURES_REMEMBERED = 4096  # rows that ask several things about one image stand near each other
OnProgress = Callable[[int, int], None]
"""Told after every row: rows and bytes so far."""


@dataclass(slots=True)
class _Format:
    """One way in which answers are written: how many rows, how many of them have no other fault, the first of them."""

    num_rows: int = 0
    num_else_good: int = 0
    first: list[tuple[Place, str | None]] = field(default_factory=list)


class Findings:
    """The findings in ``files``. ``counts`` holds every fault by rule, and ``faults`` the first of each, in order."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.num_rows = self.num_bad_rows = 0
        self.template: AnswerTemplate | None = None
        self.counter = Counter[Rule]()
        self._kept: defaultdict[Rule, list[Fault]] = defaultdict(list)

    @property
    def counts(self) -> dict[Rule, int]:
        return {rule: self.counter[rule] for rule in Rule if self.counter[rule]}

    @property
    def faults(self) -> list[Fault]:
        return [fault for rule in Rule for fault in self.of(rule)]

    @property
    def num_faults(self) -> int:
        """Without advice."""
        return sum(count for rule, count in self.counter.items() if not rule.is_advice)

    def of(self, rule: Rule) -> list[Fault]:
        """Those that were kept, by their place."""
        return self._kept[rule]

    def add(self, fault: Fault) -> None:
        """Faults of one rule come by their place."""
        self.counter[fault.rule] += 1
        if len(kept := self._kept[fault.rule]) < MOST_KEPT:
            kept.append(fault)


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
    found, formats = Findings(files), dict[PossibleTemplates, _Format]()
    num_bytes = 0
    for file in files:
        num_before, begin, columns = found.num_rows, num_bytes, set[str]()
        for number, line in enumerate(read_lines(file), start=1):
            is_late = num_bytes - begin >= _FIRST_BLOCK
            num_bytes += len(line)
            if line.strip():
                row = check(line, Place(file, number))
                late = sorted(row.columns - columns)[:1] if is_late else []
                columns |= row.columns
                _add_row(found, formats, Place(file, number), row, late)
                on_progress(found.num_rows, num_bytes)
        if found.num_rows == num_before:
            raise DatasetError(
                "a data set must hold rows", got=f"none in {file}", remedy="write one JSON object per line"
            )
    if formats:
        _compare_formats(found, formats, dialect)
    return found


def _add_row(
    found: Findings,
    formats: dict[PossibleTemplates, _Format],
    place: Place,
    row: CheckedRow,
    late: Sequence[str],
) -> None:
    """``late``: the column, if any, that no row before has shown."""
    faults = list(row.faults)
    for column in late:
        reason = (
            f"the first {_FIRST_BLOCK >> 20} MiB of a file must show each column that it has, because ms-swift loads "
            f"the rest as these say, got the first {column} after them; move this row to the top of the file"
        )
        faults.append(Fault(place, Rule.COLUMNS, reason, row.image))
    for fault in faults:
        found.add(fault)
    is_bad = any(not fault.rule.is_advice for fault in faults)
    found.num_rows += 1
    found.num_bad_rows += is_bad
    shown = row.templates
    if shown and (shown in formats or len(formats) < _MOST_FORMATS):
        written = formats.setdefault(shown, _Format())
        written.num_rows += 1
        written.num_else_good += not is_bad
        if len(written.first) < MOST_KEPT:
            written.first.append((place, row.image))


def _compare_formats(
    found: Findings, formats: Mapping[PossibleTemplates, _Format], dialect: Dialect | None
) -> None:
    """Learns the format that most answers are written in; tells of every answer that is written otherwise."""
    num_in: Counter[Dialect] = Counter()
    for shown, written in formats.items():
        num_in[shown.dialect] += written.num_rows
    dialect = dialect or num_in.most_common(1)[0][0]
    of_dialect = {shown: written.num_rows for shown, written in formats.items() if shown.dialect == dialect}
    learned, others = common_templates(of_dialect, dialect)
    odd = [*others, *(shown for shown in formats if shown.dialect != dialect)]
    num_alike = sum(written.num_rows for shown, written in formats.items() if shown not in odd)
    faults: list[Fault] = []
    for shown in odd:
        written, told = formats[shown], _difference(learned, shown, num_alike)
        found.num_bad_rows += written.num_else_good
        found.counter[Rule.FORMAT] += written.num_rows - len(written.first)
        faults += [Fault(place, Rule.FORMAT, told, image) for place, image in written.first]
    for fault in sorted(faults, key=lambda each: (found.files.index(each.place.file), each.place.line)):
        found.add(fault)
    found.template = learned.likeliest


def _difference(learned: PossibleTemplates, shown: PossibleTemplates, num_alike: int) -> str:
    if shown.dialect != learned.dialect and num_alike == 0:
        return (
            "an answer must be in the configured dialect, got "
            f"dialect={shown.dialect}, stage2_ab.channel_b.target.dialect={learned.dialect}; set the other one"
        )
    one = ("…", (1, 2, 3, 4)[: shown.dialect.num_coordinates])
    written = ([each.likeliest.write([one] * count) for each in (shown, learned)] for count in (1, 2, 0))
    own, other = next(
        pair for pair in written if pair[0] != pair[1]
    )  # with objects, where these tell them apart
    return (
        f"all answers must be written alike, got {own!r} where {num_alike:,} rows write {other!r}; "
        "write it as they do"
    )


EXIT_FAULTS = 1
MOST_SHOWN = 20
"""Faults of one rule that are shown unless all are asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Raises UserError: a file is missing, or one cannot be written."""
    options = _parse(argv)
    files = [Path(name) for name in options.files]
    if options.task or options.dialect:
        num_coordinates = coordinates_of(options.task or DEFAULT_TASK, options.dialect)
    else:
        num_coordinates = coordinates_in(files)
    total = sum(file.stat().st_size for file in files if file.is_file())
    with progress_bar(total, "rows") as move_to:
        findings = survey(
            files,
            dialect=DIALECTS[options.dialect] if options.dialect else None,
            decode=options.decode,
            needs_objects=not options.rows_without_objects,
            num_coordinates=num_coordinates,
            on_progress=lambda num_rows, num_bytes: move_to(num_bytes, f"{num_rows:,} rows"),
        )
    status = EXIT_FAULTS if findings.num_faults else 0
    most_shown = MOST_KEPT if options.all else MOST_SHOWN
    unchecked = "" if num_coordinates else f"objects and answers of task {options.task}"
    say(*lines_of(findings, most_shown, unchecked))
    return status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    statuses = "0 no fault; 1 faults found"
    parser = CommandParser(
        exit_statuses=statuses, prog="swift-stage2 data", description="Checks training data without a model."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="check every row of JSONL files",
        description="Checks every row of JSONL files and prints all faults, each with its file and line.",
        exit_statuses=statuses,
    )
    add = check.add_argument
    add("files", nargs="+", metavar="FILE.jsonl")
    task_help = (
        f"stage2_ab.task (default: as the first object tells, {DEFAULT_TASK} or point); of your own task's rows form "
        "and images are checked, and objects and answers where --dialect says what they are in"
    )
    add("--task", metavar="NAME", help=task_help)
    add("--dialect", choices=list(DIALECTS), help="the dialect that answers must be in")
    add(
        "--decode",
        action="store_true",
        help="decode every image to its last pixel (slow), not only its header",
    )
    without_help = "allow rows without objects, as rows_without_objects: channel_a_only does"
    add("--rows-without-objects", action="store_true", help=without_help)
    add("--all", action="store_true", help=f"show up to {MOST_KEPT} faults per rule")
    return parser.parse_args(argv)


def lines_of(findings: Findings, most_shown: int = MOST_SHOWN, unchecked: str = "") -> Iterator[str]:
    """Every rule that was broken with its places, facts that are no fault, then the verdict.

    ``unchecked``: what nobody looked at.
    """
    for rule, count in findings.counts.items():
        kind = "advice" if rule.is_advice else "fault"
        yield f"{kind}: {rule}: {count:,} of {findings.num_rows:,} rows" + (
            "" if rule not in (Rule.BOUNDS, Rule.IMAGE) else " or objects in them"
        )
        shown = findings.of(rule)[:most_shown]
        yield from (f"  {fault}" for fault in shown)
        if count > len(shown):
            yield f"  … and {count - len(shown):,} more"
    if (written := findings.template) is not None:
        coordinates = (1, 2, 3, 4)[: written.dialect.num_coordinates]
        yield f"answers: dialect {written.dialect}, written {written.write([('label', coordinates)])!r}"
    checked = f"{findings.num_rows:,} rows of {len(findings.files)} file(s), every one checked"
    advised = sum(count for rule, count in findings.counts.items() if rule.is_advice)
    beside = f"; {advised:,} times advice" if advised else ""
    where = f" in form and images; {unchecked} were not checked" if unchecked else ""
    verdict = f"{findings.num_bad_rows:,} have faults" if findings.num_bad_rows else "no fault"
    yield f"{checked}: {verdict}{where}{beside}"
