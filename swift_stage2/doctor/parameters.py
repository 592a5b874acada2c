"""Whether the server has a place for every tensor that a sync round sends, and no place that none fills.

Our server says names, shapes and dtypes. A stock one says vLLM's own names only, some of them fused from several
tensors; those are compared through the known fusing, and what that leaves open is said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from swift_stage2 import rollout_protocol as protocol
from swift_stage2.doctor.finding import Outcome, failed, ok, warning
from swift_stage2.rollout_protocol import ServerInfo, TensorSpec
from swift_stage2.server_session import Deadline, ServerSession

_NUM_SHOWN = 2
_SAME_MODEL = "start the server with the learner's model"

# The learner's name -> vLLM's, where several tensors become one.
_FUSINGS = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
# Hugging Face and vLLM nest the same modules in other orders of these.
_WRAPPERS = ("model.", "language_model.")


def check_parameters(
    session: ServerSession, info: ServerInfo, manifest: Sequence[TensorSpec], timeout_s: float
) -> Outcome[None]:
    """Compares the learner's manifest with what the server says of itself."""
    if not info.stock:
        return compare_manifests(manifest, info.manifest)
    reply = session.get(protocol.STATE_KEYS, Deadline(timeout_s))
    keys = reply.get("keys") if isinstance(reply, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or not keys:
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
    num_parameters = sum(_num_elements(spec) for spec in learner)
    found = f"{len(own)} tensors, {num_parameters / 1e6:.2f} M parameters: names and shapes equal"
    if dtypes[0] == dtypes[1]:
        return ok(f"{found}; {dtypes[0]} on both sides")
    return warning(
        f"{found}; learner {dtypes[0]}, server {dtypes[1]}: weights are converted, and a canary cannot be compared",
        f"start the server in the learner's dtype ({dtypes[0]}), or leave it: checksums prove the converted weights",
    )


def compare_names(learner: Sequence[TensorSpec], server_keys: Sequence[str]) -> Outcome[None]:
    """vLLM's names against the learner's, fused as vLLM fuses them. Shapes and dtypes stay unknown."""
    wanted = {vllm_name(spec.name): spec.name for spec in learner}
    held = {_unwrapped(key) for key in server_keys}
    homeless = sorted(name for fused, name in wanted.items() if fused not in held)
    unfilled = sorted(held - wanted.keys())
    tied = [name for name in (*homeless, *unfilled) if "lm_head" in name]
    rest = [name for name in (*homeless, *unfilled) if name not in tied]
    if not rest:
        return ok(
            f"{len(learner)} tensors fill all {len(held)} of vLLM's (q, k, v and gate, up fused); shapes and dtypes "
            "cannot be asked of a stock server"
        )
    if len(rest) > len(held) / 2:
        return failed(f"{len(rest)} of {len(held)} names differ, {rest[0]} for one", _SAME_MODEL)
    return warning(
        f"cannot be compared fully: vLLM names {len(rest)} tensor(s) otherwise, {', '.join(rest[:_NUM_SHOWN])} for one",
        "nothing to write; the dry sync round below shows whether the server takes the weights",
    )


def vllm_name(name: str) -> str:
    """Where vLLM keeps a tensor of the learner, without the wrapping modules in front."""
    for pattern, fused in _FUSINGS:
        name = pattern.sub(fused, name)
    return _unwrapped(name)


def _unwrapped(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _shape(spec: TensorSpec | None) -> str:
    return "none" if spec is None else "x".join(map(str, spec.shape)) or "scalar"


def _dtypes(manifest: Sequence[TensorSpec]) -> str:
    return ", ".join(sorted({spec.dtype for spec in manifest}))


def _num_elements(spec: TensorSpec) -> int:
    number = 1
    for size in spec.shape:
        number *= size
    return number
