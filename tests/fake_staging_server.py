"""A server that speaks as ours and believes every checksum, so that a test may hold or break any call.

It maps the learner's memory as ours does and notes the bytes. ``hooks`` answer a path in its place, once for each
call; one that returns nothing has only looked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_rollout_server import Answer, Call, FakeRolloutServer, json_answer, output

from swift_stage2 import wire

INCARNATION = "one"
Hook = Callable[[Call], Answer | None]


class FakeStagingServer(FakeRolloutServer):
    """Proves every install whose calls nobody breaks."""

    def __init__(self, manifest: tuple[wire.TensorSpec, ...]) -> None:
        super().__init__(on_get=self._tell, on_reset=self._obey, on_infer=self._answer)
        self.manifest = manifest
        self.hooks: dict[str, Hook] = {}
        self.mapped: list[bytes] = []
        self.offered: list[dict[str, Any]] = []
        self.proofs: list[dict[str, Any]] = []

    @property
    def served(self) -> int | None:
        """The version that it serves."""
        return int(self.proofs[-1]["version"]) if self.proofs else None

    def _tell(self, call: Call) -> Answer:
        info = wire.ServerInfo(False, INCARNATION, state="serving", manifest=self.manifest)
        return self._hooked(call) or json_answer(info.to_json())

    def _answer(self, call: Call) -> Answer:
        stamp = {"weight_version": self.proofs[-1]["version"], "run_id": self.proofs[-1]["run_id"]}
        return self._hooked(call) or json_answer([output("a", **stamp)])

    def _obey(self, call: Call) -> Answer:
        if (answer := self._hooked(call)) is not None:
            return answer
        if call.path == wire.WEIGHTS:
            self.offered.append(call.body)
            self.mapped.append(Path(call.body["path"]).read_bytes())
            return json_answer(wire.OfferAnswer(True, "mapped").to_json())
        wanted = wire.InstallRequest.from_json(call.body)
        sums, names = wanted.checksums, tuple(wanted.checksums)
        proof = wire.WeightProof(wanted.run_id, wanted.version, INCARNATION, sums, sums, names).to_json()
        self.proofs.append(proof)
        return json_answer(proof)

    def _hooked(self, call: Call) -> Answer | None:
        hook = self.hooks.get(call.path)
        return hook(call) if hook is not None else None
