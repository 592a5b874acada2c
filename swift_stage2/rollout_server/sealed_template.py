"""Closes what a template of ms-swift would open by name, whatever text reached it, and takes its retries away.

The check of a request refuses such names before; this holds where a model's own template finds another way.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from PIL import Image

from swift_stage2.errors import SampleError


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
