"""The learner's side against a real engine: a rollout that an install has cut goes on with the new weights."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

from cut_rollouts import Oracle, draw_scenes
from live_server import CALL_TIMEOUT_S, LearnerRound, RunningServer, held_before, load_learner
from rollout_batch import make_client, prove
from waiting import wait_for

from swift_stage2.channel_b.attempts import Attempts, PartialRollouts
from swift_stage2.config import DecodingConfig
from swift_stage2.records import BatchOutcome, Sample, SampleKey
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.servers.health_check import ServerKind


def test_a_rollout_cut_by_an_install_goes_on_with_the_new_weights(server: RunningServer) -> None:
    old = LearnerRound(server, load_learner(seed=61))
    old.run()
    learner = load_learner(seed=62)
    new = LearnerRound(server, learner)
    (scene,) = draw_scenes(1, random.Random(8))
    sample, attempts, clock = Sample(SampleKey(0, 0, 0), {}), Attempts(), VersionClock(old.version)
    client = make_client(
        server.base_url,
        decoding=DecodingConfig(temperature=0.0, max_new_tokens=64),
        run_id=old.run_id,
        max_inflight_per_server=4,
        observer=attempts,
        kinds={server.base_url: ServerKind(is_ours=True)},
    )
    partial = PartialRollouts(attempts, Mock(), client.confirms, clock, max_resumes=2, version_window=2)

    def ask() -> None:
        client.submit([sample], [partial.request(sample, scene.request())])

    def outcome() -> BatchOutcome:
        finished = client.next_finished(CALL_TIMEOUT_S)
        assert finished is not None
        return partial.handle_result(finished)

    prove(client, version=old.version)
    client.note_agreement([server.base_url])
    with client, ThreadPoolExecutor(1) as thread:
        client.expect(new.version)
        with held_before(server, 9) as (stopped, go_on):
            attempts.begin([sample.key])
            ask()
            assert stopped.wait(CALL_TIMEOUT_S)
            new.push()
            installing = thread.submit(new.install, on_pending="resume")
            wait_for(lambda: all(job.aborted for job in tuple(server.engine._open)))
            go_on.set()
            (part,) = outcome().partial
            assert installing.result(CALL_TIMEOUT_S).status_code == 200
        new.close()
        prove(client, version=new.version)
        clock.advance(new.version)
        assert partial.to_resume(1) == [sample]
        ask()
        (whole,) = outcome().rollouts
    assert len(part.token_ids) == 9
    assert [(span.version, span.start) for span in whole.spans] == [(old.version, 0), (new.version, 9)]
    assert (whole.version, whole.token_ids[:9]) == (old.version, part.token_ids)
    logits = Oracle(learner).logits(scene, whole.prompt_token_ids, whole.token_ids)
    rest = whole.token_ids[9:]
    assert logits[9:-1].argmax(-1).tolist() == list(rest), "the rest is that of the new weights"
