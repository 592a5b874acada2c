"""The dispatcher's one thread, with a server whose answers the test gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fake_rollout_server import request

from swift_stage2.errors import UpstreamLost
from swift_stage2.rollout_merger.dispatcher import Dispatcher
from swift_stage2.rollout_merger.merged_post import InferBody, SeedLayout, mergeable
from swift_stage2.servers import protocol
from swift_stage2.servers.call import Answer

WAIT_S = 60.0
OK = Answer(200, b"{}")


class ScriptedUpstream:
    """Answers with what ``behave`` returns or raises for a path."""

    base_url = "http://server"

    def __init__(self) -> None:
        self.behave: Callable[[str], Answer] = lambda path: OK
        self.paths: list[str] = []

    def forward(self, method: str, path: str, body: bytes, most_bytes: int) -> Answer:
        self.paths.append(path)
        return self.behave(path)

    def end(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def upstream() -> ScriptedUpstream:
    return ScriptedUpstream()


@pytest.fixture
def dispatchers() -> Iterator[list[Dispatcher]]:
    made: list[Dispatcher] = []
    yield made
    for dispatcher in made:
        assert dispatcher.close(WAIT_S)


def start(upstream: ScriptedUpstream, made: list[Dispatcher], *, needs_weights: bool = False) -> Dispatcher:
    dispatcher = Dispatcher(
        upstream,  # type: ignore[arg-type]
        max_batch_size=4,
        layout=SeedLayout(),
        needs_weights=needs_weights,
    )
    dispatcher.start()
    made.append(dispatcher)
    return dispatcher


def part(text: str = "a") -> InferBody:
    body = mergeable({"infer_requests": [request(text)], "request_config": {}})
    assert body is not None
    return body


def test_a_server_that_was_started_again_is_not_believed_before_it_has_weights(
    upstream: ScriptedUpstream, dispatchers: list[Dispatcher]
) -> None:
    dispatcher = start(upstream, dispatchers, needs_weights=True)
    assert dispatcher.health()["status"] == "needs_weights"
    assert dispatcher.control("GET", protocol.WORLD_SIZE, b"").future.result(WAIT_S) == OK
    with pytest.raises(UpstreamLost, match="sync round"):
        dispatcher.infer(part())
    dispatcher.control("POST", protocol.PROCESS_WEIGHTS, b"").future.result(WAIT_S)
    assert dispatcher.health()["status"] == "ok"
    asked = dispatcher.infer(part())
    assert asked.future.result(WAIT_S).status == 500  # the answer of this server is none
    assert upstream.paths[-1] == protocol.INFER
