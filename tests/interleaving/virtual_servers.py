"""Rollout servers in memory: weights, running ``/infer/`` calls, installs, and faults; and the ways to reach them.

A call that its caller gave up goes on being computed until it ends by itself, as on a stock server. What a server
computes with is told in every completion's text, so that nobody has to believe a version number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from interleaving.scheduler import Strand
from interleaving.virtual_threading import active

from swift_stage2 import wire
from swift_stage2.columns import LOG_PROBS
from swift_stage2.errors import ServerFault
from swift_stage2.servers import infer_wire, vllm_serve
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.tensors import checksum_tensor
from swift_stage2.weights.transport import Delivery, OurTransport

FOR_EVER = 1e6
Weights = tuple[float, ...]
BASE_WEIGHTS: Weights = (-1.0, -1.0)
NUM_TOKENS = 4
"""Of a whole answer. Each tells the weights that it was sampled with."""


def log_prob_of(token_id: int) -> float:
    """Tells them, too."""
    return -1.0 - abs(token_id)


@dataclass(slots=True, eq=False)
class Computation:
    """One ``/infer/`` call on a server. It runs until ``end`` whether or not anybody waits for it."""

    begin: float
    end: float
    parts: list[tuple[int, dict[str, Any], Weights]]
    """The number of tokens that were there when the server took weights, their stamp, and they."""


@dataclass(slots=True)
class Fate:
    """One POST of rollouts has the end that the scene chose for it."""

    latency_s: float = 0.0
    status: int = 200
    failed: tuple[int, ...] = ()  # places of the requests that an error answer names, if the server does so
    lose_connection: bool = False  # after it was sent; the server computes on


@dataclass
class Watcher:
    """The scene's questions and decisions. Replaced per run."""

    fate_of_infer: Callable[[VirtualServer, Any], Fate] = lambda server, body: Fate()
    on_infer: Callable[[VirtualServer], None] = lambda server: None
    on_weights: Callable[[VirtualServer], None] = lambda server: None
    fate_of_push: Callable[[VirtualServer], str] = lambda server: "arrives"
    delay_of_round: Callable[[], float] = lambda: 0.0


@dataclass(eq=False)
class VirtualServer:
    """One server. ``stock`` ones know no ``/stage2/`` path and stamp nothing."""

    url: str
    stock: bool
    watcher: Watcher
    alive: bool = True
    num_starts: int = 1
    weights: Weights = BASE_WEIGHTS
    version: int | None = None
    run_id: str | None = None
    running: list[Computation] = field(default_factory=list)
    changed: list[Strand] = field(default_factory=list)
    offered: wire.WeightOffer | None = None
    installing: bool = False  # from then on or a little before: the gate is shut
    vouched: bool = True
    arrived: dict[str, Any] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return f"start-{self.num_starts}"

    def computing(self) -> list[Computation]:
        """The ``/infer/`` calls that run now, whoever waits for them."""
        now = active().now
        self.running = [call for call in self.running if call.end > now]
        return self.running

    def die(self) -> None:
        self.alive = False
        self.running.clear()
        self.wake()

    def start_again(self) -> None:
        """Another process: the weights it was first started with, and no memory of any other."""
        self.alive, self.num_starts = True, self.num_starts + 1
        self.weights, self.version, self.run_id = BASE_WEIGHTS, None, None
        self.vouched, self.offered, self.installing, self.arrived = True, None, False, {}
        self.wake()

    def wake(self) -> None:
        for strand in self.changed:
            active().wake(strand)
        self.changed.clear()

    # --- the wire ---------------------------------------------------------------------------------

    def answer(self, call: VirtualCall) -> tuple[int, Any]:
        """Status and body; takes virtual time. Raises what httpx raises when the connection breaks."""
        path = call.path
        if self.stock and (path.startswith("/stage2/") or path == vllm_serve.WEIGHT_INFO):
            return 404, {"detail": "Not Found"}
        handler = getattr(self, _HANDLERS[path])
        return handler(call)  # type: ignore[no-any-return]

    def _info(self, call: VirtualCall) -> tuple[int, Any]:
        specs = [wire.TensorSpec(str(index), (1,), "float32") for index in range(len(BASE_WEIGHTS))]
        info = wire.ServerInfo(
            stock=False, incarnation=self.incarnation, weight_version=self.version, run_id=self.run_id,
            state="ready", manifest=tuple(specs),
        )  # fmt: skip
        return 200, info.to_json()

    def _world_size(self, call: VirtualCall) -> tuple[int, Any]:
        return 200, {"world_size": 1}

    def _infer(self, call: VirtualCall) -> tuple[int, Any]:
        requests = call.body["infer_requests"]
        asker = active().current
        is_canary = asker is not None and "push to" in asker.name
        if not is_canary:
            self.watcher.on_infer(self)
        while self.installing:  # the gate
            call.wait(self, until=FOR_EVER)
        if not self.vouched:
            return 409, {"detail": "unproven", "reason": "unproven"}
        fate = Fate() if is_canary else self.watcher.fate_of_infer(self, call.body)
        now = active().now
        computation = Computation(now, now + fate.latency_s, [(0, self._stamp(), self.weights)])
        self.running.append(computation)
        if fate.lose_connection:
            raise httpx.ReadError("the connection broke")
        while computation.end > active().now:
            call.wait(self, until=computation.end)
        if fate.status != 200:
            return fate.status, self._failures(fate)
        asked = call.body["request_config"].get(LOG_PROBS.option)
        return 200, [
            self._completion(request.get(infer_wire.REQUEST_ID), computation, asked) for request in requests
        ]

    def _stamp(self) -> dict[str, Any]:
        return {
            "weight_version": self.version,
            "run_id": self.run_id,
        }

    def _failures(self, fate: Fate) -> dict[str, Any]:
        if self.stock:
            return {"detail": "cannot"}
        return {"detail": "cannot", "failures": [{"index": i, "cause": "cannot"} for i in fate.failed]}

    def _completion(
        self, request_id: str | None, computation: Computation, with_log_probs: bool | None
    ) -> dict[str, Any]:
        begins = [begin for begin, _, _ in computation.parts]
        parts = [
            (end - begin, stamp, int(weights[0]))
            for (begin, stamp, weights), end in zip(computation.parts, [*begins[1:], NUM_TOKENS], strict=True)
        ]
        tokens = [token for num_tokens, _, token in parts for _ in range(num_tokens)]
        choice: dict[str, Any] = {
            "message": {"content": repr(computation.parts[-1][2])},
            "finish_reason": "stop",
            "token_ids": tokens,
        }
        if with_log_probs:
            choice["logprobs"] = {"content": [{"logprob": log_prob_of(token)} for token in tokens]}
        completion: dict[str, Any] = {"response": {"choices": [choice], "prompt_token_ids": [1]}}
        if not self.stock:
            spans = [(stamp["weight_version"], num_tokens) for num_tokens, stamp, _ in parts]
            told = {"spans": spans if len(spans) > 1 else [], "request_id": request_id}
            completion["rollout_infos"] = {"stage2": parts[-1][1] | told}
        return completion

    def _reset(self, call: VirtualCall) -> tuple[int, Any]:
        """Ordered: answers once all that was running when it came has ended."""
        before = list(self.computing())
        while waited_for := [c for c in before if c.end > active().now and c in self.running]:
            call.wait(self, until=min(c.end for c in waited_for))
        return 200, {"message": "Request received, resetting status: True"}

    def _announce(self, call: VirtualCall) -> tuple[int, Any]:
        refused = self.watcher.fate_of_push(self) == "refused"
        return (500, {"detail": "cannot take weights"}) if refused else (200, {})

    def _take_offer(self, call: VirtualCall) -> tuple[int, Any]:
        offer = wire.WeightOffer.from_json(call.body)
        status, answer = self._announce(call)
        if status != 200:
            return status, answer
        self.offered, self.arrived = offer, {}
        return 200, wire.OfferAnswer(taken=True, message="").to_json()

    def take(self, tensors: Mapping[str, Any], version: int) -> None:
        """A bucket, or all of a file; a newer offer ends the stream of an older one."""
        if not self.stock and (self.offered is None or self.offered.version != version):
            raise ServerFault("the stream was closed")
        self.arrived |= {name: tensor.clone() for name, tensor in tensors.items()}
        if self.stock:
            self._load()

    def _load(self) -> None:
        self.watcher.on_weights(self)
        corrupt = self.watcher.fate_of_push(self) == "corrupt"
        values = list(self.weights)
        for name, chunk in self.arrived.items():
            value = chunk.item()
            values[int(name)] = value + 1000.0 if corrupt else value
        self.weights = tuple(values)

    def _install(self, call: VirtualCall) -> tuple[int, Any]:
        wanted, offered = wire.InstallRequest.from_json(call.body), self.offered
        if offered is None or (offered.run_id, offered.version) != (wanted.run_id, wanted.version):
            return 409, {"detail": "never offered", "reason": "no_weights"}
        if self.installing or len(self.arrived) < len(self.weights):
            return 500, {"detail": "not all has arrived"}
        self.installing = True
        try:
            if self.watcher.fate_of_push(self) == "not installed":
                return 500, {"detail": "it cannot"}
            self.vouched = False
            self._load()
            self.version, self.run_id = offered.version, offered.run_id
            for running in self.computing():
                done = (active().now - running.begin) / (running.end - running.begin)
                running.parts.append((int(done * NUM_TOKENS), self._stamp(), self.weights))
            self._take_time(call)
            proof = self._proof(offered)
            self.vouched = proof.vouches_for(wanted.checksums)
        finally:
            self.installing = False
            self.wake()
        fate = self.watcher.fate_of_push(self)
        if fate == "dies installed":
            self.die()
        if fate == "unheard":  # it serves the new weights, and the learner knows nothing of it
            raise httpx.ReadError("the connection broke")
        self._take_time(call)
        return 200, proof.to_json()

    def _proof(self, offered: wire.WeightOffer) -> wire.WeightProof:
        import torch

        arrived = {name: checksum_tensor(chunk) for name, chunk in self.arrived.items()}
        resident = {
            name: checksum_tensor(torch.tensor([self.weights[int(name)]], dtype=torch.float32))
            for name in arrived
        }
        return wire.WeightProof(
            run_id=offered.run_id,
            version=offered.version,
            incarnation=self.incarnation,
            arrived=arrived,
            resident=resident,
            loaded=tuple(arrived),
        )

    def _take_time(self, call: VirtualCall) -> None:
        ends = active().now + self.watcher.delay_of_round()
        while active().now < ends:
            call.wait(self, until=ends)

    def _state_keys(self, call: VirtualCall) -> tuple[int, Any]:
        return 200, {"keys": [str(index) for index in range(len(BASE_WEIGHTS))]}

    def _nothing(self, call: VirtualCall) -> tuple[int, Any]:
        return 200, {}


_HANDLERS = {
    wire.SERVER_INFO: "_info",
    wire.WORLD_SIZE: "_world_size",
    wire.STATE_KEYS: "_state_keys",
    wire.INFER: "_infer",
    wire.RESET_PREFIX_CACHE: "_reset",
    wire.RESET_ENCODER_CACHE: "_reset",
    wire.RESET_MM_CACHE: "_reset",
    wire.WEIGHTS: "_take_offer",
    wire.INSTALL: "_install",
    wire.UPDATE_FLATTENED_PARAMS: "_announce",
    wire.PROCESS_WEIGHTS: "_nothing",
    wire.INIT_COMMUNICATOR: "_announce",
    wire.CLOSE_COMMUNICATOR: "_nothing",
}


class VirtualCall:
    """One HTTP call as the caller holds it; also the socket that is shut down at its end."""

    def __init__(self, path: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> None:
        self.path = path
        self.body = body
        self.headers = headers
        self._read_ends = active().now + timeout_s
        self._cut = False
        self._waiter: Strand | None = None

    def get_extra_info(self, name: str) -> VirtualCall:
        return self

    def shutdown(self, how: int) -> None:
        self._cut = True
        if self._waiter is not None:
            active().wake(self._waiter)

    def wait(self, server: VirtualServer, until: float) -> None:
        """Until ``until``, or a change on the server. Raises what ends a call early."""
        run = active()
        self._waiter = run.current
        assert self._waiter is not None
        server.changed.append(self._waiter)
        try:
            run.block(f"waits for {self.path}", min(until, self._read_ends))
        finally:
            if self._waiter in server.changed:
                server.changed.remove(self._waiter)
            self._waiter = None
        self.check(server)
        if until > run.now >= self._read_ends:
            raise httpx.ReadTimeout("the read timed out")

    def check(self, server: VirtualServer) -> None:
        if self._cut:
            raise httpx.ReadError("the socket was shut down")
        if not server.alive:
            raise httpx.RemoteProtocolError("the server went away")


class Network:
    """Who answers where."""

    def __init__(self) -> None:
        self.servers: dict[str, VirtualServer] = {}


class VirtualTransport(OurTransport):
    """Carries weights to one server, in buckets to a stock one, whose group lives from push to push."""

    def __init__(self, servers: Mapping[str, VirtualServer]) -> None:
        super().__init__()
        self._servers = servers
        self._server: VirtualServer | None = None
        self._joined: str | None = None
        self._version = 0

    def open(self, push: Delivery) -> str:
        session, deadline = push.session, push.deadline
        server, self._version = self._servers[session.base_url], push.spec.identity.version
        if not server.stock:
            self._offer(push, wire.WeightWay.STREAM, port=1, num_bytes=push.snapshot.file.num_bytes)
        elif self._server is None or self.is_lost():
            session.get(wire.WORLD_SIZE, deadline)
            session.post(wire.CLOSE_COMMUNICATOR, {}, deadline)
            session.post(wire.INIT_COMMUNICATOR, {}, deadline)
        else:
            return "virtual"
        self._server, self._joined = server, server.incarnation
        return "virtual"

    def carry(self, push: Delivery) -> None:
        assert self._server is not None
        tensors = push.snapshot.tensors
        if not self._server.stock:
            self._send(tensors, push.deadline)
            return
        for bucket in push.snapshot.buckets:
            push.require_wanted()
            push.session.post(wire.UPDATE_FLATTENED_PARAMS, {"metadatas": bucket.metadata}, push.deadline)
            self._send({spec.name: tensors[spec.name] for spec in bucket.specs}, push.deadline)

    def install(self, push: Delivery, sent: Mapping[str, str]) -> None:
        assert self._server is not None
        if self._server.stock:
            push.session.post(wire.PROCESS_WEIGHTS, {}, push.deadline)
        else:
            super().install(push, sent)

    def _send(self, tensors: Mapping[str, Any], deadline: Deadline) -> None:
        server = self._server
        assert server is not None
        active().point("sends a bucket")
        if delay_s := server.watcher.delay_of_round():
            active().block("a bucket travels", active().now + delay_s)
        fate = server.watcher.fate_of_push(server)
        if fate == "hangs":
            active().block("a transfer that hangs", active().now + FOR_EVER)
        if fate == "stalls":
            active().block("a transfer that stalls", active().now + deadline.remaining_s())
            raise ServerFault("the server did not take the weights by the deadline")
        if fate == "dies":
            server.die()
        if self.is_lost():
            raise ServerFault("the server was lost while weights were sent")
        server.take(tensors, self._version)

    def is_lost(self) -> bool:
        server = self._server
        return server is not None and (not server.alive or server.incarnation != self._joined)

    def close(self, deadline: Deadline) -> None:
        server, self._server = self._server, None
        if server is not None and server.stock:
            with ServerSession(server.url) as session:
                session.post(wire.CLOSE_COMMUNICATOR, {}, deadline)
