"""Seams to ms-swift that both engines use: nothing is opened by name, no foreign code runs, tensors are named.

Imported on the engine's thread: ms-swift takes seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from PIL import Image
from transformers import dynamic_module_utils

from swift_stage2.compat import declare_operators
from swift_stage2.errors import SampleError, UserError
from swift_stage2.rollout_server.jobs import GenerationRequest, JobAborted
from swift_stage2.servers.image_opening import decode_image
from swift_stage2.servers.protocol import TensorSpec

declare_operators()  # before the first import of ms-swift, which imports torchvision

from swift.model import get_model_processor  # noqa: E402


def decode_images(request: GenerationRequest, is_aborted: Callable[[], bool]) -> list[Image.Image]:
    """The request's images as RGB. Raises JobAborted once ``is_aborted``, or SampleError for what is no image."""
    images = []
    for image in request.conversation.get("images", ()):
        if is_aborted():
            raise JobAborted
        images.append(decode_image(image))
    return images


def seal_template(template: Any) -> None:
    """Changes this one template, in place: pictures are the only images, tags stay text, encoding is tried once."""
    template._load_image = _only_pictures
    template._replace_image_tags = lambda inputs: None
    # ms-swift encodes up to three times; an error of the data comes back every time. Its other wrapper is this one.
    template.encode = torch.inference_mode()(partial(inspect.unwrap(type(template).encode), template))


def _only_pictures(image: Any, load_images: bool) -> Image.Image:
    if not isinstance(image, Image.Image):
        raise SampleError("a request's images are opened before they are encoded, got one by name")
    return image


def refuse_foreign_code() -> None:
    """From now on, a checkpoint that wants to run code of its own raises UserError in this process.

    Called before a model is loaded. ms-swift names ``trust_remote_code=True`` in many places; whatever they say,
    transformers loads such code here.
    """
    dynamic_module_utils.get_class_in_module = _refuse
    dynamic_module_utils.get_cached_module_file = _refuse


def _refuse(*arguments: object, **_: object) -> NoReturn:
    raise UserError(
        f"a checkpoint may not bring its own code, got {arguments[0]}; read that code, then start the server with "
        "--trust-remote-code"
    )


def checkpoint_manifest(model_dir: str, model_type: str, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Name, shape and dtype of every parameter as the learner names it, tied weights once; floats in ``dtype``.

    The model is built as ms-swift builds the learner's, on the meta device: an engine that fuses parameters cannot
    tell.
    """
    with torch.device("meta"):
        model, _ = get_model_processor(model_dir, model_type=model_type, return_dummy_model=True)
    kinds = {name: dtype if p.is_floating_point() else p.dtype for name, p in model.named_parameters()}
    return tuple(
        TensorSpec(name, tuple(parameter.shape), str(kinds[name]).removeprefix("torch."))
        for name, parameter in model.named_parameters()
    )
