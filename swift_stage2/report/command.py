"""The ``report`` command: the ledgers of a run in; its account, and whom it trained, out.

Exit status: 0 every sample has one end or is in hand, 1 not so or not provable, 2 there is no such run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from rich.console import Console

from swift_stage2.report.ledger_table import ledger_table
from swift_stage2.report.selection import Draw, compare, draws_of
from swift_stage2.report.selection_table import selection_table
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import read_ledgers
from swift_stage2.telemetry.ledger_account import account_of, effective_histories

EXIT_BALANCED = 0
EXIT_NOT_BALANCED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the account and returns the exit status."""
    options = _parser().parse_args(argv)
    ledgers = read_ledgers(options.run_dir)
    account, comparisons = account_of(ledgers), compare(_draws(ledgers))
    if options.json:
        facts = asdict(account) | {"balanced": account.is_balanced, "provable": account.is_provable}
        facts["selection"] = [asdict(found) for found in comparisons]
        print(json.dumps(facts, indent=2))
    else:
        console = Console()
        console.print(selection_table(comparisons))
        console.print(ledger_table(account))
    return EXIT_BALANCED if account.is_balanced else EXIT_NOT_BALANCED


def _draws(ledgers: Mapping[int, Sequence[Record]]) -> list[Draw]:
    histories = effective_histories(ledgers).values()
    return [draw for history in histories for draw in draws_of(chain.from_iterable(history))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swift-stage2 report",
        description="Checks the ledgers of a run: every sample drawn was trained once, quarantined, or is in hand.",
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        nargs="+",
        help="a run's output directory; if it was resumed into others, all of them, oldest first",
    )
    parser.add_argument("--json", action="store_true", help="print the account as JSON")
    return parser
