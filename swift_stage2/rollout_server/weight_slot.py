"""Where new weights lie until they are installed, and the gate of ``/infer/``, which is shut meanwhile.

``offer`` takes at most one set of weights, beside those that serve; ``install`` shuts the gate, has the engine copy
them and compares sums. The server serves iff the sums agree. An install that fails before the copy, or whose caller has
gone by then, leaves the old weights serving under their old stamp. After ``sleep`` there are none, until an install.
Called by the routes from any thread; the lock is held for decisions only, never while anything is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from swift_stage2.errors import EngineUnavailable, InstallFailed, ProtocolError, WeightsRefused
from swift_stage2.rollout_server.engine import Engine, WeightStamp, clear_traceback
from swift_stage2.rollout_server.weight_source import (
    DiskFile,
    WeightSource,
    compare_manifests,
    open_learner_memory,
    require_size,
)
from swift_stage2.runtime.memory import MemoryFile
from swift_stage2.weights.snapshot import WeightIdentity
from swift_stage2.weights.stream import WeightListener
from swift_stage2.wire import (
    ASLEEP_STATE,
    INSTALLING_STATE,
    InstallRequest,
    OfferAnswer,
    RefusalReason,
    SleepRequest,
    WeightOffer,
    WeightProof,
    WeightWay,
)

_log = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 2.0
_LEAST_INSTALL_S = 0.1


class SlotState(StrEnum):
    """Decides over ``/infer/``: calls are answered, wait at the gate, or are refused until a later install."""

    SERVING = "serving"
    INSTALLING = INSTALLING_STATE
    UNPROVEN = "unproven"
    ASLEEP = ASLEEP_STATE
    """As unproven, and the memory of weights and caches is free."""


class GateShut(Exception):
    """Weights are being installed. ``opened`` ends when their install does; then the caller may try again."""

    def __init__(self, opened: Future[None]) -> None:
        super().__init__("weights are being installed")
        self.opened = opened


class WeightSlot:
    """The weights of one server: what is offered, what is being installed, what is proven."""

    def __init__(
        self,
        engine: Engine,
        incarnation: str,
        *,
        host: str = "127.0.0.1",
        weights_root: Path | None = None,
    ) -> None:
        """``host``: the address of this machine to listen on for weights; ``weights_root``: where to read them."""
        self._engine = engine
        self._incarnation = incarnation
        self._host = host
        self._weights_root = weights_root
        self._memory: MemoryFile | None = None
        """For weights that must be copied, kept so that its pages stay mapped."""
        self._writer: WeightSource | None = None  # that fills it, or did
        self._changed = threading.Condition()  # its lock guards all below
        self._is_busy = False  # with an offer, or falling asleep
        self._offered: WeightSource | None = None
        self._offered_until_s = 0.0
        self._installing: WeightSource | None = None
        self._proof: WeightProof | None = None
        self._gate: Future[None] | None = None  # while it is shut
        self._unproven = engine.is_asleep
        self._closed = False

    @property
    def state(self) -> SlotState:
        with self._changed:
            if self._gate is not None:
                return SlotState.INSTALLING
            if not self._unproven:
                return SlotState.SERVING
            return SlotState.ASLEEP if self._engine.is_asleep else SlotState.UNPROVEN

    @contextmanager
    def admission(self) -> Iterator[None]:
        """While one ``/infer/`` is submitted: the gate is not shut meanwhile.

        Raises:
            GateShut: weights are being installed.
            WeightsRefused: the model holds weights that nobody vouches for, or none.
            EngineUnavailable: the server is shutting down.
        """
        with self._changed:
            self._require_running()
            if self._gate is not None:
                raise GateShut(self._gate)
            if self._unproven:
                raise WeightsRefused(
                    RefusalReason.UNPROVEN,
                    "the model holds weights that nobody vouches for, or sleeps without any; install others",
                )
            yield

    def offer(self, offer: WeightOffer) -> OfferAnswer:
        """Has weights lie here, or come, in the place of those that were offered before.

        An install for which weights still come ends; one that may copy already is waited for. An engine that has not
        loaded yet loads first.

        Raises:
            WeightsRefused: other tensors than the model's, or weights on a disk without a ``weights_root``.
            InstallFailed: the address cannot be listened on, the file is not there, there is no memory, or the install
                before does not end in time.
            ProtocolError: a snapshot of these tensors has not so many bytes.
            EngineUnavailable: the server is shutting down, or has not loaded in time.
        """
        self._engine.load_now(offer.timeout_s)
        compare_manifests(self._engine.manifest(), offer.manifest)
        source: WeightSource | None = None
        with self._alone("offer", offer.timeout_s):
            match offer.way:
                case WeightWay.SHARED_MEMORY:
                    source, answer = self._map(offer)
                case WeightWay.DISK:
                    source, answer = self._read_disk(offer)
                case WeightWay.STREAM:
                    source, answer = self._open_stream(offer)
            with self._changed:
                self._offered = source
                self._offered_until_s = time.monotonic() + offer.timeout_s
                if self._closed and source is not None:
                    source.close()
        return answer

    def sleep(self, wanted: SleepRequest, given_up: threading.Event) -> None:
        """Gives the memory of weights and caches back, and lets go of what was offered; only an install wakes it.

        Whatever is being answered ends. An install is waited for as by ``offer``.

        Raises:
            WeightsRefused: the server was started to stay awake.
            InstallFailed: the install before does not end in time, or the caller has gone meanwhile.
            EngineUnavailable: the engine does not sleep in time, or the server is shutting down.
        """
        if not self._engine.sleep_mode.level:
            raise WeightsRefused(
                RefusalReason.NO_SLEEP, "the server must be allowed to sleep; start it with --sleep-level 2"
            )
        end = time.monotonic() + wanted.timeout_s
        with self._alone("sleep", wanted.timeout_s, given_up), self._shut_gate():
            self._conclude(None)
            self._engine.sleep(end - time.monotonic())

    def install(self, wanted: InstallRequest, given_up: threading.Event) -> WeightProof:
        """Installs the offered weights once they have arrived; the proof of those that are installed returns again.

        What is being answered goes on behind it, on engines that can. Once ``given_up`` is set, its caller has gone:
        nothing is waited for any more, and no copy begins.

        Raises:
            WeightsRefused: these weights were not offered, or others since.
            InstallFailed: not everything arrived or calls did not end (the old weights serve on), or the copy failed.
            EngineUnavailable: the server is shutting down.
        """
        end, name = time.monotonic() + wanted.timeout_s, (wanted.run_id, wanted.version)
        with self._changed:
            self._require_wanted(given_up)
            proof, offered = self._proof, self._offered
            if offered is None or offered.name != name:
                if proof is not None and (proof.run_id, proof.version) == name:
                    return proof
                raise WeightsRefused(
                    RefusalReason.NO_WEIGHTS,
                    f"weights must be offered before they are installed, got version={wanted.version} of run "
                    f"{wanted.run_id}, and they were not, or others were since",
                )
            self._installing, self._offered = offered, None
        try:
            return self._install(offered, wanted, end, given_up)
        except Exception as error:
            _log.warning("version %d of run %s: %s", wanted.version, wanted.run_id, error)
            clear_traceback(error)  # they hold a learner's memory
            raise
        finally:
            with self._changed:
                self._installing = None
                self._changed.notify_all()
            _let_go(offered)

    def end_late_offer(self) -> None:
        """Lets go of weights that nobody has installed in the offer's time: a learner that was killed leaves them."""
        with self._changed:
            if self._offered is None or time.monotonic() < self._offered_until_s:
                return
            late, self._offered = self._offered, None
        _let_go(late)

    def close(self) -> None:
        """Ends offer and install, and whatever waits for them; nothing is taken any more."""
        with self._changed:
            self._closed = True
            sources = [source for source in (self._offered, self._installing) if source is not None]
            self._changed.notify_all()
        self._open_gate()
        for source in sources:
            source.close()

    # --- offers and sleeps, one at a time -------------------------------------------------------
    @contextmanager
    def _alone(self, what: str, timeout_s: float, given_up: threading.Event | None = None) -> Iterator[None]:
        """No offer is there inside, and no install; one that may copy is waited for. Raises as ``sleep`` does."""
        with self._changed:
            if self._installing is not None and self._gate is None:
                self._installing.close()
            if not self._changed.wait_for(self._is_idle, timeout_s):
                raise InstallFailed(f"the install before this {what} must end within its time")
            self._require_wanted(given_up)
            self._is_busy = True
            before, self._offered = self._offered, None
        try:
            if before is not None:
                _let_go(before)
            yield
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _is_idle(self) -> bool:
        return self._closed or not (self._is_busy or self._installing)

    def _map(self, offer: WeightOffer) -> tuple[WeightSource | None, OfferAnswer]:
        assert offer.path is not None
        try:
            source = WeightSource(offer, open_learner_memory(offer.path))
        except (OSError, ProtocolError) as error:
            # Without the path, which differs from run to run.
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return None, OfferAnswer(False, f"the learner's memory cannot be read here: {why}")
        return source, OfferAnswer(True, "the learner's memory is mapped")

    def _read_disk(self, offer: WeightOffer) -> tuple[WeightSource, OfferAnswer]:
        if self._weights_root is None:
            raise WeightsRefused(
                RefusalReason.NO_ROOT,
                "the server must be told where to read weights, got no --weights-root; start it with one",
            )
        file = DiskFile(self._weights_root, WeightIdentity(offer.run_id, offer.version).name)
        return self._filled(offer, file.num_bytes, file), OfferAnswer(True, "the version's file is read")

    def _open_stream(self, offer: WeightOffer) -> tuple[WeightSource, OfferAnswer]:
        assert offer.port is not None
        try:
            stream = WeightListener(self._host, offer.port)
        except (OSError, OverflowError) as error:
            raise InstallFailed(
                f"the server cannot listen for weights on {self._host}:{offer.port}: {type(error).__name__}: {error}; "
                "choose a free group_port, and start the server with a --group-bind that is an address of its machine"
            ) from error
        answer = OfferAnswer(True, f"listening for weights on port {offer.port}", stream.secret)
        return self._filled(offer, offer.num_bytes, stream), answer

    def _filled(self, offer: WeightOffer, num_bytes: int, origin: WeightListener | DiskFile) -> WeightSource:
        """Has a thread fill memory of our own: that of the offer before, unless somebody may still write or read it."""
        if self._engine.may_read or not (self._writer is None or self._writer.join(0)):
            self._memory = None
        try:
            require_size(num_bytes, offer.manifest)
            if self._memory is None or self._memory.num_bytes != num_bytes:
                self._memory = None  # before there is another one
                self._memory = MemoryFile("weights", num_bytes)
        except BaseException as error:
            origin.close()
            if isinstance(error, OSError):
                raise InstallFailed(f"the server has no memory to receive weights into: {error}") from error
            raise
        self._writer = WeightSource(offer, self._memory.reopened(), self._memory.memory, origin)
        return self._writer

    # --- installs, one at a time ----------------------------------------------------------------
    def _install(
        self, offered: WeightSource, wanted: InstallRequest, end: float, given_up: threading.Event
    ) -> WeightProof:
        offered.collect(end - time.monotonic(), given_up)
        self._engine.sum_arrived(offered)
        with self._shut_gate():
            waits = not self._engine.installs_beside
            num_left = self._engine.settle(end - time.monotonic(), given_up) if waits else 0
            self._require_wanted(given_up)
            if num_left:
                raise InstallFailed(
                    f"completions in the making must end within the install's time, got num_running={num_left}; write "
                    "a longer rollout.sync.timeout_s, or serve with vLLM 0.32 or newer"
                )
            stamp, left_s = WeightStamp(wanted.version, wanted.run_id), end - time.monotonic()
            try:
                installed = self._engine.install(offered, stamp, max(_LEAST_INSTALL_S, left_s))
            except BaseException as error:
                if not isinstance(error, InstallFailed) or error.torn:
                    self._conclude(None)
                raise
            proof = WeightProof(
                wanted.run_id,
                wanted.version,
                self._incarnation,
                installed.arrived,
                installed.resident,
                installed.loaded,
            )
            is_vouched_for = proof.vouches_for(wanted.checksums)
            self._conclude(proof if is_vouched_for else None)
        if not is_vouched_for:
            name = f"version {wanted.version} of run {wanted.run_id}"
            _log.warning("%s differs from what was sent; nothing is served", name)
        return proof

    def _conclude(self, proof: WeightProof | None) -> None:
        """The model has changed; without a proof nobody vouches for what it holds."""
        with self._changed:
            self._proof, self._unproven = proof, proof is None

    @contextmanager
    def _shut_gate(self) -> Iterator[None]:
        """Lets nobody in meanwhile; who is inside may stay."""
        with self._changed:
            self._require_running()
            self._gate = Future()
            self._gate.set_running_or_notify_cancel()  # no caller that goes ends it for the others
        try:
            yield
        finally:
            self._open_gate()

    def _open_gate(self) -> None:
        with self._changed:
            gate, self._gate = self._gate, None
        if gate is not None:
            gate.set_result(None)

    def _require_wanted(self, given_up: threading.Event | None) -> None:
        self._require_running()
        if given_up is not None and given_up.is_set():
            raise InstallFailed("the caller has gone before its weights were installed")

    def _require_running(self) -> None:
        if self._closed:
            raise EngineUnavailable("the server is shutting down")


def _let_go(source: WeightSource) -> None:
    """Frees its port and ends what is on its way; waits, not for long, until its memory is written no more."""
    source.close()
    source.join(_JOIN_TIMEOUT_S)
