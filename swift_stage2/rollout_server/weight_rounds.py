"""Decides what may happen to the weights, and when completions may be asked: one round at a time.

A round: begin, open the receiver, expect buckets, load, finish. Arrived weights reach the model only when the
whole manifest is there, in one step, so a push that is cut off leaves the old version serving under its old
stamp. Called by the routes from any thread; holds its lock for decisions only, never while it waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from swift_stage2.errors import EngineUnavailable, RoundFailed, RoundRefused
from swift_stage2.rollout_server.engine import Engine, InstalledWeights, WeightStamp
from swift_stage2.rollout_server.weight_receiver import (
    Bucket,
    ReceivedWeights,
    WeightReceiver,
    compare_bucket,
    compare_manifests,
    require_all,
)
from swift_stage2.servers.protocol import FinishRequest, RefusalReason, RoundProof, RoundRequest

_log = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 2.0
# A round whose learner has been silent for so long gives way to another run's: the learner is dead.
_LEASE_S = 30.0


class RoundState(StrEnum):
    """Decides over ``/infer/``: all calls are answered, the round's own only, or none."""

    SERVING = "serving"
    ROUND_OPEN = "round_open"
    UNPROVEN = "unproven"


@dataclass(slots=True)
class _Round:
    request: RoundRequest
    end: float  # monotonic
    last_call: float
    receiver: WeightReceiver | None = None
    announced: set[str] = field(default_factory=set)
    is_loading: bool = False
    installed: InstalledWeights | None = None
    failure: str | None = None


class WeightRounds:
    """The rounds of one server and the door of its ``/infer/``."""

    def __init__(
        self,
        engine: Engine,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        host: str = "127.0.0.1",
    ) -> None:
        """``host``: the address of this machine to listen on for weights."""
        self._engine = engine
        self._host = host
        self._incarnation = incarnation
        self._clock = clock
        self._lock = threading.Lock()
        self._round: _Round | None = None
        self._unproven = False
        self._closed = False
        self._num_loading = 0  # loads that the engine is busy with, also of rounds that have ended
        self._num_admitted = 0
        self._last_proof: RoundProof | None = None
        self._last_receiver: WeightReceiver | None = None

    @property
    def state(self) -> RoundState:
        with self._lock:
            self._expire()
            if self._round is not None:
                return RoundState.ROUND_OPEN
            return RoundState.UNPROVEN if self._is_unproven() else RoundState.SERVING

    @contextmanager
    def admission(self, round_id: str | None) -> Iterator[bool]:
        """One ``/infer/``, counted while it lasts; says whether a round has proven the weights that answer it.

        Raises:
            RoundRefused: a round is open and this is not its request, or the weights are unproven.
        """
        with self._lock:
            self._expire()
            if self._round is not None and self._round.request.round_id != round_id:
                raise RoundRefused(
                    RefusalReason.ROUND_OPEN,
                    f"round {self._round.request.round_id} is open; until it ends only its own requests count",
                )
            if self._round is None and round_id is not None:
                raise RoundRefused(RefusalReason.NO_ROUND, f"round {round_id} is not open")
            if self._round is None and self._is_unproven():
                raise RoundRefused(
                    RefusalReason.UNPROVEN,
                    "the model holds weights that no round has proven; run a sync round",
                )
            self._num_admitted += 1
            is_proven = self._round is None and self._engine.stamp.version is not None
        try:
            yield is_proven
        finally:
            with self._lock:
                self._num_admitted -= 1

    def begin(self, request: RoundRequest) -> None:
        """Opens a round; until it ends, only its own requests are answered.

        A round that failed, or that the same run left open, gives way. Raises:
            RoundRefused: other tensors than the model's, another run's round, or completions in the making.
        """
        compare_manifests(self._engine.manifest(), request.manifest)
        with self._lock:
            if self._closed:
                raise EngineUnavailable("the server is shutting down")
            self._expire()
            held = self._round
            if held is not None and held.request.run_id != request.run_id and self._is_alive(held):
                raise RoundRefused(
                    RefusalReason.ROUND_OPEN,
                    f"run {held.request.run_id} holds the server with round {held.request.round_id}; give every "
                    f"run a server of its own, or wait {_LEASE_S:.0f} s if that learner is dead",
                )
            if self._num_admitted:
                raise RoundRefused(
                    RefusalReason.BUSY,
                    f"a round must find the server idle, got num_running={self._num_admitted} /infer/ calls; "
                    "drain or abort them and ask again",
                )
            self._end_round()
            now = self._clock()
            self._round = _Round(request, end=now + request.timeout_s, last_call=now)
        self._release_port(held)

    def open_receiver(self, port: int, timeout_s: float) -> str:
        """Listens for the learner; returns the secret that it must present when it connects.

        Raises:
            RoundRefused: no round is open, or it listens already.
            RoundFailed: the address cannot be listened on, or there is no memory to receive into.
        """
        with self._lock:
            current = self._open_round()
            if current.receiver is not None:
                raise RoundRefused(RefusalReason.WRONG_ORDER, "the round listens for weights already")
            timeout_s = min(timeout_s, max(0.1, current.end - self._clock()))
            is_stuck = self._last_receiver is not None and not self._last_receiver.join(0)
            if (
                is_stuck or self._num_loading
            ):  # it may still be written, or read by a load that nobody waits for
                self._renew_staging()
            receiver = WeightReceiver(self._host, port, timeout_s, self._engine.staging)
            self._last_receiver = current.receiver = receiver
        try:
            return receiver.start()
        except RoundFailed as error:
            self._fail(current, error)
            raise

    def expect(self, bucket: Bucket) -> None:
        """Announces the next broadcast.

        Raises:
            RoundRefused: no round is open, or it does not listen.
            RoundFailed: a tensor that the manifest does not have so, or for the second time, or a learner that is lost.
        """
        with self._lock:
            current = self._open_round()
            receiver = self._listening(current)
        try:
            compare_bucket(current.request.manifest, bucket, current.announced)
            receiver.expect(bucket)
        except RoundFailed as error:
            self._fail(current, error)
            raise

    def load(self, given_up: threading.Event) -> tuple[str, ...]:
        """Waits for all announced buckets and copies them into the model; names with NaN or infinity return.

        Once ``given_up`` is set, its caller has gone: nothing is waited for or copied any more.

        Raises:
            RoundRefused: no round is open, it does not listen, or it has loaded or is being loaded already.
            RoundFailed: not everything arrived (the old weights serve on), or the copy failed.
        """
        with self._lock:
            current = self._open_round()
            if current.is_loading:
                raise RoundRefused(
                    RefusalReason.WRONG_ORDER, "the round's weights are loaded already, or about to be"
                )
            receiver = self._listening(current)
            current.is_loading = True
            current.last_call = current.end  # not silent while it loads
        try:
            if current.failure:
                raise RoundFailed(current.failure)
            received = receiver.collect(current.end - self._clock(), given_up)
            require_all(current.request.manifest, received)
            self._install(current, received, given_up)
        except RoundFailed as error:
            self._fail(current, error)
            with self._lock:
                if self._round is current:
                    self._end_round()
            raise
        if received.non_finite:
            _log.warning("NaN or infinity arrived in %s", ", ".join(received.non_finite))
        return received.non_finite

    def close_receiver(self) -> None:
        """Ends the connection for weights, if there is one, and frees its port."""
        with self._lock:
            current = self._round
            receiver = current.receiver if current is not None else None
        if receiver is not None:
            receiver.close()
        self._release_port(current)

    def finish(self, wanted: FinishRequest) -> RoundProof | None:
        """Ends the round with its proof; asked again, the same proof returns. None when it was given up.

        Weights that were loaded and are not vouched for (given up, not resident as they arrived, or with other
        checksums than those that the learner has sent) leave the server unproven. Raises:
            RoundRefused: not the open round, or nothing was loaded (it ends, the old weights serve on).
        """
        round_id, commit = wanted.round_id, wanted.commit
        with self._lock:
            if self._last_proof is not None and self._last_proof.round_id == round_id:
                return self._last_proof
            current = self._open_round()
            if current.request.round_id != round_id:
                raise RoundRefused(RefusalReason.NO_ROUND, f"round {round_id} is not the open one")
            installed = current.installed
            proof = None
            if commit and installed is not None:
                proof = self._last_proof = RoundProof(
                    round_id=round_id,
                    incarnation=self._incarnation,
                    weight_version=current.request.version,
                    arrived=installed.arrived,
                    resident=installed.resident,
                    loaded=installed.loaded,
                )
                arrived = dict(proof.arrived)
                self._unproven = not (
                    dict(proof.resident) == arrived
                    and set(arrived) <= set(proof.loaded)
                    and (wanted.checksums is None or dict(wanted.checksums) == arrived)
                )
                current.installed = None
            self._end_round()
        self._release_port(current)
        if commit and proof is not None and self._unproven:
            _log.warning(
                "round %s brought weights that differ from what was sent; nothing is served", round_id
            )
        if commit and proof is None:
            raise RoundRefused(
                RefusalReason.WRONG_ORDER,
                f"a round must load before it commits: {current.failure or 'no weights were loaded'}",
            )
        return proof

    def close(self) -> None:
        """Ends the open round and whatever waits in it; no other begins."""
        with self._lock:
            self._closed = True
            self._end_round()

    # --- decisions, under the lock --------------------------------------------------------------
    def _renew_staging(self) -> None:
        try:
            self._engine.renew_staging()
        except OSError as error:
            raise RoundFailed(f"the server has no memory to receive weights into: {error}") from error

    def _is_unproven(self) -> bool:
        """A round may end while the engine still loads for it: what the model holds then is anybody's guess."""
        return self._unproven or self._num_loading > 0

    def _open_round(self) -> _Round:
        self._expire()
        if self._round is None:
            raise RoundRefused(RefusalReason.NO_ROUND, "no round is open; begin one first")
        self._round.last_call = self._clock()
        return self._round

    def _is_alive(self, held: _Round) -> bool:
        lost = held.failure is not None or (held.receiver is not None and held.receiver.failed)
        return not lost and self._clock() - held.last_call < _LEASE_S

    def _listening(self, current: _Round) -> WeightReceiver:
        if current.receiver is None:
            raise RoundRefused(
                RefusalReason.WRONG_ORDER, "init_communicator comes first: nothing listens yet"
            )
        return current.receiver

    def _expire(self) -> None:
        if self._round is not None and self._clock() > self._round.end:
            _log.warning("round %s ran out of time and is forgotten", self._round.request.round_id)
            self._end_round()

    def _end_round(self) -> None:
        """Forgets the round. Weights that it loaded without a commit are nobody's."""
        if self._round is None:
            return
        if self._round.installed is not None:
            self._unproven = True
        if self._round.receiver is not None:
            self._round.receiver.close()
        self._round = None

    # --- waits, outside the lock ----------------------------------------------------------------
    def _install(self, current: _Round, received: ReceivedWeights, given_up: threading.Event) -> None:
        stamp = WeightStamp(current.request.version, current.request.run_id)
        with self._lock:
            if self._round is not current:
                raise RoundFailed("the round ended before its weights were loaded")
            if given_up.is_set():
                raise RoundFailed("the caller has gone before its weights were loaded")
            self._num_loading += 1
        remaining_s = max(0.1, current.end - self._clock())
        try:
            installed = self._engine.install(received.tensors, stamp, remaining_s)
        except BaseException as error:
            with self._lock:
                self._num_loading -= 1
                self._unproven |= not isinstance(error, RoundFailed) or error.torn
            raise
        with self._lock:
            self._num_loading -= 1
            current.installed = installed
            current.last_call = self._clock()
            if self._round is not current and self._engine.stamp == stamp:
                self._unproven = True  # the round ended while the engine loaded

    def _fail(self, current: _Round, error: RoundFailed) -> None:
        _log.warning("round %s failed: %s", current.request.round_id, error)
        with self._lock:
            current.failure = current.failure or str(error)
        if current.receiver is not None:
            current.receiver.close()

    def _release_port(self, ended: _Round | None) -> None:
        if ended is not None and ended.receiver is not None:
            ended.receiver.join(_JOIN_TIMEOUT_S)
