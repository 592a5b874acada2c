"""Reads every row of a run's JSONL files before anything heavy starts, and refuses with file, line, problem, remedy.

Looks where ms-swift would only trip later, or train something else than is meant: see ``dataset.row_check``. A bad
sample that slips through (a remote data set, a broken pixel stream) is quarantined while training.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.config import Stage2Config
from swift_stage2.dataset.fault import Rule
from swift_stage2.dataset.files import local_files
from swift_stage2.dataset.survey import Findings, survey
from swift_stage2.errors import ConfigError, DatasetError

logger = logging.getLogger(__name__)

_MOST_LOGGED = 20
_PROGRESS_EVERY_S = 10.0


def check_data(config: Stage2Config) -> None:
    """``check_datasets`` as this configuration trains."""
    check_datasets(config.swift, config.stage2_ab.channel_b.target.dialect if config.b_enabled else None)


def check_datasets(swift_arguments: Mapping[str, Any], dialect: str | None = None) -> None:
    """Checks every row of every local JSONL named by ms-swift's ``dataset`` and ``val_dataset`` arguments.

    ``dialect``: of channel B; without one it is left to channel A how answers are written. Every fault is logged, up
    to a number, before the first is raised; so is advice, which refuses nothing.

    Raises:
        DatasetError: names key, file, line, problem and remedy, and how many rows have faults.
        ConfigError: an argument is neither a path nor a list of paths, or ``split_dataset_ratio`` is out of range.
    """
    for argument, files in check_places(swift_arguments).items():
        if files:
            findings = survey_files(files, dialect)
            _log(argument, findings)
            refuse_faults(argument, findings)


def check_places(swift_arguments: Mapping[str, Any]) -> dict[str, list[Path]]:
    """The local JSONL files of each argument. Raises DatasetError and ConfigError as ``check_datasets`` does."""
    _check_split(swift_arguments.get("split_dataset_ratio"))
    return local_files(swift_arguments)


def survey_files(files: Sequence[Path], dialect: str | None) -> Findings:
    """``survey`` with the rules of a run that has this dialect, or no channel B. Says now and then how far it is."""
    last_s = time.monotonic()

    def tell(num_rows: int, num_bytes: int) -> None:
        nonlocal last_s
        if (now_s := time.monotonic()) - last_s > _PROGRESS_EVERY_S:
            last_s = now_s
            if _is_first_rank():
                logger.warning("checking the data set: %s rows so far", f"{num_rows:,}")

    return survey(
        files,
        dialect=Dialect(dialect) if dialect else None,
        judge_answers=dialect is not None,
        on_progress=tell,
    )


def _check_split(ratio: Any) -> None:
    """YAML reads some numbers (``1e-2``) as text; ms-swift reads them as numbers."""
    try:
        holds = ratio is None or 0 <= float(ratio) < 1
    except (TypeError, ValueError):
        holds = False
    if not holds:
        raise ConfigError(
            "swift.split_dataset_ratio must be at least 0 and below 1, got "
            f"split_dataset_ratio={ratio!r}; write split_dataset_ratio: 0.01"
        )


def refuse_faults(argument: str, findings: Findings) -> None:
    """Raises DatasetError with the first fault and the number of rows that have any."""
    faults = [fault for fault in findings.faults if not fault.rule.is_advice]
    if not faults:
        return
    first = min(faults, key=lambda fault: (findings.files.index(fault.place.file), fault.place.line))
    if findings.num_bad_rows == 1:
        raise DatasetError(f"swift.{argument}: {first}")
    raise DatasetError(
        f"swift.{argument}: {findings.num_bad_rows:,} of {findings.num_rows:,} rows have faults, the first: {first}; "
        f"list all: {list_command(findings)}"
    )


def list_command(findings: Findings) -> str:
    """What shows every fault of these files."""
    return f"swift-stage2 data check {' '.join(map(str, findings.files))}"


def advice_of(findings: Findings) -> list[str]:
    """One line per rule whose breach trains, with its count and its first place."""
    return [
        f"{rule}: {findings.counts[rule]:,} of {findings.num_rows:,} rows, the first: {findings.of(rule)[0]}"
        for rule in Rule
        if rule.is_advice and findings.counts.get(rule)
    ]


def _log(argument: str, findings: Findings) -> None:
    if not _is_first_rank():
        return
    if findings.num_bad_rows > 1:
        for rule in Rule:
            faults = [] if rule.is_advice else findings.of(rule)
            for fault in faults[:_MOST_LOGGED]:
                logger.error("swift.%s: %s", argument, fault)
            if (more := findings.counts.get(rule, 0) - _MOST_LOGGED) > 0 and faults:
                logger.error("swift.%s: %s: and %s more", argument, rule, f"{more:,}")
    for advice in advice_of(findings):
        logger.warning("swift.%s: %s", argument, advice)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
