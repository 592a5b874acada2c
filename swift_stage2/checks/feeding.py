"""The one adviser for settings: can the servers feed channel B, and which settings fit? Pure.

The rate that production reaches between rounds is the pacer's own (``Pacer.load``), not another model of it.
Units: seconds where a name ends in ``_s``, else optimizer steps; packs and rates are per rank unless said otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from swift_stage2.checks.checks import CheckResult, failed, ok, warning
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.scheduling.outlook import PacingState, ProductionPace
from swift_stage2.scheduling.pacing import Pacer, max_prompts_in_flight

_LOAD_THAT_STARVES = 2.0  # at less than half of the need the starvation watch speaks up
_SHARE_FOR_SEARCH = 1e-4
_SEARCH_ROUNDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """The configured and the measured numbers."""

    b_ratio: Fraction
    packs_per_b_step: int
    """``gradient_accumulation_steps``."""
    num_ranks: int
    num_servers: int
    max_inflight_per_server: int
    version_window: int
    sync_every_steps: int
    prefetch_target_packs: int
    samples_per_pack: float
    single_s: float
    """One rollout alone on the slowest server."""
    batch_s: float
    """``max_inflight_per_server`` rollouts at once on that server."""
    rollouts_per_s: float
    """All servers together, every slot in use."""
    rounds_are_staged: bool = False
    """True if every server stages: it answers while weights travel, and installs them between two POSTs."""

    @property
    def rollouts_per_b_step(self) -> float:
        """Rollouts that all ranks together train in one B step."""
        return self.packs_per_b_step * self.num_ranks * self.samples_per_pack

    @property
    def rollouts_per_step(self) -> float:
        """The same, spread over all steps."""
        return float(self.b_ratio) * self.rollouts_per_b_step

    @property
    def prompts_per_post(self) -> int:
        """Prompts that one rank asks for at once: its share of the servers, and no more than the target."""
        share = max_prompts_in_flight(self.max_inflight_per_server, self.num_servers, self.num_ranks)
        return min(share, math.ceil(self.prefetch_target_packs * self.samples_per_pack))

    @property
    def posts_per_production(self) -> int:
        """POSTs, one after another, until a rank can fill a pack: more than one where a pack holds more samples."""
        return math.ceil(self.samples_per_pack / self.prompts_per_post)

    @property
    def production_s(self) -> float:
        """The time that such productions of all ranks take; a POST lies between the two sizes that were timed."""
        per_server = self.prompts_per_post * self.num_ranks / self.num_servers
        full = max(2, self.max_inflight_per_server)
        share = min(1.0, max(0.0, (per_server - 1) / (full - 1)))
        return self.posts_per_production * (self.single_s + share * max(0.0, self.batch_s - self.single_s))

    @property
    def shortest_step_s(self) -> float:
        """The step time from which on production keeps up with the schedule, by rate and by the pacer's load."""
        by_rate = self.rollouts_per_step / self.rollouts_per_s
        low, high = self.production_s * _SHARE_FOR_SEARCH, self.production_s / _SHARE_FOR_SEARCH
        for _ in range(_SEARCH_ROUNDS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.load(middle) > 1 else (low, middle)
        return max(by_rate, high)

    def production(self, step_s: float) -> float:
        """Steps that pass while its packs are made: their age when they arrive."""
        return self.production_s / step_s

    def versions_passed(self, step_s: float) -> int:
        """Versions that pass while packs are made: of staged rounds one for each POST at most."""
        by_steps = math.ceil(self.production(step_s) / self.sync_every_steps)
        return min(by_steps, self.posts_per_production) if self.rounds_are_staged else by_steps

    def load(self, step_s: float) -> float:
        """Need over what production can give; above 1 it cannot keep up."""
        by_rate = self.rollouts_per_step / (self.rollouts_per_s * step_s)
        pacer = Pacer(
            b_ratio=float(self.b_ratio),
            version_window=self.version_window,
            sync_every_steps=self.sync_every_steps,
            target_packs=self.prefetch_target_packs,
            packs_per_b_step=self.packs_per_b_step,
        )
        steps = self.production(step_s)
        state = PacingState(
            step=0,
            current_version=0,
            last_commit_step=0,
            pace=ProductionPace(steps, steps),
            packs_per_production=max(1, int(self.prompts_per_post / self.samples_per_pack)),
            rounds_are_staged=self.rounds_are_staged,
        )
        return max(by_rate, pacer.load(state))


@dataclass(frozen=True, slots=True)
class Advice:
    """One knob to turn, and the arithmetic that says how far; ``report`` gives it, too.

    ``present`` is None where it is not known.
    """

    knob: str
    present: float | None
    proposed: str
    why: str


def check_rate(feeding: Feeding, step_s: float | None) -> CheckResult[None]:
    """The verdict on whether rollouts keep up with ``step_s``; where that is None, the shortest step that they feed."""
    found = (
        f"a B step trains {feeding.packs_per_b_step} packs * {feeding.num_ranks} rank(s) * "
        f"{feeding.samples_per_pack:.1f} samples a pack = {feeding.rollouts_per_b_step:.0f} rollouts, "
        f"{feeding.rollouts_per_step:.1f} per step; available: {feeding.rollouts_per_s:.2f} rollouts/s, enough for "
        f"steps of {feeding.shortest_step_s:.2f} s or more"
    )
    if step_s is None:
        return ok(f"{found}; --step-seconds S says whether yours are")
    load = feeding.load(step_s)
    found += (
        f"; at {step_s:g} s production is busy {load:.0%} of its time, and packs arrive "
        f"{feeding.production(step_s):.1f} steps old"
    )
    if load <= 1:
        return ok(found)
    fix = f"take what row settings says, or run {math.ceil(feeding.num_servers * load)} such servers"
    return failed(found, fix) if load > _LOAD_THAT_STARVES else warning(found, fix)


def check_settings(feeding: Feeding, step_s: float | None) -> CheckResult[None]:
    """The values that follow from the measurement, with their reasons, against those that are written."""
    advice = advise(feeding, step_s)
    if not advice:
        return ok("as written")
    fix = ", ".join(f"{each.knob}: {each.proposed} (now {each.present:g})" for each in advice)
    return warning("; ".join(f"{each.knob}: {each.why}" for each in advice), f"write {fix}")


def advise(feeding: Feeding, step_s: float | None) -> list[Advice]:
    """Settings that are too small, and a share of B steps that is too large; without a step time what needs none."""
    every, inflight = feeding.sync_every_steps, feeding.max_inflight_per_server
    load = 1.0 if step_s is None else max(1.0, feeding.load(step_s))
    slots = max(math.ceil(feeding.rollouts_per_b_step / feeding.num_servers), math.ceil(inflight * load))
    wanted: list[tuple[str, float, float, str]] = [
        (
            "rollout.max_inflight_per_server",
            inflight,
            min(MAX_REQUESTS_PER_POST, slots),
            "one batch fills a B step, or as many more as the load asks for",
        )
    ]
    if step_s is not None:
        steps = feeding.production(step_s)
        window = max(1, feeding.versions_passed(step_s), feeding.version_window)
        aged = f"packs arrive {steps:.1f} steps old, and a version lasts {every}"
        knob = "stage2_ab.channel_b.prefetch.version_window"
        wanted.append((knob, feeding.version_window, window, aged))
    found = [Advice(knob, now, f"{value:g}", why) for knob, now, value, why in wanted if value > now]
    if load > 1:
        ratio = float(feeding.b_ratio)
        share = f"{sustained(ratio / load):g}"
        found.append(Advice("stage2_ab.schedule.b_ratio", ratio, share, "what these servers sustain"))
    return found


def sustained(share: float) -> float:
    """A share of B steps that production feeds, rounded down to two digits at least."""
    digit = min(0.01, 10.0 ** math.floor(math.log10(share))) if share > 1e-9 else 1.0
    return min(1.0, round(math.floor(share / digit * (1 + 1e-12)) * digit, 12))
