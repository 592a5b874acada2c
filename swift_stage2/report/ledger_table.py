"""Turns a run's account into a table for a terminal: a row per rank, what broke the rules, and a verdict. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swift_stage2.telemetry.ledger_account import RunAccount
from swift_stage2.telemetry.ledger_replay import Key, RankAccount, Violation

_MOST_SAMPLES_SHOWN = 8
_COLUMNS = ("rank", "taken over", "drawn", "trained", "quarantined", "in hand", "resumes", "void")


def ledger_table(account: RunAccount) -> RenderableType:
    """The whole answer; tables without rows are left out."""
    tables = [
        _ranks(account.ranks),
        _counts("In hand", (rank.in_hand for rank in account.ranks)),
        _counts("Quarantined, by reason", (rank.quarantined for rank in account.ranks)),
        _counts("Returned and redrawn, by reason", (rank.returned for rank in account.ranks)),
    ]
    return Group(*(table for table in tables if table.row_count), *_violations(account), _verdict(account))


def _ranks(ranks: Sequence[RankAccount]) -> Table:
    rows = [_numbers(rank) for rank in ranks]
    sums = [sum(row[1][column] for row in rows) for column in range(len(_COLUMNS) - 1)]
    shown = [column for column, total in enumerate(sums) if total or _COLUMNS[column + 1] != "taken over"]
    table = Table(title="Samples of channel B", title_justify="left")
    for heading in (_COLUMNS[0], *(_COLUMNS[column + 1] for column in shown)):
        table.add_column(heading, justify="right")
    for name, numbers in [*rows, *([("all", sums)] if len(rows) > 1 else [])]:
        table.add_row(name, *(str(numbers[column]) for column in shown))
    return table


def _numbers(rank: RankAccount) -> tuple[str, list[int]]:
    quarantined, in_hand = sum(rank.quarantined.values()), sum(rank.in_hand.values())
    return str(rank.rank), [
        rank.taken_over,
        rank.drawn,
        rank.trained,
        quarantined,
        in_hand,
        rank.num_resumes,
        rank.num_void,
    ]


def _counts(title: str, parts: Iterable[Mapping[str, int]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=len(title))
    table.add_column()
    table.add_column(justify="right")
    totals: Counter[str] = Counter()
    for part in parts:
        totals.update(part)
    for name, count in totals.items():
        table.add_row(name, str(count))
    return table


def _violations(account: RunAccount) -> Iterator[Text]:
    for violation in account.violations:
        yield _sentence("", violation)
    for rank in account.ranks:
        for violation in rank.violations:
            yield _sentence(f"rank {rank.rank}: ", violation)


def _sentence(whose: str, violation: Violation) -> Text:
    text = f"broken: {whose}{violation.rule}"
    return Text(f"{text}: {_names(violation.samples)}" if violation.samples else text, style="red")


def _names(samples: Sequence[Key]) -> str:
    """Each as epoch:position:row."""
    shown = ", ".join(
        f"{epoch}:{position}:{row}" for epoch, position, row, _ in samples[:_MOST_SAMPLES_SHOWN]
    )
    more = len(samples) - _MOST_SAMPLES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _verdict(account: RunAccount) -> Text:
    if not account.is_provable:
        lost = sum(rank.num_records_lost for rank in account.ranks)
        return Text(
            f"not provable: {lost} records were lost (full disk or damaged file), so what is broken above may only "
            "be what they told",
            style="yellow",
        )
    if account.num_violations:
        return Text(f"not balanced: {account.num_violations} rules are broken", style="bold red")
    return Text("balanced: every sample drawn was trained once, quarantined, or is in hand", style="green")
