"""The ``report`` command: the ledgers of a run in, its account out.

Exit status: 0 every sample has one end or is in hand, 1 not so or not provable, 2 there is no such run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from swift_stage2.report.ledger_table import ledger_table
from swift_stage2.telemetry.ledger import read_ledgers
from swift_stage2.telemetry.ledger_account import account_of

EXIT_BALANCED = 0
EXIT_NOT_BALANCED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the account and returns the exit status."""
    options = _parser().parse_args(argv)
    account = account_of(read_ledgers(options.run_dir))
    if options.json:
        facts = asdict(account) | {"balanced": account.is_balanced, "provable": account.is_provable}
        print(json.dumps(facts, indent=2))
    else:
        Console().print(ledger_table(account))
    return EXIT_BALANCED if account.is_balanced else EXIT_NOT_BALANCED


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
