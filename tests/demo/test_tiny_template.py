from __future__ import annotations

import socket
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from swift.model import MODEL_MAPPING

from scripts.make_stage1 import Stage1
from swift_stage2.demo import tiny_template
from swift_stage2.demo.scenes import SceneKind, grounding_row, make_scene
from swift_stage2.demo.tiny_template import TINY_VL, load_tiny_model

PLUGIN = Path(tiny_template.__file__)


def _row(seed: int, size: tuple[int, int] = (112, 112)) -> dict[str, Any]:
    scene = make_scene(SceneKind.SHAPES, seed, image_size=size)
    return {**grounding_row(scene.objects, ""), "images": [scene.image]}


@pytest.mark.parametrize("size", [(112, 112), (150, 100)])
def test_the_trained_prompt_is_the_prompt_of_inference(template: Any, size: tuple[int, int]) -> None:
    trained = template.encode(_row(0, size))
    start = next(i for i, label in enumerate(trained["labels"]) if label != -100)
    template.set_mode("transformers")
    asked = _row(0, size)
    del asked["objects"], asked["messages"][1:]
    assert list(template.encode(asked)["input_ids"]) == list(trained["input_ids"][:start])


def test_no_file_beside_the_plugin_hides_another_package() -> None:
    # ms-swift puts the plugin's folder first on sys.path, for this process and its workers.
    stems = [file.stem for file in PLUGIN.parent.glob("*.py") if file.stem != "__init__"]
    assert "tiny_template" in stems
    # A test before may have loaded it
    elsewhere = [entry for entry in sys.path if Path(entry) != PLUGIN.parent]
    assert [stem for stem in stems if PathFinder.find_spec(stem, elsewhere) is not None] == []


def test_loading_by_path_never_looks_outside(stage1_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"a connection was attempted to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert not MODEL_MAPPING[TINY_VL].model_groups
    _, processor = load_tiny_model(stage1_directory)
    assert processor.model_meta.model_type == TINY_VL


def test_the_box_format_needs_no_environment(stage1: Stage1, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWENVL_BBOX_FORMAT", "legacy")
    template = tiny_template.tiny_template(stage1.model, stage1.processor)
    assert "<|box_start|>" not in template.tokenizer.decode(template.encode(_row(1))["input_ids"])
