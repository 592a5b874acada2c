"""The decisions of a round, with a stand-in engine and a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from live_server import free_port

from swift_stage2.errors import RoundFailed, RoundRefused
from swift_stage2.rollout_server import receivers
from swift_stage2.rollout_server.engine import InstalledWeights, WeightStamp
from swift_stage2.rollout_server.open_round import RoundState
from swift_stage2.rollout_server.staging import StagingBuffers
from swift_stage2.rollout_server.weight_receiver import ReceivedWeights
from swift_stage2.rollout_server.weight_rounds import WeightRounds
from swift_stage2.wire import FinishRequest, RefusalReason, RoundRequest, TensorSpec

MANIFEST = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (3, 4), "float32"))
NOBODY_LEAVES = threading.Event()


class EngineStandIn:
    """Holds a manifest; loads whatever it is given unless told to fail."""

    name, model, is_copying = "stand-in", "none", False

    def __init__(self) -> None:
        self.stamp = WeightStamp()
        self.staging = StagingBuffers()
        self.error: RoundFailed | None = None
        self.when_sums_are_taken: Callable[[], None] = lambda: None

    def sum_arrived(self, weights: Mapping[str, Any]) -> None:
        self.when_sums_are_taken()

    def manifest(self) -> tuple[TensorSpec, ...]:
        return MANIFEST

    def renew_staging(self) -> None:
        self.staging = StagingBuffers()

    def install(
        self, weights: Mapping[str, Any], stamp: WeightStamp, timeout_s: float, *_: Any
    ) -> InstalledWeights:
        if self.error is not None:
            raise self.error
        self.stamp = stamp
        return InstalledWeights(tuple(weights), {}, {})


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
    with pytest.raises(RoundRefused) as caught:
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
    assert refusal(rounds.open_receiver, free_port(), 1.0) is RefusalReason.NO_ROUND
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
        self, weights: Mapping[str, Any], stamp: WeightStamp, timeout_s: float, *_: Any
    ) -> InstalledWeights:
        self.loads.set()
        assert self.go_on.wait(20.0)
        return super().install(weights, stamp, timeout_s)


class ArrivedWeights:
    """A receiver to which everything has come."""

    failed = False

    def __init__(self, *_: object) -> None: ...

    def start(self) -> str:
        return "secret"

    def collect(self, timeout_s: float, given_up: threading.Event) -> ReceivedWeights:
        tensors = {spec.name: torch.zeros(spec.shape) for spec in MANIFEST}
        return ReceivedWeights(tensors, ())

    def join(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("error", "afterwards"),
    [
        (RoundFailed("late", torn=True), RoundState.UNPROVEN),
        (RoundFailed("never begun"), RoundState.SERVING),
        (None, RoundState.UNPROVEN),
    ],
    ids=["torn", "untouched", "loaded"],
)
def test_a_round_that_runs_out_of_time_while_it_loads_lets_nobody_in(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, error: RoundFailed | None, afterwards: RoundState
) -> None:
    monkeypatch.setattr(receivers, "WeightReceiver", ArrivedWeights)
    engine = SlowLoad()
    engine.error = error
    rounds = WeightRounds(engine, "incarnation", clock)  # type: ignore[arg-type]
    rounds.begin(request())
    rounds.open_receiver(1, 1.0)
    with ThreadPoolExecutor(1) as learner:
        loading = learner.submit(rounds.load, NOBODY_LEAVES)
        assert engine.loads.wait(20.0)
        clock.now = 101.0
        during = rounds.state
        reason = refusal(rounds.admission(None).__enter__)
        engine.go_on.set()
        assert isinstance(loading.exception(20.0), RoundFailed if error else type(None))
    assert (during, reason) == (RoundState.INSTALLING, RefusalReason.UNPROVEN)
    assert rounds.state is afterwards
