"""Decides what may happen to the weights, and when completions may be asked: one round at a time.

A round: begin, a way for its weights, load, finish. Weights reach the model only when all of them are there, in one
step, so a push that is cut off leaves the old version serving under its old stamp. A staged round shuts the door of
``/infer/`` from its load to its end, any other from begin to end. Called by the routes from any thread; holds its lock
for decisions only, never while it waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from swift_stage2.errors import EngineUnavailable, ProtocolError, RoundFailed, RoundRefused
from swift_stage2.rollout_server.engine import Engine, let_go_of_frames
from swift_stage2.rollout_server.infer_door import InferDoor
from swift_stage2.rollout_server.open_round import OpenRound, RoundState, is_vouched_for, release_port
from swift_stage2.rollout_server.weight_source import (
    DiskFile,
    FilledSource,
    RoundWeights,
    WeightSource,
    compare_manifests,
    listen,
    open_learner_memory,
    require_size,
)
from swift_stage2.runtime.memory import MemoryFile
from swift_stage2.weights.stream import WeightListener
from swift_stage2.wire import (
    FinishRequest,
    MemoryAnswer,
    RefusalReason,
    RoundProof,
    RoundRequest,
)

_log = logging.getLogger(__name__)
_GIVEN_UP_POLL_S = 0.25


class WeightRounds:
    """The rounds of one server and the door of its ``/infer/``."""

    def __init__(
        self,
        engine: Engine,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        host: str = "127.0.0.1",
        weights_root: Path | None = None,
    ) -> None:
        """``host``: the address of this machine to listen on for weights; ``weights_root``: where to read them."""
        self._engine = engine
        self._host = host
        self._weights_root = weights_root
        self._memory: MemoryFile | None = (
            None  # for weights that must be copied, kept so that its pages stay mapped
        )
        self._writer: FilledSource | None = None  # that fills it, or did
        self._filling = threading.Lock()  # held while both are made, which may take long
        self._incarnation = incarnation
        self._clock = clock
        self._lock = threading.Lock()
        self._door = InferDoor(self._lock)
        self._round: OpenRound | None = None
        self._unproven = False
        self._closed = False
        self._num_loading = 0  # loads that are waited for, also of rounds that have ended
        self._last_proof: RoundProof | None = None

    @property
    def state(self) -> RoundState:
        with self._lock:
            self._expire()
            if self._is_loading():
                return RoundState.INSTALLING
            if self._round is not None:
                return RoundState.ROUND_OPEN
            return RoundState.UNPROVEN if self._is_unproven() else RoundState.SERVING

    @contextmanager
    def admission(self, round_id: str | None) -> Iterator[bool]:
        """One ``/infer/``, counted while it lasts; says whether a round has proven the weights that answer it.

        Raises:
            RoundRefused: a round is open that is not staged and not this request's, or the weights are unproven.
            DoorShut: a staged round installs its weights.
            EngineUnavailable: the server is shutting down.
        """
        with self._lock:
            self._expire()
            self._require_running()
            request = self._round.request if self._round is not None else None
            is_own = self._door.enter(round_id, request, is_unproven=self._is_unproven())
            is_proven = not is_own and self._engine.stamp.version is not None
        try:
            yield is_proven
        finally:
            with self._lock:
                self._door.leave()
                if is_own and self._round is not None:
                    self._round.last_call = self._clock()  # its learner lives

    def begin(self, request: RoundRequest) -> None:
        """Opens a round; until it ends, only its own requests are answered, unless it is staged.

        A round that failed, or that the same run left open, gives way. Raises:
            RoundRefused: other tensors than the model's, another run's round, or completions in the making (of no
                matter to a staged round).
        """
        compare_manifests(self._engine.manifest(), request.manifest)
        with self._lock:
            self._require_running()
            self._expire()
            if (held := self._round) is not None:
                held.give_way(request.run_id, self._clock())
            if self._door.num_inside and not request.staged:
                raise RoundRefused(
                    RefusalReason.BUSY,
                    f"a round must find the server idle, got num_running={self._door.num_inside} /infer/ calls; "
                    "drain or abort them and ask again",
                )
            self._end_round()
            self._last_proof = None  # a round may be brought once more
            now = self._clock()
            self._round = OpenRound(request, end=now + request.timeout_s, last_call=now)
        release_port(held)

    def open_stream(self, port: int, num_bytes: int, round_id: str | None = None) -> str:
        """Listens for a learner with a snapshot of so many bytes; returns the secret that it must present.

        Raises:
            RoundRefused: no round is open, or it has a way for weights already.
            RoundFailed: the address cannot be listened on, or there is no memory to receive into.
            ProtocolError: a snapshot of the round has not so many bytes.
        """
        with self._lock:
            current = self._open_round(round_id).without_source()
        require_size(num_bytes, current.request.manifest)
        with self._failing(current):
            stream = listen(self._host, port)
            self._receive(current, num_bytes, stream)
        return stream.secret

    def map_memory(self, path: str, round_id: str | None = None) -> MemoryAnswer:
        """Maps a learner's memory in the place of a stream, and says whether it could.

        Raises:
            RoundRefused: no round is open, or it has a way for weights already.
        """
        with self._lock:
            current = self._open_round(round_id).without_source()
        try:
            source = WeightSource(RoundWeights(open_learner_memory(path), current.request))
        except (OSError, ProtocolError) as error:
            # Without the path, which differs from run to run.
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return MemoryAnswer(f"the learner's memory cannot be read here: {why}", mapped=False)
        self._adopt(current, source)
        return MemoryAnswer("the learner's memory is mapped", mapped=True)

    def read_disk(self, round_id: str | None = None) -> None:
        """Has the round's weights read from its file in ``weights_root``.

        Raises:
            RoundRefused: as ``map_memory``, or this server reads none.
            RoundFailed: the file is not there, or there is no memory to read it into.
            ProtocolError: a snapshot of the round has not so many bytes.
        """
        with self._lock:
            current = self._open_round(round_id).without_source()
        if self._weights_root is None:
            raise RoundRefused(
                RefusalReason.WRONG_ORDER,
                "the server must be told where to read weights, got no --weights-root; start it with one",
            )
        with self._failing(current):
            file = DiskFile(self._weights_root, current.request.round_id)
            require_size(file.num_bytes, current.request.manifest)
            self._receive(current, file.num_bytes, file)

    def load(
        self,
        given_up: threading.Event,
        round_id: str | None = None,
        abort_pending: Callable[[], object] | None = None,
    ) -> None:
        """Waits for the weights and copies them into the model.

        A staged round then shuts the door and waits for the calls inside, after ``abort_pending``, which ends those
        that may be. Once ``given_up`` is set, its caller has gone: nothing is waited for or copied any more, and nobody
        is going to prove what is being copied.

        Raises:
            RoundRefused: no round is open, it has no way for weights, or it has loaded or is being loaded already.
            RoundFailed: not everything arrived or calls did not end (the old weights serve on), or the copy failed.
        """
        with self._lock:
            current = self._open_round(round_id)
            source = current.begin_load(given_up)
        try:
            with self._failing(current):
                if current.failure:
                    raise RoundFailed(current.failure)
                weights = source.collect(current.end - self._clock(), given_up)
                self._install(current, weights, given_up, abort_pending)
        except RoundFailed as error:
            let_go_of_frames(error)  # they hold a learner's memory
            raise
        finally:
            with self._lock:
                if self._round is current and (current.installed is None or given_up.is_set()):
                    self._end_round()

    def require(self, round_id: str) -> None:
        """Raises RoundRefused unless that round is open."""
        with self._lock:
            self._open_round(round_id)

    def expire(self) -> None:
        """Ends the open round if its time is over or its learner lost; else the next call of anybody would."""
        with self._lock:
            self._expire()

    def finish(self, wanted: FinishRequest) -> RoundProof | None:
        """Ends the round with its proof; asked again, the same proof returns. None when it was given up or has ended.

        Weights that were loaded and are not vouched for (given up, not resident as they arrived, or with other
        checksums than those that the learner has sent) leave the server unproven. Raises:
            RoundRefused: not the open round, or nothing was loaded (it ends, the old weights serve on).
        """
        round_id, commit = wanted.round_id, wanted.commit
        with self._lock:
            if self._last_proof is not None and self._last_proof.round_id == round_id:
                return self._last_proof
            self._expire()
            if self._round is None and not commit:
                return None  # this server noticed the loss first, and has ended it already
            current = self._open_round(round_id)
            installed = current.installed
            proof = None
            if commit and installed is not None:
                proof = self._last_proof = current.proof(installed, self._incarnation)
                self._unproven = not is_vouched_for(proof, wanted)
                current.installed = None
            self._end_round()
        release_port(current)
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
    def _require_running(self) -> None:
        if self._closed:
            raise EngineUnavailable("the server is shutting down")

    def _is_unproven(self) -> bool:
        """A round may end while the engine still loads for it: what the model holds then is anybody's guess."""
        return self._unproven or self._is_loading()

    def _is_loading(self) -> bool:
        return self._num_loading > 0 or self._engine.is_copying

    def _open_round(self, round_id: str | None) -> OpenRound:
        """The open round, which must be the one that is named, if any is."""
        self._expire()
        if self._round is None:
            raise RoundRefused(RefusalReason.NO_ROUND, "no round is open; begin one first")
        if round_id not in (None, self._round.request.round_id):
            raise RoundRefused(RefusalReason.NO_ROUND, f"round {round_id} is not the open one")
        self._round.last_call = self._clock()
        return self._round

    def _expire(self) -> None:
        idle = not self._door.num_inside
        if self._round is not None and (why := self._round.why_over(self._clock(), is_idle=idle)):
            _log.warning("round %s %s and is forgotten", self._round.request.round_id, why)
            self._end_round()

    def _end_round(self) -> None:
        """Forgets the round and opens its door. Weights that it loaded without a commit are nobody's."""
        if self._round is None:
            return
        if self._round.installed is not None:
            self._unproven = True
        if self._round.source is not None:
            self._round.source.close()
        self._round = None
        self._door.open()

    def _require_wanted(self, current: OpenRound, given_up: threading.Event) -> None:
        if self._round is not current:
            raise RoundFailed("the round ended before its weights were loaded")
        if given_up.is_set():
            raise RoundFailed("the caller has gone before its weights were loaded")

    def _adopt(self, current: OpenRound, source: WeightSource) -> None:
        with self._lock:
            if self._round is current and current.source is None:
                current.source = source
                return
        source.close()
        raise RoundRefused(RefusalReason.NO_ROUND, "the round ended while its weights were looked for")

    def _receive(self, current: OpenRound, num_bytes: int, origin: WeightListener | DiskFile) -> None:
        """Has a thread fill memory of our own: that of the round before, unless somebody may still write or read it."""
        with self._filling:
            left_s = max(0.1, current.end - self._clock())
            is_used = self._num_loading > 0 or self._engine.may_read
            if self._writer is not None and (is_used or not self._writer.join(0)):
                self._memory = None
            try:
                if self._memory is None or self._memory.num_bytes != num_bytes:
                    self._memory = None  # before there is another one
                    self._memory = MemoryFile("weights", num_bytes)
            except OSError as error:
                origin.close()
                raise RoundFailed(f"the server has no memory to receive weights into: {error}") from error
            self._writer = FilledSource(self._memory, current.request, origin, left_s)
        self._adopt(current, self._writer)

    # --- waits, outside the lock ----------------------------------------------------------------
    def _install(
        self,
        current: OpenRound,
        weights: RoundWeights,
        given_up: threading.Event,
        abort_pending: Callable[[], object] | None,
    ) -> None:
        arrived = self._engine.sum_arrived(weights)
        if current.request.staged:
            with self._lock:
                self._require_wanted(current, given_up)
                self._door.shut()
            if abort_pending is not None:
                abort_pending()
        with self._lock:
            self._require_wanted(current, given_up)
            while current.request.staged and self._door.num_inside:
                if (left_s := current.end - self._clock()) <= 0:
                    raise RoundFailed(
                        "completions in the making must end within the round's time, got "
                        f"num_running={self._door.num_inside} /infer/ calls; write rollout.sync.on_pending: abort, or "
                        "a longer rollout.sync.timeout_s"
                    )
                self._door.wait_for_leave(min(left_s, _GIVEN_UP_POLL_S))
                self._require_wanted(current, given_up)
            self._num_loading += 1
        remaining_s = max(0.1, current.end - self._clock())
        try:
            installed = self._engine.install(weights, current.stamp, remaining_s, arrived)
        except BaseException as error:
            with self._lock:
                self._num_loading -= 1
                self._unproven |= not isinstance(error, RoundFailed) or error.torn
            raise
        with self._lock:
            self._num_loading -= 1
            current.installed = installed
            current.last_call = self._clock()
            if self._round is not current and self._engine.stamp == current.stamp:
                self._unproven = True  # the round ended while the engine loaded

    @contextmanager
    def _failing(self, current: OpenRound) -> Iterator[None]:
        """A RoundFailed that is raised inside is the end of the round's way for weights."""
        try:
            yield
        except RoundFailed as error:
            _log.warning("round %s failed: %s", current.request.round_id, error)
            with self._lock:
                current.fail(str(error))
            raise
