"""Can the servers feed channel B? Rates, ages and the settings that fit, from a few timed calls. Pure.

The rate that production reaches between rounds is the pacer's own (``Pacer.load``), not another model of it.
Units: seconds where a name ends in ``_s``, else optimizer steps; packs and rates are per rank unless said otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.config.stage2_ab import packs_of_b_steps
from swift_stage2.doctor.examination import Outcome, failed, ok, warning
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
    queue_limit: int
    prefetch_target_packs: int
    samples_per_pack: float
    num_rows: int
    """Of the training data."""
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
    def packs_per_production(self) -> int:
        """Full packs that one rank's production makes."""
        return max(1, int(self.prompts_per_post / self.samples_per_pack))

    @property
    def production_s(self) -> float:
        """The time that such productions of all ranks take; a POST lies between the two sizes that were timed."""
        per_server = self.prompts_per_post * self.num_ranks / self.num_servers
        full = max(2, self.max_inflight_per_server)
        share = min(1.0, max(0.0, (per_server - 1) / (full - 1)))
        return self.posts_per_production * (self.single_s + share * max(0.0, self.batch_s - self.single_s))

    @property
    def window(self) -> int:
        """Steps that a pack may age."""
        return self.version_window * self.sync_every_steps

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
            packs_per_production=self.packs_per_production,
            rounds_are_staged=self.rounds_are_staged,
        )
        return max(by_rate, pacer.load(state))


def check_need(feeding: Feeding) -> Outcome[Feeding]:
    """The rollouts that the schedule asks for, whatever a step takes."""
    turns = feeding.rollouts_per_b_step / feeding.num_rows
    again = (
        f"; the data has {feeding.num_rows} rows: one B step asks for each {turns:.1f} times"
        if turns > 1
        else ""
    )
    found = (
        f"a B step trains {feeding.packs_per_b_step} packs * {feeding.num_ranks} rank(s) * "
        f"{feeding.samples_per_pack:.1f} samples a pack = {feeding.rollouts_per_b_step:.0f} rollouts; at b_ratio "
        f"{float(feeding.b_ratio):g} that is {feeding.rollouts_per_step:.1f} per step; available: "
        f"{feeding.rollouts_per_s:.2f} rollouts/s{again}"
    )
    if turns <= 1:
        return ok(found, feeding)
    fix = "train on more rows, or write a smaller stage2_ab.channel_b.packing.packing_length"
    return warning(found, fix, feeding)


def check_rate(feeding: Feeding, step_s: float | None) -> Outcome[None]:
    """Whether production keeps up; without a step time, from which one on it does."""
    posts = feeding.posts_per_production
    calls = f"{posts} POSTs" if posts > 1 else "a POST"
    made = f"{feeding.packs_per_production} pack(s) in {feeding.production_s:.2f} s"
    bound = (
        f"B is fed if a step takes {feeding.shortest_step_s:.2f} s or more (on every rank {calls} of "
        f"{feeding.prompts_per_post} rollouts fill {made})"
    )
    if step_s is None:
        return ok(f"{bound}; --step-seconds S says whether yours does")
    load = feeding.load(step_s)
    found = (
        f"needed {feeding.rollouts_per_step / step_s:.2f} rollouts/s, available {feeding.rollouts_per_s:.2f}; with "
        f"{'staged ' if feeding.rounds_are_staged else ''}rounds in between production is busy {load:.0%} of its "
        f"time; {bound}"
    )
    if load <= 1:
        return ok(found)
    fix = _more_rollouts(feeding, load)
    return failed(found, fix) if load > _LOAD_THAT_STARVES else warning(found, fix)


def check_age(feeding: Feeding, step_s: float | None) -> Outcome[None]:
    """The age at which packs arrive, against the window."""
    window = (
        f"version_window {feeding.version_window} * sync_every_steps {feeding.sync_every_steps} = "
        f"{feeding.window} steps"
    )
    if step_s is None:
        if feeding.window == 0:
            return ok("version_window 0: a pack must be made and trained between two rounds")
        if feeding.rounds_are_staged and feeding.version_window >= feeding.posts_per_production:
            return ok(
                f"staged rounds pass a production {feeding.posts_per_production} time(s) at most; {window}"
            )
        return ok(
            f"packs arrive within {window} if a step takes {feeding.production_s / feeding.window:.2f} s or more"
        )
    steps = feeding.production(step_s)
    age = f"{feeding.production_s:.2f} s / {step_s:g} s = {steps:.1f} steps"
    found = f"packs arrive {age} after their first POST; {window}"
    needed = feeding.versions_passed(step_s)
    if needed <= feeding.version_window or steps <= 1:
        return ok(found)
    return warning(
        f"{found}: they hold rounds back, or expire",
        f"write stage2_ab.channel_b.prefetch.version_window: {needed}, or a larger "
        "stage2_ab.channel_b.prefetch.sync_every_steps",
    )


def check_settings(feeding: Feeding, step_s: float | None) -> Outcome[None]:
    """The values that follow from the measurement, with their reasons, against those that are written."""
    wanted = recommended(feeding, step_s)
    written = {name: getattr(feeding, name) for name in wanted}
    reasons = "; ".join(
        f"{name} {value} ({_reason(name, feeding, step_s)})" for name, value in wanted.items()
    )
    changes = [name for name, value in wanted.items() if written[name] < value]
    if not changes:
        return ok(f"as written; computed: {reasons}")
    fix = ", ".join(f"{PATHS[name]}: {wanted[name]} (now {written[name]})" for name in changes)
    return warning(f"computed: {reasons}", f"write {fix}")


_PREFETCH = "stage2_ab.channel_b.prefetch"
PATHS = {
    **{name: f"{_PREFETCH}.{name}" for name in ("prefetch_target_packs", "queue_limit", "version_window")},
    "max_inflight_per_server": "rollout.max_inflight_per_server",
}
"""The settings that are recommended, as a configuration names them."""


def recommended(feeding: Feeding, step_s: float | None) -> dict[str, int]:
    """Settings by name. Without a step time only what does not depend on it."""
    n = feeding.packs_per_b_step
    fills_a_b_step = math.ceil(feeding.rollouts_per_b_step / feeding.num_servers)
    if step_s is None:
        return {"max_inflight_per_server": max(feeding.max_inflight_per_server, fills_a_b_step)}
    steps = feeding.production(step_s)
    window = max(1, feeding.versions_passed(step_s), feeding.version_window)
    useful = packs_of_b_steps(n, feeding.b_ratio, (window + 1) * feeding.sync_every_steps)
    in_production = packs_of_b_steps(n, feeding.b_ratio, steps)
    return {
        "prefetch_target_packs": min(useful, in_production),
        "queue_limit": min(useful, max(feeding.queue_limit, in_production)),
        "version_window": window,
        "max_inflight_per_server": min(
            MAX_REQUESTS_PER_POST,
            max(fills_a_b_step, math.ceil(feeding.max_inflight_per_server * max(1.0, feeding.load(step_s)))),
        ),
    }


def _reason(name: str, feeding: Feeding, step_s: float | None) -> str:
    n = feeding.packs_per_b_step
    if name == "max_inflight_per_server":
        return "one batch fills a B step, or as many more as the load asks for"
    steps = feeding.production(step_s or 1.0)
    if name == "version_window":
        needed = feeding.versions_passed(step_s or 1.0)
        staged = "of staged rounds " if feeding.rounds_are_staged else ""
        found = f"{staged}packs of age {steps:.1f} steps / sync_every_steps {feeding.sync_every_steps} need {needed}"
        return f"{found}; as written" if needed < feeding.version_window else found
    if name == "queue_limit":
        return f"room for that target, at most {n} packs for each B step within the window"
    return f"{n} packs for each B step that a production's {steps:.1f} steps span"


def _more_rollouts(feeding: Feeding, load: float) -> str:
    b_ratio = float(feeding.b_ratio) / load
    latency_bound = feeding.batch_s < 2 * feeding.single_s
    more = math.ceil(feeding.max_inflight_per_server * load)
    slots = (
        f"write rollout.max_inflight_per_server: {more}"
        if latency_bound and more <= MAX_REQUESTS_PER_POST
        else ""
    )
    servers = math.ceil(feeding.num_servers * load)
    digit = min(0.01, 10.0 ** math.floor(math.log10(b_ratio)))
    lower = f"write stage2_ab.schedule.b_ratio: {math.floor(b_ratio / digit) * digit:.3g}"
    options = [slots, f"run {servers} such servers", lower]
    return ", or ".join(option for option in options if option)
