"""Tells how fast a run was, how far from the best, what binds and which setting would help, by how much and why. Pure.

The first bottleneck is the resource that binds; the others follow in the order of what they usually cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swift_stage2.checks.feeding import sustained
from swift_stage2.pages.content import Headline, Part, Section, Sentence, Table, Tone, filled, seconds
from swift_stage2.report.speed import FEWEST_QUIET, RankWork, Speed, slowest
from swift_stage2.scheduling.step_plan import SkipReason
from swift_stage2.telemetry.summary import SKIP_CAUSES, RunSummary

SLOWDOWN = 0.03
"""Of steps beside rollouts; more than this is told."""
MISSED_SHARE = 0.05
"""Of wanted B steps; the first one comes before any pack."""
ROUNDS_SHARE = 0.05
"""Of the training part; more than this is worth a setting."""
_FEED = (
    " A smaller stage2_ab.channel_b.packing.packing_length needs fewer rollouts for a step, a larger "
    "rollout.max_inflight_per_server makes more at once, a smaller stage2_ab.schedule.b_ratio wants fewer; section "
    "Queue and version lag shows how many packs were ready, and doctor --live computes the settings."
)


def verdict_section(works: Sequence[RankWork], summary: RunSummary, b_ratio: float | None) -> Section:
    """``b_ratio`` as it is set; None where the run did not write it down."""
    speed = slowest(works)
    unused = summary.unused_b
    parts: list[Part | None] = [Sentence(f"{unused[0].upper()}{unused[1:]}.", Tone.WARN) if unused else None]
    if isinstance(speed, Speed):
        parts += [_headline(speed, summary), _missed(summary), _caution(speed)]
        parts += [*map(Sentence, bottlenecks(speed, summary, b_ratio)), _sums(speed)]
    else:
        parts.append(Sentence(f"No speed-up can be told: {speed}.", Tone.WARN))
        parts += map(Sentence, bottlenecks(None, summary, b_ratio))
    return Section("verdict", "Verdict", filled(parts))


def _headline(speed: Speed, summary: RunSummary) -> Headline:
    once = "over the same work done one after another, from this run's own times"
    most = "the most that overlap can give (Amdahl), from this run's own times"
    is_short = summary.num_b_run < summary.num_b_wanted
    of_bound = f"of the bound for the {summary.num_b_run} B steps that ran" if is_short else "of the bound"
    return Headline(
        (
            ("speed-up, computed", f"{speed.speed_up:.2f} ×", once),
            ("bound", f"{speed.bound:.2f} ×", most),
            ("reached", f"{min(1.0, speed.fraction):.0%}", of_bound),
            ("B steps", f"{summary.num_b_run} of {summary.num_b_wanted}", "that the schedule wanted"),
        )
    )


def _missed(summary: RunSummary) -> Sentence | None:
    """Without it a run that left its B steps out would look as good as one that trained them."""
    if (missed := summary.num_b_wanted - summary.num_b_run) <= 0:
        return None
    return Sentence(
        f"Speed-up and bound are of the work that was done: the {missed} of {summary.num_b_wanted} wanted B steps that "
        "did not run count in neither.",
        Tone.WARN if missed > MISSED_SHARE * summary.num_b_wanted else Tone.PLAIN,
    )


def _caution(speed: Speed) -> Sentence | None:
    estimated = [pace.channel for pace in speed.paces if pace.is_estimate]
    told = (
        f"The speed-up may be told too high: fewer than {FEWEST_QUIET} steps of channel {' and '.join(estimated)} ran "
        "without a rollout in flight, so what a step costs alone is estimated from the quicker ones."
    )
    return Sentence(told, Tone.WARN) if estimated else None


def _sums(speed: Speed) -> Table:
    work = ", ".join(f"{name} {seconds(spent)}" for name, spent in speed.working_s.items())
    rows = [
        (
            f"{pace.channel} steps",
            seconds(pace.num_steps * pace.quiet_s),
            f"{pace.num_steps} × {seconds(pace.quiet_s)}, the "
            + (
                f"lower quartile of all: fewer than {FEWEST_QUIET} steps were quiet"
                if pace.is_estimate
                else f"median of {pace.num_quiet} quiet steps"
            ),
        )
        for pace in speed.paces
    ]
    rows += [
        ("S, steps", seconds(speed.steps_s), "the sum of these"),
        ("R, sync rounds", seconds(speed.rounds_s), "the main thread in rounds"),
        ("P, rollouts", seconds(speed.rollouts_s), f"{work}; for the packs that were trained"),
        ("inline", seconds(speed.inline_s), "S + R + P: one after another"),
        ("ideal", seconds(speed.ideal_s), "max(S + R, P): side by side without loss"),
        ("W, measured", seconds(speed.wall_s), "steps and rounds as they were"),
        ("speed-up", f"{speed.speed_up:.2f} ×", "inline / W"),
        ("bound", f"{speed.bound:.2f} ×", "inline / ideal"),
        ("reached", f"{speed.fraction:.1%}", "speed-up / bound = ideal / W"),
    ]
    title = f"How it is computed, of rank {speed.rank}"
    return Table(title, ("part", "value", "how"), tuple(rows), ends_in_words=True)


def bottlenecks(speed: Speed | None, summary: RunSummary, b_ratio: float | None) -> Iterator[str]:
    """The part that binds, if speed and number of steps are known; then all else that costs something.

    Figures of a run that lacked servers are no ground for a setting: there what became of the servers is all.
    """
    is_advised = False
    is_lost = summary.skips.get("servers_suspect", 0) > MISSED_SHARE * summary.num_b_wanted
    if speed and summary.num_steps and not is_lost:
        advice = _b_ratio(speed, summary, b_ratio, upwards=speed.learner_binds)
        is_advised = bool(advice) and not speed.learner_binds
        yield _binding(speed) + advice
        if speed.rounds_s > ROUNDS_SHARE * speed.wall_s:
            num_rounds = summary.num_rounds_committed + summary.num_rounds_failed
            yield (
                f"Sync rounds take {speed.rounds_s / speed.wall_s:.0%} of the training part: {num_rounds} in "
                f"{summary.num_steps} steps; a larger stage2_ab.channel_b.prefetch.sync_every_steps has fewer."
            )
        for pace in speed.paces:
            if pace.busy_s is not None and pace.slowdown is not None and pace.slowdown > SLOWDOWN:
                yield (
                    f"Steps of channel {pace.channel} are {pace.slowdown:.0%} slower beside rollouts and rounds: "
                    f"{seconds(pace.busy_s)} against {seconds(pace.quiet_s)}. Give servers and learner cores of their "
                    "own."
                )
    if not is_lost:
        yield from _missing_packs(speed, summary, b_ratio, is_told=is_advised)
    for reason, missed in summary.skips.items():
        if reason != SkipReason.NOT_ENOUGH_PACKS:
            yield f"{missed} wanted B steps did not run: {SKIP_CAUSES[reason]}; section Sync rounds says more."


def _binding(speed: Speed) -> str:
    learner, rollouts = seconds(speed.learner_s), seconds(speed.rollouts_s)
    if speed.learner_binds:
        return f"The learner binds: its steps and rounds need {learner}, the rollouts {rollouts}."
    asking = speed.working_s["asking"]
    if asking >= speed.rollouts_s - asking:
        return (
            f"The rollouts bind: asking the servers takes {seconds(asking)} of the pipeline's {rollouts}, the learner "
            f"needs {learner}; more servers would shorten the asking."
        )
    spent, name = max((spent, name) for name, spent in speed.working_s.items() if name != "asking")
    return (
        f"Preparation on the CPU binds: the pipeline needs {rollouts}, of which {name} takes {seconds(spent)}; the "
        f"learner needs {learner}."
    )


def sustained_b_ratio(speed: Speed, summary: RunSummary) -> float:
    """The highest share of B steps that these rollouts feed, at this run's step times; rounded down."""
    return sustained(summary.num_b_run / summary.num_steps * speed.learner_s / speed.rollouts_s)


def _b_ratio(speed: Speed, summary: RunSummary, b_ratio: float | None, *, upwards: bool) -> str:
    """The ratio that the rollouts sustain, if it lies in that direction of the wanted one; else nothing."""
    if not speed.rollouts_s:
        return ""
    ratio = sustained_b_ratio(speed, summary)
    wanted = summary.num_b_wanted / summary.num_steps if b_ratio is None else b_ratio
    if ratio == wanted or (ratio > wanted) != upwards:
        return ""
    return (
        f" The rollouts sustain stage2_ab.schedule.b_ratio {'up to ' * upwards}{ratio:g}: {summary.num_b_run} of "
        f"{summary.num_steps} steps × {seconds(speed.learner_s)} / {seconds(speed.rollouts_s)}."
    )


def _missing_packs(
    speed: Speed | None, summary: RunSummary, b_ratio: float | None, *, is_told: bool
) -> Iterator[str]:
    """``is_told``: what binds, and what would help, has been named already."""
    later = summary.skips.get("not_enough_packs", 0) - summary.num_b_too_early
    num_stale = int(
        sum(summary.totals[f"{what}_dropped_stale"] for what in ("packs", "segments", "rollouts"))
    )
    if later and num_stale:
        yield (
            f"{later} wanted B steps lacked packs while {num_stale} packs and rollouts went stale; raise "
            "stage2_ab.channel_b.prefetch.version_window."
        )
    elif later > MISSED_SHARE * summary.num_b_wanted and not is_told:
        advice = _b_ratio(speed, summary, b_ratio, upwards=False) if speed else ""
        late = "" if summary.num_b_run else ", or began too late"
        yield (
            f"{later} of {summary.num_b_wanted} wanted B steps lacked packs while nothing went stale: production was "
            f"too slow for this share{late}.{advice or _FEED}"
        )
