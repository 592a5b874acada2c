"""From one rank beside one server to 256 beside 64, and rollouts of 0.1 to 100 steps; nothing but defaults.

Run as a program, this file prints the tables of docs/design/scale.md and draws its curves into the file that is named.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from pacing_setting import Outcome, Setting
from pacing_simulation import simulate

from swift_stage2.config.stage2_ab import PrefetchConfig
from swift_stage2.scheduling.version_schedule import MOST_CADENCES

ROLLOUTS_PER_PACK, PACKS_PER_B_STEP, B_RATIO, WINDOW = 4, 2, 0.25, 2
TEN_TIMES = 10.0


@dataclass(frozen=True, slots=True)
class Scale:
    """One curve's point. ``steps`` is the mean rollout that is not of the tail."""

    steps: float = 1.0
    tail_share: float = 0.0
    num_ranks: int = 2
    num_servers: int = 2
    num_generations: int = 1
    cadence: int = 4
    plenty: float = 2.0
    """Places of the servers over those that the wanted steps keep busy."""
    num_steps: int = 600
    seed: int = 0

    @property
    def mean_steps(self) -> float:
        return self.steps * (1 + self.tail_share * (TEN_TIMES - 1))

    def setting(self) -> Setting:
        per_step = B_RATIO * PACKS_PER_B_STEP * ROLLOUTS_PER_PACK * self.num_ranks
        busy = per_step * self.mean_steps * self.plenty / self.num_servers
        # At least a place of every rank's own, and what a B step takes at once.
        least = max(1, PACKS_PER_B_STEP * ROLLOUTS_PER_PACK * self.plenty) * self.num_ranks / self.num_servers
        prefetch, ratio = PrefetchConfig(sync_every_steps=self.cadence), Fraction(str(B_RATIO))
        return Setting(
            durations=((0.5 * self.steps, 1.5 * self.steps),) * self.num_ranks,
            num_servers=self.num_servers,
            places=math.ceil(max(busy, least)),
            tail=(self.tail_share, TEN_TIMES),
            num_generations=self.num_generations,
            b_ratio=B_RATIO,
            packs_per_b_step=PACKS_PER_B_STEP,
            rollouts_per_pack=ROLLOUTS_PER_PACK,
            sync_every_steps=self.cadence,
            window=WINDOW,
            target=prefetch.target(PACKS_PER_B_STEP, ratio),
            queue_limit=prefetch.limit(PACKS_PER_B_STEP, ratio),
            travel_steps=(0.3, 1.0),
            num_steps=self.num_steps,
            seed=self.seed,
        )

    def run(self) -> Outcome:
        """Simulates it, and checks what must hold at any scale."""
        outcome = simulate(self.setting())
        assert outcome.steps == self.num_steps
        assert outcome.stale_trained == 0
        # A version that is due waits for the one before to be proven, which takes a step.
        assert outcome.most_steps_between_versions <= MOST_CADENCES * self.cadence + 2, "unbounded lag"
        return outcome


def lost_share(outcome: Outcome, *, of_tail: bool) -> float:
    """The share of rollouts that are never trained, because they became too old or their group went on."""
    return outcome.lost[of_tail] / max(1, outcome.drawn[of_tail])


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("num_ranks", "num_servers"),
    [(1, 1), (1, 4), (4, 1), (8, 8), slow(1, 64), slow(64, 1), slow(32, 16), slow(256, 64)],
)
@pytest.mark.parametrize("tail_share", [0.0, 0.05])
def test_all_wanted_steps_run_at_any_scale_and_no_rollout_is_lost(
    num_ranks: int, num_servers: int, tail_share: float
) -> None:
    scale = Scale(num_ranks=num_ranks, num_servers=num_servers, tail_share=tail_share, num_steps=200)
    outcome = scale.run()
    assert outcome.ran >= outcome.wanted - 2
    assert outcome.lost.total() == 0
    assert outcome.decisions / num_ranks / scale.num_steps < 5, "the work of a rank grows with their number"


@pytest.mark.parametrize(
    ("num_generations", "steps", "tail_share", "least"),
    [
        (1, 0.1, 0.0, 0.98), (1, 0.1, 0.2, 0.98), (1, 1.0, 0.0, 0.98), (1, 1.0, 0.05, 0.98), (1, 1.0, 0.2, 0.98),
        (1, 5.0, 0.0, 0.98), (1, 5.0, 0.05, 0.98), (1, 5.0, 0.2, 0.95), slow(1, 20.0, 0.0, 0.93),
        slow(1, 20.0, 0.2, 0.75), slow(1, 60.0, 0.0, 0.75),
        (8, 0.1, 0.0, 0.98), (8, 0.1, 0.2, 0.98), (8, 1.0, 0.0, 0.98), (8, 1.0, 0.05, 0.98), (8, 1.0, 0.2, 0.95),
        (8, 5.0, 0.0, 0.95), (8, 5.0, 0.05, 0.9), slow(8, 20.0, 0.0, 0.9),
    ],
)  # fmt: skip
def test_rollouts_of_any_length_feed_the_wanted_steps(
    num_generations: int, steps: float, tail_share: float, least: float
) -> None:
    """Of a rollout of 60 steps the first comes when a tenth of the run is over."""
    outcome = Scale(steps=steps, tail_share=tail_share, num_generations=num_generations).run()
    assert outcome.ran >= least * outcome.wanted
    if TEN_TIMES * steps <= MOST_CADENCES * 4 / 2:
        assert outcome.lost.total() == 0, "long ones are trained as often as they are drawn"


@pytest.mark.parametrize("num_generations", [1, 8])
def test_a_tail_beyond_the_greatest_cadence_is_lost_and_starves_nobody(num_generations: int) -> None:
    outcome = Scale(steps=10.0, tail_share=0.1, num_generations=num_generations).run()
    assert lost_share(outcome, of_tail=True) > lost_share(outcome, of_tail=False)
    assert outcome.ran >= 0.6 * outcome.wanted
    assert outcome.longest_gap <= 60


@pytest.mark.parametrize("num_generations", [1, 8])
@pytest.mark.parametrize("plenty", [0.25, 0.5])
def test_servers_that_are_too_few_feed_what_they_can(plenty: float, num_generations: int) -> None:
    """Places for a quarter or half of what the wanted steps keep busy."""
    scale = Scale(steps=16.0, plenty=plenty, num_generations=num_generations, num_steps=1000)
    outcome = scale.run()
    assert outcome.ran >= 0.85 * plenty * outcome.wanted
    assert lost_share(outcome, of_tail=False) <= 0.02


@pytest.mark.parametrize("latencies", [(1, 0), (2, 1), (8, 4)])
def test_a_server_that_is_half_as_fast_gives_its_half(latencies: tuple[int, int]) -> None:
    """Against the sum of what the fast ones and the slow ones do alone; production binds."""
    num_servers, num_slow = latencies
    setting = replace(
        Scale(steps=8.0, num_servers=num_servers, num_ranks=1, plenty=0.4, num_steps=800).setting(),
        b_ratio=1.0,
    )
    together = simulate(replace(setting, num_slow_servers=num_slow))
    # Half of the servers at half the speed are three quarters of all at full speed.
    whole = simulate(setting)
    share = 1 - num_slow / num_servers / 2
    assert together.ran >= 0.95 * share * whole.ran


def main(figure: str | None) -> None:
    """Prints the tables, and draws the curves into ``figure``."""
    lengths = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    kinds = {
        (
            generations,
            share,
        ): f"{'groups of 8' if generations > 1 else 'single'}, {share:.0%} ten times as long"
        for generations in (1, 8)
        for share in (0.0, 0.05, 0.2)
    }
    curves: dict[str, dict[str, list[float]]] = {}
    print("| rollouts | " + " | ".join(f"{steps:g} steps" for steps in lengths) + " |")
    print("| --- |" + " --- |" * len(lengths))
    for (generations, share), name in kinds.items():
        found = [
            Scale(
                steps=steps,
                tail_share=share,
                num_generations=generations,
                num_steps=max(600, int(20 * steps)),
            ).run()
            for steps in lengths
        ]
        curves[name] = {
            "wanted B steps that run, %": [100 * each.ran / each.wanted for each in found],
            "steps between versions, most": [each.most_steps_between_versions for each in found],
            "rollouts lost, %": [100 * each.lost.total() / each.drawn.total() for each in found],
        }
        cells = (
            " / ".join(f"{values[n]:.0f}" for values in curves[name].values()) for n in range(len(lengths))
        )
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| ranks, servers | wanted B steps run | decisions of a rank per step | µs each |")
    print("| --- | --- | --- | --- |")
    costs = []
    for num_ranks, num_servers in ((1, 1), (4, 1), (16, 4), (64, 16), (256, 64), (256, 1), (1, 64)):
        scale = Scale(num_ranks=num_ranks, num_servers=num_servers, tail_share=0.05, num_steps=200)
        outcome = scale.run()
        each_us = 1e6 * outcome.decision_s / outcome.decisions
        costs.append((num_ranks, each_us))
        per_step = outcome.decisions / num_ranks / scale.num_steps
        print(
            f"| {num_ranks}, {num_servers} | {outcome.ran} of {outcome.wanted} | {per_step:.1f} | {each_us:.0f} |"
        )
    if figure is not None:
        _draw(figure, lengths, curves, costs[:5])


def _draw(
    figure: str,
    lengths: tuple[float, ...],
    curves: dict[str, dict[str, list[float]]],
    costs: list[tuple[int, float]],
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measures = list(next(iter(curves.values())))
    page, axes = pyplot.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    for axis, measure in zip(axes.flat, measures, strict=False):
        for name, values in curves.items():
            line = "--" if name.startswith("groups") else "-"
            axis.plot(lengths, values[measure], line, marker="o", markersize=3, label=name)
        axis.set(xscale="log", xlabel="mean rollout, optimizer steps", title=measure)
    axes[0, 0].legend(fontsize=8)
    last = axes.flat[-1]
    last.plot(*zip(*costs, strict=True), marker="o")
    last.set(xscale="log", xlabel="ranks", title="µs of a core per decision", ylim=(0, None))
    page.savefig(figure, dpi=80)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
