"""The real process that publishes weights: what it pushes is proven, and no end of it reaches the learner."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import psutil
import pytest
import torch
from commands import speaking
from fake_rollout_server import LONGEST_WAIT_S, Answer, Call
from fake_staging_server import FakeStagingServer
from safetensors.torch import load
from stand_in_canary import REQUEST, StandInCanary
from stopped_process import stop_process
from waiting import wait_for
from weight_updates import make_updates, mark_suspect, server_at

from swift_stage2 import wire
from swift_stage2.config import RolloutConfig
from swift_stage2.records import RoundOutcome
from swift_stage2.telemetry.timing import Trace
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import CanaryAnswer
from swift_stage2.weights.publisher_process import ProcessPublisher
from swift_stage2.weights.tensors import checksum_tensor

pytestmark = [pytest.mark.slow, pytest.mark.ci]

KEY = "s3cret-of-the-servers"
KILLED = "the process that publishes weights was killed by SIGKILL; another one takes its place"
LATE = "the server did not take and prove the weights within {:g} s"


class AnsweringCanary(StandInCanary):
    """Answers as the servers do, unless it was told not to."""

    is_wrong = False

    def answer(self) -> CanaryAnswer:
        return CanaryAnswer(REQUEST | self.more, {}, (9,) if self.is_wrong else (1, 2))

    def __init__(self) -> None:
        self.more: dict[str, list[str]] = {}


class Learner:
    """Rank 0 with a real process beside it and two servers; a test may use another one's process, too."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(3, 2)
        export = WeightExport(self.module)
        self.servers = [FakeStagingServer(export.manifest()) for _ in range(2)]
        self.ours: set[str] = set()
        servers = tuple(server_at(server.url, 51216 + n) for n, server in enumerate(self.servers))
        self.trace = Trace(enabled=True)
        self.publisher = ProcessPublisher(
            RolloutConfig(servers=servers), torch.device("cpu"), ours=self.ours, trace=self.trace
        )
        self.canary = AnsweringCanary()
        self.sync = make_updates(export, self.publisher, 2, canary=self.canary, timeout_s=LONGEST_WAIT_S)

    @property
    def version(self) -> int:
        return self.sync.version

    def set_timeout(self, seconds: float) -> None:
        self.sync.updates.sync = replace(self.sync.updates.sync, timeout_s=seconds)

    def begin(self) -> None:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(1.0)
        self.sync.begin([0, 1])

    def push(self) -> RoundOutcome:
        self.begin()
        return self.sync.wait()

    def require_another_process_and_a_proof(self, pid: int) -> None:
        assert self.push().proven == (0, 1)
        assert self.publisher.pid != pid
        assert not psutil.pid_exists(pid)
        assert [server.served for server in self.servers] == [self.version] * 2


@pytest.fixture(scope="module")
def of_the_module() -> Iterator[Learner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            RolloutConfig().api_key_env, KEY
        )  # of the process, and of every one that takes its place
        yield from _learner()


def _learner() -> Iterator[Learner]:
    learner = Learner()
    with learner.servers[0], learner.servers[1], closing(learner.sync):
        yield learner


@pytest.fixture
def learner(of_the_module: Learner) -> Learner:
    """Proven at first, whatever the test before has done to the process: its start is no part of a test's moments."""
    for server in of_the_module.servers:
        server.hooks.clear()
        server.calls.clear()
    of_the_module.canary.is_wrong, of_the_module.canary.more = False, {}
    of_the_module.set_timeout(LONGEST_WAIT_S)
    assert of_the_module.push().proven == (0, 1)
    return of_the_module


def once(act: Callable[[], object], answer: Answer | None = None) -> Callable[[Call], Answer | None]:
    """A hook that acts on the first call alone."""
    is_first = iter([True])

    def look(call: Call) -> Answer | None:
        if not next(is_first, False):
            return None
        act()
        return answer

    return look


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_version_is_proven_by_the_bytes_that_the_process_reads_in_the_ranks_memory(
    learner: Learner,
) -> None:
    assert learner.publisher.pid != os.getpid()
    outcome = learner.push()
    assert outcome.proven == (0, 1)
    sums = {name: checksum_tensor(tensor) for name, tensor in learner.module.state_dict().items()}
    num_bytes = sum(parameter.nbytes for parameter in learner.module.parameters())
    for index, server in enumerate(learner.servers):
        assert server.proofs[-1]["arrived"] == sums
        assert load(server.mapped[-1])["weight"].equal(learner.module.weight)
        assert outcome.reports[index].num_bytes == num_bytes
        assert server.url in learner.ours


def test_the_canarys_answer_travels_with_the_push(learner: Learner) -> None:
    mark_suspect(learner.sync, 0, 1)  # after a fault it is due
    assert learner.push().reports[0].proof == "checksums+canary"
    mark_suspect(learner.sync, 0, 1)
    learner.canary.is_wrong = True
    outcome = learner.push()
    assert outcome.failed == (0, 1)
    assert "answers the canary with other tokens than the learner" in str(outcome.reports[1].error)


def test_a_process_that_is_killed_before_it_reads_its_command_fails_every_target(learner: Learner) -> None:
    pid = learner.publisher.pid
    stop_process(pid)
    for server in learner.servers:
        server.calls.clear()
    learner.begin()
    learner.sync.look()
    kill(pid)
    outcome = learner.sync.wait()
    assert {report.error for report in outcome.reports.values()} == {KILLED}
    assert [server.calls for server in learner.servers] == [[], []]
    learner.require_another_process_and_a_proof(pid)


@pytest.mark.parametrize("path", [wire.WEIGHTS, wire.INSTALL])
def test_a_process_that_is_killed_in_a_push_or_an_install_fails_what_was_not_proven(
    learner: Learner, path: str
) -> None:
    """The other server may be through, or not have begun."""
    pid = learner.publisher.pid
    learner.servers[1].hooks[path] = once(lambda: kill(pid), Answer(drop=True))
    outcome = learner.push()
    assert 1 in outcome.failed
    assert {outcome.reports[server].error for server in outcome.failed} == {KILLED}
    assert learner.servers[1].served == learner.version - 1
    learner.require_another_process_and_a_proof(pid)


def test_a_server_that_was_proven_before_the_process_was_killed_stays_proven(learner: Learner) -> None:
    pid, let_go = learner.publisher.pid, threading.Event()
    learner.servers[1].hooks[wire.WEIGHTS] = lambda call: Answer(after=let_go)
    learner.begin()
    wait_for(lambda: learner.sync.look() is None and learner.sync.lives[0].version == learner.version)
    kill(pid)
    outcome = learner.sync.wait()
    assert (outcome.proven, outcome.failed) == ((0,), (1,))
    assert outcome.reports[1].error == KILLED
    let_go.set()
    learner.servers[1].hooks.clear()
    learner.require_another_process_and_a_proof(pid)


def test_a_process_that_has_died_is_replaced_at_the_next_step_and_not_when_a_push_is_due(
    learner: Learner,
) -> None:
    pid = learner.publisher.pid
    kill(pid)
    wait_for(lambda: learner.publisher.has_ended)
    learner.sync.updates.facts(learner.version)
    successor = learner.publisher.pid
    assert (successor != pid, psutil.pid_exists(pid)) == (True, False)
    kill(successor)
    wait_for(lambda: learner.publisher.has_ended)
    learner.sync.updates.facts(learner.version)
    assert learner.publisher.pid == successor, "one that cannot even load would be started at every step"
    learner.require_another_process_and_a_proof(successor)


def test_a_stock_server_is_lost_with_the_process_that_kept_its_group(learner: Learner) -> None:
    """Nobody watches it any more: it may come back as another process, and its answers bear no name."""
    learner.ours.discard(learner.servers[1].url)
    pid = learner.publisher.pid
    kill(pid)
    wait_for(lambda: learner.publisher.has_ended)
    assert learner.publisher.take_results() == []
    assert learner.publisher.lost_servers() == (1,)
    learner.require_another_process_and_a_proof(pid)
    assert learner.publisher.lost_servers() == ()


def test_a_process_that_stands_still_is_killed_and_reaped_before_anything_else_begins(
    learner: Learner, caplog: pytest.LogCaptureFixture
) -> None:
    pid = learner.publisher.pid
    learner.set_timeout(1.5)
    learner.servers[0].hooks[wire.INSTALL] = once(lambda: stop_process(pid), Answer(drop=True))
    outcome = learner.push()
    assert 0 in outcome.failed
    assert {outcome.reports[server].error for server in outcome.failed} == {LATE.format(1.5)}
    assert not psutil.pid_exists(pid), "it could wake, and push"
    assert learner.servers[0].served == learner.version - 1
    assert "exited" not in caplog.text
    learner.set_timeout(LONGEST_WAIT_S)
    learner.require_another_process_and_a_proof(pid)


def ask_with_a_picture(learner: Learner) -> None:
    """A command is then larger than what a socket takes unread, as that of many tensors is."""
    learner.canary.more = {"images": ["A" * (4 << 20)]}
    mark_suspect(learner.sync, 0, 1)  # so that the canary is due


def test_a_command_that_a_process_never_reads_holds_up_nobody(learner: Learner) -> None:
    ask_with_a_picture(learner)
    pid = learner.publisher.pid
    stop_process(pid)
    learner.set_timeout(1.5)
    outcome = learner.push()
    assert {report.error for report in outcome.reports.values()} == {LATE.format(1.5)}
    learner.set_timeout(LONGEST_WAIT_S)
    learner.require_another_process_and_a_proof(pid)


def test_no_log_and_no_command_line_has_the_key(
    learner: Learner, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    words = psutil.Process(learner.publisher.pid).cmdline()
    learner.servers[0].hooks[wire.WEIGHTS] = lambda call: Answer(500, call.headers["Authorization"].encode())
    pid = learner.publisher.pid
    learner.servers[1].hooks[wire.INSTALL] = once(lambda: kill(pid), Answer(drop=True))
    outcome = learner.push()
    assert outcome.failed == (0, 1)
    told = [*words, caplog.text, *capfd.readouterr(), *(str(each.error) for each in outcome.reports.values())]
    assert [text for text in told if KEY in text] == []
    assert learner.servers[0].calls[-1].headers["Authorization"] == f"Bearer {KEY}"


@pytest.mark.slow
def test_pushes_and_restarts_leave_no_descriptor_process_or_thread(learner: Learner) -> None:
    """Counted in the rank after every restart, in the process over the pushes of one."""
    here, counts, there = psutil.Process(), [], []
    for number in range(20):
        if number % 4 == 0:
            pid = learner.publisher.pid
            kill(pid)
            wait_for(lambda: learner.publisher.has_ended)
        assert learner.push().proven == (0, 1)
        if number % 4 == 0:
            wait_for(lambda: not any(each.name.startswith("push to") for each in threading.enumerate()))
            threads = [each for each in threading.enumerate() if each.name == "publisher"]
            counts.append((here.num_fds(), len(here.children()), len(threads)))
        if number >= 17:
            there.append(psutil.Process(learner.publisher.pid).num_fds())
    assert {num_children for _, num_children, _ in counts} == {counts[0][1]}
    assert {num_threads for *_, num_threads in counts} == {1}
    # A server's connection may still end
    assert max(num_fds for num_fds, *_ in counts) <= counts[0][0] + 2, counts
    assert max(there) <= there[0] + 2, there


def test_a_publisher_that_closes_lets_its_process_end_by_itself(learner: Learner) -> None:
    process = learner.publisher._worker.process
    learner.publisher.close()
    assert process.returncode == 0
    learner.publisher.close()
    learner.require_another_process_and_a_proof(process.pid)


_RANK = """
import time
import torch
from swift_stage2.config import RolloutConfig
from swift_stage2.weights.publisher_process import ProcessPublisher

print(ProcessPublisher(RolloutConfig(), torch.device("cpu")).pid, flush=True)
time.sleep(60)
"""


def test_the_process_ends_with_a_rank_that_is_killed() -> None:
    with speaking("-c", _RANK) as (rank, said):
        process = psutil.Process(int(said))
        rank.kill()
    psutil.wait_procs([process], timeout=LONGEST_WAIT_S)
    assert not process.is_running()
