"""Extends a vLLM worker of ``swift rollout`` beside ms-swift's own extension: it notes what it takes, and tells it.

Named to vLLM as ``worker_extension_cls``; imported in the workers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from swift.pipelines.infer.rollout import WeightSyncWorkerExtension
from swift.rlhf_trainers.utils import finish_vllm_weight_reload

from swift_stage2.stock_proof.load_record import LoadRecord, Report


def _noted(name: str, around: str) -> Callable[..., None]:
    """ms-swift's method inside of our context ``around``."""
    method = getattr(WeightSyncWorkerExtension, name)

    def call(worker: Any, *args: Any, **kwargs: Any) -> None:
        with getattr(worker, around)(name):
            method(worker, *args, **kwargs)

    return call


class WeightSumsExtension(WeightSyncWorkerExtension):  # type: ignore[misc]
    """ms-swift's extension; takes what that takes, in the same way. vLLM mixes it into its worker class."""

    def init_communicator(self, *args: Any, **kwargs: Any) -> None:
        self._stage2_record().begin()
        with self._stage2_record().noting("init_communicator"):
            super().init_communicator(*args, **kwargs)

    update_named_param = _noted("update_named_param", "_stage2_loading")
    update_flattened_params = _noted("update_flattened_params", "_stage2_loading")
    update_adapter_flattened_param = _noted("update_adapter_flattened_param", "_stage2_adding")
    update_adapter_param = _noted("update_adapter_param", "_stage2_adding")

    def process_weights_after_loading(self) -> None:
        """As ms-swift does it, but for errors, which ms-swift drops here."""
        record, runner = self._stage2_record(), self.model_runner
        with record.noting("process_weights_after_loading"):
            finish_vllm_weight_reload(
                runner.model, model_config=runner.model_config, target_device=self.device, strict=True
            )
        record.end()

    def stage2_weight_sums(self, question: str) -> Report:
        """Tells what this worker took since the last push began, and what its model holds of it now."""
        return self._stage2_record().report(question, dict(self.model_runner.model.named_parameters()))

    def _stage2_record(self) -> LoadRecord:
        record: LoadRecord = self.__dict__.setdefault("_stage2_load_record", LoadRecord())
        return record

    @contextmanager
    def _stage2_loading(self, what: str) -> Iterator[None]:
        record, model = self._stage2_record(), self.model_runner.model
        load_weights = model.load_weights

        def load(weights: Any, **rest: Any) -> Any:
            return record.load(weights, load_weights, **rest)

        with record.loading(what), _in_place_of(model, "load_weights", load):
            yield

    @contextmanager
    def _stage2_adding(self, what: str) -> Iterator[None]:
        record, add_lora = self._stage2_record(), self.add_lora

        def add(request: Any) -> Any:
            record.take_adapter(request.lora_tensors)
            return add_lora(request)

        with record.adding(what), _in_place_of(self, "add_lora", add):
            yield


@contextmanager
def _in_place_of(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside; afterwards what it was, the class's own included."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
