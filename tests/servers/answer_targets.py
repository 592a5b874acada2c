"""Everything that reads a server's answers, in front of one server: client, connection, session, proof and merger."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
from rollout_batch import make_client

from swift_stage2.channel_b.rollouts import RolloutClient, ServedWeights
from swift_stage2.channel_b.rollouts.chat_route import RouteNow
from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.config import DecodingConfig
from swift_stage2.errors import ProtocolError, ServerFault
from swift_stage2.records import Sample, SampleKey
from swift_stage2.rollout_merger.dispatcher import Dispatcher, Upstream
from swift_stage2.rollout_merger.merged_post import SeedLayout
from swift_stage2.rollout_merger.routes import create_app
from swift_stage2.runtime.background import BackgroundFailures
from swift_stage2.servers import protocol
from swift_stage2.servers.http_app import SHUTDOWN_GRACE_S, HttpServer, bind
from swift_stage2.servers.probe import SuspectProbe
from swift_stage2.servers.session import Deadline, ServerSession

FORBIDDEN = frozenset({"hang", "traceback"})
"""Ends that no call may have: none in time, or an exception that is not ours."""
_TARGET_CALL_S = 10.0
_LONGEST_S = 3 * _TARGET_CALL_S
_PROBE_INTERVAL_S = 0.02
_TARGET_REQUEST = {"messages": [{"role": "user", "content": "x"}]}
_DECODING = DecodingConfig(max_new_tokens=64)


class AnswerTargets:
    """Real parts in front of one server, for as long as ``serving`` lasts."""

    def __init__(self, url: str, merger_url: str, client: RolloutClient, probe: SuspectProbe) -> None:
        self._url = url
        self._merger_url = merger_url
        self._client = client
        self._route = RouteNow(url, None, api_key=None)
        self._probe = probe
        self._config = protocol.request_config(
            max_new_tokens=64, temperature=0.5, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=7
        )
        # One for all calls: it loads certificates, which takes longer than a call.
        self._http = httpx.Client(timeout=_LONGEST_S, trust_env=False)
        self._merger_log = _Log()
        self.failures: list[str] = []
        """The rules that the command broke, in words."""

    def ask_all(self) -> Mapping[str, str]:
        """The end per target: ``record``, ``fault``, ``traceback`` or ``hang``."""
        targets: dict[str, Callable[[], str]] = {
            "client": self._generate,
            "route": self._infer,
            "session": partial(
                self._ask, lambda session: session.info(Deadline(_TARGET_CALL_S)), ServerFault
            ),
            "round proof": partial(self._ask, _proof_of, (ServerFault, ProtocolError)),
            "merger /infer/": partial(self._merged, "POST", protocol.INFER),
            "merger control": partial(self._merged, "GET", protocol.WORLD_SIZE),
        }
        return {name: self._watched(name, target) for name, target in targets.items()}

    def what_the_threads_did(self, failures: BackgroundFailures) -> str:
        """``traceback`` if a background thread failed, else ``fault``."""
        # A refused key is told, and the server is asked on.
        self.failures += [told for told in failures.take() if "rollout.api_key_env" not in told]
        self.failures += self._merger_log.lines
        if not self._probe.is_alive:
            self.failures.append("the suspect probe's thread has ended")
        return "traceback" if self.failures else "fault"

    def _watched(self, name: str, target: Callable[[], str]) -> str:
        started = time.monotonic()
        try:
            end = target()
        except Exception as error:  # counted: this is what the attack is for
            self.failures.append(f"{name}: {type(error).__name__}: {error}"[:300])
            return "traceback"
        return "hang" if time.monotonic() - started > _LONGEST_S else end

    def _generate(self) -> str:
        self._client.set_proven({self._url: ServedWeights(None, 3, "one")})
        sample = Sample(SampleKey(epoch=0, position=0, index=0), row={})
        self._client.submit([sample], [_TARGET_REQUEST])
        outcome = self._client.next_finished(_LONGEST_S)
        assert outcome is not None
        assert len(outcome.rollouts) + len(outcome.returned) + len(outcome.quarantined) == 1
        return "record" if outcome.rollouts else "fault"

    def _infer(self) -> str:
        result = self._route.generate([_TARGET_REQUEST], self._config, timeout_s=_TARGET_CALL_S)
        return "record" if result.end is PostEnd.ANSWERED else "fault"

    def _ask(self, call: Callable[[ServerSession], object], faults: Any) -> str:
        with ServerSession(self._url) as session:
            try:
                call(session)
            except faults:
                return "fault"
        return "record"

    def _merged(self, method: str, path: str) -> str:
        asks = path == protocol.INFER
        body = {"infer_requests": [_TARGET_REQUEST], "request_config": self._config} if asks else None
        self._http.post(self._merger_url + protocol.PROCESS_WEIGHTS, json={})
        reply = self._http.request(method, self._merger_url + path, json=body)
        if reply.status_code != httpx.codes.OK:
            return "fault"
        assert not asks or isinstance(json.loads(reply.content), list)
        return "record"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The merger's own complaints count while this lasts."""
        loggers = [logging.getLogger(name) for name in ("swift_stage2.rollout_merger", "uvicorn.error")]
        for logger in loggers:
            logger.addHandler(self._merger_log)
        clients = logging.getLogger("swift_stage2.channel_b.rollouts")
        level, clients.propagate = clients.level, False  # it tells every suspect, some thousands here
        clients.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(self._merger_log)
            clients.setLevel(level)
            clients.propagate = True
            self._http.close()


def _proof_of(session: ServerSession) -> object:
    return protocol.RoundProof.from_json(session.post(protocol.FINISH_ROUND, {}, Deadline(_TARGET_CALL_S)))


class _Log(logging.Handler):
    """Keeps what a thread of the merger, or the web server around it, could not deal with."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[:300])


@contextmanager
def serving(url: str, failures: BackgroundFailures) -> Iterator[AnswerTargets]:
    """All targets in front of the server at ``url``; the probe asks it all the time."""
    upstream = Upstream(url, api_key=None, timeout_s=_TARGET_CALL_S)
    dispatcher = Dispatcher(upstream, max_batch_size=1, layout=SeedLayout(), gather_s=0.0)
    listener = bind("127.0.0.1", 0)
    server = HttpServer(create_app(dispatcher), partial(dispatcher.close, SHUTDOWN_GRACE_S))
    dispatcher.start()
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="merger under attack", daemon=True
    )
    thread.start()
    probe = SuspectProbe(rank=0, api_key=None, interval_s=_PROBE_INTERVAL_S, failures=failures)
    probe.start()
    probe.watch([url])
    client = make_client(url, decoding=_DECODING, request_timeout_s=_TARGET_CALL_S, run_id="run")
    targets = AnswerTargets(url, f"http://127.0.0.1:{listener.getsockname()[1]}", client, probe)
    try:
        with client, targets.listening():
            yield targets
    finally:
        probe.stop()
        server.should_exit = True
        thread.join(_LONGEST_S)
