"""The one adviser for settings: can the servers feed channel B, and which settings fit? Pure.

Rates are of all servers with every slot in use. Units: seconds where a name ends in ``_s``, else optimizer steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from swift_stage2.checks.checks import CheckResult, failed, ok, warning
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST

_LOAD_THAT_STARVES = 2.0  # at less than half of the need the starvation watch speaks up


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
    samples_per_pack: float
    batch_s: float
    """``max_inflight_per_server`` rollouts at once on the slowest server."""
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
    def shortest_step_s(self) -> float:
        """The step time from which on the servers' rate is enough."""
        return self.rollouts_per_step / self.rollouts_per_s

    @property
    def posts_per_production(self) -> int:
        """POSTs, one after another, until a rank can fill a pack: more than one where a pack holds more samples."""
        slots = self.max_inflight_per_server * self.num_servers / self.num_ranks
        return math.ceil(self.samples_per_pack / slots)

    def production(self, step_s: float) -> float:
        """Steps that pass while a rank's pack is made: its age when it arrives."""
        return self.posts_per_production * self.batch_s / step_s

    def versions_passed(self, step_s: float) -> int:
        """Versions that pass while packs are made: of staged rounds one for each POST at most."""
        by_steps = math.ceil(self.production(step_s) / self.sync_every_steps)
        return min(by_steps, self.posts_per_production) if self.rounds_are_staged else by_steps

    def load(self, step_s: float) -> float:
        """Need over what the servers can give; above 1 they cannot keep up."""
        return self.shortest_step_s / step_s


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
        f"; at {step_s:g} s the servers are busy {load:.0%} of the time, and packs arrive "
        f"{feeding.production(step_s):.1f} steps old"
    )
    if load > 1:
        fix = f"take what row settings says, or run {math.ceil(feeding.num_servers * load)} such servers"
        return failed(found, fix) if load > _LOAD_THAT_STARVES else warning(found, fix)
    if feeding.versions_passed(step_s) > feeding.version_window:
        return warning(f"{found}, beyond the version window", "take what row settings says")
    return ok(found)


def check_settings(feeding: Feeding, step_s: float | None) -> CheckResult[None]:
    """Settings that are too small, and a share of B steps that is too large, with reasons; without a step time what
    needs none."""
    inflight, window = feeding.max_inflight_per_server, feeding.version_window
    load = 1.0 if step_s is None else max(1.0, feeding.load(step_s))
    slots = max(int(feeding.rollouts_per_b_step / feeding.num_servers), math.ceil(inflight * load))
    slots = min(MAX_REQUESTS_PER_POST, slots)
    reasons, values = [], []
    if slots > inflight:
        reasons.append("one batch fills a B step, or as many more as the load asks for")
        values.append(f"rollout.max_inflight_per_server: {slots} (now {inflight})")
    if step_s is not None and (passed := feeding.versions_passed(step_s)) > window:
        age = feeding.production(step_s)
        reasons.append(f"packs arrive {age:.1f} steps old, and a version lasts {feeding.sync_every_steps}")
        values.append(f"stage2_ab.channel_b.prefetch.version_window: {passed} (now {window})")
    if load > 1:
        ratio = float(feeding.b_ratio)
        reasons.append("these servers sustain a smaller share of B steps")
        values.append(f"stage2_ab.schedule.b_ratio: {sustained(ratio / load):g} (now {ratio:g})")
    return warning("; ".join(reasons), f"write {', '.join(values)}") if values else ok("as written")


def sustained(share: float) -> float:
    """A share of B steps that production feeds, rounded down to two digits at least."""
    digit = min(0.01, 10.0 ** math.floor(math.log10(share))) if share > 1e-9 else 1.0
    return min(1.0, round(math.floor(share / digit * (1 + 1e-12)) * digit, 12))
