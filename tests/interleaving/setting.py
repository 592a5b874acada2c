"""One seed's setting besides its schedule: the size of the scene, its configuration, and what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

REQUEST_TIMEOUT_S = 1.0
SYNC_TIMEOUT_S = 5.0
_LATENCIES_S = (0.0, 0.05, 0.2, 0.4)
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
_PUSH_FATES = ("refused", "corrupt", "dies", "stalls", "hangs")


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
    abort_when_pending: bool = False
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
    """(server, number of the round) → how the push to it fares."""
    bad_weights_at_round: int | None = None
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
            or self.stall_share or self.poison_row is not None
        )  # fmt: skip


def setting_of(rng: random.Random) -> Setting:
    """A scene with nought to three kinds of trouble."""
    stock = tuple(rng.random() < 0.5 for _ in range(1 if rng.random() < 0.6 else 2))
    packs_per_step = rng.choice((1, 1, 2))
    queue_limit = packs_per_step + rng.randint(0, 2)
    setting = Setting(
        num_ranks=3 if rng.random() < 0.15 else 2,
        stock=stock,
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
        abort_when_pending=rng.random() < 0.25,
        continue_on_failure=rng.random() < 0.5,
    )
    if setting.version_window == 0 and setting.sync_every_steps == 1:
        setting = replace(setting, sync_every_steps=2)  # refused at load
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
            fates = setting.push_fates | {(server, rng.randint(1, 3)): fate}
            return replace(setting, push_fates=fates)
        case 6:
            return replace(setting, failing_pipeline=(rank, rng.randint(0, 6)))
        case 7:
            return replace(setting, stop=(rank, rng.uniform(0, span_s)))
        case _:
            if rng.random() < 0.5:
                return replace(setting, bad_weights_at_round=rng.randint(2, 3))
            return replace(setting, stall_share=rng.choice((0.002, 0.01)))
