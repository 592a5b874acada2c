"""Whatever a server answers over a real socket ends as a record or a server's fault in everything that reads it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from random import Random

import pytest
from hostile_server import HostileServer, odd_answer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_merger import LiveMerger, live_merger

from swift_stage2 import wire
from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.channel_b.rollouts.routes import RouteNow
from swift_stage2.errors import ServerFault
from swift_stage2.servers import infer_wire
from swift_stage2.servers.session import Deadline, ServerSession

NUM_EXAMPLES = int(os.environ.get("NUM_ODD_ANSWERS", "60"))
CALL_S = 10.0
CONFIG = infer_wire.greedy_config(64)
QUESTION = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[HostileServer]:
    with HostileServer(lambda path: []) as server:
        yield server


@pytest.fixture(scope="module")
def merger(server: HostileServer) -> Iterator[LiveMerger]:
    with live_merger(server.url, timeout_s=CALL_S) as merger:
        yield merger


def read_all(server: HostileServer, merger: LiveMerger) -> None:
    """Raises what no reader may: anything but a record or a ServerFault."""

    def proof(session: ServerSession) -> object:
        reply = session.post(wire.INSTALL, {}, Deadline(CALL_S))
        return session.read(wire.INSTALL, wire.WeightProof.from_json, reply)

    asks: list[Callable[[ServerSession], object]] = [lambda session: session.info(Deadline(CALL_S)), proof]
    with ServerSession(server.url) as session:
        for ask in asks:
            with suppress(ServerFault):
                ask(session)
    answered = RouteNow(server.url, None, api_key=None).generate([QUESTION], CONFIG, timeout_s=CALL_S)
    assert (len(answered.completions) == 1) == (answered.end is PostEnd.ANSWERED)
    assert merger.post(wire.PROCESS_WEIGHTS, {}).status_code == 200
    for reply in (merger.infer("x"), merger.get(wire.WORLD_SIZE)):
        assert 200 <= reply.status_code < 600


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(rng=st.randoms(use_true_random=False))
@pytest.mark.timeout(300)
def test_no_answer_ends_in_anything_but_a_record_or_a_fault(
    server: HostileServer, merger: LiveMerger, caplog: pytest.LogCaptureFixture, rng: Random
) -> None:
    seed = rng.getrandbits(64)

    def answer(path: str) -> Iterable[bytes]:
        return [odd_answer(Random(f"{seed} {path}"), path)]

    server.answer = answer
    caplog.clear()
    read_all(server, merger)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
