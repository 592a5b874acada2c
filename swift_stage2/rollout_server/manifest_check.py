"""Compares what a round promises with the model, what a bucket holds with the promise, what came with both.

Pure comparisons of names, shapes and dtypes; a difference is an error that names it. Called by WeightRounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_stage2.errors import RoundFailed, RoundRefused
from swift_stage2.rollout_server.weight_receiver import Bucket, ReceivedWeights
from swift_stage2.servers.protocol import RefusalReason, TensorSpec

_MAX_SHOWN = 5


def compare_manifests(own: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> None:
    """Raises RoundRefused, with up to five differences, unless both hold the same tensors in any order."""
    here = {spec.name: spec for spec in own}
    there = {spec.name: spec for spec in theirs}
    differences = [
        f"{name}: server {_shown(here.get(name))}, learner {_shown(there.get(name))}"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if differences:
        raise RoundRefused(
            RefusalReason.MANIFEST_DIFFERS,
            f"a round must bring the model's own tensors, got num_differences={len(differences)}: "
            f"{'; '.join(differences[:_MAX_SHOWN])}; serve the model that is trained",
        )


def compare_bucket(manifest: Sequence[TensorSpec], bucket: Bucket, announced: set[str]) -> None:
    """Adds the bucket's tensors to those that the round has ``announced``: all together are one manifest at most.

    Raises RoundFailed for a tensor that the manifest does not hold with that shape and dtype, or that comes again.
    """
    known = {spec.name: spec for spec in manifest}
    for entry in bucket.entries:
        if entry.spec.name in announced:
            raise RoundFailed(f"a round must announce every tensor once, got {entry.spec.name} again")
        announced.add(entry.spec.name)
        if known.get(entry.spec.name) != entry.spec:
            raise RoundFailed(
                f"a bucket must hold tensors of the round's manifest, got {entry.spec.name} "
                f"{_shown(entry.spec)}, manifest {_shown(known.get(entry.spec.name))}"
            )


def require_all(manifest: Sequence[TensorSpec], received: ReceivedWeights) -> None:
    """Raises RoundFailed unless every tensor of the manifest has arrived."""
    missing = [spec.name for spec in manifest if spec.name not in received.tensors]
    if missing:
        raise RoundFailed(
            f"every tensor of the manifest must arrive, got num_missing={len(missing)}: "
            f"{', '.join(missing[:_MAX_SHOWN])}"
        )


def _shown(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype}{list(spec.shape)}"
