"""The process that publishes weights is killed at drawn moments of pushes to the real server, which goes on.

Whatever the moment: the next version is proven, and nobody is ever answered by weights that no proof vouches for.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from live_server import LearnerRound, RunningServer, free_port, load_learner, text_request
from waiting import wait_for
from weight_updates import make_updates_by_checksums, process_publisher, server_at

from swift_stage2.records import RoundOutcome, ServerReport
from swift_stage2.servers.infer_wire import Completion, parse_infer_reply
from swift_stage2.wire import WeightProof

RUN = "killed-run"
PATIENCE_S = 60.0
KILLED = "the process that publishes weights was killed by SIGKILL; another one takes its place"


class Learner:
    """Rank 0, whose weights move visibly before every version; ``setup`` is its publisher's."""

    def __init__(self, server: RunningServer, run_id: str = RUN, **setup: Any) -> None:
        self.module = load_learner(seed=1)
        self._generator = torch.Generator().manual_seed(2)
        self.publisher = process_publisher(server_at(server.base_url, free_port()), **setup)
        self.sync = make_updates_by_checksums(self.module, self.publisher, run_id=run_id)
        self._versions = server.versions

    def push(self, kill_after_s: float | None = None) -> RoundOutcome:
        """One version; after so many seconds its process is killed."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=self._generator) * 0.02)
        if kill_after_s is None:
            return self.sync.run([0], version=next(self._versions))
        pid = self.publisher.pid
        kill = threading.Timer(kill_after_s, os.kill, (pid, signal.SIGKILL))
        kill.start()
        outcome = self.sync.run([0], version=next(self._versions))
        kill.join()  # also where the push was over first: the kill is not the next one's
        wait_for(lambda: self.publisher.pid != pid or self.publisher.has_ended)
        return outcome


@pytest.mark.parametrize(
    "num_kills",
    [
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_after_every_kill_the_next_version_is_proven_and_no_answer_is_of_unproven_weights(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, num_kills: int
) -> None:
    first = LearnerRound(server, load_learner(), run_id=RUN)
    first.run()
    installs, vouched_for = server.service.slot._conclude, set[int]()

    def note(proof: WeightProof | None) -> None:
        vouched_for.update({proof.version} if proof is not None else ())  # before the gate opens
        installs(proof)

    monkeypatch.setattr(server.service.slot, "_conclude", note)
    moments = random.Random(num_kills)
    learner, proven, told = Learner(server), set[int](), list[ServerReport]()
    completions, refusals, ended = list[Completion](), set[tuple[int, str]](), threading.Event()

    def ask() -> None:
        while not ended.is_set():
            reply = server.post_infer([text_request()], max_tokens=4)
            if reply.status_code == 200:
                completions.extend(parse_infer_reply(reply.json(), 1))
            else:
                refusals.add((reply.status_code, reply.json().get("reason")))

    with ThreadPoolExecutor(1) as thread, closing(learner.sync), ExitStack() as stack:
        asking = thread.submit(ask)
        stack.callback(ended.set)

        def run(kill_after_s: float | None = None) -> RoundOutcome:
            outcome = learner.push(kill_after_s)
            proven.update({outcome.version} if outcome.proven else ())
            return outcome

        undisturbed = [run() for _ in range(4)][1:]
        assert all(outcome.proven for outcome in undisturbed)
        longest_s = 1.2 * statistics.median(sum(each.reports[0].seconds.values()) for each in undisturbed)
        for _ in range(num_kills):
            told.append(run(moments.uniform(0.0, longest_s)).reports[0])
            after = run()
            assert after.proven == (0,), after.reports[0].error
            assert server.http.get("/stage2/info/").json()["weight_version"] == after.version
            wait_for(lambda: any(each.weight_version == after.version for each in completions))  # noqa: B023
    asking.result(PATIENCE_S)
    assert {report.error for report in told} <= {None, KILLED}
    assert refusals <= {(409, "unproven")}
    answered_by = defaultdict(set)
    for completion in completions:
        answered_by[completion.weight_version].add(completion.token_ids)
    of_this_run = answered_by.keys() & vouched_for
    # A kill between the server's proof and the word of it leaves the server with weights that it has proven, whose
    # completions no client takes: rank 0 calls that push failed.
    assert answered_by.keys() <= vouched_for | {first.version}
    assert proven <= vouched_for
    assert {version: len(answers) for version, answers in answered_by.items() if len(answers) > 1} == {}
    assert len(of_this_run) >= num_kills, "it was asked all the time"
    if num_kills > 10:
        assert len({report.error for report in told}) == 2, "some moments came in time, others too late"
