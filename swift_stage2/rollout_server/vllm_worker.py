"""Extends a vLLM worker beside ms-swift's own extension: it notes what it takes, and says what the model then holds.

Named to vLLM as ``worker_extension_cls``; imported in the workers only. Of our server it opens a snapshot, of a stock
one it takes what ms-swift's extension takes, in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension
from swift.rlhf_trainers.utils import finish_vllm_weight_reload, patch_vllm_moe_model_weight_loader

from swift_stage2.rollout_server.vllm_weights import LoadRecord, Report, in_place_of
from swift_stage2.weights.snapshot import ReadSnapshot
from swift_stage2.weights.tensors import checksums_by_name

_MAX_SHOWN = 5


def _noted(name: str) -> Callable[..., None]:
    """ms-swift's method, during which the record takes the place of the model's ``load_weights``."""
    method = getattr(WeightSyncWorkerExtension, name)

    def call(worker: Any, *args: Any, **kwargs: Any) -> None:
        record, model = worker._stage2_record(), worker.model_runner.model
        load_weights = model.load_weights

        def load(weights: Any, **rest: Any) -> Any:
            given = dict(weights)
            return record.load(given, checksums_by_name(given), load_weights, **rest)

        with record.noting(name), in_place_of(model, "load_weights", load):
            method(worker, *args, **kwargs)

    return call


class WeightSumsExtension(WeightSyncWorkerExtension):  # type: ignore[misc]
    """ms-swift's extension with loads that are traced. vLLM mixes it into its worker class."""

    def init_communicator(self, *args: Any, **kwargs: Any) -> None:
        self._stage2_record().begin()
        with self._stage2_record().noting("init_communicator"):
            super().init_communicator(*args, **kwargs)

    update_named_param = _noted("update_named_param")
    update_flattened_params = _noted("update_flattened_params")

    def process_weights_after_loading(self) -> None:
        """As ms-swift does it, but for errors, which ms-swift drops here."""
        with self._stage2_record().noting("process_weights_after_loading"):
            self._stage2_finish()
        self._stage2_record().end()

    def stage2_load_weights(self, path: str) -> str:
        """Loads all tensors of a snapshot in one call, and finishes them; why nothing was loaded, else an empty text.

        Raises:
            Exception: whatever vLLM's loader raises.
        """
        record, model = self._stage2_record(), self.model_runner.model
        record.begin()
        try:
            snapshot = ReadSnapshot.open(path)
        except OSError as error:
            return f"{error}; run learner, server and workers as one user in one container"
        read = checksums_by_name(snapshot.tensors)
        if wrong := snapshot.differing(read):
            return f"other checksums than were sent of {', '.join(wrong[:_MAX_SHOWN])}"
        patch_vllm_moe_model_weight_loader(model)
        record.load(snapshot.tensors, read, model.load_weights)
        self._stage2_finish()
        return ""

    def stage2_weight_sums(self, question: str) -> Report:
        """Tells what this worker took since the last push began, and what its model holds of it now."""
        return self._stage2_record().report(question, dict(self.model_runner.model.named_parameters()))

    def _stage2_finish(self) -> None:
        runner = self.model_runner
        with torch.no_grad():
            finish_vllm_weight_reload(
                runner.model, model_config=runner.model_config, target_device=self.device, strict=True
            )

    def _stage2_record(self) -> LoadRecord:
        record: LoadRecord = self.__dict__.setdefault("_stage2_load_record", LoadRecord())
        return record
