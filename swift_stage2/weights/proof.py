"""Shows that one server holds the weights it was sent: by checksums, by the canary's answer, or by both.

Our server has checksums, and a stock one that runs with the plugin ``stock_proof``; any other stock server's canary
shows no more than that nothing is grossly wrong, and every push asks it. Where checksums prove the bytes, the canary
shows the wiring, which changes with a process and not with a version. Called by a push; the trainer makes the learner's
``Canary``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from swift_stage2 import wire as protocol
from swift_stage2.config import Proof
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.errors import ServerFault
from swift_stage2.servers import infer_wire, vllm_serve
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import WeightSums, ask_world_size, sum_differences
from swift_stage2.weights.snapshot import WeightIdentity
from swift_stage2.wire import TensorSpec


def prove_server(
    session: ServerSession,
    spec: UpdateSpec,
    info: protocol.ServerInfo,
    sent: Mapping[str, str],
    *,
    sums_of: str | None = None,
) -> str:
    """Proves the weights whose checksums are ``sent`` and returns how: ``ServerReport.proof``.

    Ours has shown its checksums when it installed them. ``sums_of``: the incarnation of a stock server that can show
    checksums.

    Raises:
        ServerFault: the proof is wrong, missing, or cannot be had from this server.
    """
    shown = [] if info.stock else ["checksums"]
    if info.stock and spec.proof is Proof.CHECKSUM and sums_of is None:
        raise ServerFault(
            f"{session.base_url} is a stock server and has no checksums; write rollout.sync.proof: auto, or start it "
            "with the plugin stock_proof"
        )
    if sums_of is not None and spec.proof is not Proof.CANARY:  # before the canary: they name the tensor
        body = session.post(protocol.WEIGHT_SUMS, {}, spec.deadline)
        sums = session.read(protocol.WEIGHT_SUMS, WeightSums.from_json, body)
        restarted = ["the server was restarted during the push"] if sums.incarnation != sums_of else []
        _require_none(session, restarted + sums.problems(sent))
        shown.append("checksums")
    if spec.canary is not None and _ask_canary(session, spec, info, spec.canary):
        shown.append("canary")
    if not shown:
        raise ServerFault(
            f"{session.base_url} shows no checksums any more, and no canary was due; the next push asks one"
        )
    return "+".join(shown)


def check_proof(session: ServerSession, spec: UpdateSpec, sent: Mapping[str, str], body: Any) -> None:
    """Looks at what a server of ours shows after an install. Raises ServerFault: it does not hold what was sent."""
    proof = session.read(protocol.INSTALL, protocol.WeightProof.from_json, body)
    loaded = set(proof.loaded)
    problems = [
        *sum_differences("arrived", sent, proof.arrived),
        *sum_differences("resident", sent, proof.resident),
        *(f"not loaded: {name}" for name in sent if name not in loaded),
    ]
    if (proof.run_id, proof.version) != (spec.identity.run_id, spec.identity.version):
        problems.append(f"proof of run {proof.run_id}, version {proof.version}")
    _require_none(session, problems)


def _ask_canary(
    session: ServerSession, spec: UpdateSpec, info: protocol.ServerInfo, canary: CanaryAnswer
) -> bool:
    """Whether the answers had to agree, and did: dtypes are the same, as far as can be told."""
    if info.chat_model is not None:
        completions: Sequence[infer_wire.Completion] = vllm_serve.ask_canary(
            session, info.chat_model, (canary.request, canary.config), spec.deadline
        )
    else:
        # A stock server splits a call evenly among its data-parallel engines, at most as many as workers; a shorter
        # call leaves the last of them out.
        num_workers = ask_world_size(session, spec.deadline) if info.stock else 1
        num_copies = min(num_workers, MAX_REQUESTS_PER_POST)
        body = {"infer_requests": [canary.request] * num_copies, "request_config": canary.config}
        reply = session.post(protocol.INFER, body, spec.deadline)
        parse = partial(infer_wire.parse_infer_reply, num_requests=num_copies)
        completions = session.read(protocol.INFER, parse, reply)
    wanted = (spec.identity.run_id, spec.identity.version)
    for completion in completions if not info.stock else ():
        if (stamp := (completion.run_id, completion.weight_version)) != wanted:
            raise ServerFault(
                f"{session.base_url} answers the canary as (run, version) {stamp}, expected {wanted}"
            )
    must_agree = info.stock or spec.manifest == info.manifest
    num_wrong = sum(not canary.agrees(completion.first_turn) for completion in completions)
    if must_agree and num_wrong:
        num_all = len(completions)
        of_all = f" in {num_wrong} of {num_all} answers of its engines" if num_all > 1 else ""
        raise ServerFault(
            f"{session.base_url} answers the canary with other tokens than the learner{of_all}; if it lasts, it serves "
            "another model, or one that vLLM loads by other names: serve the learner's with swift-stage2 rollout"
        )
    return must_agree


def _require_none(session: ServerSession, problems: Sequence[str]) -> None:
    if problems:
        shown = "; ".join(problems[:3])
        raise ServerFault(f"{session.base_url} does not hold the weights it was sent: {shown}")


class Canary(Protocol):
    """One greedy question to the learner."""

    def answer(self) -> CanaryAnswer:
        """The learner's own answer under its present weights; same cost on every call.

        A collective of all ranks when no rank holds whole tensors (ZeRO-3), else called on rank 0 alone.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSpec:
    """What one push brings, and on what terms."""

    identity: WeightIdentity
    """As the snapshot's header says it."""
    manifest: tuple[TensorSpec, ...]  # the learner's own
    canary: CanaryAnswer | None  # None: none is due, checksums must prove
    proof: Proof
    deadline: Deadline  # of every call
    turn_s: float = 0.0  # how long a server waits until those before it have installed


# A token at least this close to the learner's first choice counts as tied with it. Logits of 16 to 32 have
# steps of an eighth in bfloat16, and a difference of two logits may be off by a few of them.
HALF_PRECISION_TIE_NATS = 0.5


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """The learner's greedy answer to one request, as it travels with a push. Engines differ in showing the end of turn.

    ``request`` and ``config`` are those of ``/infer/``. ``closing``: the ids that end a turn, which ``token_ids`` leave
    out.
    """

    request: Mapping[str, Any]
    config: Mapping[str, Any]
    token_ids: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    ties: tuple[frozenset[int], ...] = ()
    """By position, the ids that count as good as the learner's; empty where every token must be the same."""

    def agrees(self, token_ids: Sequence[int]) -> bool:
        """Whether a server's ``token_ids`` are this answer up to their first near tie.

        Tokens after a tie cannot be compared, because they follow another prefix.
        """
        theirs = self.without_closing(token_ids, self.closing)
        if theirs == self.token_ids:
            return True
        shorter = min(len(theirs), len(self.token_ids))
        at = next((n for n in range(shorter) if theirs[n] != self.token_ids[n]), shorter)
        if at >= len(self.ties):
            return False
        return (theirs[at] if at < len(theirs) else self.closing[0]) in self.ties[at]

    @staticmethod
    def without_closing(token_ids: Sequence[int], closing: Sequence[int]) -> tuple[int, ...]:
        """The ids of an answer before its end of turn, or before the part of that which is there."""
        tokens = tuple(token_ids)
        for length in range(len(closing), 0, -1):
            if tokens[-length:] == tuple(closing[:length]):
                return tokens[:-length]
        return tokens
