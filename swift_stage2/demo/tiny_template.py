"""Registers the demo's tiny Qwen2.5-VL with ms-swift as model and template type ``stage2_tiny_vl``.

Usable as a module and as a file for ``--external_plugins``. The model is found by its local path and named
by ``model_type``; neither a hub id nor an architecture is registered, so nothing is looked up outside this
machine and real models are recognised as before. The only file of the demo that touches ms-swift.
"""

from __future__ import annotations

import os
from typing import Any

from swift_stage2.compat import declare_operators

declare_operators()  # before ms-swift imports torchvision

import torch  # noqa: E402
from swift.model import ModelArch, ModelMeta, get_model_processor, register_model  # noqa: E402
from swift.model.models.qwen import Qwen2_5VLLoader  # noqa: E402
from swift.template import get_template, register_template  # noqa: E402
from swift.template.templates.qwen import Qwen2_5VLTemplate, QwenTemplateMeta  # noqa: E402

TINY_VL = "stage2_tiny_vl"


class TinyVLTemplate(Qwen2_5VLTemplate):  # type: ignore[misc]
    """The Qwen2.5-VL template with the small vocabulary's token ids and plain JSON answers."""

    image_token_id = 6
    video_token_id = 7

    def init_env_args(self) -> None:
        """Reads ms-swift's environment, except for the box format: the tiny model speaks only JSON."""
        super().init_env_args()
        self.bbox_format = "new"


def register() -> None:
    """Registers model and template; calling it again changes nothing."""
    # ms-swift imports a plugin file under a name of its own, by which no other process could unpickle the
    # template; so the class registered is always the importable module's.
    from swift_stage2.demo.tiny_template import TinyVLTemplate as ImportableTemplate

    register_template(
        QwenTemplateMeta(TINY_VL, template_cls=ImportableTemplate, default_system=None), exist_ok=True
    )
    register_model(
        ModelMeta(
            TINY_VL,
            [],
            Qwen2_5VLLoader,
            template=TINY_VL,
            model_arch=ModelArch.qwen2_vl,
            is_multimodal=True,
        ),
        exist_ok=True,
    )


def load_tiny_model(directory: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Model (float32, on the CPU) and processor of a copy of ``stage1``, or of one that is trained further."""
    model, processor = get_model_processor(
        os.fspath(directory), model_type=TINY_VL, torch_dtype=torch.float32, device_map="cpu"
    )
    return model, processor


def tiny_template(model: Any, processor: Any) -> Any:
    """The registered template in mode ``train``, bound to a model as ms-swift's own pipelines bind it."""
    template = get_template(processor, template_type=TINY_VL)
    template.model = model
    template.set_mode("train")
    return template


register()
