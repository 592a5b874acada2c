"""Whether the server has a place for every tensor that a sync round sends, and no place that none fills.

Our server says names, shapes and dtypes. A stock one says vLLM's own names only, some of them fused from several
tensors; those are compared through the known fusing, and what that leaves open is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_stage2.doctor.finding import Outcome, failed, ok, warning
from swift_stage2.servers.protocol import ServerInfo, TensorSpec
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import ask_state_keys
from swift_stage2.weights.stock_names import differing_names

_NUM_SHOWN = 2
_SAME_MODEL = "start the server with the learner's model"


def check_parameters(
    session: ServerSession, info: ServerInfo, manifest: Sequence[TensorSpec], timeout_s: float
) -> Outcome[None]:
    """Compares the learner's manifest with what the server says of itself."""
    if not info.stock:
        return compare_manifests(manifest, info.manifest)
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


def _num_elements(spec: TensorSpec) -> int:
    number = 1
    for size in spec.shape:
        number *= size
    return number
