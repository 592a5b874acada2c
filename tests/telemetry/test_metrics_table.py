from __future__ import annotations

import re
from pathlib import Path

from swift_stage2.channel_b.ready_queue import DropReason
from swift_stage2.records import ObjectDropReason
from swift_stage2.scheduling.step_plan import SkipReason
from swift_stage2.telemetry import metrics
from swift_stage2.telemetry.activity import Activity
from swift_stage2.telemetry.metrics import EVALUATION_TAGS, METRICS, RATIOS
from swift_stage2.telemetry.tensorboard import LAYOUT

DOCUMENT = Path(__file__).parents[2] / "docs" / "design" / "metrics.md"

PLAN_TAGS = {
    "async/policy_wants_b",
    "async/step_kind_b",
    "async/b_step_skipped_due_to_queue",
    "async/b_ratio_realized",
    "async/b_debt",
    "async/b_steps_skipped_total",
}


def table_tags() -> list[str]:
    return [metric.tag for metric in METRICS if metric.tag is not None] + [ratio.tag for ratio in RATIOS]


def declared_tags() -> set[str]:
    return (
        set(table_tags())
        | PLAN_TAGS
        | set(EVALUATION_TAGS)
        | {f"time/learner_{name}" for name in (*Activity, "wall")}
    )


def test_the_queue_s_drop_reasons_are_declared() -> None:
    assert {f"packs_{reason}" for reason in DropReason} <= set(metrics.METRICS_BY_NAME)


def test_no_two_numbers_share_a_tag() -> None:
    assert len(table_tags()) == len(set(table_tags()))


def test_ratios_divide_declared_counters() -> None:
    names = {name for ratio in RATIOS for name in (*ratio.numerator, *ratio.denominator)}
    assert names <= set(metrics.METRICS_BY_NAME)


def test_every_tag_has_its_place_in_the_layout() -> None:
    placed = [tag for charts in LAYOUT.values() for tags in charts.values() for tag in tags]
    assert sorted(placed) == sorted(declared_tags())


def test_the_document_lists_every_tag_and_no_other() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    listed = {row for row in rows if "/" in row}
    families = {
        "async/skipped/<reason>_total": tuple(SkipReason),
        "parse/dropped/<reason>": tuple(ObjectDropReason),
        "time/<stage>": metrics.STAGES,
        "time/learner_<activity>": tuple(Activity),
    }
    for row, members in families.items():
        listed.remove(row)
        listed |= {re.sub("<.*>", member, row) for member in members}
    assert listed == declared_tags()
