"""Who answers on a server's port, and whether with the learner's model: its name, its files, its parameters."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swift_stage2.config import DecodingConfig, RolloutConfig
from swift_stage2.doctor.examination import Outcome, failed, left_out, ok, warning
from swift_stage2.errors import FaultKind, ProtocolError, ServerFault, cut_remedy
from swift_stage2.preflight.servers import cannot_resume, several_turns
from swift_stage2.servers import protocol, vllm_serve
from swift_stage2.servers.protocol import INSTALLING_STATE, RefusalReason, ServerInfo, TensorSpec
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import ask_state_keys, ask_world_size, differing_names
from swift_stage2.whole_file import read_regular, read_regular_text

ONE_TOKEN = DecodingConfig(temperature=0.0, max_new_tokens=1)
_LOOK_TIMEOUT_S = 10.0
_LOADING = "state=loading"
_OTHER_RUN = (
    "end that run, or wait until its round is over, and run the doctor again: runs cannot share a server"
)

_IN_A_ROUND = (str(RefusalReason.ROUND_OPEN), INSTALLING_STATE)
_HASH_CHARACTERS = 8
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
_NUM_SHOWN = 2
_SAME_MODEL = "start the server with the learner's model"


def is_unproven(info: ServerInfo) -> bool:
    """Whether the server refuses rollouts until a round proves its weights."""
    return info.state == str(RefusalReason.UNPROVEN)


def check_identity(session: ServerSession, rollout: RolloutConfig, key: str) -> Outcome[ServerInfo]:
    """Asks ``/stage2/info/``, and of a stock server what only a rollout server answers."""
    outcome = _identify(session, rollout, key)
    if outcome.value is not None and (refusal := cannot_resume(rollout, session.base_url, outcome.value)):
        return failed(*cut_remedy(refusal))
    return outcome


def _identify(session: ServerSession, rollout: RolloutConfig, key: str) -> Outcome[ServerInfo]:
    try:
        session.get(protocol.HEALTH, Deadline(min(_LOOK_TIMEOUT_S, rollout.request_timeout_s)))
    except ServerFault as fault:  # any other is told better by what is asked below
        if fault.kind is FaultKind.LATE:
            return failed(
                f"{session.base_url} takes connections and answers nothing: {fault}",
                "wait if it is loading, or a stock server that is busy with rollouts, and run the doctor again; else "
                "read its log and restart it",
            )
    started = time.perf_counter()
    try:  # a stock server answers after the /infer/ that runs, so as long as one may take
        info = session.info(Deadline(rollout.request_timeout_s))
        latency_ms = 1e3 * (time.perf_counter() - started)
        if info.chat_model is not None:
            return _describe_plain_vllm(info, latency_ms)
        if info.stock:
            return _look_at_stock(session, rollout, key, latency_ms)
        return _describe_ours(info, latency_ms)
    except ServerFault as fault:
        return _explain(fault, rollout, key)


def check_model(
    session: ServerSession, info: ServerInfo, rollout: RolloutConfig, expected: str, key: str
) -> Outcome[ServerInfo]:
    """Whether the server serves the learner's model, by name; a stock one names it in its replies only."""
    model = info.model
    if model is None:
        try:
            reply = session.post(
                protocol.INFER, protocol.one_token_request(), Deadline(rollout.request_timeout_s)
            )
            protocol.parse_infer_reply(reply, 1)
        except ServerFault as fault:
            return _explain(fault, rollout, key)
        except ProtocolError as error:
            return failed(
                f"{session.base_url}{protocol.INFER} answers, but not as swift rollout does: {error}",
                f"start swift-stage2 rollout or swift rollout (ms-swift 4.6) at {key}.base_url",
            )
        model = _served_model(reply)
    known = replace(info, model=model)
    if model is None:
        return warning(
            "the server does not say which model it serves",
            f"make sure that the server was started with {expected}",
            known,
        )
    if Path(model).name != Path(expected).name:
        return failed(
            f"serves {model}, the learner trains {expected}",
            f"restart the server with the learner's model: --model {expected}; or correct {key}.base_url",
        )
    return ok(f"serves {model}", known)


def busy_with(session: ServerSession, info: ServerInfo) -> str:
    """For whom our server works at this moment; empty if for nobody, and always of a stock one, which does not say.

    Raises:
        ServerFault: it does not answer.
    """
    if info.stock:
        return ""
    deadline = Deadline(_LOOK_TIMEOUT_S)
    if session.info(deadline).state in _IN_A_ROUND:
        return "a sync round of another run is open"
    health = session.get(protocol.HEALTH, deadline)
    counts = [health.get(name) for name in ("num_running", "num_waiting")] if isinstance(health, dict) else []
    number = sum(count for count in counts if isinstance(count, int))
    return f"it is making {number} completion(s) for somebody else" if number else ""


def _look_at_stock(
    session: ServerSession, rollout: RolloutConfig, key: str, latency_ms: float
) -> Outcome[ServerInfo]:
    try:
        # First: a merger's never waits for rollouts
        health = session.get(protocol.HEALTH, Deadline(_LOOK_TIMEOUT_S))
        size = ask_world_size(session, Deadline(rollout.request_timeout_s))
        if refusal := several_turns(session, Deadline(rollout.request_timeout_s)):
            return failed(*cut_remedy(refusal))
    except ServerFault as fault:
        if not fault.is_foreign:
            return _explain(fault, rollout, key)
        if missing := vllm_serve.missing_routes_remedy(session, Deadline(_LOOK_TIMEOUT_S)):
            return failed(f"{session.base_url} is no rollout server", missing)
        return failed(f"{session.base_url} is no rollout server: {fault}", _foreign_fix(key))
    upstream = health.get("upstream") if isinstance(health, dict) else None  # only a merger names one
    behind = f" at {upstream} behind swift-stage2 merge" if isinstance(upstream, str) else ""
    return ok(
        f"stock swift rollout{behind}, {size} worker(s), answered in {latency_ms:.0f} ms",
        ServerInfo(stock=True),
    )


def _describe_plain_vllm(info: ServerInfo, latency_ms: float) -> Outcome[ServerInfo]:
    return ok(
        f"vllm serve, asked for {info.chat_model}, answered in {latency_ms:.0f} ms: weights by vLLM's own transfer, "
        "proven by a canary alone; no staging, no abort, no checksums",
        info,
    )


def _describe_ours(info: ServerInfo, latency_ms: float) -> Outcome[ServerInfo]:
    weights = (
        f"version {info.weight_version} of run {info.run_id}" if info.run_id else "those of its checkpoint"
    )
    resumes = "resumes aborted rollouts" if info.resume else "cannot resume aborted rollouts"
    found = (
        f"swift-stage2 rollout ({info.engine}), {info.state}, weights: {weights}, {resumes}, answered in "
        f"{latency_ms:.0f} ms"
    )
    if info.state in _IN_A_ROUND:
        return failed(f"{found}: a sync round of another run is open", _OTHER_RUN)
    if is_unproven(info):
        return warning(
            found, "nothing to write: the next proven sync round, also the doctor's, mends it", info
        )
    return ok(found, info)


def _explain(fault: ServerFault, rollout: RolloutConfig, key: str) -> Outcome[ServerInfo]:
    name = rollout.api_key_env
    if fault.refuses_key:
        told = "another key than the server's" if rollout.api_key() else "no key"
        return failed(
            f"the server refuses this caller (status {fault.status}): {name} holds {told}",
            f"export {name}=<the key that the server was started with>",
        )
    if fault.is_foreign:
        return failed(str(fault), _foreign_fix(key))
    if _LOADING in str(fault):
        return failed(str(fault), "wait until the server has loaded its model, and run the doctor again")
    if fault.kind is FaultKind.LATE:
        return failed(
            str(fault),
            f"write a longer rollout.request_timeout_s than {rollout.request_timeout_s:g}; if the server is silent for "
            "longer than its work takes, read its log and restart it",
        )
    return failed(str(fault), "read the server's log and restart it; then run the doctor again")


def _foreign_fix(key: str) -> str:
    return f"end what listens there, or correct {key}.base_url: it is no rollout server"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """None where a directory has no such thing."""

    tokenizer: str | None
    chat_template: str | None
    image_processor: str | None
    vocabulary_size: int | None
    dtype: str | None

    @classmethod
    def read(cls, directory: Path) -> Fingerprint:
        """Raises OSError or ValueError for a directory that is no readable checkpoint."""
        config = _read_json(directory / "config.json")
        tokenizer_files = [directory / name for name in _TOKENIZER_FILES]
        nested = config.get("text_config")
        text_config = nested if isinstance(nested, dict) else config
        size = text_config.get("vocab_size", config.get("vocab_size"))
        return cls(
            tokenizer=_hash_of(b"".join(read_regular(file) for file in tokenizer_files if file.is_file())),
            chat_template=_hash_of(_chat_template(directory).encode()),
            image_processor=_hash_of(_image_processor(directory)),
            vocabulary_size=size if isinstance(size, int) else None,
            dtype=config.get("dtype") or config.get("torch_dtype") or text_config.get("dtype"),
        )

    def __str__(self) -> str:
        return (
            f"tokenizer {self.tokenizer}, chat template {self.chat_template}, image processor "
            f"{self.image_processor}, vocabulary {self.vocabulary_size}, dtype {self.dtype}"
        )


def check_same_files(learner: Path, server: Path | None) -> Outcome[None]:
    """Compares the learner's directory with the server's, where that is known and on this machine."""
    own = Fingerprint.read(learner)
    if server is None or not (server / "config.json").is_file():
        return left_out(f"the server's directory cannot be looked into from here; learner: {own}")
    theirs = Fingerprint.read(server)
    names = ("tokenizer", "chat_template", "image_processor", "vocabulary_size")
    differing = [name for name in names if getattr(own, name) != getattr(theirs, name)]
    if differing:
        shown = ", ".join(
            f"{name} {getattr(own, name)} against {getattr(theirs, name)}" for name in differing
        )
        return failed(
            f"learner and server differ: {shown}",
            f"restart the server with the learner's model: --model {learner}",
        )
    where = "the same directory" if server.resolve() == learner.resolve() else f"equal in {server}"
    return ok(f"{own}; {where}")


def _chat_template(directory: Path) -> str:
    if (directory / "chat_template.jinja").is_file():
        return read_regular_text(directory / "chat_template.jinja")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _read_json(directory / name).get("chat_template")
        if template:
            return json.dumps(template, sort_keys=True)
    return ""


def _image_processor(directory: Path) -> bytes:
    settings = _read_json(directory / "preprocessor_config.json")
    settings = settings or _read_json(directory / "processor_config.json").get("image_processor") or {}
    return json.dumps(settings, sort_keys=True).encode() if settings else b""


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    data = json.loads(read_regular(file))
    return data if isinstance(data, dict) else {}


def _hash_of(content: bytes) -> str | None:
    return hashlib.sha256(content).hexdigest()[:_HASH_CHARACTERS] if content else None


def check_parameters(
    session: ServerSession, info: ServerInfo, manifest: Sequence[TensorSpec], timeout_s: float
) -> Outcome[None]:
    """Compares the learner's manifest with what the server says of itself."""
    if not info.stock:
        return compare_manifests(manifest, info.manifest)
    keys: Sequence[str] | None
    if info.chat_model is not None:
        digests = vllm_serve.ask_digests(session, Deadline(timeout_s))
        keys = [name.rpartition(":")[2] for name in digests]
    else:
        keys = ask_state_keys(session, Deadline(timeout_s))
    if not keys:
        return warning(
            "the stock server does not say which tensors it holds",
            "nothing to write; the dry sync round below shows whether it takes the learner's",
        )
    return compare_names(manifest, keys)


def compare_manifests(learner: Sequence[TensorSpec], server: Sequence[TensorSpec]) -> Outcome[None]:
    """Names and shapes must agree; dtypes may differ, the learner then sends the server's."""
    own, theirs = ({spec.name: spec for spec in side} for side in (learner, server))
    differing = [
        f"{name}: learner {_shape(own.get(name))}, server {_shape(theirs.get(name))}"
        for name in sorted(own.keys() | theirs.keys())
        if _shape(own.get(name)) != _shape(theirs.get(name))
    ]
    if differing:
        return failed(f"{len(differing)} tensor(s) differ: {'; '.join(differing[:_NUM_SHOWN])}", _SAME_MODEL)
    dtypes = _dtypes(learner), _dtypes(server)
    num_parameters = sum(math.prod(spec.shape) for spec in learner)
    found = f"{len(own)} tensors, {num_parameters / 1e6:.2f} M parameters: names and shapes equal"
    if dtypes[0] == dtypes[1]:
        return ok(f"{found}; {dtypes[0]} on both sides")
    return warning(
        f"{found}; learner {dtypes[0]}, server {dtypes[1]}: weights are converted, and a canary cannot be compared",
        f"start the server in the learner's dtype ({dtypes[0]}), or leave it: checksums prove the converted weights",
    )


def compare_names(learner: Sequence[TensorSpec], server_keys: Sequence[str]) -> Outcome[None]:
    """vLLM's names against the learner's, fused as vLLM fuses them. Shapes and dtypes stay unknown."""
    num_held = len(set(server_keys))
    rest = differing_names((spec.name for spec in learner), server_keys)
    if not rest:
        return ok(
            f"{len(learner)} tensors fill all {num_held} of vLLM's (q, k, v and gate, up fused); shapes and dtypes "
            "cannot be asked of a stock server"
        )
    if len(rest) > num_held / 2:
        return failed(f"{len(rest)} of {num_held} names differ, {rest[0]} for one", _SAME_MODEL)
    return warning(
        f"cannot be compared fully: vLLM names {len(rest)} tensor(s) otherwise, {', '.join(rest[:_NUM_SHOWN])} for one",
        "nothing to write; the dry sync round below shows whether the server takes the weights",
    )


def _shape(spec: TensorSpec | None) -> str:
    return "none" if spec is None else "x".join(map(str, spec.shape)) or "scalar"


def _dtypes(manifest: Sequence[TensorSpec]) -> str:
    return ", ".join(sorted({spec.dtype for spec in manifest}))


def _served_model(data: Any) -> str | None:
    """The model that an ``/infer/`` reply names: a path, or the last part of one. None if it names none."""
    output = data[0] if isinstance(data, list) and data else None
    response = output.get("response") if isinstance(output, Mapping) else None
    model = response.get("model") if isinstance(response, Mapping) else None
    return model if isinstance(model, str) else None
