"""The verdict in words: how fast, how far from the best, what binds, which knobs, and the sums behind it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from swift_stage2.report.advice import Bottleneck, Knobs, PostSteps, bottlenecks
from swift_stage2.report.content import Headline, Part, Section, Sentence, Table, Tone, filled, seconds
from swift_stage2.report.speed import FEWEST_QUIET, RankWork, Speed, measure, slowest
from swift_stage2.telemetry.recorders import UnusedB
from swift_stage2.telemetry.summary import RunSummary


def verdict_section(
    works: Sequence[RankWork], summary: RunSummary, knobs: Knobs, post_steps: PostSteps = None
) -> Section:
    """The first section of every report."""
    speed = slowest(works)
    known = speed if isinstance(speed, Speed) else None
    found = list(bottlenecks(known, summary, knobs, post_steps))
    unused = UnusedB(
        num_wanted=summary.num_b_wanted,
        num_run=summary.num_b_run,
        skips=Counter(summary.skips),
        num_rounds=summary.num_rounds_committed + summary.num_rounds_failed,
        num_proven=summary.num_rounds_committed,
        errors=Counter(summary.server_errors),
    ).describe()
    parts: list[Part | None] = [Sentence(f"{unused[0].upper()}{unused[1:]}.", Tone.WARN) if unused else None]
    if known:
        parts += [_headline(known, summary), *_cautions(known)]
    else:
        parts.append(Sentence(f"No speed-up can be told: {speed}.", Tone.WARN))
    parts += [*(Sentence(each.sentence) for each in found), _advice(found)]
    if known:
        parts += [_sums(known), _ranks(works) if len(works) > 1 else None]
    return Section("verdict", "Verdict", filled(parts))


def _headline(speed: Speed, summary: RunSummary) -> Headline:
    once = "over the same work done one after another, from this run's own times"
    most = "the most that overlap can give (Amdahl), from this run's own times"
    return Headline(
        (
            ("speed-up, computed", f"{speed.speed_up:.2f} ×", once),
            ("bound", f"{speed.bound:.2f} ×", most),
            ("reached", f"{min(1.0, speed.fraction):.0%}", "of the bound"),
            ("B steps", f"{summary.num_b_run} of {summary.num_b_wanted}", "that the schedule wanted"),
        )
    )


def _cautions(speed: Speed) -> Iterator[Sentence]:
    if estimated := [pace.channel for pace in speed.paces if pace.is_estimate]:
        yield Sentence(
            f"The speed-up may be told too high: fewer than {FEWEST_QUIET} steps of channel {' and '.join(estimated)} "
            "ran without a rollout in flight, so what a step costs alone is estimated from the quicker ones.",
            Tone.WARN,
        )
    if round(speed.fraction, 3) > 1:  # the error of the estimate, which nobody should read as a gain
        cause = (
            "a step costs what the median one does, and some were quicker"
            if speed.learner_binds
            else "rollouts were also made outside of the steps, as before the first one or while a checkpoint was saved"
        )
        yield Sentence(
            f"The figures come to {speed.fraction:.1%} of the bound, which nothing can pass: {cause}. Read it as the "
            f"whole bound, {speed.bound:.2f} ×, to within {speed.fraction - 1:.1%}.",
            Tone.WARN,
        )


def _advice(found: Iterable[Bottleneck]) -> Table:
    rows = tuple(
        (each.knob, "not recorded" if each.present is None else f"{each.present:g}", each.proposed, each.why)
        for bottleneck in found
        for each in bottleneck.advice
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
    rows = tuple(
        (
            str(speed.rank),
            *map(seconds, (speed.steps_s, speed.rounds_s, speed.rollouts_s, speed.wall_s)),
            f"{speed.speed_up:.2f} ×",
            f"{min(1.0, speed.fraction):.0%}",
        )
        for work in works
        if isinstance(speed := measure(work), Speed)
    )
    return Table("By rank", ("rank", "S", "R", "P", "W", "speed-up", "reached"), rows)
