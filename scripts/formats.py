"""Writes the tables of docs/design/formats.md from the code: every YAML key, metric tag and kind of event.

``python -m scripts.formats`` renews the page. Its tables stand between markers; the text around them is kept, and a
test compares the page with what this module would write.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from swift_stage2.config.root import Stage2Config
from swift_stage2.config.swift_arguments import SCORED, UNSUPPORTED
from swift_stage2.telemetry import metrics
from swift_stage2.telemetry.events import AnyEvent, Damaged
from swift_stage2.telemetry.metrics import METRICS, RATIOS
from swift_stage2.telemetry.timing import Activity

PAGE = Path(__file__).parents[1] / "docs" / "design" / "formats.md"
_TAG_MEANINGS = {  # of tags that no table of the code describes
    "async/policy_wants_b": "1 at steps for which the schedule wanted channel B",
    "async/step_kind_b": "1 at steps that trained channel B",
    "async/b_step_skipped_due_to_queue": "1 at wanted B steps that ran A because a rank had too few fresh packs",
    "async/b_steps_skipped_total": "wanted B steps that ran channel A, for whichever reason",
    "async/b_ratio_realized": "B steps run / steps so far",
    "async/b_debt": "B steps wanted - B steps run",
    "eval/precision": "matched pairs / predictions",
    "eval/recall": "matched pairs / ground-truth objects of the rows that were answered",
    "eval/f1": "2 · pairs / (predictions + those ground-truth objects)",
    "eval/mean_iou": "summed IoU of pairs / pairs",
    "eval/truncated_ratio": "answers cut off at `max_new_tokens` / answers",
    "eval/num_samples": "rows that were answered",
    "eval/version": "the one version that gave every answer",
    "eval/ap": "COCO's AP, as `evaluate` computes it; with scores where servers give log-probabilities",
    "eval/ap_without_scores": "the same if every score is 1",
    "eval/ece": "expected calibration error of the scores",
    "eval/ap50": "the same at IoU 0.5",
    "eval/ap75": "the same at IoU 0.75",
    "eval/ar": "COCO's AR",
    **{
        f"eval/{each}_50_95": f"mean {each} over IoU 0.5 to 0.95; labels count"
        for each in ("precision", "recall", "f1")
    },
    "eval/invalid_ratio": "answers that ended and cannot be read as a whole / answers",
    "eval/failed_ratio": "rows that were given up / rows",
}


# Of a whole evaluation, when it has ended; the event ``evaluation`` holds its counts.
_EVALUATION_TAGS: tuple[str, ...] = tuple(
    f"eval/{name}"
    for name in ("precision", "recall", "f1", "mean_iou", "truncated_ratio", "num_samples", "version")
)
_SCORE_TAGS: tuple[str, ...] = tuple(f"eval/{name}" for name in SCORED)


def in_cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|").removesuffix(".")


@cache
def sentences(owner: type) -> Mapping[str, str]:
    """The docstring under each field of a dataclass or member of an enum, without markup and final full stop."""
    (tree,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for line, below in zip(tree.body, tree.body[1:], strict=False):
        target = line.target if isinstance(line, ast.AnnAssign) else getattr(line, "targets", [None])[0]
        if (
            isinstance(target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[target.id] = in_cell(str(below.value.value))
    return found


def section_in(kind: Any) -> tuple[type, str] | None:
    """The section that a field of this type holds, and ``[]`` for a list of them."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind, ""
    inner = [each for each in get_args(kind) if isinstance(each, type) and is_dataclass(each)]
    return (inner[0], "[]") if inner else None


def default_of(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING:
        return "required"
    if value is None or value in ((), {}):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else f'{value:g}' if isinstance(value, float) else value}`"


def keys(section: type, place: str = "") -> Iterator[str]:
    """A row per key, deepest sections behind the keys beside them."""
    hints = get_type_hints(section)
    for field in fields(section):
        name, meaning = place + field.name, sentences(section).get(field.name, "")
        inner = section_in(hints[field.name])
        if inner is None or inner[1]:
            kind = hints[field.name]
            if isinstance(kind, type) and issubclass(kind, StrEnum):
                meaning = f"{' / '.join(f'`{choice}`' for choice in kind)}. {meaning}"
            yield f"| `{name}{inner[1] if inner else ''}` | {default_of(field)} | {meaning} |"
        if inner is not None:
            yield from keys(inner[0], f"{name}{inner[1]}.")


def tags() -> Iterator[str]:
    """A row per tag, in the order in which the code declares them."""
    rows = {tag: ("same", meaning) for tag, meaning in _TAG_MEANINGS.items() if tag.startswith("async/")}
    rows |= {metric.tag: (str(metric.merge), metric.help) for metric in METRICS if metric.tag}
    rows |= {ratio.tag: ("ratio", ratio.help) for ratio in RATIOS}
    rows |= {f"time/learner_{each}": ("sum", f"seconds of the main threads: {each}") for each in Activity}
    rows["time/learner_wall"] = ("sum", "seconds of the main threads in all activities")
    rows[f"{metrics.REWARD}<term>"] = ("ratio", "mean of a reward's term; `total` is their weighted sum")
    rows |= {tag: ("same", _TAG_MEANINGS[tag]) for tag in (*_EVALUATION_TAGS, *_SCORE_TAGS)}
    for tag, (merge, meaning) in rows.items():
        yield f"| `{tag}` | {merge} | {in_cell(meaning)} |"


def events() -> Iterator[str]:
    """A row per kind; fields in brackets have a default."""
    for event in get_args(AnyEvent):
        found = {name: field for name, field in event.model_fields.items() if name not in ("kind", "time")}
        names = [name if field.is_required() else f"[{name}]" for name, field in found.items()]
        if event is not Damaged:
            kind = event.model_fields["kind"].default
            yield f"| `{kind}` | {', '.join(names)} | {in_cell(event.__doc__ or '')} |"


def sections() -> Iterator[str]:
    """A table of keys for each section, the keys outside of any first."""
    grouped: dict[str, list[str]] = {"top level": []}
    for row in keys(Stage2Config):
        top, dot, _ = row.removeprefix("| `").partition("`")[0].partition(".")
        grouped.setdefault(top if dot else "top level", []).append(row)
    for section, rows in grouped.items():
        yield from (f"### {section}", "", "| key | default | meaning |", "| --- | --- | --- |", *rows, "")


def tables() -> dict[str, list[str]]:
    refused = (f"| `{rule.key}` | {in_cell(rule.reason)} | {rule.remedy} |" for rule in UNSUPPORTED)
    return {
        "keys": [*sections()],
        "refused": ["| key | refused because | instead |", "| --- | --- | --- |", *refused],
        "tags": ["| tag | merge | meaning |", "| --- | --- | --- |", *tags()],
        "events": [
            "| kind | fields | meaning |",
            "| --- | --- | --- |",
            *events(),
        ],
    }


def renewed(page: str) -> str:
    """The page with its tables as the code declares them now."""
    for name, rows in tables().items():
        head, begin, rest = page.partition(f"<!-- generated: {name} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        page = head + begin + "".join(f"{row}\n" for row in rows) + end + tail
    return page


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
