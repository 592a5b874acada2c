"""The decisions of a staged round, with a stand-in engine and a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from live_server import SharedFile
from swift_stage2.rollout_server.infer_door import DoorShut
from swift_stage2.rollout_server.open_round import RoundState
from swift_stage2.rollout_server.weight_rounds import WeightRounds
from test_weight_rounds import (
    MANIFEST,
    NOBODY_LEAVES,
    Clock,
    EngineStandIn,
    SlowLoad,
    enter,
    refusal,
)
from waiting import wait_for

from swift_stage2.errors import EngineUnavailable, InstallFailed
from swift_stage2.rollout_server.engine import WeightStamp
from swift_stage2.weights.snapshot import SnapshotFile, WeightIdentity
from swift_stage2.wire import FinishRequest, RefusalReason, RoundRequest

WAIT_S = 60.0


def request(round_id: str = "r1", run_id: str = "run", *, staged: bool = True) -> RoundRequest:
    return RoundRequest(round_id, run_id, 7, MANIFEST, 100.0, staged)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine() -> EngineStandIn:
    return EngineStandIn()


@pytest.fixture
def rounds(engine: EngineStandIn, clock: Clock) -> Iterator[WeightRounds]:
    rounds = WeightRounds(engine, "incarnation", clock)  # type: ignore[arg-type]
    yield rounds
    rounds.close()


@pytest.fixture
def file() -> Iterator[SharedFile]:
    """Of round ``r1``."""
    identity = WeightIdentity("run", "r1", 7)
    snapshot = SnapshotFile(MANIFEST, bucket_bytes=1)
    snapshot.describe(identity)
    file = SharedFile(bytes(snapshot.file.memory))
    yield file
    file.close()


def bring(rounds: WeightRounds, file: SharedFile, wanted: RoundRequest | None = None) -> None:
    """Everything before the install."""
    wanted = wanted or request()
    rounds.begin(wanted)
    assert rounds.map_memory(file.file.path, wanted.round_id).mapped


def shut_door(rounds: WeightRounds) -> Future[None]:
    """What a call that comes now waits for."""
    with pytest.raises(DoorShut) as caught:
        enter(rounds)
    return caught.value.opened


def is_shut(rounds: WeightRounds) -> bool:
    return rounds._door._opened is not None


def test_a_failed_abort_leaves_no_door_shut(rounds: WeightRounds, file: SharedFile) -> None:
    bring(rounds, file)

    def abort() -> None:
        raise RuntimeError("the loop has ended")

    with pytest.raises(RuntimeError):
        rounds.load(NOBODY_LEAVES, "r1", abort)
    assert rounds.state is RoundState.SERVING
    enter(rounds)


def cut_short(rounds: WeightRounds, clock: Clock, given_up: threading.Event, how: str) -> None:
    if how == "time":
        clock.now = 101.0
    elif how == "caller":
        given_up.set()
    elif how == "same run":
        rounds.begin(request("r2"))
    elif how == "given up":
        rounds.finish(FinishRequest("r1", commit=False))
    else:
        rounds.close()


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("time", "must end within the round's time, got num_running=1"),
        ("caller", "the caller has gone"),
        ("same run", "the round ended"),
        ("given up", "the round ended"),
        ("server ends", "the round ended"),
    ],
)
def test_a_round_that_ends_before_its_copy_leaves_the_old_weights_serving(
    rounds: WeightRounds, engine: EngineStandIn, clock: Clock, file: SharedFile, how: str, cause: str
) -> None:
    engine.stamp = WeightStamp(6, "run", "r0")
    bring(rounds, file)
    given_up = threading.Event()
    with ThreadPoolExecutor(1) as learner:
        with rounds.admission(None):
            loading = learner.submit(rounds.load, given_up)
            wait_for(lambda: is_shut(rounds))
            opened = shut_door(rounds)
            cut_short(rounds, clock, given_up, how)
            with pytest.raises(InstallFailed, match=cause):
                loading.result(WAIT_S)
            assert opened.done()
    assert engine.stamp == WeightStamp(6, "run", "r0")
    if how == "server ends":
        with pytest.raises(EngineUnavailable):
            enter(rounds)
        return
    assert rounds.state is (RoundState.ROUND_OPEN if how == "same run" else RoundState.SERVING)
    with rounds.admission(None) as is_proven:
        assert is_proven


def test_a_round_without_weights_never_shuts_the_door(
    rounds: WeightRounds, engine: EngineStandIn, file: SharedFile
) -> None:
    rounds.begin(request("r2"))
    answer = rounds.map_memory(file.file.path)
    assert (answer.mapped, "must be of run run, round r2" in answer.message) == (False, True)
    with rounds.admission(None):
        assert refusal(rounds.load, NOBODY_LEAVES) is RefusalReason.WRONG_ORDER
        assert rounds.state is RoundState.ROUND_OPEN
    assert engine.stamp == WeightStamp()
    assert file.num_mapped == 0


def test_a_copy_that_broke_off_is_served_to_nobody(
    rounds: WeightRounds, engine: EngineStandIn, file: SharedFile
) -> None:
    bring(rounds, file)
    engine.error = InstallFailed("in the middle", torn=True)
    with pytest.raises(InstallFailed):
        rounds.load(NOBODY_LEAVES)
    assert refusal(enter, rounds) is RefusalReason.UNPROVEN


def test_a_learner_that_dies_leaves_a_serving_server_and_gives_way(
    rounds: WeightRounds, clock: Clock, file: SharedFile
) -> None:
    bring(rounds, file)
    clock.now = 29.0
    assert refusal(rounds.begin, request("s1", "other")) is RefusalReason.ROUND_OPEN
    clock.now = 31.0
    rounds.begin(request("s1", "other"))
    assert file.num_mapped == 0
    enter(rounds)
    clock.now = 132.0
    rounds.expire()
    assert rounds.state is RoundState.SERVING


def test_those_that_wait_are_let_go_when_a_learner_is_silent_after_its_install(
    rounds: WeightRounds, clock: Clock, file: SharedFile
) -> None:
    """Its canary is a word, and as long as that runs it is not silent."""
    bring(rounds, file)
    rounds.load(NOBODY_LEAVES)
    opened = shut_door(rounds)
    clock.now = 29.0
    with rounds.admission("r1"):
        clock.now = 60.0
        rounds.expire()
        assert not opened.done()
    enter(rounds, "r1")
    clock.now = 89.0
    rounds.expire()
    assert not opened.done()
    clock.now = 91.0
    rounds.expire()
    assert opened.done()
    assert refusal(enter, rounds) is RefusalReason.UNPROVEN
    wait_for(lambda: file.num_mapped == 0)


def test_a_round_that_runs_out_of_time_while_it_is_copied_is_served_to_nobody(
    clock: Clock, file: SharedFile
) -> None:
    engine = SlowLoad()
    rounds = WeightRounds(engine, "incarnation", clock)  # type: ignore[arg-type]
    bring(rounds, file)
    with ThreadPoolExecutor(1) as learner:
        loading = learner.submit(rounds.load, NOBODY_LEAVES)
        assert engine.loads.wait(WAIT_S)
        opened = shut_door(rounds)
        clock.now = 101.0
        rounds.expire()
        assert opened.done()
        assert refusal(enter, rounds) is RefusalReason.UNPROVEN
        assert file.num_mapped, "the engine still reads it"
        engine.go_on.set()
        loading.result(WAIT_S)
    assert refusal(enter, rounds) is RefusalReason.UNPROVEN
    assert file.num_mapped == 0


@pytest.mark.parametrize("engine_hangs", [False, True])
def test_a_learner_that_dies_while_its_weights_are_copied_keeps_nobody_at_the_door(
    clock: Clock, file: SharedFile, engine_hangs: bool
) -> None:
    engine, given_up = SlowLoad(), threading.Event()
    rounds = WeightRounds(engine, "incarnation", clock)  # type: ignore[arg-type]
    bring(rounds, file)
    with ThreadPoolExecutor(1) as learner:
        loading = learner.submit(rounds.load, given_up)
        assert engine.loads.wait(WAIT_S)
        opened = shut_door(rounds)
        given_up.set()
        if engine_hangs:
            rounds.expire()
            assert opened.done()
            assert refusal(enter, rounds) is RefusalReason.UNPROVEN
            assert rounds.state is RoundState.INSTALLING, "another round would install nothing"
        engine.go_on.set()
        loading.result(WAIT_S)
    assert opened.done()
    assert refusal(enter, rounds) is RefusalReason.UNPROVEN
    assert rounds.state is RoundState.UNPROVEN
    rounds.begin(request("s1", "other"))
