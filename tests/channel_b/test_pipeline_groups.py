"""The real pipeline with groups: whole ones are packed, nothing of one is lost, and none keeps the pipeline waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from channel_b.pipeline_bench import PATIENCE_S, WINDOW, Bench, MakeBench, encoder, make_bench, server_encoder
from real_model import rollout_of

from swift_stage2.channel_b.groups import GroupSettings
from swift_stage2.config import GrpoConfig, Objective, PackingConfig
from swift_stage2.records import BatchOutcome, ReturnReason, Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import read_events
from swift_stage2.telemetry.events import Returned

__all__ = ["encoder", "make_bench", "server_encoder"]  # fixtures


def is_good(sample: Sample) -> bool:
    return sample.key.position % 2 == 0


def num_unused(bench: Bench) -> dict[str, int]:
    """Rollouts of which nothing is trained, by reason."""
    named = (name.partition("rollouts_unused/") for name in bench.events.counts)
    return {reason: bench.events.counts[before + found + reason] for before, found, reason in named if found}


class GroupBench:
    """A bench whose every second rollout of a row is the right answer."""

    def __init__(self, make_bench: MakeBench, num_generations: int = 3, **changes: Any) -> None:
        changes = {"groups": GroupSettings(Objective.GRPO, GrpoConfig()), "limit": 40} | changes
        self.bench = make_bench(num_generations=num_generations, **changes)
        self.is_good = is_good
        self.bad_of: Callable[[str], str] = lambda good: "[]"
        self.bench.client.rollout = self.rollout  # type: ignore[method-assign]

    def rollout(self, sample: Sample, **_: Any) -> Rollout:
        client = self.bench.client
        good = client._encoder.answer_of(sample)
        text = good if self.is_good(sample) else self.bad_of(good)
        token_ids, _ = client._encoder.tokenise(text)
        span = VersionSpan(client._clock.current, 0, len(token_ids))
        plain = rollout_of(sample, text, client._encoder.encode_prompt(sample).token_ids, seconds=0.01)
        return replace(plain, token_ids=token_ids, log_probs=(-0.5,) * len(token_ids), spans=(span,))

    def all_but(self, *positions: int) -> Callable[[Sequence[Sample]], BatchOutcome]:
        """What a server answers that is lost with those."""

        def answer(samples: Sequence[Sample]) -> BatchOutcome:
            lost = tuple(sample for sample in samples if sample.key.position in positions)
            rest = self.bench.client.answer_all([sample for sample in samples if sample not in lost])
            return replace(rest, returned=lost)

        return answer

    def work_until(self, holds: Callable[[], bool]) -> None:
        for _ in range(30):
            if holds():
                return
            self.bench.work()
        pytest.fail(f"it never happened: asked {self.asked}, waiting {self.waiting}")

    def work_until_idle(self) -> None:
        self.work_until(lambda: not self.bench.work())

    @property
    def waiting(self) -> set[int]:
        assert self.bench.pipeline.groups is not None
        return {rollout.sample.key.position for rollout in self.bench.pipeline.groups.rollouts}

    @property
    def asked(self) -> list[int]:
        return [key.position for keys in self.bench.client.calls for key in keys]


def positions(keys: Sequence[SampleKey]) -> list[int]:
    return [key.position for key in keys]


# --- the way of a good group -------------------------------------------------------------------------


def test_rollouts_wait_for_each_other_and_whole_groups_are_packed(make_bench: MakeBench) -> None:
    scene = GroupBench(make_bench, target_packs=1)
    bench = scene.bench
    bench.observe(max_prompts=1)
    for num_asked in (1, 2):
        assert bench.work()
        assert (len(scene.waiting), bench.events.segments) == (num_asked, [])
    assert bench.work()
    (group,) = bench.events.compared_groups
    assert [rollout.sample.key.position for rollout in group] == [0, 1, 2]
    assert len({rollout.sample.key.index for rollout in group}) == 1
    good, bad, also_good = (rollout.advantages or () for rollout in group)
    assert good == also_good
    assert good[0] > 0 > bad[0]
    assert sum(good + bad + also_good) == pytest.approx(0)
    packed = [key for pack in bench.events.packs for key in pack.keys]
    assert packed == [rollout.sample.key for rollout in group]
    assert scene.waiting == set()


@pytest.mark.parametrize("objective", [Objective.GRPO, Objective.MIXED])
def test_of_a_group_whose_rewards_are_equal_nothing_is_trained_but_a_corrected_answer(
    make_bench: MakeBench, objective: Objective
) -> None:
    scene = GroupBench(make_bench, groups=GroupSettings(objective, GrpoConfig()), target_packs=1)
    scene.is_good = lambda sample: False
    bench = scene.bench
    bench.observe(max_prompts=1)
    scene.work_until(lambda: len(scene.asked) == 3)
    num_trained = int(objective is Objective.MIXED)
    assert len(bench.events.segments) == num_trained
    assert num_unused(bench) == {"no_variance": 3 - num_trained}
    assert len(bench.source.state_dict()["outstanding"]) == num_trained


# --- what it asks for --------------------------------------------------------------------------------


def test_a_sample_that_came_back_is_asked_though_nothing_else_is_wanted(make_bench: MakeBench) -> None:
    scene = GroupBench(make_bench, 4, target_packs=1)
    bench = scene.bench
    bench.client.answer = scene.all_but(1)
    bench.observe(max_prompts=4)
    scene.work_until(lambda: scene.waiting == {0, 2, 3})
    bench.client.answer = bench.client.answer_all
    assert bench.work()
    assert [len(group) for group in bench.events.compared_groups] == [4]
    assert set(scene.asked) == {0, 1, 2, 3}


def test_a_pause_lets_groups_end_and_then_one_batch_of_each_version_shows_whether_it_is_over(
    make_bench: MakeBench,
) -> None:
    scene = GroupBench(make_bench)
    bench = scene.bench
    bench.observe(max_prompts=1)
    assert bench.work()
    for version in range(3):
        bench.observe(paused=True, max_prompts=1)
        scene.work_until_idle()
        assert scene.waiting == set()
        assert len(scene.asked) == 3 * (version + 1)
        bench.clock.advance()


def test_a_step_that_waits_has_its_groups_ended(
    make_bench: MakeBench,
) -> None:
    whole = GroupBench(make_bench)
    whole.bench.pipeline.start()
    whole.bench.fill(2)
    assert whole.bench.queue.num_fresh(0) >= 2
    assert whole.waiting == set()
    assert len(whole.asked) % 3 == 0


# --- members that fall out ---------------------------------------------------------------------------


def test_a_group_waits_for_its_last_rollout_until_new_weights_wait_no_longer_and_the_rest_is_unused(
    make_bench: MakeBench,
) -> None:
    scene = GroupBench(make_bench)
    bench = scene.bench
    bench.client.answer = scene.all_but(2)
    bench.observe(max_prompts=3)
    scene.work_until(lambda: scene.waiting == {0, 1})
    bench.observe(max_prompts=3, last_call=bench.clock.current + 1)
    bench.work()
    assert bench.events.compared_groups == [], "the next version makes none of them too old"
    for _ in range(WINDOW):
        bench.clock.advance()
    bench.observe(max_prompts=3)
    bench.work()
    assert bench.events.compared_groups == []
    bench.observe(max_prompts=3, last_call=bench.clock.current + 1)
    bench.work()
    (group,) = bench.events.compared_groups
    assert [rollout.sample.key.position for rollout in group] == [0, 1]
    bench.client.answer = bench.client.answer_all
    bench.train(len(bench.events.packs))
    bench.observe(step=1, max_prompts=1)
    scene.work_until(lambda: bench.events.counts["rollouts_unused/too_small"] == 1)
    assert scene.asked[-1] == 2, "it came again first"
    assert bench.events.compared_groups == [group]


@pytest.mark.parametrize("redraw", [True, False])
def test_of_a_dropped_pack_come_again_those_that_can_be_compared(make_bench: MakeBench, redraw: bool) -> None:
    scene = GroupBench(make_bench, redraw_dropped=redraw, packing=PackingConfig(packing_length=100))
    bench = scene.bench
    bench.observe(max_prompts=1)
    scene.work_until(lambda: bench.queue.depth == 1)
    pair = bench.events.packs[0].keys
    assert (len(pair), len(bench.pipeline._segments)) == (2, 1), "of one group"
    for _ in range(WINDOW + 1):
        bench.clock.advance()
    assert bench.queue.reserve(1, current_version=bench.clock.current) is None
    bench.observe(max_prompts=0)
    bench.work()
    if not redraw:
        assert [key for key, _, _ in bench.events.quarantines] == list(pair)
        assert num_unused(bench) == {"dropped": 1}, "the one that is left"
        return
    assert (bench.events.quarantines, num_unused(bench)) == ([], {})
    bench.observe(step=1, max_prompts=1)
    scene.work_until(lambda: len(bench.events.compared_groups) > 1)
    compared = [rollout.sample.key for rollout in bench.events.compared_groups[1]]
    assert sorted((key.position, key.attempt) for key in compared) == [(0, 1), (1, 1), (2, 1)]


# --- servers -----------------------------------------------------------------------------------------


def test_a_row_that_is_misread_at_all_its_positions_condemns_its_server_once(make_bench: MakeBench) -> None:
    """As a single sample does: it is asked again beside another row."""
    scene = GroupBench(make_bench, target_packs=1)
    bench = scene.bench
    bad: set[int] = set()

    def misread_the_first_row(samples: Sequence[Sample]) -> BatchOutcome:
        bad.add(samples[0].key.index) if not bad else None
        good = [sample for sample in samples if sample.key.index not in bad]
        misread = [rollout_of(sample, "[]", (1, 2, 3)) for sample in samples if sample.key.index in bad]
        return BatchOutcome(rollouts=(*misread, *bench.client.answer_all(good).rollouts))

    bench.client.answer = misread_the_first_row
    bench.observe(max_prompts=1)
    for _ in range(8):
        bench.work()
    assert len(bench.client.distrusted) == 1
    assert [(key.position, why) for key, why, _ in bench.events.quarantines] == [
        (position, "prompt_mismatch") for position in range(3)
    ]
    assert {key.index for key, _, _ in bench.events.quarantines} == bad


# --- the end -----------------------------------------------------------------------------------------


def test_a_stop_gives_back_what_waits_and_the_ledger_balances(make_bench: MakeBench, tmp_path: Path) -> None:
    log = tmp_path / "rank0.jsonl"
    scene = GroupBench(make_bench, 4, log_path=log, target_packs=1)
    bench = scene.bench
    bench.begin_log()
    bench.client.answer = scene.all_but(1)
    bench.pipeline.start()
    bench.observe(max_prompts=6)
    bench.events.wait_until(lambda: len(bench.events.rollouts) == 3)
    assert bench.pipeline.stop(PATIENCE_S)
    assert bench.pipeline.failure is None
    assert scene.waiting == set()
    returned = [each for each in read_events(log) if isinstance(each, Returned)]
    waited = {key[:2] for each in returned if each.reason is ReturnReason.STOPPED for key in each.samples}
    assert {(0, 0), (0, 2), (0, 3)} <= waited
    (rank,) = account_of({0: read_events(log)}).ranks
    assert rank.violations == ()
    assert sum(rank.in_hand.values()) == len(bench.source.state_dict()["outstanding"])
