"""Lets vLLM's worker processes load staged weights for our server, and say what they then hold.

Named to vLLM as ``worker_extension_cls``; imported in the workers only.
"""

from __future__ import annotations

from typing import Any

import torch
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension
from swift.rlhf_trainers.utils import finish_vllm_weight_reload, patch_vllm_moe_model_weight_loader

from swift_stage2.rollout_server.engine import InstallFault
from swift_stage2.rollout_server.vllm_weights import LoadTrace, held_pieces, untouched
from swift_stage2.weights.snapshot import ReadSnapshot
from swift_stage2.weights.tensors import checksums_by_name

_MAX_SHOWN = 5


class StagedWeightsExtension(WeightSyncWorkerExtension):  # type: ignore[misc]
    """ms-swift's extension with a load that reports. vLLM mixes it into its worker class."""

    def stage2_load_weights(self, path: str, fault: str) -> dict[str, Any]:
        """Loads all tensors of a snapshot in one call, finishes them, and reads back what is resident.

        Returns:
            ``read``: checksum by name of each tensor as this process read it. ``pieces``: ``TensorPiece`` fields of
            every part that the model now holds. Or ``unreadable`` alone: why nothing was loaded.

        Raises:
            RuntimeError: a parameter of the model was left out.
            Exception: whatever vLLM's loader raises.
        """
        model = self.model_runner.model
        try:
            snapshot = ReadSnapshot.open(path)
        except OSError as error:
            return {"unreadable": f"{error}; run learner, server and workers as one user in one container"}
        weights, read = snapshot.tensors, checksums_by_name(snapshot.tensors)
        if wrong := snapshot.differing(read):
            return {"unreadable": f"other checksums than were sent of {', '.join(wrong[:_MAX_SHOWN])}"}
        patch_vllm_moe_model_weight_loader(model)
        trace = LoadTrace(weights, drop_copies=fault == InstallFault.SKIP_COPY)
        with torch.no_grad():
            with trace:
                model.load_weights(weights=list(weights.items()))
            finish_vllm_weight_reload(
                model, model_config=self.model_runner.model_config, target_device=self.device, strict=True
            )
            if fault == InstallFault.FLIP_ELEMENT:
                next(model.parameters()).data.view(-1)[0] += 1
        parameters, parts = dict(model.named_parameters()), trace.parts(read)
        if left_out := untouched(parts, parameters):
            raise RuntimeError(
                f"a push must reach every parameter of the engine, got num_left_out={len(left_out)}: "
                f"{', '.join(left_out[:_MAX_SHOWN])}"
            )
        return {"read": read, "pieces": [list(piece) for piece in held_pieces(parts, parameters.values())]}
