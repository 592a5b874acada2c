"""Says what holds a run back and which knob would help, by how much, and why. Pure.

The first finding names the resource that binds; the others follow in the order of what they usually cost.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from swift_stage2.report.content import seconds
from swift_stage2.report.run_data import RunData
from swift_stage2.report.speed import ChannelPace, Speed, trained_steps
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.summary import RunSummary
from swift_stage2.telemetry.unused_b import describe_unused

SLOWDOWN = 0.03
"""Of steps beside rollouts; more than this is told."""
MISSED_SHARE = 0.05
"""Of wanted B steps; the first one comes before any pack."""


class Resource(StrEnum):
    """What a run is short of."""

    LEARNER = "the learner"
    ROLLOUTS = "the rollouts"
    PREPARATION = "preparation on the CPU"
    ROUNDS = "sync rounds"
    WINDOW = "the version window"
    PRODUCTION = "production"
    SERVERS = "proven servers"
    INTERFERENCE = "interference"


@dataclass(frozen=True, slots=True)
class Advice:
    """One knob to turn, and the arithmetic that says how far. ``present`` is None where it is not known."""

    knob: str
    present: str | None
    proposed: str
    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that holds the run back."""

    resource: Resource
    sentence: str
    advice: tuple[Advice, ...] = ()


def findings(speed: Speed | None, course: Course, knobs: Knobs) -> tuple[Finding, ...]:
    """What binds first, if the speed and the steps it was reached in are known; then what else costs something."""
    return (
        *(_of_speed(speed, course, knobs) if speed and course.num_steps else ()),
        *_missing_packs(speed, course, knobs),
        *_servers(course),
    )


def _of_speed(speed: Speed, course: Course, knobs: Knobs) -> Iterator[Finding]:
    yield _binding(speed, course, knobs)
    if speed.rounds_s > ROUNDS_SHARE * speed.wall_s:
        yield _rounds(speed, course, knobs)
    for pace in speed.paces:
        if pace.slowdown is not None and pace.slowdown > SLOWDOWN:
            yield _interference(pace)


def _binding(speed: Speed, course: Course, knobs: Knobs) -> Finding:
    learner, rollouts = seconds(speed.learner_s), seconds(speed.rollouts_s)
    if speed.learner_binds:
        return Finding(
            Resource.LEARNER,
            f"The learner binds: its steps and rounds need {learner}, the rollouts {rollouts}.",
            tuple(_more_b(speed, course, knobs)),
        )
    asking = speed.working_s["asking"]
    if asking >= speed.rollouts_s - asking:
        return Finding(
            Resource.ROLLOUTS,
            f"The rollouts bind: asking the servers takes {seconds(asking)} of the pipeline's {rollouts}, the learner "
            f"needs {learner}.",
            (*_more_servers(speed, knobs), *_less_b(speed, course, knobs)),
        )
    name, most = max(
        ((name, spent) for name, spent in speed.working_s.items() if name != "asking"),
        key=lambda item: item[1],
    )
    return Finding(
        Resource.PREPARATION,
        f"Preparation on the CPU binds: the pipeline needs {rollouts}, of which {name} takes {seconds(most)}; the "
        f"learner needs {learner}.",
        tuple(_less_b(speed, course, knobs)),
    )


def _more_b(speed: Speed, course: Course, knobs: Knobs) -> Iterator[Advice]:
    if speed.rollouts_s and (ratio := sustained_b_ratio(speed, course)) > _wanted_ratio(course, knobs):
        yield _b_ratio(speed, course, knobs, f"up to {ratio:g}")


def _less_b(speed: Speed, course: Course, knobs: Knobs) -> Iterator[Advice]:
    if speed.rollouts_s and (ratio := sustained_b_ratio(speed, course)) < _wanted_ratio(course, knobs):
        yield _b_ratio(speed, course, knobs, f"{ratio:g}")


def _wanted_ratio(course: Course, knobs: Knobs) -> float:
    return course.num_b_wanted / course.num_steps if knobs.b_ratio is None else knobs.b_ratio


def _b_ratio(speed: Speed, course: Course, knobs: Knobs, proposed: str) -> Advice:
    return Advice(
        "stage2_ab.schedule.b_ratio",
        _text(knobs.b_ratio),
        proposed,
        f"the rollouts sustain {_ratio_arithmetic(speed, course)}",
    )


def _ratio_arithmetic(speed: Speed, course: Course) -> str:
    return (
        f"{course.num_b_run} of {course.num_steps} steps × {seconds(speed.learner_s)} / {seconds(speed.rollouts_s)} = "
        f"{course.num_b_run / course.num_steps * speed.learner_s / speed.rollouts_s:.3f}"
    )


def _more_servers(speed: Speed, knobs: Knobs) -> Iterator[Advice]:
    if knobs.num_servers is None:
        return
    needed, rest = servers_needed(speed, knobs.num_servers), speed.rollouts_s - speed.working_s["asking"]
    if needed is not None and needed > knobs.num_servers:
        yield Advice(
            "rollout.servers",
            str(knobs.num_servers),
            str(needed),
            f"asking takes {seconds(speed.working_s['asking'])} × {knobs.num_servers} server(s), and the learner's "
            f"{seconds(speed.learner_s)} less {seconds(rest)} of other work are there for it",
        )


def _rounds(speed: Speed, course: Course, knobs: Knobs) -> Finding:
    share = speed.rounds_s / speed.wall_s
    sentence = (
        f"Sync rounds take {share:.0%} of the training part: {course.num_rounds} in {course.num_steps} steps."
    )
    if not course.num_rounds or not speed.steps_s:
        return Finding(Resource.ROUNDS, sentence)
    needed = sync_every_steps_needed(speed, course)
    if knobs.sync_every_steps is not None and needed <= knobs.sync_every_steps:
        return Finding(Resource.ROUNDS, sentence)  # the first round alone, in a short run
    advice = Advice(
        "stage2_ab.channel_b.prefetch.sync_every_steps",
        _text(knobs.sync_every_steps),
        str(needed),
        f"a round takes {seconds(speed.rounds_s / course.num_rounds)} and a step "
        f"{seconds(speed.steps_s / course.num_steps)}; once in {needed} steps that is {ROUNDS_SHARE:.0%}",
    )
    return Finding(Resource.ROUNDS, sentence, (advice,))


def _missing_packs(speed: Speed | None, course: Course, knobs: Knobs) -> Iterator[Finding]:
    missed = course.skips.get("not_enough_packs", 0)
    if missed and course.num_stale:
        yield _window(missed, course, knobs)
    elif missed > MISSED_SHARE * course.num_b_wanted and (speed is None or speed.learner_binds):
        yield Finding(
            Resource.PRODUCTION,
            f"{missed} of {course.num_b_wanted} wanted B steps lacked packs while nothing went stale: production was "
            "too slow for this share, or began too late.",
            tuple(_less_b(speed, course, knobs)) if speed else (),
        )


def _window(missed: int, course: Course, knobs: Knobs) -> Finding:
    sentence = f"{missed} wanted B steps lacked packs while {course.num_stale} packs and segments went stale."
    if knobs.version_window is None or knobs.sync_every_steps is None or course.post_steps is None:
        return Finding(Resource.WINDOW, sentence)
    quick, slow = course.post_steps
    needed = window_needed(course, knobs.sync_every_steps, knobs.version_window)
    advice = Advice(
        "stage2_ab.channel_b.prefetch.version_window",
        str(knobs.version_window),
        str(needed),
        f"POSTs take {quick:.1f} to {slow:.1f} steps; arrivals may spread over version_window × sync_every_steps = "
        f"{knobs.version_window} × {knobs.sync_every_steps} steps",
    )
    return Finding(Resource.WINDOW, sentence, (advice,))


def _servers(course: Course) -> Iterator[Finding]:
    missed = course.skips.get("servers_suspect", 0)
    if missed:
        yield Finding(
            Resource.SERVERS,
            f"{missed} wanted B steps found no server that was proven; the log says what became of them.",
        )
    if course.num_servers_failed:
        yield Finding(
            Resource.SERVERS,
            f"Rounds could not prove a server {course.num_servers_failed} times, mostly: {course.main_server_error}.",
        )


def _interference(pace: ChannelPace) -> Finding:
    assert pace.busy_s is not None
    return Finding(
        Resource.INTERFERENCE,
        f"Steps of channel {pace.channel} are {pace.slowdown:.0%} slower beside rollouts and rounds: "
        f"{seconds(pace.busy_s)} against {seconds(pace.quiet_s)}. Give servers and learner cores of their own.",
    )


def _text(value: float | int | None) -> str | None:
    return None if value is None else f"{value:g}"


ROUNDS_SHARE = 0.05
"""Of the training part; more than this is worth a knob."""


def sustained_b_ratio(speed: Speed, course: Course) -> float:
    """The highest share of B steps that these rollouts feed, at this run's step times; rounded down to 1/100."""
    share = course.num_b_run / course.num_steps * speed.learner_s / speed.rollouts_s
    return min(1.0, math.floor(share * 100) / 100)


def servers_needed(speed: Speed, num_servers: int) -> int | None:
    """With how many servers the learner would bind; None if the pipeline's other work alone takes too long."""
    asking = speed.working_s["asking"]
    left = speed.learner_s - (speed.rollouts_s - asking)
    return math.ceil(asking * num_servers / left) if left > 0 else None


def sync_every_steps_needed(speed: Speed, course: Course) -> int:
    """From how many steps on a round, as long as it now is, takes ``ROUNDS_SHARE`` of the time."""
    round_s = speed.rounds_s / course.num_rounds
    step_s = speed.steps_s / course.num_steps
    return math.ceil(round_s * (1 - ROUNDS_SHARE) / (ROUNDS_SHARE * step_s))


def window_needed(course: Course, sync_every_steps: int, version_window: int) -> int:
    """In which POSTs of such unlike lengths all arrive fresh: they spread over at most window × sync_every_steps."""
    quick, slow = course.post_steps or (0.0, 0.0)
    return max(version_window + 1, math.ceil((slow - quick + 1) / sync_every_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The present settings, None where the run did not write them down."""

    b_ratio: float | None
    sync_every_steps: int | None
    version_window: int | None
    num_servers: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What happened on the way."""

    num_steps: int
    num_b_wanted: int
    num_b_run: int
    skips: Mapping[str, int]
    num_stale: int
    """Packs and segments that left the window untrained."""
    num_rounds: int
    num_servers_failed: int
    """How often a round could not prove a server."""
    main_server_error: str | None
    post_steps: tuple[float, float] | None
    """Lower and upper decile of what a POST takes, in steps; None without POSTs."""
    unused: str = ""
    """Why channel B was wanted and never ran; empty when all is well."""


def course_of(run: RunData, summary: RunSummary) -> Course:
    """What happened, as the summary counts it."""
    errors, totals = summary.server_errors, summary.totals
    return Course(
        num_steps=summary.num_steps,
        num_b_wanted=summary.num_b_wanted,
        num_b_run=summary.num_b_run,
        skips=summary.skips,
        num_stale=int(totals["packs_dropped_stale"] + totals["segments_dropped_stale"]),
        num_rounds=summary.num_rounds_committed + summary.num_rounds_failed,
        num_servers_failed=sum(errors.values()),
        main_server_error=next(iter(errors), None),
        post_steps=_post_steps(run),
        unused=describe_unused(
            num_wanted=summary.num_b_wanted,
            num_run=summary.num_b_run,
            skips=summary.skips,
            num_rounds=summary.num_rounds_committed + summary.num_rounds_failed,
            num_proven=summary.num_rounds_committed,
            errors=errors,
        ),
    )


def knobs_of(run: RunData) -> Knobs:
    """The settings; the window also from the ledger, which has always held it."""
    prefetch = ("stage2_ab", "channel_b", "prefetch")
    servers = run.setting("rollout", "servers")
    window = run.number_setting(*prefetch, "version_window")
    return Knobs(
        b_ratio=run.number_setting("stage2_ab", "schedule", "b_ratio"),
        sync_every_steps=run.number_setting(*prefetch, "sync_every_steps") or None,
        version_window=_window_of_ledger(run) if window is None else window,
        num_servers=len(servers) if isinstance(servers, list) and servers else None,
    )


def _post_steps(run: RunData) -> tuple[float, float] | None:
    """Lower and upper decile of an answered POST's seconds, in steps of the median length."""
    posts = [
        record["seconds"]
        for records in run.histories.values()
        for record in records
        if record["kind"] == Entry.FINISHED and record["end"] == "answered"
    ]
    steps = [step.seconds for step in trained_steps(run.first)] if run.first else []
    if len(posts) < 2 or not steps or not (step_s := statistics.median(steps)):
        return None
    deciles = statistics.quantiles(posts, n=10, method="inclusive")
    return deciles[0] / step_s, deciles[-1] / step_s


def _window_of_ledger(run: RunData) -> int | None:
    starts = [
        record for records in run.histories.values() for record in records if record["kind"] == Entry.START
    ]
    return starts[-1].get("version_window") if starts else None
