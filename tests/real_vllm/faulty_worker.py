"""Proves weights as our server and the plugin do, in a worker whose loader goes wrong as FAULT_FILE says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from swift_stage2.rollout_server.vllm_worker import WeightSumsExtension, in_place_of

VARIABLE = "STAGE2_TEST_FAULT_FILE"


class FaultyExtension(WeightSumsExtension):
    """``drop NAME``: the loader never sees that tensor. ``raise``: it fails. ``flip``: one element changes after it."""

    def update_named_param(self, *args: Any, **kwargs: Any) -> None:
        with in_place_of(self.model_runner.model, "load_weights", self._stage2_faulty_loader()):
            super().update_named_param(*args, **kwargs)

    def update_flattened_params(self, *args: Any, **kwargs: Any) -> None:
        with in_place_of(self.model_runner.model, "load_weights", self._stage2_faulty_loader()):
            super().update_flattened_params(*args, **kwargs)

    def stage2_load_weights(self, path: str) -> str:
        with in_place_of(self.model_runner.model, "load_weights", self._stage2_faulty_loader()):
            return super().stage2_load_weights(path)

    def _stage2_finish(self) -> None:
        super()._stage2_finish()
        if _fault() == ["flip"]:
            parameter = next(self.model_runner.model.parameters())
            words = parameter.data.view(torch.int32).view(-1)
            words[len(words) // 2] ^= 1

    def _stage2_faulty_loader(self) -> Any:
        load_weights = self.model_runner.model.load_weights

        def load(weights: Any) -> Any:
            match _fault():
                case ["raise"]:
                    raise ValueError("a loader that fails")
                case ["drop", name]:
                    weights = [(each, tensor) for each, tensor in weights if each != name]
            return load_weights(weights=weights)

        return load


def _fault() -> list[str]:
    path = Path(os.environ[VARIABLE])
    return path.read_text(encoding="utf-8").split() if path.exists() else []
