"""One seed's setting besides its schedule: the size of the scene, its configuration, and what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from swift_stage2.config import Objective

REQUEST_TIMEOUT_S = 1.0
SYNC_TIMEOUT_S = 5.0
_LATENCIES_S = (0.0, 0.05, 0.2, 0.4)
_CROWDED_S = (0.2, 0.4, 0.6, 0.9)  # long answers, of which an install meets many
_SLOW_S = (
    0.9,
    1.0,
    1.0,
    1.3,
    2.0,
    2.0,
    2.5,
    6.0,
    1e6,
)  # around the limits, where things end at the same moment
_PUSH_FATES = ("refused", "corrupt", "dies", "stalls", "hangs", "not installed", "dies installed", "unheard")
_ROUND_DELAYS_S = (0.0, 0.05, 0.3, 0.7)


@dataclass(frozen=True, slots=True)
class Death:
    """A server process dies, and perhaps another takes its place."""

    server: int
    at_s: float
    back_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One scene. Times are virtual seconds."""

    num_ranks: int = 2
    stock: tuple[bool, ...] = (True,)
    """One entry per server: whether it is a stock one."""
    staging: tuple[bool, ...] = (False,)
    """One entry per server: whether it answers while new weights arrive; else it is drained first."""
    rolling: bool = True
    straggler_s: float = SYNC_TIMEOUT_S
    """What pushes have once another version is due."""
    round_delays_s: tuple[float, ...] = (0.0,)
    """A bucket, an install and a proof take so much longer, drawn for each."""
    num_steps: int = 6
    step_s: float = 0.3
    skews_s: tuple[float, ...] = (0.0,)
    """What a rank's step may take longer, drawn at every step: ranks wait for each other."""
    b_ratio: float = 1.0
    packs_per_step: int = 1
    queue_limit: int = 3
    target_packs: int = 2
    version_window: int = 1
    sync_every_steps: int = 2
    max_inflight: int = 4
    redraw_dropped: bool = True
    max_attempts: int = 2
    most_cadences: int = field(default=16, repr=False)  # drawn by what the rest says, as are the two below
    num_generations: int = field(default=1, repr=False)
    """Rollouts of a row, which are compared in groups; 1: each is trained by itself."""
    objective: Objective = field(default=Objective.GRPO, repr=False)
    evaluate_every_steps: int = 0
    evaluation_samples: int = 4
    max_round_delay_steps: int = 1
    continue_on_failure: bool = True
    # --- what goes wrong
    latencies_s: tuple[float, ...] = _LATENCIES_S
    slow_share: float = 0.0
    error_share: float = 0.0
    lost_share: float = 0.0
    poison_row: int | None = None
    deaths: tuple[Death, ...] = ()
    push_fates: dict[tuple[int, int], str] = field(default_factory=dict)
    """(server, number of the push to it) → how that fares."""
    bad_weights_at_version: int | None = None
    failing_pipeline: tuple[int, int] | None = None
    """(rank, number of segments after which its encoder raises)."""
    stop: tuple[int, float] | None = None
    """(rank, moment)."""
    stall_share: float = 0.0

    @property
    def is_calm(self) -> bool:
        """Nothing goes wrong: no server may be blamed."""
        return not (
            self.slow_share or self.error_share or self.lost_share or self.deaths or self.push_fates
            or self.stall_share or self.poison_row is not None or self.straggler_s < SYNC_TIMEOUT_S
        )  # fmt: skip


def setting_of(rng: random.Random) -> Setting:
    """A scene of rollouts that are trained each by itself, or, a quarter, in groups."""
    setting = _crowded(rng)
    of_its_own = random.Random(f"{setting!r} of its own")
    setting = replace(setting, most_cadences=of_its_own.choice((2, 4, 16)))
    if of_its_own.random() < 0.75:
        return setting
    return replace(
        setting,
        num_generations=of_its_own.randint(2, 4),
        objective=of_its_own.choice((Objective.GRPO, Objective.MIXED)),
    )


def _crowded(rng: random.Random) -> Setting:
    """A scene with nought to three kinds of trouble, or one whose servers come late; some of ours answer long."""
    setting = _setting_of(rng)
    of_its_own = random.Random(repr(setting))
    # Apart from those whose pushes have faults, of which late servers would leave little.
    if not setting.push_fates and of_its_own.random() < 0.2:
        setting = _late(setting, of_its_own)
    if any(setting.stock) or of_its_own.random() < 0.5:
        return setting
    return replace(setting, latencies_s=_CROWDED_S + setting.latencies_s[4:])


def _setting_of(rng: random.Random) -> Setting:
    stock = tuple(rng.random() < 0.3 for _ in range(1 if rng.random() < 0.6 else 2))
    packs_per_step = rng.choice((1, 1, 2))
    queue_limit = packs_per_step + rng.randint(0, 2)
    setting = Setting(
        num_ranks=3 if rng.random() < 0.15 else 2,
        stock=stock,
        staging=tuple(not is_stock and rng.random() < 0.85 for is_stock in stock),
        rolling=rng.random() < 0.7,
        round_delays_s=rng.choice(((0.0,), _ROUND_DELAYS_S)),
        num_steps=rng.randint(3, 6),
        step_s=rng.choice((0.15, 0.3, 0.5)),
        b_ratio=rng.choice((1.0, 1.0, 0.5)),
        packs_per_step=packs_per_step,
        skews_s=rng.choice(((0.0,), (0.0, 0.05, 0.4))),
        queue_limit=queue_limit,
        target_packs=rng.randint(packs_per_step, queue_limit),
        version_window=rng.choice((0, 1, 1, 2)),
        sync_every_steps=rng.choice((1, 1, 2, 3)),
        max_inflight=rng.choice((2, 4, 16)),
        redraw_dropped=rng.random() < 0.8,
        max_attempts=rng.randint(1, 3),
        continue_on_failure=rng.random() < 0.5,
    )
    if setting.version_window == 0 and setting.sync_every_steps == 1:
        setting = replace(setting, sync_every_steps=2)  # refused at load
    if rng.random() < 0.35:
        setting = _staged(setting, rng)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        setting = _with_trouble(setting, rng)
    if rng.random() < 0.5:
        return setting
    return replace(
        setting,
        evaluate_every_steps=rng.choice((1, 2, 3)),
        evaluation_samples=rng.choice((1, 4, 9)),
        max_round_delay_steps=rng.choice((0, 1, 3)),
    )


def _staged(setting: Setting, rng: random.Random) -> Setting:
    """More staged rounds, each with more time in which something can come between, and half of them with a fault."""
    servers = range(len(setting.stock))
    faults = {(rng.choice(servers), rng.randint(2, 5)): rng.choice(_PUSH_FATES[-3:]) for _ in range(2)}
    return replace(
        setting,
        stock=tuple(False for _ in servers),
        staging=tuple(True for _ in servers),
        num_steps=setting.num_steps + rng.randint(2, 5),
        round_delays_s=_ROUND_DELAYS_S,
        push_fates=faults if rng.random() < 0.5 else {},
        skews_s=(0.0, 0.05, 0.4),
        lost_share=rng.choice((0.0, 0.0, 0.2)),
        straggler_s=rng.choice((SYNC_TIMEOUT_S, 1.0)),
    )


def _late(setting: Setting, rng: random.Random) -> Setting:
    """Servers of ours die and come back long before the next round is due, or a round does not prove them."""
    servers = range(len(setting.stock))
    setting = replace(
        setting,
        stock=tuple(False for _ in servers),
        staging=tuple(True for _ in servers),
        sync_every_steps=rng.choice((4, 6, 8)),
        num_steps=setting.num_steps + 6,
        stop=None,
    )
    span_s = setting.num_steps * setting.step_s
    deaths = [
        Death(rng.choice(servers), rng.uniform(0, span_s / 2), rng.choice((0.1, 0.5, 1.0))) for _ in range(2)
    ]
    fates = {(rng.choice(servers), rng.randint(2, 5)): rng.choice(_PUSH_FATES) for _ in range(2)}
    return replace(
        setting,
        deaths=(*setting.deaths, *deaths),
        push_fates=setting.push_fates | (fates if rng.random() < 0.5 else {}),
        straggler_s=rng.choice((SYNC_TIMEOUT_S, 1.0)),
    )


def _with_trouble(setting: Setting, rng: random.Random) -> Setting:
    server = rng.randrange(len(setting.stock))
    rank = rng.randrange(setting.num_ranks)
    span_s = setting.num_steps * setting.step_s
    match rng.randrange(9):
        case 0 | 1:
            latencies = (*_LATENCIES_S, *rng.sample(_SLOW_S, 2))
            return replace(setting, slow_share=rng.choice((0.2, 0.6)), latencies_s=latencies)
        case 2:
            return replace(setting, error_share=rng.choice((0.1, 0.5)), poison_row=rng.choice((None, 0, 3)))
        case 3:
            return replace(setting, lost_share=0.3, slow_share=max(0.2, setting.slow_share))
        case 4:
            back_after_s = rng.choice((None, 1.5, 2.5))
            death = Death(server, rng.uniform(0, span_s), back_after_s)
            return replace(setting, deaths=(*setting.deaths, death))
        case 5:
            fate = rng.choice(_PUSH_FATES)
            fates = setting.push_fates | {(server, rng.randint(1, 4)): fate}
            return replace(setting, push_fates=fates)
        case 6:
            return replace(setting, failing_pipeline=(rank, rng.randint(0, 6)))
        case 7:
            return replace(setting, stop=(rank, rng.uniform(0, span_s)))
        case _:
            if rng.random() < 0.5:
                return replace(setting, bad_weights_at_version=rng.randint(2, 3))
            return replace(setting, stall_share=rng.choice((0.002, 0.01)))
