"""The decisions of a round, with a stand-in engine and a clock that the test moves."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_server import free_port
from swift_stage2.rollout_server.open_round import RoundState
from swift_stage2.rollout_server.weight_rounds import WeightRounds

from swift_stage2.errors import InstallFailed, WeightsRefused
from swift_stage2.rollout_server.engine import InstalledWeights, WeightStamp
from swift_stage2.rollout_server.weight_source import OfferedWeights
from swift_stage2.weights.snapshot import SnapshotFile, WeightIdentity
from swift_stage2.wire import FinishRequest, RefusalReason, RoundRequest, TensorSpec

MANIFEST = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (3, 4), "float32"))
NOBODY_LEAVES = threading.Event()


class EngineStandIn:
    """Holds a manifest; loads whatever it is given unless told to fail."""

    name, model, is_copying, may_read = "stand-in", "none", False, False

    def __init__(self) -> None:
        self.stamp = WeightStamp()
        self.error: InstallFailed | None = None

    def sum_arrived(self, weights: OfferedWeights) -> None: ...

    def manifest(self) -> tuple[TensorSpec, ...]:
        return MANIFEST

    def install(
        self, weights: OfferedWeights, stamp: WeightStamp, timeout_s: float, *_: Any
    ) -> InstalledWeights:
        if self.error is not None:
            raise self.error
        self.stamp = stamp
        return InstalledWeights(tuple(weights.tensors), {}, {})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rounds(clock: Clock) -> WeightRounds:
    return WeightRounds(EngineStandIn(), "incarnation", clock)  # type: ignore[arg-type]


def request(round_id: str = "r1", run_id: str = "run", timeout_s: float = 100.0) -> RoundRequest:
    return RoundRequest(round_id, run_id, 7, MANIFEST, timeout_s)


def refusal(call: Any, *arguments: Any, **options: Any) -> RefusalReason:
    with pytest.raises(WeightsRefused) as caught:
        call(*arguments, **options)
    return RefusalReason(caught.value.reason)


def enter(rounds: WeightRounds, round_id: str | None = None) -> None:
    with rounds.admission(round_id):
        pass


def test_another_runs_round_is_respected_until_its_learner_is_silent(
    rounds: WeightRounds, clock: Clock
) -> None:
    rounds.begin(request())
    clock.now = 29.0
    assert refusal(rounds.begin, request("r2", "other")) is RefusalReason.ROUND_OPEN
    clock.now = 31.0
    rounds.begin(request("r2", "other"))
    enter(rounds, "r2")


def test_a_round_is_forgotten_when_its_time_is_over(rounds: WeightRounds, clock: Clock) -> None:
    rounds.begin(request(timeout_s=50.0))
    clock.now = 51.0
    assert rounds.state is RoundState.SERVING
    enter(rounds)
    assert refusal(rounds.finish, FinishRequest("r1")) is RefusalReason.NO_ROUND


def test_steps_out_of_order_are_refused(rounds: WeightRounds) -> None:
    assert refusal(rounds.load, NOBODY_LEAVES) is RefusalReason.NO_ROUND
    assert refusal(rounds.open_stream, free_port(), 1) is RefusalReason.NO_ROUND
    rounds.begin(request())
    assert refusal(rounds.load, NOBODY_LEAVES) is RefusalReason.WRONG_ORDER
    assert refusal(rounds.finish, FinishRequest("r2")) is RefusalReason.NO_ROUND
    assert refusal(rounds.finish, FinishRequest("r1")) is RefusalReason.WRONG_ORDER
    assert rounds.state is RoundState.SERVING  # nothing was loaded, so the old weights are whole


def test_giving_up_before_the_load_changes_nothing(rounds: WeightRounds) -> None:
    rounds.begin(request())
    for _ in range(2):  # the courier gives up what it lost, also where the server has noticed already
        assert rounds.finish(FinishRequest("r1", commit=False)) is None
        assert rounds.state is RoundState.SERVING
    rounds.begin(request("r2"))
    assert refusal(rounds.finish, FinishRequest("r1", commit=False)) is RefusalReason.NO_ROUND


class SlowLoad(EngineStandIn):
    """Says when it loads, and goes on when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.loads, self.go_on = threading.Event(), threading.Event()

    def install(
        self, weights: OfferedWeights, stamp: WeightStamp, timeout_s: float, *_: Any
    ) -> InstalledWeights:
        self.loads.set()
        assert self.go_on.wait(20.0)
        return super().install(weights, stamp, timeout_s)


def share(rounds: WeightRounds, wanted: RoundRequest) -> None:
    """A round's weights, in memory whose learner dies at once."""
    identity = WeightIdentity(wanted.run_id, wanted.round_id, wanted.version)
    snapshot = SnapshotFile(MANIFEST, bucket_bytes=1)
    snapshot.describe(identity)
    rounds.begin(wanted)
    assert rounds.map_memory(snapshot.file.path).mapped


@pytest.mark.parametrize(
    ("error", "afterwards"),
    [
        (InstallFailed("late", torn=True), RoundState.UNPROVEN),
        (InstallFailed("never begun"), RoundState.SERVING),
        (None, RoundState.UNPROVEN),
    ],
    ids=["torn", "untouched", "loaded"],
)
def test_a_round_that_runs_out_of_time_while_it_loads_lets_nobody_in(
    clock: Clock, error: InstallFailed | None, afterwards: RoundState
) -> None:
    engine = SlowLoad()
    engine.error = error
    rounds = WeightRounds(engine, "incarnation", clock)  # type: ignore[arg-type]
    share(rounds, request())
    with ThreadPoolExecutor(1) as learner:
        loading = learner.submit(rounds.load, NOBODY_LEAVES)
        assert engine.loads.wait(20.0)
        clock.now = 101.0
        during = rounds.state
        reason = refusal(rounds.admission(None).__enter__)
        engine.go_on.set()
        assert isinstance(loading.exception(20.0), InstallFailed if error else type(None))
    assert (during, reason) == (RoundState.INSTALLING, RefusalReason.UNPROVEN)
    assert rounds.state is afterwards
