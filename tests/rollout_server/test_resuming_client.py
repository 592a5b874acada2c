"""The learner's side against a real engine: rollouts that are cut go on, token for token as if they had not been."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from cut_rollouts import GREEDY_LIVELY, MEDIA_IDS, Oracle, Scene, draw_scenes, resume
from live_server import CALL_TIMEOUT_S, LearnerRound, RunningServer, load_learner
from rollout_batch import make_client, prove
from test_answer_prefix import abort, held_before
from waiting import wait_for

from swift_stage2.channel_b.attempts import Attempts, PartialRollouts
from swift_stage2.config import DecodingConfig
from swift_stage2.records import BatchOutcome, Rollout, Sample, SampleKey
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.servers.health_check import ServerKind

WINDOW = 2


class Asker:
    """One rank's client and its partial rollouts, without a pipeline."""

    def __init__(self, server: RunningServer, round_: LearnerRound, penalty: float) -> None:
        self.server = server
        self.clock = VersionClock(round_.version)
        self.attempts = Attempts()
        self.ends: Any = Mock()
        self.client = make_client(
            server.base_url,
            decoding=DecodingConfig(temperature=0.0, repetition_penalty=penalty, max_new_tokens=64),
            run_id=round_.run_id,
            max_inflight_per_server=4,
            observer=self.attempts,
            kinds={server.base_url: ServerKind(is_ours=True)},
        )
        self.partial = PartialRollouts(
            self.attempts,
            self.ends,
            self.client.confirms,
            self.clock,
            max_resumes=WINDOW,
            version_window=WINDOW,
        )
        self.prove(round_)
        self.client.note_agreement([server.base_url])

    def prove(self, round_: LearnerRound) -> None:
        prove(self.client, version=round_.version)

    def begin(self, scene: Scene, number: int) -> Sample:
        sample = Sample(SampleKey(0, number, number), {})
        self.attempts.begin([sample.key])
        self.ask(sample, scene)
        return sample

    def ask(self, sample: Sample, scene: Scene) -> None:
        self.client.submit([sample], [self.partial.request(sample, scene.request())])

    def outcome(self) -> BatchOutcome:
        outcome = self.client.next_finished(CALL_TIMEOUT_S)
        assert outcome is not None
        return self.partial.handle_result(outcome)

    def finish(self, sample: Sample, scene: Scene) -> Rollout:
        """Asks for the rest of what is partial."""
        assert self.partial.to_resume(1) == [sample]
        self.ask(sample, scene)
        (whole,) = self.outcome().rollouts
        return whole


@contextmanager
def asking(
    server: RunningServer, round_: LearnerRound, penalty: float = GREEDY_LIVELY["repetition_penalty"]
) -> Iterator[Asker]:
    asker = Asker(server, round_, penalty)
    with asker.client:
        yield asker


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "num_rollouts",
    [pytest.param(12, marks=[pytest.mark.slow, pytest.mark.ci]), pytest.param(200, marks=[pytest.mark.slow])],
)
def test_rollouts_cut_at_drawn_positions_are_those_that_were_not_cut(
    server: RunningServer, num_rollouts: int
) -> None:
    round_ = LearnerRound(server, load_learner())
    round_.run()
    rng, num_compared = random.Random(11), 0
    with asking(server, round_) as asker:
        while num_compared < num_rollouts:
            (scene,) = draw_scenes(1, rng)
            (uncut,) = resume(server, [scene], [()])
            if len(uncut.token_ids) < 3 or MEDIA_IDS & set(uncut.token_ids):
                continue
            cuts = sorted(rng.sample(range(1, len(uncut.token_ids)), rng.choice((1, 2))))
            sample = None
            for begin, end in zip([0, *cuts], cuts, strict=False):
                with held_before(server, end - begin) as (stopped, go_on):
                    if sample is None:
                        sample = asker.begin(scene, num_compared)
                    else:
                        assert asker.partial.to_resume(1) == [sample]
                        asker.ask(sample, scene)
                    assert stopped.wait(CALL_TIMEOUT_S)
                    assert abort(server) == 1
                    go_on.set()
                    (part,) = asker.outcome().partial
                assert part.token_ids == uncut.token_ids[:end]
            assert sample is not None
            whole = asker.finish(sample, scene)
            assert (whole.token_ids, whole.text) == (uncut.token_ids, uncut.text)
            assert whole.prompt_token_ids == uncut.prompt_token_ids
            assert whole.truncated == (uncut.finish_reason == "length")
            places = [(span.start, span.end) for span in whole.spans]
            assert places == [*zip([0, *cuts], [*cuts, len(uncut.token_ids)], strict=True)]
            num_compared += 1
        assert not asker.ends.method_calls, "nothing was thrown away"
        assert len(asker.attempts) == 0


def test_a_rollout_cut_by_an_install_goes_on_with_the_new_weights(server: RunningServer) -> None:
    old = LearnerRound(server, load_learner(seed=61))
    old.run()
    learner = load_learner(seed=62)
    new = LearnerRound(server, learner)
    (scene,) = draw_scenes(1, random.Random(8))
    with asking(server, old, penalty=1.0) as asker, ThreadPoolExecutor(1) as thread:
        asker.client.expect(new.version)
        with held_before(server, 9) as (stopped, go_on):
            sample = asker.begin(scene, 0)
            assert stopped.wait(CALL_TIMEOUT_S)
            new.push()
            installing = thread.submit(new.install, on_pending="resume")
            wait_for(lambda: all(job.aborted for job in tuple(server.engine._open)))
            go_on.set()
            (part,) = asker.outcome().partial
            assert installing.result(CALL_TIMEOUT_S).status_code == 200
        new.close()
        asker.prove(new)
        asker.clock.advance(new.version)
        whole = asker.finish(sample, scene)
    assert len(part.token_ids) == 9
    assert [(span.version, span.start) for span in whole.spans] == [(old.version, 0), (new.version, 9)]
    assert (whole.version, whole.token_ids[:9]) == (old.version, part.token_ids)
    logits = Oracle(learner).logits(scene, whole.prompt_token_ids, whole.token_ids)
    assert logits[9:-1].argmax(-1).tolist() == list(whole.token_ids[9:]), (
        "the rest is that of the new weights"
    )
