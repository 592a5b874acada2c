"""Rollouts that servers abort and that go on: the pipeline of ``pipeline_bench``, whose servers can resume.

A sample stays drawn while its rollout is partial; it is asked again first, with the ids that it has; and every token
keeps the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from channel_b.pipeline_bench import PATIENCE_S, WINDOW, Bench, MakeBench, encoder, make_bench, server_encoder

from swift_stage2.channel_b.attempts import join
from swift_stage2.records import BatchOutcome, Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.telemetry.account import RankAccount, account_of
from swift_stage2.telemetry.event_log import read_events

__all__ = ["encoder", "make_bench", "server_encoder"]  # fixtures

Answer = Callable[[Sequence[Sample]], BatchOutcome]


class Scene:
    """A bench whose ledger is kept, and servers that answer with tokens."""

    def __init__(self, bench: Bench, file: Path) -> None:
        self.bench = bench
        self.client, self.clock = bench.client, bench.clock
        self.pipeline, self.events = bench.pipeline, bench.events
        self._file = file
        bench.begin_log()

    def part(self, sample: Sample, *token_ids: int, **changes: Any) -> Rollout:
        """Some tokens more, as the current version samples them."""
        span = VersionSpan(self.clock.current, 0, len(token_ids))
        rollout = replace(self.client.rollout(sample), token_ids=token_ids, spans=(span,))
        return replace(rollout, **changes)

    def aborting(self, *token_ids: int, **changes: Any) -> Answer:
        def answer(samples: Sequence[Sample]) -> BatchOutcome:
            parts = tuple(self.part(sample, *token_ids, **changes) for sample in samples)
            return BatchOutcome(returned=tuple(samples), aborted=parts)

        return answer

    def finishing(self, *token_ids: int, **changes: Any) -> Answer:
        return lambda samples: BatchOutcome(
            rollouts=tuple(self.part(sample, *token_ids, **changes) for sample in samples)
        )

    def ask(self, num_places: int) -> None:
        """A turn: it takes in what was asked before, and asks for so many."""
        self.client.max_prompts = num_places
        self.bench.observe(max_prompts=num_places)
        self.pipeline._turn(0.0)

    def asked(self, *, since: int = 0) -> list[SampleKey]:
        return [key for keys in self.client.calls[since:] for key in keys]

    @property
    def whole(self) -> Rollout:
        """The first that became a segment."""
        return self.events.rollouts[0]

    def account(self) -> RankAccount:
        """Balanced, after the end."""
        assert self.pipeline.stop(PATIENCE_S)
        account = account_of({0: read_events(self._file)})
        assert account.is_balanced, account
        (rank,) = account.ranks
        return rank


@pytest.fixture
def scene(make_bench: MakeBench, tmp_path: Path) -> Scene:
    file = tmp_path / "rank0.jsonl"
    return Scene(make_bench(target_packs=6, max_resumes=WINDOW, log_path=file), file)


def test_an_aborted_rollout_goes_on_behind_its_ids_before_anything_new(scene: Scene) -> None:
    scene.clock.advance()
    scene.client.answer = scene.aborting(7, 8, 9, seconds=0.5)
    scene.ask(2)
    first, second = scene.asked()
    scene.ask(1)  # both are aborted, and there is one place
    assert scene.asked(since=1) == [first]
    assert scene.client.prefixes[1] == [[7, 8, 9]]
    attempts = scene.pipeline.attempts.open()
    assert [len(attempt.so_far.token_ids) for attempt in attempts.values() if attempt.so_far] == [3, 3]
    assert len(scene.bench.source.state_dict()["outstanding"]) == len(attempts) == 2, "they stay drawn"
    scene.clock.advance()
    scene.client.answer = scene.finishing(5, seconds=0.25)
    scene.ask(1)
    assert scene.asked(since=2) == [second]
    assert (scene.whole.sample.key, scene.whole.token_ids) == (first, (7, 8, 9, 5))
    assert scene.whole.spans == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 4))
    assert scene.whole.seconds == 0.75
    assert scene.events.segments[0].version == 1, "as old as its oldest token"
    scene.ask(2)
    scene.ask(2)
    assert second not in scene.pipeline.attempts.open()
    account = scene.account()
    assert (account.num_cut, account.returned.get("aborted")) == (2, None)


def test_it_is_resumed_as_often_as_allowed_and_then_waited_for(scene: Scene) -> None:
    scene.pipeline._partial.version_window = 99  # its age shall not forbid it
    scene.client.answer = scene.aborting(7)
    for _ in range(1 + WINDOW):
        scene.ask(1)
    (key,) = set(scene.asked())
    assert scene.client.prefixes == [[[]], [[7]], [[7, 7]]]
    assert scene.client.protected == [set(), set(), {key}]


@pytest.mark.parametrize(("num_versions", "is_protected"), [(0, False), (1, False), (2, True)])
def test_one_whose_next_resume_would_be_stale_is_waited_for(
    scene: Scene, num_versions: int, is_protected: bool
) -> None:
    """Whoever aborted it brings the next version; whoever aborts it again brings the one after."""
    scene.client.answer = scene.aborting(7)
    scene.ask(1)
    scene.ask(0)
    for _ in range(num_versions):
        scene.clock.advance()
    scene.ask(1)
    (key,) = set(scene.asked())
    assert scene.client.protected[1] == ({key} if is_protected else set())


def test_one_that_became_stale_meanwhile_is_not_resumed(scene: Scene) -> None:
    scene.client.answer = scene.aborting(7, 8)
    scene.ask(1)
    scene.ask(0)  # no place
    (key,) = scene.asked()
    for _ in range(WINDOW + 1):
        scene.clock.advance()
    scene.ask(1)
    assert scene.asked(since=1) == [key._replace(attempt=1)], "a new attempt"
    assert scene.client.prefixes[1] == [[]]
    assert scene.events.counts["tokens_partial_dropped"] == 2
    assert scene.account().returned["stale"] == 1


@pytest.mark.parametrize("verdict", [True, False])
def test_ids_of_weights_that_are_not_proven_yet_wait_for_their_round(scene: Scene, verdict: bool) -> None:
    scene.client.verdicts[1] = None
    scene.client.answer = scene.aborting(7, spans=(VersionSpan(1, 0, 1),))
    scene.ask(1)
    (key,) = scene.asked()
    scene.ask(1)
    assert key not in scene.asked(since=1)
    scene.client.verdicts[1], scene.client.answer = verdict, scene.finishing(8)
    scene.clock.advance(1 if verdict else 2)
    num_calls = len(scene.client.calls)
    scene.ask(9)
    scene.ask(9)
    place = scene.asked(since=num_calls).index(key)
    assert [ids for call in scene.client.prefixes[num_calls:] for ids in call][place] == (
        [7] if verdict else []
    )
    assert scene.events.counts["rollouts_unconfirmed"] == (not verdict)
    assert scene.events.counts["tokens_partial_dropped"] == (not verdict)


def test_a_rest_that_nobody_gave_is_asked_for_again(scene: Scene) -> None:
    scene.client.answer = scene.aborting(7)
    scene.ask(1)
    scene.ask(1)
    scene.client.answer = lambda samples: BatchOutcome(returned=tuple(samples))
    scene.ask(1)  # nothing came, so it is asked a turn later
    scene.ask(1)
    (key,) = set(scene.asked())
    assert scene.client.prefixes == [[[]], [[7]], [[7]]]
    assert scene.client.protected == [set()] * 3, "nothing was aborted a second time"
    scene.client.answer = scene.finishing(8)
    scene.ask(0)
    assert (scene.whole.sample.key, scene.whole.token_ids) == (key, (7, 8))
    assert scene.account().num_cut == 1


def test_a_rest_that_does_not_come_in_time_uses_up_the_attempt(scene: Scene) -> None:
    scene.client.answer = scene.aborting(7)
    scene.ask(1)
    scene.ask(1)
    scene.client.answer = lambda samples: BatchOutcome(returned=tuple(samples), timed_out=tuple(samples))
    scene.ask(1)
    scene.ask(1)
    assert scene.asked()[-1] == scene.asked()[0]._replace(attempt=1)
    assert scene.events.counts["tokens_partial_dropped"] == 1
    assert scene.account().returned["timed_out"] == 1


def test_the_end_of_a_run_gives_back_what_is_partial(scene: Scene) -> None:
    scene.client.answer = scene.aborting(7)
    scene.ask(3)
    scene.ask(1)
    assert len(scene.pipeline.attempts) == 3
    scene.pipeline._stop.set()
    scene.pipeline._run()
    assert len(scene.pipeline.attempts) == 0
    assert scene.account().returned == {"stopped": 3}


def test_parts_make_one_rollout(scene: Scene) -> None:
    sample = scene.bench.source.read(scene.bench.source.draw(1)[0])
    first = scene.part(sample, 1, 2, text="a", log_probs=(-1.0, -2.0), server="http://a")
    scene.clock.advance()
    rest = scene.part(sample, 3, text="ab", log_probs=(-3.0,), server="http://b", truncated=True)
    whole = join(first, rest)
    assert whole is not None
    assert (whole.text, whole.truncated, whole.server) == ("ab", True, "http://b")
    assert (whole.token_ids, whole.log_probs) == ((1, 2, 3), (-1.0, -2.0, -3.0))
    assert whole.spans == (VersionSpan(0, 0, 2), VersionSpan(1, 2, 3))
    assert whole.version == 0
    unsaid = join(first, replace(rest, log_probs=None))
    assert unsaid is not None
    assert unsaid.log_probs is None
    assert join(first, replace(rest, token_ids=(), prompt_token_ids=(), text="")) == replace(
        first, seconds=first.seconds + rest.seconds
    )
    assert join(None, rest) is rest
    assert join(first, replace(rest, prompt_token_ids=(4,))) is None
