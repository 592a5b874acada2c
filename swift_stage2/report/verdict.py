"""Tells how fast a run was, how far from the best, what binds and which setting would help, by how much and why. Pure.

A run is compared with the same work done inline and with the best that overlap can give. Of one rank, over the
training part of its main thread:

    S       steps, at the pace of quiet ones        R       sync rounds
    P       the pipeline's work for the packs that were trained          W       what the training part took
    F       phases in which packs are made while nothing trains          X       devices that change hands for them
    inline = S + R + P      ideal = max(S + R, P)      speed-up = inline / W      bound = inline / ideal
    fraction = speed-up / bound = ideal / W

``docs/design/README.md`` gives the reasons. The first bottleneck is the resource that binds; the others follow in the
order of what they usually cost.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from swift_stage2.config.stage2_ab import sustained
from swift_stage2.report.content import Part, Section, Sentence, Table, Tone, filled, format_seconds, headline
from swift_stage2.scheduling.step_plan import SkipReason
from swift_stage2.scheduling.version_schedule import MOST_CADENCES
from swift_stage2.telemetry.event_log import RankEvents
from swift_stage2.telemetry.events import Start, Step
from swift_stage2.telemetry.summary import SKIP_CAUSES, RunSummary
from swift_stage2.telemetry.timing import NANOSECONDS, Activity, in_seconds

SLOWDOWN = 0.03  # of steps beside rollouts; more than this is told
WORTH = 0.05
"""Of the wanted B steps, the first of which comes before any pack, or of the training part; more is told."""
WORKING = ("reading", "asking", "preparing", "packing")
"""Activities of the pipeline thread that an inline run would have to do as well."""
FEWEST_QUIET = 5


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One step's cost on this rank's main thread, without rounds, saving and evaluating."""

    step: int
    channel: str
    seconds: float
    is_quiet: bool
    """No rollout was in flight when it began and when it ended, and no round ran at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPace:
    """The cost of one channel's step when nothing disturbs it."""

    channel: str
    num_steps: int
    num_quiet: int
    quiet_s: float
    """Median of the quiet steps, or the lower quartile of all if fewer than ``FEWEST_QUIET`` were quiet."""
    busy_s: float | None
    """Median of the others; None if they are too few."""

    @property
    def is_estimate(self) -> bool:
        """Whether too few steps were quiet."""
        return self.num_quiet < FEWEST_QUIET

    @property
    def slowdown(self) -> float | None:
        """By what share steps beside rollouts are slower; None if that was not measured."""
        if self.is_estimate or self.busy_s is None or not self.quiet_s:
            return None
        return self.busy_s / self.quiet_s - 1


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One rank's comparison, in seconds; the module's first lines tell how it is computed."""

    rank: int
    steps: Sequence[TrainedStep]
    rounds_s: float  # R
    working_s: Mapping[str, float]
    """The pipeline's work by activity, for the packs that were trained; empty without its clock or a pack."""
    filling_s: float = 0.0  # F
    switching_s: float = 0.0  # X

    @property
    def lacks(self) -> str:
        """What is missing for a comparison; empty if nothing is."""
        if not any(step.seconds for step in self.steps):
            return "no step was timed: a run of two steps or more tells"
        if not any(step.channel == "B" for step in self.steps):
            return "no step on channel B was timed, so nothing ran side by side"
        return "" if self.working_s else "no pack was made before the last logging step"

    @cached_property
    def paces(self) -> tuple[ChannelPace, ...]:
        channels = sorted({step.channel for step in self.steps})
        return tuple(_pace(name, [step for step in self.steps if step.channel == name]) for name in channels)

    @cached_property
    def steps_s(self) -> float:  # S
        return sum(pace.num_steps * pace.quiet_s for pace in self.paces)

    @cached_property
    def rollouts_s(self) -> float:  # P
        return sum(self.working_s.values())

    @cached_property
    def wall_s(self) -> float:  # W
        return sum(step.seconds for step in self.steps) + self.rounds_s + self.filling_s + self.switching_s

    @property
    def learner_s(self) -> float:
        """S + R: the main thread's time if nothing disturbed it."""
        return self.steps_s + self.rounds_s

    @property
    def learner_binds(self) -> bool:
        """Whether the rollouts would have had time left."""
        return self.learner_s > self.rollouts_s

    @property
    def facts(self) -> dict[str, float]:
        """Every number, by name."""
        inline_s, ideal_s = self.learner_s + self.rollouts_s, max(self.learner_s, self.rollouts_s)
        return {
            "rank": self.rank,
            "steps_s": self.steps_s,
            "rounds_s": self.rounds_s,
            "rollouts_s": self.rollouts_s,
            "inline_s": inline_s,
            "ideal_s": ideal_s,
            "wall_s": self.wall_s,
            "speed_up": inline_s / self.wall_s,
            "bound": inline_s / ideal_s,
            "fraction": ideal_s / self.wall_s,
        }


def speed_of(rank: RankEvents) -> Speed:
    """Of its work up to its last metrics, which alone tell of the pipeline; of all without any."""
    last = rank.metrics
    until, numbers = (math.inf, {}) if last is None else (last.time, last.numbers)
    steps, timed = [step for step in rank.steps.values() if step.time <= until], trained_steps(rank, until)
    untimed = {step.step for step in steps} - {step.step for step in timed}
    num_made = numbers.get("packs_made", 0)
    num_trained = numbers.get("packs_trained", 0) - sum(len(rank.steps[n].packs) for n in untimed)
    spent_s = in_seconds(last.pipeline_ns if last is not None and num_made else None)
    return Speed(
        rank=rank.rank,
        steps=timed,
        rounds_s=sum(_spent(step, Activity.SYNCING) for step in steps),
        filling_s=sum(_spent(step, Activity.FILLING) for step in steps),
        switching_s=sum(_spent(step, Activity.SWITCHING) for step in steps),
        working_s={name: spent_s.get(name, 0.0) * num_trained / num_made for name in WORKING if spent_s},
    )


def trained_steps(rank: RankEvents, until: float = math.inf) -> list[TrainedStep]:
    """Every step whose successor was told by the same process; the last one's end is not known.

    A step's event is written when its plan is made and tells the main thread's time since the event before. So the
    training of step *s* is told by the event of *s* + 1, and a round by the event of the step before which it ran.
    """
    begins = {start.step for start in rank.of(Start)}
    steps = [step for _, step in sorted(rank.steps.items()) if step.time <= until]
    return [
        TrainedStep(
            step=mine.step,
            channel=mine.channel,
            seconds=_spent(following, Activity.BUSY, Activity.WAITING),
            is_quiet=not (
                mine.infer_in_flight
                or following.infer_in_flight
                or mine.version_in_transfer
                or _spent(following, Activity.SYNCING)
            ),
        )
        for mine, following in pairwise(steps)
        if following.step == mine.step + 1 and following.step not in begins
    ]


def slowest(speeds: Sequence[Speed]) -> Speed:
    """The rank whose training part took longest, of those that can be compared if any can."""
    return max(speeds, key=lambda speed: (not speed.lacks, speed.wall_s))


def _pace(channel: str, steps: Sequence[TrainedStep]) -> ChannelPace:
    quiet = [step.seconds for step in steps if step.is_quiet]
    busy = [step.seconds for step in steps if not step.is_quiet]
    enough = len(quiet) >= FEWEST_QUIET
    return ChannelPace(
        channel=channel,
        num_steps=len(steps),
        num_quiet=len(quiet),
        quiet_s=float(statistics.median(quiet) if enough else np.quantile([*quiet, *busy], 0.25)),
        busy_s=statistics.median(busy) if len(busy) >= FEWEST_QUIET else None,
    )


def _spent(step: Step, *activities: Activity) -> float:
    return sum(step.activity_ns.get(activity, 0) for activity in activities) / NANOSECONDS


def verdict_section(speed: Speed, summary: RunSummary) -> Section:
    unused = summary.unused_b
    parts: list[Part | None] = [Sentence(f"{unused[0].upper()}{unused[1:]}.", Tone.WARN) if unused else None]
    if not speed.lacks:
        advice = map(Sentence, bottlenecks(speed, summary))
        parts += [_headline(speed, summary), *advice, _sums(speed)]
    else:
        parts.append(Sentence(f"No speed-up can be told: {speed.lacks}.", Tone.WARN))
        parts += map(Sentence, bottlenecks(None, summary))
    return Section("verdict", "Verdict", filled(parts))


def _headline(speed: Speed, summary: RunSummary) -> Table:
    once = "over the same work done one after another, from this run's own times"
    most = "the most that overlap can give (Amdahl), from this run's own times"
    is_short = summary.num_b_run < summary.num_b_wanted
    of_bound = f"of the bound for the {summary.num_b_run} B steps that ran" if is_short else "of the bound"
    return headline(
        (
            ("speed-up, computed", f"{speed.facts['speed_up']:.2f} ×", once),
            ("bound", f"{speed.facts['bound']:.2f} ×", most),
            ("reached", f"{min(1.0, speed.facts['fraction']):.0%}", of_bound),
            ("B steps", f"{summary.num_b_run} of {summary.num_b_wanted}", "that the schedule wanted"),
        )
    )


def _sums(speed: Speed) -> Table:
    facts = speed.facts
    work = ", ".join(f"{name} {format_seconds(spent)}" for name, spent in speed.working_s.items())
    rows = [
        (
            f"{pace.channel} steps",
            format_seconds(pace.num_steps * pace.quiet_s),
            f"{pace.num_steps} × {format_seconds(pace.quiet_s)}, the "
            + (
                f"lower quartile of all: fewer than {FEWEST_QUIET} steps were quiet"
                if pace.is_estimate
                else f"median of {pace.num_quiet} quiet steps"
            ),
        )
        for pace in speed.paces
    ]
    rows += [
        ("S, steps", format_seconds(speed.steps_s), "the sum of these"),
        ("R, sync rounds", format_seconds(speed.rounds_s), "the main thread in rounds"),
        ("P, rollouts", format_seconds(speed.rollouts_s), f"{work}; for the packs that were trained"),
        ("inline", format_seconds(facts["inline_s"]), "S + R + P: one after another"),
        ("ideal", format_seconds(facts["ideal_s"]), "max(S + R, P): side by side without loss"),
        ("W, measured", format_seconds(speed.wall_s), "steps, rounds and phases as they were"),
        ("speed-up", f"{facts['speed_up']:.2f} ×", "inline / W"),
        ("bound", f"{facts['bound']:.2f} ×", "inline / ideal"),
        ("reached", f"{facts['fraction']:.1%}", "speed-up / bound = ideal / W"),
    ]
    title = f"How it is computed, of rank {speed.rank}"
    return Table(title, ("part", "value", "how"), tuple(rows), ends_in_words=True)


def bottlenecks(speed: Speed | None, summary: RunSummary) -> Iterator[str]:
    """The part that binds, if speed and number of steps are known; then all else that costs something.

    Figures of a run that lacked servers are no ground for a setting: there what became of the servers is all.
    """
    is_lost = summary.skips.get("servers_suspect", 0) > WORTH * summary.num_b_wanted
    if speed and summary.num_steps and not is_lost:
        yield from [_phases(speed)] if speed.switching_s else _side_by_side(speed, summary)
    if not is_lost:
        yield from _missing_packs(summary)
    for reason, missed in summary.skips.items():
        if reason != SkipReason.NOT_ENOUGH_PACKS:
            yield f"{missed} wanted B steps did not run: {SKIP_CAUSES[reason]}; section Sync rounds says more."


def _side_by_side(speed: Speed, summary: RunSummary) -> Iterator[str]:
    yield _binding(speed) + _b_ratio(speed, summary)
    if speed.rounds_s > WORTH * speed.wall_s:
        num_rounds = summary.num_rounds_committed + summary.num_rounds_failed
        yield (
            f"Sync rounds take {speed.rounds_s / speed.wall_s:.0%} of the training part: {num_rounds} in "
            f"{summary.num_steps} steps; a larger stage2_ab.channel_b.prefetch.sync_every_steps has fewer."
        )
    for pace in speed.paces:
        if pace.busy_s is not None and pace.slowdown is not None and pace.slowdown > SLOWDOWN:
            yield (
                f"Steps of channel {pace.channel} are {pace.slowdown:.0%} slower beside rollouts and rounds: "
                f"{format_seconds(pace.busy_s)} against {format_seconds(pace.quiet_s)}. "
                "Give servers and learner cores of their own."
            )


def _phases(speed: Speed) -> str:
    """Half of the ranks take twice as long for a step, and half of the servers for a pack."""
    halves_s = max(2 * speed.steps_s + speed.rounds_s, 2 * speed.rollouts_s)
    return (
        f"Learner and servers take turns on the same devices: making packs takes {format_seconds(speed.filling_s)} of "
        f"{format_seconds(speed.wall_s)}, switching {format_seconds(speed.switching_s)} "
        f"({speed.switching_s / speed.wall_s:.0%}). With half of the devices for each side the run would take about "
        f"{format_seconds(halves_s)}: the longer of 2 S + R and 2 P. A larger stage2_ab.phase_steps has fewer phases."
    )


def _binding(speed: Speed) -> str:
    learner, rollouts = format_seconds(speed.learner_s), format_seconds(speed.rollouts_s)
    if speed.learner_binds:
        return f"The learner binds: its steps and rounds need {learner}, the rollouts {rollouts}."
    asking = speed.working_s["asking"]
    if asking >= speed.rollouts_s - asking:
        return (
            f"The rollouts bind: asking the servers takes {format_seconds(asking)} of the pipeline's {rollouts}, "
            f"the learner needs {learner}; more servers would shorten the asking."
        )
    spent, name = max((spent, name) for name, spent in speed.working_s.items() if name != "asking")
    return (
        f"Preparation on the CPU binds: the pipeline needs {rollouts}, of which {name} takes {format_seconds(spent)}; "
        f"the learner needs {learner}."
    )


def sustained_b_ratio(speed: Speed, summary: RunSummary) -> float:
    """The highest share of B steps that these rollouts feed, at this run's step times; rounded down."""
    return sustained(summary.num_b_run / summary.num_steps * speed.learner_s / speed.rollouts_s)


def _b_ratio(speed: Speed, summary: RunSummary) -> str:
    """The ratio that the rollouts sustain, if it is above the wanted one and they have time left, or below it."""
    if not speed.rollouts_s:
        return ""
    ratio, upwards = sustained_b_ratio(speed, summary), speed.learner_binds
    wanted = summary.num_b_wanted / summary.num_steps
    if abs(ratio - wanted) < 0.01 or (ratio > wanted) != upwards:
        return ""
    return (
        f" The rollouts sustain stage2_ab.schedule.b_ratio {'up to ' * upwards}{ratio:g}: {summary.num_b_run} of "
        f"{summary.num_steps} steps × {format_seconds(speed.learner_s)} / {format_seconds(speed.rollouts_s)}."
    )


def _missing_packs(summary: RunSummary) -> Iterator[str]:
    later = summary.skips.get("not_enough_packs", 0) - summary.num_b_too_early
    num_stale = int(
        sum(summary.totals[f"{what}_dropped_stale"] for what in ("packs", "segments", "rollouts"))
    )
    if later and num_stale:
        yield (
            f"{later} wanted B steps lacked packs while {num_stale} packs and rollouts went stale: new weights wait "
            f"for them for {MOST_CADENCES} × stage2_ab.channel_b.prefetch.sync_every_steps steps at most; raise it, or "
            "lower rollout.decoding.max_new_tokens."
        )
    elif later > WORTH * summary.num_b_wanted:
        late = "" if summary.num_b_run else ", or began too late"
        yield (
            f"{later} of {summary.num_b_wanted} wanted B steps lacked packs while nothing went stale: production was "
            f"too slow for this share{late}; doctor --live computes the settings."
        )
