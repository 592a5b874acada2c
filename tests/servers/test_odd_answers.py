"""Whatever a server answers over a real socket ends as a record or a server's fault in everything that reads it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from answer_targets import FORBIDDEN, AnswerTargets, serving
from hostile_server import HostileServer, odd_answer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swift_stage2.runtime.background import BackgroundFailures

NUM_EXAMPLES = int(os.environ.get("NUM_ODD_ANSWERS", "60"))
"""Each is answered to every target, several times where a target asks again. 3,000 are more than 20,000 answers."""


@dataclass
class Attacked:
    server: HostileServer
    targets: AnswerTargets
    failures: BackgroundFailures
    seen: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def attacked() -> Iterator[Attacked]:
    failures = BackgroundFailures()
    with HostileServer(lambda path: []) as server, serving(server.url, failures) as targets:
        yield Attacked(server, targets, failures)


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(rng=st.randoms(use_true_random=False))
@pytest.mark.timeout(3000)
def test_no_answer_ends_in_anything_but_a_record_or_a_fault(attacked: Attacked, rng: Random) -> None:
    seed = rng.getrandbits(64)

    def answer(path: str) -> Iterable[bytes]:
        return [odd_answer(Random(f"{seed} {path}"), path)]

    attacked.server.answer = answer
    ends = attacked.targets.ask_all()
    attacked.seen.update(ends.values())
    assert not FORBIDDEN & set(ends.values()), (ends, attacked.targets.failures)
    assert attacked.targets.what_the_threads_did(attacked.failures) == "fault", attacked.targets.failures
