"""The verdict in words: how fast, how far from the best, what binds, which knobs, and the sums behind it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from swift_stage2.report.advice import Course, Finding, Knobs, findings
from swift_stage2.report.content import Headline, Part, Section, Sentence, Table, Tone, filled, seconds
from swift_stage2.report.speed import FEWEST_QUIET, RankWork, Speed, measure, slowest


def verdict_section(works: Iterable[RankWork], course: Course, knobs: Knobs) -> Section:
    """The first section of every report."""
    works = list(works)
    speed = slowest(works)
    known = speed if isinstance(speed, Speed) else None
    found = findings(known, course, knobs)
    parts: list[Part | None] = [
        Sentence(f"{course.unused[0].upper()}{course.unused[1:]}.", Tone.WARN) if course.unused else None,
        _headline(known, course) if known else Sentence(f"No speed-up can be told: {speed}.", Tone.WARN),
        _caution(known) if known else None,
        _above_bound(known) if known else None,
        *(Sentence(finding.sentence) for finding in found),
        _advice(found),
        _sums(known) if known else None,
        _ranks(works) if known and len(works) > 1 else None,
    ]
    return Section("verdict", "Verdict", filled(parts))


def _headline(speed: Speed, course: Course) -> Headline:
    return Headline(
        (
            (
                "speed-up, computed",
                f"{speed.speed_up:.2f} ×",
                "over the same work done one after another, from this run's own times",
            ),
            (
                "bound",
                f"{speed.bound:.2f} ×",
                "the most that overlap can give (Amdahl), from this run's own times",
            ),
            ("reached", f"{min(1.0, speed.fraction):.0%}", "of the bound"),
            ("B steps", f"{course.num_b_run} of {course.num_b_wanted}", "that the schedule wanted"),
        )
    )


def _caution(speed: Speed) -> Sentence | None:
    estimated = [pace.channel for pace in speed.paces if pace.is_estimate]
    if not estimated:
        return None
    return Sentence(
        f"The speed-up may be told too high: fewer than {FEWEST_QUIET} steps of channel {' and '.join(estimated)} ran "
        "without a rollout in flight, so what a step costs alone is estimated from the quicker ones.",
        Tone.WARN,
    )


def _above_bound(speed: Speed) -> Sentence | None:
    """A share above one is the error of the estimate, which nobody should read as a gain."""
    if round(speed.fraction, 3) <= 1:
        return None
    cause = (
        "a step costs what the median one does, and some were quicker"
        if speed.learner_binds
        else "rollouts were also made outside of the steps, as before the first one or while a checkpoint was saved"
    )
    return Sentence(
        f"The figures come to {speed.fraction:.1%} of the bound, which nothing can pass: {cause}. Read it as the whole "
        f"bound, {speed.bound:.2f} ×, to within {speed.fraction - 1:.1%}.",
        Tone.WARN,
    )


def _advice(found: Iterable[Finding]) -> Table:
    rows = tuple(
        (advice.knob, advice.present or "not recorded", advice.proposed, advice.why)
        for finding in found
        for advice in finding.advice
    )
    return Table("What would help", ("knob", "now", "try", "because"), rows, ends_in_words=True)


def _sums(speed: Speed) -> Table:
    work = ", ".join(f"{name} {seconds(spent)}" for name, spent in speed.working_s.items())
    rows = (
        *_paces(speed),
        ("S, steps", seconds(speed.steps_s), "the sum of these"),
        ("R, sync rounds", seconds(speed.rounds_s), "the main thread in rounds"),
        ("P, rollouts", seconds(speed.rollouts_s), f"{work}; for the packs that were trained"),
        ("inline", seconds(speed.inline_s), "S + R + P: one after another"),
        ("ideal", seconds(speed.ideal_s), "max(S + R, P): side by side without loss"),
        ("W, measured", seconds(speed.wall_s), "steps and rounds as they were"),
        ("speed-up", f"{speed.speed_up:.2f} ×", "inline / W"),
        ("bound", f"{speed.bound:.2f} ×", "inline / ideal"),
        ("reached", f"{speed.fraction:.1%}", "speed-up / bound = ideal / W"),
    )
    return Table(
        f"How it is computed, of rank {speed.rank}", ("part", "value", "how"), rows, ends_in_words=True
    )


def _paces(speed: Speed) -> Iterator[tuple[str, str, str]]:
    for pace in speed.paces:
        how = f"median of {pace.num_quiet} quiet steps"
        if pace.is_estimate:
            how = f"lower quartile of all: fewer than {FEWEST_QUIET} steps were quiet"
        yield (
            f"{pace.channel} steps",
            seconds(pace.num_steps * pace.quiet_s),
            f"{pace.num_steps} × {seconds(pace.quiet_s)}, the {how}",
        )


def _ranks(works: Iterable[RankWork]) -> Table:
    speeds = [speed for work in works if isinstance(speed := measure(work), Speed)]
    rows = tuple(
        (
            str(speed.rank),
            *(seconds(value) for value in (speed.steps_s, speed.rounds_s, speed.rollouts_s, speed.wall_s)),
            f"{speed.speed_up:.2f} ×",
            f"{min(1.0, speed.fraction):.0%}",
        )
        for speed in speeds
    )
    return Table("By rank", ("rank", "S", "R", "P", "W", "speed-up", "reached"), rows)
