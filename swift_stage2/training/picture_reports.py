"""Pictures of evaluations for W&B and trackio, where Hugging Face's own callbacks report the run to them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.integrations.integration_utils import TrackioCallback, WandbCallback

logger = logging.getLogger(__name__)

_MODULES = {WandbCallback: "wandb", TrackioCallback: "trackio"}


class PictureReports:
    """Programs that a run reports to. The main thread's, because trackio knows its run on that thread alone."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = list(modules)

    @classmethod
    def of(cls, callbacks: Iterable[Any]) -> PictureReports | None:
        """By the run's callbacks; None: no one would take a picture."""
        given = [name for kind, name in _MODULES.items() if any(isinstance(each, kind) for each in callbacks)]
        return cls(given) if given else None

    def __call__(self, step: int, pictures: Mapping[str, bytes]) -> None:
        """Logs encoded ``pictures`` by name at ``step``. One that fails is told once, and left out from then on."""
        for name in list(self._modules):
            try:
                module = import_module(name)
                # Both copy a file, where they would encode a picture anew
                with TemporaryDirectory() as folder:
                    images = {}
                    for row, content in pictures.items():
                        path = Path(folder, f"{row}.jpg")
                        path.write_bytes(content)
                        images[f"eval/pictures/{row}"] = module.Image(str(path))
                    module.log({**images, "train/global_step": step})
            except Exception as error:  # of a program that training does not need
                logger.warning(
                    "%s takes no pictures of evaluations: %s: %s", name, type(error).__name__, error
                )
                self._modules.remove(name)
