"""Tells how rewards went, how groups were compared, and how far the learner was from what sampled. Pure.

Of a run that trains rollouts by their rewards. The tags are those of TensorBoard, from the counters in the audit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from swift_stage2.channel_b.reward import TOTAL
from swift_stage2.pages.content import (
    Chart,
    Mark,
    Part,
    Section,
    Sentence,
    Table,
    filled,
    number,
    series_of,
    thinned,
)
from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.ledger import UnusedReason
from swift_stage2.telemetry.metrics import RATIOS, REWARD, Ratio, reward_ratios
from swift_stage2.telemetry.reading import RankRecords

Counts = Mapping[str, float]
"""Counters of all ranks together."""
_GAP, _ENTROPY, _KL = "policy/log_prob_gap", "policy/entropy", "policy/kl"
_SPREAD = "group/reward_std"
_MOST = 2.0**62  # of a sum that no damage has made
_UNUSED = tuple(
    Ratio(f"unused: {reason}", (f"rollouts_unused/{reason}",), ("rollouts_prepared",), "share of rollouts")
    for reason in UnusedReason
)
_SHARES = ("policy/clip_share", "policy/cap_share", *(each.tag for each in _UNUSED))
"""Told in percent; the others have units of their own."""


def rewards_section(run: RunData) -> Iterator[Section]:
    """One section, where rollouts were compared with each other; else none."""
    counts = _counts_by_step(run.ranks)
    if run.num_generations == 1 or not counts:
        return
    last = counts[-1][1]
    measured = {ratio.tag: ratio for ratio in (*reward_ratios(last), *RATIOS, *_UNUSED)}
    rewards = [tag for tag in measured if tag.startswith(REWARD)]
    tags = [*sorted(rewards, key=lambda tag: tag != REWARD + TOTAL), _SPREAD]
    shares = [tag for tag in _SHARES if measured[tag].value(last, {})]
    policy = [_GAP, _ENTROPY, *([_KL] if measured[_KL].value(last, {}) else [])]
    parts: list[Part] = [
        _table(counts, [measured[tag] for tag in (*tags, *policy, *shares)]),
        _chart(
            "rewards",
            "Rewards",
            "Mean of each term over the rollouts that were matched between two logging steps, their weighted total, "
            "and the mean standard deviation of totals within a group.",
            "reward",
            counts,
            [measured[tag] for tag in tags],
        ),
        _chart(
            "gap",
            "Learner and server",
            "Mean difference of both sides' log-probabilities of the sampled tokens that were trained: rounding right "
            "after a round, and what the steps since then changed.",
            "nats",
            counts,
            [measured[_GAP]],
        ),
        _chart(
            "entropy",
            "Entropy",
            "Mean of minus the learner's log-probability of these tokens: the policy's entropy, as rollouts estimate "
            "it.",
            "nats",
            counts,
            [measured[_ENTROPY]],
        ),
        _chart(
            "compared",
            "Tokens and rollouts that counted less, or not at all",
            "Shares of sampled tokens whose weight was clipped or capped, and of rollouts of which nothing was "
            "trained.",
            "percent",
            counts,
            [measured[tag] for tag in shares],
        ),
    ]
    compared = number(last["groups_compared"])
    told = Sentence(f"{compared} groups of up to {run.num_generations} rollouts of one row got advantages.")
    yield Section("rewards", "Rewards", filled([told, *parts]))


def _counts_by_step(ranks: Sequence[RankRecords]) -> list[tuple[int, Counts]]:
    """At each logging step that all ranks tell of, and at the run's end; none if a rank tells of none."""
    if not all(rank.metrics for rank in ranks):
        return []
    end = 1 + max((step for rank in ranks for step in rank.steps), default=-1)
    told = []
    for rank in ranks:
        *before, last = rank.metrics
        of_rank = {record["step"]: record["numbers"] for record in before if record["step"] is not None}
        told.append(of_rank | {end if last["step"] is None else last["step"]: last["numbers"]})
    steps = sorted(set.intersection(*map(set, told))) if told else []
    return [(step, _added(of_rank[step] for of_rank in told)) for step in steps]


def _added(every: Iterable[Mapping[str, Any]]) -> Counts:
    """Sums over ranks; what is no number, or none that a run could come to, counts 0."""
    total: Counter[str] = Counter()
    for numbers in every:
        total.update(
            {
                name: value
                for name, value in numbers.items()
                if isinstance(value, int | float) and abs(value) < _MOST
            }
        )
    return total


def _table(counts: Sequence[tuple[int, Counts]], ratios: Sequence[Ratio]) -> Table:
    """Both halves of the run, and all of it."""
    (end, last), nothing = counts[-1], Counter[str]()
    windows: dict[str, tuple[Counts, Counts]] = {"whole run": (last, nothing)}
    if len(counts) > 1:
        middle, before = counts[len(counts) // 2 - 1]
        halves: dict[str, tuple[Counts, Counts]] = {
            f"to step {middle}": (before, nothing),
            f"then to {end}": (last, before),
        }
        windows = halves | windows
    rows = tuple(
        (ratio.tag, *(_cell(ratio, ratio.value(totals, start)) for totals, start in windows.values()))
        for ratio in ratios
    )
    return Table("Means over rollouts, groups and tokens", ("what", *windows), rows)


def _cell(ratio: Ratio, value: float | None) -> str:
    return f"{value:.1%}" if value is not None and ratio.tag in _SHARES else number(value)


def _chart(
    key: str,
    title: str,
    description: str,
    y_title: str,
    counts: Sequence[tuple[int, Counts]],
    ratios: Sequence[Ratio],
) -> Chart:
    windows = [
        (step, totals, before) for (_, before), (step, totals) in pairwise([(0, Counter[str]()), *counts])
    ]
    points = {
        ratio.tag: [
            (step, 100 * value if ratio.tag in _SHARES else value)
            for step, totals, before in windows
            if (value := ratio.value(totals, before)) is not None
        ]
        for ratio in ratios
    }
    return Chart(
        key=key,
        title=title,
        description=description,
        y_title=y_title,
        series=series_of(Mark.LINE, {tag: thinned(told) for tag, told in points.items() if told}),
    )
