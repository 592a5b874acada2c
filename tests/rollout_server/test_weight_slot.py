"""What a server does with offers and installs, with a stand-in engine: whom it serves afterwards, and who waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any

import pytest
from live_server import SharedFile, free_port
from waiting import wait_for

from swift_stage2.errors import EngineUnavailable, InstallFailed, WeightsRefused
from swift_stage2.rollout_server.engine import InstalledWeights, WeightStamp
from swift_stage2.rollout_server.weight_slot import GateShut, SlotState, WeightSlot
from swift_stage2.rollout_server.weight_source import WeightSource
from swift_stage2.weights.snapshot import SnapshotFile, WeightIdentity
from swift_stage2.wire import InstallRequest, RefusalReason, TensorSpec, WeightOffer, WeightProof, WeightWay

MANIFEST = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (3, 4), "float32"))
SUMS = {"a": "1", "b": "2"}
WAIT_S = 60.0


class EngineStandIn:
    """Takes whatever it is given unless told to fail, with the sums that it is told; waits while it is held."""

    name, model = "stand-in", "none"

    def __init__(self) -> None:
        self.stamp = WeightStamp(6, "run")
        self.error: Exception | None = None
        self.resident = SUMS
        self.may_read = False
        self.copies, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.installs_beside, self.num_open = False, 0
        self.is_asleep = False

    def load_now(self, timeout_s: float) -> None: ...

    def settle(self, timeout_s: float, given_up: threading.Event) -> int:
        end = time.monotonic() + timeout_s
        while self.num_open and not given_up.wait(0.01) and time.monotonic() < end:
            pass
        return self.num_open

    def sum_arrived(self, weights: WeightSource) -> None: ...

    def manifest(self) -> tuple[TensorSpec, ...]:
        return MANIFEST

    def install(self, weights: WeightSource, stamp: WeightStamp, timeout_s: float) -> InstalledWeights:
        self.copies.set()
        assert self.go_on.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.stamp = stamp
        return InstalledWeights(tuple(weights.tensors), SUMS, self.resident)


@pytest.fixture
def engine() -> EngineStandIn:
    return EngineStandIn()


@pytest.fixture
def slot(engine: EngineStandIn) -> Iterator[WeightSlot]:
    slot = WeightSlot(engine, "incarnation")  # type: ignore[arg-type]
    yield slot
    slot.close()


def share(slot: WeightSlot, version: int = 7, run_id: str = "run", timeout_s: float = WAIT_S) -> SharedFile:
    """Weights that a learner offers, and dies: only the server holds its file."""
    snapshot = SnapshotFile(MANIFEST, bucket_bytes=1)
    snapshot.describe(WeightIdentity(run_id, version))
    file = SharedFile(bytes(snapshot.file.memory))
    way, path = WeightWay.SHARED_MEMORY, file.file.path
    answer = slot.offer(WeightOffer(run_id, version, MANIFEST, way, path, timeout_s=timeout_s))
    assert answer.taken, answer
    return file


def install(
    slot: WeightSlot,
    version: int = 7,
    run_id: str = "run",
    *,
    given_up: threading.Event | None = None,
    **options: Any,
) -> WeightProof:
    request = InstallRequest(run_id, version, **{"checksums": SUMS, "timeout_s": WAIT_S} | options)
    return slot.install(request, given_up or threading.Event())


def enter(slot: WeightSlot) -> None:
    with slot.admission():
        pass


def shut_gate(slot: WeightSlot) -> Future[None]:
    """What a call that comes now waits for."""
    with pytest.raises(GateShut) as caught:
        enter(slot)
    return caught.value.opened


def require_serving(slot: WeightSlot) -> None:
    enter(slot)
    assert slot.state is SlotState.SERVING


def require_unproven(slot: WeightSlot) -> None:
    assert refusal(lambda: enter(slot)) is RefusalReason.UNPROVEN
    assert slot.state is SlotState.UNPROVEN


def refusal(call: Callable[[], object]) -> RefusalReason:
    with pytest.raises(WeightsRefused) as caught:
        call()
    return RefusalReason(caught.value.reason)


# --- offers ------------------------------------------------------------------------------------------


def test_an_offer_ends_with_its_time(slot: WeightSlot) -> None:
    share(slot).close()
    slot.end_late_offer()
    install(slot)
    share(slot, 8, timeout_s=1e-9).close()
    slot.end_late_offer()
    assert refusal(lambda: install(slot, 8)) is RefusalReason.NO_WEIGHTS


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda slot: install(slot, 8), RefusalReason.NO_WEIGHTS),
        (lambda slot: install(slot, 7, "other"), RefusalReason.NO_WEIGHTS),
        (
            lambda slot: slot.offer(WeightOffer("run", 8, MANIFEST[1:], WeightWay.STREAM, port=1)),
            RefusalReason.MANIFEST_DIFFERS,
        ),
        (lambda slot: slot.offer(WeightOffer("run", 8, MANIFEST, WeightWay.DISK)), RefusalReason.NO_ROOT),
    ],
    ids=["another version", "another run", "other tensors", "no root"],
)
def test_what_is_refused_changes_nothing(
    slot: WeightSlot, engine: EngineStandIn, call: Callable[[WeightSlot], object], reason: RefusalReason
) -> None:
    share(slot).close()
    assert refusal(lambda: call(slot)) is reason
    assert engine.stamp == WeightStamp(6, "run")
    require_serving(slot)


@pytest.mark.parametrize(("version", "run_id"), [(8, "run"), (1, "other"), (7, "run")])
def test_a_newer_offer_replaces_an_older_one_whoever_made_it(
    slot: WeightSlot, engine: EngineStandIn, version: int, run_id: str
) -> None:
    """So nothing of a learner that died between its two calls stands in anybody's way."""
    old = share(slot)
    new = share(slot, version, run_id)
    assert (old.num_mapped, new.num_mapped) == (0, 1)
    if (version, run_id) != (7, "run"):
        assert refusal(lambda: install(slot)) is RefusalReason.NO_WEIGHTS
    assert install(slot, version, run_id).incarnation == "incarnation"
    assert (engine.stamp, new.num_mapped) == (WeightStamp(version, run_id), 0)


def test_a_newer_offer_waits_for_one_that_is_being_installed(slot: WeightSlot, engine: EngineStandIn) -> None:
    first = share(slot)
    engine.go_on.clear()
    with ThreadPoolExecutor(2) as learners:
        installing = learners.submit(install, slot)
        assert engine.copies.wait(WAIT_S)
        with pytest.raises(InstallFailed, match="the install before this offer must end"):
            share(slot, 8, timeout_s=0.1)
        offering = learners.submit(share, slot, 8)
        assert not wait([offering], 0.2).done
        assert first.num_mapped == 1
        engine.go_on.set()
        assert (installing.result(WAIT_S).version, offering.result(WAIT_S).num_mapped) == (7, 1)
        assert install(slot, 8).version == 8
    assert refusal(lambda: install(slot)) is RefusalReason.NO_WEIGHTS
    require_serving(slot)


def test_memory_that_cannot_be_mapped_is_told_and_leaves_a_stream(slot: WeightSlot) -> None:
    file = share(slot)
    offer = WeightOffer("run", 8, MANIFEST, WeightWay.SHARED_MEMORY, path=file.file.path)
    answer = slot.offer(offer)  # of version 7
    assert (answer.taken, "must be version 8 of run run, got version=7" in answer.message) == (False, True)
    assert file.num_mapped == 0
    answer = slot.offer(WeightOffer("run", 8, MANIFEST, WeightWay.STREAM, port=free_port(), num_bytes=10_000))
    assert (answer.taken, bool(answer.secret)) == (True, True)


# --- installs ----------------------------------------------------------------------------------------


def test_weights_whose_sums_agree_are_served_and_asked_again_their_proof_returns(
    slot: WeightSlot, engine: EngineStandIn
) -> None:
    file = share(slot)
    proof = install(slot)
    assert proof == WeightProof("run", 7, "incarnation", SUMS, SUMS, ("a", "b"))
    assert (engine.stamp, file.num_mapped) == (WeightStamp(7, "run"), 0)
    require_serving(slot)
    engine.error = AssertionError("nothing is copied once more")
    assert install(slot) == proof


@pytest.mark.parametrize(
    ("sums", "resident"),
    [
        ({}, SUMS),
        ({"a": "1"}, SUMS),
        (SUMS | {"c": "3"}, SUMS),
        (SUMS | {"b": "3"}, SUMS),
        (SUMS, SUMS | {"b": "3"}),
    ],
    ids=["no sums", "a sum fewer", "a sum more", "sent otherwise", "held otherwise"],
)
def test_weights_whose_sums_differ_are_served_to_nobody_until_others_are_installed(
    slot: WeightSlot, engine: EngineStandIn, sums: dict[str, str], resident: dict[str, str]
) -> None:
    share(slot).close()
    engine.resident = resident
    assert not install(slot, checksums=sums).vouches_for(sums)
    require_unproven(slot)
    assert refusal(lambda: install(slot)) is RefusalReason.NO_WEIGHTS, "no second opinion"
    engine.resident = SUMS
    share(slot, 8).close()
    install(slot, 8)
    require_serving(slot)


@pytest.mark.parametrize(
    ("how", "error", "cause"),
    [
        ("time", InstallFailed, "must end within the install's time, got num_running=1"),
        ("caller", InstallFailed, "the caller has gone"),
        ("server", EngineUnavailable, "is shutting down"),
    ],
)
def test_an_install_that_ends_before_its_copy_leaves_the_old_weights_serving(
    slot: WeightSlot, engine: EngineStandIn, how: str, error: type[Exception], cause: str
) -> None:
    file, given_up = share(slot), threading.Event()
    options: dict[str, Any] = {"timeout_s": 0.5} if how == "time" else {}
    engine.num_open = 1
    with ThreadPoolExecutor(1) as learner:
        installing = learner.submit(install, slot, given_up=given_up, **options)
        if how in ("caller", "server"):
            wait_for(lambda: slot.state is SlotState.INSTALLING)
            opened = shut_gate(slot)
            given_up.set() if how == "caller" else slot.close()
            engine.num_open = 0 if how == "server" else 1  # its requests end with it
            opened.result(WAIT_S)
        with pytest.raises(error, match=cause):
            installing.result(WAIT_S)
    assert (engine.stamp, engine.copies.is_set()) == (WeightStamp(6, "run"), False)
    wait_for(lambda: file.num_mapped == 0)
    if how == "server":
        with pytest.raises(EngineUnavailable):
            enter(slot)
        return
    require_serving(slot)


@pytest.mark.parametrize(
    ("error", "leaves", "is_served"),
    [
        (InstallFailed("in the middle", torn=True), False, False),
        (ValueError("nobody knows"), False, False),
        (InstallFailed("never begun"), False, True),
        (InstallFailed("never begun"), True, True),
        (None, True, True),
    ],
    ids=["torn", "unknown", "untouched", "untouched and left", "left"],
)
def test_what_a_copy_leaves_behind_is_served_only_if_it_is_whole(
    slot: WeightSlot, engine: EngineStandIn, error: Exception | None, leaves: bool, is_served: bool
) -> None:
    share(slot).close()
    engine.error, given_up = error, threading.Event()
    engine.go_on.clear()
    with ThreadPoolExecutor(1) as learner:
        installing = learner.submit(install, slot, given_up=given_up)
        assert engine.copies.wait(WAIT_S)
        opened = shut_gate(slot)
        if leaves:
            given_up.set()
        engine.go_on.set()
        with pytest.raises(type(error)) if error is not None else nullcontext():
            installing.result(WAIT_S)
        assert opened.done()
    (require_serving if is_served else require_unproven)(slot)
